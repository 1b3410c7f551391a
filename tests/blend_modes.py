"""What a blend of ``[4, 6, ...]`` is given in each mode, for the tests of the function and of the module."""

from __future__ import annotations

import torch
from torch import Tensor

import lz_compile as lz

M = lz.BlendMode
ALPHA = torch.tensor(0.4)


def alpha_of(mode: lz.BlendMode) -> Tensor:
    """One number, or one for each of six channels."""
    return torch.rand(6) if mode is M.CHANNEL else ALPHA.clone()


def extras_of(mode: lz.BlendMode, rows: int) -> dict[str, Tensor]:
    """The logits of a gate."""
    if mode is M.CONFIDENCE:
        return {"logits": torch.randn(rows, 9, requires_grad=True)}
    return {"gate_logits": torch.randn(rows, 2, requires_grad=True)} if mode is M.SOFT_GATE else {}
