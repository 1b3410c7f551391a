"""FlashAttention 2 of the package ``flash-attn``: ``flash_attn.flash_attn_func``.

It subtracts slope times distance, for keys on both sides of a query; for keys before it that is what ALiBi adds here.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernels.attention.library_attention import flash_options, library_attention
from lz_compile.lowering.kernels.attention.token_major import Operands


def _flash_attn(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    from flash_attn import flash_attn_func

    options, slopes = flash_options(x, attrs), x.slopes
    if slopes is not None:
        assert options["causal"], "flash-attn's ALiBi is ours under a causal mask only"
        slopes = slopes.to(torch.float32).expand(x.query.shape[0], x.query.shape[2], 1, 1).flatten(1).contiguous()
    found: torch.Tensor = flash_attn_func(x.query, x.key, x.value, alibi_slopes=slopes, **options)
    return found


attention = library_attention("flash_attn", _flash_attn, kernel_id="flash_attn.v2")
