"""How attention over blocks in Triton is launched: the rows of a tile and the number of parts follow from shapes alone.

A tile's keys are divided into parts where there are too few tiles for a GPU. Queries that no tile has, for starts are wrong,
are NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from lz_compile.lowering.kernels.paged_attention.triton_kernels import attend, join
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs, fake
from lz_compile.lowering.triton_launch import as_read, cdiv, format_of, is_interpreted, next_power_of_2, on, processors

#: Rows of a tile: the least that a product takes; and where there are many, of numbers of 16 bits, for which registers do.
ROWS, MOST_ROWS = 16, 64
#: Bytes of the keys, and of the values, that are looked at at a time, by a tile of the least rows and by another.
TILE, TILE_OF_MANY = 32768, 8192
#: Programs that a multiprocessor is to have, keys that are worth a part, and the most parts.
PROGRAMS, LEAST_KEYS, MOST_PARTS = 4, 256, 64

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def run(x: Operands, attrs: PagedAttentionAttrs, *, rows: int = 0, keys: int = 0, parts: int = 0) -> torch.Tensor:
    """The op (see ``lowering/ops/paged_attention.py``).

    Args:
        rows: of a tile, a power of two from 16 on; 0 for what fits.
        keys: that are looked at at a time, likewise.
        parts: that a tile's keys are divided into.
    """
    out = fake(x, attrs)
    if not out.numel():
        return out
    constants = _constants(x, attrs, rows, keys)
    (tokens, heads), (requests, columns) = x.query.shape[:2], x.block_table.shape
    queries, heads_of_tile = constants["QUERIES"], constants["HEADS"]
    tiles = tokens // queries + requests + 1 if attrs.is_ragged else tokens
    grid = (tiles, x.key_cache.shape[2] * cdiv(constants["GROUP"], heads_of_tile))
    parts = parts or _parts(grid[0] * grid[1], columns * x.key_cache.shape[1], out.device)
    found, greatest, totals = out, out, out
    if parts > 1:
        found = out.new_empty((tokens, heads, parts, out.shape[2]), dtype=torch.float32)
        greatest, totals = out.new_empty((2, tokens, heads, parts), dtype=torch.float32)
    if attrs.is_ragged:
        (totals if parts > 1 else out).fill_(torch.nan)
    with on(out.device):
        attend[(*grid, parts)](
            *_operands(x), found, greatest, totals,
            tokens, requests, x.key_cache.shape[0], columns,
            x.query.shape[2] ** -0.5 if attrs.scale is None else float(attrs.scale), attrs.softcap or 1.0, attrs.window or 0,
            *x.query.stride(), *x.key_cache.stride(), *x.value_cache.stride(), *x.block_table.stride(),
            *[0 if each is None or each.shape[0] == 1 else each.stride(0) for each in (x.key_scale, x.value_scale)],
            **constants, IS_SPLIT=parts > 1, num_warps=4, num_stages=2 if constants["ROWS"] == ROWS else 1,
        )  # fmt: skip
        if parts > 1:
            join[tokens, heads](
                found, greatest, totals, x.query if x.sinks is None else x.sinks.contiguous(), out, parts,
                HAS_SINKS=attrs.has_sinks, ALL_HEADS=heads, VALUE_DIM=out.shape[2],
                PARTS=next_power_of_2(parts), VALUE_DIMS=constants["VALUE_DIMS"], num_warps=4,
            )  # fmt: skip
    return out


def _operands(x: Operands) -> list[torch.Tensor]:
    """What is read, by the kernel's names; another in the place of what is not given."""
    caches = [as_read(x.key_cache), as_read(x.value_cache)]
    lines = [x.lengths if each is None else each.contiguous() for each in (x.lengths, x.query_starts, x.sinks)]
    scales = [x.query if each is None else each for each in (x.key_scale, x.value_scale)]
    return [x.query, *caches, x.block_table, *lines, *scales]


def _constants(x: Operands, attrs: PagedAttentionAttrs, rows: int, keys: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    tokens, heads, dim = x.query.shape
    _, slots, kv_heads, value_dim = x.value_cache.shape
    group = heads // kv_heads
    wide = next_power_of_2(group)
    if not rows:
        is_many = attrs.is_ragged and tokens > ROWS * x.lengths.shape[0]
        most = MOST_ROWS if x.query.dtype.itemsize == 2 else ROWS
        rows = most if is_many else min(most, max(ROWS, wide))
    dims, value_dims = (max(16, next_power_of_2(each)) for each in (dim, value_dim))
    heads_of_tile, tile = min(wide, rows), TILE if rows == ROWS else TILE_OF_MANY
    return {
        "IS_RAGGED": attrs.is_ragged,
        "STEPS": 4 * cdiv(x.lengths.shape[0].bit_length(), 4),  # few numbers, each of which is compiled
        "HAS_WINDOW": attrs.window is not None,
        "HAS_CAP": attrs.softcap is not None,
        "HAS_SINKS": attrs.has_sinks,
        "HAS_KEY_SCALE": attrs.has_key_scale,
        "HAS_VALUE_SCALE": attrs.has_value_scale,
        "FORMAT": format_of(x.key_cache.dtype, x.key_cache.device),
        "DTYPE": tl.float32 if is_interpreted() else _DTYPES[x.query.dtype],
        "SLOTS": slots,
        "ALL_HEADS": heads,
        "GROUP": group,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "ROWS": rows,
        "HEADS": heads_of_tile,
        "QUERIES": rows // heads_of_tile if attrs.is_ragged else 1,
        "KEYS": keys or min(128, max(16, tile // (max(dims, value_dims) * x.query.dtype.itemsize))),
        "DIMS": dims,
        "VALUE_DIMS": value_dims,
    }


def _parts(programs: int, most_keys: int, device: torch.device) -> int:
    """So many that a GPU has enough to do."""
    wanted = cdiv(PROGRAMS * processors(device), programs)
    return max(1, min(wanted, cdiv(most_keys, LEAST_KEYS), MOST_PARTS))
