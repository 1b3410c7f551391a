"""RMSNorm and LayerNorm in Triton (see ``lowering/triton/norm.py``), which is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lz_compile.lowering.encoded_attributes import encode
from lz_compile.lowering.fused import Fused
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.norm import NormAttrs
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


def residual_norm(
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    fused: Mapping[str, Fused],
    attrs: NormAttrs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum of two tensors, and the sum, in the op's canonical layout (see ``lowering/fused.py``)."""
    from lz_compile.lowering.triton.residual import residual_norm

    given = fused["input"].operands
    operands = (given["input"].new_empty(0) if each is None else each for each in (weight, bias))
    result: tuple[torch.Tensor, torch.Tensor] = residual_norm(
        given["input"], given["residual"], *operands, encode(attrs)
    )
    return result
