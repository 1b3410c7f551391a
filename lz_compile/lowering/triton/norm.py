"""RMSNorm and LayerNorm in Triton, with gradients, and with a residual added before: one launch, two results.

A row that fits into a block is read once, several short ones at a time. A longer row is read again, which finds it in the
cache. The gradients of weight and bias are sums over rows: every program sums its own rows in a fixed order, and a second
kernel sums the programs, so that the same inputs give the same bits.

Statistics are in float32, or float64 where the op or its input is. With ``c`` the row less its mean (where it is centred),
``r`` the reciprocal root of its variance ``v``, ``w`` the weight with its offset and ``g`` the gradient,

    result = c * r * w + bias
    gradient of c = g * w * r + sum(g * w * c) * 2 r'(v) * c / D
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from lz_compile.lowering.ops.norm import NormAttrs
from lz_compile.lowering.triton.launch import FEW_ROWS, WIDE, Tiled, on, processors

#: The longest row that is kept in registers; a backward keeps four times as much.
LARGEST_BLOCK, LARGEST_BACKWARD_BLOCK = 16384, 8192
#: The part of a longer row that is read at a time.
PART = 4096
#: Columns that the programs of one multiprocessor have together, each a row of partial sums, and the most such programs.
PARTIAL, PROGRAMS = 8192, 4
#: Rows and columns of a tile of weight gradients of long rows, and programs over rows.
TALL, NARROW, GROUPS = 16, 128, 32
#: Rows and columns of a tile of partial sums.
PARTIAL_ROWS, PARTIAL_COLUMNS = 64, 32


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
def _forward(
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
def _forward_long(
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
def _backward(
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
def _backward_long(
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
def _weights_long(
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
def _column_sums(partial, result, count, hidden, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums over programs, from the first to the last."""
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    sums = tl.zeros((ROWS, BLOCK), WIDE)
    for start in range(0, count, ROWS):
        row = (tl.arange(0, ROWS).to(tl.int64) + start)[:, None]
        sums += tl.load(partial + row * hidden + column, mask=(row < count) & (column < hidden), other=0.0)
    found = tl.sum(sums, 0)[None, :]
    tl.store(result + column, found.to(result.dtype.element_ty), mask=column < hidden)


_forward_tiled, _backward_tiled = Tiled(_forward), Tiled(_backward)


# ---- launching -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """One normalisation: ``[N, D]`` tensors whose last dimension has no gaps, and the constants of its kernels.

    ``largest_block`` is the longest row that is kept in registers, ``part`` what is read of a longer one at a time.
    """

    input: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    attrs: NormAttrs
    largest_block: int | None = None
    part: int = PART

    @property
    def wide(self) -> torch.dtype:
        """The dtype of statistics and sums."""
        dtype = torch.promote_types(torch.promote_types(self.input.dtype, self.attrs.compute_dtype), torch.float32)
        for each in (self.weight, self.bias):
            dtype = dtype if each is None else torch.promote_types(dtype, each.dtype)
        return dtype

    def forward(self, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and what was normalised: the input, or its sum with a residual."""
        input, residual = _dense(self.input), None if residual is None else _dense(residual)
        rows, hidden = input.shape
        result = input.new_empty((rows, hidden), dtype=self.attrs.out_dtype)
        total = input if residual is None else input.new_empty((rows, hidden))
        if result.numel() == 0:
            return result, total
        other = input if residual is None else residual
        tensors = (input, other, self._weight, self._bias, result, total)
        strides = (input.stride(0), other.stride(0))
        constants = {**self._constants, "HAS_OTHER": residual is not None, "HAS_BIAS": self.bias is not None}
        block = triton.next_power_of_2(hidden)
        with on(input.device):
            if block <= (self.largest_block or LARGEST_BLOCK):
                few = {"HAS_FEW_ROWS": rows < FEW_ROWS, "BLOCK": block}
                _forward_tiled.launch(_over(rows), *tensors, rows, hidden, *strides, **constants, **few)
            else:
                _forward_long[rows,](*tensors, hidden, *strides, **constants, BLOCK=self.part, num_warps=8)
        return result, total

    def backward(
        self, gradient: torch.Tensor, of_total: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of input, weight and bias; ``of_total`` is added to the first."""
        gradient, input = _dense(gradient), _dense(self.input)
        more = gradient if of_total is None else _dense(of_total)
        rows, hidden = input.shape
        result = input.new_empty((rows, hidden))
        if result.numel() == 0:
            return result, _zeros(self.weight), _zeros(self.bias)
        strides = (gradient.stride(0), input.stride(0), more.stride(0))
        tensors = (gradient, input, self._weight, more, result)
        constants = {**self._constants, "HAS_TOTAL": of_total is not None}
        block = triton.next_power_of_2(hidden)
        with on(input.device):
            if block <= (self.largest_block or LARGEST_BACKWARD_BLOCK):
                partial = self._partial(min(rows, processors(input.device) * min(max(PARTIAL // block, 1), PROGRAMS)))
                few = {"HAS_FEW_ROWS": rows < FEW_ROWS, "HAS_BIAS": self.bias is not None, "BLOCK": block}
                grid = (partial.shape[1],)
                _backward_tiled.launch(
                    lambda _: grid, *tensors, partial, rows, hidden, *strides, **constants, **few
                )  # fmt: skip
            else:
                partial = self._long_backward(tensors, strides, constants)
            return result, self._summed(partial[0], self.weight), self._summed(partial[1], self.bias)

    def _long_backward(
        self, tensors: tuple[torch.Tensor, ...], strides: tuple[int, ...], constants: dict[str, Any]
    ) -> torch.Tensor:
        """The gradient of the input is written, partial sums of the weights' are returned."""
        gradient, input = tensors[:2]
        rows, hidden = input.shape
        statistics = input.new_empty((rows, 2), dtype=self.wide)
        _backward_long[rows,](*tensors, statistics, hidden, *strides, **constants, BLOCK=self.part, num_warps=8)
        if self.weight is None and self.bias is None:
            return self._partial(0)
        partial = self._partial(min(GROUPS, triton.cdiv(rows, TALL)))
        _weights_long[triton.cdiv(hidden, NARROW), partial.shape[1]](
            gradient, input, statistics, partial, rows, hidden, *strides[:2],
            HAS_WEIGHT=self.weight is not None, HAS_BIAS=self.bias is not None,
            WIDE=WIDE[self.wide], ROWS=TALL, BLOCK=NARROW,
        )  # fmt: skip
        return partial

    def _partial(self, programs: int) -> torch.Tensor:
        """A row of sums for each program, for weight and bias."""
        has_any = self.weight is not None or self.bias is not None
        return self.input.new_empty((2, programs, self.input.shape[1] if has_any else 0), dtype=self.wide)

    def _summed(self, partial: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor | None:
        if like is None:
            return None
        count, hidden = partial.shape
        result = torch.empty_like(like, memory_format=torch.contiguous_format)
        tile = {"ROWS": PARTIAL_ROWS, "BLOCK": PARTIAL_COLUMNS}
        _column_sums[triton.cdiv(hidden, PARTIAL_COLUMNS),](
            partial, result, count, hidden, WIDE=WIDE[self.wide], **tile
        )
        return result

    @property
    def _weight(self) -> torch.Tensor:
        return self.input if self.weight is None else self.weight.contiguous()

    @property
    def _bias(self) -> torch.Tensor:
        return self.input if self.bias is None else self.bias.contiguous()

    @property
    def _constants(self) -> dict[str, Any]:
        attrs = self.attrs
        return {
            "IS_CENTRED": attrs.is_centred,
            "EPS": float(attrs.eps),
            "EPS_AT": attrs.eps_at,
            "OFFSET": float(attrs.weight_offset),
            "HAS_WEIGHT": self.weight is not None,
            "WIDE": WIDE[self.wide],
        }


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same without gaps in rows."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _zeros(like: torch.Tensor | None) -> torch.Tensor | None:
    return None if like is None else torch.zeros_like(like, memory_format=torch.contiguous_format)


def _over(rows: int) -> Any:
    return lambda constants: (triton.cdiv(rows, constants["ROWS"]),)
