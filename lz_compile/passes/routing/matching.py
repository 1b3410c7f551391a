"""Every routed adapter of a graph as a match: what was read, with what becomes superfluous. What is none is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import fx

from lz_compile.ground import events
from lz_compile.ground.reasons import Reason
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.pointwise import is_dead
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.passes.graph.view import tensor_of, tensor_operands, where_of
from lz_compile.passes.rewriting.core import Core, core_between
from lz_compile.passes.rewriting.match import Driver, Match, Outcome
from lz_compile.passes.rewriting.twins import Twins
from lz_compile.passes.routing.emitter import RoutingEmitter
from lz_compile.passes.routing.products import Summands
from lz_compile.passes.routing.recogniser import OP, Reader, Routed


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every routed adapter in ``graph``, every one that was refused, and gates of tokens where rollouts are meant."""
    summands, twins, gates, driver = Summands(effects), Twins(effects), Gates(effects), Driver(OP)

    def read(anchor: fx.Node) -> Match | NearMiss | None:
        sums = summands.of(anchor)[1]
        driver.covered.update(sums)
        return twins.read(sums, lambda: Reader(effects, summands, partial(_matched, effects)).read(anchor))

    for found in driver.walk(reversed(graph.nodes), summands.is_sum, read):  # the last addition of a sum is met first
        if isinstance(found, Match):
            yield from gates.notices(OP, found)
        yield found


def _matched(effects: Effects, read: Routed) -> Match:
    """The match of a routed adapter that was read: the nodes between the tensors that are given and the sum go.

    Raises:
        RefusedError: someone else needs one of them, a mode changes, or an operand is overwritten.
    """
    output, interior = read.output, read.interior
    found = core_between(effects, read.edges, interior.keys() - read.edges.keys(), output)
    nodes = _without_shared(effects, [*found.nodes[:-1]], output)
    dead = _only_for(effects, read.unread, {*nodes, output})
    nodes = sorted({*nodes, *dead}, key=effects.position.__getitem__)
    ungraded = dead if read.cosine is None else dead | set(read.cosine.interior)
    core = Core((*nodes, output), effects.ambient(output), frozenset(ungraded))
    core.check(effects, read.edges, if_used="use the sum only, and compute what else is needed of it apart")
    return RoutingEmitter.of(read, core).match(OP, core, interior)


def _only_for(effects: Effects, unread: Iterable[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """What is computed for values that make no difference, and for nothing else."""
    found, queue = set[fx.Node](), list(unread)
    while queue:
        node = queue.pop()
        is_own = all(user in inside or user in found for user in node.users)
        if node in found or effects.calls[node] is None or not is_own:
            continue
        found.add(node)
        queue.extend(each for each in node.all_input_nodes if each not in inside)
    return found


def _without_shared(effects: Effects, nodes: list[fx.Node], output: fx.Node) -> list[fx.Node]:
    """The nodes without those that only cast or rearrange a given tensor, and that others read, too."""
    inside, found = {*nodes, output}, list[fx.Node]()
    for node in nodes:
        call = effects.calls[node]
        is_moved = call is not None and (is_cast(call) or layout.rearranges(call)) and not call.is_inplace
        is_made = any(operand in inside for operand in node.all_input_nodes)
        if is_moved and not is_made and any(user not in inside and not is_dead(user) for user in node.users):
            inside.discard(node)
        else:
            found.append(node)
    return found


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
