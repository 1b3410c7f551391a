"""Plain PyTorch operations, each of which rounds to the source's dtype: what Inductor fuses into one kernel."""

from __future__ import annotations

import functools

import torch

from lz_compile.lowering.ops.mlp import MlpAttrs, Operands, compute


def mlp(x: Operands, attrs: MlpAttrs) -> torch.Tensor:
    """Activations in the op's canonical layout (see ``lowering/ops/mlp.py``)."""
    common = functools.reduce(torch.promote_types, (each.dtype for each in x.given().values()), attrs.compute_dtype)
    out = compute(x, attrs, common)
    return out if out.dtype == attrs.out_dtype else out.to(attrs.out_dtype)
