"""A state whose parts are updated apart, as states of their own.

A state that is joined again in every step (``cat``, ``stack``) or read in slices is cut where these begin and end. What is
made of it elementwise is cut likewise, operand by operand, until every slice is one of a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.view import known_tensor
from lz_compile.passes.loops.recurrence.batched import Around
from lz_compile.passes.loops.recurrence.rebuilt_scan import CONTIGUOUS, Rewritten
from lz_compile.passes.loops.recurrence.step_trace import ScanCall, Step, insert, is_filled

aten = torch.ops.aten
#: A state that would fall into more parts is left whole.
_MOST_PARTS = 8
_COPIES = frozenset({aten.clone.default, aten.alias.default, aten._to_copy.default, aten.detach.default})


def split_states(call: ScanCall, step: Step, around: Around) -> Rewritten | None:
    """The step with one state in parts; None where no state comes apart."""
    for state, node in enumerate(step.states):
        shape = node.meta["val"].shape
        for dim, size in enumerate(shape):
            cutter = _Cutter(step, node, dim)
            ends = cutter.ends(step.carried[state], size)
            if 2 < len(ends) <= _MOST_PARTS + 1:
                return _split(call, around, state, cutter, ends)
    return None


def _split(call: ScanCall, around: Around, state: int, cutter: _Cutter, ends: Sequence[int]) -> Rewritten:
    dim, spans = cutter.dim, list(itertools.pairwise(ends))
    graph = cutter.graph(state, spans)
    old = call.init[state]
    init = [_part_of(around, old, dim, start, stop) for start, stop in spans]
    count = len(spans)

    def final(picked: Sequence[fx.Node]) -> list[fx.Node]:
        whole = around.call(aten.cat.default, list(picked[state : state + count]), dim)
        return [*picked[:state], whole, *picked[state + count :]]

    return Rewritten(graph, (*call.init[:state], *init, *call.init[state + 1 :]), (), final)


def _part_of(around: Around, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """A part of a first state, in contiguous memory."""
    value = known_tensor(node)
    if is_filled(node, 0):
        shape = [stop - start if place == dim else size for place, size in enumerate(value.shape)]
        return around.call(aten.full.default, shape, 0, dtype=value.dtype, device=value.device)
    part = around.call(aten.slice.Tensor, node, dim, start, stop)
    return around.call(aten.clone.default, part, **CONTIGUOUS)


class _Cutter:
    """Cuts what depends on one state along one of its dimensions."""

    def __init__(self, step: Step, state: fx.Node, dim: int) -> None:
        self.step, self.state, self.dim = step, state, dim
        self._found: set[int] = set()
        self._parts: dict[tuple[int, int], fx.Node] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._graph = fx.Graph()
        self._reaches: dict[fx.Node, int | None] = {state: dim}
        for node in step.graph.nodes:
            if node not in self._reaches and node.op == "call_function":
                self._reaches[node] = self._reached(node)

    # ---- where to cut ---------------------------------------------------------------------------------------------

    def ends(self, carried: fx.Node, size: int) -> list[int]:
        """Where the parts begin and end, closed under what every part is made of; the first and last alone if none."""
        for node in self.step.graph.nodes:
            for start, stop in self._slices(node):
                self._note(node.args[0], start, stop)
        self._note_joined(carried)
        if not self._found - {0, size}:
            return [0, size]
        known = {0, size}
        while known != self._found and len(self._found) <= _MOST_PARTS + 1:
            self._found |= {0, size}
            known = set(self._found)
            ordered = sorted(known)
            for start, stop in itertools.pairwise(ordered):
                self._note(carried, start, stop, self.dim)
        return sorted(self._found)

    def _slices(self, node: fx.Node) -> list[tuple[int, int]]:
        """The spans that a call takes of what depends on the state, along its dimension."""
        operand = node.args[0] if node.op == "call_function" and node.args else None
        dim = self._reaches.get(operand) if isinstance(operand, fx.Node) else None
        if dim is None or not isinstance(operand, fx.Node):
            return []
        value = operand.meta["val"]
        if node.target is aten.slice.Tensor:
            given = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
            start, stop, step = slice(*given[1:]).indices(value.shape[dim])
            return [(start, stop)] if given[0] % value.dim() == dim and step == 1 else []
        if node.target is aten.select.int and node.args[1] % value.dim() == dim:
            start = node.args[2] % value.shape[dim]
            return [(start, start + 1)]
        if node.target in _SPLITS:
            return self._pieces(node, value, dim)
        return []

    def _pieces(self, node: fx.Node, value: torch.Tensor, dim: int) -> list[tuple[int, int]]:
        place = 1 if node.target is aten.unbind.int else 2
        own = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
        if own % value.dim() != dim:  # type: ignore[operator]
            return []
        found, start = [], 0
        for piece in node.meta["val"]:
            stop = start + (1 if node.target is aten.unbind.int else piece.shape[dim])
            found.append((start, stop))
            start = stop
        return found

    def _reached(self, node: fx.Node) -> int | None:
        """The dimension of a value that is the state's, where elements along it depend on equal ones of the state."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        if node.target in _COPIES or _is_pointwise(node):
            found = {
                own + value.dim() - each.meta["val"].dim()
                for each in node.all_input_nodes
                if (own := self._reaches.get(each)) is not None
            }
            is_whole = len(found) == 1 and value.shape[min(found)] == self.state.meta["val"].shape[self.dim]
            return found.pop() if is_whole else None
        return None

    def _note_joined(self, node: fx.Node) -> None:
        """The ends of what the state is joined of."""
        while node.target in _COPIES:
            node = node.args[0]  # type: ignore[assignment]
        start = 0
        for part, size in _joined(node, self.dim):
            self._found |= {start, start + size}
            start += size
            if size > 1:
                self._note(part, 0, size, self.dim)

    def _note(self, node: Any, start: int, stop: int, dim: int | None = None) -> None:
        """The ends of the spans of the state that a span of a value is made of."""
        dim = self._reaches.get(node) if dim is None else dim
        if dim is None:
            return
        for operand, own, first, last in self._made_of(node, dim, start, stop):
            if operand is self.state and own == self.dim:
                self._found |= {first, last}
            elif operand is not node:
                self._note(operand, first, last, own)

    def _made_of(self, node: fx.Node, dim: int, start: int, stop: int) -> list[tuple[fx.Node, int, int, int]]:
        """What a span of a value is made of: operands, with the span of them; the value itself where it is not read."""
        if node is self.state:
            return [(node, dim, start, stop)]
        parts = _joined(node, dim)
        if parts:
            return self._covered(node, parts, dim, start, stop)
        if node.target in _COPIES or _is_pointwise(node):
            rank = node.meta["val"].dim()
            found = []
            for each in node.all_input_nodes:
                value = each.meta["val"]
                own = dim - rank + value.dim()
                if own >= 0 and value.shape[own] != 1:
                    found.append((each, own, start, stop))
            return found
        taken = (
            [(operand, spans) for operand, spans in [(node.args[0], self._slices(node))] if spans] if node.args else []
        )
        if node.target is aten.slice.Tensor and taken:
            ((operand, ((first, _),)),) = taken
            own = self._reaches[operand]  # type: ignore[index]
            if own == dim:
                return [(operand, dim, first + start, first + stop)]  # type: ignore[list-item]
        return [(node, dim, start, stop)]

    @staticmethod
    def _covered(
        node: fx.Node, parts: Sequence[tuple[fx.Node, int]], dim: int, start: int, stop: int
    ) -> list[tuple[fx.Node, int, int, int]]:
        found, begin = [], 0
        is_stack = node.target is aten.stack.default
        for part, size in parts:
            low, high = max(start, begin), min(stop, begin + size)
            if low < high and not is_stack:
                found.append((part, dim, low - begin, high - begin))
            begin += size
        return found

    # ---- the step in parts ----------------------------------------------------------------------------------------

    def graph(self, state: int, spans: Sequence[tuple[int, int]]) -> fx.Graph:
        """The step that takes and gives the parts in the place of the state."""
        graph = self._graph
        for node in (*self.step.states, *self.step.slices, *self.step.given):
            if node is not self.state:
                self._copies[node] = graph.node_copy(node)
                continue
            for span in spans:
                part = self._parts[span] = graph.placeholder(f"{node.name}_{span[0]}")
                part.meta["val"] = node.meta["val"].narrow(self.dim, span[0], span[1] - span[0]).contiguous()
        for node in self.step.graph.nodes:
            if node.op == "call_function":
                self._copies[node] = self._copied(node)
        carried = [[self._copies.get(each)] for each in self.step.carried]
        new = self.step.carried[state]
        carried[state] = [self._cut(new, self.dim, *span) for span in spans]
        outputs = [
            self._whole(node) if each is None else each
            for group, node in zip(carried, self.step.carried, strict=True)
            for each in group
        ]
        graph.output([*outputs, *(self._whole(node) for node in self.step.results)])
        graph.eliminate_dead_code()
        return graph

    def _copied(self, node: fx.Node) -> fx.Node:
        spans = self._slices(node)
        operand = node.args[0] if node.args else None
        if spans and isinstance(operand, fx.Node) and node.target not in _SPLITS:
            dim = self._reaches[operand]
            assert dim is not None, "a slice is one of what depends on the state"
            part = self._cut(operand, dim, *spans[0])
            is_entry = node.target is aten.select.int
            return insert(self._graph, aten.squeeze.dim, (part, dim)) if is_entry else part
        if _is_piece(node) and isinstance(operand, fx.Node) and self._slices(operand):
            source = operand.args[0]
            dim = self._reaches[source]  # type: ignore[index]
            assert dim is not None, "a piece is one of what depends on the state"
            part = self._cut(source, dim, *self._slices(operand)[node.args[1]])  # type: ignore[index, arg-type]
            return insert(self._graph, aten.squeeze.dim, (part, dim)) if operand.target is aten.unbind.int else part
        return self._graph.node_copy(node, self._whole)

    def _whole(self, node: fx.Node) -> fx.Node:
        """A value in the new step; the state as its parts joined."""
        if node is self.state:
            if node not in self._copies:
                self._copies[node] = insert(self._graph, aten.cat.default, (list(self._parts.values()), self.dim))
            return self._copies[node]
        return self._copies[node]

    def _cut(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        """A span of a value in the new step, made of parts of the state."""
        graph, value = self._graph, node.meta["val"]
        if (start, stop) == (0, value.shape[dim]) and node is not self.state and node in self._copies:
            return self._copies[node]
        if node is self.state and dim == self.dim:
            spans = [(low, high) for low, high in self._parts if start <= low and high <= stop]
            if sum(high - low for low, high in spans) != stop - start:
                return insert(graph, aten.slice.Tensor, (self._whole(node), dim, start, stop))
            found = [self._parts[span] for span in spans]
            return found[0] if len(found) == 1 else insert(graph, aten.cat.default, (found, dim))
        if node.target is aten.stack.default and _joined(node, dim):
            entries = [each for each, _ in _joined(node, dim)[start:stop]]
            rows = [insert(graph, aten.unsqueeze.default, (self._whole(each), dim)) for each in entries]
            return rows[0] if len(rows) == 1 else insert(graph, aten.cat.default, (rows, dim))
        made = self._made_of(node, dim, start, stop)
        if any(each is node for each, *_ in made):
            return insert(graph, aten.slice.Tensor, (self._whole(node), dim, start, stop))
        if _joined(node, dim):
            pieces = [self._cut(*each) for each in made]
            return pieces[0] if len(pieces) == 1 else insert(graph, aten.cat.default, (pieces, dim))
        if node.target is aten.slice.Tensor:
            return self._cut(*made[0])
        cuts = {each: self._cut(each, own, low, high) for each, own, low, high in made}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: cuts.get(each) or self._whole(each))
        return insert(graph, node.target, args, kwargs)


_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})


def _joined(node: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """What a value is joined of along a dimension, with the sizes there; empty where it is not joined."""
    if node.target not in (aten.cat.default, aten.stack.default):
        return []
    own = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if own % node.meta["val"].dim() != dim:
        return []
    is_stack = node.target is aten.stack.default
    parts: Any = node.args[0]
    return [(each, 1 if is_stack else each.meta["val"].shape[dim]) for each in parts]


def _is_pointwise(node: fx.Node) -> bool:
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_piece(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[1], int)
