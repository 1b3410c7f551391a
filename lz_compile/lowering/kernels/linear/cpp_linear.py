"""A product of a few rows with a stored weight on CPUs in C++ of our own (``cpp_source.py``)."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import linear as op
from lz_compile.lowering.ops.linear import LinearAttrs, Operands

#: Rows up to which reading the weight is what takes time; more are dequantised and multiplied by PyTorch.
MOST_ROWS = 16


def _linear(x: Operands, attrs: LinearAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.linear import cpp_source as code

    is_cut = attrs.packing.endswith("first") and x.input.shape[1] // op.groups_of(x) % 2  # a byte belongs to two groups
    if x.input.shape[0] > MOST_ROWS or is_cut:
        return op.reference(x, attrs)
    return code.run(x, attrs)


linear = kernel_operator("cpp_linear", op, _linear, kernel_id="lz.cpp_linear")
