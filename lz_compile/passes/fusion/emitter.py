"""How a kernel that computes several matches is called: with what is given, and with what is still to be computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.fused import GIVEN, SIBLING, Fused, Siblings
from lz_compile.lowering.operands import Operands
from lz_compile.passes.formula.axes import Axis
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import Match


def operands_of(match: Match, builder: Builder) -> Any:
    """A match's operands, which may be a twin's, whose emitter speaks of the prototype's nodes."""
    return match.found.emitter.operands(_own(match, builder))


def results_of(match: Match, builder: Builder, value: Any) -> tuple[Any, ...]:
    """What a kernel's value gives for every output of a match, which may be a twin."""
    found = match.found.emitter.result(_own(match, builder), value)
    return tuple(found) if match.site.extra_outputs else (found,)


def _own(match: Match, builder: Builder) -> Builder:
    if not match.renamed:
        return builder
    return builder.over(lambda node: builder.value(match.renamed.get(node, node)))


def kind_of(name: str, match: Match) -> str:
    """What descriptors call a match that is computed along as ``name``, under ``fuses_ops``."""
    return SIBLING if name == SIBLING else match.op


@dataclass(frozen=True)
class FusedEmitter:
    """The emitter of a match together with those in ``others``: what its operands of these names are, or its sibling.

    ``also`` are the outputs of the others that are wanted.
    """

    match: Match
    others: Mapping[str, Match]
    also: tuple[fx.Node, ...] = ()

    def operands(self, builder: Builder) -> Operands | Siblings:
        """The operands that are given, and in the place of the others what is still to be computed."""
        fused = {
            name: Fused(first.op, operands_of(first, builder), first.found.attributes)
            for name, first in self.others.items()
        }
        inner = {first.site.output: name for name, first in self.others.items()}

        def value(node: fx.Node) -> Any:
            try:
                return builder.value(node)  # in a graph it is still there, and nobody reads it in the end
            except LookupError:
                name = inner.get(node)
                if name is None:
                    raise
                return results_of(self.others[name], builder, fused[name].reference())[0]

        found = operands_of(self.match, builder.over(value))
        own = replace(found, **{name: each for name, each in fused.items() if name != SIBLING})
        return Siblings(own, fused[SIBLING]) if SIBLING in fused else own

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's results in the layouts and dtypes of the last match's and of those that are wanted."""
        given = [first for name, first in sorted(self.others.items()) if kind_of(name, first) in GIVEN]
        own = results_of(self.match, builder, value[0] if given else value)[0]
        found: dict[fx.Node, Any] = {}
        for index, first in enumerate(given, 1):
            if not {*first.outputs}.isdisjoint(self.also):
                found |= zip(first.outputs, results_of(first, builder, value[index]), strict=True)
        return (own, *(found[node] for node in self.also)) if self.also else own

    def attributes_at(self, sizes: Mapping[Axis, int]) -> OpAttributes:
        """The last match's attributes for a proof at other sizes."""
        return self.match.found.emitter.attributes_at(sizes)

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """What an implied input holds at other sizes."""
        back = {own: node for node, own in self.match.renamed.items()}
        return self.match.found.emitter.implied_value(back.get(node, node), _own(self.match, builder), given, sizes)

    def __str__(self) -> str:
        """What is computed along: ``the rope before key, query``."""
        parts = []
        for kind in sorted({kind_of(name, each) for name, each in self.others.items()}):
            of_kind = {name: each for name, each in sorted(self.others.items()) if kind_of(name, each) == kind}
            each = next(iter(of_kind.values()))
            parts.append(
                f"the {each.op} at {each.site.where}" if kind == SIBLING else f"the {kind} before {', '.join(of_kind)}"
            )
        return " and ".join(parts)


def in_order(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Nodes of one graph, each once, in its order."""
    wanted = set(nodes)
    return tuple(node for node in nodes[0].graph.nodes if node in wanted)
