"""Linear layers with a kept and a quarantined adapter, whose gradients are routed or read off a gate.

The anchor is a sum in which two low-rank adapters of one input meet. What its terms are, their axes say
(:mod:`~lz_compile.passes.routing.roles`); how gradients of the kept one are stopped, their signs. An adapter alone, or two of
which none is scaled along its rank, is left alone without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from lz_compile.ground import events
from lz_compile.ground.reasons import Reason
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.passes.graph.view import tensor_of, tensor_operands, where_of
from lz_compile.passes.rewriting.match import Driver, Match, Outcome
from lz_compile.passes.rewriting.twins import Twins
from lz_compile.passes.routing.products import Summands
from lz_compile.passes.routing.reading import OP, Reader


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every routed adapter in ``graph``, every one that was refused, and gates of tokens where rollouts are meant."""
    summands, twins, gates, driver = Summands(effects), Twins(effects), Gates(effects), Driver(OP)

    def read(anchor: fx.Node) -> Match | NearMiss | None:
        sums = summands.of(anchor)[1]
        driver.covered.update(sums)
        return twins.read(sums, lambda: Reader(effects, summands).read(anchor))

    for found in driver.walk(reversed(graph.nodes), summands.is_sum, read):  # the last addition of a sum is met first
        if isinstance(found, Match):
            yield from gates.notices(OP, found)
        yield found


# ---- gates of tokens -------------------------------------------------------------------------------------------------
# Gates that are there for their gradient, one row for every token: what is read off them scatters.
# The unit of routing is the rollout. A gate of ones per token tells the gradient of a token, whose cosine with a direction is
# above zero by noise for about half of the tokens of a clean rollout.


CODE = "GATE_PER_TOKEN"


@dataclass
class Gates:
    """The gates of one graph; of several layers with such a gate, the first is an event."""

    effects: Effects
    is_told: bool = False

    def notices(self, op: str, match: Match) -> Iterator[NearMiss]:
        """What is to be said of the gate of a match: nothing, where it is one per rollout or computed by the model."""
        gate = _gate_of(match)
        if gate is None or match.attributes.to_dict()["gate"] != "token" or not grad_enabled(match.ambient):
            return
        tensor = tensor_of(gate)
        is_computed = self.effects.calls[gate] is not None and tensor_operands(gate)
        if tensor is None or not tensor.requires_grad or is_computed:  # what a network computes is a gate of its own
            return
        rows = " x ".join(str(size) for size in tensor.shape[:-1]) or "1"
        text = (
            f"the gate {gate.name} has a row for every token ({rows}): cosines of tokens scatter, about half of the tokens "
            "of a clean rollout are flagged by noise, and half of its gradient is routed wrongly"
        )
        edit = "a gate per rollout, [G, 1, rank]; or sum its gradient over the tokens of each rollout before the cosine"
        if not self.is_told:
            events.record(CODE, f"{op} at {match.where}: {text}; use {edit}")
            self.is_told = True
        yield NearMiss(op, gate, Reason(CODE, text), edit, match.where or where_of(gate))


def _gate_of(match: Match) -> fx.Node | None:
    parts = getattr(match.emitter, "parts", {}).get("gate")
    if not parts:
        return None
    gate: fx.Node = parts[0].leaf.node
    return match.renamed.get(gate, gate)
