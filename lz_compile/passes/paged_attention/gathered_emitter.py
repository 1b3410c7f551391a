"""Operands of attention over blocks from those of an attention over what was gathered from them, and its result back."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from lz_compile.lowering.arange import arange
from lz_compile.lowering.ops.paged_attention import SHAPES, Operands, PagedAttentionAttrs
from lz_compile.passes.attention.emitter import AttentionEmitter, Roles
from lz_compile.passes.attention.operand import Operand
from lz_compile.passes.formula.axes import Axis, Dims, atoms, axes_of
from lz_compile.passes.graph.view import known_tensor
from lz_compile.passes.masks.meaning import Ends, Terms
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import TableEmitter


@dataclass(frozen=True)
class Stored:
    """Keys or values: ``cache[table]`` along the first dimension, or the cache itself, without a table.

    ``node`` is what reads the cache, ``rest`` are the axes of the cache, without the first one where there is a table, and
    without the first two where there is an index within blocks, too: ``cache[table, within]``.
    """

    node: fx.Node
    cache: fx.Node
    rest: Dims
    passed: Mapping[fx.Node, Dims]
    table: fx.Node | None = None
    table_dims: Dims = ()
    within: fx.Node | None = None
    within_dims: Dims = ()

    @property
    def indices(self) -> dict[fx.Node, Dims]:
        """The tensors that say what is gathered, with their axes."""
        pairs = ((self.table, self.table_dims), (self.within, self.within_dims))
        return {node: dims for node, dims in pairs if node is not None}

    @property
    def index_axes(self) -> tuple[Axis, ...]:
        """The axes of what is gathered."""
        return tuple(dict.fromkeys(axis for dims in self.indices.values() for axis in axes_of(dims)))


@dataclass(frozen=True)
class GatheredEmitter(TableEmitter):
    """Operands of attention over blocks from those of the attention over what was gathered.

    ``queries`` are those that see keys of their own; all others share theirs as heads do, wherever their axis comes from.
    ``blocks`` are the axes of the cache that are gathered along.
    """

    result_shape: ClassVar = "T Hq E"

    attention: AttentionEmitter
    key: Stored
    value: Stored
    ends: Ends
    flags: Mapping[fx.Node, tuple[Dims, bool]]
    blocks: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    slots: tuple[Axis, ...]
    kv_heads: tuple[Axis, ...]
    heads: tuple[Axis, ...]
    queries: tuple[Axis, ...]
    sinks: Operand | None
    attrs: PagedAttentionAttrs

    @property
    def roles(self) -> Roles:
        """Of the attention."""
        return self.attention.roles

    def cache_dims(self, gather: Stored) -> Dims:
        """The axes of a cache."""
        return gather.rest if gather.table is None else (*((axis,) for axis in self.blocks), *gather.rest)

    @property
    def runs(self) -> dict[str, tuple[Axis, ...]]:
        """Requests, their queries, and the places of keys."""
        roles, blocks = self.roles, self.roles.batch if self.key.table is None else self.blocks
        found = {"R": roles.batch, "T": (*roles.batch, *self.queries), "Hq": self.heads, "Hk": self.kv_heads}
        return {
            **found,
            "N": blocks,
            "P": self.slots,
            "M": self.columns,
            "D": roles.features,
            "E": roles.value_features,
        }

    @property
    def output_dims(self) -> Dims:  # type: ignore[override]  # read-only here
        """Of the attention."""
        return self.attention.output_dims

    def operands(self, builder: Builder) -> Operands:
        """In the op's canonical layout."""
        roles, attention = self.roles, self.attention
        query = builder.arrange(
            builder.value(attention.query.node), attention.query.dims, self.axes(SHAPES["query"]), expand=True
        )
        key_cache, value_cache = (
            builder.arrange(builder.value(each.cache), self.cache_dims(each), self.axes(SHAPES[name]))
            for each, name in ((self.key, "key_cache"), (self.value, "value_cache"))
        )
        lengths, keys = self._lengths(builder), builder.size(roles.keys)
        found: dict[str, Any] = {}
        if (
            attention.attrs.masked_rows == "mean"
        ):  # of all values: equal scores of all keys, or NaN that no mask replaced
            equal = 0.0 if attention.attrs.selects_masked else query * 0.0
            query = torch.where((lengths <= 0)[:, None, None], equal, query)
            lengths = torch.where(lengths <= 0, keys, lengths)
        if self.attrs.is_ragged:
            found["query_starts"] = (arange(query, builder.size(roles.batch) + 1) * builder.size(self.queries)).int()
        if self.sinks is not None:
            given = builder.value(self.sinks.node)
            found["sinks"] = builder.arrange(given, self.sinks.dims, self.axes(SHAPES["sinks"]), expand=True)
        if self.attrs.has_first_keys:
            found["first_keys"] = self._firsts(builder).clamp(0, torch.iinfo(torch.int32).max).int()
        if not self.queries and self.attrs.window is None:  # else what lies beyond the table would shift what is seen
            lengths = lengths.clamp(max=keys)
        lengths = lengths.clamp(0, torch.iinfo(torch.int32).max).int()
        return Operands(query, key_cache, value_cache, self._table(builder).int(), lengths, **found)

    def _table(self, builder: Builder) -> Any:
        if self.key.table is None:
            query = builder.value(self.attention.query.node)
            return arange(query, builder.size(self.roles.batch))[:, None]
        table = None
        for (node, dims), axis in zip(self.key.indices.items(), self.blocks, strict=True):
            given, size = builder.value(node), builder.extent(axis)
            index = builder.arrange(given, dims, self.axes(SHAPES["block_table"]), expand=True)
            index = torch.where(index < 0, index + size, index)  # an index counts from the end then
            table = index if table is None else table * size + index
        return table

    def result(self, builder: Builder, value: Any) -> Any:
        """In the layout and dtype of the node that it replaces; a query that sees no key gives what the source gives."""
        roles, attention = self.roles, self.attention
        if attention.attrs.masked_rows == "nan" and self.sinks is None and (self.ends.terms or self.ends.is_counted):
            ends, first = self._ends(builder), 0
            if self.attrs.has_first_keys:  # beyond the cache there is none to see
                ends, first = ends.clamp(max=builder.size(roles.keys)), self._firsts(builder).clamp(min=0)[:, None]
            sees = (ends > first).reshape(-1)
            value = torch.where(sees[:, None, None], value, torch.nan)
        return super().result(builder, value.to(known_tensor(attention.output).dtype))

    def _lengths(self, builder: Builder) -> Any:
        """Before which key the last query of each request sees, ``[R]``; it may be beyond those that there are."""
        if self.ends.is_counted:
            keeps = [self._keeps(builder, node) for node in self.flags]
            return functools.reduce(torch.logical_and, keeps).sum(-1)
        if not self.ends.terms:
            return torch.full_like(self._table(builder)[:, 0], builder.size(self.roles.keys))
        return self._sum(builder, self.ends.terms, self.ends.shift)

    def _firsts(self, builder: Builder) -> Any:
        """The first key that each request sees, ``[R]``; it may be before or beyond those that there are."""
        found = [self._sum(builder, *each) for each in self.ends.firsts]
        if self.attrs.window is None and self.ends.window is not None:
            found.append(self._lengths(builder) - self.ends.window)
        return functools.reduce(torch.maximum, found)

    def _sum(self, builder: Builder, terms: Terms, shift: int) -> Any:
        total: Any = shift
        for node, dims, factor in terms:
            given = builder.arrange(builder.value(node), dims, (self.roles.batch,), expand=True).long()
            total = total + (given if factor == 1 else given * factor)
        return total

    def _keeps(self, builder: Builder, node: fx.Node) -> Any:
        """Where a mask keeps, ``[R, keys]``."""
        dims, keeps = self.flags[node]
        value = builder.arrange(builder.value(node), dims, (self.roles.batch, self.roles.keys), expand=True)
        if known_tensor(node).is_floating_point():
            return value > -torch.inf
        return value if keeps else torch.logical_not(value)

    def _ends(self, builder: Builder) -> Any:
        """Before which key every query sees, ``[R, S]``."""
        lengths, queries = self._lengths(builder), builder.size(self.queries)
        return lengths[:, None] + (arange(lengths, queries) + 1 - queries)

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """The mask that lengths say; of a mask that is made of it, what it holds then; and the table that equals another."""
        same = dict(zip(self.value.indices, self.key.indices, strict=True)).get(node)
        if same is not None:
            return builder.value(same).to(given.dtype)

        def held(each: fx.Node) -> Any:
            if each not in self.flags:
                return builder.value(each)
            return self._some(each, builder.value(each), sizes) if self.ends.is_counted else self._flag(each, builder)

        if node in self.flags:
            return held(node)
        known = builder.over(held)
        return self.attention.implied_value(node, known, given, sizes)

    def _some(self, node: fx.Node, given: torch.Tensor, sizes: Mapping[Axis, int]) -> torch.Tensor:
        """A mask of as many keys as a random one happens to keep, of none, or of all."""
        dims, keeps = self.flags[node]
        builder = Builder(lambda each: given, sizes=sizes)
        groups = [
            tuple(axis for axis in atoms(group) if axis in axes_of(dims))
            for group in (self.roles.batch, self.roles.keys)
        ]
        bits = builder.arrange(given, dims, groups) > 0
        count = torch.where(bits[:, :1], bits.sum(-1, keepdim=True), bits[:, 1:2] * bits.shape[1])
        sees = torch.arange(bits.shape[1], device=given.device) < count
        value: torch.Tensor = builder.restore(self._as_mask(node, sees, keeps), groups, dims)
        return value.contiguous()

    def _as_mask(self, node: fx.Node, sees: torch.Tensor, keeps: bool) -> torch.Tensor:
        tensor = known_tensor(node)
        if tensor.is_floating_point():
            return torch.zeros(sees.shape, dtype=tensor.dtype, device=sees.device).masked_fill(~sees, -torch.inf)
        return sees if keeps else ~sees

    def _flag(self, node: fx.Node, builder: Builder) -> torch.Tensor:
        """What a mask says of what all say together: as much as its axes can."""
        dims, keeps = self.flags[node]
        own, ends = frozenset(axes_of(dims)), self._ends(builder)
        place = torch.arange(builder.size(self.roles.keys), device=ends.device)
        sees = torch.ones_like(place < ends[..., None])
        if _may_say(own, self.ends.terms, self.roles.batch):
            sees = place < ends[..., None]
            if self.ends.window is not None:
                sees = sees & (place >= ends[..., None] - self.ends.window)
        for terms, shift in self.ends.firsts:
            if _may_say(own, terms, self.roles.batch):
                sees = sees & (place >= self._sum(builder, terms, shift)[:, None, None])
        groups = (self.roles.batch, self.queries, self.roles.keys)
        index = tuple(slice(None) if own & set(atoms(group)) else slice(1) for group in groups)
        sees = self._as_mask(node, sees, keeps)
        value: torch.Tensor = builder.restore(
            sees[index], [atoms(g) if own & set(atoms(g)) else () for g in groups], dims
        )
        return value.contiguous()


def _may_say(own: frozenset[Axis], terms: Terms, batch: tuple[Axis, ...]) -> bool:
    """Whether a mask over some axes can say something of a sum that may differ between requests."""
    return {axis for _, dims, _ in terms for axis in axes_of(dims)} & {*atoms(batch)} <= own
