"""Mask tensors that a rewrite reads no more: what they hold, for proofs at other sizes.

A mask that was proven to be, say, causal is nothing that a kernel reads. The proof of the kernel still runs the original
subgraph, which does: there the tensor is made again from what it means, at the proof's sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band, Reach
from lz_compile.lowering.ops.attention import distances
from lz_compile.passes.formula.axes import Axis, Dims, atoms, axes_of
from lz_compile.passes.masks.meaning import Meaning
from lz_compile.passes.rewriting.builder import Builder

#: Bounds of bands in proofs, where there are few tokens, and the tiles of what masks reach there.
_NEAR = 3
_TILE = 4


@dataclass(frozen=True)
class Implied:
    """A mask tensor with axes ``dims`` that holds ``kept`` where ``meaning`` keeps, and ``dropped`` elsewhere.

    Where the meaning is not the whole of it, the tensor is still read; what the meaning drops is dropped in it.
    """

    meaning: Meaning
    dims: Dims
    kept: float | bool
    dropped: float | bool | None

    def __str__(self) -> str:
        meaning = self.meaning
        factor = None if meaning.slopes is None else meaning.slopes.factor
        polarities = [flag.keeps for flag in meaning.flags]
        parts = (meaning.label, self.kept, self.dropped, meaning.is_exact, polarities, factor)
        return " ".join(map(str, parts))

    @property
    def reaches(self) -> bool:
        """Whether the tensor is still read, and a reach says what it drops at least."""
        return self.meaning.reach is not None and not self.meaning.is_exact

    def value(
        self,
        builder: Builder,
        groups: Sequence[tuple[Axis, ...]],
        attrs: AttentionAttrs,
        given: torch.Tensor,
        *,
        sees_keys: bool,
    ) -> torch.Tensor:
        """The tensor at the builder's sizes.

        Args:
            builder: speaks of the tensors of the proof.
            groups: the axes of batch, heads, queries and keys.
            attrs: of the attention at these sizes.
            given: a random tensor of its shape and dtype, which stays where only part of the meaning is known.
            sees_keys: no query is without a key.
        """
        own = set(axes_of(self.dims))
        flat = [tuple(axis for axis in atoms(group) if axis in own) for group in groups]
        lengths = (builder.size(groups[2]), builder.size(groups[3]))
        keep = self._keep(builder, flat, attrs, lengths, given.device)
        base = builder.arrange(given, self.dims, flat)
        if sees_keys:  # the first that is not dropped by what is known stays
            base = torch.where(keep & (keep.cumsum(-1) == 1), torch.full_like(base, self.kept), base)
        if self.meaning.is_exact:
            base = torch.full_like(base, self.kept)
            if self.meaning.slopes is not None:
                base = base + self._linear(builder, flat, lengths, given)
        if self.dropped is not None:
            base = torch.where(keep, base, torch.full_like(base, self.dropped))
        whole = [builder.size(axes) for axes in flat]
        base = base[tuple(slice(extent) for extent in whole)].expand(whole)
        value: torch.Tensor = builder.restore(base.to(given.dtype), flat, self.dims)
        return value.contiguous()

    def _keep(
        self,
        builder: Builder,
        groups: Sequence[tuple[Axis, ...]],
        attrs: AttentionAttrs,
        lengths: tuple[int, int],
        device: torch.device,
    ) -> torch.Tensor:
        """Where the meaning keeps, over the axes of the tensor in ``groups``; bands and reaches are of whole lengths."""
        batch, _, queries, keys = groups
        keep = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        if attrs.limits is not None and self.meaning.band is not None:
            keep = keep & attrs.limits.mask(keep, *lengths, attrs.limits.offset(*lengths))
        if attrs.reach is not None and self.reaches:
            keep = keep & reached(attrs.reach, *lengths).to(device)
        for flag in self.meaning.flags if self.meaning.is_exact else ():
            value = builder.arrange(builder.value(flag.node), flag.dims, groups)
            keep = keep & (value if flag.keeps else ~value)
        documents = self.meaning.documents
        if documents is not None and self.meaning.is_exact:
            rows = builder.arrange(builder.value(documents.query), documents.query_dims, (batch, (), queries, ()))
            others = builder.arrange(builder.value(documents.key), documents.key_dims, (batch, (), (), keys))
            keep = keep & (rows == others)
        return keep

    def _linear(
        self, builder: Builder, groups: Sequence[tuple[Axis, ...]], lengths: tuple[int, int], given: torch.Tensor
    ) -> torch.Tensor:
        slopes = self.meaning.slopes
        assert slopes is not None, "asked for only where there are slopes"
        batch, heads, *_ = groups
        value: torch.Tensor = builder.arrange(builder.value(slopes.node), slopes.dims, (batch, heads, (), ()))
        rows, columns = (given.new_empty((1, 1, length, 1)) for length in lengths)
        return value * slopes.factor * distances(rows, columns, value.dtype)


def reached(reach: Reach, queries: int, keys: int) -> torch.Tensor:
    """What a reach lets through, ``[queries, keys]``."""
    keep = torch.zeros(queries, keys, dtype=torch.bool)
    for row in range(queries):
        first, last = reach.span(row, row + 1)
        keep[row, first:last] = True
    return keep


def near(attrs: AttentionAttrs, queries: int, keys: int) -> AttentionAttrs:
    """The same attributes for a proof over a few tokens: bounds of bands come closer, so that they drop something."""
    if attrs.band is not None:
        attrs = replace(attrs, band=_near_band(attrs.band, queries, keys))
    if attrs.reach is not None:
        starts = range(0, queries, _TILE)
        spans = tuple((min(max(start - 5, 0), keys - 1), min(start + _TILE + 2, keys)) for start in starts)
        attrs = replace(attrs, reach=Reach(_TILE, tuple((first, max(last, first + 1)) for first, last in spans)))
    return attrs


def _near_band(band: Band, queries: int, keys: int) -> Band:
    """Bounds of at most a few positions under which every query still sees a key."""
    offset = band.offset(queries, keys)
    lower = None if band.lower is None else min(max(min(band.lower, _NEAR), -_NEAR), keys - queries - offset)
    upper = None if band.upper is None else max(min(band.upper, _NEAR), -_NEAR, -offset)
    if lower is not None and upper is not None and lower > upper:
        lower = upper
    return Band(lower, upper, band.at_end)
