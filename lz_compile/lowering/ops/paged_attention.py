"""Attention over a cache in blocks: requests of a batch look at keys and values wherever their blocks lie.

Canonical layout:

    query         [T, Hq, D], the tokens of all requests, one request behind the other
    key_cache     [N, P, Hk, D], N blocks of P slots; floating point, int8 or float8
    value_cache   [N, P, Hk, E]
    block_table   [R, M] int32, the blocks of each request in order; those beyond its length are not looked at
    lengths       [R] int32, how many keys each request has, the newest tokens among them
    query_starts  [Q] int32, Q = R + 1; request r has the queries from query_starts[r] to before query_starts[r + 1]
    sinks         [Hq], an extra score of each head that takes part in the softmax and has no value
    key_scale     [Hk or 1], what stored keys are multiplied by
    value_scale   [Hk or 1]
    first_keys    [R] int32, the first key that queries of each request see; without it, key 0
    result        [T, Hq, E] in ``attrs.out_dtype``

Without ``query_starts`` every request has one query (``T`` is ``R``). Key ``j`` of request ``r`` lies in slot ``j % P`` of
block ``block_table[r, j // P]``. The queries of a request are its last tokens: of ``n`` queries, query ``i`` sees the keys
before ``lengths[r] - n + i + 1``, with a window the last ``window`` of these, and none before ``first_keys[r]``. A query
that sees none gives zero, and so do queries behind the last request. What no query sees is not read: unused slots may hold
anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lz_compile.errors import ArgumentError
from lz_compile.ground.sizes import Size
from lz_compile.lowering import operands as base
from lz_compile.lowering.arange import arange
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.operands import MisfitError, operands
from lz_compile.lowering.sample import Asked, Sample, sampler

LAYOUT = "NHD"
#: Layouts beside the canonical one in which callers may have caches: heads before slots.
CALL_LAYOUTS = ("HND",)
EAGER_KERNEL = "torch.paged_attention"
EXACT_DIMS = ("num_heads", "num_kv_heads", "head_dim", "value_dim")
BUCKETED_DIMS = (("num_queries",), ("num_requests",), ("seq_len_k",), ("block_size",))
TIMELESS_FEATURES: frozenset[str] = frozenset({"sinks"})
#: As of attention: rounding of scores shows in the result as it is.
ROUNDING_POWER = 2


@dataclass(frozen=True)
class PagedAttentionAttrs(OpAttributes):
    """The attributes of one attention over blocks.

    ``scale`` multiplies the scores (None: ``D ** -0.5``), ``softcap`` bounds them as ``softcap * tanh(scores / softcap)``,
    ``window`` is how many keys a query sees at most.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    is_ragged: bool = False
    has_sinks: bool = False
    has_key_scale: bool = False
    has_value_scale: bool = False
    has_first_keys: bool = False
    out_dtype: torch.dtype = torch.float32


Attributes = PagedAttentionAttrs
#: The operands that kernels give gradients of: none; caches are for inference.
DIFFERENTIABLE: tuple[str, ...] = ()


@dataclass(frozen=True)
class PagedAttentionFacts:
    """Sizes, dtypes (of the query and of the caches) and device of one attention over blocks, for kernel selection."""

    num_requests: Size
    num_queries: Size
    heads: Size
    kv_heads: Size
    key_len: Size
    block_size: Size
    head_dim: Size
    value_dim: Size
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: str
    needs_grad: bool = False


SHAPES: Mapping[str, str] = {
    "query": "T Hq D",
    "key_cache": "N P Hk D",
    "value_cache": "N P Hk E",
    "block_table": "R M",
    "lengths": "R",
    "query_starts": "Q",
    "sinks": "Hq",
    "key_scale": "Hk|1",
    "value_scale": "Hk|1",
    "first_keys": "R",
}
#: What the elements of operands are that are no floating-point numbers of 16 bits or more.
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("key_cache", "value_cache"), "stored"),
    **dict.fromkeys(("block_table", "lengths", "query_starts", "first_keys"), "int32"),
}
VARIANT_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {"decode": {"is_ragged": False}, "ragged": {"is_ragged": True}}
TYPICAL_SIZES: Mapping[str, tuple[int, ...]] = {
    "num_requests": (1, 16),
    "seq_len_k": (512, 4096),
    "num_heads": (8,),
    "num_kv_heads": (2,),
    "head_dim": (64,),
    "block_size": (16,),
}
SIZES_FOLLOW: Mapping[str, str] = {"num_queries": "num_requests", "value_dim": "head_dim"}
#: Dtypes of caches whose elements are a quarter of float32.
NARROW = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@operands
class Operands(base.Operands):
    """What looks, the cache, and which of it belongs to whom; shapes as in the module's legend."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    first_keys: torch.Tensor | None = None


def canonical(operands: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """Operands as callers have them in the canonical layout: views, nothing is moved."""
    found = dict(operands)
    for name in ("key_cache", "value_cache"):
        if layout == "HND" and isinstance(found.get(name), torch.Tensor) and found[name].dim() == 4:
            found[name] = found[name].transpose(1, 2)
    return found


def from_operands(
    x: Operands, sizes: Mapping[str, int], **given: Any
) -> tuple[PagedAttentionAttrs, PagedAttentionFacts]:
    """The attributes, of which some are given, and the facts of an attention over blocks (real or fake)."""
    heads, kv_heads, requests = sizes["Hq"], sizes["Hk"], sizes["R"]
    if kv_heads == 0 or heads % kv_heads:
        advice = (
            "NHD caches are [blocks, slots, heads, features], HND ones have heads before slots: say which by layout"
        )
        raise MisfitError("paged_attention", "query", f"heads in a multiple of the cache's, {kv_heads}", heads, advice)
    if x.query_starts is None and sizes["T"] != requests:
        advice = "Give query_starts, where the queries of each request begin"
        expected = f"one for each of {requests} requests"
        raise MisfitError("paged_attention", "query", expected, sizes["T"], advice)
    if x.query_starts is not None and sizes["Q"] != requests + 1:
        expected = f"of {requests + 1} numbers, one more than there are requests"
        raise MisfitError("paged_attention", "query_starts", expected, sizes["Q"])
    if x.key_cache.dtype != x.value_cache.dtype:
        raise MisfitError("paged_attention", "value_cache", f"in {x.key_cache.dtype}, as the keys", x.value_cache.dtype)
    for name, least in (("softcap", 0.0), ("window", 0)):
        if given.get(name) is not None and given[name] <= least:
            raise MisfitError("paged_attention", name, f"above {least}", given[name])
    told = {"is_ragged": x.query_starts is not None, **x.has("sinks", "key_scale", "value_scale", "first_keys")}
    attrs = PagedAttentionAttrs(**{"out_dtype": x.query.dtype, **given, **told})
    lengths = (requests, sizes["T"], heads, kv_heads, sizes["M"] * sizes["P"], sizes["P"], sizes["D"], sizes["E"])
    dtypes = x.query.dtype, x.key_cache.dtype
    return attrs, PagedAttentionFacts(*lengths, *dtypes, x.query.device.type, x.wants_gradient())


def fake(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    """An empty result, contiguous."""
    return x.query.new_empty((*x.query.shape[:2], x.value_cache.shape[-1]), dtype=attrs.out_dtype)


def reference(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    """The definition of the op, in float32 or the wider dtype of its query: every query gathers the keys of its request.

    Shapes:
        as in the module's legend.
    """
    wide = torch.promote_types(x.query.dtype, torch.float32)
    if x.query.shape[0] == 0 or x.lengths.shape[0] == 0:
        return x.query.new_zeros(fake(x, attrs).shape, dtype=attrs.out_dtype)
    owners, _ = seen_by(x)
    key, value = (gathered(x, name, wide)[owners] for name in ("key", "value"))  # [T, L, Hk, D]
    tokens, heads, dims = x.query.shape
    grouped = x.query.to(wide).reshape(tokens, key.shape[2], -1, dims)
    sees = seen(x, attrs, key.shape[1])
    is_seen = sees[:, :, None, None]
    key, value = (torch.where(is_seen, each, 0.0) for each in (key, value))
    scale = dims**-0.5 if attrs.scale is None else attrs.scale
    scores = torch.einsum("tkgd,tlkd->tkgl", grouped, key).flatten(1, 2) * scale
    if attrs.softcap is not None:
        scores = attrs.softcap * torch.tanh(scores / attrs.softcap)
    scores = scores.masked_fill(torch.logical_not(sees[:, None]), -torch.inf)
    if x.sinks is None:
        weights = scores.softmax(-1)
    else:
        extra = x.sinks.to(wide)[None, :, None].expand(tokens, heads, 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    weights = torch.where(sees.any(-1)[:, None, None], weights, 0.0)
    weights = weights.reshape(tokens, key.shape[2], -1, key.shape[1])
    return torch.einsum("tkgl,tlke->tkge", weights, value).flatten(1, 2).to(attrs.out_dtype)


def seen_by(x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every query the request, and before which key it sees; 0 for those of no request.

    Shapes:
        both ``[T]`` int64.
    """
    tokens, lengths = arange(x.lengths, x.query.shape[0]), x.lengths.long()
    if x.query_starts is None:
        return tokens, lengths
    starts = x.query_starts.long()
    owners = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(0, lengths.shape[0] - 1)
    ends = lengths[owners] - (starts[owners + 1] - 1 - tokens)
    return owners, torch.where(tokens < starts[-1], ends, 0)


def seen(x: Operands, attrs: PagedAttentionAttrs, keys: int) -> torch.Tensor:
    """Whether every query sees each of the keys of its request, ``[T, keys]``."""
    owners, ends = seen_by(x)
    place = arange(ends, keys)
    sees = place < ends[:, None]
    if attrs.window is not None:
        sees = torch.logical_and(sees, place >= ends[:, None] - attrs.window)
    if x.first_keys is not None:
        sees = torch.logical_and(sees, place >= x.first_keys.long()[owners][:, None])
    return sees


def gathered(x: Operands, name: str, dtype: torch.dtype) -> torch.Tensor:
    """All blocks of every request behind each other, ``[R, M * P, Hk, D]``; of ``name``, key or value."""
    cache: torch.Tensor
    scale: torch.Tensor | None
    cache, scale = getattr(x, f"{name}_cache"), getattr(x, f"{name}_scale")
    blocks = x.block_table.long().clamp(0, cache.shape[0] - 1)
    if cache.dtype in NARROW and cache.dtype != torch.int8:  # few operations know such elements
        found = cache.view(torch.uint8)[blocks].view(cache.dtype).to(dtype)
    else:
        found = cache[blocks].to(dtype)
    wrong = (x.block_table < 0) | (x.block_table >= cache.shape[0])  # seen, or it would show nowhere
    found = found.masked_fill(wrong[..., None, None, None], torch.nan).flatten(1, 2)
    return found if scale is None else found * scale.to(dtype)[:, None]


def check_places(x: Operands, attrs: PagedAttentionAttrs, function: str = "paged_attention") -> None:
    """Whether every slot that is looked at is there, and the queries of requests follow each other.

    It reads the values of tables, so it waits for a device.

    Raises:
        ArgumentError: they are not; the text names the operand.
    """
    slots, blocks, columns = x.key_cache.shape[1], x.key_cache.shape[0], x.block_table.shape[1]
    counts = torch.ones_like(x.lengths)
    if x.query_starts is not None:
        starts = x.query_starts.tolist()
        if starts[0] != 0 or any(a > b for a, b in itertools.pairwise(starts)) or starts[-1] > x.query.shape[0]:
            expected = f"to rise from 0 to {x.query.shape[0]} at most, the number of queries"
            raise ArgumentError(function, "query_starts", expected, starts)
        counts = x.query_starts.diff()
    lengths = x.lengths.long()
    wrong = (lengths < 0) | (lengths > columns * slots)
    if bool(wrong.any()):
        expected = f"from 0 to {columns * slots}, the slots of {columns} blocks in a row of the table"
        raise ArgumentError(function, "lengths", expected, int(lengths[wrong][0]))
    first = torch.arange(columns, device=x.lengths.device) * slots
    used = first < lengths[:, None]
    if attrs.window is not None:  # blocks before the window may be given away
        used = used & (first + slots > (lengths - counts + 1 - attrs.window)[:, None])
    if x.first_keys is not None:
        used = used & (first + slots > x.first_keys.long()[:, None])
    wrong = used & ((x.block_table < 0) | (x.block_table >= blocks))
    if bool(wrong.any()):
        request, place = wrong.nonzero()[0].tolist()
        received = f"{int(x.block_table[request, place])} in row {request}"
        raise ArgumentError(function, "block_table", f"of blocks from 0 to {blocks - 1}", received)


def features(attrs: PagedAttentionAttrs, facts: PagedAttentionFacts) -> dict[str, str]:
    """What a kernel must support for this attention: feature name (``supports`` in descriptors) and what asks for it."""
    stored = str(facts.cache_dtype).removeprefix("torch.")
    is_float8 = facts.cache_dtype in NARROW and facts.cache_dtype != torch.int8
    needed = {
        "ragged": attrs.is_ragged and "requests of several queries",
        "gqa": facts.heads != facts.kv_heads and f"{facts.heads} query heads share {facts.kv_heads} key heads",
        "window": attrs.window is not None and f"a window of {attrs.window} keys",
        "first_keys": attrs.has_first_keys and "requests whose first keys nobody sees",
        "softcap": attrs.softcap is not None and f"scores capped at {attrs.softcap}",
        "sinks": attrs.has_sinks and "an attention sink in the softmax",
        "scales": (attrs.has_key_scale or attrs.has_value_scale) and "stored keys or values with a scale",
        "int8_cache": facts.cache_dtype == torch.int8 and "a cache in int8",
        "float8_cache": is_float8 and f"a cache in {stored}",
        "other_cache": facts.cache_dtype not in (*NARROW, facts.dtype) and f"a cache in {stored} for {facts.dtype}",
        "value_dim": facts.value_dim != facts.head_dim and f"head dim {facts.head_dim}, value dim {facts.value_dim}",
        "wide_result": attrs.out_dtype != facts.dtype and f"a {attrs.out_dtype} result of a {facts.dtype} query",
        "training": facts.needs_grad and "gradients",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}


@sampler("decode")
def sample(asked: Asked) -> Sample:
    """A problem of given sizes: full requests in blocks that lie anywhere."""
    variant, device = asked.variant, asked.device
    requests, tokens, slots, keys = asked.of("num_requests", "num_queries", "block_size", "seq_len_k")
    blocks = -(-keys // slots)
    table = torch.randperm(requests * blocks, device=device).to(torch.int32).reshape(requests, blocks)
    lengths = torch.full((requests,), keys, dtype=torch.int32, device=device)
    heads, kv_heads, *dims = asked.of("num_heads", "num_kv_heads", "head_dim", "value_dim")
    query = asked.random(requests if variant == "decode" else tokens, heads, dims[0])
    tensors = [query, *(asked.random(requests * blocks, slots, kv_heads, each, seeks=False) for each in dims)]
    given: tuple[torch.Tensor, ...] = (*tensors, table, lengths)
    if variant == "ragged":
        given = (*given, torch.linspace(0, tokens, requests + 1, device=device).to(torch.int32))
    return Sample.of(given, Operands, _written)


def _written(attrs: PagedAttentionAttrs, *given: torch.Tensor) -> torch.Tensor:
    return reference(Operands(*given), attrs)
