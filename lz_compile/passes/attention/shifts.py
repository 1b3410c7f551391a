"""What is subtracted from every score of a row, so that exponentials do not overflow: a softmax does not see it."""

from __future__ import annotations

import sympy
from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Axis, atoms
from lz_compile.passes.formula.expressions import is_constant
from lz_compile.passes.graph.view import Call, tensor_operands


def without_shift(
    region: Region, expression: sympy.Expr, keys: tuple[Axis, ...], sinks: sympy.Expr | None
) -> sympy.Expr:
    """Drop a subtracted row maximum: softmax does not change when a row is shifted."""
    shifts = {}
    beside = () if sinks is None else region.leaves_in(sinks).values()
    columns = frozenset(_shown(region, leaf.node) for leaf in beside)
    for symbol, leaf in region.leaves_in(expression).items():
        if leaf.axes & set(atoms(keys)) or not _is_maximum(region, leaf.node, columns):
            continue
        if sympy.expand(sympy.diff(expression, symbol)).is_number:
            shifts[symbol] = sympy.S.Zero
    return expression.xreplace(shifts) if shifts else expression


#: Calls behind which a row's maximum is one still.
_SAME_ROW = frozenset({"detach", "getitem", "getattr", "unsqueeze", "contiguous", "clone", "relu"})


def _is_maximum(region: Region, node: fx.Node, columns: frozenset[fx.Node]) -> bool:
    """Whether a node is the largest of a row, or of a row and the ``columns`` beside it."""
    call = region.effects.calls.get(node)
    while call is not None and (call.name in _SAME_ROW or _is_bounded(call)):
        call = region.effects.calls.get(call.input)
    if call is not None and call.name == "maximum":
        sides = tensor_operands(call.node)
        return any(_is_beside(region, x, columns) for x in sides) and any(
            _is_maximum(region, x, columns) for x in sides
        )
    return call is not None and call.name in ("amax", "max")


def _is_beside(region: Region, node: fx.Node, columns: frozenset[fx.Node]) -> bool:
    shown = _shown(region, node)
    call = region.effects.calls.get(shown)
    return bool(columns) and (shown in columns or (call is not None and is_constant(call)))


def _shown(region: Region, node: fx.Node) -> fx.Node:
    """What a node shows in another layout."""
    call = region.effects.calls.get(node)
    while call is not None and layout.rearranges(call):
        node = call.input
        call = region.effects.calls.get(node)
    return node


def _is_bounded(call: Call) -> bool:
    """Whether a maximum is at least zero, or less: under a larger bound, exponentials of usual scores are zero."""
    least = call.get("min") if call.name in ("clamp", "clamp_min") else None
    return isinstance(least, int | float) and least <= 0 and call.get("max") is None
