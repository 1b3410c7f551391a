"""Plain PyTorch operations, each of which rounds to the source's dtype: what Inductor fuses into one kernel."""

from __future__ import annotations

import torch

from lz_compile.lowering.ops.mlp import MlpAttrs, compute


def mlp(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    attrs: MlpAttrs,
) -> torch.Tensor:
    """Activations in the op's canonical layout (see ``lowering/ops/mlp.py``)."""
    common = torch.promote_types(gate.dtype, attrs.compute_dtype)
    for each in (up, gate_bias, up_bias):
        common = common if each is None else torch.promote_types(common, each.dtype)
    out = compute(gate, up, gate_bias, up_bias, attrs, common)
    return out if out.dtype == attrs.out_dtype else out.to(attrs.out_dtype)
