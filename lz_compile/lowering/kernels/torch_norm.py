"""PyTorch's own RMSNorm and LayerNorm. They compute in float32 at least and round once, at the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lz_compile.lowering.ops.norm import NormAttrs


def norm(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    attrs: NormAttrs,
) -> torch.Tensor:
    """Normalisation in the op's canonical layout (see ``lowering/ops/norm.py``)."""
    given = [each for each in (weight, bias) if each is not None]
    common = input.dtype
    for each in given:
        common = torch.promote_types(common, each.dtype)
    if attrs.out_dtype.itemsize > common.itemsize:
        common = torch.promote_types(common, attrs.out_dtype)
    input = input if input.dtype == common else input.to(common)
    weight, bias = (each if each is None or each.dtype == common else each.to(common) for each in (weight, bias))
    if weight is not None and attrs.weight_offset:
        weight = weight + attrs.weight_offset
    shape = (input.shape[-1],)
    if attrs.is_centred:
        out = F.layer_norm(input, shape, weight, bias, attrs.eps)
    else:
        out = F.rms_norm(input, shape, weight, attrs.eps)
        out = out if bias is None else out + bias
    return out if out.dtype == attrs.out_dtype else out.to(attrs.out_dtype)
