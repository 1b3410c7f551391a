"""Numbers that stand for symbolic sizes while a step is read.

Every symbolic size of what a loop is given gets a prime that divides no number of the step. A size in the trace of the step
is then a product of primes and of a number without them, and says which product of symbolic sizes it is. Steps are traced
with two such sets of primes: what does not look like the same product in both is no product of sizes, and is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Any

import sympy
import torch

from lz_compile.ground.sizes import Size, as_size
from lz_compile.passes.graph.refusal import RefusedError

#: How often other primes are tried.
ATTEMPTS = 4


@dataclass(frozen=True)
class Place:
    """Where a size can be read: ``divisor`` times it is the size of dimension ``dim`` of an operand of the step (by place).

    ``dim`` None: the operand itself is that number.
    """

    operand: int
    dim: int | None
    divisor: int


@dataclass
class SizePlaceholder:
    """A symbolic size that is no product of others: its two primes, its size when it was traced, and where it can be read."""

    size: sympy.Expr
    first: int
    second: int
    hint: int = 1
    places: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class SizePlaceholders:
    """The placeholders of one step. A *number* is a size as it is in the (first) trace."""

    symbols: tuple[SizePlaceholder, ...]

    @staticmethod
    def of(operands: Sequence[Sequence[Any] | Any], taken: Iterable[int], attempt: int) -> SizePlaceholders:
        """Placeholders for the sizes of operands.

        Args:
            operands: their shapes, or the numbers that they are.
            taken: what else is a number in the step.
            attempt: how many sets of primes were of no use before.

        Raises:
            RefusedError: data decides about a size.
        """
        sizes = list(_sizes(operands))
        given = {size for size, *_ in sizes if isinstance(size, int)} | set(taken)
        bases: list[Counter[sympy.Expr]] = []
        for size in sorted({size for size, *_ in sizes if not isinstance(size, int)}, key=_complexity):
            coefficient, rest = _divided(size, bases)
            given.add(coefficient)
            if rest:
                bases.append(rest)
        primes = _primes(given, attempt * 2 * len(bases))
        expressions = [reduce(mul, (factor**count for factor, count in base.items())) for base in bases]
        firsts, seconds = ([next(primes) for _ in bases] for _ in range(2))
        found = SizePlaceholders(tuple(map(SizePlaceholder, expressions, firsts, seconds)))
        for size, value, place, dim in sorted(sizes, key=lambda each: _complexity(each[0])):
            if not isinstance(size, int):
                found._note(found.number(size), value, place, dim)
        return found

    def _note(self, number: int, value: torch.SymInt, place: int, dim: int | None) -> None:
        """Where a symbol is the last factor of a size, all others of which can be read already."""
        _, exponents = self.parts(number)
        for position in reversed(range(len(self.symbols))):
            symbol = self.symbols[position]
            others = [each for each, count in enumerate(exponents) if count and each != position]
            if exponents[position] != 1 or not all(self.symbols[other].places and other < position for other in others):
                continue
            if value.node.hint is None:
                text = f"a step has the size {symbol.size}, which data decides"
                raise RefusedError("STEP_SIZES", text, "pass sizes as inputs of the graph")
            if not symbol.places:
                symbol.hint = int(value.node.hint) // self.hint(number // symbol.first)
            symbol.places.append(Place(place, dim, number // symbol.first))
            return

    # ---- numbers --------------------------------------------------------------------------------------------------

    def number(self, size: Size, *, second: bool = False) -> int:
        """What stands for a size in the first trace, or in the second one.

        Raises:
            RefusedError: it is no product of sizes of operands.
        """
        if isinstance(size, int):
            return size
        coefficient, rest = _powers(size)
        for symbol in self.symbols:
            base = _powers(symbol.size)[1]
            while rest and all(rest[each] >= count for each, count in base.items()):
                rest = rest - base
                coefficient *= symbol.second if second else symbol.first
        if rest:
            text = f"a step has the symbolic size {size}, which is no product of sizes of what it is given"
            raise RefusedError("STEP_SIZES", text, "compile with dynamic=False")
        return coefficient

    def parts(self, number: int) -> tuple[int, tuple[int, ...]]:
        """A number as a coefficient and an exponent for every symbol."""
        exponents = []
        for symbol in self.symbols:
            count = 0
            while number and number % symbol.first == 0:
                number //= symbol.first
                count += 1
            exponents.append(count)
        return number, tuple(exponents)

    def twin(self, number: int) -> int:
        """What a number of the first trace is in the second one."""
        return int(self._product(number, [symbol.second for symbol in self.symbols]))

    def size(self, number: int) -> Size:
        """The size that a number stands for."""
        found: Size = self._product(number, [symbol.size for symbol in self.symbols])
        return found

    def hint(self, number: int) -> int:
        """The size that a number stands for, as it was when it was traced."""
        return int(self._product(number, [symbol.hint for symbol in self.symbols]))

    def extent(self, number: int, read: Callable[[Place], Any]) -> Any:
        """The size that a number stands for, with what ``read`` gives for a place (None: it cannot be read there).

        A plain number where nothing of it is symbolic.
        """
        total, exponents = self.parts(number)
        factors: list[Any] = [total] if total != 1 else []
        for symbol, count in zip(self.symbols, exponents, strict=True):
            factors += [self._read(symbol, read) for _ in range(count)]
        return reduce(mul, factors[::-1]) if factors else 1

    def _read(self, symbol: SizePlaceholder, read: Callable[[Place], Any]) -> Any:
        found = ((place, read(place)) for place in symbol.places)
        place, whole = next(each for each in found if each[1] is not None)
        divisor = self.extent(place.divisor, read)
        return whole if isinstance(divisor, int) and divisor == 1 else whole // divisor

    def _product(self, number: int, sizes: Sequence[Any]) -> Any:
        coefficient, exponents = self.parts(number)
        return reduce(mul, (size**count for size, count in zip(sizes, exponents, strict=True) if count), coefficient)


#: Where no size is symbolic.
NO_SYMBOLS = SizePlaceholders(())


def is_ambiguous(sizes: SizePlaceholders, number: int) -> bool:
    """Whether a size that is none of the symbolic ones looks like one."""
    return number > 0 and any(sizes.parts(number)[1])


def symbolic(value: Any) -> bool:
    """Whether a number, or a size of a tensor, is symbolic."""
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(not isinstance(as_size(size), int) for size in sizes)


def _powers(size: sympy.Expr) -> tuple[int, Counter[sympy.Expr]]:
    """A size as a coefficient and powers; what is no product is one factor."""
    coefficient, rest = size.as_coeff_Mul()
    if not coefficient.is_Integer:
        return 1, Counter({size: 1})
    powers = rest.as_powers_dict() if rest.is_Mul or rest.is_Pow else {rest: 1}
    if not all(sympy.sympify(count).is_Integer and count > 0 for count in powers.values()):
        powers = {rest: 1}
    return int(coefficient), Counter({base: int(count) for base, count in powers.items()})


def _divided(size: sympy.Expr, bases: Sequence[Counter[sympy.Expr]]) -> tuple[int, Counter[sympy.Expr]]:
    coefficient, rest = _powers(size)
    for base in bases:
        while rest and all(rest[each] >= count for each, count in base.items()):
            rest = rest - base
    return coefficient, rest


def _complexity(size: Size) -> tuple[int, str]:
    """How many factors and operations a size has."""
    return (
        (0, "") if isinstance(size, int) else (sum(_powers(size)[1].values()) + int(sympy.count_ops(size)), str(size))
    )


def _sizes(operands: Sequence[Sequence[Any] | Any]) -> Iterator[tuple[Size, Any, int, int | None]]:
    """Every size, also as it was given, with the place of the operand and the dimension."""
    for place, operand in enumerate(operands):
        if isinstance(operand, (int, torch.SymInt)):
            yield as_size(operand), operand, place, None
            continue
        for dim, size in enumerate(operand):
            yield as_size(size), size, place, dim


def _primes(taken: Iterable[int], skipped: int) -> Iterator[int]:
    """Odd primes that divide none of the numbers that are taken."""
    numbers = {abs(each) for each in taken if each}
    known: list[int] = []
    candidate = 3
    while True:
        if all(candidate % prime for prime in known):
            known.append(candidate)
            if all(number % candidate for number in numbers):
                if skipped:
                    skipped -= 1
                else:
                    yield candidate
        candidate += 2
