"""Routed adapters in Triton: the two products of low rank over both adapters, and what is summed and flagged by rollout.

The factors of both adapters are read where they lie, and ``delta`` and gates are multiplied in as projections are read, so
that nothing is joined or scaled in memory. All sums are in float32, and the same from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lz_compile.lowering.ops.routing import EPS
from lz_compile.lowering.triton_launch import cdiv, dense, is_interpreted, next_power_of_2, on, processors

#: Tokens of a tile, columns of a tile, and what is multiplied at a time.
TOKENS, COLUMNS, DEPTH = 64, 128, 32
#: Rollouts that are decided on at the same time.
DECIDERS = 64


@triton.jit
def _both(
    first, second, rank, columns, of_column, of_depth, keep,
    first_column, first_depth, second_column, second_depth,
):  # fmt: skip
    """A tile of two factors, the columns of one behind those of the other."""
    is_first = of_column < rank
    one = tl.load(first + of_column * first_column + of_depth * first_depth, mask=keep & is_first, other=0.0)
    other = tl.load(
        second + (of_column - rank) * second_column + of_depth * second_depth,
        mask=keep & (of_column >= rank) & (of_column < columns),
        other=0.0,
    )
    return tl.where(is_first, one, other)


@triton.jit
def _added(total, left, right, PRECISION: tl.constexpr, IS_WIDENED: tl.constexpr):
    """``total + left @ right``; the interpreter, which has no products in bfloat16, makes them in float32."""
    if IS_WIDENED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _project(
    rows, first, second, result, tokens, depth, rank, columns,
    first_column, first_depth, second_column, second_depth,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, IS_WIDENED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, DEPTH)
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        place = start + lane
        x = tl.load(
            rows + token[:, None] * depth + place[None, :],
            mask=(token < tokens)[:, None] & (place < depth)[None, :],
            other=0.0,
        )
        w = _both(
            first, second, rank, columns, column[None, :], place[:, None], (place < depth)[:, None],
            first_column, first_depth, second_column, second_depth,
        )  # fmt: skip
        total = _added(total, x, w, PRECISION, IS_WIDENED)
    tl.store(
        result + token[:, None] * columns + column[None, :],
        total.to(result.dtype.element_ty),
        mask=(token < tokens)[:, None] & (column < columns)[None, :],
    )


@triton.jit
def _expand(
    values, factors, place, keep, first, second, start, result, tokens, width, rank, columns, span,
    first_column, first_depth, second_column, second_depth,
    HAS_PLACE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_START: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, IS_WIDENED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, DEPTH)
    is_token = token < tokens
    row = tl.load(place + token, mask=is_token, other=0).to(tl.int64) if HAS_PLACE else token // span
    is_kept = tl.load(keep + token, mask=is_token, other=0) != 0 if HAS_KEEP else is_token
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for begin in range(0, columns, DEPTH):
        d = begin + lane
        there = is_token[:, None] & (d < columns)[None, :]
        value = tl.load(values + token[:, None] * columns + d[None, :], mask=there, other=0.0)
        by_delta = there & (d < rank)[None, :]
        factor = tl.load(factors + row[:, None] * rank + d[None, :], mask=by_delta, other=1.0)
        scaled = (value.to(tl.float32) * factor.to(tl.float32)).to(value.dtype)
        scaled = tl.where((d < rank)[None, :] & ~is_kept[:, None], 0.0, scaled).to(value.dtype)
        w = _both(
            first, second, rank, columns, d[:, None], column[None, :], (column < width)[None, :],
            first_depth, first_column, second_depth, second_column,
        )  # fmt: skip
        total = _added(total, scaled, w, PRECISION, IS_WIDENED)
    where = token[:, None] * width + column[None, :]
    inside = is_token[:, None] & (column < width)[None, :]
    if HAS_START:
        total += tl.load(start + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + where, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _sums(
    dk, a, place, keep, result, tokens, length, part, rank, dk_row, a_row,
    HAS_PLACE: tl.constexpr, HAS_KEEP: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a part of a rollout's tokens sends to delta; of tokens that say where they belong, those of it."""
    rollout, number, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, TOKENS)
    begin = number.to(tl.int64) * part
    end = tl.minimum(begin + part, length)
    before = tl.zeros((), tl.int64) if HAS_PLACE else rollout.to(tl.int64) * length
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(begin, end, TOKENS):
        step = start + lane
        token = before + step
        mine = step < end
        if HAS_PLACE:
            mine = mine & (tl.load(place + token, mask=mine, other=-1) == rollout)
        if HAS_KEEP:
            mine = mine & (tl.load(keep + token, mask=mine, other=0) != 0)
        there = mine[:, None] & (column < rank)[None, :]
        g = tl.load(dk + token[:, None] * dk_row + column[None, :], mask=there, other=0.0).to(tl.float32)
        x = tl.load(a + token[:, None] * a_row + column[None, :], mask=there, other=0.0).to(tl.float32)
        total += tl.sum(g * x, 0)
    where = (rollout.to(tl.int64) * parts + number) * rank + column
    tl.store(result + where, total, mask=column < rank)


@triton.jit
def _decide(g, v, passed, found, rollouts, rank, threshold, eps, COLUMNS: tl.constexpr):
    """Cosines of every so-manieth rollout, and the sum of those that are not flagged."""
    column = tl.arange(0, COLUMNS)
    inside = column < rank
    direction = tl.load(v + column, mask=inside, other=0.0).to(tl.float32)
    size = tl.maximum(tl.sqrt(tl.sum(direction * direction, 0)), eps)
    total = tl.zeros((COLUMNS,), tl.float32)
    step = tl.full((), 0, tl.int64) + rank
    for rollout in range(tl.program_id(0), rollouts, tl.num_programs(0)):
        row = tl.load(g + rollout * step + column, mask=inside, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(row * row, 0))
        norm = tl.where(norm < eps, eps, norm)  # a NaN stays one
        cosine = tl.sum(row * direction, 0) / (norm * size)
        tl.store(found + rollout, cosine.to(found.dtype.element_ty))
        is_number = (cosine <= threshold) | (cosine > threshold)
        row = tl.where(is_number, row, cosine)  # what cannot be compared is not let through unseen
        total += tl.where(cosine > threshold, 0.0, row)
    tl.store(passed + tl.program_id(0) * rank + column, total, mask=inside)


@triton.jit
def _cosines(a, v, result, tokens, rank, a_row, eps, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, COLUMNS)
    products, squares = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    size = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, rank, COLUMNS):
        column = start + lane
        direction = tl.load(v + column, mask=column < rank, other=0.0).to(tl.float32)
        there = (token < tokens)[:, None] & (column < rank)[None, :]
        x = tl.load(a + token[:, None] * a_row + column[None, :], mask=there, other=0.0).to(tl.float32)
        products += tl.sum(x * direction[None, :], 1)
        squares += tl.sum(x * x, 1)
        size += direction * direction
    norm = tl.sqrt(squares)
    norm = tl.where(norm < eps, eps, norm)  # a NaN stays one
    cosine = products / (norm * tl.maximum(tl.sqrt(tl.sum(size, 0)), eps))
    tl.store(result + token, cosine.to(result.dtype.element_ty), mask=token < tokens)


# ---- launches: shapes and meaning as in steps.py -------------------------------------------------------------------------


def project(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``rows [N, K] @ [first; second]^T``."""
    rows = rows.contiguous()
    tokens, depth = rows.shape
    rank = first.shape[0]
    columns = rank + second.shape[0]
    result = rows.new_empty(tokens, columns)
    block = min(COLUMNS, max(16, next_power_of_2(columns)))
    _launch(
        _project, (cdiv(tokens, TOKENS), cdiv(columns, block)), result,
        rows, first, second, result, tokens, depth, rank, columns, *first.stride(), *second.stride(),
        TOKENS=TOKENS, COLUMNS=block, DEPTH=DEPTH, PRECISION=_precision(rows), IS_WIDENED=is_interpreted(),
    )  # fmt: skip
    return result


def expand(
    columns: torch.Tensor,
    factors: torch.Tensor,
    place: torch.Tensor | None,
    keep: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    start: torch.Tensor | None,
) -> torch.Tensor:
    """``start + (columns * factors) @ [first; second]``."""
    columns, factors = columns.contiguous(), factors.contiguous()
    tokens, rank, width = columns.shape[0], *first.shape
    result = columns.new_empty(tokens, width)
    _launch(
        _expand, (cdiv(tokens, TOKENS), cdiv(width, COLUMNS)), result,
        columns, factors, _given(place, columns), _given(keep, columns), first, second,
        _given(start, columns), result, tokens, width, rank, columns.shape[1], max(tokens // factors.shape[0], 1),
        first.stride(1), first.stride(0), second.stride(1), second.stride(0),
        HAS_PLACE=place is not None, HAS_KEEP=keep is not None, HAS_START=start is not None,
        TOKENS=TOKENS, COLUMNS=COLUMNS, DEPTH=DEPTH, PRECISION=_precision(columns), IS_WIDENED=is_interpreted(),
    )  # fmt: skip
    return result


def sums(
    dk: torch.Tensor, a: torch.Tensor, place: torch.Tensor | None, keep: torch.Tensor | None, count: int, length: int
) -> torch.Tensor:
    """What the tokens of every rollout send to ``delta``, in float32."""
    dk, a = dense(dk), dense(a)
    tokens, rank = dk.shape
    length = tokens if place is not None else length
    block = min(COLUMNS, next_power_of_2(rank))
    blocks = cdiv(rank, block)
    wanted = cdiv(4 * processors(dk.device), max(count * blocks, 1))
    parts = max(1, min(wanted, cdiv(length, TOKENS)))
    part = cdiv(cdiv(length, parts), TOKENS) * TOKENS
    found = dk.new_empty(count, parts, rank, dtype=torch.float32)
    _launch(
        _sums, (count, parts, blocks), found,
        dk, a, _given(place, dk), _given(keep, dk), found, tokens, length, part, rank, dk.stride(0), a.stride(0),
        HAS_PLACE=place is not None, HAS_KEEP=keep is not None, TOKENS=TOKENS, COLUMNS=block,
    )  # fmt: skip
    return found.sum(1)


def decide(g: torch.Tensor, v: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the rollouts that are not flagged, and the cosines of all."""
    g = g.contiguous()
    rollouts, rank = g.shape
    programs = max(1, min(rollouts, DECIDERS))
    passed, found = g.new_empty(programs, rank), g.new_empty(rollouts)
    _launch(
        _decide, (programs,), passed,
        g, v.contiguous(), passed, found, rollouts, rank, threshold, EPS, COLUMNS=next_power_of_2(rank),
    )  # fmt: skip
    return passed.sum(0), found


def cosines(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """That of every row with ``v``."""
    a = dense(a)
    tokens, rank = a.shape
    result = a.new_empty(tokens, dtype=v.dtype)
    _launch(
        _cosines, (cdiv(tokens, TOKENS),), result,
        a, v.contiguous(), result, tokens, rank, a.stride(0), EPS,
        TOKENS=TOKENS, COLUMNS=min(COLUMNS, next_power_of_2(rank)),
    )  # fmt: skip
    return result


def _launch(kernel: Any, grid: tuple[int, ...], result: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    if 0 in grid:
        return
    with on(result.device):
        kernel[grid](*arguments, **constants)


def _given(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A tensor, or one in the place of what is not read."""
    return other if tensor is None else tensor.contiguous()


def _precision(tensor: torch.Tensor) -> str:
    """Of products in float32: as PyTorch's own."""
    is_exact = tensor.device.type != "cuda" or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if is_exact else "tf32"
