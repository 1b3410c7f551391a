"""Attention: ``softmax(scale * query @ key^T + bias, keys) @ value``, with masks, softcap, sinks and dropout.

Canonical layout, in which every kernel takes and returns it:

    query  [B, Hq, Sq, D]       key  [B, Hk, Sk, D]       value  [B, Hk, Sk, E]      result  [B, Hq, Sq, E]
    mask   bool, True keeps, broadcastable to [B, Hq, Sq, Sk]
    bias   float, added to the scaled (and capped) scores, broadcastable to [B, Hq, Sq, Sk]
    fill   float, the score of an element that the mask drops, where ``masked_rows == "fill"``; broadcastable likewise
    sinks  float, an extra score that takes part in the softmax and has no value, broadcastable to [B, Hq, Sq, 1]

``Hq`` is a multiple of ``Hk``: query head ``h`` reads key head ``h // (Hq // Hk)``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from lz_compile.passes.axes import Size

#: What a row gives whose every key is masked: NaN (softmax over ``-inf``), the mean of all values (softmax over equal
#: finite fills), zero, or the softmax over fills that differ (given as the operand ``fill``).
MaskedRows: TypeAlias = Literal["nan", "mean", "zero", "fill"]


#: Without a mask, PyTorch's CPU kernel gives zero, not NaN, for a row of NaN in fewer keys than a vector register holds
#: (16 float32 with AVX-512).
FEW_KEYS = 16


@dataclass(frozen=True)
class AttentionAttrs:
    """The attributes of one attention.

    ``scale`` multiplies ``query @ key^T`` (None: the op's default, ``D ** -0.5``); ``bias_can_mask`` says that the bias may
    hold masking constants, ``bias_is_finite`` that these are no infinities. ``selects_masked`` says that the mask drops
    scores whatever they are, NaN and infinities too, as ``where`` and ``masked_fill`` do and adding ``-inf`` does not;
    ``zeroes_nan`` that rows of NaN give zero. Neither asks for anything where ``nan_is_open``: what NaN and infinities in
    query and key come to is the kernel's business.
    """

    scale: float | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    softcap: float | None = None
    masked_rows: MaskedRows = "nan"
    has_mask: bool = False
    has_bias: bool = False
    has_sinks: bool = False
    bias_is_finite: bool = False
    bias_can_mask: bool = False
    enable_gqa: bool = False
    selects_masked: bool = False
    zeroes_nan: bool = False
    nan_is_open: bool = False
    score_dtype: torch.dtype = torch.float32

    def deterministic(self) -> AttentionAttrs:
        """The same without dropout."""
        return replace(self, dropout_p=0.0)

    def assuming_finite(self) -> AttentionAttrs:
        """The same for operands without NaN and infinities."""
        return replace(self, nan_is_open=True)

    def to_dict(self) -> dict[str, Any]:
        """Names and values, those at their default left out (``scale`` always stays)."""
        default = AttentionAttrs()
        values = {k: v for k, v in asdict(self).items() if k == "scale" or v != getattr(default, k)}
        return {k: str(v) if isinstance(v, torch.dtype) else v for k, v in values.items()}


@dataclass(frozen=True)
class AttentionFacts:
    """Sizes (``int``, or sympy expressions where symbolic), dtype and device of one attention, for kernel selection."""

    batch: Size
    heads: Size
    kv_heads: Size
    query_len: Size
    key_len: Size
    head_dim: Size
    value_dim: Size
    dtype: torch.dtype
    device: str
    needs_grad: bool = False
    bias_needs_grad: bool = False


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    fill: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    attrs: AttentionAttrs,
) -> torch.Tensor:
    """The definition of the op, in the dtype of its inputs (float64 is the ground truth of every test).

    Shapes:
        as in the module's legend; the result is ``[B, Hq, Sq, E]``.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if attrs.scale is None else attrs.scale
    scores = query @ key.transpose(-2, -1) * scale
    if attrs.softcap is not None:
        scores = torch.tanh(scores / attrs.softcap) * attrs.softcap
    if bias is not None:
        scores = scores + bias
    if attrs.is_causal:
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        mask = causal if mask is None else mask & causal
    if mask is not None:
        if fill is None:
            lowest = torch.finfo(scores.dtype).min if attrs.masked_rows == "mean" else -math.inf
            fill = torch.full((), lowest, dtype=scores.dtype, device=scores.device)
        scores = torch.where(mask, scores, fill)
    if sinks is not None:
        column = sinks.expand(*scores.shape[:-1], 1)
        probabilities = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    if attrs.zeroes_nan:
        probabilities = torch.nan_to_num(probabilities)
    elif attrs.masked_rows == "zero":
        probabilities = probabilities.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    probabilities = torch.nn.functional.dropout(probabilities, attrs.dropout_p)
    return probabilities @ value


def features(attrs: AttentionAttrs, facts: AttentionFacts) -> dict[str, str]:
    """What a kernel must support for this attention: feature name (``supports`` in descriptors) and what asks for it."""
    symbolic = [name for name in ("query_len", "key_len") if not isinstance(getattr(facts, name), int)]
    keeps_nan = not attrs.nan_is_open
    needed = {
        "causal": attrs.is_causal and "a causal mask",
        "gqa": attrs.enable_gqa and f"{facts.heads} query heads share {facts.kv_heads} key heads",
        "bool_mask": attrs.has_mask and "a boolean mask",
        "float_mask": attrs.has_bias and "an additive mask or bias",
        "dropout": attrs.dropout_p > 0 and f"dropout of {attrs.dropout_p:g}",
        "softcap": attrs.softcap is not None and f"scores capped at {attrs.softcap}",
        "sinks": attrs.has_sinks and "an attention sink in the softmax",
        "masked_row_fill": attrs.masked_rows == "fill" and "fills of masked scores that differ within a row",
        "masked_nan": keeps_nan and attrs.selects_masked and "a mask that drops scores even where they are NaN",
        "nan_rows": keeps_nan and attrs.zeroes_nan and "zeros for rows of NaN",
        "nan_in_few_keys": keeps_nan
        and facts.device == "cpu"
        and not (attrs.has_mask or attrs.has_bias)
        and isinstance(facts.key_len, int)
        and facts.key_len < FEW_KEYS
        and f"NaN in rows of {facts.key_len} keys",
        "training": facts.needs_grad and "gradients",
        "masked_row_gradient": facts.needs_grad
        and (attrs.bias_can_mask or (attrs.has_mask and attrs.masked_rows in ("mean", "zero")))
        and "gradients of rows whose every key is masked",
        "bias_gradient": facts.bias_needs_grad and "a gradient of the bias",
        "value_dim": facts.value_dim != facts.head_dim and f"head dim {facts.head_dim}, value dim {facts.value_dim}",
        "dynamic_causal": attrs.is_causal and symbolic and f"a causal mask with symbolic {' and '.join(symbolic)}",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}
