"""Places in a dimension: axes of which some stand still, so that a part of a tensor is a tensor of its own.

A dimension of 64 features, read at its second half, is ``(Fixed(2, 1), j)`` with an axis ``j`` of 32; at its odd features it
is ``(j, Fixed(2, 1))``. Both are products of axes like any other, so that reshapes, transposes and repeats are read as ever.
What is no such product, as the features from 3 to 5 of 8, is a :class:`Window`, which no reshape can cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lz_compile.ground.sizes import Size, product
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms

#: Axes with the distance between their neighbours in a dimension, the largest distance first.
Terms = tuple[tuple[Axis, int], ...]


class FixedIndex(Axis):
    """An axis that nothing may cut; two that say the same are equal."""

    def __init__(self, size: Size, *own: Any) -> None:
        super().__init__(size)
        self.key = (type(self).__name__, size, *own)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "parts" and value:
            raise LayoutError("a place is cut")
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedIndex) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Fixed(FixedIndex):
    """One index of ``size``."""

    def __init__(self, size: Size, value: int) -> None:
        super().__init__(size, value)
        self.value = value


class Window(FixedIndex):
    """The elements ``offset + sum(stride * axis)`` of a dimension of ``size``."""

    def __init__(self, size: Size, offset: int, terms: Terms) -> None:
        super().__init__(size, offset, terms)
        self.offset, self.terms = offset, terms


def affine(dim: Iterable[Axis]) -> tuple[int, Terms]:
    """Offset and terms of a dimension.

    Raises:
        LayoutError: an extent is not known.
    """
    offset, stride, terms = 0, 1, []
    for axis in reversed(atoms(dim)):
        if not isinstance(axis.size, int):
            raise LayoutError("part of a dimension whose extent is not known")
        if isinstance(axis, Fixed):
            offset += axis.value * stride
        elif isinstance(axis, Window):
            offset += axis.offset * stride
            terms += [(each, step * stride) for term in axis.terms for each, step in _uncut(*term)]
        else:
            terms.append((axis, stride))
        stride *= axis.size
    return offset, ordered(terms)


def _uncut(axis: Axis, stride: int) -> Terms:
    """The term of an axis in its parts, where a reshape has cut it since."""
    found: list[tuple[Axis, int]] = []
    for part in reversed(atoms((axis,))):
        assert isinstance(part.size, int), "extents of places are known"
        found.append((part, stride))
        stride *= part.size
    return tuple(found)


def ordered(terms: Iterable[tuple[Axis, int]]) -> Terms:
    """The largest distance first."""
    return tuple(sorted(terms, key=lambda term: -term[1]))


def placed(offset: int, terms: Terms, size: int) -> tuple[Axis, ...]:
    """The dimension of ``size`` at a place: axes and what stands still, a window where there is no such product."""
    if size == 1:
        return ()
    if not terms:
        return (Fixed(size, offset),)
    *others, (axis, stride) = terms
    length = stride if stride > 1 else axis.size
    assert isinstance(length, int), "extents of places are known"
    if size % length or any(step % length for _, step in others) or (stride == 1 and offset % length):
        return (Window(size, offset, terms),)
    rest = tuple((each, step // length) for each, step in others)
    if stride == 1:
        return (*placed(offset // length, rest, size // length), axis)
    inner = (*rest, (axis, 1))
    return (*placed(offset // length, inner, size // length), Fixed(length, offset % length))


def canonical(dims: Dims) -> Dims:
    """The same places, in one form."""
    return tuple(
        placed(*affine(dim), product(axis.size for axis in dim)) if has_fixed_index(dim) else atoms(dim) for dim in dims
    )


def has_fixed_index(dim: Iterable[Axis]) -> bool:
    """Whether a dimension is read in part."""
    return any(isinstance(axis, FixedIndex) for axis in dim)


def paired(first: Dims, second: Dims, pair: Axis) -> Dims | None:
    """The place of two that differ in one dimension, with ``pair`` as the axis between them; None where there is none."""
    if len(first) != len(second):
        return None
    found: list[tuple[Axis, ...]] = []
    for one, other in zip(canonical(first), canonical(second), strict=True):
        if one == other:
            found.append(one)
            continue
        (offset, terms), (there, others) = affine(one), affine(other)
        size = product(axis.size for axis in one)
        if terms != others or there <= offset or pair in atoms(axis for dim in found for axis in dim):
            return None
        assert isinstance(size, int), "extents of places are known"
        found.append(placed(offset, ordered((*terms, (pair, there - offset))), size))
    return tuple(found)


def evenly(terms: tuple[tuple[Axis, int], ...]) -> tuple[int, int]:
    """Step and extent of elements that are evenly spaced; LayoutError where they are not."""
    step = distance = terms[-1][1] if terms else 1
    for axis, stride in reversed(terms):
        if stride != distance:
            raise LayoutError("a part that is no slice")
        distance = stride * axis.size
    return step, distance - step + 1 if terms else 1
