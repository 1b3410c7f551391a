"""Activations in Triton, times a second factor (SwiGLU and its kin) or alone, with gradients: one launch each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lz_compile.lowering.ops.mlp import MlpAttrs
from lz_compile.lowering.triton_launch import WIDE, cdiv, dense, next_power_of_2, on

#: Activations that the kernels know, by the op's names.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "sigmoid", "tanh")
#: Elements of a tile.
TILE = 1024


@triton.jit
def _tanh(x):
    """Without the overflow that a quotient of exponentials has."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, x)  # a NaN stays one
    elif ACTIVATION == "relu_squared":
        return tl.where(x <= 0.0, 0.0, x * x)
    elif ACTIVATION == "sigmoid":
        return tl.sigmoid(x)
    else:
        tl.static_assert(ACTIVATION == "tanh")
        return _tanh(x)


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """The derivative of the activation."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    elif ACTIVATION == "gelu_tanh":
        t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    elif ACTIVATION == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        return s * (1.0 + 1.702 * x * (1.0 - s))
    elif ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, 1.0)
    elif ACTIVATION == "relu_squared":
        return tl.where(x <= 0.0, 0.0, 2.0 * x)
    elif ACTIVATION == "sigmoid":
        s = tl.sigmoid(x)
        return s * (1.0 - s)
    else:
        t = _tanh(x)
        return 1.0 - t * t


@triton.jit
def _forward(
    gate, up, result, columns, gate_stride, up_stride, result_stride,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = column < columns
    x = _activated(tl.load(gate + row * gate_stride + column, mask=keep, other=0.0).to(WIDE), ACTIVATION)
    if IS_GATED:
        x = x * tl.load(up + row * up_stride + column, mask=keep, other=0.0).to(WIDE)
    tl.store(result + row * result_stride + column, x.to(result.dtype.element_ty), mask=keep)


@triton.jit
def _backward(
    gradient, gate, up, of_gate, of_up, columns, gradient_stride, gate_stride, up_stride, result_stride,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = column < columns
    g = tl.load(gradient + row * gradient_stride + column, mask=keep, other=0.0).to(WIDE)
    x = tl.load(gate + row * gate_stride + column, mask=keep, other=0.0).to(WIDE)
    place = row * result_stride + column
    if IS_GATED:
        u = tl.load(up + row * up_stride + column, mask=keep, other=0.0).to(WIDE)
        tl.store(of_up + place, (g * _activated(x, ACTIVATION)).to(of_up.dtype.element_ty), mask=keep)
        g = g * u
    tl.store(of_gate + place, (g * _slope(x, ACTIVATION)).to(of_gate.dtype.element_ty), mask=keep)


def forward(gate: torch.Tensor, up: torch.Tensor | None, attrs: MlpAttrs) -> torch.Tensor:
    """``activation(gate) * up``; of the attributes, biases and limits are not looked at.

    Shapes:
        gate and up ``[N, F]``, perhaps halves of one tensor; the result ``[N, F]``, contiguous.
    """
    gate, up = dense(gate), None if up is None else dense(up)
    result = gate.new_empty(gate.shape, dtype=attrs.out_dtype)
    other = gate if up is None else up
    strides = (gate.stride(0), other.stride(0), result.stride(0))
    _launch(_forward, (gate, other, result), strides, _constants(gate, up, attrs))
    return result


def backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, attrs: MlpAttrs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of gate and up, contiguous; shapes as in :func:`forward`."""
    gradient, gate, up = dense(gradient), dense(gate), None if up is None else dense(up)
    of_gate, of_up = gate.new_empty(gate.shape), None if up is None else up.new_empty(up.shape)
    other, of_other = (gate, of_gate) if up is None or of_up is None else (up, of_up)
    strides = (gradient.stride(0), gate.stride(0), other.stride(0), of_gate.stride(0))
    _launch(_backward, (gradient, gate, other, of_gate, of_other), strides, _constants(gate, up, attrs))
    return of_gate, of_up


def _launch(
    kernel: Any, tensors: tuple[torch.Tensor, ...], strides: tuple[int, ...], constants: dict[str, Any]
) -> None:
    first = tensors[0]
    rows, columns = first.shape
    if first.numel() == 0:
        return
    block = min(TILE, next_power_of_2(columns))
    with on(first.device):
        kernel[rows, cdiv(columns, block)](*tensors, columns, *strides, **constants, BLOCK=block)


def _constants(gate: torch.Tensor, up: torch.Tensor | None, attrs: MlpAttrs) -> dict[str, Any]:
    wide = torch.promote_types(torch.promote_types(gate.dtype, attrs.compute_dtype), torch.float32)
    wide = wide if up is None else torch.promote_types(wide, up.dtype)
    return {"ACTIVATION": attrs.activation, "IS_GATED": up is not None, "WIDE": WIDE[wide]}
