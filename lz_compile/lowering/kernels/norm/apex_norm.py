"""Apex's fused RMSNorm and LayerNorm.

They compute in float32, round the normalised row to the weight's dtype, and multiply in that: nothing for a source that
rounds only once.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.kernels.norm.row_norm import library_norm
from lz_compile.lowering.ops.norm import NormAttrs, Operands


def _takes(x: Operands, attrs: NormAttrs) -> bool:
    rounds_alike = x.weight is None or attrs.rounded_to.itemsize <= x.input.dtype.itemsize
    is_alike = all(each.dtype == x.input.dtype for each in x.given().values())
    return rounds_alike and is_alike and attrs.compute_dtype.itemsize <= 4


def _rms_norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    from apex.normalization.fused_layer_norm import fused_rms_norm, fused_rms_norm_affine

    shape = (x.input.shape[-1],)
    out: torch.Tensor = (
        fused_rms_norm(x.input, shape, attrs.eps)
        if x.weight is None
        else fused_rms_norm_affine(x.input, x.weight, shape, attrs.eps)
    )
    return out


def _layer_norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    from apex.normalization.fused_layer_norm import fused_layer_norm, fused_layer_norm_affine

    shape = (x.input.shape[-1],)
    out: torch.Tensor = (
        fused_layer_norm(x.input, shape, attrs.eps)
        if x.weight is None
        else fused_layer_norm_affine(x.input, x.weight, x.bias, shape, attrs.eps)
    )
    return out


norm = library_norm("apex_rms_norm", _rms_norm, _takes, kernel_id="apex.rms_norm")
layer_norm = library_norm("apex_layer_norm", _layer_norm, _takes, kernel_id="apex.layer_norm")
