"""A product with a stored weight in plain PyTorch: dequantised, then multiplied, which Inductor fuses as it can."""

from __future__ import annotations

import torch

from lz_compile.lowering.ops.linear import LinearAttrs, Operands, reference


def linear(x: Operands, attrs: LinearAttrs) -> torch.Tensor:
    """The product in the op's canonical layout (see ``lowering/ops/linear.py``)."""
    return reference(x, attrs)
