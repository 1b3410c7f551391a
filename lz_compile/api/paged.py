"""Attention over a cache in blocks, and writing to it: ``lz.paged_attention`` and ``lz.write_to_cache``.

A cache is memory in blocks that requests share: each has a row in a table that names its blocks in order. Both functions
take the same table, lengths and starts, so that a step of a model writes its new tokens and then looks at all of them.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

from lz_compile.api import paged_calls
from lz_compile.api.arguments import Arguments, is_plain, remembered
from lz_compile.lowering.arange import arange
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import NARROW, Operands, PagedAttentionAttrs

#: How a cache is laid out: blocks, then slots and heads, or heads and slots.
CacheLayout: TypeAlias = Literal["NHD", "HND"]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    query_starts: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    first_keys: torch.Tensor | None = None,
    layout: CacheLayout = "NHD",
) -> torch.Tensor:
    """Causal attention of the newest tokens of every request over its keys, wherever in the cache these lie.

    Requests may have different numbers of queries, as where prompts are read in parts while others make tokens. What no
    query sees is not read: slots that are not filled, blocks before a window, entries of the table beyond a length.

    Args:
        query: the newest tokens of every request.
        key_cache: floating point, int8 or float8.
        value_cache: in the dtype of the keys.
        block_table: the blocks of each request, in order.
        lengths: how many keys each request has, the newest tokens among them; 0 for rows that are padding.
        query_starts: where each request's queries begin, and at last where they end; without it each has one, or as many
            as the second of four dimensions says.
        scale: of the scores, by default ``D ** -0.5``.
        window: how many keys a query sees at most, its own among them.
        softcap: scores are ``softcap * tanh(scores / softcap)``.
        sinks: an extra score of every head that takes part in the softmax and has no value.
        key_scale: what stored keys are multiplied by.
        value_scale: what stored values are multiplied by.
        first_keys: the first key that each request sees, as under padding on the left; without it, the first that there is.
        layout: of the caches.

    Shapes:
        query ``[T, Hq, D]`` or ``[R, S, Hq, D]``; caches ``[N, P, Hk, D]`` and ``[N, P, Hk, E]`` (``"HND"``: ``[N, Hk, P,
        D]``), of N blocks of P slots; block_table ``[R, M]``, lengths and first_keys ``[R]``, query_starts ``[R + 1]``
        int32; sinks ``[Hq]``; scales ``[Hk]`` or ``[1]``. The result is like the query, with E features, in its dtype. A
        query that sees no key gives zero.

    Raises:
        ArgumentError: an operand is no such tensor, or does not fit the others. On a CPU, where it is not compiled: a table
            names a block that there is not, or a length is more than the table has. Elsewhere such blocks are not read, and
            what looks at them gives NaN.

    **Source** Kwon et al., 2023: *Efficient memory management for large language model serving with PagedAttention*.
    """
    given = query, key_cache, value_cache, block_table, lengths
    scales = key_scale, value_scale, first_keys
    _check_attention(*given, query_starts, sinks, *scales, scale, window, softcap, layout)
    if layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    tokens, starts = _flat(query, query_starts)
    x = Operands(tokens, key_cache, value_cache, block_table, lengths, starts, sinks, *scales)
    attrs = PagedAttentionAttrs(scale=scale, softcap=softcap, window=window, out_dtype=query.dtype)
    found = paged_calls.run(x, attrs)
    return found.reshape(*query.shape[:-1], value_cache.shape[-1])


def write_to_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    query_starts: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    layout: CacheLayout = "NHD",
) -> None:
    """Put keys and values of the newest tokens of every request where :func:`paged_attention` looks for them, in place.

    Integers are rounded to, and what a cache of eight bits does not hold becomes the nearest that it does.

    Args:
        key: of the newest tokens.
        value: of the same.
        key_cache: what is written to.
        value_cache: what is written to.
        block_table: the blocks of each request, in order.
        lengths: how many keys each request has when these are written.
        query_starts: where each request's tokens begin, as of :func:`paged_attention`; tokens behind the last are not
            written.
        key_scale: what stored keys will be multiplied by.
        value_scale: what stored values will be multiplied by.
        layout: of the caches.

    Shapes:
        key ``[T, Hk, D]`` or ``[R, S, Hk, D]``, value likewise with E features; others as of :func:`paged_attention`.

    Raises:
        ArgumentError: as of :func:`paged_attention`.
    """
    given = (key, value, key_cache, value_cache, block_table, lengths, query_starts, None, key_scale, value_scale)
    _check_writing(*given, layout)
    if layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    keys, starts = _flat(key, query_starts)
    x = Operands(keys, key_cache, value_cache, block_table, lengths, starts)
    if not keys.shape[0] or not lengths.shape[0]:
        return
    if key.device.type == "cpu" and is_plain(*given):
        newest = PagedAttentionAttrs(window=1)  # what lies before is not written to
        op.check_places(x, newest, "write_to_cache")
    if 0 in key_cache.shape or not block_table.numel():  # all is padding
        return
    owners, ends = op.seen_by(x)
    places, slots = (ends - 1).clamp(min=0), key_cache.shape[1]
    columns = places // slots
    blocks = block_table[owners, columns.clamp(max=block_table.shape[1] - 1)].long()
    # What has no place is not written; where it is not compiled on a CPU, that is an error before.
    is_real = (ends > 0) & (columns < block_table.shape[1]) & (blocks >= 0) & (blocks < key_cache.shape[0])
    # What is padding is written where the first real token is, as that: no size depends on data, and nothing on the order.
    chosen = torch.where(is_real, arange(ends, keys.shape[0]), is_real.long().argmax())
    place = places[chosen]
    block = torch.where(is_real.any(), blocks[chosen], 0)
    for rows, cache, scale in (
        (keys, key_cache, key_scale),
        (value.reshape(-1, *value.shape[-2:]), value_cache, value_scale),
    ):
        scaled = rows if scale is None else rows.float() / scale.float()[:, None]
        stored = _stored(scaled, cache.dtype)[chosen]
        bits = cache.view(torch.uint8) if cache.dtype in NARROW else cache
        stored = stored.view(torch.uint8) if cache.dtype in NARROW else stored
        bits.index_put_((block, place % slots), torch.where(is_real.any(), stored, bits[block, place % slots]))


def _stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return rows.float().round().clamp(-128, 127).to(dtype)
    if dtype in NARROW:
        most = torch.finfo(dtype).max
        return rows.float().clamp(-most, most).to(dtype)
    return rows.to(dtype)


def _flat(tokens: torch.Tensor, starts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens of all requests behind each other, and where those of each begin."""
    if tokens.dim() == 3:
        return tokens, starts
    requests, each = tokens.shape[:2]
    if each != 1:
        starts = (arange(tokens, requests + 1) * each).to(torch.int32)
    return tokens.reshape(requests * each, *tokens.shape[2:]), starts


@remembered
def _check_attention(*arguments: Any) -> None:
    *operands, scale, window, softcap, layout = arguments
    given, x = _Arguments("paged_attention"), Operands(*operands)
    given.tokens("query", x.query, "Hq", "D", x.query_starts)
    given.places("query", x, layout)
    given.tensor("sinks", x.sinks, "Hq", optional=True)
    given.tensor("first_keys", x.first_keys, "R", "index", optional=True)
    heads, kv_heads = x.query.shape[-2], x.key_cache.shape[2 if layout == "NHD" else 1]
    if kv_heads == 0 or heads % kv_heads:
        advice = f"Caches are {layout}, {_TOLD[layout]}: say so by layout if they are not"
        raise given.wrong("query", f"with heads in a multiple of the cache's, {kv_heads}", heads, advice)
    given.number("scale", scale, optional=True)
    given.number("softcap", softcap, 0.0, above=True, optional=True)
    given.number("window", window, 1, whole=True, optional=True)


@remembered
def _check_writing(key: Any, value: Any, *others: Any) -> None:
    *operands, layout = others
    given, x = _Arguments("write_to_cache"), Operands(key, *operands)
    given.tokens("key", key, "Hk", "D", x.query_starts)
    given.tokens("value", value, "Hk", "E", x.query_starts)
    if tuple(value.shape[:-1]) != tuple(key.shape[:-1]):
        raise given.wrong(
            "value", f"of as many tokens and heads as key, {tuple(key.shape[:-1])}", tuple(value.shape[:-1])
        )
    given.places("key", x, layout)


_TOLD = {"NHD": "[blocks, slots, heads, features]", "HND": "[blocks, heads, slots, features]"}
_LETTERS = {"NHD": "N P Hk", "HND": "N Hk P"}


class _Arguments(Arguments):
    """Arguments that have tokens and a cache."""

    def tokens(self, name: str, value: torch.Tensor, heads: str, features: str, starts: torch.Tensor | None) -> None:
        """Tokens one behind the other, or as many for every request."""
        is_even = isinstance(value, torch.Tensor) and value.dim() == 4
        if is_even and starts is not None:
            raise self.wrong("query_starts", f"for {name} of three dimensions", "four", "Leave it out")
        self.tensor(name, value, f"{'R S' if is_even else 'T'} {heads} {features}")

    def places(self, name: str, x: Operands, layout: CacheLayout) -> None:
        """The cache, which of it belongs to whom, and what its elements are multiplied by; tokens are the ``query``."""
        tokens, requests, starts = x.query, x.lengths, x.query_starts
        self.one_of("layout", layout, list(_LETTERS))
        self.tensor("key_cache", x.key_cache, f"{_LETTERS[layout]} D", "stored")
        self.tensor("value_cache", x.value_cache, f"{_LETTERS[layout]} E", "stored")
        if x.key_cache.dtype != x.value_cache.dtype:
            raise self.wrong("value_cache", f"in the dtype of key_cache, {x.key_cache.dtype}", x.value_cache.dtype)
        self.tensor("lengths", requests, "R", "index")
        self.tensor("block_table", x.block_table, "R M", "index")
        if starts is None and tokens.dim() == 3 and tokens.shape[0] != requests.shape[0]:
            advice = "Give query_starts, where those of each request begin"
            raise self.wrong(name, f"with one token for each of {requests.shape[0]} requests", tokens.shape[0], advice)
        if starts is not None:
            self.tensor("query_starts", starts, "Q", "index")
            if starts.shape[0] != requests.shape[0] + 1:
                expected = f"of {requests.shape[0] + 1} numbers, one more than there are requests"
                raise self.wrong("query_starts", expected, starts.shape[0])
        self.tensor("key_scale", x.key_scale, "Hk|1", optional=True)
        self.tensor("value_scale", x.value_scale, "Hk|1", optional=True)
        if x.key_cache.dtype == torch.int8 and (x.key_scale is None or x.value_scale is None):
            missing = "key_scale" if x.key_scale is None else "value_scale"
            raise self.wrong(missing, "for a cache in int8", None, "Give what the integers are multiplied by")
