"""Activations of an MLP in Triton (see ``lowering/kernels/mlp/triton_source.py``), which is imported when it is called."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import mlp as op
from lz_compile.lowering.ops.mlp import MlpAttrs, Operands


def _run(x: Operands, attrs: MlpAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.mlp.triton_source import forward

    return forward(x.gate, x.up, attrs)


def _gradients(gradient: torch.Tensor, x: Operands, attrs: MlpAttrs) -> dict[str, torch.Tensor | None]:
    from lz_compile.lowering.kernels.mlp.triton_source import backward

    return dict(zip(op.DIFFERENTIABLE, backward(gradient, x.gate, x.up, attrs), strict=True))


_operator = kernel_operator(
    "triton_activation", op, _run, backward=_gradients, kernel_id="lz.triton_mlp", is_cuda_graph_safe=True
)


def mlp(x: Operands, attrs: MlpAttrs) -> torch.Tensor:
    """Activations in the op's canonical layout (see ``lowering/ops/mlp.py``), without biases and limits."""
    assert x.gate_bias is None, "lz.triton_mlp is given a bias"
    assert x.up_bias is None, "lz.triton_mlp is given a bias"
    assert (attrs.limit, attrs.up_offset) == (None, 0.0), "lz.triton_mlp is asked for a limit or an offset"
    result: torch.Tensor = _operator(x, attrs)
    return result
