"""Recurrences that the source computes in logarithmic depth and in place: sweeps over strided pieces of a tensor.

``X[:, 1::2] += A[:, 1::2] * X[:, ::2]`` and the like overwrite the summands of ``h = a h + b`` with its states, forward or
backward in time. What happens to the memory is evaluated on random numbers in float64, at few elements in other dimensions
than time, and held against the recurrence, as in :mod:`prefix_scan`. The writes become one call of the op ``scan``.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lz_compile.lowering.ops.scan import OPERANDS
from lz_compile.passes.algebra import is_pointwise
from lz_compile.passes.edits.edit import MayEdit, anywhere
from lz_compile.passes.effects import Effects, grad_enabled
from lz_compile.passes.loops.loop_step_graph import Emitter
from lz_compile.passes.loops.prefix_scan import SMALL, recurrence
from lz_compile.passes.loops.reroll import LEAST_POINTWISE
from lz_compile.passes.proof.agreement import agree
from lz_compile.passes.proof.running import no_attribute, run
from lz_compile.passes.view import memory_of, read, tensor_of
from lz_compile.runtime import events, fingerprint
from lz_compile.runtime.isolation import isolated

_VIEWS = frozenset(
    {
        "view",
        "reshape",
        "transpose",
        "permute",
        "movedim",
        "swapaxes",
        "slice",
        "getitem",
        "narrow",
        "select",
        "unsqueeze",
    }
    | {"squeeze", "flatten", "unflatten", "expand", "flip", "t", "contiguous", "clone"}
)
_WRITES = frozenset({"setitem", "copy", "copy_"})
#: A sweep up and down over 16 steps is a dozen writes; fewer are other business.
_LEAST_WRITES = 4


def prefix_stores(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Put a call of the op where memory (of a node that may be edited) is overwritten by a recurrence; how many there are."""
    found, failed = 0, dict[str, Exception]()
    while (sweep := next((each for each in _sweeps(graph, failed) if may_edit(each.root)), None)) is not None:
        _replace(graph, sweep)
        found += 1
    for name, error in failed.items():
        text = f"what is written to {name} may be a recurrence; it stays as it is, for it does not run at other sizes"
        events.record("PROBE_FAILED", text, error, level=logging.INFO)
    return found


@dataclass
class _Region:
    """The calls that write to some memory and what they compute on the way; ``roots`` made that memory."""

    roots: set[fx.Node] = field(default_factory=set)
    given: set[fx.Node] = field(default_factory=set)
    writes: list[fx.Node] = field(default_factory=list)
    nodes: set[fx.Node] = field(default_factory=set)


@dataclass(frozen=True)
class _Sweep:
    """``root[t] = decay[t] * root[t - 1] + root[t]`` along ``dim`` (``t + 1`` where it ``is_reversed``).

    ``order`` says which dimensions of the decay are those of the root.
    """

    region: _Region
    root: fx.Node
    decay: fx.Node | None
    order: tuple[int, ...]
    dim: int
    is_reversed: bool


def _sweeps(graph: fx.Graph, failed: dict[str, Exception]) -> Iterator[_Sweep]:
    """The recurrences that memory is overwritten by; notes by name what ``failed`` to run."""
    if sum(_target(node) is not None for node in graph.nodes) < _LEAST_WRITES:
        return
    memory = _Memory(graph)
    seen: set[fx.Node] = set()
    for root in memory.written:
        if root in seen or len(memory.written[root]) < _LEAST_WRITES:
            continue
        region = memory.region(root)
        if region is None:
            continue
        seen |= region.roots
        read_later = [each for each in region.roots if any(memory.readers(each, region))]
        operands = region.roots | region.given
        if len(read_later) != 1 or len(operands) > 2 or any(tensor_of(each) is None for each in operands):
            continue
        if memory.is_closed(region):
            found = _proven(memory, region, read_later[0], failed)
            if found is not None:
                yield found


class _Memory:
    """Who writes to which memory, by the call that made it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.effects = Effects(graph)
        self.position = {node: place for place, node in enumerate(graph.nodes)}
        self.members: dict[fx.Node, list[fx.Node]] = {}
        self.root: dict[fx.Node, fx.Node] = {}
        first: dict[int, fx.Node] = {}
        for node in graph.nodes:
            memory = memory_of(node)
            if memory is not None:
                self.root[node] = first.setdefault(memory, node)
                self.members.setdefault(self.root[node], []).append(node)
        self.written: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            target = _target(node)
            if target is not None and target in self.root:
                self.written.setdefault(self.root[target], []).append(node)

    def region(self, root: fx.Node) -> _Region | None:
        """Everything that takes part in what is written to a root's memory; None where a part is of another kind."""
        found, queue = _Region(), [root]
        while queue:
            current = queue.pop()
            if current in found.roots:
                continue
            if current.op not in ("call_function", "call_method") or not self._is_plain(current):
                return None
            found.roots.add(current)
            found.writes += self.written[current]
            for write in self.written[current]:
                others = self._behind(write, found)
                if others is None:
                    return None
                queue += others
        return found

    def _is_plain(self, root: fx.Node) -> bool:
        """Whether all names of some memory are views."""
        return all(each is root or _target(each) is not None or _name(each) in _VIEWS for each in self.members[root])

    def _behind(self, write: fx.Node, found: _Region) -> list[fx.Node] | None:
        """The roots that a write reads; None where it computes something else than sums and products."""
        stack, roots = [write], list[fx.Node]()
        while stack:
            node = stack.pop()
            if node in found.nodes:
                continue
            if node in found.roots or (node in self.root and self.root[node] is node and node in self.written):
                roots.append(node)
                continue
            is_inside = node in self.root and self.root[node] in self.written
            call = read(node)
            is_read = call is not None and (
                is_pointwise(call) or call.name in _VIEWS | _WRITES or _target(node) is not None
            )
            if not is_inside and not (is_read and any(self._is_sweep(each) for each in _family(node))):
                found.given.add(node)
                continue
            if not is_read:
                return None
            found.nodes.add(node)
            stack += node.all_input_nodes
        return roots

    def _is_sweep(self, node: fx.Node) -> bool:
        return node in self.root and self.root[node] in self.written

    def readers(self, root: fx.Node, region: _Region) -> Iterator[fx.Node]:
        """Who reads some memory after the last write, and through which of its names."""
        last = max(map(self.position.__getitem__, region.writes))
        for member in self.members[root]:
            for user in member.users:
                if self.position[user] > last and user not in self.members[root]:
                    yield member

    def is_closed(self, region: _Region) -> bool:
        """Whether nobody sees anything between the first write and the last, in one mode, without gradients."""
        places = sorted(map(self.position.__getitem__, region.writes))
        inside = region.nodes | region.roots | {each for root in region.roots for each in self.members[root]}
        ambients = {self.effects.ambient(node) for node in region.writes}
        for node in inside:
            for user in node.users:
                if places[0] <= self.position[user] <= places[-1] and user not in inside:
                    return False
        operands = (*region.roots, *region.given)
        if len(ambients) != 1 or any(self.position[each] >= places[0] for each in operands):
            return False
        (ambient,) = ambients
        wants_grad = grad_enabled(ambient) and any(tensor_of(each).requires_grad for each in operands)  # type: ignore[union-attr]
        is_mapped = any("_increment_nesting" in name for name in ambient.other)
        return (
            not wants_grad and not is_mapped and not any(self.root.get(each) in self.written for each in region.given)
        )


def _target(node: fx.Node) -> fx.Node | None:
    """What a call writes to."""
    call = read(node)
    if node.target is operator.setitem or (call is not None and call.is_inplace):
        first = node.args[0] if node.args else None
        return first if isinstance(first, fx.Node) else None
    return None


def _name(node: fx.Node) -> str:
    call = read(node)
    return "" if call is None else call.name


def _family(node: fx.Node) -> list[fx.Node]:
    """A call and everything that it is computed from, but for what is far away."""
    found, stack = [node], list(node.all_input_nodes)
    while stack and len(found) < 32:
        found.append(stack.pop())
        stack += found[-1].all_input_nodes
    return found


# ---- proof -----------------------------------------------------------------------------------------------------------


def _proven(memory: _Memory, region: _Region, root: fx.Node, failed: dict[str, Exception]) -> _Sweep | None:
    decay = next(iter((region.roots | region.given) - {root}), None)
    tensors = [tensor_of(each) for each in (root, decay) if each is not None]
    if any(each is None or not each.is_floating_point() or _is_symbolic(each) for each in tensors):
        return None
    for dims in _times([list(each.shape) for each in tensors if each is not None]):
        given = _numbers(dict(zip([root] if decay is None else [root, decay], dims, strict=True)))
        try:
            computed = _reduced(memory, region, given)[root]
        except Exception as error:  # noqa: BLE001 at other sizes than its own it may be anything, and time another dimension
            failed.setdefault(root.name, error)
            continue
        for order, is_reversed in itertools.product(_orders(root, decay, dims), (False, True)):
            factor = None if decay is None else given[decay].permute(order)
            if _agrees(computed, given[root], factor, dims[0], is_reversed):
                failed.pop(root.name, None)
                return _Sweep(region, root, decay, order, dims[0], is_reversed)
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
        tensor = tensor_of(node)
        assert tensor is not None, "what is overwritten is a tensor"
        order = _by_stride(tensor)
        sizes = [int(size) if place == dim else min(int(size), SMALL) for place, size in enumerate(tensor.shape)]
        dense = 2 * torch.rand([sizes[place] for place in order], generator=generator, dtype=torch.float64) - 1
        found[node] = dense.permute([order.index(place) for place in range(tensor.dim())])
    return found


def _by_stride(tensor: torch.Tensor) -> list[int]:
    """The dimensions in the order of memory."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda place: -strides[place])


def _reduced(memory: _Memory, region: _Region, given: Mapping[fx.Node, torch.Tensor]) -> Mapping[fx.Node, torch.Tensor]:
    """What a region leaves in memory at smaller sizes: those that reshapes spell out become those that the others leave."""
    names = {each for root in region.roots for each in memory.members[root]}
    last = max(map(memory.position.__getitem__, region.writes))
    inside = [node for node in region.nodes | names if memory.position[node] <= last]
    nodes = sorted(inside, key=memory.position.__getitem__)
    with isolated():
        values = {node: value.clone() for node, value in given.items()}
        return run(zip(nodes, nodes, strict=True), values, attribute=no_attribute, adapt=_at_smaller_sizes)


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
            raise ValueError(f"{node.name} splits or joins dimensions that are smaller here")
        sizes += [value.shape[here]] if is_one else new[there:j]
    return [*sizes, *new[j:]]


# ---- rewriting -------------------------------------------------------------------------------------------------------


def _replace(graph: fx.Graph, sweep: _Sweep) -> None:
    """The call before the first write, and everybody who reads the memory later reads its result."""
    memory, region = _Memory(graph), sweep.region
    last = max(map(memory.position.__getitem__, region.writes))
    names = sorted(set(memory.readers(sweep.root, region)), key=memory.position.__getitem__)
    members = set(memory.members[sweep.root])
    later = {
        name: [user for user in name.users if memory.position[user] > last and user not in members] for name in names
    }
    example = tensor_of(sweep.root)
    emit = Emitter(graph, example.fake_mode, memory.effects.ambient(region.writes[0]), region.writes[-1])  # type: ignore[union-attr]
    first = min(region.writes, key=memory.position.__getitem__)
    with graph.inserting_before(first):
        states = {sweep.root: _states(emit, sweep)}
        for name, users in later.items():
            value = _again(emit, name, states, memory)
            for user in users:
                user.replace_input_with(name, value)
    for node in sorted(region.writes, key=memory.position.__getitem__, reverse=True):
        for user in list(node.users):
            user.replace_input_with(node, node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
    unread = [*region.nodes, *(each for root in region.roots for each in memory.members[root])]
    for node in sorted(set(unread) - set(region.writes), key=memory.position.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _again(emit: Emitter, name: fx.Node, states: dict[fx.Node, fx.Node], memory: _Memory) -> fx.Node:
    """A view of the memory as a view of what takes its place."""
    if name not in states:
        if _target(name) is not None:
            return _again(emit, name.args[0], states, memory)  # type: ignore[arg-type]
        (source,) = name.all_input_nodes
        base = _again(emit, source, states, memory)
        arguments = [base if each is source else each for each in name.args]
        states[name] = emit.call(name.target, *arguments, **name.kwargs)
    return states[name]


def _states(emit: Emitter, sweep: _Sweep) -> fx.Node:
    """The states, laid out in memory as what they take the place of."""
    example = tensor_of(sweep.root)
    assert example is not None, "what is overwritten is a tensor"
    order = _by_stride(example)
    back, dim = [order.index(place) for place in range(example.dim())], order.index(sweep.dim)

    def canonical(node: fx.Node | None, own: Sequence[int]) -> fx.Node | None:
        """``[1, before, T, 1, after]`` in the order of memory; ``own`` are a tensor's dimensions in that of the root."""
        if node is None:
            return None
        places = [own[place] for place in order]
        value = node if places == sorted(places) else emit.call("permute", node, places)
        value = emit.call("flip", value, dim) if sweep.is_reversed else value
        shape = list(tensor_of(value).shape)  # type: ignore[union-attr]
        whole = [example.shape[place] for place in order]
        value = value if shape == whole else emit.call("expand", value, whole)
        before, after = whole[:dim], whole[dim + 1 :]
        return emit.call("reshape", value, (1, math.prod(before), whole[dim], 1, math.prod(after)))

    operands = {"decay": canonical(sweep.decay, sweep.order), "drive": canonical(sweep.root, range(example.dim()))}
    given = [operands.get(name) for name in OPERANDS]
    both = emit.call(
        torch.ops.layerzero.scan.default, *given, example.dtype, example.dtype, fingerprint.traced_source()
    )
    value = emit.call(operator.getitem, both, 0)
    value = emit.call("reshape", value, tuple(example.shape[place] for place in order))
    value = emit.call("flip", value, dim) if sweep.is_reversed else value
    value = emit.call("clone", value, memory_format=torch.contiguous_format)
    return value if order == sorted(order) else emit.call("permute", value, back)
