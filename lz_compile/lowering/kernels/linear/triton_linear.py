"""A product with a stored weight in Triton (``triton_source.py``, which is imported when it is called)."""

from __future__ import annotations

from lz_compile.lowering.kernel_operator import kernel_operator, when_called
from lz_compile.lowering.ops import linear as op

_run = when_called("lz_compile.lowering.kernels.linear.triton_source")
linear = kernel_operator("triton_linear", op, _run, kernel_id="lz.triton_linear", is_cuda_graph_safe=True)
