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


def _norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    from apex.normalization import fused_layer_norm as apex

    name, shape = f"fused_{attrs.variant}_norm", (x.input.shape[-1],)
    weights = (x.weight, x.bias) if attrs.is_centred else (x.weight,)
    out: torch.Tensor = (
        getattr(apex, name)(x.input, shape, attrs.eps)
        if x.weight is None
        else getattr(apex, f"{name}_affine")(x.input, *weights, shape, attrs.eps)
    )
    return out


norm = library_norm("apex_rms_norm", _norm, _takes, kernel_id="apex.rms_norm")
layer_norm = library_norm("apex_layer_norm", _norm, _takes, kernel_id="apex.layer_norm")
