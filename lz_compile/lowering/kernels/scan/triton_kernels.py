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

from lz_compile.lowering.ops import scan

DROPPED = tl.constexpr(scan.DROPPED)


@triton.jit
def _column(given, place, k, stride, keep, WIDE: tl.constexpr):
    """One number for each row of the state, ``[K, 1]``."""
    return tl.load(given + place + k * stride, mask=keep, other=0.0).to(WIDE)


@triton.jit
def _part(
    given, place, k, v, stride_k, stride_v, rows, columns, HAS_K: tl.constexpr, HAS_V: tl.constexpr, WIDE: tl.constexpr
):
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
    HAS_DECAY: tl.constexpr, DROPS: tl.constexpr, DECAY_K: tl.constexpr, DECAY_V: tl.constexpr,
    RANK: tl.constexpr, ERASES: tl.constexpr, HAS_DRIVE: tl.constexpr, DRIVE_K: tl.constexpr, DRIVE_V: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The state behind a step."""
    found = S
    if HAS_DECAY:
        factor = _part(decay, decay_place, k, v, decay_k, decay_v, rows, columns, DECAY_K, DECAY_V, WIDE)
        if DROPS:
            S = tl.where(factor == DROPPED, 0.0, S)
        found = S * factor
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
def _read(
    S, query, reads, query_place, place, k, v, query_q, query_k, rows, columns, READS: tl.constexpr, WIDE: tl.constexpr
):
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
    HAS_STATE: tl.constexpr, HAS_DECAY: tl.constexpr, DROPS: tl.constexpr, DECAY_K: tl.constexpr, DECAY_V: tl.constexpr,
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
            HAS_DECAY, DROPS, DECAY_K, DECAY_V, RANK, ERASES, HAS_DRIVE, DRIVE_K, DRIVE_V, WIDE,
        )  # fmt: skip
        if not READS_BEFORE:
            _read(S, query, reads, query_place, place, k, v, query_q, query_k, rows, columns, READS, WIDE)
    tl.store(last + (head * rows + k) * columns + v, S.to(last.dtype.element_ty), mask=is_element)


@triton.jit
def _of_reads(
    g, S, of_reads, query, of_query, reads_place, query_place, of_query_place, k, v, query_q, query_k, rows, columns,
    READS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient ``g`` of the state ``S`` that was read, with what its reads add; stores the gradient of queries."""
    for q in tl.static_range(READS):
        y = tl.load(of_reads + reads_place + q * columns + v, mask=v < columns, other=0.0).to(WIDE)
        g += _column(query, query_place + q * query_q, k, query_k, k < rows, WIDE) * y
        tl.store(of_query + of_query_place + q * rows + k, tl.sum(S * y, 1)[:, None], mask=k < rows)
    return g


@triton.jit
def _of_updates(
    g, S, before, left, right, erase, of_left, of_right, of_erase, left_place, right_place, erase_place, rows_place,
    columns_place, k, v, left_r, left_k, right_r, right_v, erase_r, erase_k, rows, columns,
    RANK: tl.constexpr, ERASES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``before``, the gradient of the state ``S`` before a step, with what its updates add; stores those of updates."""
    for r in tl.static_range(RANK):
        vector = _column(left, left_place + r * left_r, k, left_k, k < rows, WIDE)
        of_written = tl.sum(vector * g, 0)[None, :]
        written = tl.load(right + right_place + r * right_r + v * right_v, mask=v < columns, other=0.0).to(WIDE)
        if ERASES:
            eraser = _column(erase, erase_place + r * erase_r, k, erase_k, k < rows, WIDE)
            written -= tl.sum(eraser * S, 0)[None, :]
            before -= eraser * of_written
            tl.store(of_erase + rows_place + r * rows + k, -tl.sum(S * of_written, 1)[:, None], mask=k < rows)
        tl.store(of_left + rows_place + r * rows + k, tl.sum(g * written, 1)[:, None], mask=k < rows)
        tl.store(of_right + columns_place + r * columns + v, of_written, mask=v < columns)
    return before


@triton.jit
def _walked(
    S, target, start, steps, decay, left, right, erase, drive, k, v,
    decay_t, decay_k, decay_v, left_t, left_r, left_k, right_t, right_r, right_v, erase_t, erase_r, erase_k,
    drive_t, drive_k, drive_v, rows, columns,
    EVERY: tl.constexpr, HAS_DECAY: tl.constexpr, DROPS: tl.constexpr, DECAY_K: tl.constexpr, DECAY_V: tl.constexpr,
    RANK: tl.constexpr, ERASES: tl.constexpr, HAS_DRIVE: tl.constexpr, DRIVE_K: tl.constexpr, DRIVE_V: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The state after ``steps`` steps from ``start``; every so many-th before a step is stored."""
    is_element = (k < rows) & (v < columns)
    for step in range(steps):
        t = start + step
        if step % EVERY == 0:
            tl.store(target + tl.cast(step // EVERY, tl.int64) * rows * columns, S, mask=is_element)
        S = _advanced(
            S, decay, left, right, erase, drive, t * decay_t, t * left_t, t * right_t, t * erase_t, t * drive_t, k, v,
            decay_k, decay_v, left_r, left_k, right_r, right_v, erase_r, erase_k, drive_k, drive_v, rows, columns,
            HAS_DECAY, DROPS, DECAY_K, DECAY_V, RANK, ERASES, HAS_DRIVE, DRIVE_K, DRIVE_V, WIDE,
        )  # fmt: skip
    return S


@triton.jit
def backward(  # noqa: PLR0915 one walk, in which the state and its gradient stay in registers
    of_reads, of_last, state, decay, left, right, erase, drive, query, states, kept,
    of_state, of_decay, of_left, of_right, of_erase, of_drive, of_query, heads, length, rows, columns,
    state_b, state_h, state_k, state_v, decay_b, decay_h, decay_t, decay_k, decay_v,
    left_b, left_h, left_t, left_r, left_k, right_b, right_h, right_t, right_r, right_v,
    erase_b, erase_h, erase_t, erase_r, erase_k, drive_b, drive_h, drive_t, drive_k, drive_v,
    query_b, query_h, query_t, query_q, query_k,
    HAS_STATE: tl.constexpr, HAS_DECAY: tl.constexpr, DROPS: tl.constexpr, DECAY_K: tl.constexpr, DECAY_V: tl.constexpr,
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
    is_element = (k < rows) & (v < columns)
    inside = k * columns + v
    size = tl.cast(rows, tl.int64) * columns
    kept += head * spans * size + inside
    states += head * SPAN * size + inside
    decay += b * decay_b + h * decay_h
    left += b * left_b + h * left_h
    right += b * right_b + h * right_h
    erase += b * erase_b + h * erase_h
    drive += b * drive_b + h * drive_h
    query += b * query_b + h * query_h
    S = tl.zeros((ROWS, BLOCK), WIDE)
    if HAS_STATE:
        first = state + b * state_b + h * state_h
        S = tl.load(first + k * state_k + v * state_v, mask=is_element, other=0.0).to(WIDE)
    start = tl.cast(0, tl.int64)
    _walked(
        S, kept, start, length, decay, left, right, erase, drive, k, v,
        decay_t, decay_k, decay_v, left_t, left_r, left_k, right_t, right_r, right_v, erase_t, erase_r, erase_k,
        drive_t, drive_k, drive_v, rows, columns,
        SPAN, HAS_DECAY, DROPS, DECAY_K, DECAY_V, RANK, ERASES, HAS_DRIVE, DRIVE_K, DRIVE_V, WIDE,
    )  # fmt: skip
    g = tl.load(of_last + head * size + inside, mask=is_element, other=0.0).to(WIDE)
    for each in range(spans):
        span = spans - 1 - each
        start = tl.cast(span, tl.int64) * SPAN
        steps = tl.minimum(length - span * SPAN, SPAN)
        tl.debug_barrier()  # another thread may have stored what this one loads
        after = _walked(
            tl.load(kept + tl.cast(span, tl.int64) * size, mask=is_element, other=0.0), states, start, steps,
            decay, left, right, erase, drive, k, v,
            decay_t, decay_k, decay_v, left_t, left_r, left_k, right_t, right_r, right_v, erase_t, erase_r, erase_k,
            drive_t, drive_k, drive_v, rows, columns,
            1, HAS_DECAY, DROPS, DECAY_K, DECAY_V, RANK, ERASES, HAS_DRIVE, DRIVE_K, DRIVE_V, WIDE,
        )  # fmt: skip
        tl.debug_barrier()
        for back in range(steps):
            t = start + (steps - 1 - back)
            S = tl.load(states + (t - start) * size, mask=is_element, other=0.0)
            own = head * length + t  # of what no program shares with another
            shared = (part * all_heads + head) * length + t  # of what has a summand for each program
            if not READS_BEFORE:
                g = _of_reads(
                    g, after, of_reads, query, of_query, own * READS * columns, t * query_t, shared * READS * rows,
                    k, v, query_q, query_k, rows, columns, READS, WIDE,
                )  # fmt: skip
            before = g
            kept_S = S
            if HAS_DECAY:
                factor = _part(decay, t * decay_t, k, v, decay_k, decay_v, rows, columns, DECAY_K, DECAY_V, WIDE)
                if DROPS:
                    kept_S = tl.where(factor == DROPPED, 0.0, S)
                before = g * factor
                place = (own if DECAY_V else shared) * (rows if DECAY_K else 1) * (columns if DECAY_V else 1)
                _store_part(g * kept_S, of_decay, place, k, v, rows, columns, DECAY_K, DECAY_V)
            before = _of_updates(
                g, kept_S, before, left, right, erase, of_left, of_right, of_erase, t * left_t, t * right_t, t * erase_t,
                shared * RANK * rows, own * RANK * columns, k, v,
                left_r, left_k, right_r, right_v, erase_r, erase_k, rows, columns, RANK, ERASES, WIDE,
            )  # fmt: skip
            if DROPS:
                before = tl.where(factor == DROPPED, 0.0, before)
            if HAS_DRIVE:
                place = (own if DRIVE_V else shared) * (rows if DRIVE_K else 1) * (columns if DRIVE_V else 1)
                _store_part(g, of_drive, place, k, v, rows, columns, DRIVE_K, DRIVE_V)
            g = before
            if READS_BEFORE:
                g = _of_reads(
                    g, S, of_reads, query, of_query, own * READS * columns, t * query_t, shared * READS * rows,
                    k, v, query_q, query_k, rows, columns, READS, WIDE,
                )  # fmt: skip
            after = S
    tl.store(of_state + head * size + inside, g, mask=is_element)
