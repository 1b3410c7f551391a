"""FlashAttention 2 of the package ``flash-attn``: ``flash_attn.flash_attn_func``.

It subtracts slope times distance, for keys on both sides of a query; for keys before it that is what ALiBi adds here.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernels.attention.library_attention import library_attention, window_at_end
from lz_compile.lowering.kernels.attention.token_major import Operands


def _flash_attn(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    from flash_attn import flash_attn_func

    left, right = window_at_end(x, attrs)
    slopes = x.slopes
    if slopes is not None:
        assert right == 0, "flash-attn's ALiBi is ours under a causal mask only"
        slopes = slopes.to(torch.float32).expand(x.query.shape[0], x.query.shape[2], 1, 1).flatten(1).contiguous()
    out: torch.Tensor = flash_attn_func(
        x.query,
        x.key,
        x.value,
        softmax_scale=attrs.scale,
        causal=right == 0,
        window_size=(left, right),
        softcap=attrs.softcap or 0.0,
        alibi_slopes=slopes,
    )
    return out


attention = library_attention("flash_attn", _flash_attn, kernel_id="flash_attn.v2")
