"""Which two of many tensors a value could be a weighted sum of: those with which it vanishes.

A sum of products in which every product holds one of two factors is zero where both are. That is asked of all pairs at
once, as bits of a number, and spares the expansion of the value for each: of the 500 pairs in a chain of residual layers
there are then none, or one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any, TypeAlias

from torch import fx

from lz_compile.passes.blend.terms import Sums
from lz_compile.passes.formula.calls import constant_value
from lz_compile.passes.formula.expressions import specialised
from lz_compile.passes.graph.view import Call

#: A bit for each pair.
Bits: TypeAlias = int


def vanishing(
    sums: Sums, anchor: fx.Node, behind: Collection[fx.Node], places: Collection[fx.Node]
) -> list[tuple[fx.Node, fx.Node]]:
    """The pairs of ``places`` with which ``anchor`` is zero, unless terms cancel; in both orders.

    Args:
        sums: those of the graph.
        anchor: the value.
        behind: the values that it is computed from, as far as it is a sum of products.
        places: of these, the first of those that compute the same.
    """
    pairs = list(combinations(places, 2))
    own: dict[fx.Node, Bits] = dict.fromkeys(places, 0)
    for number, pair in enumerate(pairs):
        for node in pair:
            own[node] |= 1 << number
    reader = _Reader(sums, frozenset(behind), own, (1 << len(pairs)) - 1)
    found = reader.of(anchor, is_anchor=True)
    kept = [pair for number, pair in enumerate(pairs) if found >> number & 1]
    return [order for one, two in kept for order in ((one, two), (two, one))]


class _Reader:
    """The pairs with which values are zero."""

    def __init__(self, sums: Sums, behind: frozenset[fx.Node], own: Mapping[fx.Node, Bits], every: Bits) -> None:
        self._sums, self._behind, self._own, self._every = sums, behind, own, every
        self._found: dict[fx.Node, Bits] = {}

    def of(self, node: fx.Node, *, is_anchor: bool = False) -> Bits:
        """Those of a value."""
        if node not in self._found:
            self._found[node] = self._own.get(self._sums.first(node), 0)
            call = self._sums.effects.calls.get(node)
            if call is not None and (is_anchor or node in self._behind):
                self._found[node] |= self._read(call)
        return self._found[node]

    def _read(self, call: Call) -> Bits:
        constant = constant_value(call)
        if constant is not None:
            return self._every if constant == 0 else 0
        if not self._sums.is_sum(call):
            return 0
        if call.name in ("add", "sub", "rsub"):
            return self._operand(call, "input") & self._operand(call, "other")
        if call.name == "mul":
            return self._operand(call, "input") | self._operand(call, "other")
        if call.name == "lerp":
            return self._operand(call, "input") & (self._operand(call, "end") | self._operand(call, "weight"))
        if call.name == "addcmul":
            return self._operand(call, "input") & (self._operand(call, "tensor1") | self._operand(call, "tensor2"))
        limits = self._sums.limits(call.node)
        if limits is not None:
            return self.of(self._sums.effects.current(limits.held, call.node))
        if call.name in ("not", "eq", "ne", "where"):  # conditions are neither host nor seed
            return 0
        return self._operand(call, "input")  # a quotient, a negative, a cast, another layout

    def _operand(self, call: Call, name: str) -> Bits:
        value: Any = specialised(call.input if name == "input" else call.get(name))
        if isinstance(value, fx.Node):
            return self.of(self._sums.effects.current(value, call.node))
        return self._every if isinstance(value, (int, float)) and value == 0 else 0
