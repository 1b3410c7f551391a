"""Gated MLPs (SwiGLU, GEGLU, ReGLU, GLU and the like) and activations of projections, in all of their spellings.

The anchor is the last operation of a pointwise function of one or two projections: the product of the activated gate and the
other row, or the activation itself. Which function it is, its values say (:mod:`gated_form`). The projections before and
after it are not part of the op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import LayoutError
from lz_compile.passes.formula.projections import Supports, projection
from lz_compile.passes.graph.effects import Effects, MutatedError
from lz_compile.passes.graph.view import Call, tensor_of, where_of
from lz_compile.passes.mlp.gated_reading import read_activation, read_halves
from lz_compile.passes.rewriting.builder import EMITTED
from lz_compile.passes.rewriting.match import Failure, Match, NearMiss, RefusedError, attempt
from lz_compile.passes.rewriting.twins import Twins

OP = "mlp"


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Match | NearMiss | Failure]:
    """Every activation of an MLP in ``graph``, and every product that looks like a gated one's, with the reason."""
    covered: set[fx.Node] = set()
    missed: set[fx.Node] = set()
    reader = _Reader(effects, Supports(effects))
    for node in reversed(graph.nodes):  # the last operation of an activation is met first
        call = effects.calls[node]
        if call is None or node in covered or EMITTED in node.meta:
            continue
        if call.name != "glu" and not reader.supports.is_candidate(node):
            continue
        found = attempt(OP, node, reader.read, node, call)
        if isinstance(found, Match):
            covered.update(found.core)
        is_part = isinstance(found, NearMiss) and node in missed  # of another one that was refused
        if found is not None and not is_part:
            yield found
        if isinstance(found, NearMiss):
            missed.update(reader.supports.behind(node))


@dataclass
class _Reader:
    """Activations of one graph; equal layers are read once."""

    effects: Effects
    supports: Supports
    twins: Twins = field(init=False)

    def __post_init__(self) -> None:
        self.twins = Twins(self.effects)

    def read(self, anchor: fx.Node, call: Call) -> Match | NearMiss | None:
        """What an anchor is: a match, clearly meant to be one, or nothing."""
        twin = self.twins.find(anchor)
        if twin is not None:
            return twin
        with self.twins.watch() as look:
            try:
                emitter, core, read = (
                    read_halves(self.effects, call)
                    if call.name == "glu"
                    else read_activation(self.effects, self.supports, anchor)
                )
            except RefusedError as refusal:
                return self._missed(anchor, call, refusal)
            except MutatedError as error:
                mutated = RefusedError("OPERAND_MUTATED", f"a value is {error}", "use its out-of-place form")
                return self._missed(anchor, call, mutated)
            except LayoutError:
                return None
        found = emitter.match(OP, core, read)
        self.twins.remember(found, anchor, look)
        return found

    def _missed(self, anchor: fx.Node, call: Call, refusal: RefusedError) -> NearMiss | None:
        is_known = refusal.reason.code != "NO_MLP" and (call.name == "glu" or len(self.supports.of(anchor).rows) == 2)
        if not is_known and not self._is_meant(anchor, call):
            return None
        return NearMiss(OP, anchor, refusal.reason, refusal.edit, where_of(anchor))

    def _is_meant(self, anchor: fx.Node, call: Call) -> bool:
        """Whether an anchor multiplies a bent projection by another one of the same input and size."""
        operands = anchor.all_input_nodes
        factors = [self.supports.of(node) for node in operands]
        if call.name != "mul" or len(factors) != 2 or sum(factor.is_bent for factor in factors) != 1:
            return False
        if any(len(factor.rows) != 1 or factor.given for factor in factors) or factors[0].rows == factors[1].rows:
            return False
        tensors = [tensor for tensor in map(tensor_of, (anchor, *operands)) if tensor is not None]
        if len({shape_of(tensor) for tensor in tensors}) != 1:
            return False
        products = [projection(self.effects, row) for factor in factors for row in factor.rows]
        calls = [None if node is None else self.effects.calls.get(node) for node in products]
        return all(each is not None and each.input is calls[0].input for each in calls)  # type: ignore[union-attr]
