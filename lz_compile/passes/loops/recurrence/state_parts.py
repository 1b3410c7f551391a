"""A state whose parts are updated apart, as states of their own.

A state that is joined again in every step (``cat``, ``stack``) or read in slices is cut where these begin and end. What is
made of it elementwise is cut likewise; where a slice begins inside of a part, that is cut there, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.graph.view import known_tensor, read
from lz_compile.passes.loops.recurrence.batched import Around
from lz_compile.passes.loops.recurrence.rebuilt_scan import CONTIGUOUS, Rewritten
from lz_compile.passes.loops.recurrence.step_trace import ScanCall, Step, insert, is_filled, is_tensor

aten = torch.ops.aten
#: A state that would fall into more parts is left whole.
_MOST_PARTS = 8
_COPIES = frozenset({aten.clone.default, aten.alias.default, aten._to_copy.default, aten.detach.default})


def split_states(call: ScanCall, step: Step, around: Around) -> Rewritten | None:
    """The step with one state in parts; None where no state comes apart."""
    for state, node in enumerate(step.states):
        for dim in range(node.meta["val"].dim()):
            ends = _ends(step, state, dim)
            if 2 < len(ends) <= _MOST_PARTS + 1:
                return _split(call, around, _Cut(step, state, dim, ends, fx.Graph()))
    return None


def _ends(step: Step, state: int, dim: int) -> list[int]:
    """Where the parts begin and end, closed under what every part is made of; the first and last alone if none."""
    ends, found = list[int](), {0, step.states[state].meta["val"].shape[dim]}
    while len(ends) < len(found) <= _MOST_PARTS + 1:
        ends = sorted(found)
        found |= _Cut(step, state, dim, ends).found
    return sorted(found)


def _split(call: ScanCall, around: Around, cut: _Cut) -> Rewritten:
    state, old, spans, dim = cut.state, call.init[cut.state], cut.spans, cut.dim
    init = [_part_of(around, old, dim, start, stop) for start, stop in spans]
    count = len(spans)

    def final(picked: Sequence[fx.Node]) -> list[fx.Node]:
        whole = around.call(aten.cat.default, list(picked[state : state + count]), dim)
        return [*picked[:state], whole, *picked[state + count :]]

    return Rewritten(cut.finished(), (*call.init[:state], *init, *call.init[state + 1 :]), (), final)


def _part_of(around: Around, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """A part of a first state, in contiguous memory."""
    value = known_tensor(node)
    if is_filled(node, 0):
        shape = [stop - start if place == dim else size for place, size in enumerate(value.shape)]
        return around.call(aten.full.default, shape, 0, dtype=value.dtype, device=value.device)
    part = around.call(aten.slice.Tensor, node, dim, start, stop)
    return around.call(aten.clone.default, part, **CONTIGUOUS)


@dataclass(frozen=True)
class _Piece:
    """A span of a value: its node in the new step, and where the spans of the state begin that it is made of."""

    node: Any
    size: int
    starts: frozenset[int] = frozenset()


class _Cut:
    """A step over parts of one state; without a graph it is only ``found`` where more has to be cut."""

    def __init__(self, step: Step, state: int, dim: int, ends: Sequence[int], graph: fx.Graph | None = None) -> None:
        old = step.states[state]
        self.step, self.state, self.dim = step, state, dim
        self.spans = list(itertools.pairwise(ends))
        self.found: set[int] = set()
        self._graph = graph
        self._last = dim - old.meta["val"].dim()  # counted from the last dimension, as broadcasting does
        self._pieces: dict[fx.Node, list[_Piece]] = {}
        #: Every value in the new step; None stands for all of them where there is no graph.
        self._whole: dict[fx.Node, Any] = {}
        for node in (*step.states, *step.slices, *step.given):
            if node is old:
                self._pieces[old] = [
                    _Piece(self._placeholder(old, *s), s[1] - s[0], frozenset(s[:1])) for s in self.spans
                ]
            else:
                self._whole[node] = None if graph is None else graph.node_copy(node)
        self._whole[old] = self._joined(self._pieces[old]).node
        for node in step.graph.nodes:
            if node.op == "call_function":
                self._read(node)
        carried = step.carried[state]
        self.found.update(itertools.accumulate(piece.size for piece in self._pieces.get(carried, ())))
        self._carried = [self._part(carried, *span).node for span in self.spans]

    def finished(self) -> fx.Graph:
        """The step that takes and gives the parts in the place of the state."""
        assert self._graph is not None, "it is cut"
        outputs = [self._whole[node] for node in self.step.outputs]
        self._graph.output([*outputs[: self.state], *self._carried, *outputs[self.state + 1 :]])
        self._graph.eliminate_dead_code()
        return self._graph

    def _placeholder(self, state: fx.Node, start: int, stop: int) -> fx.Node | None:
        if self._graph is None:
            return None
        part = self._graph.placeholder(f"{state.name}_{start}")
        part.meta["val"] = state.meta["val"].narrow(self.dim, start, stop - start).contiguous()
        return part

    def _insert(self, target: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> fx.Node | None:
        return None if self._graph is None else insert(self._graph, target, args, kwargs)

    def _read(self, node: fx.Node) -> None:
        """A call in the new step, whole and in pieces, as far as it has any; what of it nobody reads goes again."""
        taken = self._taken(node)
        if taken is None:
            self._whole[node] = None if self._graph is None else self._graph.node_copy(node, self._whole.__getitem__)
            self._pieces[node] = self._made(node)
        elif taken[-1]:
            self._whole[node] = self._insert(aten.squeeze.dim, (self._part(*taken[:-1]).node, self._last))
        else:
            self._pieces[node] = self._within(*taken[:-1])
            self._whole[node] = self._joined(self._pieces[node]).node

    def _taken(self, node: fx.Node) -> tuple[fx.Node, int, int, bool] | None:
        """Which span of what comes apart a call takes along the state's dimension, and whether it drops that."""
        call = read(node)
        taken = None if call is None else layout.index_of(call)
        if taken is None or not self._pieces.get(taken[0]):
            return None
        whole = known_tensor(taken[0])
        cut = layout.single_cut(taken[1], whole)
        is_along = cut is not None and cut[0] - whole.dim() == self._last and cut[1].step == 1
        return (taken[0], cut[1].start, cut[1].stop, cut[2]) if cut is not None and is_along else None

    def _made(self, node: fx.Node) -> list[_Piece]:
        """The pieces of a value that is joined, or computed of what comes apart element by element."""
        call, rank = read(node), node.meta["val"].dim() if is_tensor(node) else 0
        if call is not None and call.name in ("cat", "stack") and call.get("dim", 0) % rank - rank == self._last:
            parts: Any = node.args[0]
            if call.name == "cat":
                return [
                    p for each in parts for p in self._pieces.get(each) or [self._part(each, 0, self._extent(each))]
                ]
            return [_Piece(self._insert(aten.unsqueeze.default, (self._whole[each], self._last)), 1) for each in parts]
        is_copy, size = node.target in _COPIES, self._extent(node)
        if not is_copy and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return []
        apart = [each for each in node.all_input_nodes if self._pieces.get(each) and self._extent(each) == size]
        apart = [each for each in apart if is_copy or any(piece.starts for piece in self._pieces[each])]
        ends = {end for each in apart for end in itertools.accumulate(piece.size for piece in self._pieces[each])}
        return [self._computed(node, *span) for span in itertools.pairwise(sorted({0, *ends}))]

    def _computed(self, node: fx.Node, start: int, stop: int) -> _Piece:
        """A span of a pointwise value."""
        size = self._extent(node)
        parts = {each: self._part(each, start, stop) for each in node.all_input_nodes if self._extent(each) == size}
        starts = frozenset[int]().union(*(part.starts for part in parts.values()))
        if (start, stop) == (0, size):
            return _Piece(self._whole[node], size, starts)
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda each: parts[each].node if each in parts else self._whole[each]
        )
        return _Piece(self._insert(node.target, args, kwargs), stop - start, starts)

    def _extent(self, node: fx.Node) -> int:
        """How many elements a value has along the state's dimension; none where it has no such."""
        is_long = is_tensor(node) and node.meta["val"].dim() >= -self._last
        return int(node.meta["val"].shape[self._last]) if is_long else 0

    def _part(self, node: fx.Node, start: int, stop: int) -> _Piece:
        """A span of a value."""
        if self._pieces.get(node):
            return self._joined(self._within(node, start, stop))
        return self._span(_Piece(self._whole[node], self._extent(node)), start, stop)

    def _within(self, node: fx.Node, start: int, stop: int) -> list[_Piece]:
        """A span of what comes apart, in pieces."""
        ends = itertools.accumulate((piece.size for piece in self._pieces[node]), initial=0)
        spans = [
            (max(start - at, 0), min(stop - at, p.size), p) for p, at in zip(self._pieces[node], ends, strict=False)
        ]
        return [self._span(piece, low, high) for low, high, piece in spans if low < high]

    def _span(self, piece: _Piece, start: int, stop: int) -> _Piece:
        if (start, stop) == (0, piece.size):
            return piece
        self.found.update(each + end for each in piece.starts for end in (start, stop))
        node = self._insert(aten.slice.Tensor, (piece.node, self._last, start, stop))
        return _Piece(node, stop - start, frozenset(each + start for each in piece.starts))

    def _joined(self, pieces: Sequence[_Piece]) -> _Piece:
        whole, *more = pieces
        starts, size = whole.starts, whole.size
        for each in more:
            starts, size = frozenset(start for start in starts if start + size in each.starts), size + each.size
        node = self._insert(aten.cat.default, ([each.node for each in pieces], self._last)) if more else whole.node
        return _Piece(node, size, starts)
