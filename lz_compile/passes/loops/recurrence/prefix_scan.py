"""Recurrences ``h_t = a_t h_{t-1} + b_t`` that the source computes in logarithmic depth, by combining neighbours.

PyTorch's ``associative_scan`` and what people write themselves (doubling, up and down sweeps) differ in every detail, but
are made of nothing but slices and joins along time, sums and products. Such arithmetic is a polynomial of what goes in, and
two polynomials that agree at a random point are the same but for bad luck: the region is evaluated on random numbers in
float64 and held against the recurrence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from lz_compile.ground.isolation import isolated
from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, broadcast_from, fresh
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, told
from lz_compile.passes.graph.view import Call, known_tensor, needed, tensor_of
from lz_compile.passes.loops.recurrence.prefix_scan_reads import StatesRead, Updates
from lz_compile.passes.loops.roll.worthwhile import LEAST_POINTWISE, LEAST_STEPS
from lz_compile.passes.proof.running import Subgraph, agree

_ARITHMETIC = frozenset({"add", "sub", "mul", "neg", "addcmul"})
_SLICES = frozenset({"slice", "getitem", "narrow", "select"})
_JOINS = frozenset({"cat", "concat", "concatenate", "stack", "pad", "slice_scatter"})
_CONSTANTS = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones"})
_LAYOUT = frozenset("flatten unflatten reshape view contiguous clone flip unsqueeze squeeze".split())
_SPLITS = frozenset({"flatten", "unflatten"})
_MIXING = _SLICES | _JOINS | _SPLITS | {"reshape", "view", "flip"}
#: Reading is linear in the number of calls (about 0.1 ms each), but once for every result.
_MOST_CALLS = 20_000
SMALL = 2
#: Of dimensions that are cut at places of their own, which have their sizes in a proof; the proof of the rewrite is another.
_MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class PrefixScan:
    """``output[t] = decay[t] * output[t - 1] + drive[t]`` along dimension ``dim``; without a decay, a sum.

    ``core`` are the nodes between, in graph order, ``output`` last. ``dims`` are the axes of all three. With ``logs`` decays
    are given as logarithms, of each step, or of the product of all up to it (``"sums"``), with ``has_log_drive`` the drive;
    of ``"products"`` the source divides by what they multiply up to.
    Where it ``is_reversed``, the state before is that of the next index.
    ``read`` is how the states are read, where they themselves are no result, and ``updates`` are what ``drive`` is then.
    """

    output: fx.Node
    core: tuple[fx.Node, ...]
    dim: int
    drive: fx.Node
    decay: fx.Node | None
    dims: Mapping[fx.Node, Dims]
    logs: Literal["none", "products", "steps", "sums"] = "none"
    has_log_drive: bool = False
    is_reversed: bool = False
    read: StatesRead | None = None
    updates: Updates | None = None

    @property
    def time(self) -> Axis:
        """The axis of time."""
        return self.dims[self.output][self.dim][0]


def prefix_scans(graph: fx.Graph, effects: Effects) -> Iterator[PrefixScan | NearMiss]:
    """Every such recurrence of a graph; what looks like one and is none is a near miss."""
    reader = _Reader(graph, effects)
    found: list[PrefixScan] = []
    misses: list[NearMiss] = []
    for node in graph.nodes:
        try:
            scan = reader.read(node)
        except RefusedError as refusal:
            pieces = frozenset(reader.core(node))
            miss = NearMiss.of("scan", node, refusal)
            misses.append(replace(miss, pieces=pieces, is_whole=True, cause=refusal.__cause__))
            continue
        if scan is not None:
            found.append(scan)
    ends = {scan.output for scan in found}
    yield from (scan for scan in found if ends.isdisjoint(scan.core[:-1]))  # what is cut off its states is none besides
    known = {node for scan in found for node in scan.core}
    for miss in misses:  # one for each, though it may have several results
        if known.isdisjoint(miss.pieces):
            known |= miss.pieces
            yield miss


def scans_of(
    calls: Iterable[Call], effects: Effects, read: Callable[[Call, Effects], PrefixScan | None]
) -> Iterator[PrefixScan | NearMiss]:
    """What calls are read as; of those that are used otherwise, why they are left alone."""
    for call in calls:
        try:
            scan = read(call, effects)
        except RefusedError as refusal:
            yield NearMiss.of("scan", call.node, refusal)
        except LayoutError:
            continue
        else:
            yield from [] if scan is None else [scan]


class _Reader:
    def __init__(self, graph: fx.Graph, effects: Effects) -> None:
        self._graph = graph
        self._effects = effects
        self._live: set[fx.Node] | None = None
        self._moved: set[fx.Node] = set()
        for node in graph.nodes:
            if self._allowed(node) and (self._moves(node) or not self._moved.isdisjoint(node.all_input_nodes)):
                self._moved.add(node)

    def read(self, output: fx.Node) -> PrefixScan | None:
        """The recurrence that ends at a node.

        Raises:
            RefusedError: it is built like one, and computes something else, or has few steps.
        """
        if output not in self._moved or not self._may_end(output):
            return None
        core, shape = self.core(output), known_tensor(output).shape
        long = [dim for dim, steps in enumerate(shape) if isinstance(steps, int) and steps >= LEAST_STEPS]
        mixing = {dim: sum(self._mixes(node, dim) for node in core) for dim in long}
        # Pieces of time seem to be pieces of other dimensions, too.
        for dim in sorted(long, key=mixing.__getitem__, reverse=True):
            steps, leaves = shape[dim], self._leaves(core, dim)
            if mixing[dim] < 2 * math.log2(steps) or leaves is None:
                continue
            if not any(map(self._effects.is_overwritten, (*core, *leaves))):
                if len(core) > _MOST_CALLS:
                    text = f"{output.name} is put together of pieces over time by {len(core):,} calls: too many are not read"
                    edit = f"use associative_scan, or fewer levels: up to {_MOST_CALLS:,} calls are read"
                    raise RefusedError("PREFIX_SCAN_LONG", text, edit)
                if steps >= LEAST_POINTWISE:
                    return self._proven(output, core, dim, leaves)
                if self._is_proven(output, core, dim, leaves):
                    raise too_short(f"{steps} steps of a recurrence in logarithmic depth", f"{LEAST_POINTWISE} steps")
        return None

    # ---- what is read ---------------------------------------------------------------------------------------------

    def _may_end(self, node: fx.Node) -> bool:
        """Whether a node joins or adds up pieces, and nobody goes on doing so with it."""
        if not node.users or node not in self._alive() or self._effects.name(node) == "flip":
            return False
        if self._effects.ambient(node).is_transformed:
            return False
        return not any(self._goes_on(node, user) for user in node.users if user in self._alive())

    def _goes_on(self, node: fx.Node, user: fx.Node) -> bool:
        call = self._allowed(user)
        if call is None:
            return False
        if call.name in _ARITHMETIC:
            return any(other in self._moved for other in user.all_input_nodes if other is not node)
        if call.name in _SLICES or call.name == "flip":
            return any(self._goes_on(user, each) for each in user.users if each in self._alive())
        return call.name in _MIXING

    def _allowed(self, node: fx.Node) -> Call | None:
        """A call that arithmetic over time may be made of."""
        call = self._effects.calls.get(node)
        tensor = tensor_of(node)
        if call is None or call.is_inplace or tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        return call if call.name in _ARITHMETIC | _MIXING | _LAYOUT | _CONSTANTS else None

    def _alive(self) -> set[fx.Node]:
        """What the graph's results depend on."""
        if self._live is None:
            self._live = {*needed((node for node in self._graph.nodes if node.op == "output" or node.is_impure()), ())}
        return self._live

    def core(self, output: fx.Node) -> list[fx.Node]:
        """All allowed calls that a node depends on through allowed calls, in graph order."""
        return needed([output], (), lambda node: filter(self._allowed, node.all_input_nodes))

    def _moves(self, node: fx.Node) -> bool:
        """Whether a call moves values along any dimension."""
        tensor = tensor_of(node)
        return tensor is not None and any(self._mixes(node, dim) for dim in range(tensor.dim()))

    def _mixes(self, node: fx.Node, dim: int) -> bool:
        """Whether a call moves values along a dimension."""
        call, tensor = self._effects.calls[node], tensor_of(node)
        if call is None or tensor is None or call.name not in _SLICES | _JOINS | _SPLITS:
            return False
        sources = [tensor_of(operand) for operand in node.all_input_nodes]
        inserts = all(source is not None and source.dim() < tensor.dim() for source in sources)
        if call.name == "getitem" and inserts and layout.shows_whole(call):
            return False
        return any(source is not None and _differ(source, tensor, dim) for source in sources)

    def _leaves(self, core: Sequence[fx.Node], dim: int) -> list[fx.Node] | None:
        """The tensors of all steps that pieces are cut off, before anything is cut; None where there are others."""
        is_cut: dict[fx.Node, bool] = {}
        leaves: dict[fx.Node, None] = {}
        for node in core:
            operands = node.all_input_nodes
            mixed = self._mixes(node, dim)
            is_cut[node] = mixed or any(is_cut.get(operand, False) for operand in operands)
            if is_cut[node]:
                leaves.update(dict.fromkeys(operand for operand in operands if not is_cut.get(operand, False)))
        found = [self._moved_to(leaf, set(core[:-1]), known_tensor(core[-1]), dim) for leaf in leaves]
        return None if None in found else [each for each in found if each is not None]

    def _moved_to(self, leaf: fx.Node, core: Collection[fx.Node], states: torch.Tensor, dim: int) -> fx.Node | None:
        """The last tensor of all steps that is made of a leaf alone, and all that is: padded, shifted, turned."""
        found = None
        while tensor_of(leaf) is not None:
            found = leaf if _broadcasts(known_tensor(leaf), states, dim) else found
            users = [user for user in leaf.users if user in core]
            if len(users) != 1 or users[0].all_input_nodes != [leaf] or self._effects.name(users[0]) in _ARITHMETIC:
                break
            leaf = users[0]
        return found

    # ---- proof ----------------------------------------------------------------------------------------------------

    def _proven(self, output: fx.Node, core: list[fx.Node], dim: int, leaves: list[fx.Node]) -> PrefixScan:
        inside = set(needed([output], leaves))
        between = [node for node in core if node in inside]
        generator = torch.Generator().manual_seed(0)
        sizes = [as_size(size) for size in known_tensor(output).shape]
        whole = {at for at in range(len(sizes)) if at == dim or any(self._mixes(node, at) for node in between)}
        if math.prod(size for at in whole if isinstance(size := sizes[at], int)) > _MOST_ELEMENTS:
            whole = {dim}
        given = {leaf: _random(leaf, whole, generator) for leaf in leaves}
        if len(leaves) > 2:
            raise self._coupled(output, between, given, dim)
        computed = _evaluated(output, between, given)
        decays = [None] if len(leaves) == 1 else leaves
        for decay, drive, is_reversed in itertools.product(decays, leaves, (False, True)):
            if decay is drive:
                continue
            if agree(recurrence(None if decay is None else given[decay], given[drive], dim, is_reversed), computed):
                if computed.is_complex():
                    raise _complex("over complex numbers")
                self._check(output, between)
                dims = dims_of(output, leaves)
                return PrefixScan(output, tuple(between), dim, drive, decay, dims, is_reversed=is_reversed)
        raise _unknown(output, "something else than h[t] = a[t] * h[t - 1] + b[t]")

    def _is_proven(self, *candidate: Any) -> bool:
        try:
            return self._proven(*candidate) is not None
        except RefusedError:  # of few steps nothing is said of what is something else
            return False

    def _coupled(
        self, output: fx.Node, between: Sequence[fx.Node], given: Mapping[fx.Node, torch.Tensor], dim: int
    ) -> RefusedError:
        """Why a recurrence over several tensors is none that a kernel knows."""
        if len(given) == 4 and not any(value.is_complex() for value in given.values()):
            computed = _evaluated(output, between, given)
            for parts in itertools.permutations(given.values()):
                states = recurrence(torch.complex(*parts[:2]), torch.complex(*parts[2:]), dim)
                if agree(states.real, computed) or agree(states.imag, computed):
                    return _complex("over complex numbers, as pairs of real ones")
        return _unknown(output, f"made of {len(given)} tensors, which is more than decays and summands")

    def _check(self, output: fx.Node, ordered: Sequence[fx.Node]) -> None:
        """Refuse a region of which someone else reads a part.

        Raises:
            RefusedError: someone else reads one of its nodes, or a mode changes inside.
        """
        found = set(ordered)
        ambient = self._effects.ambient(output)
        for node in ordered:
            users = [user for user in node.users if user not in found and user in self._alive()]
            if node is not output and users:
                text = f"{told(node)} is also used by {told(users[0])}"
                raise RefusedError("INTERIOR_USED", text, "use the result of the scan instead")
            if self._effects.ambient(node) != ambient:
                text = "autocast or gradient mode changes inside"
                raise RefusedError("MODE_CHANGES_INSIDE", text, "enter or leave the mode outside of it")


def _complex(what: str) -> RefusedError:
    text = f"it is h[t] = a[t] * h[t - 1] + b[t] {what}, and kernels for recurrences in logarithmic depth are for real ones"
    edit = "a loop over time that carries real and imaginary parts has kernels"
    return RefusedError("COMPLEX_STATE", text, edit)


def too_short(what: str, least: str) -> RefusedError:
    """Why a recurrence of few steps is left alone."""
    text = f"{what}: that costs less than a call of a kernel"
    return RefusedError("SCAN_SHORT", text, f"nothing: kernels are asked for from {least} on")


def _unknown(output: fx.Node, text: str) -> RefusedError:
    reason = f"{output.name} is put together of pieces over time, and is {text}"
    return RefusedError("PREFIX_SCAN_UNKNOWN", reason, "a recurrence that is affine in its state has a kernel")


def _random(leaf: fx.Node, whole: Collection[int], generator: torch.Generator) -> torch.Tensor:
    """Numbers below one, with few elements in other dimensions than those that are to be whole."""
    shape = map(as_size, known_tensor(leaf).shape)
    sizes = [
        size if isinstance(size, int) and (place in whole or size == 1) else SMALL for place, size in enumerate(shape)
    ]
    kind = torch.complex128 if known_tensor(leaf).is_complex() else torch.float64
    return torch.rand(sizes, generator=generator, dtype=kind) * 2 - 1


def _differ(one: torch.Tensor, other: torch.Tensor, dim: int) -> bool:
    """Whether tensors differ along a dimension, or along a part of it, in rank or size (adds no guard)."""
    sizes, others = ([as_size(size) for size in each.shape] for each in (one, other))
    # What was cut off or split ahead of a dimension leaves that as it is.
    return sizes[:dim] == others[:dim] if len(sizes) != len(others) else sizes[dim:][:1] != others[dim:][:1]


def _broadcasts(tensor: torch.Tensor, states: torch.Tensor, dim: int) -> bool:
    """Whether a tensor has the steps of all states, and broadcasts to them (adds no guard)."""
    own, wanted = ([as_size(size) for size in each.shape] for each in (tensor, states))
    if len(own) != len(wanted) or own[dim] != wanted[dim]:
        return False
    return all(size in (1, other) for size, other in zip(own, wanted, strict=True))


def _evaluated(output: fx.Node, between: Sequence[fx.Node], given: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
    """The region's result for given values."""
    region = Subgraph(inputs=dict.fromkeys(given, ()), nodes=tuple(between), outputs=(output,))
    try:
        with isolated():
            result: torch.Tensor
            (result,) = region.run(*given.values())
    except Exception as error:
        raise _unknown(output, f"not read at other sizes ({type(error).__name__}: {error})") from error
    return result


def recurrence(decay: torch.Tensor | None, drive: torch.Tensor, dim: int, is_reversed: bool = False) -> torch.Tensor:
    """``h[t] = decay[t] * h[t - 1] + drive[t]`` along a dimension, step by step; without a decay, a running sum."""
    if decay is not None:
        decay, drive = torch.broadcast_tensors(decay, drive)
    states, back = list(drive.unbind(dim)), -1 if is_reversed else 1
    for step in list(range(len(states)))[::back][1:]:
        before = states[step - back] if decay is None else decay.select(dim, step) * states[step - back]
        states[step] = before + states[step]
    return torch.stack(states, dim)


def dims_of(output: fx.Node, leaves: Sequence[fx.Node]) -> dict[fx.Node, Dims]:
    """One axis for each dimension of the output, and the same for the leaves where they do not broadcast."""
    dims = fresh(shape_of(known_tensor(output)))
    return {output: dims, **{leaf: broadcast_from(dims, shape_of(known_tensor(leaf))) for leaf in leaves}}
