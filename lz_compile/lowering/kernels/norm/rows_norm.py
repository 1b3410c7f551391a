"""PyTorch's own operations on pieces of rows of one size, so that a row has the same bits in every batch."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.norm import torch_norm
from lz_compile.lowering.ops import norm as op
from lz_compile.lowering.rows import in_tiles


def _rows(x: op.Operands, attrs: op.Attributes) -> torch.Tensor:
    return in_tiles(op, torch_norm.norm, x, attrs)


norm = kernel_operator("row_norm", op, _rows, kernel_id="lz.row_norm")
