"""Attention over a cache in blocks by PyTorch: the keys of requests are gathered, then it is an attention like any other.

Requests of one query are computed together, as plain operations, over as many keys as a row of the table has slots. Others
are computed one by one, each over its own keys.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.attention import torch_sdpa
from lz_compile.lowering.ops import attention
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs, gathered, seen


def paged_attention(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    """The attention in the op's canonical layout (see ``lowering/ops/paged_attention.py``)."""
    if attrs.is_ragged:
        found: torch.Tensor = _ragged(x, attrs)
        return found
    is_known = x.sinks is None and attrs.softcap is None  # to PyTorch's function
    return _decode(x, attrs) if is_known else op.reference(x, attrs)


def _decode(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    """One query for each request: one attention under a mask of what each sees."""
    dtype = x.query.dtype
    key, value = (gathered(x, name, dtype) for name in ("key", "value"))
    sees = seen(x, attrs, key.shape[1])
    is_seen = sees[:, :, None, None]
    # What is not read may be NaN.
    key, value = (torch.where(is_seen, each, 0.0).transpose(1, 2) for each in (key, value))
    given = attention.Operands(x.query[:, :, None], key, value, mask=sees[:, None, None])
    return _attend(given, attrs, None)[:, :, 0].to(attrs.out_dtype)


def ragged(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    """Request by request; where each begins is data.

    Raises:
        ArgumentError: a table names slots that there are not.
    """
    op.check_places(x, attrs)
    out, slots = torch.zeros_like(op.fake(x, attrs)), x.key_cache.shape[1]
    firsts = [0] * x.lengths.shape[0] if x.first_keys is None else x.first_keys.tolist()
    starts = [*range(x.lengths.shape[0] + 1)] if x.query_starts is None else x.query_starts.tolist()
    for request, length in enumerate(x.lengths.tolist()):
        rows = slice(starts[request], starts[request + 1])
        count = rows.stop - rows.start
        skipped = max(count - max(length - max(firsts[request], 0), 0), 0)  # the first ones see no key
        if count == skipped:
            continue
        blocks = x.block_table[request : request + 1, : -(-length // slots)]
        own = Operands(x.query, x.key_cache, x.value_cache, blocks, x.lengths, None, None, x.key_scale, x.value_scale)
        in_window = 0 if attrs.window is None else length - count + skipped + 1 - attrs.window
        first = max(in_window, firsts[request], 0)  # seen by any
        key, value = (gathered(own, name, x.query.dtype)[:, first:length].transpose(1, 2) for name in ("key", "value"))
        query = x.query[None, rows.start + skipped : rows.stop].transpose(1, 2)
        band = Band(None if attrs.window is None else 1 - attrs.window, 0, at_end=True)
        sinks = None if x.sinks is None else x.sinks.to(x.query.dtype).reshape(1, -1, 1, 1)
        found = _attend(attention.Operands(query, key, value, sinks=sinks), attrs, band)
        out[rows.start + skipped : rows.stop] = found[0].transpose(0, 1)
    return out


_ragged = kernel_operator("torch_paged_attention", op, ragged, has_fallback=False)


def _attend(x: attention.Operands, attrs: PagedAttentionAttrs, band: Band | None) -> torch.Tensor:
    """PyTorch's function; what it does not know is written out."""
    told = AttentionAttrs(
        scale=attrs.scale,
        softcap=attrs.softcap,
        band=band,
        has_mask=x.mask is not None,
        has_sinks=x.sinks is not None,
        masked_rows="zero",
        enable_gqa=bool(x.query.shape[1] != x.key.shape[1]),
    )
    if x.sinks is None and attrs.softcap is None:
        return torch_sdpa.attention(x, told)
    return attention.reference(x, told)
