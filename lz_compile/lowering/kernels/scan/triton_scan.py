"""A scan in Triton, step by step (``triton_source.py``).

Triton is imported when a kernel is called.
"""

from __future__ import annotations

from lz_compile.lowering.kernel_operator import kernel_operator, when_called
from lz_compile.lowering.kernels.scan.chunked_scan import in_few_steps
from lz_compile.lowering.ops import scan as op

_SOURCE = "lz_compile.lowering.kernels.scan.triton_source"

scan = kernel_operator(
    "triton_scan",
    op,
    when_called(_SOURCE, "forward"),
    backward=when_called(_SOURCE, "backward"),
    fallback=in_few_steps,
    kernel_id="lz.triton_scan",
    is_cuda_graph_safe=True,
)
