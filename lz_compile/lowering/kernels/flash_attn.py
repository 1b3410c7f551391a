"""FlashAttention 2 of the package ``flash-attn``: ``flash_attn.flash_attn_func``.

It subtracts slope times distance, for keys on both sides of a query; for keys before it that is what ALiBi adds here.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.token_major import attention_by, fake, fallback, window_at_end


def _flash_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    left: int,
    right: int,
    at_end: bool,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    from flash_attn import flash_attn_func

    window = window_at_end(query, key, left, right, at_end)
    if slopes is not None:
        assert right == 0, "flash-attn's ALiBi is ours under a causal mask only"
        slopes = slopes.to(torch.float32).expand(query.shape[0], query.shape[2], 1, 1).flatten(1).contiguous()
    out: torch.Tensor = flash_attn_func(
        query,
        key,
        value,
        softmax_scale=scale,
        causal=right == 0,
        window_size=window,
        softcap=softcap or 0.0,
        alibi_slopes=slopes,
    )
    return out.contiguous()


_operator = opaque("flash_attn", _flash_attn, fake, fallback=fallback, kernel_id="flash_attn.v2")

attention = attention_by(_operator)
