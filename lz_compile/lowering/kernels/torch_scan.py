"""A scan step by step in plain PyTorch: what Inductor fuses where steps are few, and what an eager call falls back to."""

from __future__ import annotations

import torch

from lz_compile.lowering.ops.scan import ScanAttrs, reference


def scan(
    state: torch.Tensor | None = None,
    decay: torch.Tensor | None = None,
    left: torch.Tensor | None = None,
    right: torch.Tensor | None = None,
    erase: torch.Tensor | None = None,
    drive: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    *,
    attrs: ScanAttrs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan in the op's canonical layout (see ``lowering/ops/scan.py``); every step is nodes of its own in a graph."""
    return reference(state, decay, left, right, erase, drive, query, attrs=attrs)
