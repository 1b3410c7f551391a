"""Numbers that depend on conditions: ``torch.where(key <= query, 0, -inf)`` is 0 where that holds and ``-inf`` elsewhere.

A piecewise number is a few cases, of which exactly one holds at every index. Arithmetic goes case by case, in the dtype of
its result: constants are rounded as that holds them, and what is computed from positions is exact only where the dtype
holds every value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TypeAlias, TypeVar

import torch

from lz_compile.passes.formula.axes import Axis, LayoutError
from lz_compile.passes.formula.polynomial import LARGEST_EXTENT, ONE, ZERO, Polynomial, Variable, lower, number, upper
from lz_compile.passes.formula.predicates import (
    FALSE,
    TRUE,
    Constant,
    Predicate,
    Zero,
    at_least,
    both,
    conjuncts,
    either,
    negation,
    variables,
    weight,
    zero,
)
from lz_compile.passes.graph.view import tensor_of

#: A polynomial; infinities and NaN are floats.
Number: TypeAlias = "Polynomial | float"

T = TypeVar("T")

#: Data are taken to be small enough to be multiplied by this.
_LARGEST_FACTOR = 2**16
#: More cases than this are no mask.
_MANY = 8


@dataclass(frozen=True)
class Piecewise:
    """A number by cases. ``is_exact`` says that no rounding came in where it depends on positions or data."""

    cases: tuple[tuple[Predicate, Number], ...]
    is_exact: bool = True

    @property
    def single(self) -> Polynomial | None:
        """The polynomial that this is everywhere; None for cases, infinities and NaN."""
        value = self.cases[0][1]
        return value if len(self.cases) == 1 and isinstance(value, Polynomial) else None

    @property
    def variables(self) -> frozenset[Variable]:
        """Everything that the number depends on."""
        conditions = (each for where, _ in self.cases for each in variables(where))
        numbers = (each for _, value in self.cases if isinstance(value, Polynomial) for each in value.variables)
        return frozenset((*conditions, *numbers))

    @property
    def axes(self) -> frozenset[Axis]:
        """Every axis that the number depends on."""
        return frozenset(axis for each in self.variables for axis in each.axes)

    def __add__(self, other: Piecewise) -> Piecewise:
        return _must(combined(added, self, other))

    def __mul__(self, other: Piecewise) -> Piecewise:
        return _must(combined(multiplied, self, other))

    def __neg__(self) -> Piecewise:
        return _must(combined(lambda each, _: -each, self, everywhere(ONE)))

    def __sub__(self, other: Piecewise) -> Piecewise:
        return self + -other


def _must(value: Piecewise | None) -> Piecewise:
    if value is None:
        raise LayoutError("a number of too many cases, or out of which one cancels that may be NaN")
    return value


Value: TypeAlias = "Predicate | Piecewise"


def weight_of(value: Value) -> int:
    """How many simple conditions a value depends on."""
    if isinstance(value, Piecewise):
        return sum(weight(where) for where, _ in value.cases)
    return weight(value)


def everywhere(value: Number, *, is_exact: bool = True) -> Piecewise:
    """The same number at every index."""
    return Piecewise(((TRUE, value),), is_exact)


def plain(value: float) -> Number:
    """A Python number as a constant, exactly."""
    return number(Fraction(value)) if math.isfinite(value) else float(value)


def selection(condition: Predicate, chosen: Piecewise, otherwise: Piecewise) -> Piecewise | None:
    """``chosen`` where the condition holds, else ``otherwise``; None where that is too many cases."""
    opposite = negation(condition)
    cases = [(both(condition, where), value) for where, value in chosen.cases]
    cases += [(both(opposite, where), value) for where, value in otherwise.cases]
    return _gathered(cases, is_exact=chosen.is_exact and otherwise.is_exact)


def indicator(predicate: Predicate) -> Piecewise:
    """1 where it holds, 0 elsewhere."""
    if isinstance(predicate, Constant):
        return everywhere(ONE if predicate.holds else ZERO)
    return Piecewise(((predicate, ONE), (negation(predicate), ZERO)))


def combined(function: Callable[[Number, Number], Number | None], one: Piecewise, two: Piecewise) -> Piecewise | None:
    """A function of two numbers, case by case; None where it has no result or too many cases."""
    cases: list[tuple[Predicate, Number]] | None = _of_cases(function, one, two)
    return None if cases is None else _gathered(cases, is_exact=one.is_exact and two.is_exact)


def _of_cases(
    function: Callable[[Number, Number], T | None], one: Piecewise, two: Piecewise
) -> list[tuple[Predicate, T]] | None:
    """What a function gives in each case that can be; None where it has no result in one."""
    found: list[tuple[Predicate, T]] = []
    for (first, a), (second, b) in itertools.product(one.cases, two.cases):
        where = both(first, second)
        result = None if where == FALSE else function(a, b)
        if result is not None:
            found.append((where, result))
        elif where != FALSE:
            return None
    return found


def compared(
    function: Callable[[Number, Number], Predicate | None], one: Piecewise, two: Piecewise
) -> Predicate | None:
    """A comparison of two numbers, case by case; None where it cannot be told."""
    cases: list[tuple[Predicate, Predicate]] | None = None
    if one.is_exact and two.is_exact:
        cases = _of_cases(function, one, two)
    return None if cases is None else either(*(both(where, result) for where, result in cases))


def _gathered(cases: list[tuple[Predicate, Number]], *, is_exact: bool) -> Piecewise | None:
    """The cases that can be, those of equal value as one."""
    merged: dict[Number | str, list[Predicate]] = {}
    for where, value in _settled(cases):
        if where != FALSE:
            merged.setdefault("nan" if isinstance(value, float) and math.isnan(value) else value, []).append(where)
    if not merged or len(merged) > _MANY:
        return None
    if len(merged) == 1:
        return everywhere(_unnamed(next(iter(merged))), is_exact=is_exact)
    joined = {value: where[0] if len(where) == 1 else either(*where) for value, where in merged.items()}
    return Piecewise(tuple((where, _unnamed(value)) for value, where in joined.items()), is_exact)


def _settled(cases: list[tuple[Predicate, Number]]) -> list[tuple[Predicate, Number]]:
    """The cases, those of ``x == 0`` with the value of another case that is the same there (as of ``x`` and ``-x``)."""
    found = list(cases)
    for position, (where, value) in enumerate(cases):
        points = [each.value for each in conjuncts(where) if isinstance(each, Zero) and each.holds]
        others = [other for i, (_, other) in enumerate(cases) if i != position and other != value]
        same = [other for other in others for point in points if _are_equal_at(point, value, other)]
        if same:
            found[position] = (where, same[0])
    return found


def _are_equal_at(point: Polynomial, one: Number, two: Number) -> bool:
    """Whether two numbers are equal where ``point`` is zero."""
    if not isinstance(one, Polynomial) or not isinstance(two, Polynomial):
        return False
    heads = [each for each in point.terms if len(each) == 1 and abs(point.terms[each]) == 1]
    if not heads:
        return False
    (head,) = heads[0]
    solved = (point - Polynomial({heads[0]: point.terms[heads[0]]})).scaled(-point.terms[heads[0]])
    found = (one - two).replaced(head, solved)
    return found is not None and not found.terms


def _unnamed(value: Number | str) -> Number:
    return math.nan if isinstance(value, str) else value


# ---- arithmetic ---------------------------------------------------------------------------------------------------


def added(one: Number, two: Number) -> Number | None:
    """The sum."""
    if isinstance(one, Polynomial) and isinstance(two, Polynomial):
        return _keeping_floats(one + two, one, two)
    return _as_float(one) + _as_float(two)


def multiplied(one: Number, two: Number) -> Number | None:
    """The product; None where a factor that is not known meets an infinity or a zero."""
    if isinstance(one, Polynomial) and isinstance(two, Polynomial):
        return _keeping_floats(one * two, one, two)
    if not (_is_constant(one) and _is_constant(two)):
        return None
    return _as_float(one) * _as_float(two)


def _keeping_floats(result: Polynomial, *operands: Polynomial) -> Polynomial | None:
    """The result, unless a float that may be NaN disappeared from it."""
    floats = {each for operand in operands for each in operand.variables if each.is_float}
    return result if floats <= result.variables else None


def _is_constant(value: Number) -> bool:
    return not isinstance(value, Polynomial) or value.constant is not None


def _as_float(value: Number) -> float:
    """A constant as a float; any other finite number as 1, where only its being finite counts."""
    if not isinstance(value, Polynomial):
        return value
    constant = value.constant
    return 1.0 if constant is None else float(constant)


# ---- comparisons --------------------------------------------------------------------------------------------------


def at_most(one: Number, two: Number) -> Predicate | None:
    """``one <= two``."""
    known = _known(one, two)
    if known is not None:
        return Constant(known[0] <= known[1])
    difference = _difference(two, one)
    return None if difference is None else at_least(difference)


def below(one: Number, two: Number) -> Predicate | None:
    """``one < two``."""
    opposite = at_most(two, one)
    is_nan = any(isinstance(each, float) and math.isnan(each) for each in (one, two))
    return FALSE if is_nan else None if opposite is None else negation(opposite)


def equal(one: Number, two: Number) -> Predicate | None:
    """``one == two``."""
    known = _known(one, two)
    if known is not None:
        return Constant(known[0] == known[1])
    difference = _difference(one, two)
    return None if difference is None else zero(difference)


def _known(one: Number, two: Number) -> tuple[float | Fraction | int, float | Fraction | int] | None:
    """Both as Python numbers, where one of them is infinite or NaN, or both are constants."""
    if isinstance(one, Polynomial) and isinstance(two, Polynomial):
        first, second = one.constant, two.constant
        return None if first is None or second is None else (first, second)
    if any(each.is_float for value in (one, two) if isinstance(value, Polynomial) for each in value.variables):
        return None
    return _as_float(one), _as_float(two)


def _difference(one: Number, two: Number) -> Polynomial | None:
    """``one - two``; None where one of them is a float of unknown value, or data that cancels (it may overflow)."""
    if not isinstance(one, Polynomial) or not isinstance(two, Polynomial):
        return None
    variables = one.variables | two.variables
    difference = one - two
    if any(each.is_float for each in variables):
        return None
    data = {each for each in variables if each.is_data}
    return difference if one == two or data <= difference.variables else None


# ---- dtypes -------------------------------------------------------------------------------------------------------


def held(value: Piecewise, dtype: torch.dtype) -> Piecewise | None:
    """The number as ``dtype`` holds it; None where it does not hold an integer of this size."""
    is_exact = value.is_exact
    cases: list[tuple[Predicate, Number]] = []
    for where, each in value.cases:
        found = _held(each, dtype)
        if found is None:
            return None
        cases.append((where, found[0]))
        is_exact = is_exact and found[1]
    is_same = all(one[1] == two[1] for one, two in zip(cases, value.cases, strict=True))
    return Piecewise(value.cases, is_exact) if is_same else _gathered(cases, is_exact=is_exact)


def _held(value: Number, dtype: torch.dtype) -> tuple[Number, bool] | None:
    if not isinstance(value, Polynomial):
        return (value, True) if dtype.is_floating_point else None
    constant = value.constant
    if constant is not None and dtype.is_floating_point:
        return plain(_rounded(Fraction(constant), dtype)), True
    if not dtype.is_floating_point:
        return (value, True) if _fits(value, dtype) else None
    return value, not any(each.is_float for each in value.variables) and _is_exact_in(value, dtype)


#: From here on, float64 rounds to infinity.
_OVERFLOWS = 2**1024 - 2**970


@cache
def _rounded(constant: Fraction, dtype: torch.dtype) -> float:
    wide = float(constant) if abs(constant) < _OVERFLOWS else torch.inf if constant > 0 else -torch.inf
    return float(torch.tensor(wide, dtype=torch.float64).to(dtype).item())


def _fits(value: Polynomial, dtype: torch.dtype) -> bool:
    """Whether an integer stays within the dtype's range (of data it is taken for granted)."""
    if dtype.is_complex or dtype == torch.bool or not value.is_integer:
        return False
    limits = torch.iinfo(dtype)
    data = {each: factor for each, factor in value.terms.items() if any(variable.is_data for variable in each)}
    if any(variable.is_data and not _is_as_wide(variable, dtype) for variable in value.variables):
        return False
    if any(abs(Fraction(factor)) > _LARGEST_FACTOR for factor in data.values()):
        return False
    positions = value - Polynomial(data)
    least, most = lower(positions, LARGEST_EXTENT), upper(positions, LARGEST_EXTENT)
    return least is not None and most is not None and limits.min <= least and most <= limits.max


def _is_as_wide(variable: Variable, dtype: torch.dtype) -> bool:
    """Whether a dtype holds what a tensor of integers holds; of narrow ones sums wrap soon, so they are left alone."""
    tensor = tensor_of(getattr(variable.source, "node", None))
    own = torch.int64 if tensor is None else tensor.dtype
    return dtype == torch.int64 or (dtype == torch.int32 and own in (torch.int32, torch.int16, torch.int8, torch.uint8))


def _is_exact_in(value: Polynomial, dtype: torch.dtype) -> bool:
    """Whether the dtype holds every value of a polynomial in positions without rounding."""
    if any(each.is_data for each in value.variables):
        return False
    scale = math.lcm(*(Fraction(factor).denominator for factor in value.terms.values()))
    if scale & (scale - 1):  # binary fractions only
        return False
    digits = round(1 - math.log2(torch.finfo(dtype).eps))
    least, most = lower(value, LARGEST_EXTENT), upper(value, LARGEST_EXTENT)
    return least is not None and most is not None and max(-least, most) * scale <= 2**digits
