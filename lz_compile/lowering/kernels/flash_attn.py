"""FlashAttention 2 of the package ``flash-attn``: ``flash_attn.flash_attn_func``."""

from __future__ import annotations

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.token_major import attention_by, fake, fallback, square


def _flash_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    is_causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    from flash_attn import flash_attn_func

    causal = square(query, key, is_causal)
    out: torch.Tensor = flash_attn_func(query, key, value, softmax_scale=scale, causal=causal, softcap=softcap or 0.0)
    return out.contiguous()


_operator = opaque("flash_attn", _flash_attn, fake, fallback=fallback, kernel_id="flash_attn.v2")

attention = attention_by(_operator)
