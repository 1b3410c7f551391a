"""Integer polynomials over index variables and sizes, with bounds that hold for every value these can take.

A mask compares positions: ``key <= query + past``. Both sides are polynomials in the index of an element (one variable per
axis, from 0 to below its size), in symbolic sizes and in integers that only data tell. Whether a comparison is always true
is a question of the least value of their difference. Linear ones are exact, products of sizes are bounded one variable
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

from lz_compile.passes.formula.axes import Axis

Coefficient: TypeAlias = "int | Fraction"

#: No tensor has an extent beyond this. Only asked for whether arithmetic on positions overflows.
LARGEST_EXTENT = 2**28


@dataclass(eq=False)
class Variable:
    """An unknown integer (or, as a leaf of a bias, an unknown float) and what bounds it.

    ``least`` and ``most`` are in terms of variables of a lower ``rank``, None where there is no bound. ``axes`` are those
    that its value depends on, ``source`` is what it stands for. ``is_data`` says that only the inputs of the graph tell it.
    """

    name: str
    least: Polynomial | None = None
    most: Polynomial | None = None
    rank: int = 0
    axes: frozenset[Axis] = frozenset()
    source: Any = None
    is_data: bool = False
    is_float: bool = False
    is_size: bool = False

    def __repr__(self) -> str:
        return self.name


Monomial: TypeAlias = tuple[Variable, ...]


@dataclass(frozen=True)
class Polynomial:
    """A sum of monomials with rational coefficients; none is zero. The empty monomial is the constant."""

    terms: Mapping[Monomial, Coefficient]
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(frozenset(self.terms.items())))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        parts = ["*".join([str(factor), *map(repr, monomial)]) for monomial, factor in self.terms.items()]
        return " + ".join(parts) or "0"

    def __add__(self, other: Polynomial) -> Polynomial:
        return _collected([*self.terms.items(), *other.terms.items()])

    def __neg__(self) -> Polynomial:
        return Polynomial({monomial: -factor for monomial, factor in self.terms.items()})

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + -other

    def __mul__(self, other: Polynomial) -> Polynomial:
        return _collected(
            (tuple(sorted((*one, *two), key=repr)), a * b)
            for one, a in self.terms.items()
            for two, b in other.terms.items()
        )

    def scaled(self, factor: Coefficient) -> Polynomial:
        """Every coefficient times ``factor``."""
        return Polynomial({monomial: value * factor for monomial, value in self.terms.items()}) if factor else ZERO

    @property
    def constant(self) -> Coefficient | None:
        """The number that this is, None where variables are left."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    @property
    def variables(self) -> frozenset[Variable]:
        """Every variable that occurs."""
        return frozenset(variable for monomial in self.terms for variable in monomial)

    @property
    def axes(self) -> frozenset[Axis]:
        """Every axis that the value depends on."""
        return frozenset(axis for variable in self.variables for axis in variable.axes)

    @property
    def is_integer(self) -> bool:
        """Whether the value is a whole number wherever its variables are."""
        return all(Fraction(factor).denominator == 1 for factor in self.terms.values())

    def split(self, variable: Variable) -> tuple[Polynomial, Polynomial] | None:
        """The factor of ``variable`` and what is left without it; None where it occurs in a power."""
        factor, rest = {}, {}
        for monomial, value in self.terms.items():
            if variable not in monomial:
                rest[monomial] = value
            elif monomial.count(variable) == 1:
                factor[tuple(each for each in monomial if each is not variable)] = value
            else:
                return None
        return Polynomial(factor), Polynomial(rest)

    def replaced(self, variable: Variable, value: Polynomial) -> Polynomial | None:
        """The same with ``value`` for a variable; None where it occurs in a power."""
        parts = self.split(variable)
        return None if parts is None else parts[0] * value + parts[1]


def _collected(terms: Iterable[tuple[Monomial, Coefficient]]) -> Polynomial:
    found: dict[Monomial, Coefficient] = {}
    for monomial, factor in terms:
        found[monomial] = found.get(monomial, 0) + factor
    return Polynomial({monomial: factor for monomial, factor in found.items() if factor})


def number(value: Coefficient) -> Polynomial:
    """A constant."""
    whole = int(value)
    return Polynomial({(): whole if whole == value else value}) if value else ZERO


def variable(each: Variable) -> Polynomial:
    """A variable by itself."""
    return Polynomial({(each,): 1})


ZERO = Polynomial({})
ONE = number(1)


@lru_cache(maxsize=4096)
def lower(value: Polynomial, largest: int | None = None) -> Coefficient | None:
    """A number that ``value`` is never below, None where none is known.

    Args:
        value: what to bound.
        largest: what sizes without a bound are taken to be at most.
    """
    while value.constant is None:
        head = max(value.variables, key=lambda each: (each.rank, each.name))
        parts = value.split(head)
        if parts is None:
            return None
        factor, rest = parts
        end = _end(factor, head, largest)
        if end is None:
            return None
        value = rest + factor * end
    return value.constant


def upper(value: Polynomial, largest: int | None = None) -> Coefficient | None:
    """A number that ``value`` is never above, None where none is known."""
    least = lower(-value, largest)
    return None if least is None else -least


def _end(factor: Polynomial, head: Variable, largest: int | None) -> Polynomial | None:
    """Where ``factor * head`` is least."""
    constant = factor.constant
    least = constant if constant is not None else lower(factor, largest)
    end, sign = head.least, -1
    if least is None or least < 0:
        most = constant if constant is not None else upper(factor, largest)
        if most is None or most > 0:
            return None
        end, sign = head.most, 1
    return number(sign * largest) if end is None and head.is_size and largest is not None else end


#: The variables of quotients that do not come out, by what is divided and by what.
Quotients: TypeAlias = "dict[tuple[Polynomial, int], Variable]"


def quotient(value: Polynomial, divisor: int, known: Quotients) -> Polynomial:
    """``value // divisor``, rounded down; a variable where it does not come out.

    Args:
        value: with integer coefficients.
        divisor: positive.
        known: the variables of earlier quotients, to which this one is added.
    """
    outside = Polynomial(
        {monomial: factor // divisor for monomial, factor in value.terms.items() if not factor % divisor}
    )
    whole, part = divmod(value.terms.get((), 0), divisor)
    left = {monomial: factor for monomial, factor in value.terms.items() if monomial and factor % divisor}
    rest = Polynomial(left) + number(part)
    if part:
        outside = outside + number(whole)
    least, most = lower(rest), upper(rest)
    if least is not None and most is not None and least // divisor == most // divisor:
        return outside + number(least // divisor)
    if (rest, divisor) not in known:
        known[rest, divisor] = Variable(
            name=f"d{len(known)}",
            least=(rest - number(divisor - 1)).scaled(Fraction(1, divisor)),
            most=rest.scaled(Fraction(1, divisor)),
            rank=1 + max(each.rank for each in rest.variables),
            axes=rest.axes,
            source=(rest, divisor),
            is_data=any(each.is_data for each in rest.variables),
        )
    return outside + variable(known[rest, divisor])


def primitive(value: Polynomial) -> tuple[Polynomial, Coefficient]:
    """Positive multiples of the terms with variables so that their coefficients are whole and have no common divisor.

    Returns:
        these terms, and the constant scaled in the same way.
    """
    rest = {monomial: Fraction(factor) for monomial, factor in value.terms.items() if monomial}
    scale = math.lcm(*(factor.denominator for factor in rest.values()))
    divisor = math.gcd(*(int(factor * scale) for factor in rest.values()))
    terms = {monomial: int(factor * scale) // divisor for monomial, factor in rest.items()}
    return Polynomial(terms), Fraction(value.terms.get((), 0)) * scale / divisor
