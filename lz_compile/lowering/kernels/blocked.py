"""Blocked attention: plain matmuls over blocks of queries with only the keys that they need, left to Inductor to fuse.

A block's scores stay in cache between the two products, and a causal mask skips the keys after the block. Everything in
a block is ordinary PyTorch, so soft caps, sinks, biases and their gradients come for free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lz_compile.lowering.ops.attention import AttentionAttrs

#: Queries per block, and the most blocks that are unrolled (each one is compiled code). Proofs use small blocks.
BLOCK = 256
MAX_BLOCKS = 16


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    fill: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    attrs: AttentionAttrs,
    block: int = BLOCK,
) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``); causality needs static lengths."""
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    key_t = key.transpose(-2, -1)
    bounds = block_bounds(queries, block) if isinstance(queries, int) else [(0, queries)]
    # Where masked keys have a finite fill they count in a row that masks every key.
    skips = attrs.is_causal and (mask is None or attrs.masked_rows in ("nan", "zero"))
    blocks = []
    for start, stop in bounds:
        limit = min(stop, keys) if skips else keys
        part = _Part(start, stop, limit, whole=len(bounds) == 1, all_keys=not skips or limit == keys)
        rows = part.queries(query)
        if attrs.enable_gqa:
            rows = rows.reshape(batch, kv_heads, -1, rows.shape[-1])
        scores = _scores(rows, part.keys(key_t), attrs)
        if attrs.enable_gqa:
            scores = scores.reshape(batch, heads, stop - start, limit)
        scores = _masked(scores, part, mask, bias, fill, attrs)
        weights, total = _exponentials(scores, None if sinks is None else part.queries(sinks), attrs)
        is_number = total > 0 if attrs.zeroes_nan else None
        # Sums of unnormalised values may leave float16's range; and a gradient through the sum and one through the
        # product cancel in rows with one strong key, which they do not where only one of them is rounded to 16 bits.
        if value.dtype == torch.float16 or (value.dtype == torch.bfloat16 and torch.is_grad_enabled()):
            weights, total = weights / total, torch.ones_like(total)
        if attrs.dropout_p:
            weights = torch.nn.functional.dropout(weights, attrs.dropout_p)
        weights = weights.to(value.dtype)
        if attrs.enable_gqa:
            weights = weights.reshape(batch, kv_heads, -1, limit)
        out = weights @ (value if part.all_keys else value[:, :, :limit])
        if attrs.enable_gqa:
            out = out.reshape(batch, heads, stop - start, out.shape[-1])
        out = out / total if is_number is None else torch.where(is_number, out / total, 0.0)
        blocks.append(out.to(value.dtype))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


@dataclass(frozen=True)
class _Part:
    """Queries ``start`` to ``stop`` and keys up to ``limit``; nothing is sliced that is needed ``whole``."""

    start: int
    stop: int
    limit: int
    whole: bool
    all_keys: bool

    def queries(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.whole or tensor.shape[-2] == 1 else tensor[..., self.start : self.stop, :]

    def keys(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.all_keys or tensor.shape[-1] == 1 else tensor[..., : self.limit]


def block_bounds(queries: int, block: int) -> list[tuple[int, int]]:
    """The half-open ranges of queries that are computed together: at most :data:`MAX_BLOCKS`, one for up to two blocks."""
    size = max(block, -(-queries // MAX_BLOCKS)) if queries > 2 * block else queries
    return [(start, min(start + size, queries)) for start in range(0, queries, size)]


def _wide(attrs: AttentionAttrs) -> torch.dtype:
    """Everything between the two products is computed in float32 at least; Inductor keeps it in registers."""
    return torch.float64 if attrs.score_dtype == torch.float64 else torch.float32


def _scores(query: torch.Tensor, key_t: torch.Tensor, attrs: AttentionAttrs) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if attrs.scale is None else attrs.scale
    query, key_t = query.to(attrs.score_dtype), key_t.to(attrs.score_dtype)
    if attrs.score_dtype == torch.float16:  # the product without its scale may leave float16's range
        scores = ((query * scale) @ key_t).to(_wide(attrs))
    else:
        scores = (query @ key_t).to(_wide(attrs)) * scale
    if attrs.softcap is not None:
        scores = torch.tanh(scores / attrs.softcap) * attrs.softcap
    return scores


def _masked(
    scores: torch.Tensor,
    part: _Part,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    fill: torch.Tensor | float | None,
    attrs: AttentionAttrs,
) -> torch.Tensor:
    """Scores with the block's bias added and its masked elements filled."""
    if bias is not None:
        scores = scores + part.keys(part.queries(bias))
    keep = None if mask is None else part.keys(part.queries(mask))
    if attrs.is_causal:
        causal = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(part.start)
        keep = causal if keep is None else torch.logical_and(keep, causal)
    if keep is None:
        return scores
    if fill is None:
        fill = torch.finfo(scores.dtype).min if attrs.masked_rows == "mean" else -math.inf
    elif not isinstance(fill, float):
        fill = part.keys(part.queries(fill)).to(scores.dtype)
    return torch.where(keep, scores, fill)


def _exponentials(
    scores: torch.Tensor, sinks: torch.Tensor | None, attrs: AttentionAttrs
) -> tuple[torch.Tensor, torch.Tensor]:
    """``exp(scores - maximum)`` and its sum over the keys (and sinks).

    The values are divided by the sum after the product, which is a pass over the output instead of one over the scores.
    Inductor does not take this form for one of its own attention patterns, which rewrite it wrongly for some views
    (pytorch issue 195320).
    """
    largest = scores.amax(-1, keepdim=True).detach()
    if sinks is not None:
        largest = torch.maximum(largest, sinks.detach().to(scores.dtype))
    if attrs.masked_rows == "zero":
        largest = torch.where(largest == -math.inf, 0.0, largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(scores.dtype) - largest)
    return weights, torch.where(total == 0, 1.0, total) if attrs.masked_rows == "zero" else total
