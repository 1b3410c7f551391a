"""PyTorch's scaled dot-product attention: math, flash and memory-efficient kernels, as PyTorch dispatches them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from lz_compile.lowering.ops.attention import AttentionAttrs, distances, merged_mask


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    query_documents: torch.Tensor | None = None,
    key_documents: torch.Tensor | None = None,
    attrs: AttentionAttrs,
) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``).

    Bands other than plain causality, documents and ALiBi become a mask. SDPA gives zero for a row that masks every key
    with ``-inf`` (or with a boolean mask); where the source gives NaN or the mean of the values there, that is restored.
    It adds masks, so that NaN in a masked score is passed on.
    """
    return through(
        F.scaled_dot_product_attention, query, key, value, mask, bias, attrs, slopes, query_documents, key_documents
    )


def through(
    sdpa: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    attrs: AttentionAttrs,
    slopes: torch.Tensor | None = None,
    query_documents: torch.Tensor | None = None,
    key_documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by ``sdpa``, a function that takes what ``scaled_dot_product_attention`` takes and computes what that does."""
    if slopes is not None:
        linear = slopes * distances(query, key, torch.promote_types(query.dtype, torch.float32))
        bias = linear if bias is None else bias + linear
    if mask is not None and attrs.selects_masked and attrs.masks_keys:  # what is added to NaN is NaN
        key = key.masked_fill(torch.logical_not(mask.transpose(-2, -1)), 0.0)
    can_be_empty = mask is not None or query_documents is not None
    is_plain = attrs.is_causal and not can_be_empty and bias is None  # SDPA takes a mask or causality
    if not is_plain:
        mask = merged_mask(query, key, mask, query_documents, key_documents, attrs)
    if _rows_overlap(query):  # PyTorch's CPU kernel then leaves part of the result uninitialised
        query = query.contiguous()
    merged = _merge(mask, bias, attrs, query.dtype)
    out = sdpa(
        query,
        key,
        value,
        attn_mask=merged,
        dropout_p=attrs.dropout_p,
        is_causal=is_plain,
        scale=attrs.scale,
        enable_gqa=attrs.enable_gqa,
    )
    if merged is None or attrs.masked_rows == "zero" or (bias is None and attrs.masked_rows == "mean"):
        return out
    if bias is None:
        return out if not can_be_empty else torch.where(merged.any(-1, keepdim=True), out, math.nan)
    if attrs.bias_is_finite and (mask is None or attrs.masked_rows == "mean"):
        return out
    return torch.where(merged.amax(-1, keepdim=True) == -math.inf, math.nan, out)


def _rows_overlap(query: torch.Tensor) -> bool:
    """Whether each row begins one element after the one before it, as in what ``unfold(-1, size, 1)`` gives."""
    *_, row, feature = (isinstance(stride, int) and stride == 1 for stride in query.stride())
    return row and feature and query.shape[-1] != 1


def _merge(
    mask: torch.Tensor | None, bias: torch.Tensor | None, attrs: AttentionAttrs, dtype: torch.dtype
) -> torch.Tensor | None:
    """One mask for SDPA: boolean where nothing is added, additive otherwise.

    A finite fill is added in float32 for float16 operands: float16's smallest number is not small enough to swallow a
    score, and rows that are masked completely would not come out as the mean of the values. A bias that is wider than the
    operands stays so.
    """
    is_wider = bias is not None and bias.dtype.itemsize > dtype.itemsize
    additive = torch.float32 if dtype == torch.float16 or is_wider else dtype
    if bias is not None and bias.dtype != additive:
        bias = bias.to(additive)
    if mask is None:
        return bias
    if bias is None and attrs.masked_rows != "mean":
        return mask
    fill = torch.finfo(additive).min if attrs.masked_rows == "mean" else -math.inf
    kept = torch.zeros_like(mask, dtype=additive) if bias is None else bias
    return kept.masked_fill(torch.logical_not(mask), fill)
