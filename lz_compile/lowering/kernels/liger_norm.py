"""Liger-Kernel's RMSNorm and LayerNorm. Its mode ``gemma`` computes in float32 and rounds once, as no other mode does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.row_norm import decoded, fake, fallback, given, gradients_by, norm_by

if TYPE_CHECKING:
    from lz_compile.lowering.ops.norm import NormAttrs

#: The longest row (``MAX_FUSED_SIZE``); Liger refuses longer ones.
LARGEST = 65536


def _takes(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, attrs: NormAttrs) -> bool:
    return attrs.compute_dtype.itemsize <= 4


def _rms_norm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str) -> torch.Tensor:
    if input.numel() == 0 or input.shape[-1] > LARGEST:
        return fallback(input, weight, bias, attrs)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    form = decoded(attrs)
    scale, _ = given(weight, bias, form)
    out: torch.Tensor = LigerRMSNormFunction.apply(input, scale, form.eps, form.weight_offset, "gemma", False)
    return out.to(form.out_dtype).contiguous()


def _layer_norm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str) -> torch.Tensor:
    if input.numel() == 0 or input.shape[-1] > LARGEST:
        return fallback(input, weight, bias, attrs)
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    form = decoded(attrs)
    out: torch.Tensor = LigerLayerNormFunction.apply(input, weight, bias, form.eps)
    return out.to(form.out_dtype).contiguous()


_rms_operator = opaque(
    "liger_rms_norm",
    _rms_norm,
    fake,
    fallback=fallback,
    backward=gradients_by(_rms_norm),
    kernel_id="liger.rms_norm",
)
_layer_operator = opaque(
    "liger_layer_norm",
    _layer_norm,
    fake,
    fallback=fallback,
    backward=gradients_by(_layer_norm),
    kernel_id="liger.layer_norm",
)

norm = norm_by(_rms_operator, _takes)
layer_norm = norm_by(_layer_operator, _takes)
