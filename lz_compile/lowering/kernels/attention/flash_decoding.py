"""Attention of few queries on CPUs, in C++.

Keys and values are read once for all heads that share them, and no more of them than a mask shows: of a static cache what is
filled. The keys are split among threads, and the parts joined (Flash-Decoding, Dao et al. 2023), by the loops that read
caches in blocks, as if each row, or each head of it, were a request with one block.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering import cpp_builds
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.cpp import calls
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.attention import cpp_keys
from lz_compile.lowering.kernels.attention.rows_attention import strides_of
from lz_compile.lowering.ops import attention as op
from lz_compile.lowering.ops.attention import Operands

#: What a row gives that sees no key.
_EMPTY = {"nan": 0, "zero": 1, "mean": 2}
#: Products below which a thread is not worth its start.
_THREAD_WORK = 1 << 15


def _attention(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    result = op.fake(x, attrs)
    if not result.numel():
        return result
    over = [None if each is None else each.float() for each in (x.bias, x.slopes, x.sinks)]
    tensors = (x.query, x.key, x.value, x.mask, *over)
    run, sizes, shares = _prepared(calls.layouts(tensors), attrs, torch.get_num_threads())
    run(calls.addresses((*tensors, result)), sizes, shares)
    return result


@lru_cache(maxsize=1024)
def _prepared(layouts: tuple[calls.Layout | None, ...], attrs: AttentionAttrs, threads: int) -> tuple[Any, Any, Any]:
    """The compiled function for tensors that lie like these, its sizes and its numbers: every call pays for its lines."""
    query, key, value, mask, *over = calls.without_memory(layouts)
    assert query is not None
    assert key is not None
    assert value is not None
    (batch, heads, queries, size), (_, kv_heads, keys, value_size) = query.shape, value.shape
    band = attrs.limits
    shift = 0 if band is None else band.offset(queries, keys)
    lower, upper = (None, None) if band is None else (band.lower, band.upper)
    limits = (-keys - queries if lower is None else shift + lower, keys + queries if upper is None else shift + upper)
    empty = _EMPTY["zero" if attrs.zeroes_nan or not keys else attrs.masked_rows]
    threads = max(1, min(threads, batch * heads * queries * keys * (size + value_size) // _THREAD_WORK))
    sizes = [batch, kv_heads, heads // kv_heads, queries, keys, size, value_size, *limits, empty, threads]
    for each in (query, key, value, mask, *over):
        sizes += strides_of(each)
    lanes = cpp_builds.vector_bits() // 32
    width, value_width = (-(-each // lanes) * lanes for each in (size, value_size))
    has = {"has_softcap": attrs.softcap is not None, "has_over": any(each is not None for each in (mask, *over[:2]))}
    scale = size**-0.5 if attrs.scale is None else attrs.scale
    function = _function(key.dtype, width, value_width, lanes, **has)
    return function, calls.integers(sizes), calls.reals((scale, attrs.softcap or 0.0, torch.finfo(query.dtype).min))


@lru_cache(maxsize=64)
def _function(stored: torch.dtype, width: int, value_width: int, lanes: int, **has: bool) -> Any:
    """Of a cache that grows all steps share it."""
    text = cpp_keys.source(stored, width, value_width, lanes, **has, entry=_ENTRY)
    return calls.function("few_queries", text, cpp_keys.FLAGS)


attention = kernel_operator("flash_decoding", op, _attention, kernel_id="lz.flash_decoding")

_ENTRY = """
struct Place {  // strides of a tensor of four dimensions, some of which broadcast
  int64_t s[4];
};
struct Problem {
  int64_t batch, kv_heads, groups, queries, keys, size, value_size, lower, upper, empty, threads;
  Place query, key, value, keep, bias, slopes, sinks;
};
struct Given {
  const Stored *query, *key, *value;
  const uint8_t* keep;
  const float *bias, *slopes, *sinks;
  Stored* out;
};
template <class Number> INLINE void write(Number* to, float x) { *to = Number(x); }
INLINE void write(uint16_t* to, float x) { *to = BFloat16(x).bits; }
#define OF(tensor, b, h) (g.tensor ? g.tensor + (b) * p.tensor.s[0] + (h) * p.tensor.s[1] : nullptr)

extern "C" void few_queries(const Given* given, const Problem* problem, const double* shares) {
  const Given& g = *given;
  const Problem& p = *problem;
  // One request for each head that keys have, or for all of a row: what lies next to one another is read together.
  const bool is_by_head = p.key.s[1] >= p.key.s[2] && p.value.s[1] >= p.value.s[2];
  const int64_t kv_heads = is_by_head ? 1 : p.kv_heads, cuts = p.kv_heads / kv_heads, count = p.batch * cuts;
  Numbers n{};
  n.heads = kv_heads * p.groups, n.kv_heads = kv_heads, n.slots = p.keys, n.dims = p.size, n.value_dims = p.value_size;
  const int64_t key[] = {0, p.key.s[2], p.key.s[1], p.key.s[3]}, value[] = {0, p.value.s[2], p.value.s[1], p.value.s[3]};
  std::memcpy(n.key, key, sizeof(key)), std::memcpy(n.value, value, sizeof(value));
  const int32_t row = 0;
  int64_t first_key = p.lower > 0 ? p.lower : 0, last = p.queries + p.upper;
  last = last < 0 ? 0 : last < p.keys ? last : p.keys;
  const Request request{0, p.queries, last, first_key, 0, p.lower, p.upper, &row};
  const int64_t rows = p.queries * n.heads;
  Parts parts;
  for (int64_t r = 0; r < count; ++r) parts.add(request, n.heads);
  const int64_t size = int64_t(parts.all.size());

  const auto held_states = lines(parts.size), held_queries = lines(count * rows * kDP);
  float *states = held_states[0].numbers, *queries = held_queries[0].numbers;
  std::vector<Over> over(count);
  std::vector<uint8_t> open(kHasOver ? count * rows : 0);
  const bool in_place = is_in_place(n, request);
#pragma omp parallel num_threads(p.threads < size ? p.threads : size > 1 ? size : 1)
  {
    const auto copies = lines(kTile * kWide), scores = lines(parts.most * kTile);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < count; ++r) {
      const int64_t b = r / cuts, h = r % cuts * n.heads;
      over[r] = {OF(keep, b, h), OF(bias, b, h), OF(slopes, b, h), {p.keep.s[2], p.keep.s[1], p.keep.s[3]},
                 {p.bias.s[2], p.bias.s[1], p.bias.s[3]}, p.slopes.s[1]};
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t q = i / n.heads, head = i % n.heads;
        const Stored* from = g.query + b * p.query.s[0] + (h + head) * p.query.s[1] + q * p.query.s[2];
        float* to = queries + (r * rows + i) * kDP;
        for (int d = 0; d < kDP; ++d) to[d] = d < n.dims ? number_of(from[d * p.query.s[3]]) * float(shares[0]) : 0.0f;
        if (kHasOver && g.bias) {
          int64_t low, high;
          range_of(request, q, &low, &high);
          const bool is_known = head && !over[r].bias_at[1] && !(g.keep && over[r].keep_at[1]);
          open[r * rows + i] = is_known ? open[r * rows + i - 1] : over[r].opens(q, head, low, high);
        }
      }
    }
#pragma omp for schedule(dynamic, parts.chunk(p.threads))
    for (int64_t i = 0; i < size; ++i) {
      const Part& part = parts.all[i];
      const int64_t r = part.request, b = r / cuts, h = r % cuts * kv_heads;
      const auto run = in_place ? compute<Stored> : compute<float>;
      run(part, request, n, OF(key, b, h), OF(value, b, h), queries + r * rows * kDP, float(shares[1]), states + part.state,
          scores[0].numbers, in_place ? nullptr : copies[0].numbers, over[r], open.data() + (kHasOver ? r * rows : 0));
    }
#pragma omp for schedule(static)
    for (int64_t r = 0; r < count; ++r) {
      const int64_t b = r / cuts, h = r % cuts * n.heads;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t q = i / n.heads, head = h + i % n.heads;
        const float* sink = OF(sinks, b, head);
        sink = sink ? sink + q * p.sinks.s[2] : nullptr;
        float sum[kEP] = {}, greatest;
        float total = join(parts, r, states, i, sink, sum, greatest);
        // What is seen is filled like what is hidden; a row of NaN has no greatest score, either, and stays one.
        if (p.empty == 2 && total == total && greatest <= 0.999f * float(shares[2])) {
          const Stored* from = OF(value, b, head / p.groups);
          std::memset(sum, 0, sizeof(sum));
          total = float(p.keys);
          for (int64_t t = 0; t < p.keys; ++t) {
            for (int e = 0; e < p.value_size; ++e) sum[e] += number_of(from[t * p.value.s[2] + e * p.value.s[3]]);
          }
        } else if (total == 0.0f) {
          total = p.empty == 0 ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
        }
        Stored* to = g.out + (((b * p.kv_heads * p.groups) + head) * p.queries + q) * p.value_size;
        for (int e = 0; e < p.value_size; ++e) write(to + e, sum[e] / total);
      }
    }
  }
}
"""
