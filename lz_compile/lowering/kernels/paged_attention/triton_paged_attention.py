"""Attention over a cache in blocks in Triton (``triton_source.py``, which is imported when it is called)."""

from __future__ import annotations

from lz_compile.lowering.kernel_operator import kernel_operator, when_called
from lz_compile.lowering.ops import paged_attention as op

_run = when_called("lz_compile.lowering.kernels.paged_attention.triton_source")
paged_attention = kernel_operator(
    "triton_paged_attention", op, _run, kernel_id="lz.triton_paged_attention", is_cuda_graph_safe=True
)
