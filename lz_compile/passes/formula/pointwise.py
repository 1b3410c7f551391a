"""The meaning of pointwise operations: one line each."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.arithmetic import ARITHMETIC, CHOICES, LOGIC
from lz_compile.passes.formula.axes import Dims
from lz_compile.passes.formula.expressions import (
    CASTS,
    DROPOUT,
    FLOORED,
    NAN_TO_NUM,
    constant_value,
    is_cast,
    is_indicator,
    number,
    plain_number,
    rounded,
    specialised,
)
from lz_compile.passes.graph.view import Call, is_boolean, is_floating, read, tensor_of

if TYPE_CHECKING:
    from lz_compile.passes.formula.algebra import Region

#: Constants up to this are no bound on scores, nor are those up to the least number of their dtype.
_BOTTOM = -1e30
#: How far from a half an exponent may be that numbers of 53 bits make.
_ROUNDING = 1e-13

_EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "ldexp"})

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


def _addcdiv(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    added, over, under = (region.operand(call, name, dims) for name in ("input", "tensor1", "tensor2"))
    return added + region.scalar(call.get("value", 1)) * over / under


def _exponential(exponent: sympy.Expr) -> sympy.Expr:
    """``exp`` of it: multiples of logarithms are powers, of halves where floating-point arithmetic left nearly one."""
    if exponent.has(sympy.log):
        pairs = [term.as_coeff_Mul() for term in sympy.Add.make_args(sympy.expand_mul(exponent))]
        near = [(sympy.Rational(round(2 * x), 2), x, rest) for x, rest in pairs]
        exponent = sympy.Add(*((half if abs(half - x) < _ROUNDING else x) * rest for half, x, rest in near))
    return sympy.exp(exponent)


def _pow(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    base, exponent = (region.operand(call, name, dims) for name in ("input", "exponent"))
    if not base.is_number or exponent.is_number or not is_floating(call.node):
        return sympy.Pow(base, exponent)
    return _exponential(exponent * math.log(base)) if base.is_positive else None


def is_exponential(call: Call | None) -> bool:
    """Whether a call raises a positive number to the power of a tensor: ``exp``, ``exp2``, ``c ** x``, ``exp(x) - 1``."""
    if call is None or call.name != "pow":
        return call is not None and call.name in _EXPONENTIALS
    source = read(call.input) if isinstance(call.input, fx.Node) else None
    base = plain_number(call.input) if source is None else constant_value(source)
    return base is not None and 0 < base < math.inf and is_floating(call.node)


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
    "addcdiv": _addcdiv,
    "pow": _pow,
    "hypot": applied(lambda x, y: sympy.sqrt(x**2 + y**2), "input", "other"),
    "sqrt": applied(sympy.sqrt),
    "rsqrt": applied(lambda a: a ** sympy.Rational(-1, 2)),
    "reciprocal": applied(lambda a: 1 / a),
    "exp": applied(_exponential),
    "exp2": applied(lambda a: _exponential(a * math.log(2.0))),
    "expm1": applied(lambda a: _exponential(a) - 1),
    "ldexp": applied(lambda x, y: x * _exponential(y * math.log(2.0)), "input", "other"),
    "log": applied(sympy.log),
    "log2": applied(lambda a: sympy.log(a) / math.log(2.0)),
    "log10": applied(lambda a: sympy.log(a) / math.log(10.0)),
    "logaddexp": applied(lambda x, y: sympy.log(sympy.exp(x) + sympy.exp(y)), "input", "other"),
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


# ---- what bends ------------------------------------------------------------------------------------------------------
# Activations and parts of them, which are read where somebody asks for them, and what values that has.


#: Stay unevaluated in expressions: ``max(x, c)``, ``min(x, c)``, ``1 if x > y else 0`` and ``a if c else b``.
AT_LEAST = sympy.Function("at_least")
AT_MOST = sympy.Function("at_most")
ABOVE = sympy.Function("above")
CHOICE = sympy.Function("choice")


def evaluate(expression: sympy.Expr, values: Mapping[sympy.Symbol, Any]) -> Any:
    """The value of an expression, each symbol a float64 tensor or a number.

    Raises:
        LookupError: it holds a symbol without a value, or a function that is none of one value.
    """
    if expression.is_Symbol:
        return values[expression]
    if not expression.args:
        return float(expression)
    operands = [evaluate(argument, values) for argument in expression.args]
    if isinstance(expression, sympy.Add):
        return reduce(operator.add, operands)
    if isinstance(expression, sympy.Mul):
        return reduce(operator.mul, operands)
    function = _TORCH.get(expression.func)
    if function is None:
        raise LookupError(f"no value for {expression.func}")
    return function(*(tensor(operand) for operand in operands))


def tensor(value: Any) -> torch.Tensor:
    """A value as a tensor in float64."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


#: What PyTorch calls functions of one value.
FUNCTIONS: Mapping[Any, Callable[..., torch.Tensor]] = {
    **{getattr(sympy, name): getattr(torch, name) for name in ("exp", "log", "tanh", "erf", "acos")},
    sympy.Abs: torch.abs,
}
_TORCH: Mapping[Any, Callable[..., torch.Tensor]] = {
    **FUNCTIONS,
    sympy.Pow: torch.pow,
    AT_LEAST: torch.maximum,
    AT_MOST: torch.minimum,
    ABOVE: lambda x, y: (x > y).double(),
    CHOICE: lambda c, a, b: torch.where(c != 0, a, b),
}


def _sigmoid(x: sympy.Expr) -> sympy.Expr:
    return 1 / (1 + sympy.exp(-x))


def _relu(x: sympy.Expr) -> sympy.Expr:
    return AT_LEAST(x, sympy.S.Zero)


def _softplus(x: sympy.Expr) -> sympy.Expr:
    return AT_LEAST(x, sympy.S.Zero) + sympy.log(1 + sympy.exp(-sympy.Abs(x)))


def _ndtr(x: sympy.Expr) -> sympy.Expr:
    return (1 + sympy.erf(x / math.sqrt(2.0))) / 2


def _gelu(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    x = region.operand(call, "input", dims)
    if call.get("approximate", "none") == "none":
        return x * _ndtr(x)
    return x * (1 + sympy.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _softplus_call(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    if call.get("beta", 1) != 1 or call.get("threshold", 20) < 20:
        return None
    return _softplus(region.operand(call, "input", dims))


def _elu(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    x, alpha = region.operand(call, "input", dims), number(call.get("alpha", 1.0))
    return _relu(x) + alpha * (sympy.exp(AT_MOST(x, sympy.S.Zero) / (alpha if call.name == "celu" else 1)) - 1)


def _leaky_relu(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    x = region.operand(call, "input", dims)
    return _relu(x) + number(call.get("negative_slope", 0.01)) * AT_MOST(x, sympy.S.Zero)


def _bounded(low: str, high: str, defaults: tuple[float | None, float | None]) -> Rule:
    """``max(x, low)`` and ``min(x, high)``, each where it is given."""

    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr:
        x = region.operand(call, "input", dims)
        for name, default, function in ((low, defaults[0], AT_LEAST), (high, defaults[1], AT_MOST)):
            if call.get(name, default) is not None:
                bound = region.operand(call, name, dims) if name in call.arguments else number(default)
                x = function(x, bound)
        return x

    return rule


def _extremum(function: Any, name: str) -> Rule:
    """``maximum(x, y)``, and ``max(x, y)`` with a tensor where a dimension may stand."""

    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        other = call.get(name, call.get("other"))
        if tensor_of(other) is None:
            return None
        given = name if call.get(name) is not None else "other"
        return function(region.operand(call, "input", dims), region.operand(call, given, dims))

    return rule


def _where(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    if call.get("input") is None or call.get("other") is None:
        return None
    return CHOICE(*(region.operand(call, name, dims) for name in ("condition", "input", "other")))


#: How calls are read here, beside those that every region reads. What bends is an activation or part of one.
BENDS: Mapping[str, Rule] = {
    "sigmoid": applied(_sigmoid),
    "logsigmoid": applied(lambda x: -_softplus(-x)),
    "silu": applied(lambda x: x * _sigmoid(x)),
    "gelu": _gelu,
    "mish": applied(lambda x: x * sympy.tanh(_softplus(x))),
    "hardswish": applied(lambda x: x * AT_MOST(_relu(x + 3), sympy.Integer(6)) / 6),
    "hardsigmoid": applied(lambda x: AT_MOST(_relu(x + 3), sympy.Integer(6)) / 6),
    "relu": applied(_relu),
    "relu6": applied(lambda x: AT_MOST(_relu(x), sympy.Integer(6))),
    "softplus": _softplus_call,
    **dict.fromkeys(("elu", "celu"), _elu),
    "leaky_relu": _leaky_relu,
    "threshold": applied(lambda x, floor, other: CHOICE(ABOVE(x, floor), x, other), "input", "threshold", "value"),
    **{name: applied(getattr(sympy, name)) for name in ("acos", "erf")},
    "erfc": applied(lambda x: 1 - sympy.erf(x)),
    "ndtr": applied(_ndtr),
    "log1p": applied(lambda x: sympy.log(1 + x)),
    "abs": applied(sympy.Abs),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _bounded("min", "max", (None, None))),
    "hardtanh": _bounded("min_val", "max_val", (-1.0, 1.0)),
    "maximum": _extremum(AT_LEAST, "other"),
    "minimum": _extremum(AT_MOST, "other"),
    "max": _extremum(AT_LEAST, "dim"),
    "min": _extremum(AT_MOST, "dim"),
    "where": _where,
    "masked_fill": applied(CHOICE, "mask", "value", "input"),
    **dict.fromkeys(("gt", "ge"), applied(ABOVE, "input", "other")),
    **dict.fromkeys(("lt", "le"), applied(ABOVE, "other", "input")),
}


def bends(call: Call) -> bool:
    """Whether a call is no polynomial of its operands."""
    return call.name in BENDS or call.name == "tanh" or is_exponential(call)


def is_read(call: Call) -> bool:
    """Whether a call is pointwise and has a reading."""
    tensor, source = tensor_of(call.node), tensor_of(call.input)
    if tensor is None or (call.name in ("max", "min") and tensor_of(call.get("dim", call.get("other"))) is None):
        return False
    if call.name in BENDS or (is_pointwise(call) and not is_cast(call)):
        return True
    return is_cast(call) and source is not None and shape_of(source) == shape_of(tensor)


def is_pointwise(call: Call) -> bool:
    """Whether the call has a reading as a pointwise operation, or is a cast."""
    return call.name in POINTWISE or call.name in CASTS


def is_moved(call: Call | None) -> bool:
    """Whether a call casts or rearranges a tensor, and does nothing else."""
    is_said = call is not None and call.name == "detach"  # also of what has no gradient: blends are told by it
    return call is not None and not is_said and (is_cast(call) or layout.is_in_axes(call))
