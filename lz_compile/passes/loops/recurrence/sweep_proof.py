"""Whether what overwrites memory is a recurrence: run on random numbers at few elements, and held against one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lz_compile.ground.isolation import isolated
from lz_compile.passes.formula.layout import stride_order
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import known_tensor, read, tensor_of
from lz_compile.passes.loops.recurrence.prefix_scan import SMALL, recurrence
from lz_compile.passes.loops.roll.reroll import LEAST_POINTWISE
from lz_compile.passes.proof.agreement import agree
from lz_compile.passes.proof.running import run


@dataclass
class Region:
    """The calls that write to some memory and what they compute on the way; ``roots`` made that memory."""

    roots: set[fx.Node] = field(default_factory=set)
    given: set[fx.Node] = field(default_factory=set)
    writes: list[fx.Node] = field(default_factory=list)
    nodes: set[fx.Node] = field(default_factory=set)


@dataclass(frozen=True)
class Sweep:
    """``root[t] = decay[t] * root[t - 1] + root[t]`` along ``dim`` (``t + 1`` where it ``is_reversed``).

    ``order`` says which dimensions of the decay are those of the root.
    """

    region: Region
    root: fx.Node
    decay: fx.Node | None
    order: tuple[int, ...]
    dim: int
    is_reversed: bool


def proven(region: Region, nodes: Sequence[fx.Node], root: fx.Node, failed: dict[str, Exception]) -> Sweep | None:
    """The recurrence that ``nodes``, all calls of a region in graph order, leave in the memory of ``root``.

    What ``failed`` to run at other sizes is noted there, by the root's name.
    """
    decay = next(iter((region.roots | region.given) - {root}), None)
    tensors = [tensor_of(each) for each in (root, decay) if each is not None]
    if any(each is None or not each.is_floating_point() or _is_symbolic(each) for each in tensors):
        return None
    for dims in _times([list(each.shape) for each in tensors if each is not None]):
        given = _numbers(dict(zip([root] if decay is None else [root, decay], dims, strict=True)))
        try:
            computed = _reduced(nodes, given)[root]
        except Exception as error:  # noqa: BLE001 at other sizes than its own it may be anything, and time another dimension
            failed.setdefault(root.name, error)
            continue
        for order, is_reversed in itertools.product(_orders(root, decay, dims), (False, True)):
            factor = None if decay is None else given[decay].permute(order)
            if _agrees(computed, given[root], factor, dims[0], is_reversed):
                failed.pop(root.name, None)
                return Sweep(region, root, decay, order, dims[0], is_reversed)
    return None


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return not all(isinstance(size, int) for size in tensor.shape)


def _times(shapes: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Dimensions that may be time, one for each tensor."""
    for dims in itertools.product(*(range(len(shape)) for shape in shapes)):
        steps = {shape[dim] for shape, dim in zip(shapes, dims, strict=True)}
        if len(steps) == 1 and steps.pop() >= LEAST_POINTWISE:
            yield dims


def _orders(root: fx.Node, decay: fx.Node | None, dims: Sequence[int]) -> list[tuple[int, ...]]:
    """The orders in which the dimensions of the decay may be those of the root, its own first."""
    factor, drive = tensor_of(decay) if decay is not None else None, tensor_of(root)
    if factor is None or drive is None:
        return [()]
    if factor.dim() != drive.dim():
        return []

    def fits(order: tuple[int, ...]) -> bool:
        sizes = [factor.shape[place] for place in order]
        return order[dims[0]] == dims[1] and all(a in (1, b) for a, b in zip(sizes, drive.shape, strict=True))

    return [order for order in itertools.permutations(range(factor.dim())) if fits(order)]


def _agrees(
    computed: torch.Tensor, drive: torch.Tensor, decay: torch.Tensor | None, dim: int, is_reversed: bool
) -> bool:
    turned = [each.flip(dim) if is_reversed and each is not None else each for each in (decay, drive)]
    expected = recurrence(turned[0], turned[1], dim)  # type: ignore[arg-type]  # a drive is a tensor
    expected = expected.flip(dim) if is_reversed else expected
    return agree(expected, computed)


def _numbers(dims: Mapping[fx.Node, int]) -> dict[fx.Node, torch.Tensor]:
    """Numbers below one for every node, laid out in memory as it is, with few elements in other dimensions than time."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for node, dim in dims.items():
        tensor = known_tensor(node)
        order, back = stride_order(tensor.stride())
        sizes = [int(size) if place == dim else min(int(size), SMALL) for place, size in enumerate(tensor.shape)]
        dense = 2 * torch.rand([sizes[place] for place in order], generator=generator, dtype=torch.float64) - 1
        found[node] = dense.permute(back)
    return found


def _reduced(nodes: Sequence[fx.Node], given: Mapping[fx.Node, torch.Tensor]) -> Mapping[fx.Node, torch.Tensor]:
    """What is in memory in the end, at smaller sizes: those that reshapes spell out become those that the others leave."""
    with isolated():
        values = {node: value.clone() for node, value in given.items()}
        return run(nodes, values, adapt=_at_smaller_sizes)


def _at_smaller_sizes(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    call = read(node)
    if call is not None and call.name in ("view", "reshape") and isinstance(call.input, fx.Node):
        return "view", (args[0], _sizes(node, call.input, args[0])), {}
    return node.target, args, kwargs


def _sizes(node: fx.Node, of: fx.Node, value: torch.Tensor) -> list[int]:
    """The sizes of a view of ``value``: dimensions that stay keep theirs, those that are split or joined are as they were."""
    source, result = tensor_of(of), tensor_of(node)
    assert source is not None, "a view is of a tensor"
    assert result is not None, "a view is a tensor"
    old, new = [int(size) for size in source.shape], [int(size) for size in result.shape]
    sizes: list[int] = []
    i = j = 0
    while i < len(old) and j < len(new):
        first, second, here, there = old[i], new[j], i, j
        i, j = i + 1, j + 1
        while first != second:
            if first < second:
                first, i = first * old[i], i + 1
            else:
                second, j = second * new[j], j + 1
        is_one = i - here == j - there == 1
        if not is_one and list(value.shape[here:i]) != old[here:i]:
            raise ValueError(f"{told(node)} splits or joins dimensions that are smaller here")
        sizes += [value.shape[here]] if is_one else new[there:j]
    return [*sizes, *new[j:]]
