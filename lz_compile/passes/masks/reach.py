"""Which keys queries see at most, where a mask of fixed size is no band: prefixes, blocks, and what only values tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lz_compile.lowering.bands import Reach
from lz_compile.passes.formula.polynomial import Polynomial, Variable
from lz_compile.passes.formula.predicates import AtLeast, Constant, Every, Predicate, Some, Zero
from lz_compile.passes.masks.bands import Positions

#: Queries that share a span.
TILE = 64


@dataclass(frozen=True)
class _Rows:
    """The keys that each query sees at most: from ``first`` to before ``last``."""

    first: torch.Tensor
    last: torch.Tensor


def of_predicate(predicate: Predicate, at: Positions) -> Reach | None:
    """The reach of a condition on positions, None where it excludes nothing or sizes are symbolic."""
    queries, keys = at.queries.constant, at.keys.constant
    if queries is None or keys is None or len(at.query_axes) > 1 or len(at.key_axes) > 1:
        return None
    rows = _rows(predicate, at, int(queries), int(keys))
    return _reach(rows, int(queries), int(keys))


def of_values(kept: torch.Tensor, query_dim: int | None, key_dim: int) -> Reach | None:
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
