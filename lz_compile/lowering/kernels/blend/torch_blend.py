"""Plain PyTorch operations, which Inductor fuses: a blend as it stands, and a margin by two maxima instead of a sort."""

from __future__ import annotations

import torch

from lz_compile.lowering.ops.blend import BlendAttrs, Operands, compute, picked_margin, top2_margin


def blend(x: Operands, attrs: BlendAttrs) -> torch.Tensor:
    """A blend in the op's canonical layout (see ``lowering/ops/blend.py``)."""
    margin = picked_margin if attrs.is_differentiated else top2_margin
    return compute(x, attrs, margin)
