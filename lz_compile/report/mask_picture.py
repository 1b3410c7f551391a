"""What an attention's mask keeps, as a small picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from lz_compile.ground import events

#: Rows and columns of a picture at most.
SIDE = 32
KEPT, PARTLY, ASKED, ASKED_OF_KEYS, DROPPED = "#+?|."


def picture(attributes: Any, sizes: Mapping[str, int]) -> list[str]:
    """Queries from above to below, keys from left to right, as far as positions alone decide.

    ``#`` is kept, ``.`` is dropped, ``+`` is kept in part, and of ``?`` values decide that only a call has (documents, a
    mask that is a tensor like any other); of ``|`` such values as well, the same for every query (key padding).

    Args:
        attributes: of an op; those without bands have no picture.
        sizes: by name; symbolic ones as they were traced.

    Returns:
        lines of equal length, none where every query sees every key.
    """
    queries, keys = sizes.get("seq_len_q", 0), sizes.get("seq_len_k", 0)
    asks = any(getattr(attributes, name, False) for name in ("has_mask", "has_documents"))
    asks = asks or (getattr(attributes, "has_bias", False) and getattr(attributes, "bias_can_mask", False))
    is_limited = any(getattr(attributes, name, None) is not None for name in ("limits", "reach"))
    if not hasattr(attributes, "span") or not (asks or is_limited) or min(queries, keys) < 1:
        return []
    try:
        return _rows(attributes, queries, keys, asks=asks)
    except Exception as error:  # noqa: BLE001 a mask that cannot be drawn must not cost a match
        events.record("REPORT_INCOMPLETE", "drawing a mask", error)
        return []


def _rows(attributes: Any, queries: int, keys: int, *, asks: bool) -> list[str]:
    return ["".join(_cells(attributes, (start, stop), queries, keys, asks=asks)) for start, stop in _parts(queries)]


def _cells(attributes: Any, rows: tuple[int, int], queries: int, keys: int, *, asks: bool) -> Iterator[str]:
    """Of the queries in ``rows``: what all see is kept, what some see partly, as far as the first and the last one tell."""
    start, stop = rows
    some = attributes.span(start, stop, queries, keys)
    ends = (attributes.span(start, start + 1, queries, keys), attributes.span(stop - 1, stop, queries, keys))
    every = max(low for low, _ in ends), min(high for _, high in ends)
    for first, last in _parts(keys):
        if last <= some[0] or first >= some[1]:
            yield DROPPED
        elif asks:
            yield ASKED_OF_KEYS if getattr(attributes, "masks_keys", False) else ASKED
        else:
            yield KEPT if every[0] <= first and last <= every[1] else PARTLY


def _parts(count: int) -> Iterator[tuple[int, int]]:
    number = min(count, SIDE)
    edges = [count * n // number for n in range(number + 1)]
    yield from pairwise(edges)
