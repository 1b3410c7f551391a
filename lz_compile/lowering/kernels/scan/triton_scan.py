"""A scan in Triton, step by step (``triton_source.py``).

Triton is imported when a kernel is called.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.scan.chunked_scan import in_few_steps
from lz_compile.lowering.ops import scan as op
from lz_compile.lowering.ops.scan import Operands, ScanAttrs


def _run(x: Operands, attrs: ScanAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    from lz_compile.lowering.kernels.scan.triton_source import Scan

    return Scan(x, attrs).forward()


def _gradients(
    gradients: tuple[torch.Tensor, torch.Tensor], x: Operands, attrs: ScanAttrs
) -> dict[str, torch.Tensor | None]:
    from lz_compile.lowering.kernels.scan.triton_source import Scan

    return {**Scan(x, attrs).backward(*gradients)}


scan = kernel_operator(
    "triton_scan",
    op,
    _run,
    backward=_gradients,
    fallback=in_few_steps,
    kernel_id="lz.triton_scan",
    is_cuda_graph_safe=True,
)
