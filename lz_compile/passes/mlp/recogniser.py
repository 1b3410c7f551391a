"""Gated MLPs (SwiGLU, GEGLU, ReGLU, GLU and the like) and activations of projections, in all of their spellings.

The anchor is the last operation of a pointwise function of one or two projections: the product of the activated gate and the
other row, or the activation itself. Which function it is, its values say (:mod:`gated_form`). The projections before and
after it are not part of the op. What becomes superfluous, whoever asks for matches asks of what was found (:mod:`matching`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Dims, axes_of, fresh
from lz_compile.passes.formula.bends import BENDS
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.projections import Supports, rearranges
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import known_tensor
from lz_compile.passes.mlp.gated_form import Form, read_form


@dataclass(frozen=True)
class Activation:
    """An activation of ``leaves``, which are of ``region``, by the names of the op's operands; ``output`` has the result."""

    region: Region
    form: Form
    leaves: Mapping[str, Leaf]
    output: fx.Node
    output_dims: Dims


def recognise(effects: Effects, supports: Supports, anchor: fx.Node) -> Activation:
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
    return Activation(region, form, leaves, anchor, dims)


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
