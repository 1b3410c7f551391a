"""A kernel that chooses at each call: for sizes that a compiled graph cannot be specialised for.

The graph holds one opaque operator. When it runs, the tensors have sizes, and the kernel is chosen for them as for an eager
call (``runtime/eager.py``), with its cache, policy and fallback. That rests on measurements of static sizes.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.kernels import torch_sdpa
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.attention import AttentionAttrs


def _dispatch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    from lz_compile.runtime import eager

    run = eager.plan(query, key, value, attn_mask, is_causal, scale, 0.0, "BHSD")
    return run(query, key, value, attn_mask).transpose(1, 2).contiguous()


def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """An empty result ``[B, Sq, Hq, E]``: tokens before heads, as most kernels leave it and as models join heads."""
    batch, heads, queries, _ = query.shape
    return query.new_empty((batch, queries, heads, value.shape[-1]))


_operator = opaque("dispatch", _dispatch, _fake)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    attrs: AttentionAttrs,
) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``), without softcap, sinks and dropout."""
    return torch_sdpa.through(_called, query, key, value, mask, bias, attrs)


def _called(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """The operator, called as ``scaled_dot_product_attention``; it sees for itself where heads differ."""
    assert dropout_p == 0, "lz.dispatch is asked for dropout"
    result: torch.Tensor = _operator(query, key, value, attn_mask, is_causal, scale)
    return result.transpose(1, 2)
