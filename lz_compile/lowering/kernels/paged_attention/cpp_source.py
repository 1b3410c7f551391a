"""C++ that reads the blocks of a cache where they lie.

The keys of a request are split into parts, which threads share. A part goes over its keys in tiles: scores of few keys of
all heads at a time, as they lie in memory, a softmax that is corrected from tile to tile, values in the same order. With each
line that is read, the same one a step on is asked for: asked for in bursts, or further ahead than the first cache holds, it
comes late. Parts are joined at last. How requests are split depends on their own length alone, so that the bits of a result
depend neither on the other requests nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering import cpp_builds
from lz_compile.lowering.cpp import calls
from lz_compile.lowering.kernels.attention.cpp_keys import FLAGS, source
from lz_compile.lowering.kernels.paged_attention.cpp_program import PAGED
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs

_TABLES = frozenset({"block_table", "lengths", "query_starts", "first_keys"})


def run(x: Operands, attrs: PagedAttentionAttrs, most_queries: int) -> tuple[torch.Tensor, list[int]]:
    """The result in float32, and the requests that are left out of it, for they have more than so many queries.

    Raises:
        ValueError: a table names slots that there are not; the operand's name, and what was found.
        RuntimeError: there is no C++ compiler.
    """
    tokens, heads, dims = x.query.shape
    requests, columns = x.block_table.shape
    blocks, slots, kv_heads, value_dim = x.value_cache.shape
    out = x.query.new_zeros((tokens, heads, value_dim), dtype=torch.float32)
    left_out = None if x.query_starts is None else x.lengths.new_zeros(requests, dtype=torch.int32)
    tensors = [*_readable(x), out, left_out]
    scale = dims**-0.5 if attrs.scale is None else attrs.scale
    sizes = [tokens, heads, kv_heads, requests, columns, blocks, slots, most_queries, attrs.window or 0]
    strides = [*x.key_cache.stride(), *x.value_cache.stride()]
    numbers = [*sizes, *strides, torch.get_num_threads(), dims, value_dim]
    lanes = cpp_builds.vector_bits() // 32
    width, value_width = (-(-size // lanes) * lanes for size in (dims, value_dim))
    function = _function(x.key_cache.dtype, width, value_width, lanes, attrs.softcap is not None)
    found = (ctypes.c_int64 * 2)()
    shares = calls.reals((scale, attrs.softcap or 0.0))
    fault = function(calls.addresses(tensors), calls.integers(numbers), shares, found)
    if fault:
        raise ValueError(fault, *found)
    return out, [] if left_out is None else left_out.nonzero().flatten().tolist()


def _readable(x: Operands) -> list[torch.Tensor | None]:
    """The operands as the code reads them: caches as they are, tables in int32, all else in float32; contiguous."""
    found = x.given()
    for name, each in found.items():
        if name in ("key_cache", "value_cache"):
            continue
        dtype, held = torch.int32 if name in _TABLES else torch.float32, each
        if name in _TABLES and each.dtype.itemsize > dtype.itemsize:
            held = each.clamp(-1, 2**31 - 1)  # what no int32 holds is no place, either
        if name.endswith("_scale"):
            held = each.expand(x.key_cache.shape[2])
        # Asked first: a step of decoding is as short as few such calls.
        found[name] = held if held.dtype == dtype and held.is_contiguous() else held.to(dtype).contiguous()
    return [found.get(name) for name in x.names]


@lru_cache(maxsize=64)
def _function(stored: torch.dtype, head_dim: int, value_dim: int, lanes: int, has_softcap: bool) -> Any:
    text = source(stored, head_dim, value_dim, lanes, has_softcap=has_softcap, has_over=False, entry=PAGED)
    return calls.function("paged_attention", text, FLAGS, ctypes.c_int32)
