"""PyTorch's scaled dot-product attention: math, flash and memory-efficient kernels, as PyTorch dispatches them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
import torch.nn.functional as F

from lz_compile.ground.sizes import is_one
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.ops.attention import Operands, distances, merged_mask, positive

#: Computes what SDPA does: over operands with at most one of a mask and a bias, attributes, and whether it is causal.
Sdpa: TypeAlias = Callable[[Operands, AttentionAttrs, bool], torch.Tensor]
#: Devices whose kernels take masks of any strides and of a wider dtype, and the lowest number in them, also beside heads that
#: share keys; on CUDA (2.13) those are left to operators that write scores to memory.
_TAKES_ANY_MASK = frozenset({"cpu"})


def attention(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``), without softcap, sinks and fills.

    Bands other than plain causality, documents and ALiBi become a mask. SDPA gives zero for a row that masks every key
    with ``-inf`` (or with a boolean mask); where the source gives NaN or the mean of the values there, that is restored.
    It adds masks, so that NaN in a masked score is passed on.
    """
    return through(_sdpa, x, attrs)


def _sdpa(x: Operands, attrs: AttentionAttrs, is_causal: bool) -> torch.Tensor:
    mask, key, value, shares = x.bias if x.mask is None else x.mask, x.key, x.value, attrs.enable_gqa
    if shares and mask is not None and x.query.device.type not in _TAKES_ANY_MASK:
        groups, shares = x.query.shape[1] // key.shape[1], False
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    return F.scaled_dot_product_attention(
        x.query,
        key,
        value,
        attn_mask=mask,
        dropout_p=attrs.dropout_p,
        is_causal=is_causal,
        scale=attrs.scale,
        enable_gqa=shares,
    )


def through(sdpa: Sdpa, x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """The same by ``sdpa``."""
    assert (x.fill, x.sinks) == (None, None), "SDPA is given fills or sinks"
    x, attrs = with_positive_scale(x, attrs)
    query, mask, bias = x.query, x.mask, whole_bias(x)
    key = shown_keys(x, attrs)
    is_plain = attrs.is_causal and not x.drops_scores and bias is None  # SDPA takes a mask or causality
    if not is_plain:
        mask = merged_mask(x, attrs)
    if _rows_overlap(query):  # PyTorch's CPU kernel then leaves part of the result uninitialised
        query = query.contiguous()
    merged = _merge(mask, bias, attrs, query)
    out = _over(sdpa, Operands(query, key, x.value), merged, attrs, is_plain)
    if merged is None or attrs.masked_rows == "zero" or (bias is None and attrs.masked_rows == "mean"):
        return out
    if bias is None:
        return out if not x.drops_scores else torch.where(merged.any(-1, keepdim=True), out, math.nan)
    if attrs.bias_is_finite and (mask is None or attrs.masked_rows == "mean"):
        return out
    return torch.where(merged.amax(-1, keepdim=True) == -math.inf, math.nan, out)


def whole_bias(x: Operands) -> torch.Tensor | None:
    """The bias, and what is linear in the distance."""
    if x.slopes is None:
        return x.bias
    linear = x.slopes * distances(x.query, x.key, torch.promote_types(x.query.dtype, torch.float32))
    return linear if x.bias is None else x.bias + linear


def with_positive_scale(x: Operands, attrs: AttentionAttrs) -> tuple[Operands, AttentionAttrs]:
    """The same scores under a scale above zero (see ``positive``)."""
    if attrs.scale is None or attrs.scale > 0:
        return x, attrs
    query, scale = positive(x.query, attrs.scale)
    return Operands(**{**x.given(), "query": query}), replace(attrs, scale=scale)


def shown_keys(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """The keys, zero where a mask of keys hides them: what is added to NaN is NaN."""
    if x.mask is None or not (attrs.selects_masked and attrs.masks_keys):
        return x.key
    return x.key.masked_fill(torch.logical_not(x.mask.transpose(-2, -1)), 0.0)


def _over(sdpa: Sdpa, x: Operands, merged: torch.Tensor | None, attrs: AttentionAttrs, is_causal: bool) -> torch.Tensor:
    """``sdpa`` under a merged mask. Beside the CPU, its rows are made whole and dense, and operands as wide as what is added.

    That is a tenth as fast, so that a sum of terms is rounded where the source rounds it with the scores. Fused kernels for
    GPUs refuse rows with gaps or of one element for all keys, or read beyond them; a mask wider than the operands some of
    them refuse, and cuDNN's reads it as if it were narrow. They multiply scores by log2(e), so that the lowest number
    becomes minus infinity, and a row of nothing else zero instead of the mean (PyTorch 2.11 on an H100).
    """
    query, key, value, dtype = x.query, x.key, x.value, x.query.dtype
    if merged is not None and query.device.type not in _TAKES_ANY_MASK:
        if is_one(merged.shape[-1]):
            merged = merged.expand(*merged.shape[:-1], key.shape[-2])
        merged = merged.contiguous() if merged.stride()[-1] != 1 else merged
        if merged.dtype != torch.bool and attrs.rounds_bias:
            merged = merged.to(dtype)
        elif merged.dtype not in (torch.bool, dtype):
            query, key, value = (each.to(merged.dtype) for each in (query, key, value))
        if merged.dtype not in (torch.bool, torch.float16) and (attrs.bias_can_mask or attrs.masked_rows == "mean"):
            floored = merged.clamp_min(torch.finfo(merged.dtype).min / 2)
            merged = floored if attrs.masked_rows == "mean" else torch.where(merged == -math.inf, merged, floored)
    masks = {} if merged is None else {"mask" if merged.dtype == torch.bool else "bias": merged}
    out = sdpa(Operands(query, key, value, **masks), attrs, is_causal)
    out = out if query.dtype == dtype else out.to(dtype)
    if merged is None or merged.dtype != torch.float16 or attrs.masked_rows != "mean":
        return out
    mean = value.mean(-2, keepdim=True)  # float16's lowest number swallows no score
    mean = mean.repeat_interleave(query.shape[1] // value.shape[1], 1) if attrs.enable_gqa else mean
    return torch.where(merged.amax(-1, keepdim=True) == torch.finfo(torch.float16).min, mean, out)


def _rows_overlap(query: torch.Tensor) -> bool:
    """Whether each row begins one element after the one before it, as in what ``unfold(-1, size, 1)`` gives."""
    *_, row, feature = (isinstance(stride, int) and stride == 1 for stride in query.stride())
    return row and feature and query.shape[-1] != 1


def _merge(
    mask: torch.Tensor | None, bias: torch.Tensor | None, attrs: AttentionAttrs, query: torch.Tensor
) -> torch.Tensor | None:
    """One mask for SDPA: boolean where nothing is added, additive otherwise.

    On a CPU a finite fill is added in float32 for float16 operands: float16's smallest number is not small enough to swallow
    a score, and rows that are masked completely would not come out as the mean of the values. A bias that is wider than the
    operands stays so.
    """
    dtype = query.dtype
    is_wider = bias is not None and bias.dtype.itemsize > dtype.itemsize
    widens = dtype == torch.float16 and query.device.type in _TAKES_ANY_MASK
    additive = torch.float32 if widens or is_wider else dtype
    if bias is not None and bias.dtype != additive:
        bias = bias.to(additive)
    if mask is None:
        return bias
    if bias is None and attrs.masked_rows != "mean":
        return mask
    fill = torch.finfo(additive).min if attrs.masked_rows == "mean" else -math.inf
    kept = torch.zeros_like(mask, dtype=additive) if bias is None else bias
    return kept.masked_fill(torch.logical_not(mask), fill)
