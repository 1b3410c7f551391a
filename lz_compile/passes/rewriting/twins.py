"""Equal layers are recognised once: a subgraph that looks like one that was read before has the same reading.

While an anchor is read, every node that the recogniser looks at is noted. Another anchor is its *twin* if the same walk
from it meets equal nodes: equal calls with equal constants on tensors of equal shape, strides and dtype, used by the
same number of others. What was not looked at cannot have made a difference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.graph.effects import Effects, Look
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.passes.graph.view import value_of
from lz_compile.passes.rewriting.match import Match


@dataclass(frozen=True)
class _Prototype:
    match: Match
    look: Look


class Twins:
    """The matches of one graph that others may be twins of. Off where anything is overwritten in place."""

    def __init__(self, effects: Effects, hold_the_same: Callable[[fx.Node, fx.Node], bool] = operator.is_) -> None:
        self._effects = effects
        #: Whether two buffers do: what was proven of one by its value holds for the other.
        self._hold_the_same = hold_the_same
        self._prototypes: list[_Prototype] = []
        self._signatures: dict[fx.Node, Any] = {}

    def read(
        self,
        anchors: Sequence[fx.Node],
        read: Callable[[], Match | NearMiss | None],
        accepts: Callable[[Match], bool] = lambda _twin: True,
    ) -> Match | NearMiss | None:
        """The first twin that one of ``anchors`` gives and ``accepts`` takes, or what ``read`` gives, which is remembered."""
        for anchor in anchors:
            twin = self.find(anchor)
            if twin is not None and accepts(twin):
                return twin
        with self._effects.watched() as look:
            found = read()
        if isinstance(found, Match) and found.site.output in anchors:
            self._remember(found, look)
        return found

    def _remember(self, match: Match, look: Look) -> None:
        """A match that was read by looking at ``look``."""
        if not self._effects.has_mutations:
            look.nodes.add(match.site.output)
            self._prototypes.append(_Prototype(match, look))

    def find(self, anchor: fx.Node) -> Match | None:
        """The match that ``anchor`` gives, if it is a twin of one that is known."""
        for prototype in self._prototypes:
            if prototype.match.site.output.target != anchor.target:
                continue
            renamed = _Walk(self._effects, prototype.look, self._signatures).follow(prototype.match.site.output, anchor)
            if renamed is not None and self._uses_agree(prototype, renamed):
                for node in prototype.look.met & renamed.keys():
                    self._effects.meet(renamed[node])
                return prototype.match.moved(renamed, prototype.match, renamed)
        return None

    def _uses_agree(self, prototype: _Prototype, renamed: Mapping[fx.Node, fx.Node]) -> bool:
        """Whether inner values are used alike, and everything that the recogniser asked has the same answer."""
        match, position = prototype.match, self._effects.position
        if any(node not in renamed for node in (*match.core, *match.inputs, *match.read, *match.outputs)):
            return False
        if any(node not in renamed or not self._hold_the_same(node, renamed[node]) for node in match.found.buffers):
            return False
        core = [renamed[node] for node in match.core]
        if any(position[first] >= position[second] for first, second in pairwise(core)):
            return False
        for node in match.core:
            if node in match.outputs:
                continue
            if any(user not in renamed for user in node.users):
                return False
            if {renamed[user] for user in node.users} != set(renamed[node].users):
                return False
        region = Region(self._effects)
        return all(
            node in renamed and region.reaches(node, goal) == region.reaches(renamed[node], goal)
            for node, goal in prototype.look.reached
        )


class _Walk:
    """Pairs of nodes, one to one, as far as the recogniser looked."""

    def __init__(self, effects: Effects, look: Look, signatures: dict[fx.Node, Any]) -> None:
        self._effects = effects
        self._look = look
        self._signatures = signatures
        self._there: dict[fx.Node, fx.Node] = {}
        self._back: dict[fx.Node, fx.Node] = {}

    def follow(self, node: fx.Node, other: fx.Node) -> Mapping[fx.Node, fx.Node] | None:
        """The pairs met on the way up from ``node`` and ``other``; None where they differ."""
        stack = [(node, other)]
        while stack:
            one, two = stack.pop()
            if one in self._there or two in self._back:
                if self._there.get(one) is not two or self._back.get(two) is not one:
                    return None
                continue
            self._there[one], self._back[two] = two, one
            if self._signature(one) != self._signature(two) or self._effects.ambient(one) != self._effects.ambient(two):
                return None
            if one not in self._look.nodes:
                continue
            if one.op != two.op or (one.op != "placeholder" and one.target != two.target):
                return None
            if not _pair((one.args, one.kwargs), (two.args, two.kwargs), stack):
                return None
        return self._there

    def _signature(self, node: fx.Node) -> Any:
        if node not in self._signatures:
            self._signatures[node] = _signature(node)
        return self._signatures[node]


def _pair(one: Any, two: Any, stack: list[tuple[fx.Node, fx.Node]]) -> bool:
    """Whether arguments are equal but for their nodes, which are put on the stack in pairs."""
    if isinstance(one, fx.Node):
        stack.append((one, two))
        return isinstance(two, fx.Node)
    if type(one) is not type(two):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(two) and all(_pair(a, b, stack) for a, b in zip(one, two, strict=True))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_pair(value, two[name], stack) for name, value in one.items())
    if isinstance(one, slice):
        return _pair((one.start, one.stop, one.step), (two.start, two.stop, two.step), stack)
    return bool(one == two or (one != one and two != two))  # noqa: PLR0124 NaN is a constant like any other


def _signature(node: fx.Node) -> Any:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else ()
        sizes = tuple(as_size(size) for size in (*value.shape, *strides))
        kind = isinstance(value, torch.nn.Parameter)
        return sizes, value.dtype, value.device, value.requires_grad, kind, value.layout
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value.node.expr)
    return value if isinstance(value, (bool, int, float, str)) else type(value)
