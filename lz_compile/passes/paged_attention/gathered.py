"""Attention over keys and values that were gathered from a cache by a table: the cache is read where it lies instead.

A cache that is not gathered, but filled up to a number that only data tell, is a block for each request: what is not filled
is not read.

``key_cache[block_table]`` is ``[requests, blocks, slots, heads, features]``, and a key is a block and a slot of it. Where
single slots are gathered, a block is one slot. The mask has to say that a request sees the keys before a number of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import product, shape_of
from lz_compile.lowering.ops.paged_attention import PagedAttentionAttrs, PagedAttentionFacts
from lz_compile.passes.attention.emitter import AttentionEmitter, Roles
from lz_compile.passes.attention.operand import Operand, peel
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, broadcast_from, resolve
from lz_compile.passes.formula.contraction import Factor
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.masks.meaning import Axes, Ends
from lz_compile.passes.masks.reading import Masks
from lz_compile.passes.paged_attention.gathered_emitter import GatheredEmitter, Stored
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Found, Input, Match, Site, Trial

OP = "paged_attention"
#: More queries of a request, or heads that share keys, read these often enough to gather them first; the second of what is
#: not gathered.
_MOST, _MOST_OF_WHOLE = (16, 32), 8
#: Numbers of keys in a cache that is not gathered; of fewer, all are read in the time that it takes to start.
LEAST_NUMBERS = 1 << 19
#: Of proofs: blocks that tables name, the least blocks and keys of a request, and rows (a head of a request), so many that
#: what rounding does to the source's results is no matter of luck.
_BLOCKS, _COLUMNS, _KEYS, _ROWS = 16, 3, 24, 64

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = frozenset({"to", "long", "int", "type", "type_as", "contiguous", "clone"})


def matched(masks: Masks, emitter: AttentionEmitter, core: Core, source_kernel: str | None) -> Match:
    """An attention over blocks where its keys are rows of a cache; else as it is, with what kept gathered ones from that."""
    key, value = (_stored(emitter, operand, core) for operand in (emitter.key, emitter.value))
    try:
        if key is not None and value is not None:
            return _as_paged(emitter, core, masks, key, value)
    except RefusedError as error:
        if key is not None and key.table is not None:
            text = f"keys are gathered into a copy ({error.reason.message})"
            told = (*emitter.mask_reasons, Reason("KEYS_COPIED", text))
            return replace(emitter, mask_reasons=told).match("attention", core, source_kernel=source_kernel)
    return emitter.match("attention", core, source_kernel=source_kernel)


def _as_paged(emitter: AttentionEmitter, core: Core, masks: Masks, key: Stored, value: Stored) -> Match:
    """The attention over blocks that an attention is.

    Raises:
        RefusedError: it is none, with the reason.
    """
    roles, passed = emitter.roles, dict(emitter.passed)
    added = emitter.region.leaves.get(emitter.bias)
    flags = emitter.flags | ({} if added is None else {added.node: (added.dims, True)})
    plain = _what_is_special(emitter)
    if plain:
        raise _refused(plain)
    buffers = _same_table(key, value, roles, masks)
    if buffers is None:
        raise _refused("values are not gathered by the same table")
    places, rows = _places(roles, key, value), _rows(roles, key, flags)
    if places is None:
        raise _refused("what is gathered is no blocks of keys, a row of the table for each request")
    if rows is None:
        raise _refused(f"more than {_MOST[0]} queries of a request, or {_MOST[1]} heads, share keys")
    kv_heads, sharing, queries = rows
    ends = masks.ends([(node, *each) for node, each in flags.items()], Axes(roles.batch, (), queries, roles.keys))
    if ends is None or not _can_say(emitter, key, queries, ends):
        raise _refused("the mask does not say that a request sees all keys before a number of its own")
    sink = emitter.region.leaves.get(emitter.sinks)
    sinks = None if sink is None else _of_edge(emitter, sink.node, sink.dims, core, passed)
    if (sinks is None) is not (emitter.sinks is None) or (
        sinks is not None and (sinks.factor != 1 or not {*axes_of(sinks.dims)} <= {*kv_heads, *sharing})
    ):
        raise _refused("sinks are not one for each head")
    is_whole = key.table is None  # a window is where a request begins to see there, so that it may end beyond the cache
    attrs = PagedAttentionAttrs(
        scale=emitter.attrs.scale, softcap=emitter.attrs.softcap, window=None if is_whole else ends.window,
        is_ragged=bool(queries), has_sinks=sinks is not None, out_dtype=emitter.dtype,
        has_first_keys=bool(ends.firsts) or (is_whole and ends.window is not None),
    )  # fmt: skip
    heads = (*kv_heads, *sharing)
    if not all(isinstance(size, int) for size in shape_of(known_tensor(key.cache))[1 : len(key.indices)]):
        raise _refused("an index within a block is below a symbolic size")
    blocks = tuple(Axis(size) for size in shape_of(known_tensor(key.cache))[: len(key.indices) or 1])
    found = GatheredEmitter(emitter, key, value, ends, flags, blocks, *places, kv_heads, heads, queries, sinks, attrs)
    return _match(found, core, passed, (*emitter.buffers, *ends.buffers, *buffers))


def _refused(text: str) -> RefusedError:
    return RefusedError("KEYS_COPIED", text, "call lz.paged_attention")


def _what_is_special(emitter: AttentionEmitter) -> str:
    """What of an attention, masks aside, the op has not; empty where it has all."""
    attrs = emitter.attrs
    is_biased = (
        emitter.slopes or emitter.floor is not None or not (emitter.bias == 0 or emitter.bias in emitter.region.leaves)
    )
    gains = {emitter.query_gain, emitter.key_gain, emitter.value_gain, emitter.output_gain}
    special = {
        "it is trained": emitter.needs_grad(),
        f"it is in {emitter.dtype}": emitter.dtype not in _DTYPES,
        "scores or results are weighted": gains != {sympy.S.One},
        "scores have a bias": is_biased,
        "scores are distances": emitter.distance != 0,
        "documents are apart": bool(emitter.documents) or attrs.limits is not None,
        "there is dropout": bool(attrs.dropout_p),
        "rows without keys are special": attrs.zeroes_nan
        or emitter.is_undefined_when_masked
        or attrs.masked_rows == "fill",
    }
    return ", ".join(text for text, holds in special.items() if holds)


def _rows(
    roles: Roles, key: Stored, flags: Mapping[fx.Node, tuple[Dims, bool]]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]] | None:
    """The axes of heads of the cache, of what shares these, and of queries that see keys of their own; None for too many."""
    seen = {axis for dims, _ in flags.values() for axis in axes_of(dims)}
    own = frozenset(axes_of(key.rest))
    queries = tuple(axis for axis in atoms(roles.queries) if axis in seen)
    kv_heads = tuple(axis for axis in atoms(roles.heads) if axis in own)
    sharing = tuple(axis for axis in (*atoms(roles.heads), *atoms(roles.queries)) if axis not in (*own, *queries))
    most = _MOST if key.table is not None else (1, _MOST_OF_WHOLE)
    for axes, limit in zip((queries, sharing), most, strict=True):
        count = product(axis.size for axis in axes)
        if not isinstance(count, int) or count > limit:
            return None
    return kv_heads, sharing, queries


def _can_say(emitter: AttentionEmitter, key: Stored, queries: tuple[Axis, ...], ends: Ends) -> bool:
    """Whether lengths say what a query sees whatever they hold, rows without keys and caches that are too short included."""
    is_window = ends.window is not None and (key.table is not None or bool(queries))
    moves = bool(queries) or is_window  # what is seen depends on the newest key, wherever a table ends
    count = product(axis.size for axis in queries)
    if moves and (not isinstance(count, int) or ends.shift > count):  # beyond the newest key
        return False
    has_first = bool(ends.firsts) or ends.window is not None
    if emitter.attrs.masked_rows == "mean" and (moves or has_first or emitter.sinks is not None):
        return False
    if key.table is not None:
        return True
    numbers = product(axis.size for axis in axes_of(key.rest) if isinstance(axis.size, int))
    is_static = all(isinstance(axis.size, int) for axis in atoms(emitter.roles.keys))
    is_partial = (bool(ends.terms) or ends.is_counted) and is_static and numbers >= LEAST_NUMBERS
    # Elsewhere nobody measured whether it pays for a launch to read less.
    return not moves and is_partial and known_tensor(key.cache).device.type == "cpu"


def _of_edge(emitter: AttentionEmitter, node: fx.Node, dims: Dims, core: Core, passed: dict[fx.Node, Dims]) -> Operand:
    """The tensor behind a node at the edge, past layout changes and casts."""
    return peel(emitter.region, Factor(node, dims), emitter.region.readers.get(node, core.nodes[0]), passed)


def _stored(emitter: AttentionEmitter, operand: Operand, core: Core) -> Stored | None:
    """Where an operand lies, or what it was gathered from, behind casts and layout changes of both."""
    region, passed = emitter.region, dict(emitter.passed)
    reader = region.readers.get(operand.node, core.nodes[0])
    inner = _of_edge(emitter, operand.node, operand.dims, core, passed)
    call = region.effects.calls[inner.node]
    if inner.factor != 1 or inner.dtype != emitter.dtype:
        return None
    readers = [node for node in passed if inner.node in node.all_input_nodes]
    first = min(readers, key=region.effects.position.__getitem__, default=reader)
    whole = Stored(first, inner.node, resolve(inner.dims), passed)
    if call is None or call.is_inplace or region.effects.is_opaque(inner.node, reader):
        return whole
    parts = _indexed(call) if region.effects.ambient(inner.node) == core.ambient else None
    if parts is None:
        return whole
    cache, *tables = parts
    dims, rank = resolve(inner.dims), max(known_tensor(table).dim() for table in tables)
    passed[inner.node] = dims
    if any(known_tensor(table).dtype not in (torch.int32, torch.int64) for table in tables):
        return whole
    shapes = [shape_of(known_tensor(table)) for table in tables]
    found = [
        _origin(region.effects, table, broadcast_from(dims[:rank], shape), passed)
        for table, shape in zip(tables, shapes, strict=True)
    ]
    within, within_dims = found[1] if len(found) > 1 else (None, ())
    return Stored(inner.node, cache, dims[rank:], passed, *found[0], within, within_dims)


def _indexed(call: Call) -> tuple[fx.Node, ...] | None:
    """A tensor and the indices along its first dimension, or along its first two, which lie in memory like one."""
    found: tuple[Any, ...] = (None, None)
    if call.name == "getitem":
        index = call.arguments.get("#1")
        items = list(index) if isinstance(index, tuple) else [index]
        count = 2 if len(items) > 1 and isinstance(items[1], fx.Node) and _are_joined(call.input) else 1
        if all(item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in items[count:]):
            found = (call.input, *items[:count])
    elif call.name == "index_select" and call.get("dim") in (0, -known_tensor(call.input).dim()):
        found = (call.input, call.get("index"))
    elif call.name == "embedding" and call.get("max_norm") is None:  # PyTorch has it both ways round
        both = (call.input, call.get("weight"))
        found = both if (first := tensor_of(both[0])) is not None and first.is_floating_point() else both[::-1]
    are_tensors = all(isinstance(each, fx.Node) and tensor_of(each) is not None for each in found)
    return found if are_tensors else None


def _are_joined(cache: Any) -> bool:
    """Whether the first two dimensions of a tensor are one in memory."""
    tensor = tensor_of(cache)
    return tensor is not None and tensor.dim() > 2 and tensor.stride(0) == tensor.shape[1] * tensor.stride(1)


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


def _same_table(key: Stored, value: Stored, roles: Roles, masks: Masks) -> list[fx.Node] | None:
    """The buffers on whose values it rests that both were gathered by the same table; None where they were not."""
    if key.table is None or value.table is None:
        return [] if key.table is value.table else None
    is_alike = shape_of(known_tensor(key.cache))[0] == shape_of(known_tensor(value.cache))[0]
    if not is_alike or len(key.indices) != len(value.indices):
        return None
    buffers: list[fx.Node] = []
    for (one, one_dims), (other, other_dims) in zip(key.indices.items(), value.indices.items(), strict=True):
        dims = resolve(one_dims)
        if dims != resolve(other_dims) or not {*axes_of(dims)} <= {*atoms(roles.batch), *atoms(roles.keys)}:
            return None
        found = () if one is other else masks.equal((one, other), dims, Axes(roles.batch, (), (), roles.keys))
        if found is None:
            return None
        buffers += found
    return buffers


def _places(roles: Roles, key: Stored, value: Stored) -> tuple[tuple[Axis, ...], tuple[Axis, ...]] | None:
    """The axes of blocks of a request, and of slots of a block; None where keys and tables are anything else."""
    batch, keys = atoms(roles.batch), atoms(roles.keys)
    columns = tuple(axis for axis in key.index_axes if axis in keys)
    slots = tuple(axis for axis in axes_of(key.rest) if axis in keys)
    same = tuple(axis for axis in axes_of(value.rest) if axis in keys)
    own = {*key.index_axes} - {*columns}
    if key.table is None:
        own = {*axes_of(key.rest)} & {*axes_of(value.rest)} & {*batch}
    both = [{*axes_of(each.rest)} & {*atoms(roles.heads)} for each in (key, value)]
    is_whole = both[0] == both[1] and own == {*batch} and (*columns, *slots) == keys and same == slots
    others = {*axes_of(key.rest), *axes_of(value.rest)} - {*slots} - ({*batch} if key.table is None else set())
    is_whole = is_whole and others <= {*atoms(roles.heads), *atoms(roles.features), *atoms(roles.value_features)}
    return (columns, slots) if is_whole else None


def _match(emitter: GatheredEmitter, core: Core, passed: Mapping[fx.Node, Dims], buffers: tuple[fx.Node, ...]) -> Match:
    """The finished match; ``passed`` are nodes on the way to other operands, ``buffers`` what it rests on.

    Raises:
        RefusedError: something that it reads is written to before its end.
    """
    attention, key, value = emitter.attention, emitter.key, emitter.value
    effects = attention.region.effects
    slots = product(axis.size for axis in emitter.slots) if key.table is not None else 1
    columns = max(_COLUMNS, -(-_KEYS // slots) if isinstance(slots, int) else _KEYS)
    within = (_BLOCKS, *(axis.size for axis in emitter.blocks[1:]))
    of_keys = emitter.columns if key.table is not None else emitter.slots
    longest = float(columns ** len(of_keys) * (slots if isinstance(slots, int) else 1) + 1)
    if emitter.queries or emitter.ends.window is not None:  # nothing may be beyond a table there
        of_terms = max(sum(max(each, 0) for _, _, each in emitter.ends.terms), 1)
        longest = (longest - 1 - emitter.ends.shift) // of_terms + 1
    begins = [each for terms, _ in emitter.ends.firsts for each in terms]
    reads: list[tuple[fx.Node, Dims, tuple[float, float] | None]] = [
        (attention.query.node, attention.query.dims, None), (key.cache, emitter.cache_dims(key), None),
        (value.cache, emitter.cache_dims(value), None),
        *((node, dims, (0.0, float(most))) for (node, dims), most in zip(key.indices.items(), within, strict=False)),
        *((node, dims, (0.0, longest)) for node, dims, _ in (*emitter.ends.terms, *begins)),
        *([] if emitter.sinks is None else [(emitter.sinks.node, emitter.sinks.dims, None)]),
    ]  # fmt: skip
    if len({node for node, _, _ in reads}) < len(reads):
        raise RefusedError("SHARED_OPERAND", "a tensor is several operands", "give each a tensor of its own")
    first = min((key.node, value.node), key=effects.position.__getitem__)
    core.check(effects, dict.fromkeys([node for node, _, _ in reads[1 : 3 + len(key.indices)]], first))
    inputs = {node: Input(dims, range=span) for node, dims, span in reads}
    inputs |= {node: Input(dims, implied="lengths") for node, (dims, _) in emitter.flags.items()}
    inputs |= {node: Input(dims, implied="table") for node, dims in value.indices.items() if node not in key.indices}
    inputs |= {
        node: Input(each.dims, implied=str(each))
        for node, each in attention.implied.items()
        if node not in emitter.flags
    }
    roles = attention.roles
    requests, queries, heads, kv_heads, block, width, value_width = emitter.extents("R T Hq Hk P D E")
    keys, dtype, device = attention.lengths()[1], attention.dtype, known_tensor(attention.output).device.type
    facts = PagedAttentionFacts(
        requests, queries, heads, kv_heads, keys, block, width, value_width, dtype, dtype, device
    )
    operands = {"query": attention.query.node, "key_cache": key.cache, "value_cache": value.cache}
    operands |= {} if key.table is None else {"block_table": key.table}
    index = "" if key.table is None else "[block_table]"
    formula = f"softmax(query key_cache{index}^T) value_cache{index}, {emitter.attrs.variant}"
    found = Found(emitter.attrs, facts, inputs, operands, emitter, formula, buffers=tuple(dict.fromkeys(buffers)))
    trial = Trial(
        limited=frozenset((*roles.features, *roles.value_features, *(emitter.slots if key.table is not None else ()))),
        # How many there are may be part of a number in the mask; slots are what an index within a block may hold.
        pinned=frozenset((*emitter.queries, *emitter.blocks[1:])),
        least={
            emitter.blocks[0]: _BLOCKS,
            **dict.fromkeys(of_keys, columns),
            **dict.fromkeys(
                atoms(roles.batch)[:1], max(1, _ROWS // facts.heads) if isinstance(facts.heads, int) else _ROWS
            ),
        },
        masked_rows_count=not attention.sees_keys,
    )
    read = {**attention.region.interior, **passed, **key.passed, **value.passed}
    return Match(OP, Site.of(core, attention.output_dims, read), found, trial)
