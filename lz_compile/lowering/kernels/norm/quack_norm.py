"""QuACK's RMSNorm: ``quack.rmsnorm``, written in CuTe-DSL. It computes in float32 and rounds once, to any of its dtypes."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernels.norm.row_norm import library_norm
from lz_compile.lowering.ops.norm import NormAttrs, Operands

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _takes(x: Operands, attrs: NormAttrs) -> bool:
    weights = (each.dtype for name, each in x.given().items() if name != "input")
    return all(dtype in _DTYPES for dtype in (attrs.out_dtype, attrs.compute_dtype, *weights))


def _rms_norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    from quack import rmsnorm

    found: torch.Tensor = rmsnorm(
        x.input, x.weight, bias=x.bias, out_dtype=attrs.out_dtype, eps=attrs.eps, weight_offset=attrs.weight_offset
    )
    return found


norm = library_norm("quack_rmsnorm", _rms_norm, _takes, kernel_id="quack.rmsnorm")
