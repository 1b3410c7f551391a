"""FlashInfer's prefill attention: one sequence directly, a batch as ragged sequences of equal length.

A batch is planned once for its sizes: FlashInfer divides the work on the host and keeps the division.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernels.attention.library_attention import (
    NO_LIMIT,
    library_attention,
    unit_stride,
    window,
    window_at_end,
)
from lz_compile.lowering.kernels.attention.token_major import Operands

#: Bytes that FlashInfer recommends for partial results of a batch, and how many plans are kept.
_WORKSPACE_BYTES = 128 << 20
_PLANS = 64


def _flashinfer(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    from flashinfer import single_prefill_with_kv_cache

    assert x.slopes is None, "flashinfer is given slopes"
    left, right = window_at_end(x, attrs)
    assert right in (NO_LIMIT, 0), "flashinfer is asked for a window on both sides"
    query, key, value = unit_stride(x.query, x.key, x.value)
    batch, queries, heads, head_dim = query.shape
    if batch == 1:
        options = {"causal": right == 0, "window_left": left, "sm_scale": attrs.scale, "logits_soft_cap": attrs.softcap}
        out = single_prefill_with_kv_cache(query[0], key[0], value[0], **options)
    else:
        sizes = (batch, queries, key.shape[1], heads, key.shape[2], head_dim, value.shape[-1])
        plan = _planned(query.device, query.dtype, sizes, attrs)
        out = plan.run(*(tensor.reshape(-1, *tensor.shape[2:]) for tensor in (query, key, value)))
    found: torch.Tensor = out.reshape(batch, queries, heads, value.shape[-1])
    return found


@lru_cache(maxsize=_PLANS)
def _planned(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], attrs: AttentionAttrs) -> Any:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    batch, queries, keys, heads, kv_heads, head_dim, value_dim = sizes
    left, right = window(attrs)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(device), "NHD")
    wrapper.plan(
        starts * queries,
        starts * keys,
        heads,
        kv_heads,
        head_dim,
        head_dim_vo=value_dim,
        causal=right == 0,
        window_left=left,
        logits_soft_cap=attrs.softcap,
        sm_scale=attrs.scale,
        q_data_type=dtype,
    )
    return wrapper


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


attention = library_attention("flashinfer", _flashinfer, kernel_id="flashinfer")
