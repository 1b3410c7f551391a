"""What masks are found to mean.

A mask that was proven to be, say, causal is nothing that a kernel reads. The proof of the kernel still runs the original
subgraph, which does: there the tensor is made again from what it means, at the proof's sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import fx

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band, Reach
from lz_compile.lowering.ops.attention import distances
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims, atoms, axes_of
from lz_compile.passes.rewriting.builder import Builder


@dataclass(frozen=True)
class Axes:
    """The axes of scores, most significant first; each group may have none or several."""

    batch: tuple[Axis, ...]
    heads: tuple[Axis, ...]
    queries: tuple[Axis, ...]
    keys: tuple[Axis, ...]

    def resolved(self) -> Axes:
        """The same in atomic axes."""
        return Axes(*map(atoms, self.groups))

    @property
    def groups(self) -> tuple[tuple[Axis, ...], ...]:
        """Batch, heads, queries and keys."""
        return (self.batch, self.heads, self.queries, self.keys)


@dataclass(frozen=True)
class Flag:
    """A boolean tensor that keeps where it is ``keeps``. It does not depend on both queries and keys."""

    node: fx.Node
    dims: Dims
    keeps: bool


@dataclass(frozen=True)
class Documents:
    """Integers: a query sees the keys for which they are equal."""

    query: Leaf
    key: Leaf


@dataclass(frozen=True)
class Slopes:
    """``factor * tensor * (key position - query position)`` is added, up to what is the same for all keys of a query."""

    node: fx.Node
    dims: Dims
    factor: float


@dataclass(frozen=True)
class Meaning:
    """A mask tensor: it holds ``kept`` where a query sees a key, and ``dropped`` elsewhere (None: nothing is dropped).

    A boolean one holds 1.0 and 0.0, whichever of them True says. With ``is_exact``, ``band``, ``flags`` and ``documents``
    together say where it keeps, and ``slopes`` are added there. Otherwise these are conditions without which it drops, and
    what it holds elsewhere is not known. ``reach`` says no more than the rest, of what is of fixed size and no band.

    Every query sees a key under the band. ``buffers`` are placeholders on whose values this rests.
    """

    kept: float
    dropped: float | None
    band: Band | None = None
    flags: tuple[Flag, ...] = ()
    documents: Documents | None = None
    slopes: Slopes | None = None
    is_exact: bool = True
    reach: Reach | None = None
    buffers: tuple[fx.Node, ...] = ()
    label: str = ""


#: Tensors with their axes, times factors.
Terms: TypeAlias = "tuple[tuple[fx.Node, Dims, int], ...]"


@dataclass(frozen=True)
class Ends:
    """Before which key the last query sees keys: the sum of ``terms``, tensors with their axes times factors, and ``shift``.

    Without terms it sees all keys, or as many as the masks keep, where it ``is_counted``. Every query before it sees one key
    less at the end. With a ``window`` it sees that many keys at most, the newest ones, and none before any of ``firsts``,
    such sums. ``buffers`` are placeholders on whose values this rests.
    """

    terms: Terms = ()
    shift: int = 0
    window: int | None = None
    is_counted: bool = False
    buffers: tuple[fx.Node, ...] = ()
    firsts: tuple[tuple[Terms, int], ...] = ()


@dataclass(frozen=True)
class Window:
    """The element of ``node`` at ``query + key + start`` along one axis, and at the same index along all others.

    ``buffers`` are placeholders on whose values this rests.
    """

    node: fx.Node
    dims: Dims
    along: Axis
    start: int
    buffers: tuple[fx.Node, ...] = ()


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
            pairs = (documents.query, (batch, (), queries, ())), (documents.key, (batch, (), (), keys))
            rows, others = (builder.arrange(builder.value(each.node), each.dims, own) for each, own in pairs)
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
