"""Attention over a cache in blocks in Triton (``triton_source.py``, which is imported when it is called)."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs


def _paged_attention(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.paged_attention.triton_source import run

    return run(x, attrs)


paged_attention = kernel_operator(
    "triton_paged_attention", op, _paged_attention, kernel_id="lz.triton_paged_attention", is_cuda_graph_safe=True
)
