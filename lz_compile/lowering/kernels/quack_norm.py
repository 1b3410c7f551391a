"""QuACK's RMSNorm: ``quack.rmsnorm``, written in CuTe-DSL. It computes in float32 and rounds once, to any of its dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.row_norm import decoded, fake, fallback, given, gradients_by, norm_by

if TYPE_CHECKING:
    from lz_compile.lowering.ops.norm import NormAttrs

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _takes(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, attrs: NormAttrs) -> bool:
    dtypes = [attrs.out_dtype, attrs.compute_dtype, *(each.dtype for each in (weight, bias) if each is not None)]
    return all(dtype in _DTYPES for dtype in dtypes)


def _rms_norm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str) -> torch.Tensor:
    if input.numel() == 0:
        return fallback(input, weight, bias, attrs)
    from quack import rmsnorm

    form = decoded(attrs)
    scale, shift = given(weight, bias, form)
    out: torch.Tensor = rmsnorm(
        input, scale, bias=shift, out_dtype=form.out_dtype, eps=form.eps, weight_offset=form.weight_offset
    )
    return out.contiguous()


_operator = opaque(
    "quack_rmsnorm",
    _rms_norm,
    fake,
    fallback=fallback,
    backward=gradients_by(_rms_norm),
    kernel_id="quack.rmsnorm",
)

norm = norm_by(_operator, _takes)
