"""RMSNorm and LayerNorm in Triton, with a residual added before where there is one: one launch, whole rows in registers.

With ``c`` the row less its mean (where it is centred), ``r`` the reciprocal root of its variance and ``w`` the weight with
its offset, the result is ``c * r * w + bias``. Statistics and sums are in float32, or float64 where the op or an operand is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lz_compile.lowering.ops.norm import NormAttrs, Operands
from lz_compile.lowering.triton_launch import FEW_ROWS, WIDE, Tiled, cdiv, dense, next_power_of_2, on


def forward(x: Operands, attrs: NormAttrs, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and what was normalised: the input, or its sum with a residual."""
    input = dense(x.input)
    other = input if residual is None else dense(residual)
    rows, hidden = input.shape
    result = input.new_empty((rows, hidden), dtype=attrs.out_dtype)
    total = input if residual is None else input.new_empty((rows, hidden))
    if result.numel() == 0:
        return result, total
    weight, bias = (input if each is None else each.contiguous() for each in (x.weight, x.bias))
    with on(input.device):
        _tiled.launch(
            lambda constants: (cdiv(rows, constants["ROWS"]),),
            *(input, other, weight, bias, result, total, rows, hidden, input.stride(0), other.stride(0)),
            IS_CENTRED=attrs.is_centred,
            EPS=float(attrs.eps),
            EPS_AT=attrs.eps_at,
            OFFSET=float(attrs.weight_offset),
            HAS_OTHER=residual is not None,
            HAS_WEIGHT=x.weight is not None,
            HAS_BIAS=x.bias is not None,
            WIDE=WIDE[x.wide(attrs)],
            HAS_FEW_ROWS=rows < FEW_ROWS,
            BLOCK=next_power_of_2(hidden),
        )
    return result, total


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
def _forward(
    given, other, weight, bias, result, total, rows, hidden, given_stride, other_stride,
    IS_CENTRED: tl.constexpr, EPS: tl.constexpr, EPS_AT: tl.constexpr, OFFSET: tl.constexpr,
    HAS_OTHER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr, HAS_FEW_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole rows, ``ROWS`` of them at a time; a sum is rounded as if it had been written to memory."""
    row = (tl.arange(0, ROWS).to(tl.int64) + tl.program_id(0) * ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    keep = (row < rows) & (column < hidden)
    x = tl.load(given + row * given_stride + column, mask=keep, other=0.0).to(WIDE)
    if HAS_OTHER:
        SUM: tl.constexpr = total.dtype.element_ty
        x = (x + tl.load(other + row * other_stride + column, mask=keep, other=0.0).to(WIDE)).to(SUM).to(WIDE)
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


_tiled = Tiled(_forward)
