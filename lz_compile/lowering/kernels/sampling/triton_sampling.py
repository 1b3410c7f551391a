"""Sampling in Triton (``lowering/kernels/sampling/triton_source.py``), which is imported when it is called."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import sampling as op
from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs


def _sampling(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.sampling.triton_source import run

    return run(x, attrs)


sampling = kernel_operator("triton_sampling", op, _sampling, kernel_id="lz.triton_sampling", is_cuda_graph_safe=True)
