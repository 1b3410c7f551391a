"""What each operation computes at an index, from the values of its inputs at the indices that it reads: a rule for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import expressions, moves, piecewise
from lz_compile.passes.formula.arithmetic import ARITHMETIC
from lz_compile.passes.formula.axes import Dims
from lz_compile.passes.formula.pieces import Piece
from lz_compile.passes.formula.piecewise import (
    Number,
    Piecewise,
    Value,
    combined,
    compared,
    everywhere,
    held,
    selection,
)
from lz_compile.passes.formula.polynomial import ONE, Polynomial, number, quotient
from lz_compile.passes.formula.position_rules import POSITIONS, SUMS, Rule, boolean, merged, numeric, operand
from lz_compile.passes.formula.predicates import FALSE, TRUE, Predicate, both, choice, either, negation
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of

if TYPE_CHECKING:
    from lz_compile.passes.formula.reader import Reader


def read(reader: Reader, call: Call, dims: Dims) -> Value | None:
    """The value of a call's result at an index, None where no rule tells it."""
    move = moves.RULES.get(call.name)
    rule = RULES.get(call.name)
    if move is not None:
        value = _chosen(reader, move(reader, call, dims) or (), _dtype(call))
    else:
        value = None if rule is None else rule(reader, call, dims)
    return None if value is None else _as(value, _dtype(call))


def _chosen(reader: Reader, pieces: Sequence[Piece], dtype: torch.dtype) -> Value | None:
    """The first of some pieces whose condition holds; None where there are none, or too many cases."""
    value: Value | None = None
    for piece in reversed(pieces):
        own = reader.value(piece.value, piece.dims, piece.by)
        own = boolean(own) if dtype == torch.bool else own
        value = own if piece.when == TRUE else merged(piece.when, own, value)
        if value is None:
            return None
    return value


# ---- operands -----------------------------------------------------------------------------------------------------


def _dtype(call: Call) -> torch.dtype:
    tensor = known_tensor(call.node)
    return tensor.dtype


def _as(value: Value | None, dtype: torch.dtype) -> Value | None:
    """The value as ``dtype`` holds it."""
    if value is None or dtype == torch.bool:
        return boolean(value)
    number_ = numeric(value)
    return None if number_ is None else held(number_, dtype)


def _numbers(reader: Reader, call: Call, dims: Dims, dtype: torch.dtype, *values: Any) -> list[Piecewise] | None:
    """Arguments as numbers in the dtype that they are computed in."""
    found = []
    for value in values:
        each = numeric(operand(reader, call, value, dims))
        each = None if each is None else held(each, dtype)
        if each is None:
            return None
        found.append(each)
    return found


# ---- arithmetic ---------------------------------------------------------------------------------------------------


def _computed(name: str) -> Rule:
    rule, logic = ARITHMETIC[name], {"add": either, "mul": both}.get(name)

    def compute(reader: Reader, call: Call, dims: Dims) -> Value | None:
        given, dtype = [call.get(each) for each in rule.operands], _dtype(call)
        if dtype == torch.bool:
            return None if logic is None else _logical(logic, _booleans(reader, call, dims, given))
        numbers = _numbers(reader, call, dims, dtype, *given)
        factors = [reader.scalar(call.get(each, 1)) for each in rule.factors]
        return None if numbers is None or None in factors else rule.of(*numbers, *factors)

    return compute


_PRODUCT = _computed("mul")


def _mul(reader: Reader, call: Call, dims: Dims) -> Value | None:
    given, dtype = (call.input, call.get("other")), _dtype(call)
    numbers = None if dtype == torch.bool else _numbers(reader, call, dims, dtype, *given)
    for value, each in zip(given, numbers or (), strict=False):
        is_cut = any(isinstance(case, float) and math.isinf(case) for _, case in each.cases)
        if is_cut and isinstance(value, (int, float)) and math.isfinite(value):
            return None  # whether the dtype or a wider one holds the factor is the kernel's choice, and decides 0 * inf
    return _PRODUCT(reader, call, dims)


def _div(reader: Reader, call: Call, dims: Dims) -> Value | None:
    mode = call.get("rounding_mode")
    if mode == "floor":
        return _floor_divide(reader, call, dims)
    numbers = _numbers(reader, call, dims, _dtype(call), call.input, call.get("other"))
    if numbers is None or mode is not None:
        return None
    divisor = numbers[1].single
    constant = None if divisor is None else divisor.constant
    if not constant:
        return None
    return combined(piecewise.multiplied, numbers[0], everywhere(number(1 / Fraction(constant))))


def _floor_divide(reader: Reader, call: Call, dims: Dims) -> Value | None:
    parts = _division(reader, call, dims)
    if parts is None:
        return None
    value, divisor = parts
    return _mapped(value, lambda each: quotient(each, divisor, reader.quotients))


def _remainder(reader: Reader, call: Call, dims: Dims) -> Value | None:
    parts = _division(reader, call, dims)
    if parts is None:
        return None
    value, divisor = parts
    return _mapped(value, lambda each: each - quotient(each, divisor, reader.quotients).scaled(divisor))


def _division(reader: Reader, call: Call, dims: Dims) -> tuple[Piecewise, int] | None:
    """What is divided and by which positive integer, where both are integers."""
    numbers = _numbers(reader, call, dims, _dtype(call), call.input, call.get("other"))
    if numbers is None or not numbers[0].is_exact:
        return None
    single = numbers[1].single
    divisor = None if single is None else single.constant
    return (numbers[0], int(divisor)) if divisor and divisor == int(divisor) and divisor > 0 else None


def _mapped(value: Piecewise, function: Callable[[Polynomial], Polynomial]) -> Piecewise | None:
    """A function of integers, case by case."""

    def on_integer(each: Number, _: Number) -> Number | None:
        if not isinstance(each, Polynomial) or not each.is_integer or any(v.is_float for v in each.variables):
            return None
        return function(each)

    return combined(on_integer, value, everywhere(ONE))


def _abs(reader: Reader, call: Call, dims: Dims) -> Value | None:
    numbers = _numbers(reader, call, dims, _dtype(call), call.input)
    if numbers is None:
        return None
    return _larger(numbers[0], -numbers[0])


def _larger(one: Piecewise, two: Piecewise) -> Piecewise | None:
    """The larger of two numbers."""
    is_second = _at_most(one, two)
    return None if is_second is None else selection(is_second, two, one)


def _smaller(one: Piecewise, two: Piecewise) -> Piecewise | None:
    is_first = _at_most(one, two)
    return None if is_first is None else selection(is_first, one, two)


def _at_most(one: Piecewise, two: Piecewise) -> Predicate | None:
    """Where one number is no larger than another one; None where one may be NaN."""
    has_nan = any(isinstance(each, float) and math.isnan(each) for value in (one, two) for _, each in value.cases)
    return None if has_nan else compared(piecewise.at_most, one, two)


def _extreme(choose: Callable[[Piecewise, Piecewise], Piecewise | None]) -> Rule:
    """The larger or smaller of two tensors (of one tensor, it is a reduction)."""

    def rule(reader: Reader, call: Call, dims: Dims) -> Value | None:
        other = call.get("other", call.get("dim"))
        if tensor_of(other) is None:
            return None
        numbers = _numbers(reader, call, dims, _dtype(call), call.input, other)
        return None if numbers is None else choose(*numbers)

    return rule


def _clamp(reader: Reader, call: Call, dims: Dims) -> Value | None:
    least, most = call.get("min"), call.get("max", None)
    found = _numbers(reader, call, dims, _dtype(call), call.input)
    value = None if found is None else found[0]
    for bound, choose in ((least, _larger), (most, _smaller)):
        if bound is not None and value is not None:
            bounds = _numbers(reader, call, dims, _dtype(call), bound)
            value = None if bounds is None else choose(value, bounds[0])
    return value


# ---- conditions ---------------------------------------------------------------------------------------------------


def _comparison(function: Callable[[Number, Number], Predicate | None], *, is_swapped: bool = False) -> Rule:
    def rule(reader: Reader, call: Call, dims: Dims) -> Value | None:
        first, second = call.input, call.get("other")
        numbers = _numbers(reader, call, dims, _compared_in(first, second), first, second)
        if numbers is None:
            return None
        return compared(function, *(reversed(numbers) if is_swapped else numbers))

    return rule


def _unequal(one: Number, two: Number) -> Predicate | None:
    same = piecewise.equal(one, two)
    return None if same is None else negation(same)


def _compared_in(first: Any, second: Any) -> torch.dtype:
    """The dtype that two values are compared in: booleans as integers."""
    values = [tensor_of(each) for each in (first, second)]
    tensors = [each for each in values if each is not None]
    others = [each for each, tensor in zip((first, second), values, strict=True) if tensor is None]
    if len(tensors) == 2:
        dtype = torch.result_type(*tensors)
    else:
        is_fractional = any(isinstance(each, float) for each in others)
        own = tensors[0].dtype
        dtype = torch.get_default_dtype() if is_fractional and not own.is_floating_point else own
    return torch.int64 if dtype == torch.bool else dtype


def _booleans(reader: Reader, call: Call, dims: Dims, values: Sequence[Any]) -> list[Predicate | None]:
    return [boolean(operand(reader, call, each, dims)) for each in values]


def _logical(function: Callable[..., Predicate], parts: list[Predicate | None]) -> Predicate | None:
    known = [each for each in parts if each is not None]
    return function(*known) if len(known) == len(parts) else None


def _selection(*names: str) -> Rule:
    """A choice by a condition between two values, by the names of the three."""

    def rule(reader: Reader, call: Call, dims: Dims) -> Value | None:
        condition, *values = map(call.get, names)
        if None in values:
            return None
        where = boolean(operand(reader, call, condition, dims))
        if where is None:
            return None
        parts = [_as(operand(reader, call, each, dims), _dtype(call)) for each in values]
        return parts[0 if where == TRUE else 1] if where in (TRUE, FALSE) else merged(where, *parts)

    return rule


def _logic(function: Callable[..., Predicate]) -> Rule:
    """Logic on booleans; on integers it is bitwise, and only named logical ones are read."""

    def rule(reader: Reader, call: Call, dims: Dims) -> Value | None:
        if _dtype(call) != torch.bool:
            return None
        values = [call.input] if call.name == "not" else [call.input, call.get("other")]
        return _logical(function, _booleans(reader, call, dims, values))

    return rule


def _isinf(reader: Reader, call: Call, dims: Dims) -> Value | None:
    value = numeric(operand(reader, call, call.input, dims))
    if value is None or any(isinstance(n, Polynomial) and any(v.is_float for v in n.variables) for _, n in value.cases):
        return None
    wanted = {"isinf": (math.inf, -math.inf), "isneginf": (-math.inf,), "isposinf": (math.inf,)}[call.name]
    return either(*(where for where, each in value.cases if isinstance(each, float) and each in wanted))


# ---- casts and fills ----------------------------------------------------------------------------------------------


def _cast(reader: Reader, call: Call, dims: Dims) -> Value | None:
    source, result = tensor_of(call.input), tensor_of(call.node)
    if source is None or result is None or shape_of(source) != shape_of(result):
        return None
    value = operand(reader, call, call.input, dims)
    if value is None or not isinstance(value, Piecewise) or not source.is_floating_point():
        return value
    if result.dtype == torch.bool or result.is_floating_point():
        return value
    return value if value.is_exact and all(_is_whole(each) for _, each in value.cases) else None


def _is_whole(value: Number) -> bool:
    return isinstance(value, Polynomial) and value.is_integer and not any(v.is_float for v in value.variables)


def _fill(reader: Reader, call: Call, dims: Dims) -> Value | None:
    return operand(reader, call, call.get("value", 0), dims)


#: What changes the dtype or the device only, integers included.
CASTS = expressions.CASTS | {"int", "long", "short", "byte", "char", "detach", "cuda", "cpu"}
#: What each operation computes; those that move elements are in :data:`moves.RULES`.
RULES: Mapping[str, Rule] = {
    **POSITIONS,
    **SUMS,
    **{name: _computed(name) for name in ARITHMETIC},
    "mul": _mul,
    "div": _div,
    **dict.fromkeys(("floordiv", "floor_divide"), _floor_divide),
    **dict.fromkeys(("remainder", "mod"), _remainder),
    "abs": _abs,
    **dict.fromkeys(("maximum", "max"), _extreme(_larger)),
    **dict.fromkeys(("minimum", "min"), _extreme(_smaller)),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    "le": _comparison(piecewise.at_most),
    "lt": _comparison(piecewise.below),
    "ge": _comparison(piecewise.at_most, is_swapped=True),
    "gt": _comparison(piecewise.below, is_swapped=True),
    "eq": _comparison(piecewise.equal),
    "ne": _comparison(_unequal),
    "not": _logic(negation),
    "and": _logic(both),
    "or": _logic(either),
    **dict.fromkeys(("xor", "logical_xor", "bitwise_xor"), _logic(lambda one, two: choice(one, negation(two), two))),
    "where": _selection("condition", "input", "other"),
    "masked_fill": _selection("mask", "value", "input"),
    **dict.fromkeys(("isinf", "isneginf", "isposinf"), _isinf),
    **dict.fromkeys(("fill", "zero"), _fill),
    **dict.fromkeys(CASTS, _cast),
}
