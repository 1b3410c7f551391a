"""FlashAttention 2 of the package ``flash-attn`` over a cache in blocks, by two functions of it: one for ragged batches.

It reads wherever tables say, so that numbers that cannot be are brought within what there is, on the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.attention.library_attention import unit_stride
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs


def _flash_attn_paged(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    query, key, value = unit_stride(x.query, x.key_cache, x.value_cache)
    blocks, slots = key.shape[:2]
    table = x.block_table.clamp(0, blocks - 1).to(torch.int32).contiguous()
    most = table.shape[1] * slots
    lengths = x.lengths.clamp(0, most).to(torch.int32)
    told = {"softmax_scale": attrs.scale, "softcap": attrs.softcap or 0.0, "block_table": table}
    if x.query_starts is None:
        out: torch.Tensor = flash_attn_with_kvcache(query[:, None], key, value, cache_seqlens=lengths, **told)
        return out[:, 0].contiguous()
    tokens = query.shape[0]
    starts = x.query_starts.clamp(0, tokens).cummax(0).values.to(torch.int32)
    key_starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = max(tokens, 2)  # the most that there may be; one would mean that every request has one
    out = flash_attn_varlen_func(query, key, value, starts, key_starts, longest, most, causal=True, **told)
    is_real = torch.arange(tokens, device=out.device) < starts[-1]  # it leaves the others as memory was
    return torch.where(is_real[:, None, None], out, 0.0)


paged_attention = kernel_operator("flash_attn_paged", op, _flash_attn_paged, kernel_id="flash_attn.paged")
