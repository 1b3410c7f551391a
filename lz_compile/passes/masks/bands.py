"""Bands of positions: comparisons of a query's position with a key's, as one band counted from the start or the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lz_compile.lowering.bands import Band
from lz_compile.passes.formula.axes import Axis
from lz_compile.passes.formula.polynomial import ZERO, Polynomial, lower, number
from lz_compile.passes.formula.predicates import AtLeast, Predicate, Zero


@dataclass(frozen=True)
class Positions:
    """Where a query and a key are, and how many there are, as polynomials in their axes and in sizes."""

    query: Polynomial
    key: Polynomial
    queries: Polynomial
    keys: Polynomial
    query_axes: tuple[Axis, ...]
    key_axes: tuple[Axis, ...]

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
    least = [lower(each) for each in needs]
    return all(each is not None and each >= 0 for each in least)
