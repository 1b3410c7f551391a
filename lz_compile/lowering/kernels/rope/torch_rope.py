"""Rotary position embedding in plain PyTorch: what Inductor fuses, and what runs where no other kernel does."""

from __future__ import annotations

import torch

from lz_compile.lowering.ops.rope import Operands, RopeAttrs, joined, pairs


def rope(x: Operands, attrs: RopeAttrs) -> torch.Tensor:
    """Rotary position embedding in the op's canonical layout (see ``lowering/ops/rope.py``)."""
    input, wide = x.input, x.wide(attrs)
    start, stop, width = attrs.rotary_start, attrs.rotary_start + attrs.rotary_dim, input.shape[-1]
    is_whole = attrs.rotary_dim == width
    turned = input if is_whole else input[..., start:stop]
    turned, cos, sin = (each if each.dtype == wide else each.to(wide) for each in (turned, x.cos, x.sin))
    first, second = pairs(turned, attrs.is_interleaved)
    (cos_a, cos_b), (sin_a, sin_b) = (
        (each, each) if attrs.has_half_tables else pairs(each, attrs.is_interleaved) for each in (cos, sin)
    )
    turned = joined(first * cos_a - second * sin_a, second * cos_b + first * sin_b, attrs.is_interleaved)
    turned = turned if turned.dtype == attrs.out_dtype else turned.to(attrs.out_dtype)
    if is_whole:
        return turned
    kept = input if input.dtype == attrs.out_dtype else input.to(attrs.out_dtype)
    parts = [kept[..., :start]] if start else []
    parts += [turned, kept[..., stop:]] if stop < width else [turned]
    return torch.cat(parts, -1)
