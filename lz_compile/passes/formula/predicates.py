"""Conditions on the index of an element: comparisons of positions, boolean tensors, and what logic makes of them.

A predicate is built simplified: what every value of its variables decides is decided, a condition that another one
implies is left out, and what two alternatives share is taken out of them. A conjunction of comparisons of positions
remains of a mask however it was spelled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from lz_compile.passes.formula.polynomial import ONE, Coefficient, Polynomial, Variable, lower, number, primitive, upper


@dataclass(frozen=True)
class Constant:
    """Always, or never."""

    holds: bool


@dataclass(frozen=True)
class AtLeast:
    """``value >= 0``."""

    value: Polynomial


@dataclass(frozen=True)
class Zero:
    """``value == 0``, or ``value != 0`` where not ``holds``."""

    value: Polynomial
    holds: bool = True


@dataclass(frozen=True)
class Given:
    """What a boolean tensor says, or the opposite where not ``holds``."""

    flag: Variable
    holds: bool = True


@dataclass(frozen=True)
class Every:
    """A conjunction of two conditions or more, none of which is one."""

    parts: frozenset[Predicate]


@dataclass(frozen=True)
class Some:
    """A disjunction of two conditions or more, none of which is one."""

    parts: frozenset[Predicate]


Predicate: TypeAlias = "Constant | AtLeast | Zero | Given | Every | Some"

TRUE, FALSE = Constant(holds=True), Constant(holds=False)
#: More alternatives than this are not compared with each other.
_MANY = 12


def at_least(value: Polynomial) -> Predicate:
    """``value >= 0`` for integers; the coefficients may be fractions."""
    constant = value.constant
    if constant is not None:
        return Constant(constant >= 0)
    terms, offset = primitive(value)
    value = terms + number(math.floor(offset))
    least, most = lower(value), upper(value)
    if least is not None and least >= 0:
        return TRUE
    return FALSE if most is not None and most < 0 else AtLeast(value)


def positive(value: Polynomial) -> Predicate:
    """``value > 0`` for integers; the coefficients may be fractions."""
    return negation(at_least(-value))


def zero(value: Polynomial) -> Predicate:
    """``value == 0``."""
    constant = value.constant
    if constant is not None:
        return Constant(constant == 0)
    terms, offset = primitive(value)
    if offset.denominator != 1:
        return FALSE
    first = min(terms.terms, key=repr)
    value = terms + number(int(offset))
    value = value if terms.terms[first] > 0 else -value
    least, most = lower(value), upper(value)
    is_apart = (least is not None and least > 0) or (most is not None and most < 0)
    return FALSE if is_apart else Zero(value)


def negation(predicate: Predicate) -> Predicate:
    """The opposite."""
    match predicate:
        case Constant(holds):
            return Constant(not holds)
        case AtLeast(value):
            return at_least(-value - number(1))
        case Zero(value, holds):
            return Zero(value, not holds)
        case Given(flag, holds):
            return Given(flag, not holds)
        case Every(parts):
            return either(*map(negation, parts))
        case Some(parts):
            return both(*map(negation, parts))


def conjuncts(predicate: Predicate) -> frozenset[Predicate]:
    """The conditions of a conjunction; none for what always holds."""
    if predicate == TRUE:
        return frozenset()
    return predicate.parts if isinstance(predicate, Every) else frozenset({predicate})


def disjuncts(predicate: Predicate) -> frozenset[Predicate]:
    """The alternatives of a disjunction; none for what never holds."""
    if predicate == FALSE:
        return frozenset()
    return predicate.parts if isinstance(predicate, Some) else frozenset({predicate})


def both(*predicates: Predicate) -> Predicate:
    """All of them."""
    parts = [part for each in predicates for part in conjuncts(each)]
    parts = _strongest(_with_edges(parts, holds=False))
    if len(parts) > 1:
        parts = _strongest(part for each in _absorbed(_paired(parts, Some), Some) for part in conjuncts(each))
    if any(part == FALSE or implies(part, negation(other)) for part in parts for other in parts if part is not other):
        return FALSE
    if len(parts) < 2:
        return parts[0] if parts else TRUE
    return Every(frozenset(parts))


def _paired(parts: list[Predicate], kind: type[Every] | type[Some]) -> list[Predicate]:
    """Alternatives ``x and y`` and ``x and not y`` as ``x`` (or, of conditions ``x or y`` and ``x or not y``)."""
    inner, outer, nothing = (either, both, TRUE) if kind is Every else (both, either, FALSE)
    found = list(parts)
    for one, other in itertools.combinations(parts, 2):
        if not isinstance(one, kind) or not isinstance(other, kind) or one not in found or other not in found:
            continue
        shared = one.parts & other.parts
        if shared and inner(outer(*(one.parts - shared)), outer(*(other.parts - shared))) == nothing:
            found = [*(each for each in found if each not in (one, other)), outer(*shared)]
    return found


def _absorbed(parts: list[Predicate], kind: type[Every] | type[Some]) -> list[Predicate]:
    """Alternatives ``x`` and ``not x and y`` as ``x`` and ``y`` (or, of conditions ``x`` and ``not x or y``, likewise)."""
    found = list(parts)
    for position, part in enumerate(parts):
        others = [each for i, each in enumerate(found) if i != position]
        if kind is Every and isinstance(part, Every):
            opposite = [negation(each) for each in others]
            kept = [each for each in part.parts if not any(implies(other, each) for other in opposite)]
            found[position] = both(*kept) if len(kept) < len(part.parts) else part
        elif kind is Some and isinstance(part, Some):
            kept = [each for each in part.parts if not any(implies(other, negation(each)) for other in others)]
            found[position] = either(*kept) if len(kept) < len(part.parts) else part
    return found


def _with_edges(parts: list[Predicate], *, holds: bool) -> list[Predicate]:
    """``x == 0`` added to ``x > 0``, one of which has to hold (or ``x != 0`` to ``x >= 0``, both of which have to)."""
    points = [part.value for part in parts if isinstance(part, Zero) and part.holds is holds]
    found = list(parts)
    for point in points:
        for value in (point, -point):
            given, joined = (value - ONE, value) if holds else (value, value - ONE)
            if AtLeast(given) in found:
                found[found.index(AtLeast(given))] = at_least(joined)
    return found if holds else _pinned(found)


def _pinned(parts: list[Predicate]) -> list[Predicate]:
    """``x >= 0`` and ``x <= 0`` as ``x == 0``."""
    found = list(parts)
    for part in parts:
        opposite = AtLeast(-part.value) if isinstance(part, AtLeast) else None
        if opposite in found and part in found:
            found = [*(each for each in found if each not in (part, opposite)), zero(-opposite.value)]
    return found


def _strongest(parts: Iterable[Predicate]) -> list[Predicate]:
    """Those that no other one implies."""
    return _left(parts, implies)


def _weakest(parts: Iterable[Predicate]) -> list[Predicate]:
    """Those that imply no other one."""
    return _left(parts, lambda one, other: implies(other, one))


def _left(parts: Iterable[Predicate], replaces: Callable[[Predicate, Predicate], bool]) -> list[Predicate]:
    """Those in whose place no other one stands."""
    kept: list[Predicate] = []
    for part in dict.fromkeys(parts):
        if not any(replaces(other, part) for other in kept):
            kept = [*(other for other in kept if not replaces(part, other)), part]
    return kept


def either(*predicates: Predicate) -> Predicate:
    """Any of them."""
    parts = list(dict.fromkeys(part for each in predicates for part in disjuncts(each)))
    if TRUE in parts:
        return TRUE
    if 1 < len(parts) <= _MANY:
        parts = _weakest(_with_edges(parts, holds=True))
        parts = _weakest(part for each in _absorbed(_paired(parts, Every), Every) for part in disjuncts(each))
    if TRUE in parts:
        return TRUE
    if len(parts) < 2:
        return parts[0] if parts else FALSE
    shared = frozenset.intersection(*map(conjuncts, parts))
    if shared:
        rest = [both(*(conjuncts(part) - shared)) for part in parts]
        return both(*shared, either(*rest))
    if any(_covers(one, other) for one in parts for other in parts if one is not other):
        return TRUE
    return _distributed(parts) or Some(frozenset(parts))


def _distributed(parts: list[Predicate]) -> Predicate | None:
    """Alternatives of conjunctions as a conjunction of alternatives; None where none of these comes to less.

    ``distance >= 0 and distance <= 3 or distance < 0 and distance >= -3`` is a range of distances.
    """
    lists = [sorted(conjuncts(part), key=repr) for part in parts]
    if math.prod(map(len, lists)) > _MANY or all(len(each) == 1 for each in lists):
        return None
    clauses = [either(*choice_) for choice_ in itertools.product(*lists)]
    return both(*clauses) if any(not isinstance(each, Some) and each != TRUE for each in clauses) else None


def _covers(one: Predicate, other: Predicate) -> bool:
    """Whether one of two simple conditions always holds."""
    simple = not isinstance(one, (Every, Some)) and not isinstance(other, (Every, Some))
    return simple and implies(negation(one), other)


def choice(condition: Predicate, chosen: Predicate, otherwise: Predicate) -> Predicate:
    """``chosen`` where the condition holds, else ``otherwise``."""
    return either(both(condition, chosen), both(negation(condition), otherwise))


def implies(one: Predicate, other: Predicate) -> bool:
    """True only where ``other`` holds wherever ``one`` does."""
    if one in (other, FALSE) or other == TRUE:
        return True
    if isinstance(one, Some):
        return all(implies(part, other) for part in one.parts)
    if isinstance(other, Every):
        return all(implies(one, part) for part in other.parts)
    if isinstance(one, Every):
        return any(implies(part, other) for part in one.parts)
    if isinstance(other, Some):
        return any(implies(one, part) for part in other.parts)
    return _implies(one, other)


@lru_cache(maxsize=4096)
def _implies(one: Predicate, other: Predicate) -> bool:
    match one, other:
        case AtLeast(given), AtLeast(wanted):
            return _is_at_least(wanted - given, 0)
        case AtLeast(given), Zero(wanted, False):
            return _is_at_least(wanted - given, 1) or _is_at_least(-wanted - given, 1)
        case Zero(given, True), AtLeast(wanted):
            return _is_at_least(wanted - given, 0) or _is_at_least(wanted + given, 0)
        case Zero(given, True), Zero(wanted, False):
            return any(_is_at_least(sign, 1) or _is_at_least(-sign, 1) for sign in (wanted - given, wanted + given))
    return False


def _is_at_least(value: Polynomial, bound: int) -> bool:
    least: Coefficient | None = lower(value)
    return least is not None and least >= bound


def weight(predicate: Predicate) -> int:
    """How many simple conditions there are in a condition."""
    if isinstance(predicate, (Every, Some)):
        return sum(map(weight, predicate.parts))
    return 1


def variables(predicate: Predicate) -> frozenset[Variable]:
    """Everything that the condition depends on."""
    match predicate:
        case Constant():
            return frozenset()
        case AtLeast(value) | Zero(value):
            return value.variables
        case Given(flag):
            return frozenset({flag})
        case Every(parts) | Some(parts):
            return frozenset(each for part in parts for each in variables(part))
