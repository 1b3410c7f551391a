"""RMSNorm and LayerNorm in Triton (see ``lowering/kernels/norm/triton_source.py``), which is imported when it is called."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import norm as op
from lz_compile.lowering.ops.norm import NormAttrs, Operands


def _norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.norm.triton_source import Norm

    return Norm(x.input, x.weight, x.bias, attrs).forward()[0]


def _gradients(gradient: torch.Tensor, x: Operands, attrs: NormAttrs) -> dict[str, torch.Tensor | None]:
    from lz_compile.lowering.kernels.norm.triton_source import Norm

    return dict(zip(x.names, Norm(x.input, x.weight, x.bias, attrs).backward(gradient), strict=True))


norm = kernel_operator(
    "triton_norm", op, _norm, backward=_gradients, kernel_id="lz.triton_norm", is_cuda_graph_safe=True
)


def residual_norm(x: Operands, attrs: NormAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum of two tensors, and the sum, in the op's canonical layout (see ``lowering/fused.py``)."""
    from lz_compile.lowering.kernels.norm.triton_residual import residual_norm

    return residual_norm(x, attrs)
