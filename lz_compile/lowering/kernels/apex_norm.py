"""Apex's fused RMSNorm and LayerNorm.

They compute in float32, round the normalised row to the weight's dtype, and multiply in that: nothing for a source that
rounds only once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.row_norm import decoded, fake, fallback, given, gradients_by, norm_by

if TYPE_CHECKING:
    from lz_compile.lowering.ops.norm import NormAttrs


def _takes(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, attrs: NormAttrs) -> bool:
    rounds_alike = weight is None or attrs.rounded_to.itemsize <= input.dtype.itemsize
    is_alike = all(each is None or each.dtype == input.dtype for each in (weight, bias))
    return rounds_alike and is_alike and attrs.compute_dtype.itemsize <= 4


def _rms_norm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str) -> torch.Tensor:
    if input.numel() == 0:
        return fallback(input, weight, bias, attrs)
    from apex.normalization.fused_layer_norm import fused_rms_norm, fused_rms_norm_affine

    form = decoded(attrs)
    scale, _ = given(weight, bias, form)
    shape = (input.shape[-1],)
    out: torch.Tensor = (
        fused_rms_norm(input, shape, form.eps)
        if scale is None
        else fused_rms_norm_affine(input, scale, shape, form.eps)
    )
    return out.to(form.out_dtype).contiguous()


def _layer_norm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str) -> torch.Tensor:
    if input.numel() == 0:
        return fallback(input, weight, bias, attrs)
    from apex.normalization.fused_layer_norm import fused_layer_norm, fused_layer_norm_affine

    form = decoded(attrs)
    scale, shift = given(weight, bias, form)
    shape = (input.shape[-1],)
    out: torch.Tensor = (
        fused_layer_norm(input, shape, form.eps)
        if scale is None
        else fused_layer_norm_affine(input, scale, shift, shape, form.eps)
    )
    return out.to(form.out_dtype).contiguous()


_rms_operator = opaque(
    "apex_rms_norm",
    _rms_norm,
    fake,
    fallback=fallback,
    backward=gradients_by(_rms_norm),
    kernel_id="apex.rms_norm",
)
_layer_operator = opaque(
    "apex_layer_norm",
    _layer_norm,
    fake,
    fallback=fallback,
    backward=gradients_by(_layer_norm),
    kernel_id="apex.layer_norm",
)

norm = norm_by(_rms_operator, _takes)
layer_norm = norm_by(_layer_operator, _takes)
