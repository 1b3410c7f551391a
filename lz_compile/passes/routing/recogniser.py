"""Linear layers with a kept and a quarantined adapter, whose gradients are routed or read off a gate.

The anchor is a sum in which two low-rank adapters of one input meet. What its terms are, their axes say
(:mod:`~lz_compile.passes.routing.roles`); how gradients of the kept one are stopped, their signs. An adapter alone, or two of
which none is scaled along its rank, is left alone without a word.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.passes.rewriting.driver import Driver, Outcome
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.twins import Twins
from lz_compile.passes.routing.gates import Gates
from lz_compile.passes.routing.reading import Reader
from lz_compile.passes.routing.summands import Summands

OP = "routing"


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every routed adapter in ``graph``, every one that was refused, and gates of tokens where rollouts are meant."""
    summands, twins, gates, driver = Summands(effects), Twins(effects), Gates(effects), Driver(OP)

    def read(anchor: fx.Node) -> Match | NearMiss | None:
        sums = summands.of(anchor)[1]
        driver.covered.update(sums)
        return twins.read(sums, lambda: _read(effects, summands, anchor))

    for found in driver.walk(reversed(graph.nodes), summands.is_sum, read):  # the last addition of a sum is met first
        if isinstance(found, Match):
            yield from gates.notices(OP, found)
        yield found


def _read(effects: Effects, summands: Summands, anchor: fx.Node) -> Match | None:
    found = Reader(effects, summands).read(anchor)
    if found is None:
        return None
    emitter, core, read = found
    return emitter.match(OP, core, read)
