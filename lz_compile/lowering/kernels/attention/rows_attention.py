"""Attention on CPUs in which a row has the same bits in every batch, whatever its padding and the chunks of its prefill.

A few queries meet the keys in blocks that begin at the first key that they see, by a softmax that goes on from block to
block. What fills a block up adds zeros, exactly. Everything is one product or one pass over a piece of a size that the model
alone decides, small enough for one thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import attention as op
from lz_compile.lowering.ops.attention import Operands
from lz_compile.lowering.rows import filled_up, product

#: Keys of a block, and rows (queries times the heads that share keys) of a piece: their product is what one thread does.
_KEYS, _ROWS = 128, 128
#: Queries of a piece, at most.
_QUERIES = 16
#: Elements that vectors divide, in place of one number for each row.
_WIDE = 64


@dataclass
class _State:
    """Of the rows of a piece: the largest score so far, the sum of weights and of weighted values under it."""

    largest: torch.Tensor
    weights: torch.Tensor
    values: torch.Tensor

    def take(self, scores: torch.Tensor, value: torch.Tensor) -> None:
        """Go on with the scores of another block."""
        largest = torch.maximum(self.largest, scores.amax(-1, keepdim=True))
        base = torch.where(largest == -math.inf, 0.0, largest)
        weights = torch.exp(scores - base)
        # As wide as vectors are: where a row stands must not say whether a vector or its rest computes it.
        kept = torch.exp((self.largest - base).expand(-1, _WIDE).contiguous())[:, :1]
        self.weights = self.weights * kept + weights.sum(-1, keepdim=True)
        self.values = self.values * kept + product(weights, value)
        self.largest = largest


@dataclass
class _Heads:
    """One key head of one row of the batch, and the query heads that share it."""

    x: Operands
    attrs: AttentionAttrs
    keep: torch.Tensor | None
    bias: torch.Tensor | None
    batch: int
    heads: slice

    def of(self, tensor: torch.Tensor, queries: slice) -> torch.Tensor:
        """What lies over all scores, for some queries: ``[heads, queries, ...]``."""
        found = tensor[self.batch if tensor.shape[0] > 1 else 0]
        found = found[self.heads] if found.shape[0] > 1 else found
        found = found[:, queries] if found.shape[1] > 1 else found
        return found.expand(self.heads.stop - self.heads.start, queries.stop - queries.start, -1)

    def runs(self) -> Iterator[tuple[slice, int]]:
        """Queries that follow each other and see the same key first, with that key."""
        count, keys = self.x.query.shape[2], self.x.key.shape[2]
        seen = None if self.keep is None else self.of(self.keep, slice(0, count))[0]
        if self.bias is not None:
            bias = self.of(self.bias, slice(0, count))[0]
            kept = bias > torch.finfo(bias.dtype).min / 2  # of what is masked by a number, nothing is left either
            seen = kept if seen is None else seen & kept
        if seen is None or seen.shape[-1] != keys:
            yield slice(0, count), 0
            return
        firsts, counts = seen.to(torch.uint8).argmax(-1).unique_consecutive(return_counts=True)
        stop = 0
        for first, length in zip(firsts.tolist(), counts.tolist(), strict=True):
            yield slice(stop, stop + length), first
            stop += length

    def scores(self, query: torch.Tensor, key: torch.Tensor, queries: slice, first: int) -> torch.Tensor:
        """The scores of a piece, ``[rows, keys]``, with keys from ``first`` on."""
        attrs, size = self.attrs, min(_KEYS, self.x.key.shape[2] - first)
        scale = self.x.query.shape[-1] ** -0.5 if attrs.scale is None else attrs.scale
        scores = product(query, key.t()).mul_(scale)
        if attrs.softcap is not None:
            scores = torch.tanh(scores / attrs.softcap).mul_(attrs.softcap)
        heads, count = self.heads.stop - self.heads.start, queries.stop - queries.start
        seen = scores.view(heads, -1, _KEYS)[:, :count, :size]
        keys = slice(first, first + size)
        if self.bias is not None:
            bias = self.of(self.bias, queries)
            seen += bias[..., keys] if bias.shape[-1] > 1 else bias
        if self.keep is not None:
            keep = self.of(self.keep, queries)
            lowest = torch.finfo(self.x.query.dtype).min if attrs.masked_rows == "mean" else -math.inf
            seen.masked_fill_(~(keep[..., keys] if keep.shape[-1] > 1 else keep), lowest)
        scores[:, size:] = -math.inf
        return scores


def _attention(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    result = op.fake(x, attrs)
    wide = torch.promote_types(x.query.dtype, torch.float32)
    bias = None if x.bias is None else x.bias.to(wide)
    if x.slopes is not None:
        slopes = x.slopes.to(wide) * op.distances(x.query, x.key, wide)
        bias = slopes if bias is None else bias + slopes
    keep = op.merged_mask(x, attrs)
    keep, bias = (None if each is None else each[(None,) * (4 - each.dim())] for each in (keep, bias))
    group = x.query.shape[1] // x.key.shape[1]
    is_alike = all(each is None or each.shape[1] == 1 for each in (keep, bias))
    together = group if is_alike else 1  # heads that see the same keys
    for batch, head in itertools.product(range(x.query.shape[0]), range(0, x.query.shape[1], together)):
        part = _Heads(x, attrs, keep, bias, batch, slice(head, head + together))
        key, value = (each[batch, head // group].to(wide) for each in (x.key, x.value))
        step = max(1, min(_QUERIES, _ROWS // together))
        for run, first in part.runs():
            blocks = [*zip(_blocks(key[first:]), _blocks(value[first:]), strict=True)]
            for start in range(run.start, run.stop, step):
                queries = slice(start, min(start + step, run.stop))
                found = _piece(part, blocks, queries, first, step, wide)
                result[batch, part.heads, queries] = found.to(result.dtype)
    return result


def _piece(
    part: _Heads,
    blocks: list[tuple[torch.Tensor, torch.Tensor]],
    queries: slice,
    first: int,
    step: int,
    wide: torch.dtype,
) -> torch.Tensor:
    """The result of some queries, ``[heads, queries, E]``."""
    x, heads, count = part.x, part.heads.stop - part.heads.start, queries.stop - queries.start
    given = x.query[part.batch, part.heads, queries].to(wide).transpose(0, 1)
    query = filled_up(given, step).transpose(0, 1).reshape(heads * step, -1)
    state = _State(
        query.new_full((heads * step, 1), -math.inf),
        query.new_zeros(heads * step, 1),
        query.new_zeros(heads * step, x.value.shape[-1]),
    )
    if x.sinks is not None:
        state.largest.view(heads, step, 1)[:, :count] = part.of(x.sinks.to(wide), queries)
        state.weights.view(heads, step, 1)[:, :count] = 1.0
    for index, (key, value) in enumerate(blocks):
        state.take(part.scores(query, key, queries, first + index * _KEYS), value)
    out = state.values / state.weights
    if part.attrs.masked_rows == "zero" or part.attrs.zeroes_nan:
        out = torch.where(state.weights == 0, 0.0, out)
    return out.view(heads, step, -1)[:, :count]


def _blocks(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, rows.shape[0], _KEYS):
        yield filled_up(rows[start : start + _KEYS], _KEYS)


attention = kernel_operator("row_attention", op, _attention, kernel_id="lz.row_attention")
