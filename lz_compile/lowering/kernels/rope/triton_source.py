"""Rotary position embedding in Triton: of one tensor, or of query and key in one launch; the backward turns back.

Rows go head by head through a position before the next one, so that heads find their position's tables in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lz_compile.errors import GradientUnsupportedError
from lz_compile.lowering.encoded_attributes import decode
from lz_compile.lowering.opaque import guarded
from lz_compile.lowering.ops.rope import Operands, RopeAttrs, reference
from lz_compile.lowering.triton_launch import WIDE, cdiv, next_power_of_2, on

#: Features of a tile.
TILE = 2048


@triton.jit
def _entries(given, stride, is_row, ROTARY: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr):
    """A number for each pair."""
    pair = tl.arange(0, PAIRS)[None, :]
    return tl.load(given + pair * stride, mask=is_row & (pair < ROTARY // 2), other=0.0).to(WIDE)


@triton.jit
def _pairs(
    given, stride, is_row,
    ROTARY: tl.constexpr, IS_INTERLEAVED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The first and the second of every pair; neighbours are loaded together and then told apart."""
    if IS_INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(given + column * stride, mask=is_row & (column < ROTARY), other=0.0).to(WIDE)
        return tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))
    else:
        one = _entries(given, stride, is_row, ROTARY, WIDE, PAIRS)
        return one, _entries(given + ROTARY // 2 * stride, stride, is_row, ROTARY, WIDE, PAIRS)


@triton.jit
def _turned(
    given, result, cos, sin, first_row, rows, heads, length, dim, start,
    given_b, given_h, given_s, given_d, result_b, result_h, result_s, result_d, table_b, table_s, table_w,
    ROTARY: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_HALF_TABLES: tl.constexpr, IS_BACK: tl.constexpr,
    IS_PARTIAL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (first_row + tl.arange(0, ROWS))[:, None]
    is_row = row < rows
    head = (row % heads).to(tl.int64)
    position = ((row // heads) % length).to(tl.int64)
    batch = (row // heads // length).to(tl.int64)
    given += batch * given_b + head * given_h + position * given_s
    result += batch * result_b + head * result_h + position * result_s
    table = batch * table_b + position * table_s
    a, b = _pairs(given + start * given_d, given_d, is_row, ROTARY, IS_INTERLEAVED, WIDE, ROWS, PAIRS)
    if HAS_HALF_TABLES:
        cos_a = _entries(cos + table, table_w, is_row, ROTARY, WIDE, PAIRS)
        sin_a = _entries(sin + table, table_w, is_row, ROTARY, WIDE, PAIRS)
        cos_b, sin_b = cos_a, sin_a
    else:
        cos_a, cos_b = _pairs(cos + table, table_w, is_row, ROTARY, IS_INTERLEAVED, WIDE, ROWS, PAIRS)
        sin_a, sin_b = _pairs(sin + table, table_w, is_row, ROTARY, IS_INTERLEAVED, WIDE, ROWS, PAIRS)
    if IS_BACK:
        sin_a, sin_b = -sin_b, -sin_a
    one = a * cos_a - b * sin_a
    other = b * cos_b + a * sin_b
    DTYPE: tl.constexpr = result.dtype.element_ty
    turned = result + start * result_d
    if IS_INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(one, other), (ROWS, 2 * PAIRS))
        tl.store(turned + column * result_d, both.to(DTYPE), mask=is_row & (column < ROTARY))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        keep = is_row & (pair < ROTARY // 2)
        tl.store(turned + pair * result_d, one.to(DTYPE), mask=keep)
        tl.store(turned + (pair + ROTARY // 2) * result_d, other.to(DTYPE), mask=keep)
    if IS_PARTIAL:
        column = tl.arange(0, BLOCK)[None, :]
        kept = is_row & (column < dim) & ((column < start) | (column >= start + ROTARY))
        value = tl.load(given + column * given_d, mask=kept, other=0.0)
        tl.store(result + column * result_d, value.to(DTYPE), mask=kept)


@triton.jit
def _turn(
    query, query_result, key, key_result, cos, sin, query_rows, key_rows, query_heads, key_heads, length, dim, start,
    query_b, query_h, query_s, query_d, query_result_b, query_result_h, query_result_s, query_result_d,
    key_b, key_h, key_s, key_d, key_result_b, key_result_h, key_result_s, key_result_d, table_b, table_s, table_w,
    ROTARY: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_HALF_TABLES: tl.constexpr, IS_BACK: tl.constexpr,
    IS_PARTIAL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs turn rows of ``query``, the others those of ``key``."""
    tiles = tl.cdiv(query_rows, ROWS)
    program = tl.program_id(0)
    if program < tiles:
        _turned(
            query, query_result, cos, sin, program * ROWS, query_rows, query_heads, length, dim, start,
            query_b, query_h, query_s, query_d, query_result_b, query_result_h, query_result_s, query_result_d,
            table_b, table_s, table_w,
            ROTARY, IS_INTERLEAVED, HAS_HALF_TABLES, IS_BACK, IS_PARTIAL, WIDE, ROWS, PAIRS, BLOCK,
        )  # fmt: skip
    else:
        _turned(
            key, key_result, cos, sin, (program - tiles) * ROWS, key_rows, key_heads, length, dim, start,
            key_b, key_h, key_s, key_d, key_result_b, key_result_h, key_result_s, key_result_d,
            table_b, table_s, table_w,
            ROTARY, IS_INTERLEAVED, HAS_HALF_TABLES, IS_BACK, IS_PARTIAL, WIDE, ROWS, PAIRS, BLOCK,
        )  # fmt: skip


def turn(
    tensors: tuple[torch.Tensor, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
    attrs: RopeAttrs,
    results: tuple[torch.Tensor, ...],
    *,
    is_back: bool = False,
) -> None:
    """Write into ``results`` what turning one tensor or two gives; ``is_back``: the gradients, from those of the results.

    Shapes:
        tensors and results ``[B, H, S, D]`` with any strides (H may differ); cos and sin as the op has them.
    """
    first, last = tensors[0], tensors[-1]
    length, dim = first.shape[2:]
    counts = [tensor.shape[0] * tensor.shape[1] * tensor.shape[2] if dim else 0 for tensor in tensors]
    if not sum(counts):
        return
    wide = torch.promote_types(Operands(first, cos, sin).wide(attrs), last.dtype)
    cos, sin = _alike(cos, sin)
    block = next_power_of_2(dim)
    rows = max(1, TILE // block)
    heads = [tensor.shape[1] for tensor in tensors]
    counts, heads = (counts, heads) if len(tensors) == 2 else ([*counts, 0], [*heads, 1])
    table = [0 if size == 1 else stride for size, stride in zip(cos.shape, cos.stride(), strict=True)]
    tiles = sum(cdiv(count, rows) for count in counts)
    with on(first.device):
        _turn[tiles,](
            first, results[0], last, results[-1], cos, sin, *counts, *heads, length, dim, attrs.rotary_start,
            *first.stride(), *results[0].stride(), *last.stride(), *results[-1].stride(), table[0], table[2], table[3],
            ROTARY=attrs.rotary_dim, IS_INTERLEAVED=attrs.is_interleaved, HAS_HALF_TABLES=attrs.has_half_tables,
            IS_BACK=is_back, IS_PARTIAL=attrs.rotary_dim != dim, WIDE=WIDE[wide], ROWS=rows,
            PAIRS=next_power_of_2(max(attrs.rotary_dim // 2, 1)), BLOCK=block,
        )  # fmt: skip


def _alike(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tables with the same strides."""
    if cos.shape == sin.shape and cos.stride() == sin.stride():
        return cos, sin
    shape = torch.broadcast_shapes(cos.shape, sin.shape)
    return cos.expand(shape).contiguous(), sin.expand(shape).contiguous()


# ---- query and key ---------------------------------------------------------------------------------------------------

PAIR = "lz.triton_rope_pair"


def _pair(query: torch.Tensor, key: torch.Tensor, *tables_and_attrs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin, attrs = tables_and_attrs
    form: RopeAttrs = decode(RopeAttrs, attrs)
    results = _like(query, key, form.out_dtype)
    turn((query, key), cos, sin, form, results)
    return results


def _pair_fallback(query: torch.Tensor, key: torch.Tensor, *tables_and_attrs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin, attrs = tables_and_attrs
    form: RopeAttrs = decode(RopeAttrs, attrs)
    results = _like(query, key, form.out_dtype)
    for result, each in zip(results, (query, key), strict=True):
        result.copy_(reference(Operands(each, cos, sin), form))
    return results


def _like(query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query, dtype=dtype), torch.empty_like(key, dtype=dtype)


_run = guarded(PAIR, _pair, _pair_fallback)


@torch.library.custom_op("layerzero::triton_rope_pair", mutates_args=())
def rope_pair(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attrs: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key, both turned by the same tables, in their own memory order; ``attrs`` is the op's, as JSON.

    Shapes:
        query ``[B, Hq, S, D]``, key ``[B, Hk, S, D]``, cos and sin ``[B | 1, 1, S | 1, W]``; the results as query and key.
    """
    results: tuple[torch.Tensor, torch.Tensor] = _run(query, key, cos, sin, attrs)
    return results


@torch.library.custom_op("layerzero::triton_rope_pair_backward", mutates_args=())
def _rope_pair_backward(
    of_query: torch.Tensor, of_key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attrs: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    results = _like(of_query, of_key, dtype)
    turn((of_query, of_key), cos, sin, decode(RopeAttrs, attrs), results, is_back=True)
    return results


@rope_pair.register_fake
def _(query: torch.Tensor, key: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(query, key, decode(RopeAttrs, others[-1]).out_dtype)


@_rope_pair_backward.register_fake
def _(of_query: torch.Tensor, of_key: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(of_query, of_key, others[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, _, cos, sin, ctx.attrs = inputs
    if cos.requires_grad or sin.requires_grad:
        raise GradientUnsupportedError("layerzero::triton_rope_pair", 2 if cos.requires_grad else 3)
    ctx.dtype = query.dtype
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, of_query: torch.Tensor, of_key: torch.Tensor) -> tuple[Any, ...]:
    return *_rope_pair_backward(of_query, of_key, *ctx.saved_tensors, ctx.attrs, ctx.dtype), None, None, None


rope_pair.register_autograd(_gradients, setup_context=_keep)
