"""Tensors as sums of products in index notation: ``beta[b,h] k[b,h,i] (k[b,h,j] S[b,h,j,v])``, summed over ``j``.

An index is a number. The free ones of a sum are counted through its dimensions, most significant first, so that index 2
is the third; those that are summed over are negative, and belong to their own product alone. There are no names, and so no
name can be taken for another one: whatever joins two sums says where the indices of each go.

A dimension may be the product of several indices (``[b, h, (k v)]``), and one of size one has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lz_compile.ground.sizes import Size, product
from lz_compile.passes.formula.axes import Axis, LayoutError, atoms, axes_of, fresh, regroup
from lz_compile.passes.formula.axes import Dims as AxisDims
from lz_compile.passes.loops.recurrence.index_terms import (
    IDENTITY,
    Atom,
    Factor,
    Kind,
    SizedError,
    Term,
    UnreadableError,
    normal_term,
)

#: Of every dimension, the sizes of its indices.
Dims: TypeAlias = "tuple[tuple[Size, ...], ...]"

#: Sums of more products are not read.
MAX_TERMS = 200
_CANCELS = 1e-12


Terms: TypeAlias = "Mapping[Term, float]"
#: Factors, the sizes of the indices that are summed over, and a number.
Product: TypeAlias = "tuple[tuple[Factor, ...], tuple[Size, ...], float]"


@dataclass(frozen=True)
class IndexSum:
    """``sum of number * product``; ``dims`` are the sizes of the indices of every dimension. Equal sums are equal objects."""

    dims: Dims
    terms: Terms = field(hash=False)

    # ---- making -------------------------------------------------------------------------------------------------

    @staticmethod
    def of_atom(atom: Atom, shape: Sequence[Size]) -> IndexSum:
        """A tensor of this shape as itself."""
        return IndexSum.of_cut_atom(atom, dims_of(shape))

    @staticmethod
    def of_cut_atom(atom: Atom, dims: Dims) -> IndexSum:
        """A tensor as itself, with dimensions that are products of indices of these sizes."""
        return IndexSum(dims, {Term((Factor(atom, tuple(range(_count(dims)))),)): 1.0})

    @staticmethod
    def of_number(number: float, shape: Sequence[Size] = ()) -> IndexSum:
        """The same number everywhere."""
        return IndexSum(dims_of(shape), {Term(): float(number)} if number else {})

    @staticmethod
    def identity(size: Size) -> IndexSum:
        """The identity matrix."""
        if size == 1:
            return IndexSum.of_number(1, (1, 1))
        return IndexSum(((size,), (size,)), {Term((Factor(IDENTITY, (0, 1)),)): 1.0})

    # ---- reading ------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[Size, ...]:
        """The extents of the dimensions."""
        return tuple(map(product, self.dims))

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The extent of every free index."""
        return tuple(size for dim in self.dims for size in dim)

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The free indices of every dimension."""
        counter = itertools.count()
        return tuple(tuple(next(counter) for _ in dim) for dim in self.dims)

    @property
    def atoms(self) -> frozenset[Atom]:
        """Every atom of a product."""
        return frozenset(factor.atom for term in self.terms for factor in term.factors)

    def has(self, kind: Kind) -> bool:
        """Whether there is an atom of a kind."""
        return any(atom.kind == kind for atom in self.atoms)

    # ---- arithmetic ---------------------------------------------------------------------------------------------

    def scaled(self, number: Any) -> IndexSum:
        """Times a number."""
        _refuse_sizes(number)
        return IndexSum(self.dims, {term: value * number for term, value in self.terms.items()} if number else {})

    def plus(self, other: IndexSum, scale: float = 1.0) -> IndexSum:
        """``self + scale * other``, broadcast."""
        one, two, joined = _aligned(self, other)
        both = ((each.terms.items(), factor) for each, factor in ((one, 1.0), (two, scale)))
        return _collected(
            joined, ((term.factors, term.bound, number * factor) for terms, factor in both for term, number in terms)
        )

    def times(self, other: IndexSum) -> IndexSum:
        """The elementwise product, broadcast."""
        one, two, joined = _aligned(self, other)
        own, pairs = {i: i for i in range(_count(joined))}, itertools.product(one.terms.items(), two.terms.items())
        products = (
            (first.factors + _at(second, own, len(first.bound)), first.bound + second.bound, number * scale)
            for (first, number), (second, scale) in pairs
        )
        return _collected(joined, products)

    def __add__(self, other: IndexSum | float) -> IndexSum:
        return self.plus(as_sum(other))

    def __sub__(self, other: IndexSum | float) -> IndexSum:
        return self.plus(as_sum(other), -1)

    def __rsub__(self, other: float) -> IndexSum:
        return as_sum(other).plus(self, -1)

    def __mul__(self, other: IndexSum | float) -> IndexSum:
        return self.times(other) if isinstance(other, IndexSum) else self if other == 1 else self.scaled(other)

    __rmul__ = __mul__

    def __neg__(self) -> IndexSum:
        return self.scaled(-1)

    def power(self, exponent: int) -> IndexSum:
        """To a whole power of at least one."""
        result = self
        for _ in range(exponent - 1):
            result = result.times(self)
        return result

    def matmul(self, other: IndexSum) -> IndexSum:
        """``self @ other`` of matrices, with batch dimensions that broadcast."""
        return self.unsqueezed(-1).times(other.unsqueezed(-3)).summed([-2])

    def summed(self, dims: Iterable[int], *, keeps: bool = False) -> IndexSum:
        """The sum over dimensions, which stay with size one where ``keeps``."""
        rank = len(self.dims)
        gone = {dim % rank for dim in dims}
        kept = tuple(() if d in gone else own for d, own in enumerate(self.dims) if keeps or d not in gone)
        places, place, sizes = self.places, {}, []
        counter = itertools.count()
        for dim, own in enumerate(places):
            for index in own:
                if dim in gone:
                    sizes.append(self.sizes[index])
                    place[index] = -len(sizes)
                else:
                    place[index] = next(counter)
        return self._placed(kept, place, sizes)

    # ---- layout -------------------------------------------------------------------------------------------------

    def moved(self, result: AxisDims, source: AxisDims) -> IndexSum:
        """The sum in another layout: ``result`` are the axes of each of its dimensions, ``source`` those of this one's.

        Raises:
            UnreadableError: the dimensions do not factor.
        """
        runs: dict[Axis, tuple[Size, ...]] = {}
        cuts: list[Size] = []
        for own, dim in zip(self.dims, map(atoms, source), strict=True):
            sizes = [axis.size for axis in dim]
            cuts += _flat(refinement(own, sizes))
            for axis, run in zip(dim, refinement(sizes, own), strict=True):
                if runs.setdefault(axis, run) != run:
                    raise UnreadableError("the diagonal of what is cut in other pieces")
        places, count = dict[Axis, int](), 0
        for axis in axes_of(result):
            places[axis], count = count, count + len(runs.setdefault(axis, (axis.size,)))
        dims = tuple(tuple(_flat(runs[axis] for axis in atoms(dim))) for dim in result)
        order = [places[axis] + i for axis in axes_of(source) for i in range(len(runs[axis]))]
        return self._split(cuts)._placed(dims, dict(enumerate(order)))

    def unsqueezed(self, dim: int) -> IndexSum:
        """With a new dimension of size one."""
        dim %= len(self.dims) + 1
        return IndexSum((*self.dims[:dim], (), *self.dims[dim:]), self.terms)

    def expanded(self, shape: Sequence[Size]) -> IndexSum:
        """Broadcast to a shape."""
        result = fresh([size or 1 for size in shape])
        own = result[len(result) - len(self.dims) :]
        return self.moved(result, tuple(dim if mine else () for mine, dim in zip(self.dims, own, strict=True)))

    def diagonal_matrix(self) -> IndexSum:
        """``diag_embed``: the last dimension on the diagonal of a matrix."""
        (size,) = self.dims[-1] or (1,)
        return self.unsqueezed(-1).times(IndexSum.identity(size))

    def _placed(self, dims: Dims, place: Mapping[int, int], summed: Sequence[Size] = ()) -> IndexSum:
        """With free indices moved to other places, some of them among those that are ``summed`` over."""
        products = (
            (_at(term, place, len(summed)), (*summed, *term.bound), number) for term, number in self.terms.items()
        )
        return _collected(dims, products)

    def _split(self, sizes: Sequence[Size]) -> IndexSum:
        """With free indices cut into factors, so that they have these sizes."""
        if tuple(sizes) == self.sizes:
            return self
        runs: dict[int, tuple[int, ...]] = {}
        queue, dims = list(enumerate(sizes)), []
        for dim, own in zip(self.places, self.dims, strict=True):
            cut: list[Size] = []
            for index, size in zip(dim, own, strict=True):
                run: list[int] = []
                while product(sizes[position] for position in run) != size:
                    run.append(queue.pop(0)[0])
                runs[index] = tuple(run)
                cut.extend(sizes[position] for position in run)
            dims.append(tuple(cut))
        cut_terms = ((tuple(_cut(factor, runs) for factor in term.factors), term) for term in self.terms)
        return _collected(tuple(dims), ((factors, term.bound, self.terms[term]) for factors, term in cut_terms))


def as_sum(value: object) -> IndexSum:
    """A number as a sum.

    Raises:
        UnreadableError: it is neither.
    """
    if isinstance(value, IndexSum):
        return value
    if isinstance(value, (bool, int, float)):
        return IndexSum.of_number(float(value))
    raise UnreadableError(f"an argument {value!r}")


def dims_of(shape: Sequence[Size]) -> Dims:
    """One index for every dimension, none for those of size one."""
    return tuple(() if size == 1 else (size,) for size in shape)


def refinement(first: Sequence[Size], second: Sequence[Size]) -> list[tuple[Size, ...]]:
    """For every size of ``first``, the factors in which it has to be cut for those of ``second`` to be products of them.

    Raises:
        UnreadableError: there are none.
    """
    dims = fresh(first)
    try:
        regroup(axes_of(dims), second)
    except LayoutError:
        raise UnreadableError(f"{tuple(first)} does not regroup as {tuple(second)}") from None
    return [tuple(axis.size for axis in atoms(dim)) for dim in dims]


def substituted(whole: IndexSum, atom: Atom, value: IndexSum) -> IndexSum:
    """``whole``, in every product of which ``atom`` occurs at most once, with ``value`` in the place of ``atom``."""
    products: list[Product] = []
    for term, number in whole.terms.items():
        own = next((factor for factor in term.factors if factor.atom == atom), None)
        if own is None:
            products.append((term.factors, term.bound, number))
            continue
        if len(own.indices) != len(value.sizes):
            raise UnreadableError(f"{atom.name} is cut in other pieces")
        rest, place = term.without([own]).factors, dict(enumerate(own.indices))
        products += [
            (rest + _at(inner, place, len(term.bound)), term.bound + inner.bound, number * scale)
            for inner, scale in value.terms.items()
        ]
    return _collected(whole.dims, products)


def _collected(dims: Dims, products: Iterable[Product]) -> IndexSum:
    """The sum of products, each in its normal form."""
    terms: dict[Term, float] = {}
    for factors, bound, number in products:
        term, scale = normal_term(factors, bound)
        _refuse_sizes(scale)
        added = number * scale
        before = terms.pop(term, 0.0)
        total = before + added
        if abs(total) > _CANCELS * max(abs(before), abs(added)):
            terms[term] = total
        if len(terms) > MAX_TERMS:
            raise UnreadableError(f"more than {MAX_TERMS} products")
    return IndexSum(dims, terms)


def _aligned(one: IndexSum, two: IndexSum) -> tuple[IndexSum, IndexSum, Dims]:
    """Both with the same free indices, as broadcasting joins their dimensions."""
    rank = max(len(one.dims), len(two.dims))
    pairs = [((),) * (rank - len(each.dims)) + each.dims for each in (one, two)]
    joined = tuple(
        _flat(refinement(first, second)) if first and second and first != second else first or second
        for first, second in zip(*pairs, strict=True)
    )
    axes = tuple(tuple(map(Axis, dim)) for dim in joined)

    def moved(each: IndexSum) -> IndexSum:
        own = zip(axes[rank - len(each.dims) :], each.dims, strict=True)
        return each if each.dims == joined else each.moved(axes, tuple(dim if mine else () for dim, mine in own))

    return moved(one), moved(two), joined


def _cut(factor: Factor, runs: Mapping[int, tuple[int, ...]]) -> Factor:
    if factor.atom is IDENTITY and any(len(runs.get(index, (index,))) > 1 for index in factor.indices):
        raise UnreadableError("an identity that is cut in pieces")
    return Factor(factor.atom, tuple(part for index in factor.indices for part in runs.get(index, (index,))))


def _at(term: Term, place: Mapping[int, int], by: int) -> tuple[Factor, ...]:
    """The factors of a product with free indices in other places, and those that it sums over behind so many others."""
    inner = {-1 - i: -1 - i - by for i in range(len(term.bound))}
    return tuple(factor.at({**place, **inner}) for factor in term.factors)


def _flat(runs: Iterable[Iterable[Size]]) -> tuple[Size, ...]:
    return tuple(size for run in runs for size in run)


def _refuse_sizes(number: Any) -> None:
    if not isinstance(number, (int, float)):
        raise SizedError(f"{number}, a symbolic size, as a factor")


def _count(dims: Dims) -> int:
    return sum(map(len, dims))


def mapped(whole: IndexSum, change: Callable[[Term], Term | None]) -> IndexSum:
    """The sum of the products that ``change`` gives for those of ``whole``; those with None are left out."""
    changed = ((change(term), number) for term, number in whole.terms.items())
    return _collected(whole.dims, ((each.factors, each.bound, number) for each, number in changed if each is not None))
