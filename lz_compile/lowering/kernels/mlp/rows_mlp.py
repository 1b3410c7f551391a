"""PyTorch's own operations on pieces of rows of one size, so that a row has the same bits in every batch."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.mlp import torch_mlp
from lz_compile.lowering.ops import mlp as op
from lz_compile.lowering.rows import in_tiles


def _rows(x: op.Operands, attrs: op.Attributes) -> torch.Tensor:
    return in_tiles(op, torch_mlp.mlp, x, attrs)


mlp = kernel_operator("row_mlp", op, _rows, kernel_id="lz.row_mlp")
