"""The value of a formula at a point, with numbers of Python: what the core reads, held against a program's own values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

from formula_programs import Program, value
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import Axis, Dims, fresh
from lz_compile.passes.formula.piecewise import Number, Piecewise, Value
from lz_compile.passes.formula.polynomial import Polynomial, Variable
from lz_compile.passes.formula.predicates import AtLeast, Constant, Every, Given, Predicate, Some, Zero, variables
from lz_compile.passes.formula.reader import Reader, Source, Sum
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import read


class Formula:
    """What is read of a node of a program, at an index of its own axes."""

    def __init__(self, program: Program, node: fx.Node) -> None:
        self.node = node
        self.reader = Reader(Effects(program.graph))
        self.dims: Dims = fresh(shape_of(value(node)))
        self.reader.give(self.dims)
        self.value = self.reader.read(node, self.dims)

    def points(self, rng: random.Random, count: int) -> Iterator[tuple[int, ...]]:
        """Indices of the node, the last one of all among them."""
        shape = value(self.node).shape
        yield tuple(size - 1 for size in shape)
        for _ in range(count):
            yield tuple(rng.randrange(size) for size in shape)

    def at(self, point: tuple[int, ...]) -> float:
        """The value at an index."""
        given = {dim[0]: place for dim, place in zip(self.dims, point, strict=True) if dim}
        return float(self._number(self.value, given))

    def gave_up(self) -> frozenset[str]:
        """The operators at which reading stopped."""
        found, queue = set[str](), list(_variables(self.value))
        seen = set[Variable]()
        while queue:
            each = queue.pop()
            if each in seen:
                continue
            seen.add(each)
            if isinstance(each.source, Source):
                call = read(each.source.node)
                found |= set() if call is None else {call.name}
                queue += [v for dim in each.source.dims for v in self.reader.place(dim).variables]
            elif isinstance(each.source, Sum):
                queue += _variables(each.source.body)
        return frozenset(found)

    def _number(self, found: Value, given: Mapping[Axis, int]) -> float | Fraction:
        if not isinstance(found, Piecewise):
            return float(self._holds(found, given))
        (number,) = (each for where, each in found.cases if self._holds(where, given))
        return self._polynomial(number, given)

    def _polynomial(self, found: Number, given: Mapping[Axis, int]) -> float | Fraction:
        if not isinstance(found, Polynomial):
            return found
        return sum(
            (
                factor * math.prod(self._variable(each, given) for each in monomial)
                for monomial, factor in found.terms.items()
            ),
            start=Fraction(0),
        )

    def _variable(self, each: Variable, given: Mapping[Axis, int]) -> float | Fraction:
        source = each.source
        if isinstance(source, Axis):
            return Fraction(given[source])
        if isinstance(source, tuple):
            return Fraction(self._polynomial(source[0], given) // source[1])
        if isinstance(source, Source):
            index = tuple(int(self._polynomial(self.reader.place(dim), given)) for dim in source.dims)
            shape = value(source.node).shape
            assert all(0 <= i < size for i, size in zip(index, shape, strict=True)), f"{source.node} read outside"
            return Fraction(value(source.node)[index].item())
        assert isinstance(source, Sum), f"{each} stands for nothing"
        ranges = itertools.product(*(range(int(axis.size)) for axis in source.over))
        inner = (self._number(source.body, {**given, **dict(zip(source.over, way, strict=True))}) for way in ranges)
        return sum(inner, start=Fraction(0))

    def _holds(self, where: Predicate, given: Mapping[Axis, int]) -> bool:
        match where:
            case Constant(holds):
                return holds
            case AtLeast(inner):
                return self._polynomial(inner, given) >= 0
            case Zero(inner, holds):
                return (self._polynomial(inner, given) == 0) == holds
            case Given(flag, holds):
                return bool(self._variable(flag, given)) == holds
            case Every(parts):
                return all(self._holds(part, given) for part in _guards_first(parts))
            case Some(parts):
                return any(self._holds(part, given) for part in _guards_first(parts))


def _guards_first(parts: Iterable[Predicate]) -> list[Predicate]:
    """What says that a tensor is read inside, before what that holds there."""
    return sorted(parts, key=lambda part: any(each.is_data for each in variables(part)))


def _variables(found: Value) -> frozenset[Variable]:
    return found.variables if isinstance(found, Piecewise) else variables(found)
