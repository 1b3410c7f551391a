"""Blends of a seed with a detached host, in all of their spellings, and margins of logits that are found by sorting.

The anchor is the last operation of a sum of two products. Its terms say whether it can be a blend (:mod:`form`); what
can is read again in axes. In a graph that records gradients the host must want none; where nothing does, the weights must be
given: what a network computed them from is a gate of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import fx

from lz_compile.ground.sizes import Size, shape_of
from lz_compile.passes.blend.form import Form, Forms
from lz_compile.passes.blend.ranks import Ranks, has_ranks
from lz_compile.passes.blend.reading import OP, read_blend, read_margin
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import LayoutError
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, NearMiss, RefusedError
from lz_compile.passes.graph.view import reached, tensor_of, where_of
from lz_compile.passes.rewriting.match import Driver, Match, Outcome

#: The last operation of a margin.
_MARGINS = frozenset({"sub", "rsub", "add", "neg"})
#: Calls between one step of a loop and the next that are looked at.
_REACH = 64


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every blend in ``graph``, every margin of no blend, and every blend that was refused, with the reason."""
    ranks = Ranks(effects) if has_ranks(effects) else None
    reader = _Reader(effects, Forms.of(effects, ranks))
    driver, read = Driver(OP), partial(read_blend, effects, reader.forms)
    missed: set[fx.Node] = set()
    for node in reversed(graph.nodes):  # the last operation of a blend is met first
        form = reader.forms.at(node) if node not in driver.covered and node not in missed else None
        if form is None:
            continue
        is_step = reader.is_of_recurrence(node, form)
        found = () if is_step else tuple(driver.at(node, read, form))
        yield from found
        if is_step or any(isinstance(each, NearMiss) for each in found):  # what it is made of is no blend of its own
            missed.update(reader.forms.sums.behind(node))
    if ranks is not None:
        yield from driver.walk(reversed(graph.nodes), reader.is_margin, reader.margin)


@dataclass
class _Reader:
    """Blends and margins of one graph."""

    effects: Effects
    forms: Forms

    def is_of_recurrence(self, anchor: fx.Node, form: Form) -> bool:
        """Whether a sum follows, by pointwise operations, from that of another step of the same loop, and detaches nothing.

        A membrane that leaks and resets, a moving average or a running softmax weigh what they hold; they blend no branches.
        """
        if self.forms.is_detached(form.host):
            return False
        directions = (lambda node: node.all_input_nodes), (lambda node: list(node.users))
        return any(self.forms.at(node) for each in directions for node in _alike(self.effects, anchor, each))

    def is_margin(self, node: fx.Node) -> bool:
        """Whether a value is computed from two order statistics by its last operation."""
        call, tensor = self.effects.calls.get(node), tensor_of(node)
        gates = self.forms.gates
        if call is None or gates is None or tensor is None or call.is_inplace:
            return False
        return call.name in _MARGINS and gates.depends(node)

    def margin(self, anchor: fx.Node) -> Match | None:
        """The margin that ends in ``anchor``; None where it is none, or not a margin alone."""
        try:
            return read_margin(self.effects, self.forms, anchor)
        except (RefusedError, MutatedError, LayoutError):  # the values that were sorted are wanted themselves
            return None


def _alike(effects: Effects, anchor: fx.Node, neighbours: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
    """Calls like this one, of the same source line and shape, that are reached through pointwise operations."""

    def near(node: fx.Node) -> Iterator[fx.Node]:
        calls = (call for call in map(effects.calls.get, neighbours(node)) if call is not None)
        return (x.node for x in calls if is_pointwise(x) or is_cast(x) or layout.is_view(x))

    def like(node: fx.Node) -> tuple[object, ...]:
        return effects.calls[node].name, where_of(node), _shape(node)  # type: ignore[union-attr]  # these are calls

    return (node for node in reached([anchor], near, _REACH) if node is not anchor and like(node) == like(anchor))


def _shape(node: fx.Node) -> tuple[Size, ...] | None:
    tensor = tensor_of(node)
    return None if tensor is None else shape_of(tensor)
