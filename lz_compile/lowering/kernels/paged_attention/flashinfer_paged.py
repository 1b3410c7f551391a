"""FlashInfer's attention over a cache in blocks: ``flashinfer.BatchPrefillWithPagedKVCacheWrapper``.

Its wrapper for requests of one query runs the same kernel where it uses tensor cores, so that this one does for all. The
work is divided on the host, from tables that are read there at every call: those of the call before may have been others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.attention.library_attention import NO_LIMIT, unit_stride
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs

#: Bytes that FlashInfer recommends for partial results.
_WORKSPACE_BYTES = 128 << 20


def _flashinfer_paged(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    op.check_places(x, attrs)
    out = torch.zeros_like(op.fake(x, attrs))
    owners, ends = op.seen_by(x)
    rows = (ends > 0).nonzero()[:, 0]  # it masks nothing where a request has more queries than keys
    if not len(rows):
        return out
    query, key, value = unit_stride(x.query[rows], x.key_cache, x.value_cache)
    requests, counts = owners[rows].unique_consecutive(return_counts=True)
    slots, lengths, table = key.shape[1], x.lengths[requests].long(), x.block_table[requests]
    used = (lengths + slots - 1) // slots
    blocks = table[torch.arange(table.shape[1], device=table.device) < used[:, None]]
    wrapper = _wrapper(out.device)
    wrapper.plan(
        _starts(counts),
        _starts(used),
        blocks.to(torch.int32),
        ((lengths - 1) % slots + 1).to(torch.int32),
        query.shape[1],
        key.shape[2],
        query.shape[2],
        slots,
        causal=True,
        sm_scale=attrs.scale,
        window_left=NO_LIMIT if attrs.window is None else attrs.window - 1,
        logits_soft_cap=attrs.softcap,
        q_data_type=query.dtype,
    )
    out[rows] = wrapper.run(query, (key, value))
    return out


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


@cache
def _wrapper(device: torch.device) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")


paged_attention = kernel_operator("flashinfer_paged", op, _flashinfer_paged, kernel_id="flashinfer.paged")
