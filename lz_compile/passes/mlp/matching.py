"""Every activation of an MLP in a graph as a match: what was read, with what becomes superfluous. What is none is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, LayoutError, fresh
from lz_compile.passes.formula.projections import Supports, projection
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import Call, tensor_of
from lz_compile.passes.mlp import recogniser
from lz_compile.passes.mlp.emitter import MlpEmitter
from lz_compile.passes.mlp.recogniser import Activation
from lz_compile.passes.rewriting.core import Core, core_between
from lz_compile.passes.rewriting.match import Driver, Match, Outcome
from lz_compile.passes.rewriting.twins import Twins

OP = "mlp"


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
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
        if self._is_glu(anchor):
            return self.twins.read((anchor,), lambda: _halves(self.effects, self._call(anchor)))
        return self.twins.read((anchor,), lambda: _matched(recogniser.recognise(self.effects, self.supports, anchor)))

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


def _matched(read: Activation) -> Match:
    """The match of an activation that was read.

    Raises:
        RefusedError: someone else needs a value between rows and result, a mode changes, or an operand is overwritten.
    """
    region, effects = read.region, read.region.effects
    rows = [read.leaves[name].node for name in ("gate", "up") if name in read.leaves]
    core = core_between(effects, rows, region.interior, read.output)
    if any(effects.ambient(node) != core.ambient for node in core.nodes):
        raise RefusedError("MODE_CHANGES_INSIDE", "autocast or gradient mode changes inside", "change it outside")
    readers = {leaf.node: region.readers.get(leaf.node, read.output) for leaf in region.leaves.values()}
    core.check(effects, readers, if_used="use the activation for its product only")
    return MlpEmitter.of(read, core).match(OP, core, region.interior)


def _halves(effects: Effects, call: Call) -> Match:
    """``F.glu``: the first half of a tensor times the sigmoid of the second.

    Raises:
        RefusedError: the tensor is overwritten.
        LayoutError: it is no call on a tensor of floating-point numbers.
    """
    source, tensor, at = tensor_of(call.input), tensor_of(call.node), call.get("dim", -1)
    if source is None or tensor is None or not isinstance(at, int) or not tensor.is_floating_point():
        raise LayoutError("halves of what is no tensor")
    if 0 in shape_of(tensor):
        raise LayoutError("nothing to halve")
    at %= source.dim()
    halves, dims = Axis(2), fresh(shape_of(tensor))
    leaf = Leaf(effects.current(call.input, call.node), (*dims[:at], (halves, *dims[at]), *dims[at + 1 :]))
    core = Core((call.node,), effects.ambient(call.node))
    core.check(effects, {leaf.node: call.node})
    return MlpEmitter.of_halves(leaf, halves, dims, at, call.node).match(OP, core, {call.node: dims})
