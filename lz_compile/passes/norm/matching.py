"""Every normalisation of a graph as a match: what was read, with what becomes superfluous. What is none is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.moments import CALLS, STATISTICS
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.norm import recogniser
from lz_compile.passes.norm.emitter import NormEmitter
from lz_compile.passes.norm.recogniser import OP, Normalised
from lz_compile.passes.rewriting.core import Core, find_core
from lz_compile.passes.rewriting.match import Driver, Match, Outcome
from lz_compile.passes.rewriting.twins import Twins


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every normalisation of rows in ``graph``, and every statistic that looks like one's, with the reason."""
    missed: list[NearMiss] = []
    driver, stack = Driver(OP), _Stack(effects, Twins(effects))
    for found in driver.walk(graph.nodes, stack.is_statistic, stack.read):
        if isinstance(found, NearMiss):
            missed.append(found)
        else:
            yield found
    yield from (miss for miss in missed if miss.node not in driver.covered)  # one statistic may be read with the next


@dataclass
class _Stack:
    """Normalisations of one graph; equal layers are read once."""

    effects: Effects
    twins: Twins
    followed: dict[fx.Node, list[str]] = field(default_factory=dict)

    def is_statistic(self, node: fx.Node) -> bool:
        """Whether a call is a statistic of rows, or a normalisation."""
        call = self.effects.calls[node]
        if call is None or not (call.name in STATISTICS or call.name in CALLS):
            return False
        source = tensor_of(call.input)
        return source is not None and source.is_floating_point() and 0 not in shape_of(source)

    def read(self, anchor: fx.Node) -> Match | NearMiss | None:
        results = recogniser.results_of(self.effects, anchor)
        if not recogniser.is_worth_reading(self.effects, anchor, results):
            return None

        def is_alike(twin: Match) -> bool:  # followed alike, too: it does not end later than its prototype
            followers = _followers(self.effects, twin.output)
            return anchor in twin.core and followers == self.followed.get(twin.kind.output)

        def once() -> Match | NearMiss | None:
            return recogniser.recognise(self.effects, anchor, results, _matched)

        found = self.twins.read(results[::-1], once, is_alike)
        if isinstance(found, Match):
            self.followed[found.output] = _followers(self.effects, found.output)
        return found


def _followers(effects: Effects, node: fx.Node) -> list[str]:
    return sorted("" if call is None else call.name for call in map(effects.calls.get, node.users))


def _matched(read: Normalised) -> Match:
    """The match of a normalisation that was read.

    Raises:
        RefusedError: someone else needs a value of it, a mode changes, or an operand is overwritten.
    """
    source = read.moments.source
    core = find_core(read.moments.effects, source, read.output)
    core = replace(core, nodes=tuple(node for node in core.nodes if node is not source))
    _check_surroundings(read, core)
    return NormEmitter.of(read, core).match(OP, core)


def _check_surroundings(read: Normalised, core: Core) -> None:
    """Refuse where someone else needs what follows the statistics, a mode changes, or an operand is overwritten."""
    moments, effects, region = read.moments, read.moments.effects, read.moments.region
    first = min(effects.position[node] for node in moments.squared)
    late = tuple(node for node in core.nodes if effects.position[node] >= first)
    edge = {moments.source, *recogniser.leaf_nodes(region)} - {*core.nodes}
    readers = {node: region.readers.get(node, core.nodes[0]) for node in edge}
    try:
        replace(core, nodes=late).check(effects, readers)
    except RefusedError as refusal:
        if refusal.reason.code == "INTERIOR_USED":
            refusal.edit = "do not return or reuse the statistics, or what is between them and the result"
        raise
    if any(effects.ambient(node) != core.ambient for node in core.nodes):
        raise RefusedError("MODE_CHANGES_INSIDE", "autocast or gradient mode changes inside", "change it outside")
