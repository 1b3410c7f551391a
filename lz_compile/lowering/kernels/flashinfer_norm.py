"""FlashInfer's RMSNorm: ``flashinfer.norm.rmsnorm``, and ``gemma_rmsnorm`` where one is added to the weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.row_norm import decoded, fake, fallback, norm_by

if TYPE_CHECKING:
    from lz_compile.lowering.ops.norm import NormAttrs


def _takes(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, attrs: NormAttrs) -> bool:
    """Its kernels read the weight in the input's dtype; rounding a wider one would round more than the source does."""
    is_alike = weight is not None and weight.dtype == input.dtype
    return is_alike and attrs.weight_offset in (0.0, 1.0) and attrs.compute_dtype.itemsize <= 4


def _rms_norm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str) -> torch.Tensor:
    if input.numel() == 0:
        return fallback(input, weight, bias, attrs)
    from flashinfer.norm import gemma_rmsnorm, rmsnorm

    form = decoded(attrs)
    function = gemma_rmsnorm if form.weight_offset else rmsnorm
    input = input.contiguous()  # its kernels assume that rows start at multiples of 16 bytes
    result = input.new_empty(input.shape)
    function(input, weight.contiguous(), eps=form.eps, out=result)
    return result.to(form.out_dtype)


_operator = opaque("flashinfer_rmsnorm", _rms_norm, fake, fallback=fallback, kernel_id="flashinfer.rmsnorm")

norm = norm_by(_operator, _takes)
