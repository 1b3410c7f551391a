"""The meaning of pointwise operations: one line each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import sympy
import torch
from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.arithmetic import ARITHMETIC, CHOICES, LOGIC
from lz_compile.passes.formula.axes import Dims
from lz_compile.passes.formula.expressions import (
    CASTS,
    DROPOUT,
    FLOORED,
    NAN_TO_NUM,
    constant_value,
    is_indicator,
    plain_number,
    rounded,
    specialised,
)
from lz_compile.passes.graph.view import Call, is_boolean, is_floating, read, tensor_of

if TYPE_CHECKING:
    from lz_compile.passes.formula.algebra import Region

#: Constants up to this are no bound on scores, nor are those up to the least number of their dtype.
_BOTTOM = -1e30


#: What a call computes, given the region that reads its operands; None where it has no reading.
Rule: TypeAlias = "Callable[[Region, Call, Dims], sympy.Expr | None]"


def applied(function: Callable[..., sympy.Expr], *names: str) -> Rule:
    """A function of the operands of these names; of the input where there are none."""
    return lambda region, call, dims: function(*(region.operand(call, name, dims) for name in names or ("input",)))


def _computed(name: str) -> Rule:
    rule, logic = ARITHMETIC.get(name) or LOGIC[name], LOGIC.get(name)

    def compute(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        own = rule if logic is None or not is_boolean(call.node) else logic
        operands = [region.operand(call, each, dims) for each in own.operands]
        if own is logic and not all(is_indicator(each) for each in operands):
            return None
        return own.of(*operands, *(region.scalar(call.get(each, 1)) for each in own.factors))

    return compute


def _bitwise(name: str) -> Rule:
    """Boolean algebra over indicators; anything else (integers) has no reading."""
    compute = _computed(name)
    return lambda region, call, dims: compute(region, call, dims) if is_boolean(call.node) else None


def _mul(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    first, second = region.operand(call, "input", dims), region.operand(call, "other", dims)
    region.multiplies_masks |= any(bool(factor.free_symbols) and is_indicator(factor) for factor in (first, second))
    return ARITHMETIC["mul"].of(first, second)


def _div(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    if call.get("rounding_mode") is not None or not is_floating(call.node):
        return None
    return region.operand(call, "input", dims) / region.operand(call, "other", dims)


def _choice(*names: str) -> Rule:
    """A choice by a condition between two values, by the names of the three."""

    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        if any(call.get(name) is None for name in names):
            return None
        condition, chosen, otherwise = (region.operand(call, name, dims) for name in names)
        if not is_indicator(condition):
            return None
        leaves = [region.leaves.get(symbol) for part in (chosen, otherwise) for symbol in part.free_symbols]
        if any(leaf is not None and leaf.contraction is not None for leaf in leaves):
            region.selecting |= condition.free_symbols
        return CHOICES["where"].of(condition, chosen, otherwise)

    return rule


def _dropout(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    inner = region.operand(call, "input", dims)
    p = specialised(call.get("p", 0.5))
    return inner if not call.get("training", True) or p == 0 else DROPOUT(inner, sympy.Float(p))


def _nan_to_num(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    if call.get("nan") not in (None, 0, 0.0):
        return None
    return NAN_TO_NUM(region.operand(call, "input", dims))


def _floored(parameter: str) -> Rule:
    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        bound = call.get(parameter)
        constant = plain_number(bound)
        if isinstance(bound, fx.Node):
            source = region.effects.calls.get(bound)
            constant = None if source is None else constant_value(source)
        given = tensor_of(call.input)
        if constant is None or given is None or not given.is_floating_point() or call.get("max") is not None:
            return None
        if constant > max(_BOTTOM, torch.finfo(given.dtype).min):
            return None
        operand = region.operand(call, "input", dims)
        return FLOORED(operand, sympy.Float(constant)) if math.isfinite(rounded(constant, given.dtype)) else operand

    return rule


def _compare(is_equal: bool) -> Rule:
    """``mask == 0`` and ``mask != 0`` for a mask of zeros and ones; other comparisons are leaves."""

    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        value = plain_number(call.get("other"))
        if value not in (0, 1):
            return None
        mask = region.operand(call, "input", dims)
        if not is_indicator(mask):
            return None
        return mask if (value == 1) == is_equal else 1 - mask

    return rule


POINTWISE: Mapping[str, Rule] = {
    **{name: _computed(name) for name in ARITHMETIC},
    "mul": _mul,
    "div": _div,
    "pow": applied(lambda a, b: a**b, "input", "exponent"),
    "sqrt": applied(sympy.sqrt),
    "rsqrt": applied(lambda a: a ** sympy.Rational(-1, 2)),
    "reciprocal": applied(lambda a: 1 / a),
    "exp": applied(sympy.exp),
    "exp2": applied(lambda a: sympy.exp(a * math.log(2.0))),
    "log": applied(sympy.log),
    "tanh": applied(sympy.tanh),
    "where": _choice("condition", "input", "other"),
    "masked_fill": _choice("mask", "value", "input"),
    "nan_to_num": _nan_to_num,
    "dropout": _dropout,
    "max": _floored("dim"),
    "maximum": _floored("other"),
    "clamp": _floored("min"),
    "clamp_min": _floored("min"),
    **{name: _bitwise(name) for name in ("not", "and", "or")},
    "eq": _compare(is_equal=True),
    "ne": _compare(is_equal=False),
}


def is_pointwise(call: Call) -> bool:
    """Whether the call has a reading as a pointwise operation, or is a cast."""
    return call.name in POINTWISE or call.name in CASTS


def is_dead(node: fx.Node) -> bool:
    """Whether nobody looks at a value: rearranged ones (models reshape just to name a thing), or one that is computed."""
    call = read(node)
    if call is None or call.is_inplace:
        return False
    if not node.users and is_pointwise(call):
        return True
    return layout.rearranges(call) and all(is_dead(user) for user in node.users)


def dead_users(node: fx.Node) -> set[fx.Node]:
    """Everything that is made of ``node`` and that nobody looks at."""
    return {each for user in node.users if is_dead(user) for each in {user} | dead_users(user)}
