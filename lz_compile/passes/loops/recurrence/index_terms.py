"""Products in index notation, and their normal form: equal products are equal objects.

An index is a number: free ones are counted from zero, and those that are summed over are negative. Without names, none can
be taken for another one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, Literal, TypeAlias

from lz_compile.ground.sizes import Size

Kind: TypeAlias = Literal["state", "given", "mask", "identity"]

_EXHAUSTIVE = 4


class UnreadableError(Exception):
    """Something that has no form as a sum of products."""


class SizedError(UnreadableError):
    """A product has a symbolic size as a factor."""


@dataclass(frozen=True, order=True)
class Atom:
    """A tensor that is not looked into; a ``mask`` holds nothing but zeros and ones."""

    name: str
    kind: Kind = "given"


#: One where its two indices are equal, else zero.
IDENTITY = Atom("identity", "identity")


@dataclass(frozen=True, order=True)
class Factor:
    """An atom with an index for each of its dimensions (or several, where a dimension is a product of indices)."""

    atom: Atom
    indices: tuple[int, ...]

    def at(self, place: Mapping[int, int]) -> Factor:
        """The same with other indices."""
        return Factor(self.atom, tuple(place[index] for index in self.indices))


@dataclass(frozen=True)
class Term:
    """A product; ``bound`` are the sizes of the indices -1, -2, ... that it is summed over."""

    factors: tuple[Factor, ...] = ()
    bound: tuple[Size, ...] = ()

    def of(self, kind: Kind) -> tuple[Factor, ...]:
        """The factors of one kind."""
        return tuple(factor for factor in self.factors if factor.atom.kind == kind)

    def without(self, factors: Iterable[Factor]) -> Term:
        """The product of the other factors; indices stay as they are."""
        left = list(self.factors)
        for factor in factors:
            left.remove(factor)
        return Term(tuple(left), self.bound)

    @property
    def order(self) -> tuple[Any, ...]:
        """By what products are sorted."""
        return self.factors, tuple(map(str, self.bound))

    @property
    def indices(self) -> frozenset[int]:
        """Every index of a factor."""
        return frozenset(index for factor in self.factors for index in factor.indices)


def normal_term(factors: Sequence[Factor], bound: Sequence[Size]) -> tuple[Term, Any]:
    """The same product with identities followed, masks not repeated and summed indices in a fixed order, and a number.

    The number is a size where that is symbolic.
    """
    kept, scale = _contracted(factors), 1.0
    used = {index for factor in kept for index in factor.indices}
    for position, size in enumerate(bound):
        if -1 - position not in used and -1 - position not in _followed(factors, kept):
            scale *= size
    inner = sorted((index for index in used if index < 0), reverse=True)
    sizes = {index: bound[-1 - index] for index in inner}
    orders: Iterable[Sequence[int]] = [inner]
    if len(inner) > 1:
        orders = itertools.permutations(inner) if len(inner) <= _EXHAUSTIVE else [_by_use(inner, kept)]
    return min((_numbered(kept, order, sizes) for order in orders), key=lambda found: found.order), scale


def _followed(before: Sequence[Factor], after: Sequence[Factor]) -> frozenset[int]:
    """The summed indices that an identity replaced by another index: of such a sum, one number is left."""
    was = {index for factor in before for index in factor.indices if index < 0}
    return frozenset(was - {index for factor in after for index in factor.indices})


def _contracted(factors: Sequence[Factor]) -> list[Factor]:
    """Without identities of a summed index; of two free indices that are equal, the first stands for both."""
    queue, kept = list(factors), set[Factor]()
    while True:
        identity = next((each for each in queue if each.atom is IDENTITY and each not in kept), None)
        if identity is None:
            break
        queue.remove(identity)
        gone, stays = identity.indices if min(identity.indices) < 0 else identity.indices[::-1]
        if stays < 0 and gone >= 0:
            gone, stays = stays, gone
        queue = [each.at({i: stays if i == gone else i for i in each.indices}) for each in queue]
        if min(gone, stays) >= 0 and gone != stays:
            kept.add(Factor(IDENTITY, (min(gone, stays), max(gone, stays))))
        elif stays < 0 and not any(stays in each.indices for each in queue):
            raise UnreadableError("the trace of an identity")
    queue.extend(kept)
    found: list[Factor] = []
    for each in queue:
        if each.atom.kind in ("given", "state") or each not in found:
            found.append(each)
    return found


def _by_use(inner: Sequence[int], factors: Sequence[Factor]) -> list[int]:
    def use(index: int) -> list[tuple[Atom, int]]:
        return sorted((factor.atom, factor.indices.index(index)) for factor in factors if index in factor.indices)

    return sorted(inner, key=use)


def _numbered(factors: Sequence[Factor], order: Sequence[int], sizes: Mapping[int, Size]) -> Term:
    place = {index: -1 - position for position, index in enumerate(order)}
    places = {index: place.get(index, index) for factor in factors for index in factor.indices}
    return Term(tuple(sorted(factor.at(places) for factor in factors)), tuple(sizes[index] for index in order))


def connected(term: Term, start: set[int]) -> list[Factor]:
    """The factors that summed indices connect with ``start``."""
    found: list[Factor] = []
    indices = set(start)
    while True:
        more = [each for each in term.factors if each not in found and indices & set(each.indices)]
        if not more:
            return found
        found += more
        indices |= {index for each in more for index in each.indices if index < 0}


def subterm(term: Term, factors: Iterable[Factor], named: Mapping[int, int] | None = None) -> Term:
    """Some of the factors as a product by itself; ``named`` gives summed indices a free place."""
    factors, named = tuple(factors), named or {}
    inner = sorted({i for each in factors for i in each.indices if i < 0 and i not in named}, reverse=True)
    place = {index: -1 - position for position, index in enumerate(inner)}
    moved = [Factor(each.atom, tuple(named.get(i, place.get(i, i)) for i in each.indices)) for each in factors]
    return normal_term(moved, [term.bound[-1 - index] for index in inner])[0]


def common(*products: Iterable[Factor]) -> list[Factor]:
    """The factors that all products have, as often as all of them do."""
    return [*reduce(and_, map(Counter, products)).elements()]


def others(product: Iterable[Factor], gone: Iterable[Factor]) -> tuple[Factor, ...]:
    """The factors of a product without some of them."""
    return (*(Counter(product) - Counter(gone)).elements(),)
