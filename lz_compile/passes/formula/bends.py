"""How calls are read that bend, activations and parts of them, beside what every region reads; and what values that has."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import sympy
import torch

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Dims
from lz_compile.passes.formula.expressions import is_cast, number
from lz_compile.passes.formula.pointwise import Rule, applied, is_pointwise
from lz_compile.passes.graph.view import Call, tensor_of

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


_TORCH: Mapping[Any, Callable[..., torch.Tensor]] = {
    sympy.Pow: torch.pow,
    sympy.exp: torch.exp,
    sympy.log: torch.log,
    sympy.tanh: torch.tanh,
    sympy.erf: torch.erf,
    sympy.Abs: torch.abs,
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
    return _relu(x) + alpha * (sympy.exp(AT_MOST(x, sympy.S.Zero)) - 1)


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
    "elu": _elu,
    "leaky_relu": _leaky_relu,
    "threshold": applied(lambda x, floor, other: CHOICE(ABOVE(x, floor), x, other), "input", "threshold", "value"),
    "erf": applied(sympy.erf),
    "erfc": applied(lambda x: 1 - sympy.erf(x)),
    "ndtr": applied(_ndtr),
    "expm1": applied(lambda x: sympy.exp(x) - 1),
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
#: Those of every region that bend as well.
_OWN_BENDS = frozenset({"tanh", "exp", "exp2"})


def bends(call: Call) -> bool:
    """Whether a call is no polynomial of its operands."""
    return call.name in BENDS or call.name in _OWN_BENDS


def is_read(call: Call) -> bool:
    """Whether a call is pointwise and has a reading."""
    tensor, source = tensor_of(call.node), tensor_of(call.input)
    if tensor is None or (call.name in ("max", "min") and tensor_of(call.get("dim", call.get("other"))) is None):
        return False
    if call.name in BENDS or (is_pointwise(call) and not is_cast(call)):
        return True
    return is_cast(call) and source is not None and shape_of(source) == shape_of(tensor)
