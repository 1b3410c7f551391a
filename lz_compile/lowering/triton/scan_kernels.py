"""The kernels of a scan step by step, for every structure a step may have.

A program holds some columns of one head's state, ``[K, BLOCK]``, and walks through time. The backward walks through time
twice for every span of steps: forwards from a kept state, noting the state before each step, and then backwards with the
gradient ``g`` of the state behind the step,

    w_r = right_r - erase_r^T S          the values written, S the state before the step
    of left_r = g w_r                    of right_r = left_r^T g             of erase_r = -S (left_r^T g)
    of decay = g * S                     of drive = g                        of query = S y, its gradient y
    of S = decay * g - sum_r erase_r (left_r^T g)^T + sum_q query_q y_q^T
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _column(given, place, k, stride, keep, WIDE: tl.constexpr):
    """One number for each row of the state, ``[K, 1]``."""
    return tl.load(given + place + k * stride, mask=keep, other=0.0).to(WIDE)


@triton.jit
def _part(given, place, k, v, stride_k, stride_v, rows, columns, HAS_K: tl.constexpr, HAS_V: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """What broadcasts over the state, as ``[K | 1, BLOCK | 1]``."""
    if HAS_K and HAS_V:
        found = tl.load(given + place + k * stride_k + v * stride_v, mask=(k < rows) & (v < columns), other=0.0)
    elif HAS_K:
        found = tl.load(given + place + k * stride_k, mask=k < rows, other=0.0)
    elif HAS_V:
        found = tl.load(given + place + v * stride_v, mask=v < columns, other=0.0)
    else:
        found = tl.load(given + place + tl.zeros((1, 1), tl.int64))
    return found.to(WIDE)


@triton.jit
def _store_part(found, target, place, k, v, rows, columns, HAS_K: tl.constexpr, HAS_V: tl.constexpr):
    """The sum of a gradient of the state's shape over what it does not have, stored without gaps."""
    if HAS_K and HAS_V:
        tl.store(target + place + k * columns + v, found, mask=(k < rows) & (v < columns))
    elif HAS_K:
        tl.store(target + place + k, tl.sum(found, 1)[:, None], mask=k < rows)
    elif HAS_V:
        tl.store(target + place + v, tl.sum(found, 0)[None, :], mask=v < columns)
    else:
        one = tl.zeros((1, 1), tl.int64)
        tl.store(target + place + one, tl.sum(tl.sum(found, 1)[:, None], 0)[None, :])


@triton.jit
def _advanced(
    S, decay, left, right, erase, drive, decay_place, left_place, right_place, erase_place, drive_place, k, v,
    decay_k, decay_v, left_r, left_k, right_r, right_v, erase_r, erase_k, drive_k, drive_v, rows, columns,
    HAS_DECAY: tl.constexpr, DECAY_K: tl.constexpr, DECAY_V: tl.constexpr, RANK: tl.constexpr, ERASES: tl.constexpr,
    HAS_DRIVE: tl.constexpr, DRIVE_K: tl.constexpr, DRIVE_V: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The state behind a step."""
    found = S
    if HAS_DECAY:
        found = S * _part(decay, decay_place, k, v, decay_k, decay_v, rows, columns, DECAY_K, DECAY_V, WIDE)
    for r in tl.static_range(RANK):
        written = tl.load(right + right_place + r * right_r + v * right_v, mask=v < columns, other=0.0).to(WIDE)
        if ERASES:
            eraser = _column(erase, erase_place + r * erase_r, k, erase_k, k < rows, WIDE)
            written -= tl.sum(eraser * S, 0)[None, :]
        found += _column(left, left_place + r * left_r, k, left_k, k < rows, WIDE) * written
    if HAS_DRIVE:
        more = _part(drive, drive_place, k, v, drive_k, drive_v, rows, columns, DRIVE_K, DRIVE_V, WIDE)
        found += tl.where((k < rows) & (v < columns), more, 0.0)
    return found


@triton.jit
def _read(S, query, reads, query_place, place, k, v, query_q, query_k, rows, columns, READS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Store what the queries of a step read."""
    for q in tl.static_range(READS):
        vector = _column(query, query_place + q * query_q, k, query_k, k < rows, WIDE)
        found = tl.sum(vector * S, 0)[None, :]
        tl.store(reads + place + q * columns + v, found.to(reads.dtype.element_ty), mask=v < columns)


@triton.jit
def forward(
    state, decay, left, right, erase, drive, query, reads, last, heads, length, rows, columns,
    state_b, state_h, state_k, state_v, decay_b, decay_h, decay_t, decay_k, decay_v,
    left_b, left_h, left_t, left_r, left_k, right_b, right_h, right_t, right_r, right_v,
    erase_b, erase_h, erase_t, erase_r, erase_k, drive_b, drive_h, drive_t, drive_k, drive_v,
    query_b, query_h, query_t, query_q, query_k,
    HAS_STATE: tl.constexpr, HAS_DECAY: tl.constexpr, DECAY_K: tl.constexpr, DECAY_V: tl.constexpr,
    RANK: tl.constexpr, ERASES: tl.constexpr, HAS_DRIVE: tl.constexpr, DRIVE_K: tl.constexpr, DRIVE_V: tl.constexpr,
    READS: tl.constexpr, READS_BEFORE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads ``[B, H, T, Q, V]`` and the last state ``[B, H, K, V]``, both without gaps."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    k = tl.arange(0, ROWS).to(tl.int64)[:, None]
    v = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    is_element = (k < rows) & (v < columns)
    S = tl.zeros((ROWS, BLOCK), WIDE)
    if HAS_STATE:
        first = state + b * state_b + h * state_h
        S = tl.load(first + k * state_k + v * state_v, mask=is_element, other=0.0).to(WIDE)
    for step in range(length):
        t = tl.cast(step, tl.int64)
        query_place = b * query_b + h * query_h + t * query_t
        place = (head * length + t) * READS * columns
        if READS_BEFORE:
            _read(S, query, reads, query_place, place, k, v, query_q, query_k, rows, columns, READS, WIDE)
        S = _advanced(
            S, decay, left, right, erase, drive, b * decay_b + h * decay_h + t * decay_t,
            b * left_b + h * left_h + t * left_t, b * right_b + h * right_h + t * right_t,
            b * erase_b + h * erase_h + t * erase_t, b * drive_b + h * drive_h + t * drive_t, k, v,
            decay_k, decay_v, left_r, left_k, right_r, right_v, erase_r, erase_k, drive_k, drive_v, rows, columns,
            HAS_DECAY, DECAY_K, DECAY_V, RANK, ERASES, HAS_DRIVE, DRIVE_K, DRIVE_V, WIDE,
        )  # fmt: skip
        if not READS_BEFORE:
            _read(S, query, reads, query_place, place, k, v, query_q, query_k, rows, columns, READS, WIDE)
    tl.store(last + (head * rows + k) * columns + v, S.to(last.dtype.element_ty), mask=is_element)


@triton.jit
def backward(
    of_reads, of_last, state, decay, left, right, erase, drive, query, states, kept,
    of_state, of_decay, of_left, of_right, of_erase, of_drive, of_query, heads, length, rows, columns,
    state_b, state_h, state_k, state_v, decay_b, decay_h, decay_t, decay_k, decay_v,
    left_b, left_h, left_t, left_r, left_k, right_b, right_h, right_t, right_r, right_v,
    erase_b, erase_h, erase_t, erase_r, erase_k, drive_b, drive_h, drive_t, drive_k, drive_v,
    query_b, query_h, query_t, query_q, query_k,
    HAS_STATE: tl.constexpr, HAS_DECAY: tl.constexpr, DECAY_K: tl.constexpr, DECAY_V: tl.constexpr,
    RANK: tl.constexpr, ERASES: tl.constexpr, HAS_DRIVE: tl.constexpr, DRIVE_K: tl.constexpr, DRIVE_V: tl.constexpr,
    READS: tl.constexpr, READS_BEFORE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Gradients without gaps, of every head and step; those that sum over columns have a summand for each program.

    ``kept`` holds the state before every span of ``SPAN`` steps, ``states`` those before the steps of one span.
    """
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    all_heads = tl.num_programs(0).to(tl.int64)
    spans = tl.cdiv(length, SPAN)
    b, h = head // heads, head % heads
    k = tl.arange(0, ROWS).to(tl.int64)[:, None]
    v = part * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[None, :]
    is_row, is_column = k < rows, v < columns
    is_element = is_row & is_column
    inside = k * columns + v
    kept += head * spans * rows * columns + inside
    states += head * SPAN * rows * columns + inside
    by_part = (part * all_heads + head) * length  # of what has a summand for each program
    S = tl.zeros((ROWS, BLOCK), WIDE)
    if HAS_STATE:
        first = state + b * state_b + h * state_h
        S = tl.load(first + k * state_k + v * state_v, mask=is_element, other=0.0).to(WIDE)
    for step in range(length):
        t = tl.cast(step, tl.int64)
        if step % SPAN == 0:
            tl.store(kept + t // SPAN * rows * columns, S, mask=is_element)
        S = _advanced(
            S, decay, left, right, erase, drive, b * decay_b + h * decay_h + t * decay_t,
            b * left_b + h * left_h + t * left_t, b * right_b + h * right_h + t * right_t,
            b * erase_b + h * erase_h + t * erase_t, b * drive_b + h * drive_h + t * drive_t, k, v,
            decay_k, decay_v, left_r, left_k, right_r, right_v, erase_r, erase_k, drive_k, drive_v, rows, columns,
            HAS_DECAY, DECAY_K, DECAY_V, RANK, ERASES, HAS_DRIVE, DRIVE_K, DRIVE_V, WIDE,
        )  # fmt: skip
    g = tl.load(of_last + head * rows * columns + inside, mask=is_element, other=0.0).to(WIDE)
    for each in range(spans):
        span = tl.cast(spans - 1 - each, tl.int64)
        steps = tl.minimum(length - (spans - 1 - each) * SPAN, SPAN)
        tl.debug_barrier()  # another thread may have stored what this one loads
        S = tl.load(kept + span * rows * columns, mask=is_element, other=0.0)
        for step in range(steps):
            t = span * SPAN + step
            tl.store(states + step * rows * columns, S, mask=is_element)
            S = _advanced(
                S, decay, left, right, erase, drive, b * decay_b + h * decay_h + t * decay_t,
                b * left_b + h * left_h + t * left_t, b * right_b + h * right_h + t * right_t,
                b * erase_b + h * erase_h + t * erase_t, b * drive_b + h * drive_h + t * drive_t, k, v,
                decay_k, decay_v, left_r, left_k, right_r, right_v, erase_r, erase_k, drive_k, drive_v, rows, columns,
                HAS_DECAY, DECAY_K, DECAY_V, RANK, ERASES, HAS_DRIVE, DRIVE_K, DRIVE_V, WIDE,
            )  # fmt: skip
        tl.debug_barrier()
        for back in range(steps):
            index = steps - 1 - back
            t = span * SPAN + index
            after = S
            S = tl.load(states + index * rows * columns, mask=is_element, other=0.0)
            query_place = b * query_b + h * query_h + t * query_t
            if not READS_BEFORE:
                for q in tl.static_range(READS):
                    y = tl.load(
                        of_reads + ((head * length + t) * READS + q) * columns + v, mask=is_column, other=0.0
                    ).to(WIDE)
                    g += _column(query, query_place + q * query_q, k, query_k, is_row, WIDE) * y
                    found = tl.sum(after * y, 1)[:, None]
                    tl.store(of_query + ((by_part + t) * READS + q) * rows + k, found, mask=is_row)
            before = g
            if HAS_DECAY:
                place = b * decay_b + h * decay_h + t * decay_t
                before = g * _part(decay, place, k, v, decay_k, decay_v, rows, columns, DECAY_K, DECAY_V, WIDE)
                place = (head if DECAY_V else part * all_heads + head) * length + t
                size = (rows if DECAY_K else 1) * (columns if DECAY_V else 1)
                _store_part(g * S, of_decay, place * size, k, v, rows, columns, DECAY_K, DECAY_V)
            for r in tl.static_range(RANK):
                vector = _column(left, b * left_b + h * left_h + t * left_t + r * left_r, k, left_k, is_row, WIDE)
                of_written = tl.sum(vector * g, 0)[None, :]
                place = b * right_b + h * right_h + t * right_t + r * right_r
                written = tl.load(right + place + v * right_v, mask=is_column, other=0.0).to(WIDE)
                place = ((by_part + t) * RANK + r) * rows + k
                if ERASES:
                    eraser = _column(
                        erase, b * erase_b + h * erase_h + t * erase_t + r * erase_r, k, erase_k, is_row, WIDE
                    )
                    written -= tl.sum(eraser * S, 0)[None, :]
                    before -= eraser * of_written
                    tl.store(of_erase + place, -tl.sum(S * of_written, 1)[:, None], mask=is_row)
                tl.store(of_left + place, tl.sum(g * written, 1)[:, None], mask=is_row)
                tl.store(of_right + ((head * length + t) * RANK + r) * columns + v, of_written, mask=is_column)
            if HAS_DRIVE:
                place = (head if DRIVE_V else part * all_heads + head) * length + t
                size = (rows if DRIVE_K else 1) * (columns if DRIVE_V else 1)
                _store_part(g, of_drive, place * size, k, v, rows, columns, DRIVE_K, DRIVE_V)
            g = before
            if READS_BEFORE:
                for q in tl.static_range(READS):
                    y = tl.load(
                        of_reads + ((head * length + t) * READS + q) * columns + v, mask=is_column, other=0.0
                    ).to(WIDE)
                    g += _column(query, query_place + q * query_q, k, query_k, is_row, WIDE) * y
                    found = tl.sum(S * y, 1)[:, None]
                    tl.store(of_query + ((by_part + t) * READS + q) * rows + k, found, mask=is_row)
        tl.debug_barrier()
    tl.store(of_state + head * rows * columns + inside, g, mask=is_element)
