"""Blocked attention: plain matmuls over blocks of queries with only the keys that they need, left to Inductor to fuse.

A block's scores stay in cache between the two products, and the keys before and after those that the block sees are
skipped. Everything in a block is ordinary PyTorch, so soft caps, sinks, biases, documents and their gradients come for
free. A compiled backward computes the scores again instead of reading what the forward stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from lz_compile.ground.sizes import is_one
from lz_compile.lowering import dropping
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernels.attention import capping, mask_numbers
from lz_compile.lowering.ops.attention import Operands

#: Operands that are not broadcast to scores as they are.
_NOT_OVER_SCORES = {"query", "key", "value", "query_documents", "key_documents"}
#: Queries per block, and the most blocks that are unrolled. Proofs use small blocks.
BLOCK = 256
MAX_BLOCKS = 16
#: The most blocks that differ in their sizes: each of these is compiled code, of about a second.
MAX_KINDS = 3


def attention(x: Operands, attrs: AttentionAttrs, block: int = BLOCK) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``); static lengths are cut into blocks."""
    query, (batch, heads, queries, head_dim) = x.query, x.query.shape
    kv_heads, keys = x.key.shape[1], x.key.shape[2]
    whole = _Block(
        # One dimension of batch and heads: where that takes a copy, it is made here and not once for every block.
        query=query.reshape(batch * kv_heads, -1, queries, head_dim) if attrs.enable_gqa else query.flatten(0, 1),
        key_t=_in_one_piece(x.key.flatten(0, 1), queries).transpose(-2, -1),
        value=_in_one_piece(x.value.flatten(0, 1), queries),
        over_scores=_over_scores(x, attrs),
        extents=(batch, heads, queries, keys),
        shift=0 if attrs.limits is None else attrs.limits.offset(queries, keys),
    )
    mean = _mean(x.value, attrs, heads // kv_heads) if attrs.masked_rows == "mean" and whole.has_empty_rows else None
    blocks = [_attend(whole, span, mean, attrs) for span in _spans(whole, block, attrs)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def _in_one_piece(tensor: torch.Tensor, queries: Any) -> torch.Tensor:
    """Keys or values ``[N, S, D]`` as products on CPUs want them in 16 bits; one query reads them where they lie."""
    is_product = tensor.device.type == "cpu" and tensor.dtype.itemsize == 2 and not is_one(queries)
    return tensor.contiguous() if is_product else tensor


def _over_scores(x: Operands, attrs: AttentionAttrs) -> dict[str, torch.Tensor]:
    """What is broadcast to scores, by name; positions where something is linear in them, words where some are dropped."""
    found = {name: each for name, each in x.given().items() if name not in _NOT_OVER_SCORES}
    if x.slopes is not None:
        found["query_positions"] = _positions(x.query)
        found["key_positions"] = _positions(x.key).transpose(-2, -1)
    if x.query_documents is not None and x.key_documents is not None:
        found["query_documents"] = x.query_documents[:, None, :, None]
        found["key_documents"] = x.key_documents[:, None, None, :]
    if attrs.dropout_p:
        found["row_words"], found["column_words"] = dropping.words(x.query, (*x.query.shape[:3], x.key.shape[2]))
    return found


def _positions(tensor: torch.Tensor) -> torch.Tensor:
    """The positions of queries or keys, ``[S, 1]``."""
    return tensor.new_ones((tensor.shape[2], 1), dtype=torch.float32).cumsum(0)


def _mean(value: torch.Tensor, attrs: AttentionAttrs, groups: Any) -> torch.Tensor:
    """What a row gives that masks every key, ``[B, Hq, 1, E]``."""
    mean = value.mean(2, keepdim=True, dtype=_wide(attrs))
    return mean.repeat_interleave(groups, 1) if attrs.enable_gqa else mean


# ---- blocks --------------------------------------------------------------------------------------------------------

#: The queries of a block (from the first to before the last) and its keys.
_Span: TypeAlias = tuple[Any, Any, Any, Any]


@dataclass(frozen=True)
class _Block:
    """Some queries and the keys that they may see.

    Shapes:
        query: ``[N, rows, D]`` with ``N = B * Hq``, or ``[N, G, rows, D]`` with ``N = B * Hk`` for groups of ``G`` heads.
        key_t, value: ``[N, D, columns]`` and ``[N, columns, E]``.
        over_scores: by name, broadcastable to ``extents``, which is ``B, Hq, rows, columns``.

    ``shift`` is the position of the first query, counted from the first key.
    """

    query: torch.Tensor
    key_t: torch.Tensor
    value: torch.Tensor
    over_scores: Mapping[str, torch.Tensor]
    extents: tuple[Any, Any, Any, Any]
    shift: Any

    @property
    def has_empty_rows(self) -> bool:
        """Whether a row may mask every key; a band leaves one to each."""
        return not self.over_scores.keys().isdisjoint({"mask", "bias", "query_documents"})

    def of_queries(self, start: int, stop: int) -> _Block:
        batch, heads, queries, keys = self.extents
        if (start, stop) == (0, queries):
            return self

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.shape[-2] == 1 else tensor[..., start:stop, :]

        return replace(
            self,
            query=cut(self.query),
            over_scores={name: cut(tensor) for name, tensor in self.over_scores.items()},
            extents=(batch, heads, stop - start, keys),
            shift=self.shift + start,
        )

    def of_keys(self, first: int, last: int) -> _Block:
        batch, heads, queries, keys = self.extents
        if (first, last) == (0, keys):
            return self

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.shape[-1] == 1 else tensor[..., first:last]

        return replace(
            self,
            key_t=cut(self.key_t),
            value=self.value[:, first:last],
            over_scores={name: cut(tensor) for name, tensor in self.over_scores.items()},
            extents=(batch, heads, queries, last - first),
            shift=self.shift - first,
        )


def _spans(whole: _Block, block: int, attrs: AttentionAttrs) -> list[_Span]:
    """Those of blocks that are as small as wished, or as large as it takes to have few kinds of them."""
    *_, queries, keys = whole.extents
    if not isinstance(queries, int):
        return [(0, queries, 0, keys)]
    skips = isinstance(keys, int) and _may_skip(whole, attrs)
    is_cut = attrs.limits is not None  # by a band, whose place in a block is part of its code
    size = max(block, -(-queries // MAX_BLOCKS)) if queries > 2 * block else queries
    while True:
        blocks = bounds(queries, size)
        spans = [(*each, *(_seen(each, queries, keys, attrs) if skips else (0, keys))) for each in blocks]
        kinds = {(stop - start, skips and last - first, is_cut and first - start) for start, stop, first, last in spans}
        if len(kinds) <= MAX_KINDS or size >= queries:
            return spans
        size = -(-queries // (len(blocks) - 1))


def bounds(queries: int, size: int) -> list[tuple[int, int]]:
    """The half-open ranges of queries that are computed together."""
    return [(start, min(start + size, queries)) for start in range(0, queries, size)]


def _seen(rows: tuple[int, int], queries: int, keys: int, attrs: AttentionAttrs) -> tuple[int, int]:
    first, last = attrs.span(*rows, queries, keys)
    return (first, last) if first < last else (0, 1)  # the mask drops that one too


def _may_skip(whole: _Block, attrs: AttentionAttrs) -> bool:
    """Whether keys that a query does not see may be left out.

    In a row that masks every key they all count. A mean is given to it as such, which is not enough where dropout draws
    which of them do, where their fills differ, or where an infinite bias leaves some of them only.
    """
    if attrs.masked_rows == "mean" and whole.has_empty_rows:
        return not attrs.dropout_p and ("bias" not in whole.over_scores or attrs.bias_is_finite)
    return attrs.masked_rows != "fill"


# ---- one block -----------------------------------------------------------------------------------------------------


def _attend(whole: _Block, span: _Span, mean: torch.Tensor | None, attrs: AttentionAttrs) -> torch.Tensor:
    """The attention of one block, ``[B, Hq, rows, E]``; ``mean`` is what a row gives that masks every key.

    The values are divided by the sum of the weights after the product, which is a pass over the output instead of one
    over the scores. Inductor does not take this form for one of its own attention patterns, which rewrite it wrongly for
    some views (pytorch issue 195320).
    """
    start, stop, first, last = span
    with recomputed(whole.query):
        block = whole.of_queries(start, stop).of_keys(first, last)
        scores = _masked(_scores(block, attrs), block, attrs)
    sinks = block.over_scores.get("sinks")
    largest = _largest(scores, sinks, attrs)
    with recomputed(whole.query):
        weights = torch.exp(scores - largest)
        if not _is_normalised(block.value.dtype):
            # They are summed as they are multiplied: no wider ones lie in memory beside them.
            weights = weights.to(block.value.dtype)
    total = weights.sum(-1, keepdim=True, dtype=scores.dtype)
    if sinks is not None:
        total = total + torch.exp(sinks.to(scores.dtype) - largest)
    if attrs.masked_rows == "zero":
        total = torch.where(total == 0, 1.0, total)
    if attrs.zeroes_nan:  # ahead of the product: NaN times a gradient of zero would be one of all values
        is_defined = total > 0
        with recomputed(whole.query):
            weights = torch.where(is_defined, weights, 0.0)
        total = torch.where(is_defined, total, 1.0)
    out = _weighted(weights, total, block, attrs)
    if mean is not None and (first, last) != (0, whole.extents[3]):
        out = torch.where(largest <= _lowest(attrs), mean, out)
    return out.to(block.value.dtype)


def _wide(attrs: AttentionAttrs) -> torch.dtype:
    """Everything between the two products is computed in float32 at least; Inductor keeps it in registers."""
    return torch.float64 if attrs.score_dtype == torch.float64 else torch.float32


def _lowest(attrs: AttentionAttrs) -> float:
    """A fill that is as low as a bias with the smallest number of the source's scores; float16's is not low enough."""
    is_wide = attrs.score_dtype == torch.float16
    return torch.finfo(torch.float32 if is_wide else attrs.score_dtype).min


def _scores(block: _Block, attrs: AttentionAttrs) -> torch.Tensor:
    query, key_t = block.query.to(attrs.score_dtype), block.key_t.to(attrs.score_dtype)
    if attrs.enable_gqa:
        query = query.flatten(1, 2)
    scale = query.shape[-1] ** -0.5 if attrs.scale is None else attrs.scale
    if attrs.score_dtype == torch.float16:  # the product without its scale may leave float16's range
        scores = ((query * scale) @ key_t).to(_wide(attrs))
    else:
        scores = (query @ key_t).to(_wide(attrs)) * scale
    if attrs.softcap is not None:
        scores = capping.tanh(scores / attrs.softcap) * attrs.softcap
    scores, operands = scores.reshape(block.extents), block.over_scores
    if "bias" in operands:
        scores = scores + operands["bias"]
    if "slopes" in operands:
        scores = scores + operands["slopes"] * (operands["key_positions"] - operands["query_positions"])
    return scores


def _masked(scores: torch.Tensor, block: _Block, attrs: AttentionAttrs) -> torch.Tensor:
    operands = block.over_scores
    keep = mask_numbers.of_mask(operands["mask"], block.extents) if "mask" in operands else None
    if "query_documents" in operands:
        same = operands["query_documents"] == operands["key_documents"]
        keep = same if keep is None else torch.logical_and(keep, same)
    band = _cutting(attrs.limits, block)
    if band is not None:
        inside = mask_numbers.of_band(band, block.query, block.extents, block.shift)
        keep = inside if keep is None else torch.logical_and(keep, inside)
    if keep is None:
        return scores
    if "fill" in operands:
        return torch.where(keep, scores, operands["fill"].to(scores.dtype))
    return torch.where(keep, scores, _lowest(attrs) if attrs.masked_rows == "mean" else -math.inf)


def _cutting(band: Band | None, block: _Block) -> Band | None:
    """What of a band runs through the block; None where every query sees every key."""
    *_, rows, columns = block.extents
    if band is None or not all(isinstance(number, int) for number in (rows, columns, block.shift)):
        return band
    cuts_below = band.lower is not None and rows - 1 + block.shift + band.lower > 0
    cuts_above = band.upper is not None and block.shift + band.upper < columns - 1
    if not (cuts_below or cuts_above):
        return None
    return replace(band, lower=band.lower if cuts_below else None, upper=band.upper if cuts_above else None)


def _largest(scores: torch.Tensor, sinks: torch.Tensor | None, attrs: AttentionAttrs) -> torch.Tensor:
    """The largest score of each row, sinks included, or zero where there is none and that is what the row gives."""
    largest = scores.amax(-1, keepdim=True).detach()
    if sinks is not None:
        largest = torch.maximum(largest, sinks.detach().to(scores.dtype))
    return torch.where(largest == -math.inf, 0.0, largest) if attrs.masked_rows == "zero" else largest


def _is_normalised(dtype: torch.dtype) -> bool:
    return dtype == torch.float16 or (dtype == torch.bfloat16 and torch.is_grad_enabled())


def _weighted(weights: torch.Tensor, total: torch.Tensor, block: _Block, attrs: AttentionAttrs) -> torch.Tensor:
    """The mean of the values under weights whose sum is ``total``.

    Sums of unnormalised values may leave float16's range; and a gradient through the sum and one through the product
    cancel in rows with one strong key, which they do not where only one of them is rounded to 16 bits.
    """
    batch, heads, rows, columns = block.extents
    dtype = block.value.dtype
    is_normalised = _is_normalised(dtype)
    with recomputed(block.query):
        if is_normalised:
            weights = weights / total
        if attrs.dropout_p:
            places = block.over_scores
            weights = dropping.dropped(weights, places["row_words"], places["column_words"], attrs.dropout_p)
        weights = weights.to(dtype).reshape(block.value.shape[0], -1, columns)
    out = (weights @ block.value).reshape(batch, heads, rows, block.value.shape[-1])
    return out if is_normalised else out / total


# ---- what a compiled backward computes again, instead of reading what the forward stored for it ----------------------


def recomputed(tensor: Any) -> AbstractContextManager[None]:
    """The operations made inside, where they become nodes of a graph that ``tensor`` is a proxy or a traced tensor of.

    A node says so in its metadata, as those that activation checkpointing makes do, and AOTAutograd's partitioner obeys;
    no graph is nested and nothing is kept out of its cache. Random numbers are the same again: by then they are functions
    of a seed. Operations that simply run, and those that Dynamo traces, are as ever.
    """
    if torch.compiler.is_dynamo_compiling() or not (isinstance(tensor, fx.Proxy) or get_proxy_mode() is not None):
        return nullcontext()
    return _marking()


@contextmanager
def _marking() -> Iterator[None]:
    with traceback.preserve_node_meta():
        traceback.current_meta = {**traceback.current_meta, "recompute": CheckpointPolicy.MUST_RECOMPUTE}
        yield
