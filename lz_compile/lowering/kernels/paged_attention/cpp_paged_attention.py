"""Attention over a cache in blocks on CPUs in C++ of our own (``cpp_source.py``), which reads the blocks where they lie.

Requests of many queries are a matter of products, not of memory: their keys are gathered, and PyTorch's kernel does the rest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.paged_attention import torch_paged_attention
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs

#: Queries of a request up to which products are reads of keys and values.
MOST_QUERIES = 16


def _paged_attention(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.paged_attention import cpp_source as code

    if 0 in x.key_cache.shape:  # without a slot, all lengths are zero
        op.check_places(x, attrs)
        return torch.zeros_like(op.fake(x, attrs))
    try:
        out, many = code.run(x, attrs, MOST_QUERIES)
    except ValueError as error:
        op.check_places(x, attrs)
        raise AssertionError(f"places are right, and yet refused: {error}") from error
    found = out.to(attrs.out_dtype)
    if many:
        assert x.query_starts is not None, "requests of one query are not many"
        for request in many:
            first, last = x.query_starts[request : request + 2].tolist()
            found[first:last] = torch_paged_attention.ragged(_alone(x, request, first, last), attrs)
    return found


def _alone(x: Operands, request: int, first: int, last: int) -> Operands:
    """One request as a batch."""
    starts = x.lengths.new_tensor([0, last - first], dtype=torch.int32)
    rows = slice(request, request + 1)
    query, table, lengths = x.query[first:last], x.block_table[rows], x.lengths[rows]
    firsts = None if x.first_keys is None else x.first_keys[rows]
    return replace(x, query=query, block_table=table, lengths=lengths, query_starts=starts, first_keys=firsts)


paged_attention = kernel_operator("cpp_paged_attention", op, _paged_attention, kernel_id="lz.cpp_paged_attention")
paged_attention.bind = lambda _, attrs: partial(_paged_attention, attrs=attrs)  # type: ignore[attr-defined]  # for eager calls
