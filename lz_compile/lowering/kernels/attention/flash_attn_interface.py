"""FlashAttention 3 for Hopper, of the package ``flash_attn_3``: ``flash_attn_interface.flash_attn_func``."""

from __future__ import annotations

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernels.attention.library_attention import flash_options, library_attention
from lz_compile.lowering.kernels.attention.token_major import Operands


def _flash_attn_3(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    from flash_attn_interface import flash_attn_func

    assert x.slopes is None, "FlashAttention 3 is given slopes"
    out = flash_attn_func(x.query, x.key, x.value, **flash_options(x, attrs))
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out  # some versions add the logsumexp
    return found


attention = library_attention("flash_attn_3", _flash_attn_3, kernel_id="flash_attn.v3")
