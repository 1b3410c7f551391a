"""Blends in Triton: one pass over host and seed in the order of memory; with a gate, over the logits of a row before it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lz_compile.lowering.kernels.blend.opaque_blend import Weighed
from lz_compile.lowering.ops.blend import BlendAttrs
from lz_compile.lowering.triton_launch import WIDE, cdiv, next_power_of_2, on

#: Elements of a tile.
TILE = 1024
#: Logits that are looked at at a time.
CLASSES = 2048


@triton.jit
def _second(first_a, second_a, first_b, second_b):
    """The two largest of two pairs; NaN counts as the largest."""
    is_a = (first_a > first_b) | (first_a != first_a)  # noqa: PLR0124 NaN
    first = tl.where(is_a, first_a, first_b)
    other = tl.where(is_a, first_b, first_a)
    rest = tl.where(is_a, second_a, second_b)
    return first, tl.where((other > rest) | (other != other), other, rest)  # noqa: PLR0124 NaN


@triton.jit
def _gate_rows(
    logits, gates, classes, row_stride, class_stride, gain, offset,
    WIDE: tl.constexpr, IS_GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The margin of a row, or its gate: each lane keeps its two largest, which are merged at last."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    lowest = tl.full((BLOCK,), float("-inf"), WIDE)
    first, second = lowest, lowest
    for start in range(0, classes, BLOCK):
        column = start + lane
        value = tl.load(
            logits + row * row_stride + column.to(tl.int64) * class_stride, mask=column < classes, other=float("-inf")
        ).to(WIDE)
        first, second = _second(first, second, value, lowest)
    largest, runner_up = tl.reduce((first, second), 0, _second)
    margin = largest - runner_up
    if IS_GATE:
        margin = tl.sigmoid(tl.load(gain).to(WIDE) * margin - tl.load(offset).to(WIDE))
    tl.store(gates + row, margin.to(gates.dtype.element_ty))


@triton.jit
def _places(IS_LARGE: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements a program has; in 32 bits where these do, as they are divided by sizes for what they are weighed by."""
    program = tl.program_id(0)
    if IS_LARGE:
        program = program.to(tl.int64)
    return program * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _weight(
    alpha, gates, bounds, place, keep, inner, alphas, span,
    WIDE: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """What an element of the seed is weighed by."""
    weight = tl.load(alpha + (place // inner) % alphas, mask=keep, other=0.0).to(WIDE)
    if HAS_GATE:
        weight = weight * tl.load(gates + place // span, mask=keep, other=0.0).to(WIDE)
        low, high = tl.load(bounds).to(WIDE), tl.load(bounds + 1).to(WIDE)
        weight = tl.where(weight < low, low, weight)  # a NaN stays one
        weight = tl.where(weight > high, high, weight)
    return weight


@triton.jit
def _forward(
    host, seed, alpha, gates, bounds, result, count, inner, alphas, span,
    WIDE: tl.constexpr, HAS_GATE: tl.constexpr, IS_LARGE: tl.constexpr, IS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = _places(IS_LARGE, BLOCK)
    keep = place < count
    weight = _weight(alpha, gates, bounds, place, keep, inner, alphas, span, WIDE, HAS_GATE)
    h = tl.load(host + place, mask=keep, other=0.0).to(WIDE)
    s = tl.load(seed + place, mask=keep, other=0.0).to(WIDE)
    blended = h + weight * s if IS_RESIDUAL else weight * s + (1.0 - weight) * h
    tl.store(result + place, blended.to(result.dtype.element_ty), mask=keep)


@triton.jit
def _backward(
    gradient, alpha, gates, bounds, of_seed, count, inner, alphas, span,
    WIDE: tl.constexpr, HAS_GATE: tl.constexpr, IS_LARGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = _places(IS_LARGE, BLOCK)
    keep = place < count
    weight = _weight(alpha, gates, bounds, place, keep, inner, alphas, span, WIDE, HAS_GATE)
    g = tl.load(gradient + place, mask=keep, other=0.0).to(WIDE)
    tl.store(of_seed + place, (g * weight).to(of_seed.dtype.element_ty), mask=keep)


def margins(logits: torch.Tensor, attrs: BlendAttrs) -> torch.Tensor:
    """The largest minus the second largest of every row, ``[N, K]`` to ``[N]``, in the dtype of the result."""
    found = logits.new_empty(logits.shape[:1], dtype=attrs.out_dtype)
    _rows(logits, found, found, found, attrs, is_gate=False)
    return found


def forward(host: torch.Tensor, given: Weighed) -> torch.Tensor:
    """The blend (see :class:`lz_compile.lowering.kernels.blend.opaque_blend.BlendCode`)."""
    return _Blend(given).forward(host)


def backward(gradient: torch.Tensor, given: Weighed) -> torch.Tensor:
    """The gradient of the seed (see :class:`lz_compile.lowering.kernels.blend.opaque_blend.BlendCode`)."""
    return _Blend(given).backward(gradient)


class _Blend:
    def __init__(self, given: Weighed) -> None:
        seed, alpha, logits, numbers, attrs = given
        self.seed, self.attrs, self.bounds = seed, attrs, numbers[2:]
        _, channels, inner = seed.shape
        self.alpha = alpha.contiguous()
        self.alphas = self.alpha.numel()
        by_row = self.alpha.dim() > 0 and self.alpha.shape[1] == 1 and self.alpha.shape[0] > 1
        self.inner = channels * inner if by_row else inner
        self.span = channels * inner
        self.gates = self.alpha
        if logits is not None:
            wide = _wide(attrs, logits)
            self.gates = logits.new_empty(logits.shape[:1], dtype=wide)
            _rows(logits, self.gates, numbers, numbers[1:], attrs, is_gate=True)
        self.has_gate = logits is not None

    def forward(self, host: torch.Tensor) -> torch.Tensor:
        """The blend, contiguous."""
        host, seed = host.contiguous(), self.seed.contiguous()
        result = seed.new_empty(seed.shape, dtype=self.attrs.out_dtype)
        self._launch(
            _forward, (host, seed, self.alpha, self.gates, self.bounds, result), IS_RESIDUAL=self.attrs.is_residual
        )
        return result

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the seed, contiguous."""
        found = self.seed.new_empty(self.seed.shape)
        self._launch(_backward, (gradient.contiguous(), self.alpha, self.gates, self.bounds, found))
        return found

    def _launch(self, kernel: Any, tensors: tuple[torch.Tensor, ...], **constants: Any) -> None:
        count = self.seed.numel()
        if count == 0:
            return
        wide = WIDE[_wide(self.attrs, self.seed)]
        with on(self.seed.device):
            kernel[(cdiv(count, TILE),)](
                *tensors, count, self.inner, self.alphas, self.span,
                WIDE=wide, HAS_GATE=self.has_gate, IS_LARGE=count + TILE >= 2**31, BLOCK=TILE, **constants,
            )  # fmt: skip


def _rows(
    logits: torch.Tensor,
    found: torch.Tensor,
    gain: torch.Tensor,
    offset: torch.Tensor,
    attrs: BlendAttrs,
    *,
    is_gate: bool,
) -> None:
    rows, classes = logits.shape
    if rows == 0:
        return
    block = min(CLASSES, max(2, next_power_of_2(classes)))
    with on(logits.device):
        _gate_rows[(rows,)](
            logits, found, classes, logits.stride(0), logits.stride(1), gain, offset,
            WIDE=WIDE[_wide(attrs, logits)], IS_GATE=is_gate, BLOCK=block,
        )  # fmt: skip


def _wide(attrs: BlendAttrs, given: torch.Tensor) -> torch.dtype:
    """What is computed in."""
    return torch.promote_types(torch.promote_types(given.dtype, attrs.compute_dtype), torch.float32)
