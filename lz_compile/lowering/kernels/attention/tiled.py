"""Tiled attention on CPUs: one operator that computes a tile of scores at a time, in memory that all tiles share.

A tile fits into the cache of a core, and everything that happens to it is one pass of PyTorch's own kernels over it there.
Keys that a tile does not see are skipped, at lengths that only the call knows, and where only the data says so (documents
and masks). The backward computes every tile again: of what is as large as the scores, nothing outlives its tile.
"""

from __future__ import annotations

from typing import Any

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.attention import token_major
from lz_compile.lowering.kernels.attention.tiles import Heads, Problem, Tile, Weights
from lz_compile.lowering.kernels.attention.token_major import DIFFERENTIABLE, Operands
from lz_compile.lowering.ops import attention as op


def attention(x: op.Operands, attrs: AttentionAttrs, rows: int = 0) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``); ``rows`` per tile, 0: as many as fit."""
    assert x.fill is None, "lz.tiled is given fills"
    seed = torch.rand_like(x.query.new_zeros(2, dtype=torch.float32)) if attrs.dropout_p else None
    found: torch.Tensor = _operator(x, attrs, seed=seed, rows=rows)
    return found


# ---- the operator --------------------------------------------------------------------------------------------------


def _tiled(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """Attention over tokens, ``[B, S, H, D]``."""
    problem = Problem(x, attrs)
    result = token_major.fake(x, attrs)
    if not x.key.shape[1]:
        result.zero_()
    for heads in problem.heads():
        for tile in heads.tiles():
            weights = tile.weights()
            noise = tile.noise()
            if noise is not None:
                weights.scores.mul_(noise)
            out = torch.bmm(tile.rounded(weights.scores), tile.value)
            tile.put(result, out if weights.is_mean is None else torch.where(weights.is_mean, heads.mean, out))
    return result


def gradients(gradient: torch.Tensor, x: Operands, attrs: AttentionAttrs) -> dict[str, torch.Tensor | None]:
    """Of query, key, value, bias, sinks and slopes."""
    with torch.no_grad():
        problem = Problem(x, attrs)
        found = _zeros(problem)
        for heads in problem.heads():
            _add_heads(found, heads, gradient)
        return {name: each.to(getattr(x, name).dtype) for name, each in found.given().items()}


def _zeros(problem: Problem) -> Operands:
    """Gradients by their operands: memory for what every tile writes once, zeros for sums over tiles."""

    def zeros(name: str, each: torch.Tensor) -> torch.Tensor:
        if name not in ("query", "key", "value"):
            return torch.zeros(each.shape, dtype=problem.wide)
        make = torch.empty if problem.x.key.shape[1] else torch.zeros
        return make(each.shape, dtype=each.dtype)

    found: dict[str, Any] = {
        name: zeros(name, each) for name, each in problem.x.given().items() if name in DIFFERENTIABLE
    }
    return Operands(**found)


def _add_heads(found: Operands, heads: Heads, gradient: torch.Tensor) -> None:
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
    found: Operands, tile: Tile, weights: Weights, noise: torch.Tensor | None, given: torch.Tensor
) -> torch.Tensor:
    """The gradient of query times key in a tile; what the bias, sinks and slopes have of it is added to theirs."""
    problem, dtype = tile.heads.problem, weights.scores.dtype
    gradient = torch.bmm(given, tile.value.transpose(1, 2), out=tile.memory("weight gradients", given.dtype))
    if gradient.dtype != dtype:
        gradient = tile.memory("score gradients", dtype).copy_(gradient)
    if noise is not None:
        gradient.mul_(noise)
    if weights.sink is not None and found.sinks is not None:
        shares = torch.mul(gradient, weights.scores, out=tile.memory("shares", dtype))
        _reduce(tile.of(found.sinks), tile.by_head(shares.sum(-1, keepdim=True)).mul(weights.sink).neg_())
    torch._softmax_backward_data(gradient, weights.scores, -1, dtype, grad_input=gradient)
    has_weights = problem.attrs.masked_rows == "mean" and tile.may_be_empty  # where all are dropped
    if has_weights or bool(weights.scores[..., :1].isnan().any()):  # what is dropped is NaN with its row
        tile.drop(gradient, 0.0)
    if found.bias is not None:
        _reduce(tile.of(found.bias), tile.by_head(gradient))
    if found.slopes is not None:
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


# Nothing completes a call: its backward computes again what this one drops.
_operator = token_major.through(
    kernel_operator("tiled_attention", token_major, _tiled, backward=gradients, has_fallback=False)
)
