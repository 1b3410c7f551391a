"""A scan step by step in plain PyTorch: what Inductor fuses where steps are few, and what an eager call falls back to."""

from __future__ import annotations

import torch

from lz_compile.lowering.ops.scan import Operands, ScanAttrs, reference


def scan(x: Operands, attrs: ScanAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan in the op's canonical layout (see ``lowering/ops/scan.py``); every step is nodes of its own in a graph."""
    return reference(x, attrs)
