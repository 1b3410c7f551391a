"""What a query sees of the keys, by position alone: bands, and the tiles that a mask reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Band:
    """Query ``i`` sees the keys from ``i + lower`` to ``i + upper`` (None: without limit), both included.

    Positions are counted from the first query and the first key, or with ``at_end`` from the last ones, as where the keys
    before are a cache. Every query sees a key.
    """

    lower: int | None = None
    upper: int | None = None
    at_end: bool = False

    def offset(self, queries: Any, keys: Any) -> Any:
        """The position of the first query among the keys."""
        return keys - queries if self.at_end else 0

    def span(self, start: int, stop: int, queries: int, keys: int) -> tuple[int, int]:
        """The half-open range of keys that the queries from ``start`` to before ``stop`` see."""
        shift = self.offset(queries, keys)
        first = 0 if self.lower is None else max(start + shift + self.lower, 0)
        last = keys if self.upper is None else min(stop + shift + self.upper, keys)
        return first, last

    def mask(self, query: torch.Tensor, queries: Any, keys: Any, start: Any = 0, first: Any = 0) -> torch.Tensor:
        """True keeps, ``[rows, columns]``, made beside ``query``.

        Args:
            query: a tensor on the device.
            queries: how many rows there are, from query ``start``.
            keys: how many columns there are, from key ``first``.
            start: position of the first row, with the offset that ``at_end`` asks for.
            first: position of the first column.
        """
        keep = query.new_ones((queries, keys), dtype=torch.bool)
        if self.upper is not None:
            keep = keep.tril(start - first + self.upper)
        return keep if self.lower is None else keep.triu(start - first + self.lower)


@dataclass(frozen=True)
class Reach:
    """What a mask keeps at most: queries ``tile * n`` to ``tile * (n + 1)`` only keys in ``spans[n]`` (half-open).

    It says nothing that the mask does not say; a kernel may skip what lies outside.
    """

    tile: int
    spans: tuple[tuple[int, int], ...]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The half-open range of keys that the queries from ``start`` to before ``stop`` see."""
        spans = [each for each in self.spans[start // self.tile : -(-stop // self.tile)] if each[0] < each[1]]
        return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else (0, 0)


CAUSAL = Band(upper=0)
