"""FlashInfer's RMSNorm: ``flashinfer.norm.rmsnorm``, and ``gemma_rmsnorm`` where one is added to the weight."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernels.norm.row_norm import library_norm
from lz_compile.lowering.ops.norm import NormAttrs, Operands


def _takes(x: Operands, attrs: NormAttrs) -> bool:
    """Its kernels read the weight in the input's dtype; rounding a wider one would round more than the source does."""
    is_alike = x.weight is not None and x.weight.dtype == x.input.dtype
    return is_alike and attrs.weight_offset in (0.0, 1.0) and attrs.compute_dtype.itemsize <= 4


def _rms_norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    from flashinfer.norm import gemma_rmsnorm, rmsnorm

    assert x.weight is not None, "what it takes has a weight"
    function = gemma_rmsnorm if attrs.weight_offset else rmsnorm
    rows = x.input.contiguous()  # its kernels assume that rows start at multiples of 16 bytes
    result = rows.new_empty(rows.shape)
    function(rows, x.weight.contiguous(), eps=attrs.eps, out=result)
    return result


norm = library_norm("flashinfer_rmsnorm", _rms_norm, _takes, kernel_id="flashinfer.rmsnorm", has_backward=False)
