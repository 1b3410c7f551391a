"""Sampling in plain PyTorch operations, which Inductor fuses; the smallest score that is kept is found without a sort."""

from __future__ import annotations

import math

import torch

from lz_compile.lowering.ops.sampling import SamplingAttrs, finished, scores


def sampling(
    logits: torch.Tensor,
    bitmask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    *,
    attrs: SamplingAttrs,
) -> torch.Tensor:
    """A sampling in the op's canonical layout (see ``lowering/ops/sampling.py``)."""
    z = scores(logits, bitmask, bias, temperature, torch.promote_types(logits.dtype, torch.float32))
    kept = z > -math.inf
    most = z.amax(-1, keepdim=True)
    if temperature is not None:
        kept = kept & ((temperature != 0)[:, None] | (z == most))
    keys = _ordered(z.detach()) if top_k is not None or top_p is not None else None
    if top_k is not None:
        assert keys is not None, "limits have keys"
        wanted = torch.where(top_k > 0, top_k, z.shape[-1])[:, None]
        kept = kept & (keys >= _reaching(keys, kept.to(torch.int32), wanted))
    if top_p is not None:
        assert keys is not None, "limits have keys"
        weights = torch.where(kept, (z.detach() - most.detach()).exp(), 0.0).double()
        wanted = top_p[:, None].double() * weights.sum(-1, keepdim=True)
        kept = kept & ((top_p >= 1)[:, None] | (keys >= _reaching(keys, weights, wanted)))
    if min_p is not None:
        kept = kept & (z >= most + min_p.to(z.dtype).log()[:, None])
    return finished(z, kept, seeds, temperature, attrs)


def _ordered(z: torch.Tensor) -> torch.Tensor:
    """Integers, as wide as the elements, whose order is that of floats."""
    whole = torch.int64 if z.dtype == torch.float64 else torch.int32
    bits = (z + 0.0).view(whole)  # minus zero is zero
    return torch.where(bits < 0, bits ^ torch.iinfo(whole).max, bits)


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
