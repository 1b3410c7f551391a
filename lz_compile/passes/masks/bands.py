"""Bands of positions: comparisons of a query's position with a key's, as one band counted from the start or the end.

Where a mask of fixed size is no band, it is told which keys queries see at most: prefixes, blocks, what only values tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch

from lz_compile.lowering.bands import Band, Reach
from lz_compile.passes.formula.axes import Axis
from lz_compile.passes.formula.polynomial import ZERO, Polynomial, Variable, lower, number
from lz_compile.passes.formula.predicates import AtLeast, Constant, Every, Predicate, Some, Zero


@dataclass(frozen=True)
class Positions:
    """Where a query and a key are, and how many there are, as polynomials in their axes and in sizes.

    ``counted`` has those that guards say not to be negative: it grows as more of a mask is read.
    """

    query: Polynomial
    key: Polynomial
    queries: Polynomial
    keys: Polynomial
    query_axes: tuple[Axis, ...]
    key_axes: tuple[Axis, ...]
    counted: Set[Polynomial]

    @property
    def offset(self) -> Polynomial:
        """The position of the first query among the keys, where the last ones are at the same position."""
        return self.keys - self.queries


@dataclass(frozen=True)
class Bound:
    """``key - query <= limit``, or ``>= limit``; the limit depends on sizes only."""

    limit: Polynomial
    is_upper: bool


def bounds(predicate: Predicate, at: Positions) -> tuple[Bound, ...] | None:
    """The bounds that a condition is, None where it is something else, or where they are not a number from start or end."""
    if isinstance(predicate, AtLeast):
        values = [predicate.value]
    elif isinstance(predicate, Zero) and predicate.holds:
        values = [predicate.value, -predicate.value]
    else:
        return None
    found = [bound for bound in (_bound(value, at) for value in values) if bound is not None and _is_fixed(bound, at)]
    return tuple(found) if len(found) == len(values) else None


def _is_fixed(bound: Bound, at: Positions) -> bool:
    return bound.limit.constant is not None or (bound.limit - at.offset).constant is not None


def _bound(value: Polynomial, at: Positions) -> Bound | None:
    """``value >= 0`` as a bound on the distance."""
    distance = at.key - at.query
    for is_upper, rest in ((True, value + distance), (False, value - distance)):
        if all(each.is_size or not (each.axes or each.is_data) for each in rest.variables):
            return Bound(rest if is_upper else -rest, is_upper)
    return None


def band(found: Iterable[Bound], at: Positions) -> tuple[Band | None, bool]:
    """The band that some bounds are, with False where it is only part of what they say.

    A band under which a query might see no key is none.
    """
    given = list(found)
    uppers, lowers = ([each.limit for each in given if each.is_upper is side] for side in (True, False))
    best: tuple[Band | None, bool] = None, not given
    for at_end in _alignments(uppers, lowers, at):
        offset = at.offset if at_end else ZERO
        upper, lowest = (_constants(limits, offset) for limits in (uppers, lowers))
        whole = len(upper) == len(uppers) and len(lowest) == len(lowers)
        candidates = [Band(max(lowest, default=None), min(upper, default=None), at_end=at_end)]
        candidates += [Band(None, candidates[0].upper, at_end), Band(candidates[0].lower, None, at_end)]
        for position, candidate in enumerate(candidates):
            if (candidate.lower, candidate.upper) == (None, None) or not _is_never_empty(candidate, at):
                continue
            if whole and position == 0:
                return candidate, True
            best = (candidate, False) if best[0] is None else best
    return best


def _alignments(uppers: list[Polynomial], lowers: list[Polynomial], at: Positions) -> tuple[bool, ...]:
    """Whether to count from the end, the more telling way first."""
    if at.offset.constant == 0:
        return (False,)
    if at.offset.constant is None:
        return (False, True)
    is_ending = any(limit == at.offset for limit in (*uppers, *lowers))
    is_centred = any(up + low == at.offset.scaled(2) for up in uppers for low in lowers)
    is_decoding = at.queries.constant == 1
    starts = any(limit.constant == 0 for limit in (*uppers, *lowers)) or any(
        (up + low).constant == 0 for up in uppers for low in lowers
    )
    return (True, False) if (is_ending or is_centred or is_decoding) and not starts else (False, True)


def _constants(limits: list[Polynomial], offset: Polynomial) -> list[int]:
    """The limits that are numbers, counted from the offset."""
    moved = ((limit - offset).constant for limit in limits)
    return [int(each) for each in moved if each is not None]


def _is_never_empty(candidate: Band, at: Positions) -> bool:
    """Whether every query sees a key under a band, at every size."""
    offset = at.offset if candidate.at_end else ZERO
    first, last = candidate.lower, candidate.upper
    needs = []
    if first is not None and last is not None:
        needs.append(number(last - first))
    if last is not None:
        needs.append(offset + number(last))
    if first is not None:
        needs.append(at.keys - at.queries - offset - number(first))
    return all(_is_counted(each, at) for each in needs)


def _is_counted(value: Polynomial, at: Positions) -> bool:
    """Whether a number of sizes is never negative."""
    least = [lower(value), *((value - known).constant for known in at.counted)]
    return any(each is not None and each >= 0 for each in least)


#: Queries that share a span.
TILE = 64


@dataclass(frozen=True)
class _Rows:
    """The keys that each query sees at most: from ``first`` to before ``last``."""

    first: torch.Tensor
    last: torch.Tensor


def reach_of(predicate: Predicate, at: Positions) -> Reach | None:
    """The reach of a condition on positions, None where it excludes nothing or sizes are symbolic."""
    queries, keys = at.queries.constant, at.keys.constant
    if queries is None or keys is None or len(at.query_axes) > 1 or len(at.key_axes) > 1:
        return None
    rows = _rows(predicate, at, int(queries), int(keys))
    return _reach(rows, int(queries), int(keys))


def reach_of_values(kept: torch.Tensor, query_dim: int | None, key_dim: int) -> Reach | None:
    """The reach of a mask that keeps where ``kept`` is True.

    Args:
        kept: boolean.
        query_dim: the dimension of the queries, None where every query sees the same.
        key_dim: that of the keys.
    """
    others = [dim for dim in range(kept.dim()) if dim not in (query_dim, key_dim)]
    order = [*others, *([] if query_dim is None else [query_dim]), key_dim]
    rows = kept.permute(order).reshape(
        -1, *([1] if query_dim is None else [kept.shape[query_dim]]), kept.shape[key_dim]
    )
    seen = rows.any(0)
    marks, keys, is_empty = seen.to(torch.uint8), seen.shape[1], torch.logical_not(seen.any(1))
    first, last = marks.argmax(1), keys - marks.flip(1).argmax(1)
    return _reach(_Rows(first.masked_fill(is_empty, keys), last.masked_fill(is_empty, 0)), len(seen), keys)


def _reach(rows: _Rows, queries: int, keys: int) -> Reach | None:
    spans = []
    for start in range(0, queries, TILE):
        first, last = int(rows.first[start : start + TILE].min()), int(rows.last[start : start + TILE].max())
        spans.append((max(first, 0), min(last, keys)) if first < last else (0, 0))
    return Reach(TILE, tuple(spans)) if any(span != (0, keys) for span in spans) else None


def _rows(predicate: Predicate, at: Positions, queries: int, keys: int) -> _Rows:
    everything = _Rows(torch.zeros(queries, dtype=torch.int64), torch.full((queries,), keys))
    match predicate:
        case Constant(holds):
            return everything if holds else _Rows(everything.last, everything.first)
        case AtLeast(value):
            return _at_least(value, at, everything)
        case Zero(value, True):
            return _common([_at_least(value, at, everything), _at_least(-value, at, everything)])
        case Every(parts):
            return _common([_rows(part, at, queries, keys) for part in parts])
        case Some(parts):
            return _hull([_rows(part, at, queries, keys) for part in parts], keys)
    return everything


def _common(rows: Sequence[_Rows]) -> _Rows:
    return _Rows(torch.stack([each.first for each in rows]).amax(0), torch.stack([each.last for each in rows]).amin(0))


def _hull(rows: Sequence[_Rows], keys: int) -> _Rows:
    firsts, lasts = [], []
    for each in rows:
        is_empty = each.first >= each.last
        firsts.append(each.first.masked_fill(is_empty, keys))
        lasts.append(each.last.masked_fill(is_empty, 0))
    return _Rows(torch.stack(firsts).amin(0), torch.stack(lasts).amax(0))


def _at_least(value: Polynomial, at: Positions, everything: _Rows) -> _Rows:
    """``value >= 0`` where that is monotone in the key's position, which occurs once, by itself or divided."""
    own = [each for each in value.variables if not each.axes.isdisjoint(at.key_axes)]
    parts = value.split(own[0]) if len(own) == 1 else None
    factor = None if parts is None else parts[0].constant
    rest = None if parts is None else _at_rows(parts[1], at, len(everything.first))
    if rest is None or factor is None or int(factor) != factor:
        return everything
    factor = int(factor)
    wanted = torch.div(rest, abs(factor), rounding_mode="floor")
    edge = _least_key(own[0], -wanted if factor > 0 else wanted + 1, at)
    if edge is None:
        return everything
    return _Rows(edge, everything.last) if factor > 0 else _Rows(everything.first, edge)


def _least_key(own: Variable, wanted: torch.Tensor, at: Positions) -> torch.Tensor | None:
    """The least key position at which a variable that grows with it reaches what is wanted."""
    if (own.source,) == at.key_axes:
        return wanted
    if not isinstance(own.source, tuple):
        return None
    inner, divisor = own.source
    shift = (inner - at.key).constant
    return None if shift is None or int(shift) != shift else wanted * divisor - int(shift)


def _at_rows(value: Polynomial, at: Positions, queries: int) -> torch.Tensor | None:
    """A polynomial in the query's position, at every query; None where anything else is in it."""
    total = torch.zeros(queries, dtype=torch.int64)
    for monomial, factor in value.terms.items():
        term = torch.full((queries,), int(factor))
        if int(factor) != factor or len(monomial) > 1:
            return None
        for each in monomial:
            found = _variable_at_rows(each, at, queries)
            if found is None:
                return None
            term = term * found
        total = total + term
    return total


def _variable_at_rows(each: Variable, at: Positions, queries: int) -> torch.Tensor | None:
    if isinstance(each.source, tuple):
        inner, divisor = each.source
        numerator = _at_rows(inner, at, queries)
        return None if numerator is None else torch.div(numerator, divisor, rounding_mode="floor")
    return torch.arange(queries) if (each.source,) == at.query_axes else None
