"""FlashInfer's prefill attention: one sequence directly, a batch as ragged sequences of equal length.

A batch is planned once for its sizes: FlashInfer divides the work on the host and keeps the division.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.token_major import NO_LIMIT, attention_by, fake, fallback, unit_stride, window_at_end

#: Bytes that FlashInfer recommends for partial results of a batch, and how many plans are kept.
_WORKSPACE_BYTES = 128 << 20
_PLANS = 64


def _flashinfer(
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
    from flashinfer import single_prefill_with_kv_cache

    assert slopes is None, "flashinfer is given slopes"
    assert right in (NO_LIMIT, 0), "flashinfer is asked for a window on both sides"
    left, right = window_at_end(query, key, left, right, at_end)
    causal = right == 0
    batch, queries, heads, head_dim = query.shape
    if batch == 1:
        sequence = unit_stride(query[0], key[0], value[0])
        out = single_prefill_with_kv_cache(
            *sequence, causal=causal, window_left=left, sm_scale=scale, logits_soft_cap=softcap
        )
    else:
        sizes = (batch, queries, key.shape[1], heads, key.shape[2], head_dim, value.shape[-1])
        plan = _planned(query.device, query.dtype, sizes, scale, causal, left, softcap)
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
    left: int,
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
        window_left=left,
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
