"""Attention over keys and values that were gathered from a cache by a table: the cache is read where it lies instead.

A cache that is not gathered, but filled up to a number that only data tell, is a block for each request: what is not filled
is not read.

``key_cache[block_table]`` is ``[requests, blocks, slots, heads, features]``, and a key is a block and a slot of it. Where
single slots are gathered, a block is one slot. The mask has to say that a request sees the keys before a number of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import product, shape_of
from lz_compile.lowering.arange import arange
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs, PagedAttentionFacts
from lz_compile.passes.attention.emitter import AttentionEmitter, Roles
from lz_compile.passes.attention.operand import Operand, peel
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, resolve
from lz_compile.passes.formula.contraction import Factor
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.masks.meaning import Axes, Ends, Meanings
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.emitter import TableEmitter
from lz_compile.passes.rewriting.match import Found, Input, Match, Site, Trial

OP = "paged_attention"
#: More queries of a request, or heads that share keys, read these often enough to gather them first.
_MOST = (16, 32)
#: Keys of a cache that is not gathered.
LEAST_KEYS = 256
#: Of proofs: blocks that tables name, the least blocks and keys of a request, and rows (a head of a request), so many that
#: what rounding does to the source's results is no matter of luck.
_BLOCKS, _COLUMNS, _KEYS, _ROWS = 16, 3, 24, 64

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = frozenset({"to", "long", "int", "type", "type_as", "contiguous", "clone"})


@dataclass(frozen=True)
class _Stored:
    """Keys or values: ``cache[table]`` along the first dimension, or the cache itself, without a table.

    ``node`` is what reads the cache, ``rest`` are the axes of the cache, without the first one where there is a table.
    """

    node: fx.Node
    cache: fx.Node
    rest: Dims
    passed: Mapping[fx.Node, Dims]
    table: fx.Node | None = None
    table_dims: Dims = ()


@dataclass(frozen=True)
class GatheredEmitter(TableEmitter):
    """Operands of attention over blocks from those of the attention over what was gathered.

    ``queries`` are those that see keys of their own; all others share theirs as heads do, wherever their axis comes from.
    """

    attention: AttentionEmitter
    key: _Stored
    value: _Stored
    ends: Ends
    flags: Mapping[fx.Node, tuple[Dims, bool]]
    blocks: Axis
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

    def cache_dims(self, gather: _Stored) -> Dims:
        """The axes of a cache."""
        return gather.rest if gather.table is None else ((self.blocks,), *gather.rest)

    def operands(self, builder: Builder) -> Operands:
        """In the op's canonical layout."""
        roles, attention = self.roles, self.attention
        rows = (*roles.batch, *self.queries)
        query = builder.arrange(
            builder.value(attention.query.node), attention.query.dims, (rows, self.heads, roles.features), expand=True
        )
        blocks = roles.batch if self.key.table is None else (self.blocks,)
        key_cache, value_cache = (
            builder.arrange(
                builder.value(each.cache), self.cache_dims(each), (blocks, self.slots, self.kv_heads, features)
            )
            for each, features in ((self.key, roles.features), (self.value, roles.value_features))
        )
        lengths, keys = self._lengths(builder), builder.size(roles.keys)
        found: dict[str, Any] = {}
        if attention.attrs.masked_rows == "mean":  # of all values: equal scores of all keys
            equal = (
                0.0 if attention.attrs.selects_masked else query * 0.0
            )  # NaN in a query stays where nothing is selected
            query = torch.where((lengths <= 0)[:, None, None], equal, query)
            lengths = torch.where(lengths <= 0, keys, lengths)
        if self.attrs.is_ragged:
            found["query_starts"] = (arange(query, builder.size(roles.batch) + 1) * builder.size(self.queries)).int()
        if self.sinks is not None:
            given = builder.value(self.sinks.node)
            found["sinks"] = builder.arrange(given, self.sinks.dims, (self.heads,), expand=True)
        if not self.queries and self.ends.window is None:  # else what lies beyond the table would shift what is seen
            lengths = lengths.clamp(max=keys)
        lengths = lengths.clamp(0, torch.iinfo(torch.int32).max).int()
        return Operands(query, key_cache, value_cache, self._table(builder).int(), lengths, **found)

    def _table(self, builder: Builder) -> Any:
        if self.key.table is None:
            query = builder.value(self.attention.query.node)
            return arange(query, builder.size(self.roles.batch))[:, None]
        groups = (self.roles.batch, self.columns)
        table = builder.arrange(builder.value(self.key.table), self.key.table_dims, groups, expand=True)
        return torch.where(table < 0, table + builder.extent(self.blocks), table)  # an index counts from the end then

    def result(self, builder: Builder, value: Any) -> Any:
        """In the layout and dtype of the node that it replaces; a query that sees no key gives what the source gives."""
        roles, attention = self.roles, self.attention
        if attention.attrs.masked_rows == "nan" and self.sinks is None and (self.ends.terms or self.ends.is_counted):
            sees = self._ends(builder).reshape(-1) > 0
            value = torch.where(sees[:, None, None], value, torch.nan)
        value = value.to(known_tensor(attention.output).dtype)
        groups = ((*roles.batch, *self.queries), self.heads, roles.value_features)
        return builder.restore(value, groups, attention.output_dims)

    def _lengths(self, builder: Builder) -> Any:
        """Before which key the last query of each request sees, ``[R]``; it may be beyond those that there are."""
        if self.ends.is_counted:
            keeps = [self._keeps(builder, node) for node in self.flags]
            return functools.reduce(torch.logical_and, keeps).sum(-1)
        if not self.ends.terms:
            return torch.full_like(self._table(builder)[:, 0], builder.size(self.roles.keys))
        total: Any = self.ends.shift
        for node, dims, factor in self.ends.terms:
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
        if node is self.value.table and self.key.table is not None:
            return builder.value(self.key.table).to(given.dtype)
        if node in self.flags:
            return self._some(node, given, sizes) if self.ends.is_counted else self._flag(node, builder)
        known = builder.over(lambda each: self._flag(each, builder) if each in self.flags else builder.value(each))
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
        dims, keeps = self.flags[node]
        ends = self._ends(builder)
        place = torch.arange(builder.size(self.roles.keys), device=ends.device)
        sees = place < ends[..., None]
        if self.ends.window is not None:
            sees = sees & (place >= ends[..., None] - self.ends.window)
        own = frozenset(axes_of(dims))
        groups = (self.roles.batch, self.queries, self.roles.keys)
        index = tuple(slice(None) if own & set(atoms(group)) else slice(1) for group in groups)
        sees = self._as_mask(node, sees, keeps)
        value: torch.Tensor = builder.restore(
            sees[index], [atoms(g) if own & set(atoms(g)) else () for g in groups], dims
        )
        return value.contiguous()


def as_paged(emitter: AttentionEmitter, core: Core, masks: Meanings) -> Match | None:
    """The attention over blocks that an attention is, None where its keys were not gathered, or by anything else."""
    attrs, roles, region = emitter.attrs, emitter.roles, emitter.region
    is_plain = emitter.query_gain == emitter.key_gain == emitter.output_gain == 1
    is_plain = is_plain and (emitter.bias == 0 or emitter.bias in region.leaves)
    is_other = emitter.slopes or emitter.documents or emitter.floor is not None or emitter.is_undefined_when_masked
    if not is_plain or is_other or attrs.dropout_p or attrs.limits is not None or attrs.masked_rows == "fill":
        return None
    if attrs.zeroes_nan:
        return None
    if emitter.dtype not in _DTYPES or emitter.needs_grad():
        return None
    key, value = (_stored(emitter, operand, core) for operand in (emitter.key, emitter.value))
    if key is None or value is None or not _is_same_table(key, value, roles, masks):
        return None
    flags = {
        region.leaves[symbol].node: (region.leaves[symbol].dims, factor == symbol)
        for factor in (*sympy.Mul.make_args(emitter.keep), emitter.bias)
        for symbol in factor.free_symbols
    }
    seen = {axis for dims, _ in flags.values() for axis in axes_of(dims)}
    queries = tuple(axis for axis in atoms(roles.queries) if axis in seen)
    own = frozenset(axes_of(key.rest))
    kv_heads = tuple(axis for axis in atoms(roles.heads) if axis in own)
    sharing = tuple(axis for axis in (*atoms(roles.heads), *atoms(roles.queries)) if axis not in (*own, *queries))
    counts = [product(axis.size for axis in axes) for axes in (queries, sharing)]
    if not all(isinstance(count, int) and count <= most for count, most in zip(counts, _MOST, strict=True)):
        return None
    if attrs.masked_rows == "mean" and (queries or emitter.sinks is not None):
        return None
    places = _places(roles, key, value)
    ends = masks.ends(
        [(node, dims, keeps) for node, (dims, keeps) in flags.items()], Axes(roles.batch, (), queries, roles.keys)
    )
    sinks, passed = None, dict(emitter.passed)
    if emitter.sinks is not None:
        reader = region.readers.get(emitter.sinks.node, core.nodes[0])
        sinks = peel(region, Factor(emitter.sinks.node, emitter.sinks.dims), reader, passed)
        if sinks.factor != 1 or not {*axes_of(sinks.dims)} <= {*kv_heads, *sharing}:
            return None
    if key.table is None and not _is_partly_filled(roles, queries, ends):
        return None
    if ends is not None and (queries or ends.window is not None) and ends.shift > counts[0]:  # beyond the newest key
        return None
    if places is None or ends is None or (attrs.masked_rows == "mean" and ends.window is not None):
        return None
    found = GatheredEmitter(
        emitter, key, value, ends, flags, Axis(shape_of(known_tensor(key.cache))[0]), *places, kv_heads,
        (*kv_heads, *sharing), queries, sinks,
        PagedAttentionAttrs(
            scale=attrs.scale, softcap=attrs.softcap, window=ends.window, is_ragged=bool(queries),
            has_sinks=emitter.sinks is not None, out_dtype=emitter.dtype,
        ),
    )  # fmt: skip
    try:
        return _match(found, core, passed)
    except RefusedError:  # a cache, a table or lengths are written to in between: the attention over copies stays
        return None


def _is_partly_filled(roles: Roles, queries: tuple[Axis, ...], ends: Ends | None) -> bool:
    """Whether only data tell how much of a cache is seen, beyond whose end nobody may look, and it is worth to ask."""
    keys = product(axis.size for axis in roles.keys)
    if queries or ends is None or ends.window is not None:
        return False
    return (bool(ends.terms) or ends.is_counted) and isinstance(keys, int) and keys >= LEAST_KEYS


def _stored(emitter: AttentionEmitter, operand: Operand, core: Core) -> _Stored | None:
    """Where an operand lies, or what it was gathered from, behind casts and layout changes of both."""
    region, passed = emitter.region, dict(emitter.passed)
    reader = region.readers.get(operand.node, core.nodes[0])
    inner = peel(region, Factor(operand.node, operand.dims), reader, passed)
    call = region.effects.calls[inner.node]
    if inner.factor != 1 or inner.dtype != emitter.dtype:
        return None
    readers = [node for node in passed if inner.node in node.all_input_nodes]
    first = min(readers, key=region.effects.position.__getitem__, default=reader)
    whole = _Stored(first, inner.node, resolve(inner.dims), passed)
    if call is None or call.is_inplace or region.effects.is_opaque(inner.node, reader):
        return whole
    parts = _indexed(call) if region.effects.ambient(inner.node) == core.ambient else None
    if parts is None:
        return whole
    cache, table = parts
    dims, rank = resolve(inner.dims), known_tensor(table).dim()
    passed[inner.node] = dims
    if known_tensor(table).dtype not in (torch.int32, torch.int64):
        return whole
    node, table_dims = _origin(region.effects, table, dims[:rank], passed)
    return _Stored(inner.node, cache, dims[rank:], passed, node, table_dims)


def _indexed(call: Call) -> tuple[fx.Node, fx.Node] | None:
    """A tensor and the indices along its first dimension."""
    found: tuple[Any, Any] = (None, None)
    if call.name == "getitem":
        index = call.arguments.get("#1")
        items = list(index) if isinstance(index, tuple) else [index]
        if all(item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in items[1:]):
            found = (call.input, items[0])
    elif call.name == "index_select" and call.get("dim", call.arguments.get("#1")) in (
        0,
        -known_tensor(call.input).dim(),
    ):
        found = (call.input, call.get("index", call.arguments.get("#2")))
    elif call.name == "embedding" and call.get("max_norm", None) is None:  # PyTorch has it both ways round
        both = (call.input, call.get("weight", call.arguments.get("#1")))
        found = both if (first := tensor_of(both[0])) is not None and first.is_floating_point() else both[::-1]
    cache, table = found
    is_index = isinstance(cache, fx.Node) and isinstance(table, fx.Node) and tensor_of(table) is not None
    return (cache, table) if is_index and tensor_of(cache) is not None else None


def _origin(effects: Effects, node: fx.Node, dims: Dims, passed: dict[fx.Node, Dims]) -> tuple[fx.Node, Dims]:
    """The tensor of indices behind casts and layout changes; what is passed is noted."""
    while True:
        call, source = effects.calls[node], None
        if call is None or call.is_inplace or not isinstance(call.input, fx.Node) or effects.is_overwritten(node):
            return node, dims
        given, made = tensor_of(call.input), known_tensor(node)
        if given is None or given.dtype not in (torch.int32, made.dtype) or given.device != made.device:
            return node, dims
        if effects.is_overwritten(call.input):
            return node, dims
        if call.name in _CASTS and given.shape == made.shape:
            source = dims
        else:
            try:
                source = layout.read_input_dims(call, dims)
            except LayoutError:
                source = None
        if source is None:
            return node, dims
        passed.setdefault(node, dims)
        node, dims = call.input, resolve(source)


def _is_same_table(key: _Stored, value: _Stored, roles: Roles, masks: Meanings) -> bool:
    if key.table is None or value.table is None:
        return key.table is value.table
    if shape_of(known_tensor(key.cache))[0] != shape_of(known_tensor(value.cache))[0]:
        return False
    dims = resolve(key.table_dims)
    if dims != resolve(value.table_dims) or not {*axes_of(dims)} <= {*atoms(roles.batch), *atoms(roles.keys)}:
        return False
    nodes = (key.table, value.table)
    return nodes[0] is nodes[1] or masks.are_equal(nodes, dims, Axes(roles.batch, (), (), roles.keys))


def _places(roles: Roles, key: _Stored, value: _Stored) -> tuple[tuple[Axis, ...], tuple[Axis, ...]] | None:
    """The axes of blocks of a request, and of slots of a block; None where keys and tables are anything else."""
    batch, keys = atoms(roles.batch), atoms(roles.keys)
    columns = tuple(axis for axis in axes_of(key.table_dims) if axis in keys)
    slots = tuple(axis for axis in axes_of(key.rest) if axis in keys)
    same = tuple(axis for axis in axes_of(value.rest) if axis in keys)
    own = {*axes_of(key.table_dims)} - {*columns}
    if key.table is None:
        own = {*axes_of(key.rest)} & {*axes_of(value.rest)} & {*batch}
    both = [{*axes_of(each.rest)} & {*atoms(roles.heads)} for each in (key, value)]
    is_whole = both[0] == both[1] and own == {*batch} and (*columns, *slots) == keys and same == slots
    others = {*axes_of(key.rest), *axes_of(value.rest)} - {*slots} - ({*batch} if key.table is None else set())
    is_whole = is_whole and others <= {*atoms(roles.heads), *atoms(roles.features), *atoms(roles.value_features)}
    return (columns, slots) if is_whole else None


def _match(emitter: GatheredEmitter, core: Core, passed: Mapping[fx.Node, Dims]) -> Match:
    """The finished match; ``passed`` are nodes on the way to other operands.

    Raises:
        RefusedError: something that it reads is written to before its end.
    """
    attention, key, value = emitter.attention, emitter.key, emitter.value
    effects = attention.region.effects
    slots = product(axis.size for axis in emitter.slots) if key.table is not None else 1
    columns = max(_COLUMNS, -(-_KEYS // slots) if isinstance(slots, int) else _KEYS)
    of_keys = emitter.columns if key.table is not None else emitter.slots
    longest = float(columns ** len(of_keys) * (slots if isinstance(slots, int) else 1) + 1)
    if emitter.queries or emitter.ends.window is not None:  # nothing may be beyond a table there
        of_terms = max(sum(max(each, 0) for _, _, each in emitter.ends.terms), 1)
        longest = (longest - 1 - emitter.ends.shift) // of_terms + 1
    reads: list[tuple[fx.Node, Dims, tuple[float, float] | None]] = [
        (attention.query.node, attention.query.dims, None), (key.cache, emitter.cache_dims(key), None),
        (value.cache, emitter.cache_dims(value), None),
        *([] if key.table is None else [(key.table, key.table_dims, (0.0, float(_BLOCKS)))]),
        *((node, dims, (0.0, longest)) for node, dims, _ in emitter.ends.terms),
        *([] if emitter.sinks is None else [(emitter.sinks.node, emitter.sinks.dims, None)]),
    ]  # fmt: skip
    if len({node for node, _, _ in reads}) < len(reads):
        raise RefusedError("SHARED_OPERAND", "a tensor is several operands", "give each a tensor of its own")
    first = min((key.node, value.node), key=effects.position.__getitem__)
    core.check(effects, dict.fromkeys([node for node, _, _ in reads[1 : 3 + (key.table is not None)]], first))
    inputs = {node: Input(dims, range=span) for node, dims, span in reads}
    inputs |= {node: Input(dims, implied="lengths") for node, (dims, _) in emitter.flags.items()}
    if value.table is not None and value.table is not key.table:
        inputs[value.table] = Input(value.table_dims, implied="table")
    inputs |= {
        node: Input(each.dims, implied=str(each))
        for node, each in attention.implied.items()
        if node not in emitter.flags
    }
    roles = attention.roles
    facts = PagedAttentionFacts(
        num_requests=product(axis.size for axis in roles.batch),
        num_queries=product(axis.size for axis in (*roles.batch, *emitter.queries)),
        heads=product(axis.size for axis in emitter.heads),
        kv_heads=product(axis.size for axis in emitter.kv_heads),
        key_len=product(axis.size for axis in roles.keys),
        block_size=product(axis.size for axis in emitter.slots),
        head_dim=product(axis.size for axis in roles.features),
        value_dim=product(axis.size for axis in roles.value_features),
        dtype=attention.dtype,
        cache_dtype=attention.dtype,
        device=known_tensor(attention.output).device.type,
    )
    operands = {"query": attention.query.node, "key_cache": key.cache, "value_cache": value.cache}
    operands |= {} if key.table is None else {"block_table": key.table}
    index = "" if key.table is None else "[block_table]"
    formula = f"softmax(query key_cache{index}^T) value_cache{index}, {emitter.attrs.variant}"
    buffers = tuple(dict.fromkeys((*attention.buffers, *emitter.ends.buffers)))
    found = Found(emitter.attrs, facts, inputs, operands, emitter, formula, buffers=buffers)
    trial = Trial(
        limited=frozenset((*roles.features, *roles.value_features, *(emitter.slots if key.table is not None else ()))),
        pinned=frozenset(emitter.queries),  # how many there are may be part of a number in the mask
        least={
            emitter.blocks: _BLOCKS,
            **dict.fromkeys(of_keys, columns),
            **dict.fromkeys(atoms(roles.batch)[:1], max(1, _ROWS // facts.heads)),
        },
        masked_rows_count=not attention.sees_keys,
    )
    read = {**attention.region.interior, **passed, **key.passed, **value.passed}
    return Match(OP, Site.of(core, attention.output_dims, read), found, trial)
