"""Reads the activation that ends in a node: its form, its operands, and the nodes that it makes superfluous."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.activations import BENDS
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, axes_of, fresh
from lz_compile.passes.formula.calls import is_cast
from lz_compile.passes.formula.projections import Supports, rearranges
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.mlp.emitter import MlpEmitter
from lz_compile.passes.mlp.gated_form import Form, read_form
from lz_compile.passes.rewriting.core import Core, find_core, is_dead, overwritten_edge

#: The emitter of an activation, its core, and everything that was read with its axes.
Found: TypeAlias = tuple[MlpEmitter, Core, Mapping[fx.Node, Dims]]


def read_activation(effects: Effects, supports: Supports, anchor: fx.Node) -> Found:
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
    return MlpEmitter.of(effects, form, leaves, dims, core), core, region.interior


def read_halves(effects: Effects, call: Call) -> Found:
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
    return MlpEmitter.of_halves(leaf, halves, dims, at, call.node), core, {call.node: dims}


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
    symbols = sorted(expression.free_symbols & region.leaves.keys(), key=str)
    rows = [symbol for symbol in symbols if region.leaves[symbol].node in stops]
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
    cores = [find_core(effects, row, anchor) for row in rows]
    between = {node for core in cores for node in core.nodes if node in region.interior or is_dead(node)}
    nodes = sorted(between - {*rows, anchor}, key=effects.position.__getitem__)
    core = replace(cores[0], nodes=(*nodes, anchor))
    if any(effects.ambient(node) != core.ambient for node in core.nodes):
        raise RefusedError("MODE_CHANGES_INSIDE", "autocast or gradient mode changes inside", "change it outside")
    shared = overwritten_edge(effects, core)
    whole = replace(core, nodes=(*sorted(shared, key=effects.position.__getitem__), *core.nodes))
    edge = {leaf.node for leaf in region.leaves.values()} - shared
    whole.check(
        effects,
        {node: region.readers.get(node, anchor) for node in edge},
        if_used="use the activation for its product only",
    )
    return core
