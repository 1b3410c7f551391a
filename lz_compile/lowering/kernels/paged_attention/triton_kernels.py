"""Attention over blocks in Triton: a kernel for a few queries and a part of their keys, and one that joins parts.

A tile has the query heads that share a key head, of as many queries of one request as fit. Tables are looked at on the
device. Whatever they hold, nothing is read that is not there: a query is NaN that needs a block, or a length, that cannot be.

What no query of a tile sees is not read. A value that is no finite number, and that some of a request's newest queries see,
may make those of the others NaN, as zero times it is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lz_compile.lowering.triton_launch import decoded

#: In the place of a sum of weights: of a row that sees none of these keys.
UNSEEN = tl.constexpr(-1.0)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _request_of(tile, starts, requests, STEPS: tl.constexpr, QUERIES: tl.constexpr):
    """The request of a tile: those of request ``r`` begin with ``starts[r] // QUERIES + r``; padding is one request more.

    It is no loop: behind one, Triton 3.7 does not know any more that rows of a cache are contiguous.
    """
    low = tl.full((), 0, tl.int32)
    high = low + requests
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        is_before = tl.load(starts + middle) // QUERIES + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    return low


@triton.jit
def _place_of(
    tile, starts, tokens, requests, IS_RAGGED: tl.constexpr, STEPS: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    """The request of a tile, the tile's first query, and where those of the request end."""
    request = tl.full((), 0, tl.int32) + tile
    begin = request.to(tl.int64)
    end = begin + 1
    if IS_RAGGED:
        request = _request_of(tile, starts, requests, STEPS, QUERIES)
        first = tl.load(starts + request)
        begin = first.to(tl.int64) + (tile - first // QUERIES - request) * QUERIES
        end = tl.load(starts + request + 1, mask=request < requests, other=tokens).to(tl.int64)
    return request.to(tl.int64), begin, end


@triton.jit
def _rows_of(
    lengths, starts, tokens, requests, most_keys, window, HAS_WINDOW: tl.constexpr, IS_RAGGED: tl.constexpr,
    STEPS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The request of this tile, and whether its length cannot be; of rows the query, whether it is one, the keys it sees."""
    request, begin, finish = _place_of(tl.program_id(0), starts, tokens, requests, IS_RAGGED, STEPS, QUERIES)
    length = tl.load(lengths + request, mask=request < requests, other=0).to(tl.int64)
    is_wrong = (length < 0) | (length > most_keys) | (finish > tokens)
    place = tl.arange(0, ROWS) // HEADS
    token = begin + place
    is_row = (place < QUERIES) & (token >= 0) & (token < tl.minimum(finish, tokens))
    end = tl.where(is_row & (is_wrong == 0), length - (finish - 1 - token), 0)
    end = tl.maximum(end, 0).to(tl.int32)
    low = tl.maximum(end - window, 0) if HAS_WINDOW else tl.zeros_like(end)
    return request, is_wrong, token, is_row, low, end


@triton.jit
def _part_of(low, end, KEYS: tl.constexpr):
    """Of the keys that a tile sees those of this program."""
    high = tl.max(end, 0)
    least = tl.min(tl.where(end > 0, low, high), 0)
    span = tl.cdiv(tl.cdiv(high - least, tl.num_programs(2)), KEYS) * KEYS
    begin = least + tl.program_id(2) * span
    return begin, tl.minimum(begin + span, high)


@triton.jit
def _scale_of(place, HAS_SCALE: tl.constexpr):
    return tl.load(place).to(tl.float32) if HAS_SCALE else tl.full((), 1.0, tl.float32)


@triton.jit
def _weighed(scores, most, total):
    """Weights but for a factor, the greatest score, their sum, and what a sum and values before these are multiplied by."""
    greatest = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(greatest == NOTHING, 0.0, greatest)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(most - base)
    return weights, greatest, total * kept + tl.sum(weights, 1), kept


@triton.jit
def _with_sinks(greatest, total, sinks, head, is_row, HAS_SINKS: tl.constexpr):
    """A sum of weights with that of a sink, and what values without it are multiplied by."""
    factor = tl.zeros_like(total) + 1.0
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        base = tl.maximum(greatest, sink)
        factor = tl.exp(greatest - base)
        total = total * factor + tl.exp(sink - base)
    return total, factor


@triton.jit
def _slots_of(key, last, table, column, blocks, SLOTS: tl.constexpr):
    """Block and slot of keys, and whether there is such a block."""
    block = tl.load(table + (key // SLOTS).to(tl.int64) * column, mask=key < last, other=-1).to(tl.int64)
    return block, (key % SLOTS).to(tl.int64), (block >= 0) & (block < blocks)


@triton.jit
def _scored(q, k, scale, cap, sees, is_there, HAS_CAP: tl.constexpr):
    """Scores of keys, minus infinity of those that a row does not see; one that is nowhere is no number."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / cap)) + 1.0))
    return tl.where(sees, tl.where(is_there[None, :], scores, float("nan")), NOTHING)


@triton.jit(do_not_specialize=["tokens", "requests", "blocks", "columns"])
def attend(
    query, keys, values, table, lengths, starts, sinks, key_scale, value_scale, out, greatest, totals,
    tokens, requests, blocks, columns, scale, cap, window,
    query_token, query_head, query_dim, key_block, key_slot, key_head, key_dim,
    value_block, value_slot, value_head, value_dim, table_row, table_column, key_scale_head, value_scale_head,
    IS_RAGGED: tl.constexpr, STEPS: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_KEY_SCALE: tl.constexpr, HAS_VALUE_SCALE: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr, SLOTS: tl.constexpr, ALL_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr,
):  # fmt: skip
    """Some rows, each a query and a head of it, over a part of their keys."""
    PIECES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    of_key, piece = (tl.program_id(1) // PIECES).to(tl.int64), tl.program_id(1) % PIECES
    row, lane = tl.arange(0, ROWS), tl.arange(0, KEYS)
    d, e = tl.arange(0, DIMS).to(tl.int64), tl.arange(0, VALUE_DIMS).to(tl.int64)
    request, is_wrong, token, is_row, low, end = _rows_of(
        lengths, starts, tokens, requests, columns * SLOTS, window, HAS_WINDOW, IS_RAGGED, STEPS, QUERIES, ROWS, HEADS
    )
    member = piece * HEADS + row % HEADS
    is_row = is_row & (member < GROUP)
    first, last = _part_of(low, end, KEYS)

    head = of_key * GROUP + member
    place = (token * query_token + head * query_head)[:, None] + (d * query_dim)[None, :]
    q = tl.load(query + place, mask=is_row[:, None] & (d < DIM)[None, :], other=0.0).to(DTYPE)
    scale *= _scale_of(key_scale + of_key * key_scale_head, HAS_KEY_SCALE)
    keys += of_key * key_head + (d * key_dim)[:, None]
    values += of_key * value_head + (e * value_dim)[None, :]
    most, total = tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS, VALUE_DIMS), tl.float32)
    for start in range(first, last, KEYS):
        key = start + lane
        block, slot, is_there = _slots_of(key, last, table + request * table_row, table_column, blocks, SLOTS)
        at_key, at_value = block * key_block + slot * key_slot, block * value_block + slot * value_slot
        k = tl.load(keys + at_key[None, :], mask=is_there[None, :] & (d < DIM)[:, None], other=0)
        v = tl.load(values + at_value[:, None], mask=is_there[:, None] & (e < VALUE_DIM)[None, :], other=0)
        sees = (key[None, :] >= low[:, None]) & (key[None, :] < tl.minimum(end, last)[:, None])
        scores = _scored(q, decoded(k, FORMAT, DTYPE), scale, cap, sees, is_there, HAS_CAP)
        weights, most, total, kept = _weighed(scores, most, total)
        found = tl.dot(weights.to(DTYPE), decoded(v, FORMAT, DTYPE), found * kept[:, None], input_precision="ieee")

    found *= _scale_of(value_scale + of_key * value_scale_head, HAS_VALUE_SCALE)
    total = tl.where(is_wrong, float("nan"), total)
    is_seen = (tl.minimum(end, last) > tl.maximum(low, first)) | is_wrong
    place = token * ALL_HEADS + head
    if IS_SPLIT:
        place = place * tl.num_programs(2) + tl.program_id(2)
        tl.store(greatest + place, most, mask=is_row)
        tl.store(totals + place, tl.where(is_seen, total, UNSEEN), mask=is_row)
        is_row = is_row & is_seen
    else:
        total, factor = _with_sinks(most, total, sinks, head, is_row, HAS_SINKS)
        found = tl.where(is_seen[:, None], found * (factor / total)[:, None], 0.0)
    place = place[:, None] * VALUE_DIM + e[None, :]
    tl.store(out + place, found.to(out.dtype.element_ty), mask=is_row[:, None] & (e < VALUE_DIM)[None, :])


@triton.jit
def join(
    found, greatest, totals, sinks, out, parts,
    HAS_SINKS: tl.constexpr, ALL_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, PARTS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
):  # fmt: skip
    """A head of a query from its parts."""
    part, e = tl.arange(0, PARTS), tl.arange(0, VALUE_DIMS)
    row = tl.program_id(0).to(tl.int64) * ALL_HEADS + tl.program_id(1)
    place = row * parts + part
    total = tl.load(totals + place, mask=part < parts, other=UNSEEN)
    is_seen = total != UNSEEN
    most = tl.load(greatest + place, mask=is_seen, other=NOTHING)
    base = tl.max(most, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32)
        base = tl.maximum(base, sink)
    share = tl.where(is_seen, tl.exp(most - base), 0.0)
    weight = tl.sum(share * tl.where(is_seen, total, 0.0), 0)
    if HAS_SINKS:
        weight += tl.exp(sink - base)
    mask = is_seen[:, None] & (e < VALUE_DIM)[None, :]
    values = tl.load(found + place[:, None] * VALUE_DIM + e[None, :], mask=mask, other=0.0)
    result = tl.sum(share[:, None] * values, 0) / weight
    result = tl.where(tl.max(is_seen.to(tl.int32), 0) > 0, result, 0.0)
    tl.store(out + row * VALUE_DIM + e, result.to(out.dtype.element_ty), mask=e < VALUE_DIM)
