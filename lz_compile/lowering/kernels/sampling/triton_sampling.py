"""Sampling in Triton (``lowering/kernels/sampling/triton_source.py``), which is imported when it is called."""

from __future__ import annotations

from lz_compile.lowering.kernel_operator import kernel_operator, when_called
from lz_compile.lowering.ops import sampling as op

_run = when_called("lz_compile.lowering.kernels.sampling.triton_source")
sampling = kernel_operator("triton_sampling", op, _run, kernel_id="lz.triton_sampling", is_cuda_graph_safe=True)
