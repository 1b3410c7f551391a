"""Matches of calls of our own functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from lz_compile.lowering.operands import Operands
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.own_calls import is_own_call
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import Driver, Match, Outcome, TableEmitter


@dataclass(frozen=True)
class CallEmitter(TableEmitter):
    """Operands are in the op's canonical layout already; ``places`` are those of the outputs among several results."""

    given: Mapping[str, fx.Node]
    attrs: Any
    operand_type: type[Operands]
    places: tuple[int, ...] | None = None

    def operands(self, builder: Builder) -> Operands:
        """As they are."""
        return self.operand_type(**{name: builder.value(node) for name, node in self.given.items()})

    def result(self, _builder: Builder, value: Any) -> Any:
        """As it is; of several results, those that are read."""
        if self.places is None:
            return value
        found = tuple(value[place] for place in self.places)
        return found if len(found) > 1 else found[0]


def op_calls(
    op: str, graph: fx.Graph, effects: Effects, match: Callable[[fx.Node, Effects], Match]
) -> Iterator[Outcome]:
    """Every call of ``layerzero::<op>`` that somebody reads, as ``match`` has it, and what it refuses."""
    return Driver(op).walk(graph.nodes, lambda node: is_own_call(op, node), lambda node: match(node, effects))
