"""RMSNorm and LayerNorm in Triton (see ``lowering/triton/norm.py``), which is imported when it is called."""

from __future__ import annotations

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.row_norm import decoded, fake, fallback, given, norm_by


def _norm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str) -> torch.Tensor:
    from lz_compile.lowering.triton.norm import Norm

    form = decoded(attrs)
    return Norm(input, *given(weight, bias, form), form).forward()[0]


def _gradients(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of input, weight and bias."""
    from lz_compile.lowering.triton.norm import Norm

    form = decoded(attrs)
    found, *weights = Norm(input, *given(weight, bias, form), form).backward(gradient)
    pairs = zip(weights, (weight, bias), strict=True)
    of_weight, of_bias = (torch.empty_like(operand) if of_it is None else of_it for of_it, operand in pairs)
    return found, of_weight, of_bias


_operator = opaque(
    "triton_norm",
    _norm,
    fake,
    fallback=fallback,
    backward=_gradients,
    kernel_id="lz.triton_norm",
    is_cuda_graph_safe=True,
)

norm = norm_by(_operator)
