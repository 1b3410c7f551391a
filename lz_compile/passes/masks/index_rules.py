"""What each operation computes at an index, from the values of its inputs at the indices that it reads: a rule for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import Dims
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.masks import indexing, piecewise, position_rules
from lz_compile.passes.masks.index_operands import boolean, merged, numeric, operand
from lz_compile.passes.masks.piecewise import (
    Number,
    Piecewise,
    Value,
    combined,
    compared,
    everywhere,
    held,
    selection,
)
from lz_compile.passes.masks.polynomial import ONE, Polynomial, number, quotient
from lz_compile.passes.masks.predicates import (
    FALSE,
    TRUE,
    Predicate,
    both,
    choice,
    either,
    negation,
)

if TYPE_CHECKING:
    from lz_compile.passes.masks.index_reading import Reader

Rule: TypeAlias = "Callable[[Reader, Call, Dims], Value | None]"


def read(reader: Reader, call: Call, dims: Dims) -> Value | None:
    """The value of a call's result at an index, None where no rule tells it."""
    rule = _RULES.get(call.name) or position_rules.RULES.get(call.name) or indexing.RULES.get(call.name)
    value = None if rule is None else rule(reader, call, dims)
    return None if value is None else _as(value, _dtype(call))


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


def _second(call: Call) -> Any:
    return call.get("other", call.arguments.get("#1"))


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


def _add(sign: int, *, is_reversed: bool = False) -> Rule:
    def rule(reader: Reader, call: Call, dims: Dims) -> Value | None:
        first, second = call.input, _second(call)
        if is_reversed:
            first, second = second, first
        dtype = _dtype(call)
        if dtype == torch.bool:
            parts = [boolean(operand(reader, call, each, dims)) for each in (first, second)]
            return _logical(either, parts) if sign > 0 else None
        numbers = _numbers(reader, call, dims, dtype, first, second)
        alpha = reader.scalar(call.get("alpha", 1))
        if numbers is None or alpha is None or alpha.single is None:
            return None
        scaled = combined(piecewise.multiplied, numbers[1], everywhere(alpha.single.scaled(sign)))
        return None if scaled is None else combined(piecewise.added, numbers[0], scaled)

    return rule


def _mul(reader: Reader, call: Call, dims: Dims) -> Value | None:
    dtype = _dtype(call)
    if dtype == torch.bool:
        return _logical(both, [boolean(operand(reader, call, each, dims)) for each in (call.input, _second(call))])
    numbers = _numbers(reader, call, dims, dtype, call.input, _second(call))
    if numbers is None:
        return None
    for value, given in zip((call.input, _second(call)), numbers, strict=True):
        is_cut = any(isinstance(each, float) and math.isinf(each) for _, each in given.cases)
        if is_cut and isinstance(value, (int, float)) and math.isfinite(value):
            return None  # whether the dtype or a wider one holds the factor is the kernel's choice, and decides 0 * inf
    return combined(piecewise.multiplied, *numbers)


def _div(reader: Reader, call: Call, dims: Dims) -> Value | None:
    mode = call.get("rounding_mode")
    if mode == "floor":
        return _floor_divide(reader, call, dims)
    numbers = _numbers(reader, call, dims, _dtype(call), call.input, _second(call))
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
    numbers = _numbers(reader, call, dims, _dtype(call), call.input, _second(call))
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


def _neg(reader: Reader, call: Call, dims: Dims) -> Value | None:
    numbers = _numbers(reader, call, dims, _dtype(call), call.input)
    return None if numbers is None else combined(lambda each, _: piecewise.negated(each), numbers[0], everywhere(ONE))


def _abs(reader: Reader, call: Call, dims: Dims) -> Value | None:
    numbers = _numbers(reader, call, dims, _dtype(call), call.input)
    if numbers is None:
        return None
    opposite = combined(lambda each, _: piecewise.negated(each), numbers[0], everywhere(ONE))
    return None if opposite is None else _larger(numbers[0], opposite)


def _larger(one: Piecewise, two: Piecewise) -> Piecewise | None:
    """The larger of two numbers."""
    is_second = compared(piecewise.at_most, one, two)
    has_nan = any(isinstance(each, float) and math.isnan(each) for value in (one, two) for _, each in value.cases)
    return None if is_second is None or has_nan else selection(is_second, two, one)


def _smaller(one: Piecewise, two: Piecewise) -> Piecewise | None:
    is_first = compared(piecewise.at_most, one, two)
    has_nan = any(isinstance(each, float) and math.isnan(each) for value in (one, two) for _, each in value.cases)
    return None if is_first is None or has_nan else selection(is_first, one, two)


def _extreme(choose: Callable[[Piecewise, Piecewise], Piecewise | None]) -> Rule:
    """The larger or smaller of two tensors (of one tensor, it is a reduction)."""

    def rule(reader: Reader, call: Call, dims: Dims) -> Value | None:
        other = call.get("other", call.get("dim", call.arguments.get("#1")))
        if tensor_of(other) is None:
            return None
        numbers = _numbers(reader, call, dims, _dtype(call), call.input, other)
        return None if numbers is None else choose(*numbers)

    return rule


def _clamp(reader: Reader, call: Call, dims: Dims) -> Value | None:
    least, most = call.get("min"), call.get("max", _second(call) if call.name == "clamp_max" else None)
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
        first, second = call.input, _second(call)
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


def _logical(function: Callable[..., Predicate], parts: list[Predicate | None]) -> Predicate | None:
    known = [each for each in parts if each is not None]
    return function(*known) if len(known) == len(parts) else None


def _logic(function: Callable[..., Predicate]) -> Rule:
    """Logic on booleans; on integers it is bitwise, and only named logical ones are read."""

    def rule(reader: Reader, call: Call, dims: Dims) -> Value | None:
        if _dtype(call) != torch.bool:
            return None
        values = [call.input] if call.name == "not" else [call.input, _second(call)]
        return _logical(function, [boolean(operand(reader, call, each, dims)) for each in values])

    return rule


def _exclusive(one: Predicate, two: Predicate) -> Predicate:
    return choice(one, negation(two), two)


def _where(reader: Reader, call: Call, dims: Dims) -> Value | None:
    return _selected(reader, call, dims, call.get("condition"), call.get("input"), call.get("other"))


def _masked_fill(reader: Reader, call: Call, dims: Dims) -> Value | None:
    return _selected(reader, call, dims, call.get("mask"), call.get("value"), call.input)


def _selected(reader: Reader, call: Call, dims: Dims, condition: Any, chosen: Any, otherwise: Any) -> Value | None:
    if chosen is None or otherwise is None:
        return None
    where = boolean(operand(reader, call, condition, dims))
    if where is None:
        return None
    dtype = _dtype(call)
    parts = [_as(operand(reader, call, each, dims), dtype) for each in (chosen, otherwise)]
    if where in (TRUE, FALSE):
        return parts[0 if where == TRUE else 1]
    return merged(where, *parts)


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
    value = call.get("value", call.arguments.get("#1", 0))
    return operand(reader, call, 0 if call.name == "zero" else value, dims)


_RULES: Mapping[str, Rule] = {
    "add": _add(1),
    "sub": _add(-1),
    "rsub": _add(-1, is_reversed=True),
    "mul": _mul,
    "div": _div,
    "floordiv": _floor_divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "mod": _remainder,
    "neg": _neg,
    "abs": _abs,
    "maximum": _extreme(_larger),
    "minimum": _extreme(_smaller),
    "max": _extreme(_larger),
    "min": _extreme(_smaller),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "le": _comparison(piecewise.at_most),
    "lt": _comparison(piecewise.below),
    "ge": _comparison(piecewise.at_most, is_swapped=True),
    "gt": _comparison(piecewise.below, is_swapped=True),
    "eq": _comparison(piecewise.equal),
    "ne": _comparison(_unequal),
    "not": _logic(negation),
    "and": _logic(both),
    "or": _logic(either),
    "xor": _logic(_exclusive),
    "logical_xor": _logic(_exclusive),
    "bitwise_xor": _logic(_exclusive),
    "where": _where,
    "masked_fill": _masked_fill,
    "isinf": _isinf,
    "isneginf": _isinf,
    "isposinf": _isinf,
    "fill": _fill,
    "zero": _fill,
    **dict.fromkeys(
        (
            "to",
            "float",
            "half",
            "bfloat16",
            "double",
            "type_as",
            "type",
            "bool",
            "int",
            "long",
            "short",
            "byte",
            "char",
        ),
        _cast,
    ),
    **dict.fromkeys(("_to_copy", "convert_element_type", "detach", "cuda", "cpu"), _cast),
}
