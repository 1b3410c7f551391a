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
from lz_compile.passes.formula.activations import BENDS
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, axes_of, fresh
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.projections import Supports, projection, rearranges
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.mlp.emitter import MlpEmitter
from lz_compile.passes.mlp.gated_form import Form, read_form
from lz_compile.passes.rewriting.core import Core, core_between
from lz_compile.passes.rewriting.match import Driver, Match, Outcome
from lz_compile.passes.rewriting.twins import Twins

OP = "mlp"


def read_activation(effects: Effects, supports: Supports, anchor: fx.Node) -> Match:
    """The activation that ends in ``anchor``.

    Raises:
        RefusedError: it is none, with the reason.
        MutatedError: an alias of a value was overwritten before it is read.
        LayoutError: a layout has no exact form in axes.
    """
    dims = fresh(shape_of(known_tensor(anchor)))
    region, form = _read(effects, anchor, dims, _Stops(supports))
    for cut in _cuts(region, supports) if form is None else ():
        region, form = _read(effects, anchor, dims, _Stops(supports, cut))
        if form is not None:
            break
    if form is None:
        raise RefusedError("NO_MLP", "the activation is none that is known", "use silu, gelu or relu")
    symbols = {"gate": form.gate, "up": form.up, "gate_bias": form.gate_bias, "up_bias": form.up_bias}
    leaves = {name: region.leaves[symbol] for name, symbol in symbols.items() if symbol is not None}
    hidden = set(axes_of(leaves["gate"].dims[-1:]))
    if any(leaf.axes != hidden for name, leaf in leaves.items() if name.endswith("bias")):
        raise RefusedError("BIAS_NOT_A_ROW", "a bias is not one number per column", "add it to the projection")
    core = _core(region, [leaves[name].node for name in ("gate", "up") if name in leaves], anchor)
    return MlpEmitter.of(effects, form, leaves, dims, core).match(OP, core, region.interior)


def read_halves(effects: Effects, call: Call) -> Match:
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


@dataclass(frozen=True)
class _Stops:
    """Where reading stops: at rows, and at values that are rows for this reading."""

    supports: Supports
    further: frozenset[fx.Node] = frozenset()

    def __contains__(self, node: object) -> bool:
        return node in self.supports or node in self.further


def _read(effects: Effects, anchor: fx.Node, dims: Dims, stops: _Stops) -> tuple[Region, Form | None]:
    """What was read, and the form that it has if its rows are as large as the result."""
    region = Region(effects, expand_masks=True, stops=stops, functions=BENDS)
    expression = region.express(anchor, dims)
    symbols = region.leaves_in(expression)
    rows = [symbol for symbol, leaf in symbols.items() if leaf.node in stops]
    weights = [symbol for symbol in symbols if symbol not in rows]
    span = set(axes_of(dims))
    if not 1 <= len(rows) <= 2 or any(region.leaves[symbol].axes != span for symbol in rows):
        return region, None
    return region, read_form(expression, rows, weights)


def _cuts(region: Region, supports: Supports) -> Iterator[frozenset[fx.Node]]:
    """What the rows become without bending, where only that is used; the last such values first."""
    chains = []
    for row in {leaf.node for leaf in region.leaves.values()}:
        chain = [row]
        while (following := _only_user(chain[-1], region, supports)) is not None:
            chain.append(following)
        if len(chain) > 1:
            chains.append(chain[1:])
    for length in range(max(map(len, chains), default=0), 0, -1):
        yield frozenset(chain[:length][-1] for chain in chains)


def _only_user(node: fx.Node, region: Region, supports: Supports) -> fx.Node | None:
    """The one operation that uses a value, if that is no more than a function of one row that does not bend."""
    users = [user for user in node.users if user in region.interior]
    for user in users:
        if _is_transparent(region, user):
            users += [each for each in user.users if each in region.interior]
    users = [user for user in users if not _is_transparent(region, user)]
    if len(users) != 1:
        return None
    support = supports.of(users[0])
    return users[0] if len(support.rows) == 1 and not support.is_bent else None


def _is_transparent(region: Region, node: fx.Node) -> bool:
    """Whether a call only casts or rearranges."""
    call = region.effects.calls[node]
    return call is not None and (is_cast(call) or rearranges(call))


def _core(region: Region, rows: list[fx.Node], anchor: fx.Node) -> Core:
    """The nodes between rows and result.

    Raises:
        RefusedError: someone else needs one of them, a mode changes, or an operand is overwritten.
    """
    effects = region.effects
    core = core_between(effects, rows, region.interior, anchor)
    if any(effects.ambient(node) != core.ambient for node in core.nodes):
        raise RefusedError("MODE_CHANGES_INSIDE", "autocast or gradient mode changes inside", "change it outside")
    edge = {leaf.node for leaf in region.leaves.values()}
    core.check(
        effects,
        {node: region.readers.get(node, anchor) for node in edge},
        if_used="use the activation for its product only",
    )
    return core


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
        if self._is_glu(anchor):
            return self.twins.read((anchor,), lambda: read_halves(self.effects, self._call(anchor)))
        return self.twins.read((anchor,), lambda: read_activation(self.effects, self.supports, anchor))

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
