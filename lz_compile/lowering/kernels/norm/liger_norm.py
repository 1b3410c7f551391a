"""Liger-Kernel's RMSNorm and LayerNorm. Its mode ``gemma`` computes in float32 and rounds once, as no other mode does."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernels.norm.row_norm import library_norm
from lz_compile.lowering.ops.norm import NormAttrs, Operands

#: The longest row (``MAX_FUSED_SIZE``); Liger refuses longer ones.
LARGEST = 65536


def _takes(x: Operands, attrs: NormAttrs) -> bool:
    return attrs.compute_dtype.itemsize <= 4 and x.input.shape[-1] <= LARGEST


def _rms_norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    found: torch.Tensor = LigerRMSNormFunction.apply(x.input, x.weight, attrs.eps, attrs.weight_offset, "gemma", False)
    return found


def _layer_norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    found: torch.Tensor = LigerLayerNormFunction.apply(x.input, x.weight, x.bias, attrs.eps)
    return found


norm = library_norm("liger_rms_norm", _rms_norm, _takes, kernel_id="liger.rms_norm")
layer_norm = library_norm("liger_layer_norm", _layer_norm, _takes, kernel_id="liger.layer_norm")
