"""Sums in index notation computed for all steps at once, over tensors or over proxies that append to a graph.

A mask in a sum is a choice between two sums: nothing is added and subtracted again to say so, and what a mask leaves out
may be NaN.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from lz_compile.ground.sizes import Shape, Size
from lz_compile.passes.loops.recurrence.index_sum import IndexSum, mapped
from lz_compile.passes.loops.recurrence.index_terms import IDENTITY, Atom, Factor, Term, common

#: A sum with more masks than this is computed as it is written.
MAX_MASKS = 4
#: In the order of a result, the place of time.
TIME = -1_000_000


@dataclass(frozen=True)
class Source:
    """Where the values of an atom are: a tensor with time as its first dimension (``over_time``), or without.

    ``shape`` is its shape without time, where that of the value is not in the sizes of a sum.
    """

    value: Any
    over_time: bool
    shape: Shape | None = None

    @property
    def sizes(self) -> list[Size]:
        """The shape without time."""
        return list(self.value.shape[int(self.over_time) :] if self.shape is None else self.shape)


@dataclass(frozen=True)
class Values:
    """Computes sums.

    Args:
        source: the tensor behind an atom.
        sizes: of the free indices.
        dtype: in which is computed; a tensor that is taken as it is keeps its own.
        like: any tensor on the device.
        extent: what a size of a sum is in the graph that is made, or run.
    """

    source: Callable[[Atom], Source]
    sizes: Mapping[int, Size]
    dtype: torch.dtype
    like: Any
    extent: Callable[[Size], Any] = lambda size: size

    def of(self, whole: IndexSum, groups: Sequence[Sequence[int]], leak: IndexSum | None = None) -> Any:
        """The sum as a tensor with one dimension for each group of free indices (or :data:`TIME`).

        Dimensions of which it has no index have size one. It is NaN where ``leak`` is not finite.
        """
        if leak is not None:  # added, so that gradients are those of the value
            value = self.of(whole, groups)
            return value + torch.where(self.of(leak, groups).isfinite(), 0.0, torch.nan).to(value.dtype)
        order = [index for group in groups for index in group]
        value = self._sum(whole, order)
        if not _is_tensor(value):
            return self.like.new_full([1] * len(groups), value, dtype=self.dtype)
        if all(len(group) == 1 for group in groups):
            return value
        own = {index for term in whole.terms for index in term.indices}
        full = {index for group in groups if own & set(group) for index in group}
        lengths = [self._length(value, place, index, index in full) for place, index in enumerate(order)]
        if any(index in full and index not in own and index != TIME for index in order):
            value = value.expand(lengths)
        given = dict(zip(order, lengths, strict=True))
        return value.reshape([math.prod(given[index] for index in group) for group in groups])

    def _length(self, value: Any, place: int, index: int, is_full: bool) -> Any:
        """The size of one dimension, with all elements where ``is_full``."""
        if index == TIME:
            return value.shape[place]
        return self.extent(self.sizes[index]) if is_full else 1

    # ---- sums -----------------------------------------------------------------------------------------------------

    def _sum(self, whole: IndexSum, order: Sequence[int], chosen: Sequence[Any] = ()) -> Any:
        """With one dimension per index of ``order``; a number where nothing else is in it.

        It is looked at where all ``chosen`` hold. Elsewhere the factors of products are zeros: one that is NaN would make NaN
        of a gradient of zero.
        """
        mask = self._mask(whole)
        if mask is not None:
            held = self._factor(mask, (), order)
            held = held if held.dtype == torch.bool else held != 0
            there = mapped(whole, lambda term: term.without([mask]) if mask in term.factors else term)
            gone = mapped(whole, lambda term: None if mask in term.factors else term)
            one = self._sum(there, order, (*chosen, held) if _multiplies(there) else ())
            other = self._sum(gone, order, (*chosen, ~held) if _multiplies(gone) else ())
            if not _is_tensor(one) and not _is_tensor(other):
                one = self.like.new_full([], one, dtype=self.dtype)
            return torch.where(held, one, other)
        shared = _shared(whole) if len(whole.terms) > 1 else []
        if shared:
            rest = mapped(whole, lambda term: term.without(shared))
            return self._times(shared, (), order, chosen) * self._sum(rest, order, chosen)
        ordered = sorted(whole.terms.items(), key=lambda entry: (not entry[0].factors, entry[0].order))
        parts = [self._product(term, number, order, chosen) for term, number in ordered]
        return reduce(operator.add, parts) if parts else 0.0

    def _mask(self, whole: IndexSum) -> Factor | None:
        """One of the masks to choose by."""
        masks = {each for term in whole.terms for each in term.of("mask") if min(each.indices, default=0) >= 0}
        return min(masks) if 0 < len(masks) <= MAX_MASKS else None

    def _product(self, term: Term, number: float, order: Sequence[int], chosen: Sequence[Any]) -> Any:
        if not term.factors:
            return number
        if len(term.factors) == 1 and number == 1 and not term.bound and not chosen:
            value = self._factor(term.factors[0], (), order)
            if value.dtype.is_floating_point:
                return value
        value = self._times(term.factors, term.bound, order, chosen)
        for _ in term.bound:
            value = value.sum(-1)
        return value if number == 1 else value * number

    def _times(
        self, factors: Sequence[Factor], bound: Sequence[int], order: Sequence[int], chosen: Sequence[Any]
    ) -> Any:
        values = [self._factor(each, bound, order).to(self.dtype) for each in factors]
        if chosen:
            held = reduce(operator.and_, chosen)[(..., *(None for _ in bound))]
            values = [torch.where(held, value, 0.0) for value in values]
        return reduce(operator.mul, values)

    def _factor(self, factor: Factor, bound: Sequence[int], order: Sequence[int]) -> Any:
        """An atom with one dimension per index of ``order``, and then for the summed ones."""
        sizes = {**self.sizes, **{-1 - i: size for i, size in enumerate(bound)}}
        places = [*order, *(-1 - i for i in range(len(bound)))]
        own = list(factor.indices)
        wanted = [sizes[index] for index in own]
        if factor.atom == IDENTITY:
            value = self.like.new_ones([self.extent(wanted[0])], dtype=self.dtype).diag_embed()
        else:
            source = self.source(factor.atom)
            value = source.value
            if source.sizes != wanted:
                steps = [value.shape[0]] if source.over_time else []
                value = value.reshape([*steps, *map(self.extent, wanted)])
            if source.over_time:
                own = [TIME, *own]
        while len(set(own)) < len(own):
            index = next(each for each in own if own.count(each) > 1)
            first, second, *_ = (position for position, each in enumerate(own) if each == index)
            value = value.diagonal(0, first, second)
            own = [each for position, each in enumerate(own) if position not in (first, second)] + [index]
        ranked = sorted(own, key=places.index)
        if ranked != own:
            value = value.permute([own.index(index) for index in ranked])
        for position, index in enumerate(places):
            if index not in own:
                value = value.unsqueeze(position)
        return value


def masks_of(sums: Iterable[IndexSum]) -> frozenset[Factor]:
    """Every mask of some sums."""
    return frozenset(each for whole in sums for term in whole.terms for each in term.of("mask"))


def ways_of(masks: frozenset[Factor]) -> Iterator[dict[Atom, bool]]:
    """How masks may hold, if there are any, and few enough to choose by."""
    atoms = sorted({each.atom for each in masks})
    if 0 < len(masks) <= MAX_MASKS:
        yield from (dict(zip(atoms, each, strict=True)) for each in itertools.product((False, True), repeat=len(atoms)))


def where_held(held: Mapping[Atom, bool], term: Term) -> Term | None:
    """What a product is where masks hold, or do not; None is zero."""
    masks = term.of("mask")
    return term.without(masks) if all(held[each.atom] for each in masks) else None


def _is_tensor(value: Any) -> bool:
    return not isinstance(value, (int, float))


def _multiplies(whole: IndexSum) -> bool:
    """Whether a sum has products of numbers that are given."""
    return any(len(term.of("given")) > 1 for term in whole.terms)


def _shared(whole: IndexSum) -> list[Factor]:
    """The factors of every product, other than those that are summed over."""
    return [each for each in common(*(term.factors for term in whole.terms)) if min(each.indices, default=0) >= 0]
