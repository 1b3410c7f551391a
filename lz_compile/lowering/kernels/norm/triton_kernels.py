"""The kernels of RMSNorm and LayerNorm.

With ``c`` the row less its mean (where it is centred), ``r`` the reciprocal root of its variance ``v``, ``w`` the weight with
its offset and ``g`` the gradient,

    result = c * r * w + bias
    gradient of c = g * w * r + sum(g * w * c) * 2 r'(v) * c / D
"""

from __future__ import annotations

import triton
import triton.language as tl

# ---- formulas --------------------------------------------------------------------------------------------------------


@triton.jit
def _root(value):
    if value.dtype == tl.float64:
        return tl.sqrt(value)
    else:
        return tl.sqrt_rn(value)


@triton.jit
def _scale(variance, EPS: tl.constexpr, EPS_AT: tl.constexpr):
    """The factor of a row."""
    if EPS_AT == "inside":
        return 1.0 / _root(variance + EPS)
    elif EPS_AT == "outside":
        return 1.0 / (_root(variance) + EPS)
    else:
        root = _root(variance)
        return 1.0 / tl.where(root < EPS, EPS, root)  # a NaN stays one


@triton.jit
def _slope(variance, scale, EPS: tl.constexpr, EPS_AT: tl.constexpr):
    """Twice the derivative of the factor by the variance."""
    if EPS_AT == "inside":
        return -scale * scale * scale
    elif EPS_AT == "outside":
        return -scale * scale / _root(variance)
    else:
        return tl.where(_root(variance) < EPS, 0.0, -scale * scale * scale)


@triton.jit
def _loaded(given, other, place, other_place, keep, WIDE: tl.constexpr, HAS_OTHER: tl.constexpr, SUM: tl.constexpr):
    """What is normalised: the input, or its sum with a residual, rounded as if it had been written to memory."""
    row = tl.load(given + place, mask=keep, other=0.0).to(WIDE)
    if HAS_OTHER:
        row = (row + tl.load(other + other_place, mask=keep, other=0.0).to(WIDE)).to(SUM).to(WIDE)
    return row


@triton.jit
def _statistics(
    given, other, place, other_place, hidden,
    IS_CENTRED: tl.constexpr, WIDE: tl.constexpr, HAS_OTHER: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean (0 unless centred) and variance of one long row, ``[1]`` each, from those of its parts."""
    mean = tl.zeros((1,), WIDE)
    squares = tl.zeros((1,), WIDE)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        keep = column < hidden
        row = _loaded(given, other, place + column, other_place + column, keep, WIDE, HAS_OTHER, SUM)
        if IS_CENTRED:
            count = tl.sum(keep.to(WIDE), 1)
            own = tl.sum(row, 1) / count
            rest = tl.where(keep, row - own[:, None], 0.0)
            delta = own - mean
            share = count / (start + count)
            squares += tl.sum(rest * rest, 1) + delta * delta * start * share
            mean += delta * share
        else:
            squares += tl.sum(row * row, 1)
    return mean, squares / hidden


# ---- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def forward(
    given, other, weight, bias, result, total, rows, hidden, given_stride, other_stride,
    IS_CENTRED: tl.constexpr, EPS: tl.constexpr, EPS_AT: tl.constexpr, OFFSET: tl.constexpr,
    HAS_OTHER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr, HAS_FEW_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole rows, ``ROWS`` of them at a time."""
    row = (tl.arange(0, ROWS).to(tl.int64) + tl.program_id(0) * ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    keep = (row < rows) & (column < hidden)
    SUM: tl.constexpr = total.dtype.element_ty
    x = _loaded(given, other, row * given_stride + column, row * other_stride + column, keep, WIDE, HAS_OTHER, SUM)
    if HAS_OTHER:
        tl.store(total + row * hidden + column, x.to(SUM), mask=keep)
    if IS_CENTRED:
        mean = tl.sum(x, 1) / hidden
        x = tl.where(keep, x - mean[:, None], 0.0)
    variance = tl.sum(x * x, 1) / hidden
    x = x * _scale(variance, EPS, EPS_AT)[:, None]
    if HAS_WEIGHT:
        x = x * (tl.load(weight + column, mask=column < hidden, other=0.0).to(WIDE) + OFFSET)
    if HAS_BIAS:
        x = x + tl.load(bias + column, mask=column < hidden, other=0.0).to(WIDE)
    tl.store(result + row * hidden + column, x.to(result.dtype.element_ty), mask=keep)


@triton.jit
def forward_long(
    given, other, weight, bias, result, total, hidden, given_stride, other_stride,
    IS_CENTRED: tl.constexpr, EPS: tl.constexpr, EPS_AT: tl.constexpr, OFFSET: tl.constexpr,
    HAS_OTHER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, a part at a time."""
    row = tl.program_id(0).to(tl.int64)
    place, other_place = row * given_stride, row * other_stride
    SUM: tl.constexpr = total.dtype.element_ty
    mean, variance = _statistics(
        given, other, place, other_place, hidden, IS_CENTRED, WIDE, HAS_OTHER, SUM, BLOCK
    )  # fmt: skip
    scale = _scale(variance, EPS, EPS_AT)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        keep = column < hidden
        x = _loaded(given, other, place + column, other_place + column, keep, WIDE, HAS_OTHER, SUM)
        if HAS_OTHER:
            tl.store(total + row * hidden + column, x.to(SUM), mask=keep)
        x = (x - mean[:, None]) * scale[:, None]
        if HAS_WEIGHT:
            x = x * (tl.load(weight + column, mask=keep, other=0.0).to(WIDE) + OFFSET)
        if HAS_BIAS:
            x = x + tl.load(bias + column, mask=keep, other=0.0).to(WIDE)
        tl.store(result + row * hidden + column, x.to(result.dtype.element_ty), mask=keep)


# ---- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def backward(
    gradient, given, weight, of_total, result, partial, rows, hidden, gradient_stride, given_stride, total_stride,
    IS_CENTRED: tl.constexpr, EPS: tl.constexpr, EPS_AT: tl.constexpr, OFFSET: tl.constexpr,
    HAS_TOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr, HAS_FEW_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole rows: every program takes each so many-th tile of them, and sums what the weights get from its own."""
    column = tl.arange(0, BLOCK)[None, :]
    is_column = column < hidden
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=is_column, other=0.0).to(WIDE) + OFFSET
        of_weight = tl.zeros((ROWS, BLOCK), WIDE)
    if HAS_BIAS:
        of_bias = tl.zeros((ROWS, BLOCK), WIDE)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tl.arange(0, ROWS).to(tl.int64) + tile * ROWS)[:, None]
        keep = (row < rows) & is_column
        g = tl.load(gradient + row * gradient_stride + column, mask=keep, other=0.0).to(WIDE)
        x = tl.load(given + row * given_stride + column, mask=keep, other=0.0).to(WIDE)
        if IS_CENTRED:
            mean = tl.sum(x, 1) / hidden
            x = tl.where(keep, x - mean[:, None], 0.0)
        variance = tl.sum(x * x, 1) / hidden
        scale = _scale(variance, EPS, EPS_AT)
        if HAS_BIAS:
            of_bias += g
        if HAS_WEIGHT:
            of_weight += tl.where(keep, g * x * scale[:, None], 0.0)
            g = g * factor
        pull = tl.sum(g * x, 1) * _slope(variance, scale, EPS, EPS_AT) / hidden
        found = g * scale[:, None] + x * pull[:, None]
        if IS_CENTRED:
            found = found - (tl.sum(g, 1) * scale / hidden)[:, None]
        if HAS_TOTAL:
            found = found + tl.load(of_total + row * total_stride + column, mask=keep, other=0.0).to(WIDE)
        tl.store(result + row * hidden + column, found.to(result.dtype.element_ty), mask=keep)
    place = tl.program_id(0).to(tl.int64) * hidden + column
    if HAS_WEIGHT:
        tl.store(partial + place, tl.sum(of_weight, 0)[None, :], mask=is_column)
    if HAS_BIAS:
        size = tl.num_programs(0).to(tl.int64) * hidden
        tl.store(partial + size + place, tl.sum(of_bias, 0)[None, :], mask=is_column)


@triton.jit
def backward_long(
    gradient, given, weight, of_total, result, statistics, hidden, gradient_stride, given_stride, total_stride,
    IS_CENTRED: tl.constexpr, EPS: tl.constexpr, EPS_AT: tl.constexpr, OFFSET: tl.constexpr,
    HAS_TOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one row, a part at a time; its mean and factor are kept for those of the weights."""
    row = tl.program_id(0).to(tl.int64)
    place, gradient_place = row * given_stride, row * gradient_stride
    mean, variance = _statistics(
        given, given, place, place, hidden, IS_CENTRED, WIDE, False, given.dtype.element_ty, BLOCK
    )  # fmt: skip
    scale = _scale(variance, EPS, EPS_AT)
    one = tl.arange(0, 1)
    tl.store(statistics + 2 * row + one, mean)
    tl.store(statistics + 2 * row + 1 + one, scale)
    sums = tl.zeros((1,), WIDE)
    products = tl.zeros((1,), WIDE)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        keep = column < hidden
        g = tl.load(gradient + gradient_place + column, mask=keep, other=0.0).to(WIDE)
        if HAS_WEIGHT:
            g = g * (tl.load(weight + column, mask=keep, other=0.0).to(WIDE) + OFFSET)
        x = tl.load(given + place + column, mask=keep, other=0.0).to(WIDE) - mean[:, None]
        sums += tl.sum(g, 1)
        products += tl.sum(tl.where(keep, g * x, 0.0), 1)
    pull = products * _slope(variance, scale, EPS, EPS_AT) / hidden
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        keep = column < hidden
        g = tl.load(gradient + gradient_place + column, mask=keep, other=0.0).to(WIDE)
        if HAS_WEIGHT:
            g = g * (tl.load(weight + column, mask=keep, other=0.0).to(WIDE) + OFFSET)
        x = tl.load(given + place + column, mask=keep, other=0.0).to(WIDE) - mean[:, None]
        found = g * scale[:, None] + x * pull[:, None]
        if IS_CENTRED:
            found = found - (sums * scale / hidden)[:, None]
        if HAS_TOTAL:
            found = found + tl.load(of_total + row * total_stride + column, mask=keep, other=0.0).to(WIDE)
        tl.store(result + row * hidden + column, found.to(result.dtype.element_ty), mask=keep)


@triton.jit
def weights_long(
    gradient, given, statistics, partial, rows, hidden, gradient_stride, given_stride,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of what the weights get from some rows."""
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    of_weight = tl.zeros((ROWS, BLOCK), WIDE)
    of_bias = tl.zeros((ROWS, BLOCK), WIDE)
    for tile in range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = (tl.arange(0, ROWS).to(tl.int64) + tile * ROWS)[:, None]
        keep = (row < rows) & (column < hidden)
        g = tl.load(gradient + row * gradient_stride + column, mask=keep, other=0.0).to(WIDE)
        if HAS_WEIGHT:
            mean = tl.load(statistics + 2 * row, mask=row < rows, other=0.0)
            scale = tl.load(statistics + 2 * row + 1, mask=row < rows, other=0.0)
            x = tl.load(given + row * given_stride + column, mask=keep, other=0.0).to(WIDE)
            of_weight += g * ((x - mean) * scale)
        of_bias += g
    place = tl.program_id(1).to(tl.int64) * hidden + column
    if HAS_WEIGHT:
        tl.store(partial + place, tl.sum(of_weight, 0)[None, :], mask=column < hidden)
    if HAS_BIAS:
        size = tl.num_programs(1).to(tl.int64) * hidden
        tl.store(partial + size + place, tl.sum(of_bias, 0)[None, :], mask=column < hidden)


@triton.jit
def column_sums(partial, result, count, hidden, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums over programs, from the first to the last."""
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    sums = tl.zeros((ROWS, BLOCK), WIDE)
    for start in range(0, count, ROWS):
        row = (tl.arange(0, ROWS).to(tl.int64) + start)[:, None]
        sums += tl.load(partial + row * hidden + column, mask=(row < count) & (column < hidden), other=0.0)
    found = tl.sum(sums, 0)[None, :]
    tl.store(result + column, found.to(result.dtype.element_ty), mask=column < hidden)
