"""Linear layers with a kept and a quarantined adapter, whose gradients are routed or read off a gate.

The anchor is a sum in which two low-rank adapters of one input meet. What its terms are, their axes say
(:mod:`~lz_compile.passes.routing.roles`); how gradients of the kept one are stopped, their signs. An adapter alone, or two of
which none is scaled along its rank, is left alone without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from lz_compile.passes.formula.axes import LayoutError
from lz_compile.passes.graph.effects import Effects, MutatedError
from lz_compile.passes.graph.view import where_of
from lz_compile.passes.rewriting.match import Failure, Match, NearMiss, RefusedError, attempt
from lz_compile.passes.rewriting.twins import Twins
from lz_compile.passes.routing.gates import Gates
from lz_compile.passes.routing.reading import Reader
from lz_compile.passes.routing.summands import Summands

OP = "routing"


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Match | NearMiss | Failure]:
    """Every routed adapter in ``graph``, every one that was refused, and gates of tokens where rollouts are meant."""
    reader = _Reader(effects, Summands(effects))
    gates = Gates(effects)
    done: set[fx.Node] = set()
    for node in reversed(graph.nodes):  # the last addition of a sum is met first
        if node in done or not reader.summands.is_sum(node):
            continue
        done.update(reader.summands.of(node)[1])
        found = attempt(OP, node, reader.read, node)
        if isinstance(found, Match):
            done.update(found.core)
            yield from gates.notices(OP, found)
        if found is not None:
            yield found


@dataclass
class _Reader:
    """Routed adapters of one graph; equal layers are read once."""

    effects: Effects
    summands: Summands
    twins: Twins = field(init=False)

    def __post_init__(self) -> None:
        self.twins = Twins(self.effects)

    def read(self, anchor: fx.Node) -> Match | NearMiss | None:
        """What the sum that ends in ``anchor`` is."""
        for sum_ in self.summands.of(anchor)[1]:
            twin = self.twins.find(sum_)
            if twin is not None:
                return twin
        with self.twins.watch() as look:
            try:
                found = Reader(self.effects, self.summands).read(anchor)
            except RefusedError as refusal:
                return NearMiss(OP, anchor, refusal.reason, refusal.edit, where_of(anchor))
            except MutatedError as error:
                mutated = RefusedError("OPERAND_MUTATED", f"a value is {error}", "use its out-of-place form")
                return NearMiss(OP, anchor, mutated.reason, mutated.edit, where_of(anchor))
            except LayoutError:
                return None
        if found is None:
            return None
        emitter, core, read = found
        match = emitter.match(OP, core, read)
        self.twins.remember(match, match.output, look)
        return match
