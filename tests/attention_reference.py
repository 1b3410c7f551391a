"""Random arguments for a `Spelling`, and attention in float64, written once from the mathematics.

Nothing here is shared with `attention_spelled`. Axes are named as in `attention_spellings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tests.attention_spellings import (
    ADDENDS,
    ADDITIVE_INPUTS,
    LOG2_E,
    NATURAL,
    PACKED,
    PADDED,
    WINDOW,
    WINDOWS,
    Spelling,
)

FILL_VALUES = {"-inf": -math.inf, "min": torch.finfo(torch.float32).min, "-1e9": -1e9, "-1e4": -1e4}


def drawn(s: Spelling, seed: int) -> dict[str, Tensor]:
    """Random arguments by name, some of which the spelling does not take."""
    generator = torch.Generator().manual_seed(seed)
    return {**_drawn_operands(s, generator), **_drawn_masks(s, generator)}


def _drawn_operands(s: Spelling, generator: torch.Generator) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.7).to(s.dtype)

    (sq, sk), (h, _), (d, e), raw = s.lengths, s.heads, s.head_dims, s.raw_kv_heads
    if s.layout in PACKED:
        width = h * d + raw * d + raw * e
        shape = (3, h, d) if s.layout in ("packed_unbind", "packed_select") else (width,)
        return {"packed": normal(s.batch, sq, *shape)}
    drawn = {}
    for role, length, heads, dim in (("query", sq, h, d), ("key", sk, raw, d), ("value", sk, raw, e)):
        sizes = {"b": s.batch, "w": WINDOWS, "h": heads, "q": length, "d": dim, "f": s.batch * heads, "m": heads * dim}
        axes = "bqm" if s.layout == "merged" else NATURAL[s.layout]
        if role == "key" and s.has_raw_transposed_key:
            axes = axes[:-2] + "dq"
        drawn[role] = normal(*(sizes[letter] for letter in axes))
    return drawn


def _drawn_masks(s: Spelling, generator: torch.Generator) -> dict[str, Tensor]:
    (q, k), h = s.lengths, s.heads[0]
    sizes = {"b": s.batch, "h": h, "q": q, "k": k, "1": 1}
    bias_shape = {"alibi": (h,), "learned": tuple(sizes[a] for a in s.bias_axes if a in sizes)}.get(
        s.bias, (q + k - 1, h)
    )
    bias = torch.randn(bias_shape, generator=generator) * (0.2 if s.bias == "alibi" else 1.0)
    drawn = {"bias": bias.to(torch.float32 if s.bias_dtype == "float32" else s.dtype)}
    drawn["scale"] = torch.tensor(s.factor, dtype=s.dtype)
    drawn["padding"] = torch.rand(s.batch, k, generator=generator) < 0.7
    drawn["padding"][:, 0] = True
    keep = torch.rand([sizes[a] for a in s.mask_axes if a in sizes] or [1], generator=generator) < 0.7
    keep[..., 0] = True
    if s.rows_fully_masked:
        keep[(0,) if s.mask_axes == "b11k" else (..., 0, slice(None))] = False
    dtype = torch.float32 if s.mask_dtype == "float32" else s.dtype
    low = -math.inf if s.mask == "additive_inf" else torch.finfo(dtype).min
    as_given = {"drop": ~keep, "integer": keep.long()}
    if s.mask in ADDITIVE_INPUTS:
        as_given[s.mask] = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, low)
    drawn["mask"] = as_given.get(s.mask, keep)
    return drawn


# The reference. Every tensor has the axes b, w, h and two of q, k, d, e.


def computed(s: Spelling, named: Mapping[str, Tensor]) -> Tensor:
    """softmax(scale q kᵀ + bias, masked) v, with the axes of the spelled result."""
    q, k, v = _canonical(s, named)
    spelled = torch.tensor(s.factor / (LOG2_E if s.exponential == "exp2_folded" else 1.0), dtype=torch.float64)
    factor = named["scale"].double() if "scale" in named else spelled.to(q.device)
    logits = torch.einsum("bwhqd,bwhkd->bwhqk", q, k) * factor
    logits = _masked(s, named, logits + _bias(s, named, logits, factor), factor)
    return _arranged(s, torch.einsum("bwhqk,bwhke->bwhqe", logits.softmax(-1), v))


def _canonical(s: Spelling, named: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as [b, w, h, s, d] with one key-value head per query head."""
    raw, found = s.raw_kv_heads, []
    for i, (heads, dim) in enumerate(zip((s.heads[0], raw, raw), s.head_dims[:1] + s.head_dims, strict=True)):
        if s.layout == "packed_interleaved":
            x = named["packed"].unflatten(-1, (heads, 3, dim))[:, :, :, i].permute(0, 2, 1, 3)
        elif s.layout in PACKED:
            start = (0, s.heads[0] * dim, (s.heads[0] + raw) * s.head_dims[0])[i]
            x = (
                named["packed"]
                .flatten(2)[:, :, start : start + heads * dim]
                .unflatten(-1, (heads, dim))
                .permute(0, 2, 1, 3)
            )
        else:
            x = named[("query", "key", "value")[i]]
            x = x.mT if i == 1 and s.has_raw_transposed_key else x
            x = {
                "bshd": lambda x: x.permute(0, 2, 1, 3),
                "merged": lambda x: x.unflatten(-1, (heads, dim)).permute(0, 2, 1, 3),  # noqa: B023 - called at once
                "hbsd": lambda x: x.permute(1, 0, 2, 3),
                "flat": lambda x: x.unflatten(0, (s.batch, heads)),  # noqa: B023 - called at once
                "single": lambda x: x[:, None],
                "matrix": lambda x: x[None, None],
            }.get(s.layout, lambda x: x)(x)
        found.append((x if s.layout == "windows" else x[:, None]).double())
    of_query = torch.arange(s.heads[0], device=found[0].device)
    of_query = of_query % s.heads[1] if s.sharing == "tile" else of_query // s.groups
    return found[0], found[1][:, :, of_query], found[2][:, :, of_query]


def _bias(s: Spelling, named: Mapping[str, Tensor], logits: Tensor, factor: Tensor) -> Tensor:
    if s.bias == "none":
        return torch.zeros_like(logits)
    given, (q, k) = named["bias"].double(), s.lengths
    before = torch.tensor([[k - q + i - j for j in range(k)] for i in range(q)], device=given.device)
    if s.bias == "alibi":
        given = -given[:, None, None] * before
    elif s.bias != "learned":
        given = given.T[:, before + q - 1]
    given = given.reshape((1,) * (4 - given.dim()) + given.shape)[:, None]
    return given.expand_as(logits) * (factor if s.bias_before_scale else 1.0)


def _masked(s: Spelling, named: Mapping[str, Tensor], logits: Tensor, factor: Tensor) -> Tensor:
    """Logits with the mask added, or replaced by the fill where nothing is kept."""
    if s.mask == "none":
        return logits
    if not s.mask_before_scale:
        factor = torch.ones_like(factor)
    if "mask" in named:
        given = named["mask"][(None,) * (4 - named["mask"].dim())][:, None]
        if s.mask in ADDITIVE_INPUTS:
            return logits + given.double() * factor
        keep = given == (0 if s.mask == "drop" else 1)
    else:
        q, k = s.lengths
        before = torch.tensor([[k - q + i - j for j in range(k)] for i in range(q)], device=logits.device)
        keep = (before >= 0) & (before < (WINDOW if s.mask == "arange_window" else k))
        keep = keep & named["padding"][:, None, None, None] if s.mask in PADDED else keep
    fill = FILL_VALUES[s.fill]
    if s.mask_apply in ADDENDS and fill > -math.inf:
        return logits + ~keep * (fill * factor)
    return torch.where(keep, logits, fill)


def _arranged(s: Spelling, x: Tensor) -> Tensor:
    """[b, w, h, q, e] with the axes of the spelled result."""
    if s.output != "left":
        x = x.permute(0, 1, 3, 2, 4)
        x = x if s.output == "token_major" else x.flatten(-2)
        return x if s.layout == "windows" else x[:, 0]
    if s.layout == "windows":
        return x
    x = x[:, 0]
    as_result: dict[str, Callable[[Tensor], Tensor]] = {
        "bhqe": lambda x: x,
        "bqhe": lambda x: x.permute(0, 2, 1, 3),
        "hbqe": lambda x: x.permute(1, 0, 2, 3),
        "fqe": lambda x: x.flatten(0, 1),
        "bhgqe": lambda x: x.unflatten(1, (s.heads[1], s.groups)),
        "bqe": lambda x: x[:, 0],
        "qe": lambda x: x[0, 0],
    }
    return as_result[s.result_axes](x)
