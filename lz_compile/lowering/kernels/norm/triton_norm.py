"""RMSNorm and LayerNorm in Triton (see ``triton_source.py``), which is imported when it is called, without gradients.

With a residual before, one launch gives both: ``norm(input + residual), input + residual``. The sum is rounded to the input's
dtype before it is normalised, as if it had been written and read again. PyTorch computes rows that no block holds.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.fused import Fused
from lz_compile.lowering.kernel_operator import definition, kernel_operator
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops import norm as op
from lz_compile.lowering.ops.norm import NormAttrs, Operands

#: The longest row that is kept in registers.
LARGEST = 16384


def _norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    if x.input.shape[1] > LARGEST:
        found: torch.Tensor = definition(op)(x, attrs)
        return found
    from lz_compile.lowering.kernels.norm.triton_source import forward

    return forward(x, attrs)[0]


norm = kernel_operator("triton_norm", op, _norm, kernel_id="lz.triton_norm", is_cuda_graph_safe=True)


def residual_norm(x: Operands, attrs: NormAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum of two tensors, and the sum, in the op's canonical layout (see ``lowering/fused.py``)."""
    given = cast(Fused, x.input).operands
    found = _residual_operator(given["input"], given["residual"], x.weight, x.bias, encode(attrs))
    return found[0], found[1]


def _residual(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, attrs: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if input.shape[1] > LARGEST:
        return _residual_fallback(input, residual, weight, bias, attrs)
    from lz_compile.lowering.kernels.norm.triton_source import forward

    return forward(Operands(input, weight, bias), decode(NormAttrs, attrs), residual)


def _residual_fake(input: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return op.fake(Operands(input), decode(NormAttrs, others[-1])), input.new_empty(input.shape)


def _residual_fallback(input: torch.Tensor, residual: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total = (input + residual).contiguous()
    return definition(op)(Operands(total, *others[:2]), decode(NormAttrs, others[2])), total


_residual_operator = opaque(
    "triton_residual_norm",
    _residual,
    _residual_fake,
    fallback=_residual_fallback,
    kernel_id="lz.triton_residual_norm",
    is_cuda_graph_safe=True,
)
