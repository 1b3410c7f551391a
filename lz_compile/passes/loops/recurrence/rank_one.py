"""Sums of outer products with as few summands as shared factors allow, and summands that share one side joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from lz_compile.passes.loops.recurrence.index_sum import Dims, IndexSum, mapped
from lz_compile.passes.loops.recurrence.index_terms import Factor, Term, common, others

#: A number times two products of disjoint indices.
Product: TypeAlias = "tuple[Term, Term, float]"
Outer: TypeAlias = "tuple[IndexSum, IndexSum]"


def products_of(products: Iterable[Product], dims: Dims) -> list[Outer]:
    """The sum of ``number * first * second`` as few pairs of sums: parallel rows of its matrix of numbers are one."""
    rows: dict[Term, dict[Term, float]] = {}
    columns: dict[Term, dict[Term, float]] = {}
    for first, second, number in products:
        rows.setdefault(first, {})[second] = rows.get(first, {}).get(second, 0.0) + number
        columns.setdefault(second, {})[first] = columns.get(second, {}).get(first, 0.0) + number
    by_row = _parallel(rows, dims)
    by_column = [(first, second) for second, first in _parallel(columns, dims)]
    return by_row if len(by_row) <= len(by_column) else by_column


def _parallel(rows: Mapping[Term, Mapping[Term, float]], dims: Dims) -> list[Outer]:
    found: dict[tuple[tuple[Term, float], ...], dict[Term, float]] = {}
    for term, row in rows.items():
        entries = sorted(row.items(), key=lambda entry: entry[0].order)
        lead = entries[0][1]
        direction = tuple((other, number / lead) for other, number in entries)
        found.setdefault(direction, {})[term] = lead
    return [(IndexSum(dims, first), IndexSum(dims, dict(second))) for second, first in found.items()]


def paired(
    erasures: Sequence[Outer], writes: Sequence[Outer], keys: frozenset[int]
) -> list[tuple[IndexSum, IndexSum | None, IndexSum | None]]:
    """``(left, right, erase)`` for ``left (right - erase S)``: what is erased and what is written under one key together.

    ``erasures`` are added to the state as they are, and so have the sign of a write.
    """
    found: list[tuple[IndexSum, IndexSum | None, IndexSum | None]] = []
    left = list(writes)
    for under, erase in erasures:
        scale, factors, core = _content(under, keys)
        for candidate in left:
            other_scale, other_factors, other_core = _content(candidate[0], keys)
            if other_core != core:
                continue
            left.remove(candidate)
            shared = common(factors, other_factors)
            whole = _times(core, shared, other_scale)
            written = _times(candidate[1], others(other_factors, shared), 1.0)
            found.append((whole, written, _times(erase, others(factors, shared), -scale / other_scale)))
            break
        else:
            found.append((under, None, erase.scaled(-1)))
    return found + [(under, right, None) for under, right in left]


def _content(whole: IndexSum, keys: frozenset[int]) -> tuple[float, tuple[Factor, ...], IndexSum]:
    """A number and the factors without keys that all products share, and what is left."""
    terms = sorted(whole.terms, key=lambda term: term.order)
    shared = common(*(term.factors for term in terms))
    outside = [each for each in shared if min(each.indices, default=0) >= 0 and not keys & set(each.indices)]
    core = mapped(whole, lambda term: term.without(outside))
    lead = core.terms[min(core.terms, key=lambda term: term.order)]
    return lead, tuple(outside), core.scaled(1 / lead)


def _times(whole: IndexSum, factors: Sequence[Factor], number: float) -> IndexSum:
    return mapped(whole, lambda term: Term((*term.factors, *factors), term.bound)).scaled(number)
