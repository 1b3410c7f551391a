"""FlashInfer's prefill attention: one sequence directly, a batch as ragged sequences of equal length.

A batch is planned once for its sizes: FlashInfer divides the work on the host and keeps the division.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.token_major import attention_by, fake, fallback, square, unit_stride

#: Bytes that FlashInfer recommends for partial results of a batch, and how many plans are kept.
_WORKSPACE_BYTES = 128 << 20
_PLANS = 64


def _flashinfer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    is_causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    from flashinfer import single_prefill_with_kv_cache

    causal = square(query, key, is_causal)
    batch, queries, heads, head_dim = query.shape
    if batch == 1:
        sequence = unit_stride(query[0], key[0], value[0])
        out = single_prefill_with_kv_cache(*sequence, causal=causal, sm_scale=scale, logits_soft_cap=softcap)
    else:
        sizes = (batch, queries, key.shape[1], heads, key.shape[2], head_dim, value.shape[-1])
        plan = _planned(query.device, query.dtype, sizes, scale, causal, softcap)
        out = plan.run(*(tensor.reshape(-1, *tensor.shape[2:]) for tensor in unit_stride(query, key, value)))
    result: torch.Tensor = out.reshape(batch, queries, heads, value.shape[-1])
    return result


@lru_cache(maxsize=_PLANS)
def _planned(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    scale: float | None,
    causal: bool,
    softcap: float | None,
) -> Any:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    batch, queries, keys, heads, kv_heads, head_dim, value_dim = sizes
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(device), "NHD")
    wrapper.plan(
        starts * queries,
        starts * keys,
        heads,
        kv_heads,
        head_dim,
        head_dim_vo=value_dim,
        causal=causal,
        logits_soft_cap=softcap,
        sm_scale=scale,
        q_data_type=dtype,
    )
    return wrapper


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


_operator = opaque("flashinfer", _flashinfer, fake, fallback=fallback, kernel_id="flashinfer")

attention = attention_by(_operator)
