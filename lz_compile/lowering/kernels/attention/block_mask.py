"""Which tiles of scores an attention needs: all of a tile, part of it, or nothing; FlexAttention's block mask.

Everything is arithmetic on small tensors, of one element per tile, so that lengths may be symbolic and documents and masks
known at run time only. A tile that is needed in full lies within both lengths. A part may turn out to be nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lz_compile.ground.sizes import is_one
from lz_compile.lowering.arange import arange
from lz_compile.lowering.bands import Band


@dataclass(frozen=True)
class Blocks:
    """For every tile of rows, the tiles of columns that are computed.

    Shapes:
        ``count`` and ``full_count``: ``[B or 1, H or 1, R]``; ``indices`` and ``full_indices``:
        ``[B or 1, H or 1, R, C]``, of which the first ``count`` count.
    """

    count: torch.Tensor
    indices: torch.Tensor
    full_count: torch.Tensor
    full_indices: torch.Tensor


@dataclass(frozen=True)
class Grid:
    """Scores cut into square tiles. Lengths are integers, or proxies where they are symbolic."""

    like: Any
    rows: Any
    columns: Any
    tile: int

    def transposed(self) -> Grid:
        """Rows for columns."""
        return Grid(self.like, self.columns, self.rows, self.tile)

    def row_starts(self) -> torch.Tensor:
        """The first row of every tile, ``[R]``."""
        return arange(self.like, _tiles(self.rows, self.tile)) * self.tile

    def column_starts(self) -> torch.Tensor:
        """The first column of every tile, ``[C]``."""
        return self.transposed().row_starts()


def _tiles(length: Any, tile: int) -> Any:
    return (length + tile - 1) // tile


# ---- bands alone, in closed form -------------------------------------------------------------------------------------


def of_band(grid: Grid, band: Band) -> tuple[Blocks, Blocks]:
    """The tiles of columns for every tile of rows, and the other way round.

    Those of one tile are a range, and the full ones among them another.
    """
    lower, upper = _limits(grid, band)
    flipped = (None if limit is None else -limit for limit in (upper, lower))
    return _ranges(grid, lower, upper), _ranges(grid.transposed(), *flipped)


def _limits(grid: Grid, band: Band) -> tuple[Any, Any]:
    """The band's limits, counted from the first row and column."""
    offset = band.offset(grid.rows, grid.columns)
    lower, upper = (None if limit is None else limit + offset for limit in (band.lower, band.upper))
    return lower, upper


def _ranges(grid: Grid, lower: Any, upper: Any) -> Blocks:
    """Tiles where row ``i`` sees the columns from ``i + lower`` to ``i + upper``."""
    tile, start = grid.tile, grid.row_starts()
    zero = torch.zeros_like(start)
    stop = (start + tile).clamp(max=grid.rows)
    first = zero if lower is None else (start + lower).clamp(min=0)
    last = zero + grid.columns if upper is None else (stop + upper).clamp(max=grid.columns)
    is_empty = first >= last
    first, last = first // tile, (last + tile - 1) // tile
    full_first = zero if lower is None else ((start + lower + 2 * tile - 2) // tile).clamp(min=0)
    full_last = zero + grid.columns if upper is None else (start + upper + 1).clamp(max=grid.columns)
    full_last = torch.where(start + tile <= grid.rows, full_last // tile, 0)
    full_count = (full_last - full_first).clamp(min=0)
    count = torch.where(is_empty, 0, last - first - full_count)
    before = torch.where(full_count > 0, full_first - first, count)[:, None]
    number = grid.column_starts() // tile
    indices = first[:, None] + number + torch.where(number >= before, full_count[:, None], 0)
    most = _tiles(grid.columns, tile) - 1
    found = (count, indices.clamp(max=most), full_count, (full_first[:, None] + number).clamp(max=most))
    return Blocks(*(_integers(each[None, None]) for each in found))


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Of int64, in memory in the order of its dimensions, as FlexAttention's template takes for granted.

    Inductor lays out what it computes as it likes, and counts a dimension of one into no stride (2.11 to 2.13): indices were
    read beyond their end. Of one dimension there is one order.
    """
    sizes = tuple(tensor.shape)
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return torch.as_strided(tensor.flatten().to(torch.int32), sizes, strides)


# ---- anything --------------------------------------------------------------------------------------------------------


def of_parts(
    grid: Grid,
    band: Band | None,
    mask: torch.Tensor | None,
    query_documents: torch.Tensor | None,
    key_documents: torch.Tensor | None,
) -> tuple[Blocks, Blocks]:
    """The tiles of columns for every tile of rows, and the other way round, where all of the parts keep something.

    Args:
        mask: True keeps, broadcastable to ``[B, H, Sq, Sk]``.
        query_documents: ids, ``[B or 1, Sq]``; documents of a tile count as everything from the least id to the largest.
        key_documents: likewise, ``[B or 1, Sk]``.
    """
    rows, columns = grid.row_starts()[:, None], grid.column_starts()
    full = (rows + grid.tile <= grid.rows) & (columns + grid.tile <= grid.columns)
    some = torch.ones_like(full)
    parts = []
    if band is not None:
        parts.append(_in_band(grid, band))
    if query_documents is not None and key_documents is not None:
        parts.append(_in_documents(grid, query_documents, key_documents))
    if mask is not None:
        parts.append(_in_mask(grid, mask))
    for of_some, of_full in parts:
        some, full = some & of_some, full & of_full
    full = full & some  # and of its shape
    part = some & ~full
    by_row = Blocks(*_ordered(part), *_ordered(full))
    return by_row, Blocks(*_ordered(part.transpose(-2, -1)), *_ordered(full.transpose(-2, -1)))


def _in_band(grid: Grid, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a band keeps something, and where everything, ``[R, C]``."""
    lower, upper = _limits(grid, band)
    distance = grid.column_starts() - grid.row_starts()[:, None]
    least, most = distance - (grid.tile - 1), distance + (grid.tile - 1)
    some = full = torch.ones_like(distance, dtype=torch.bool)
    if lower is not None:
        some, full = some & (most >= lower), full & (least >= lower)
    if upper is not None:
        some, full = some & (least <= upper), full & (most <= upper)
    return some, full


def _in_documents(grid: Grid, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where queries and keys may share a document, and where they all do, ``[B or 1, 1, R, C]``."""
    (low, high), (key_low, key_high) = _extremes(grid, queries), _extremes(grid.transposed(), keys)
    low, high = low[:, None, :, None], high[:, None, :, None]
    key_low, key_high = key_low[:, None, None, :], key_high[:, None, None, :]
    return (low <= key_high) & (key_low <= high), (low == high) & (key_low == key_high) & (low == key_low)


def _extremes(grid: Grid, documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest id in every tile of rows, ``[B or 1, R]``."""
    padded = documents[:, _padded(grid)].unflatten(-1, (-1, grid.tile))
    return padded.amin(-1), padded.amax(-1)


def _padded(grid: Grid) -> torch.Tensor:
    """The rows of every tile, the last row in place of those that are not there."""
    within = arange(grid.like, grid.tile)
    positions = (grid.row_starts()[:, None] + within).clamp(max=grid.rows - 1)
    return positions.flatten()


def _in_mask(grid: Grid, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a mask keeps something, and where everything, ``[B or 1, H or 1, R or 1, C or 1]``."""
    count = grid.tile * grid.tile
    if is_one(mask.shape[2]):
        count //= grid.tile
        mask = mask.unsqueeze(3)
    else:
        mask = mask[:, :, _padded(grid)].unflatten(2, (-1, grid.tile))
    if is_one(mask.shape[4]):
        count //= grid.tile
        mask = mask.unsqueeze(5)
    else:
        mask = mask[..., _padded(grid.transposed())].unflatten(4, (-1, grid.tile))
    kept = mask.sum((3, 5))
    return kept > 0, kept == count


def _ordered(needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many there are in each row, and which: their indices before those of the others."""
    order = needed.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return _integers(needed.sum(-1)), _integers(order)
