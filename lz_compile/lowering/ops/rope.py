"""Rotary position embedding: every pair of features is turned by an angle of its position.

Canonical layout, in which every kernel takes and returns it:

    input   [B, H, S, D]
    cos     [B | 1, 1, S | 1, W], ``W`` is the rotary width R, or R / 2 where both features of a pair share an entry
    sin     as ``cos``
    result  [B, H, S, D] in ``attrs.out_dtype``

The features from ``rotary_start`` to ``rotary_start + rotary_dim`` are turned, the others are kept. Pair ``i`` has the
features ``2 i`` and ``2 i + 1`` of these where ``is_interleaved``, ``i`` and ``i + R / 2`` otherwise. With ``(a, b)`` the
pair, and ``c`` and ``s`` what the tables hold at the feature that is computed,

    a' = a * c - b * s        b' = b * c + a * s

Nothing asks of the tables that they are a cosine and a sine.

**Source** Su et al., RoFormer, equation 34.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lz_compile.ground.sizes import Size
from lz_compile.lowering import operands as base
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.operands import MisfitError, operands
from lz_compile.lowering.sample import Asked, Sample, sampler

LAYOUT = "BHSD"
EXACT_DIMS = ("head_dim", "rotary_dim")
TIMELESS_FEATURES: frozenset[str] = frozenset({"table_gradients"})
BUCKETED_DIMS = (("batch_size", "num_heads", "seq_len_q"),)
#: Two embeddings can be computed together where these operands are the same, and facts but for those.
SIBLINGS_SHARE, SIBLINGS_DIFFER = ("cos", "sin"), ("heads",)


@dataclass(frozen=True)
class RopeAttrs(OpAttributes):
    """The attributes of one rotary embedding.

    ``has_half_tables`` says that the tables have one entry for each pair. ``compute_dtype`` is the widest in which the
    source multiplies; a kernel may round less, never more.
    """

    is_interleaved: bool = False
    rotary_dim: int = 0
    rotary_start: int = 0
    has_half_tables: bool = False
    compute_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32

    @property
    def variant(self) -> str:
        """``interleaved`` or ``half``."""
        return "interleaved" if self.is_interleaved else "half"


Attributes = RopeAttrs
DIFFERENTIABLE = ("input",)


@dataclass(frozen=True)
class RopeFacts:
    """Sizes, dtypes (of the input and of the tables) and device of one rotary embedding, for kernel selection."""

    batch: Size
    heads: Size
    query_len: Size
    head_dim: Size
    rotary_dim: Size
    dtype: torch.dtype
    device: str
    table_dtype: torch.dtype = torch.float32
    needs_grad: bool = False
    tables_need_grad: bool = False


SHAPES: Mapping[str, str] = {"input": "B H S D", "cos": "B|1 1 S|1 W", "sin": "B|1 1 S|1 W"}
TYPICAL_SIZES: Mapping[str, tuple[int, ...]] = {
    "batch_size": (1,),
    "num_heads": (8,),
    "seq_len_q": (128, 512, 2048),
    "head_dim": (64,),
}
SIZES_FOLLOW: Mapping[str, str] = {"rotary_dim": "head_dim"}


@operands
class Operands(base.Operands):
    """What is turned, and the tables; shapes as in the module's legend."""

    input: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def from_operands(x: Operands, sizes: Mapping[str, int], **given: Any) -> tuple[RopeAttrs, RopeFacts]:
    """The attributes, of which some are given, and the facts of an embedding over tensors (real or fake).

    Tables of half as many entries as the input has features are those of its pairs; any other width is that of what is
    turned, unless ``rotary_dim`` says otherwise.
    """
    entries, width = sizes["W"], sizes["D"]
    turned = given.get("rotary_dim", width if entries * 2 == width else entries)
    start = given.get("rotary_start", 0)
    if entries not in (turned, turned / 2) or turned % 2 or turned + start > width:
        expected = f"of rotary_dim or half as many entries, where an even number of {width} features is turned"
        raise MisfitError("rope", "cos", expected, f"{entries} entries for {turned} features from {start} on")
    dtype = x.input.dtype
    found = {"out_dtype": dtype, **given, "rotary_dim": turned, "has_half_tables": entries != turned}
    attrs = RopeAttrs(**{"compute_dtype": x.wide(RopeAttrs()), **found})
    batch, heads, length = (sizes[each] for each in "BHS")
    wants = x.wants_gradient(), x.wants_gradient("cos", "sin")
    return attrs, RopeFacts(batch, heads, length, width, turned, dtype, x.input.device.type, x.cos.dtype, *wants)


def fake(x: Operands, attrs: RopeAttrs) -> torch.Tensor:
    """An empty result, in the input's memory order as kernels give it."""
    return torch.empty_like(x.input, dtype=attrs.out_dtype)


def reference(x: Operands, attrs: RopeAttrs) -> torch.Tensor:
    """The definition of the op, in float32 or the widest dtype of its operands (float64 is every test's ground truth)."""
    wide = x.wide(attrs)
    width, start = attrs.rotary_dim, attrs.rotary_start
    before, turned, after = x.input.split((start, width, x.input.shape[-1] - start - width), -1)
    cos, sin = (each.to(wide) for each in (x.cos, x.sin))
    if attrs.has_half_tables:
        cos, sin = (joined(each, each, attrs.is_interleaved) for each in (cos, sin))
    first, second = pairs(turned.to(wide), attrs.is_interleaved)
    turned = turned * cos + joined(-second, first, attrs.is_interleaved) * sin
    return torch.cat((before.to(attrs.out_dtype), turned.to(attrs.out_dtype), after.to(attrs.out_dtype)), -1)


def pairs(features: torch.Tensor, is_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second of every pair: [..., R] to twice [..., R / 2]."""
    if is_interleaved:
        return features[..., ::2], features[..., 1::2]
    first, second = features.chunk(2, -1)
    return first, second


def joined(first: torch.Tensor, second: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """The inverse of :func:`pairs`."""
    return torch.stack((first, second), -1).flatten(-2) if is_interleaved else torch.cat((first, second), -1)


def features(attrs: RopeAttrs, facts: RopeFacts) -> dict[str, str]:
    """What a kernel must support for this embedding: feature name (``supports`` in descriptors) and what asks for it."""
    is_partial = attrs.rotary_dim != facts.head_dim
    is_wider = attrs.out_dtype.itemsize > facts.dtype.itemsize
    needed = {
        "interleaved": attrs.is_interleaved and "pairs of neighbouring features",
        "half_tables": attrs.has_half_tables and "tables with one entry for each pair",
        "partial": is_partial and f"{attrs.rotary_dim} of {facts.head_dim} features",
        "rotary_start": attrs.rotary_start > 0 and f"{attrs.rotary_start} features before those that are turned",
        "mixed_dtypes": facts.table_dtype != facts.dtype and f"{facts.table_dtype} tables for a {facts.dtype} input",
        "wide_result": is_wider and f"a {attrs.out_dtype} result of a {facts.dtype} input",
        "training": facts.needs_grad and "gradients",
        "table_gradients": facts.tables_need_grad and "gradients of the tables",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}


def _written(attrs: RopeAttrs, given: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, kept = given[..., : attrs.rotary_dim], given[..., attrs.rotary_dim :]
    first, second = pairs(turned, attrs.is_interleaved)
    turned = turned * cos + joined(-second, first, attrs.is_interleaved) * sin
    return torch.cat((turned, kept), -1) if kept.shape[-1] else turned


@sampler()
def sample(asked: Asked) -> Sample:
    """A problem of given sizes with a random input; the first features are turned."""
    batch, heads, length, width = asked.of("batch_size", "num_heads", "seq_len_q", "head_dim")
    turned, dtype, device = asked.sizes.get("rotary_dim", width), asked.dtype, asked.device
    angles = torch.arange(length, device=device)[:, None] * 1e4 ** -torch.linspace(0, 1, turned // 2, device=device)
    angles = torch.cat((angles, angles), -1)[None, None]
    inputs = (asked.random(batch, heads, length, width), angles.cos().to(dtype), angles.sin().to(dtype))
    return Sample.of(inputs, Operands, _written, rotary_dim=turned, compute_dtype=dtype)
