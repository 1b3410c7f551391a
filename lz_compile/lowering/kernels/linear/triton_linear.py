"""A product with a stored weight in Triton (``triton_source.py``, which is imported when it is called)."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import linear as op
from lz_compile.lowering.ops.linear import LinearAttrs, Operands


def _linear(x: Operands, attrs: LinearAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.linear.triton_source import run

    return run(x, attrs)


linear = kernel_operator("triton_linear", op, _linear, kernel_id="lz.triton_linear", is_cuda_graph_safe=True)
