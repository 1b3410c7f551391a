"""Gated MLPs (SwiGLU, GEGLU, ReGLU, GLU and the like) and activations of projections, in all of their spellings.

The anchor is the last operation of a pointwise function of one or two projections: the product of the activated gate and the
other row, or the activation itself. Which function it is, its values say (:mod:`gated_form`). The projections before and
after it are not part of the op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.projections import Supports, projection
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import Call, tensor_of
from lz_compile.passes.mlp.gated_reading import read_activation, read_halves
from lz_compile.passes.rewriting.driver import Driver, Outcome
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.twins import Twins

OP = "mlp"


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every activation of an MLP in ``graph``, and every product that looks like a gated one's, with the reason."""
    missed: set[fx.Node] = set()
    reader = _Reader(effects, Supports(effects), Twins(effects))
    driver = Driver(OP, reader.is_meant)
    for found in driver.walk(reversed(graph.nodes), reader.is_last, reader.read):  # the last operation is met first
        if not isinstance(found, NearMiss):
            yield found
            continue
        if found.node not in missed:  # no part of another one that was refused
            yield found
        missed.update(reader.supports.behind(found.node))


@dataclass
class _Reader:
    """Activations of one graph; equal layers are read once."""

    effects: Effects
    supports: Supports
    twins: Twins

    def is_last(self, node: fx.Node) -> bool:
        """Whether a call may be the last one of an activation."""
        return self.effects.calls[node] is not None and (self._is_glu(node) or self.supports.is_candidate(node))

    def read(self, anchor: fx.Node) -> Match | NearMiss | None:
        """What an anchor is.

        Raises:
            RefusedError: it is no activation of an MLP, with the reason.
            MutatedError: an alias of a value was overwritten before it is read.
            LayoutError: a layout has no exact form in axes.
        """
        return self.twins.read((anchor,), lambda: self._match(anchor))

    def _match(self, anchor: fx.Node) -> Match:
        if self._is_glu(anchor):
            emitter, core, read = read_halves(self.effects, self._call(anchor))
        else:
            emitter, core, read = read_activation(self.effects, self.supports, anchor)
        return emitter.match(OP, core, read)

    def is_meant(self, anchor: fx.Node, refusal: RefusedError) -> bool:
        """Whether a refused anchor is clearly meant to be an activation of an MLP."""
        is_known = self._is_glu(anchor) or len(self.supports.of(anchor).rows) == 2
        return (refusal.reason.code != "NO_MLP" and is_known) or self._is_gated(anchor)

    def _call(self, anchor: fx.Node) -> Call:
        call = self.effects.calls[anchor]
        assert call is not None, "an anchor is a call"
        return call

    def _is_glu(self, anchor: fx.Node) -> bool:
        return self._call(anchor).name == "glu"

    def _is_gated(self, anchor: fx.Node) -> bool:
        """Whether an anchor multiplies a bent projection by another one of the same input and size."""
        operands = anchor.all_input_nodes
        factors = [self.supports.of(node) for node in operands]
        if self._call(anchor).name != "mul" or len(factors) != 2 or sum(factor.is_bent for factor in factors) != 1:
            return False
        if any(len(factor.rows) != 1 or factor.given for factor in factors) or factors[0].rows == factors[1].rows:
            return False
        tensors = [tensor for tensor in map(tensor_of, (anchor, *operands)) if tensor is not None]
        if len({shape_of(tensor) for tensor in tensors}) != 1:
            return False
        products = [projection(self.effects, row) for factor in factors for row in factor.rows]
        calls = [None if node is None else self.effects.calls.get(node) for node in products]
        return all(each is not None and each.input is calls[0].input for each in calls)  # type: ignore[union-attr]
