"""PyTorch's own RMSNorm and LayerNorm. They compute in float32 at least and round once, at the end."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from lz_compile.lowering.ops.norm import NormAttrs, Operands


def norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    """Normalisation in the op's canonical layout (see ``lowering/ops/norm.py``)."""
    common = functools.reduce(torch.promote_types, (each.dtype for each in x.given().values()))
    if attrs.out_dtype.itemsize > common.itemsize:
        common = torch.promote_types(common, attrs.out_dtype)
    input, weight, bias = x.map(lambda each: each if each.dtype == common else each.to(common)).flat()
    if weight is not None and attrs.weight_offset:
        weight = weight + attrs.weight_offset
    shape = (input.shape[-1],)
    out: torch.Tensor
    if attrs.is_centred:
        out = F.layer_norm(input, shape, weight, bias, attrs.eps)
    else:
        out = F.rms_norm(input, shape, weight, attrs.eps)
        out = out if bias is None else out + bias
    return out if out.dtype == attrs.out_dtype else out.to(attrs.out_dtype)
