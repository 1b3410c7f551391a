"""FlashAttention 3 for Hopper, of the package ``flash_attn_3``: ``flash_attn_interface.flash_attn_func``."""

from __future__ import annotations

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.token_major import attention_by, fake, fallback, window_at_end


def _flash_attn_3(
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
    from flash_attn_interface import flash_attn_func

    assert slopes is None, "FlashAttention 3 is given slopes"
    window = window_at_end(query, key, left, right, at_end)
    out = flash_attn_func(
        query, key, value, softmax_scale=scale, causal=right == 0, window_size=window, softcap=softcap or 0.0
    )
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out  # some versions add the logsumexp
    return result.contiguous()


_operator = opaque("flash_attn_3", _flash_attn_3, fake, fallback=fallback, kernel_id="flash_attn.v3")

attention = attention_by(_operator)
