"""Tiled attention on CPUs: one operator that computes a tile of scores at a time, in memory that all tiles share.

A tile fits into the cache of a core, and everything that happens to it is one pass of PyTorch's own kernels over it there.
Keys that a tile does not see are skipped, at lengths that only the call knows, and where only the data says so (documents
and masks). The backward computes every tile again: of what is as large as the scores, nothing outlives its tile.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.attention import AttentionAttrs, Band, Reach
from lz_compile.lowering.tiles import Heads, Problem, Tile, Weights


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    query_documents: torch.Tensor | None = None,
    key_documents: torch.Tensor | None = None,
    attrs: AttentionAttrs,
    rows: int = 0,
) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``); ``rows`` per tile, 0: as many as fit."""
    tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))
    floats = (query.new_zeros(0) if tensor is None else tensor for tensor in (bias, sinks, slopes))
    seed = torch.rand_like(query.new_zeros(2, dtype=torch.float32)) if attrs.dropout_p else None
    result: torch.Tensor = _operator(
        *tokens, *floats, mask, query_documents, key_documents, seed, _encoded(attrs), rows
    )
    return result.transpose(1, 2)


def _encoded(attrs: AttentionAttrs) -> str:
    return json.dumps(asdict(attrs), default=str)


@lru_cache(maxsize=256)
def _decoded(text: str) -> AttentionAttrs:
    given: dict[str, Any] = json.loads(text)
    band, reach = given["band"], given["reach"]
    given["band"] = None if band is None else Band(**band)
    given["reach"] = None if reach is None else Reach(reach["tile"], tuple((low, high) for low, high in reach["spans"]))
    given["score_dtype"] = getattr(torch, given["score_dtype"].removeprefix("torch."))
    return AttentionAttrs(**given)


# ---- the operator --------------------------------------------------------------------------------------------------


def _tiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    sinks: torch.Tensor,
    slopes: torch.Tensor,
    mask: torch.Tensor | None,
    query_documents: torch.Tensor | None,
    key_documents: torch.Tensor | None,
    seed: torch.Tensor | None,
    attrs: str,
    rows: int,
) -> torch.Tensor:
    """Attention over tokens, ``[B, S, H, D]``; a bias, sinks or slopes that there are not have no elements."""
    floats = (_given(bias), _given(sinks), _given(slopes))
    masks = (mask, query_documents, key_documents)
    problem = Problem(query, key, value, *floats, *masks, seed, _decoded(attrs), rows)
    result = query.new_empty((*query.shape[:3], value.shape[-1]))
    for heads in problem.heads():
        for tile in heads.tiles():
            weights = tile.weights()
            noise = tile.noise()
            if noise is not None:
                weights.scores.mul_(noise)
            out = torch.bmm(tile.rounded(weights.scores), tile.value)
            tile.put(result, out if weights.is_mean is None else torch.where(weights.is_mean, heads.mean, out))
    return result


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[-1]))


def _given(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if tensor.numel() else None


def _gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    sinks: torch.Tensor,
    slopes: torch.Tensor,
    mask: torch.Tensor | None,
    query_documents: torch.Tensor | None,
    key_documents: torch.Tensor | None,
    seed: torch.Tensor | None,
    attrs: str,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of query, key, value, bias, sinks and slopes."""
    floats = (_given(bias), _given(sinks), _given(slopes))
    masks = (mask, query_documents, key_documents)
    with torch.no_grad():
        problem = Problem(query, key, value, *floats, *masks, seed, _decoded(attrs), rows)
        found = _Found.zeros(problem, bias, sinks, slopes)
        for heads in problem.heads():
            _add_heads(found, heads, gradient)
        sums = (found.bias.to(bias.dtype), found.sinks.to(sinks.dtype), found.slopes.to(slopes.dtype))
        return found.query, found.key, found.value, *sums


@dataclass(frozen=True)
class _Found:
    """Gradients so far."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor
    sinks: torch.Tensor
    slopes: torch.Tensor

    @classmethod
    def zeros(cls, problem: Problem, *floats: torch.Tensor) -> _Found:
        written = (problem.query, problem.key, problem.value)
        sums = (torch.zeros(tensor.shape, dtype=problem.wide) for tensor in floats)
        return cls(*(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in written), *sums)


def _add_heads(found: _Found, heads: Heads, gradient: torch.Tensor) -> None:
    """The gradients of some key heads, and of the query heads that share them."""
    wide = heads.problem.wide
    of_key, of_value = torch.zeros_like(heads.key, dtype=wide), torch.zeros_like(heads.value, dtype=wide)
    for tile in heads.tiles():
        weights, noise = tile.weights(), tile.noise()
        given = tile.rows_of(gradient).to(heads.value.dtype)
        dropped = weights.scores
        if noise is not None:
            dropped = torch.mul(dropped, noise, out=tile.memory("dropped", noise.dtype))
        _accumulate(of_value[:, tile.keys], tile.rounded(dropped), given)
        if weights.is_mean is not None:
            of_value += torch.where(weights.is_mean, given, 0.0).sum(1, keepdim=True) / of_value.shape[1]
        of_scores = _of_scores(found, tile, weights, noise, given)
        tile.put(found.query, torch.bmm(of_scores, tile.key).mul_(heads.problem.scale))
        _accumulate(of_key[:, tile.keys], of_scores, tile.query, heads.problem.scale)
    heads.of_keys(found.key).copy_(of_key)
    heads.of_keys(found.value).copy_(of_value)


def _of_scores(
    found: _Found, tile: Tile, weights: Weights, noise: torch.Tensor | None, given: torch.Tensor
) -> torch.Tensor:
    """The gradient of query times key in a tile; what the bias, sinks and slopes have of it is added to theirs."""
    problem, dtype = tile.heads.problem, weights.scores.dtype
    gradient = torch.bmm(given, tile.value.transpose(1, 2), out=tile.memory("weight gradients", given.dtype))
    if gradient.dtype != dtype:
        gradient = tile.memory("score gradients", dtype).copy_(gradient)
    if noise is not None:
        gradient.mul_(noise)
    if weights.sink is not None:
        shares = torch.mul(gradient, weights.scores, out=tile.memory("shares", dtype))
        _reduce(tile.of(found.sinks), tile.by_head(shares.sum(-1, keepdim=True)).mul(weights.sink).neg_())
    torch._softmax_backward_data(gradient, weights.scores, -1, dtype, grad_input=gradient)
    if problem.attrs.masked_rows == "mean" and problem.may_be_empty:  # where all are dropped, they have weights
        tile.drop(gradient, 0.0)
    if problem.bias is not None:
        _reduce(tile.of(found.bias), tile.by_head(gradient))
    if problem.slopes is not None:
        _reduce(tile.of(found.slopes), tile.by_head(gradient) * tile.distances)
    if weights.capped is not None:
        gradient.sub_(weights.capped.square_().mul_(gradient))
    if gradient.dtype != problem.product_dtype:
        gradient = tile.memory("product gradients", problem.product_dtype).copy_(gradient)
    return gradient


def _accumulate(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> None:
    """Add ``scale * left^T @ right``."""
    if target.dtype == left.dtype:
        target.baddbmm_(left.transpose(1, 2), right, alpha=scale)
    else:
        target.add_(torch.bmm(left.transpose(1, 2), right), alpha=scale)


def _reduce(target: torch.Tensor, part: torch.Tensor) -> None:
    """Add ``part``, summed over the dimensions that ``target`` does not have."""
    dims = [dim for dim, size in enumerate(target.shape) if size == 1 and part.shape[dim] != 1]
    target.add_(part.sum(dims, keepdim=True) if dims else part)


_operator = opaque("tiled_attention", _tiled, _fake, backward=_gradients, kernel_id="lz.tiled")
