"""Sampling in plain PyTorch operations, which Inductor fuses; the smallest score that is kept is found without a sort."""

from __future__ import annotations

import math

import torch

from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs, Ties, finished, scores

#: What is wanted at least, so that no limit keeps nothing.
_LEAST = torch.finfo(torch.float64).tiny


def sampling(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    """A sampling in the op's canonical layout (see ``lowering/ops/sampling.py``)."""
    z = scores(x, torch.promote_types(x.logits.dtype, torch.float32))
    if attrs.result == "scores" and all(each is None for each in (x.temperature, x.top_k, x.top_p, x.min_p)):
        return z.to(attrs.out_dtype)  # what is not masked is kept
    kept = z > -math.inf
    most = z.amax(-1, keepdim=True)
    keys = z if x.top_k is None and x.top_p is None else _ordered(z.detach())
    if x.top_k is not None:
        wanted = torch.where(x.top_k > 0, x.top_k, z.shape[-1])[:, None]
        kept = kept & _within(keys, kept.to(torch.int32), wanted, attrs.top_k_ties)
    if x.top_p is not None:
        weights = torch.where(kept, (z.detach() - most.detach()).exp(), 0.0).double()
        wanted = (x.top_p[:, None].double() * weights.sum(-1, keepdim=True)).clamp(min=_LEAST)
        kept = kept & ((x.top_p >= 1)[:, None] | _within(keys, weights, wanted, attrs.top_p_ties))
    if x.min_p is not None:
        kept = kept & (z >= most + x.min_p.to(z.dtype).log()[:, None])
    if x.temperature is not None:
        kept = torch.where((x.temperature == 0)[:, None], z == most, kept)
    return finished(z, kept, x, attrs)


def _ordered(z: torch.Tensor) -> torch.Tensor:
    """Integers, as wide as the elements, whose order is that of floats."""
    whole = torch.int64 if z.dtype == torch.float64 else torch.int32
    bits = (z + 0.0).view(whole)  # minus zero is zero
    return torch.where(bits < 0, bits ^ torch.iinfo(whole).max, bits)


def _within(keys: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor, ties: Ties) -> torch.Tensor:
    """The fewest keys, the largest first, that weigh ``wanted``; of equals what ``ties`` says, if they weigh something."""
    last = _reaching(keys, weights, wanted)
    if ties == "all":
        return keys >= last
    above = torch.where(keys > last, weights, 0).sum(-1, keepdim=True)
    is_tie = (keys == last) & (weights > 0)
    count = is_tie.cumsum(-1, dtype=torch.int32)
    before = count[:, -1:] - count if ties == "last" else count - 1
    return (keys > last) | (is_tie & (above + before * weights < wanted))


def _reaching(keys: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The largest key ``[N, 1]`` such that keys at least as large weigh ``wanted``, bit by bit; the smallest if none does."""
    width = torch.iinfo(keys.dtype).bits
    least = torch.iinfo(keys.dtype).min
    found = torch.full_like(keys[:, :1], least)
    for bit in reversed(range(width)):
        # The highest bit of the distance from the smallest key is the sign: adding it wraps to zero, as it should.
        tried = found ^ least if bit == width - 1 else found + (1 << bit)
        reached = torch.where(keys >= tried, weights, 0).sum(-1, keepdim=True)
        found = torch.where(reached >= wanted, tried, found)
    return found
