"""Plain PyTorch operations, which Inductor fuses: a blend as it stands, and a margin by two maxima instead of a sort."""

from __future__ import annotations

import torch

from lz_compile.lowering.ops.blend import BlendAttrs, Scalar, compute, picked_margin, top2_margin


def blend(
    host: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    alpha: Scalar = 1.0,
    host_weight: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    gain: Scalar = 1.0,
    offset: Scalar = 0.0,
    low: Scalar | None = None,
    high: Scalar | None = None,
    *,
    attrs: BlendAttrs,
) -> torch.Tensor:
    """A blend in the op's canonical layout (see ``lowering/ops/blend.py``)."""
    margin = picked_margin if attrs.is_differentiated else top2_margin
    return compute(host, seed, alpha, host_weight, logits, gain, offset, low, high, attrs=attrs, margin=margin)
