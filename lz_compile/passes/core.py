"""The nodes that a rewrite makes superfluous, and whether it may."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from lz_compile.passes.effects import Ambient, Effects
from lz_compile.passes.match import RefusedError
from lz_compile.passes.view import where_of


@dataclass(frozen=True)
class Core:
    """Everything between the first node of a subgraph and its output that depends on the first, in graph order."""

    nodes: tuple[fx.Node, ...]
    ambient: Ambient

    @property
    def output(self) -> fx.Node:
        return self.nodes[-1]

    def check(self, effects: Effects, edge: Iterable[fx.Node]) -> None:
        """Refuse where someone else needs an inner value, a mode changes inside, or an operand is overwritten.

        Raises:
            RefusedError: with the reason.
        """
        inside = set(self.nodes)
        for node in self.nodes[:-1]:
            outside = [user for user in node.users if user not in inside]
            if outside:
                raise RefusedError(
                    "INTERIOR_USED",
                    f"{node.name} ({where_of(node)}) is also used by {outside[0].name}",
                    "do not return or reuse the scores or probabilities (output_attentions=False)",
                )
        if any(effects.ambient(node) != self.ambient for node in self.nodes):
            raise RefusedError(
                "MODE_CHANGES_INSIDE",
                "autocast or gradient mode changes between scores and output",
                "enter or leave the mode outside of the attention",
            )
        for node in edge:
            writer = effects.overwritten_after(node, self.nodes[0], self.output)
            if writer is not None:
                raise RefusedError(
                    "OPERAND_MUTATED",
                    f"{node.name} is overwritten by {writer.name} between scores and output",
                    "use the out-of-place form of that operation",
                )


def find_core(effects: Effects, first: fx.Node, output: fx.Node) -> Core:
    """The nodes on a path from ``first`` to ``output``; in-place results count as the tensor they overwrite."""
    start, depends = effects.position[first], {first: True}
    order: list[fx.Node] = []

    def visit(node: fx.Node) -> bool:
        known = depends.get(node)
        if known is not None:
            return known
        depends[node] = False
        if effects.position[node] > start:
            inputs = [effects.current(operand, node) for operand in node.all_input_nodes]
            depends[node] = any([visit(operand) for operand in inputs])
        if depends[node]:
            order.append(node)
        return depends[node]

    visit(output)
    order.sort(key=effects.position.__getitem__)
    return Core((first, *order), effects.ambient(output))
