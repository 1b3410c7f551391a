"""Conditions on positions: simplified, they hold where they did before."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_polynomial import KEY, LENGTH, QUERY, at, linear, values

from lz_compile.passes.formula.polynomial import ONE, Variable, number, variable
from lz_compile.passes.formula.predicates import (
    FALSE,
    TRUE,
    AtLeast,
    Constant,
    Every,
    Given,
    Predicate,
    Some,
    Zero,
    at_least,
    both,
    choice,
    either,
    implies,
    negation,
    positive,
    zero,
)

FLAGS = tuple(Variable(name, is_data=True) for name in ("f", "g"))
query, key, length = variable(QUERY), variable(KEY), variable(LENGTH)


def holds(predicate: Predicate, known: Mapping[Variable, int]) -> bool:
    """Whether a condition holds for values of its variables."""
    match predicate:
        case Constant(always):
            return always
        case AtLeast(value):
            return at(value, known) >= 0
        case Zero(value, is_zero):
            return (at(value, known) == 0) == is_zero
        case Given(flag, is_set):
            return bool(known[flag]) == is_set
        case Every(parts):
            return all(holds(part, known) for part in parts)
        case Some(parts):
            return any(holds(part, known) for part in parts)


atoms = st.one_of(
    st.builds(at_least, linear),
    st.builds(zero, linear),
    st.builds(lambda bound: at_least(query - key + number(bound)), st.integers(-3, 3)),
    st.builds(lambda bound: zero(query - key + number(bound)), st.integers(-2, 2)),
    st.sampled_from([Given(flag, value) for flag in FLAGS for value in (True, False)]),
)


def _as_written(predicate: Predicate) -> tuple[Predicate, object]:
    return predicate, predicate


def _joined(pairs: tuple[tuple[Predicate, object], ...], *, conjunction: bool) -> tuple[Predicate, object]:
    """The simplified condition, and how it was written."""
    made = (both if conjunction else either)(*(one for one, _ in pairs))
    return made, (conjunction, tuple(other for _, other in pairs))


def _opposite(pair: tuple[Predicate, object]) -> tuple[Predicate, object]:
    return negation(pair[0]), ("not", pair[1])


def written(other: object, known: Mapping[Variable, int]) -> bool:
    """Whether a condition holds as it was written."""
    if not isinstance(other, tuple):
        return holds(other, known)  # type: ignore[arg-type]
    if other[0] == "not":
        return not written(other[1], known)
    return (all if other[0] else any)(written(each, known) for each in other[1])


conditions = st.recursive(
    atoms.map(_as_written),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pairs: _joined(pairs, conjunction=True)),
        st.tuples(inner, inner, inner).map(lambda pairs: _joined(pairs, conjunction=False)),
        inner.map(_opposite),
    ),
    max_leaves=6,
)


def every_value() -> list[Mapping[Variable, int]]:
    """Every value of positions, sizes and flags."""
    return [{**known, FLAGS[0]: f, FLAGS[1]: g} for known in values() for f in (0, 1) for g in (0, 1)]


EVERY_VALUE = every_value()


@settings(max_examples=60)
@given(conditions)
def test_a_simplified_condition_holds_where_it_did(condition: tuple[Predicate, object]) -> None:
    predicate, other = condition
    assert all(holds(predicate, known) == written(other, known) for known in EVERY_VALUE)


@settings(max_examples=60)
@given(conditions, conditions)
def test_what_is_implied_holds(one: tuple[Predicate, object], other: tuple[Predicate, object]) -> None:
    if implies(one[0], other[0]):
        assert all(holds(other[0], known) for known in EVERY_VALUE if holds(one[0], known))


causal = at_least(query - key)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (at_least(query), TRUE),
        (positive(query - length), FALSE),
        (both(causal, at_least(query - key + number(3))), causal),
        (either(causal, at_least(query - key + number(3))), at_least(query - key + number(3))),
        (either(causal, negation(causal)), TRUE),
        (both(causal, negation(causal)), FALSE),
        (both(at_least(query - key), at_least(key - query)), zero(query - key)),
        (either(zero(query - key), positive(query - key)), causal),
        (both(negation(zero(query - key)), causal), positive(query - key)),
        (choice(causal, Given(FLAGS[0]), FALSE), both(Given(FLAGS[0]), causal)),
        (choice(causal, Given(FLAGS[0]), Given(FLAGS[0])), Given(FLAGS[0])),
        (either(both(causal, Given(FLAGS[0])), both(negation(causal), Given(FLAGS[0]))), Given(FLAGS[0])),
        (at_least(query.scaled(2) - key.scaled(2) + ONE), causal),
        (zero(query.scaled(2) - key.scaled(2) + ONE), FALSE),
    ],
)
def test_conditions_come_to_less(found: Predicate, expected: Predicate) -> None:
    assert found == expected


def test_a_distance_within_two_bounds_is_two_bounds() -> None:
    above, below = at_least(key - query + ONE), at_least(query - key + ONE)
    absolute = either(both(causal, above), both(negation(causal), below))
    assert absolute == both(above, below) == Every(frozenset({above, below}))
