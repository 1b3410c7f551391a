"""A guard of a sum that cannot bite is left out: ``sum + 1e-9``, ``sum.clamp(min=1e-9)`` and ``where(sum == 0, 1, sum)``.

A sum of ``exp(s - max(s))`` over what the maximum is of has a one among its summands, so it is at least one (or NaN). One
of probabilities, over what their softmax is over, is nearly one. What is added to such a sum is rounded away where it is a
small part of what the dtype tells from one, and a smaller bound is never met: the result is the same, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of, strides_of
from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, LayoutError, fresh
from lz_compile.passes.formula.expressions import constant_value, is_cast, plain_number
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError
from lz_compile.passes.graph.view import Call, known_tensor, read, tensor_of

#: Below this, no such sum is, however it is rounded.
_LEAST = 0.5
#: Guards, with the names of the two operands, of which one is a number: sums, and what gives the larger one.
_ADDED = {"add": ("input", "other")}
_BOUNDS = {
    "clamp": ("input", "min"),
    "clamp_min": ("input", "min"),
    **dict.fromkeys(("maximum", "max"), ("input", "other")),
}
_CHOICES = {"where": ("condition", "input", "other"), "masked_fill": ("mask", "value", "input")}


def drop_guards(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Leave such guards out, in place, where they may be edited; how many there were."""
    found = [(call.node, kept) for node in graph.nodes if (call := read(node)) is not None for kept in _guarded(call)]
    effects = Effects(graph) if found else None
    return sum(effects is not None and _dropped(node, kept, effects, may_edit) for node, kept in found)


def _guarded(call: Call) -> Iterator[fx.Node]:
    """The value behind a guard that is not met where that is at least :data:`_LEAST`, if a sum is."""
    tensor, operands = tensor_of(call.node), tuple[tuple[Any, Any], ...]()
    if tensor is None or not tensor.is_floating_point() or call.is_inplace:
        return
    if call.name in _CHOICES:
        condition, chosen, other = (call.get(name) for name in _CHOICES[call.name])
        test = read(condition) if isinstance(condition, fx.Node) else None
        limit = None if test is None or test.name not in ("eq", "lt", "le") else _value(test.get("other"))
        is_unmet = test is not None and test.input is other and limit is not None and limit < _LEAST
        operands = ((other, chosen),) if is_unmet else ()
    elif call.name in _ADDED or (call.name in _BOUNDS and call.get("max") is None):
        first, second = (call.get(name) for name in {**_ADDED, **_BOUNDS}[call.name])
        most = torch.finfo(tensor.dtype).eps * _LEAST / 4 if call.name in _ADDED else _LEAST
        numbers = ((first, _value(second)), (second, _value(first)))
        operands = tuple((kept, value) for kept, value in numbers if value is not None and 0 <= value < most)
        operands = operands if call.get("alpha", 1) == 1 else ()
    for kept, _ in operands:
        if isinstance(kept, fx.Node) and _sum_of(kept) is not None:
            yield kept


def _value(node: object) -> float | None:
    call = read(node) if isinstance(node, fx.Node) else None
    return plain_number(node) if call is None else constant_value(call)


def _sum_of(node: fx.Node) -> Call | None:
    """The sum that a value is, in another layout or dtype."""
    call = read(node)
    while call is not None and call.name != "sum":
        call = read(call.input) if is_cast(call) or layout.is_in_axes(call) else None
    return call


def _dropped(node: fx.Node, kept: fx.Node, effects: Effects, may_edit: MayEdit) -> bool:
    total, ambient = _sum_of(kept), effects.ambient(node)
    old, new = known_tensor(node), known_tensor(kept)
    is_alike = (new.dtype, shape_of(new), strides_of(new)) == (old.dtype, shape_of(old), strides_of(old))
    if total is None or ambient.is_transformed or layout.is_returned(node) or not is_alike:
        return False
    if effects.is_overwritten(node) or effects.why_not_forwarded(kept, node, node) or not _is_large(effects, total):
        return False
    if not may_edit(node):
        return False
    node.replace_all_uses_with(kept)
    node.graph.erase_node(node)
    return True


def _is_large(effects: Effects, total: Call) -> bool:
    """Whether a sum is at least :data:`_LEAST` or NaN, whatever it is of."""
    region, dims = Region(effects, expand_masks=True), fresh(shape_of(known_tensor(total.node)))
    try:
        inner = contraction.reduction_dims(total, dims)
        if inner is None or len(inner[1]) != 1:
            return False
        expression = region.express(total.input, inner[0], total.node)
        is_one = _vanishes(region, _logarithm(expression), inner[1])
    except (LayoutError, MutatedError):
        return False
    leaf = region.leaves.get(expression)
    if leaf is not None and leaf.kind == "softmax" and (call := effects.calls[leaf.node]) is not None:
        dim = call.get("dim")
        is_one = dim is not None and leaf.dims[dim] == inner[1]
    return is_one and not any(map(_rounds, map(effects.calls.__getitem__, region.interior)))


def _logarithm(expression: sympy.Expr) -> sympy.Expr:
    """The exponent that an expression is: numbers and masks that sympy took out of it are in it again."""
    factors = sympy.Mul.make_args(expression)
    return sympy.Add(*(each.args[0] if isinstance(each, sympy.exp) else sympy.log(each) for each in factors))


def _rounds(call: Call | None) -> bool:
    """Whether a call casts to a dtype of fewer digits: a maximum would be none any more."""
    kinds = [known_tensor(each).dtype for each in (call.input, call.node)] if call is not None and is_cast(call) else []
    return len(kinds) > 1 and torch.promote_types(*kinds) != kinds[1]


def _vanishes(region: Region, exponent: sympy.Expr, summed: tuple[Axis, ...]) -> bool:
    """Whether an exponent is zero somewhere in every row, for the largest of its row is subtracted from it."""
    for symbol, leaf in region.leaves_in(exponent).items():
        slope = -sympy.diff(exponent, symbol)
        whole = _largest_of(region, leaf, summed) if slope.is_number and slope.is_positive else None
        if whole is not None and _are_equal(exponent + slope * symbol, slope * whole):
            return True
    return False


def _are_equal(first: sympy.Expr, second: sympy.Expr) -> bool:
    """Whether two sums are equal but for how numbers that they were multiplied with are rounded."""
    one, other = (sympy.expand(each).as_coefficients_dict() for each in (first, second))
    return one.keys() == other.keys() and all(math.isclose(one[term], other[term], rel_tol=1e-12) for term in one)


def _largest_of(region: Region, leaf: Leaf, summed: tuple[Axis, ...]) -> sympy.Expr | None:
    """What a leaf is the maximum of over an axis; None where it is none."""
    node, dims = leaf.node, leaf.dims
    call = region.effects.calls[node]
    while call is not None and call.name not in ("amax", "max"):
        is_values = call.name == "getitem" and tensor_of(call.input) is None and call.arguments.get("#1") == 0
        is_same = is_values or call.name == "detach" or is_cast(call)
        source = dims if is_same else layout.read_input_dims(call, dims)
        if source is None or _rounds(call):
            return None
        node, dims = region.seen_by(node, call.input), source
        call = region.effects.calls[node]
    inner = None if call is None else contraction.reduction_dims(call, dims, summed)
    return None if call is None or inner is None else region.express(call.input, inner[0], call.node)
