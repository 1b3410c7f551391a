"""Normalisation of rows: ``(x - mean) / sqrt(variance + eps) * weight + bias`` (LayerNorm), or without a mean (RMSNorm).

Canonical layout, in which every kernel takes and returns it:

    input   [N, D], each row is normalised by itself
    weight  [D], times the normalised row (plus ``weight_offset``)
    bias    [D], added at last
    result  [N, D] in ``attrs.out_dtype``

The variance is the mean of squares, of what is left after the mean is subtracted where ``is_centred``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeAlias

import torch

from lz_compile.ground.sizes import Size
from lz_compile.lowering import operands as base
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.operands import operands
from lz_compile.lowering.sample import Asked, Sample, sampler

#: Where ``eps`` stands: ``1 / sqrt(variance + eps)``, ``1 / (sqrt(variance) + eps)`` or ``1 / max(sqrt(variance), eps)``.
EpsAt: TypeAlias = Literal["inside", "outside", "floor"]

LAYOUT = "ND"
EAGER_KERNEL = "torch.norm"
EXACT_DIMS = ("hidden_size",)
TIMELESS_FEATURES: frozenset[str] = frozenset({"eps_outside", "eps_floor"})
BUCKETED_DIMS = (("num_rows",),)


@dataclass(frozen=True)
class NormAttrs(OpAttributes):
    """The attributes of one normalisation.

    ``compute_dtype`` is that in which the source sums squares, ``rounded_to`` the narrowest one that a normalised row
    passes through before the weight; both say how the source rounds. A kernel may round less, never more.
    """

    is_centred: bool = False
    eps: float = 0.0
    eps_at: EpsAt = "inside"
    has_weight: bool = False
    has_bias: bool = False
    weight_offset: float = 0.0
    compute_dtype: torch.dtype = torch.float32
    rounded_to: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32


Attributes = NormAttrs
DIFFERENTIABLE = ("input", "weight", "bias")


@dataclass(frozen=True)
class NormFacts:
    """Sizes, dtype (of the input) and device of one normalisation, for kernel selection."""

    num_rows: Size
    hidden_size: Size
    dtype: torch.dtype
    device: str
    needs_grad: bool = False


SHAPES: Mapping[str, str] = {"input": "N D", "weight": "D", "bias": "D"}
LENGTHS = ("N",)
VARIANT_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {"rms": {"is_centred": False}, "layer": {"is_centred": True}}
TYPICAL_SIZES: Mapping[str, tuple[int, ...]] = {"num_rows": (512, 4096), "hidden_size": (1024, 4096)}


@operands
class Operands(base.Operands):
    """Rows, and what a normalised row is multiplied by and added to; shapes as in the module's legend."""

    input: torch.Tensor
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def from_operands(x: Operands, sizes: Mapping[str, int], **given: Any) -> tuple[NormAttrs, NormFacts]:
    """The attributes, of which some are given, and the facts of a norm over tensors (real or fake)."""
    wide = reduce(torch.promote_types, (each.dtype for each in x.tensors), torch.float32)
    found = {"compute_dtype": wide, "rounded_to": wide, "out_dtype": x.input.dtype, **given}
    attrs = NormAttrs(**{**found, **x.has("weight", "bias")})
    device = x.input.device.type
    return attrs, NormFacts(sizes["N"], sizes["D"], x.input.dtype, device, x.wants_gradient())


def fake(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    """An empty result, contiguous as kernels give it."""
    return x.input.new_empty(x.input.shape, dtype=attrs.out_dtype)


def reference(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    """The definition of the op, in float32 or the wider dtype of its input (float64 is the ground truth of every test)."""
    wide = torch.promote_types(torch.promote_types(x.input.dtype, attrs.compute_dtype), torch.float32)
    row = x.input.to(wide)
    if attrs.is_centred:
        row = row - row.mean(-1, keepdim=True)
    variance = row.square().mean(-1, keepdim=True)
    if attrs.eps_at == "inside":
        row = row * torch.rsqrt(variance + attrs.eps)
    elif attrs.eps_at == "outside":
        row = row / (variance.sqrt() + attrs.eps)
    else:
        row = row / variance.sqrt().clamp(min=attrs.eps)
    if x.weight is not None:
        row = row * (x.weight.to(wide) + attrs.weight_offset)
    if x.bias is not None:
        row = row + x.bias.to(wide)
    return row.to(attrs.out_dtype)


def features(attrs: NormAttrs, facts: NormFacts) -> dict[str, str]:
    """What a kernel must support for this normalisation: feature name (``supports`` in descriptors) and what asks for it."""
    is_wider = attrs.out_dtype.itemsize > facts.dtype.itemsize
    needed = {
        "weight": attrs.has_weight and "a weight",
        "bias": attrs.has_bias and "a bias",
        "weight_offset": attrs.weight_offset != 0 and f"{attrs.weight_offset:g} added to the weight",
        "eps_outside": attrs.eps_at == "outside" and "an epsilon outside of the root",
        "eps_floor": attrs.eps_at == "floor" and "an epsilon below which the root does not fall",
        "wide_result": is_wider and f"a {attrs.out_dtype} result of a {facts.dtype} input",
        "training": facts.needs_grad and "gradients",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}


def _written(attrs: NormAttrs, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    row = given.float()
    row = row - row.mean(-1, keepdim=True) if attrs.is_centred else row
    row = row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + attrs.eps)
    return weight * row.to(given.dtype)


@sampler("rms")
def sample(asked: Asked) -> Sample:
    """A problem of given sizes with random inputs."""
    rows, hidden = asked.of("num_rows", "hidden_size")
    told = {"is_centred": asked.variant == "layer", "eps": 1e-6, "rounded_to": asked.dtype}
    return Sample.of((asked.random(rows, hidden), asked.random(hidden)), Operands, _written, **told)
