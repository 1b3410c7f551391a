"""Polynomials over positions and sizes: arithmetic, bounds that hold everywhere, and quotients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from lz_compile.passes.formula.polynomial import (
    ONE,
    ZERO,
    Polynomial,
    Quotients,
    Variable,
    lower,
    number,
    primitive,
    quotient,
    upper,
    variable,
)

LENGTH = Variable("s", number(2), number(4), is_size=True)
OPEN = Variable("t", number(1), None, is_size=True)
QUERY = Variable("q", ZERO, variable(LENGTH) - ONE, 1)
KEY = Variable("k", ZERO, variable(LENGTH) + variable(OPEN) - ONE, 1)


def values() -> Iterator[Mapping[Variable, int]]:
    """Every value of the variables, up to where the open size is cut."""
    for length, more in itertools.product(range(2, 5), range(1, 4)):
        for query, key in itertools.product(range(length), range(length + more)):
            yield {LENGTH: length, OPEN: more, QUERY: query, KEY: key}


def at(polynomial: Polynomial, known: Mapping[Variable, int]) -> Fraction:
    """The value of a polynomial."""
    total = Fraction(0)
    for monomial, factor in polynomial.terms.items():
        term = Fraction(factor)
        for each in monomial:
            if isinstance(each.source, tuple):
                inner, divisor = each.source
                term *= at(inner, known) // divisor
            else:
                term *= known[each]
        total += term
    return total


linear = st.builds(
    lambda factors, constant: sum(
        (variable(each).scaled(factor) for each, factor in zip((LENGTH, OPEN, QUERY, KEY), factors, strict=True)),
        number(constant),
    ),
    st.tuples(*[st.integers(-3, 3)] * 4),
    st.integers(-6, 6),
)


@settings(max_examples=25)
@given(linear, linear)
def test_arithmetic_is_that_of_values(one: Polynomial, two: Polynomial) -> None:
    for known in values():
        assert at(one + two, known) == at(one, known) + at(two, known)
        assert at(one - two, known) == at(one, known) - at(two, known)
        assert at(one * two, known) == at(one, known) * at(two, known)


@settings(max_examples=25)
@given(linear, linear, st.integers(2, 4))
def test_no_value_is_beyond_the_bounds(one: Polynomial, two: Polynomial, divisor: int) -> None:
    known: Quotients = {}
    for polynomial in (one, one * two, quotient(one, divisor, known) - two, one - quotient(one, divisor, known)):
        least, most = lower(polynomial), upper(polynomial)
        found = [at(polynomial, each) for each in values()]
        assert least is None or least <= min(found)
        assert most is None or most >= max(found)


@settings(max_examples=25)
@given(linear, st.integers(1, 5))
def test_a_quotient_rounds_down(polynomial: Polynomial, divisor: int) -> None:
    found = quotient(polynomial, divisor, {})
    assert all(at(found, each) == at(polynomial, each) // divisor for each in values())


@settings(max_examples=30)
@given(linear, linear)
def test_a_variable_is_replaced_everywhere(one: Polynomial, value: Polynomial) -> None:
    found = (one * variable(OPEN)).replaced(QUERY, value)
    assert found is not None
    for known in values():
        assert at(found, known) == at(one, {**known, QUERY: int(at(value, known))}) * known[OPEN]


def test_bounds_of_positions_are_exact() -> None:
    distance = variable(KEY) - variable(QUERY)
    assert lower(distance) == -3
    assert lower(variable(LENGTH) - variable(QUERY)) == 1
    assert upper(distance) is None
    assert upper(distance, 100) == 103


def test_bounds_of_a_quotient_are_exact() -> None:
    behind = quotient(variable(KEY), 4, {}).scaled(4) - variable(KEY)  # how far back the block of a key begins
    assert (lower(behind), upper(behind)) == (-3, 0)


def test_terms_without_a_common_divisor() -> None:
    terms, constant = primitive(variable(QUERY).scaled(Fraction(2, 3)) + variable(KEY).scaled(4) + number(1))
    assert (repr(terms), constant) == ("1*q + 6*k", Fraction(3, 2))
