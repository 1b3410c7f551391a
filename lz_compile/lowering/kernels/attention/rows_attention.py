"""Attention on CPUs in which a row has the same bits in every batch, whatever its padding and the chunks of its prefill.

A thread of C++ takes a few rows (queries of the heads that share keys), a lane each, and computes all scores of theirs,
then the softmax, then the sums of values: three passes over memory that stays in its cache. As the softmax knows all scores,
there are no blocks of keys whose borders could show in the result, and keys with a weight of zero may be left out.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.cpp import rows
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import attention as op
from lz_compile.lowering.ops.attention import Operands


def _attention(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    result = op.fake(x, attrs)
    if not result.numel():
        return result
    acc = rows.wide(x.query.dtype)
    given = [each if each.dtype == x.query.dtype else each.to(acc) for each in (x.query, x.key, x.value)]
    if len({each.dtype for each in given}) > 1:
        given = [each.to(acc) for each in given]
    keep = op.merged_mask(x, replace(attrs, is_causal=False, band=None))
    bias, sinks, slopes = (None if each is None else each.to(acc) for each in (x.bias, x.sinks, x.slopes))
    over = [_by_query(each) for each in (keep, bias)]
    band, (batch, heads, queries, size), (_, kv_heads, keys, _) = attrs.limits, x.query.shape, x.key.shape
    shift = 0 if band is None else band.offset(queries, keys)
    lower, upper = (None, None) if band is None else (band.lower, band.upper)
    limits = (-keys - queries if lower is None else shift + lower, keys + queries if upper is None else shift + upper)
    skips = int(attrs.masked_rows in ("nan", "zero") and not attrs.zeroes_nan)
    lowest = torch.finfo(x.query.dtype).min if attrs.masked_rows == "mean" else -torch.inf
    sizes = [batch, heads, kv_heads, queries, keys, size, x.value.shape[-1], *limits, skips]
    for each in (*given, *over, sinks, slopes):
        sizes += strides_of(each)
    empties = 0 if attrs.masked_rows != "zero" and not attrs.zeroes_nan else 2 if attrs.zeroes_nan else 1
    scale = size**-0.5 if attrs.scale is None else attrs.scale
    run = rows.function(_BODY, acc, Stored=given[0].dtype)
    out = result if result.dtype == given[0].dtype else result.to(given[0].dtype)
    shares = [scale, attrs.softcap or 0.0, lowest]
    rows.call(run, [*given, *over, sinks, slopes, out], [*sizes, empties], shares)
    return result if out is result else result.copy_(out)


def _by_query(over: torch.Tensor | None) -> torch.Tensor | None:
    """What lies over scores, with queries next to one another, as lanes are."""
    if over is None:
        return None
    over = over[(None,) * (4 - over.dim())]
    return over if over.shape[2] == 1 else over.transpose(2, 3).contiguous().transpose(2, 3)


def strides_of(tensor: torch.Tensor | None) -> list[int]:
    """Of four dimensions, zeros for those that broadcast."""
    if tensor is None:
        return [0] * 4
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


_BODY = """
struct Over {  // a tensor of four dimensions, some of which broadcast
  int64_t s[4];
  int64_t at(int64_t b, int64_t h, int64_t q, int64_t k) const { return b * s[0] + h * s[1] + q * s[2] + k * s[3]; }
};
struct Problem {
  int64_t batch, heads, kv_heads, queries, keys, size, value_size, lower, upper, skips;
  Over query, key, value, keep, bias, sinks, slopes;
  int64_t empties, threads;
};
struct Shares { double scale, cap, lowest; };
struct Given {
  const Stored *query, *key, *value;
  const bool* keep;
  const Acc *bias, *sinks, *slopes;
  Stored* out;
};
constexpr int64_t kMost = 2 * kLanes, kKeys = 64;

// Of some rows: where they are, and what they see by position alone.
struct Rows {
  int64_t batch, kv_head, first, count, vectors, first_key, last_key, whole_from, whole_to;
  int64_t head[kMost], place[kMost], low[kMost], high[kMost];
  bool is_one_head;
  int64_t stride() const { return vectors * kLanes; }
};

static Rows rows_of(const Problem& p, int64_t batch, int64_t kv_head, int64_t first, int64_t count) {
  Rows r{batch, kv_head, first, count, (count + kLanes - 1) / kLanes, p.keys, 0, 0, p.keys, {}, {}, {}, {}, false};
  for (int64_t i = 0; i < r.stride(); ++i) {
    const int64_t row = first + (i < count ? i : 0);
    r.head[i] = kv_head * (p.heads / p.kv_heads) + row / p.queries;
    r.place[i] = row % p.queries;
    r.low[i] = std::min(std::max<int64_t>(r.place[i] + p.lower, 0), p.keys);
    r.high[i] = std::max(std::min(r.place[i] + p.upper + 1, p.keys), r.low[i]);
    r.first_key = std::min(r.first_key, r.low[i]);
    r.last_key = std::max(r.last_key, r.high[i]);
    r.whole_from = std::max(r.whole_from, r.low[i]);
    r.whole_to = std::min(r.whole_to, r.high[i]);
  }
  if (!p.skips) r.first_key = 0, r.last_key = p.keys;
  r.is_one_head = count == r.stride() && r.head[0] == r.head[count - 1];
  return r;
}

// What lies over the scores of a key, a lane for each row.
template <class T> INLINE const T* lanes_of(const T* data, const Over& over, const Rows& r, int64_t key, T* copy) {
  if (r.is_one_head && over.s[2] == 1) return data + over.at(r.batch, r.head[0], r.place[0], key);
  for (int64_t i = 0; i < r.stride(); ++i) copy[i] = data[over.at(r.batch, r.head[i], r.place[i], key)];
  return copy;
}

// Whether any of the rows sees one of some keys, as far as the mask says.
static bool is_seen(const Problem& p, const Given& g, const Rows& r, int64_t from, int64_t to) {
  if (!g.keep || !p.skips) return true;
  bool copy[kMost], found = false;
  for (int64_t t = from; t < to && !found; ++t) {
    const bool* keep = lanes_of(g.keep, p.keep, r, t, copy);
    for (int64_t i = 0; i < r.stride(); ++i) found |= keep[i];
  }
  return found;
}

// Products as scores: scaled, capped, biased, masked. What no row sees is no score at all.
static void finish(const Problem& p, const Shares& share, const Given& g, const Rows& r, int64_t key, Acc* scores) {
  const Acc scale(share.scale), cap(share.cap);
  for (int64_t v = 0; v < r.stride(); v += kLanes) {
    Vec x = Vec::loadu(scores + v) * Vec(scale);
    if (cap != 0) x = (x / Vec(cap)).tanh() * Vec(cap);
    x.store(scores + v);
  }
  if (g.bias) {
    Acc copy[kMost];
    const Acc* bias = lanes_of(g.bias, p.bias, r, key, copy);
    for (int64_t i = 0; i < r.stride(); ++i) scores[i] += bias[i];
  }
  if (g.slopes) {
    for (int64_t i = 0; i < r.stride(); ++i) {
      scores[i] += g.slopes[p.slopes.at(r.batch, r.head[i], 0, 0)] * Acc(key - r.place[i]);
    }
  }
  const Acc lowest = Acc(share.lowest);
  if (g.keep) {
    bool copy[kMost];
    const bool* keep = lanes_of(g.keep, p.keep, r, key, copy);
    for (int64_t i = 0; i < r.stride(); ++i) scores[i] = keep[i] ? scores[i] : lowest;
  }
  if (key < r.whole_from || key >= r.whole_to) {
    for (int64_t i = 0; i < r.stride(); ++i) scores[i] = key >= r.low[i] && key < r.high[i] ? scores[i] : lowest;
  }
}

template <int kVectors>
static void score(const Problem& p, const Shares& share, const Given& g, const Rows& r, const Acc* query, Acc* scores,
                  Acc* copies, std::vector<bool>& blocks) {
  const int64_t stride = kVectors * kLanes;
  const Stored* keys = g.key + p.key.at(r.batch, r.kv_head, 0, 0);
  const Acc* items[kKeys];
  for (int64_t from = r.first_key; from < r.last_key; from += kKeys) {
    const int64_t to = std::min(from + kKeys, r.last_key);
    Acc* here = scores + (from - r.first_key) * stride;
    const bool is_any = is_seen(p, g, r, from, to);
    blocks.push_back(is_any);
    if (!is_any) continue;
    for (int64_t t = from; t < to; ++t) {
      items[t - from] = numbers(keys + t * p.key.s[2], p.key.s[3], p.size, copies + (t - from) * p.size);
    }
    std::memset(here, 0, (to - from) * stride * sizeof(Acc));
    add_items<kVectors>(items, to - from, query, stride, p.size, here);
    for (int64_t t = from; t < to; ++t) finish(p, share, g, r, t, here + (t - from) * stride);
  }
}

// Scores as weights that are to be divided by their sum, which is returned in `sums`.
template <int kVectors>
static void weigh(const Problem& p, const Given& g, const Rows& r, const std::vector<bool>& blocks, Acc* scores, Acc* sums) {
  const int64_t stride = kVectors * kLanes, count = r.last_key - r.first_key;
  Vec most[kVectors], base[kVectors], sum[kVectors];
  Acc sinks[kVectors * kLanes];
  for (int64_t i = 0; i < stride; ++i) {
    sinks[i] = g.sinks ? g.sinks[p.sinks.at(r.batch, r.head[i], r.place[i], 0)] : kNothing;
  }
  for (int v = 0; v < kVectors; ++v) most[v] = Vec::loadu(sinks + v * kLanes);
  for (int64_t t = 0; t < count; ++t) {
    if (!blocks[t / kKeys]) continue;
    for (int v = 0; v < kVectors; ++v) most[v] = at::vec::maximum(most[v], Vec::loadu(scores + t * stride + v * kLanes));
  }
  for (int v = 0; v < kVectors; ++v) {
    base[v] = Vec::blendv(most[v], Vec(Acc(0)), most[v] == Vec(kNothing));
    sum[v] = g.sinks ? (Vec::loadu(sinks + v * kLanes) - base[v]).exp() : Vec(Acc(0));
  }
  for (int64_t t = 0; t < count; ++t) {
    if (!blocks[t / kKeys]) continue;
    for (int v = 0; v < kVectors; ++v) {
      const Vec weight = (Vec::loadu(scores + t * stride + v * kLanes) - base[v]).exp();
      weight.store(scores + t * stride + v * kLanes);
      sum[v] = sum[v] + weight;
    }
  }
  for (int v = 0; v < kVectors; ++v) sum[v].store(sums + v * kLanes);
}

// For kRows rows and kColumns registers of values: what their weights of some keys take of these.
template <int kRows, int kColumns>
INLINE void add_values(const Acc* weights, int64_t stride, const Acc* const* values, int64_t column, int64_t count, Acc* sums,
                       int64_t width) {
  Vec sum[kRows][kColumns];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) sum[i][c] = Vec::loadu(sums + i * width + c * kLanes);
  }
  for (int64_t t = 0; t < count; ++t) {
    Vec value[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) value[c] = Vec::loadu(values[t] + column + c * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec weight(weights[t * stride + i]);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sum[i][c] = at::vec::fmadd(weight, value[c], sum[i][c]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) sum[i][c].store(sums + i * width + c * kLanes);
  }
}
template <int kRows>
static void add_columns(const Acc* weights, int64_t stride, const Acc* const* values, int64_t count, Acc* sums,
                        int64_t width) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= width; c += 2 * kLanes) add_values<kRows, 2>(weights, stride, values, c, count, sums + c, width);
  for (; c < width; c += kLanes) add_values<kRows, 1>(weights, stride, values, c, count, sums + c, width);
}

static void add_all_values(const Problem& p, const Given& g, const Rows& r, const std::vector<bool>& blocks,
                           const Acc* weights, Acc* sums, int64_t width, Acc* copies) {
  const int64_t stride = r.stride();
  const Stored* data = g.value + p.value.at(r.batch, r.kv_head, 0, 0);
  const bool is_whole = p.value_size == width;
  const Acc* values[kKeys];
  for (int64_t from = r.first_key, block = 0; from < r.last_key; from += kKeys, ++block) {
    if (!blocks[block]) continue;
    const int64_t count = std::min(kKeys, r.last_key - from);
    for (int64_t t = 0; t < count; ++t) {
      Acc* copy = copies + t * width;
      values[t] = numbers(data + (from + t) * p.value.s[2], p.value.s[3], p.value_size, copy);
      if (!is_whole && values[t] != copy) std::memcpy(copy, values[t], p.value_size * sizeof(Acc));
      if (!is_whole) values[t] = copy;  // what lies behind is zeros
    }
    const Acc* of_block = weights + (from - r.first_key) * stride;
    int64_t i = 0;
    for (; i + kItems <= r.count; i += kItems) {
      add_columns<kItems>(of_block + i, stride, values, count, sums + i * width, width);
    }
    for (; i < r.count; ++i) add_columns<1>(of_block + i, stride, values, count, sums + i * width, width);
  }
}

static void attend(const Problem& p, const Shares& share, const Given& g, const Rows& r) {
  const int64_t stride = r.stride(), width = up_to(p.value_size, kLanes);
  const int64_t count = std::max<int64_t>(r.last_key - r.first_key, 0);
  thread_local std::vector<Acc> memory;
  const int64_t parts[] = {p.size * stride, count * stride, r.count * width, kKeys * std::max(p.size, width), stride, p.size};
  int64_t total = 0;
  for (int64_t part : parts) total += up_to(part, kLanes);
  if (int64_t(memory.size()) < total) memory.resize(total);
  Acc* at[6];
  at[0] = memory.data();
  for (int i = 1; i < 6; ++i) at[i] = at[i - 1] + up_to(parts[i - 1], kLanes);
  Acc *query = at[0], *scores = at[1], *sums = at[2], *copies = at[3], *totals = at[4];
  for (int64_t i = 0; i < stride; ++i) {
    const Acc* row = numbers(g.query + p.query.at(r.batch, r.head[i], r.place[i], 0), p.query.s[3], p.size, at[5]);
    for (int64_t d = 0; d < p.size; ++d) query[d * stride + i] = row[d];
  }
  std::vector<bool> blocks;
  if (r.vectors == 1) {
    score<1>(p, share, g, r, query, scores, copies, blocks);
    weigh<1>(p, g, r, blocks, scores, totals);
  } else {
    score<2>(p, share, g, r, query, scores, copies, blocks);
    weigh<2>(p, g, r, blocks, scores, totals);
  }
  std::memset(sums, 0, r.count * width * sizeof(Acc));
  std::memset(copies, 0, kKeys * width * sizeof(Acc));
  add_all_values(p, g, r, blocks, scores, sums, width, copies);
  for (int64_t i = 0; i < r.count; ++i) {
    const Acc sum = totals[i];
    const bool is_zero = p.keys == 0 || (p.empties >= 1 && sum == 0) || (p.empties == 2 && std::isnan(sum));
    Stored* to = g.out + ((r.batch * p.heads + r.head[i]) * p.queries + r.place[i]) * p.value_size;
    for (int64_t e = 0; e < p.value_size; ++e) {
      to[e] = static_cast<Stored>(is_zero ? Acc(0) : sums[i * width + e] / sum);
    }
  }
}

extern "C" void run(const void* const* operands, const int64_t* sizes, const double* numbers) {
  Problem p;
  Shares share;
  std::memcpy(&p, sizes, sizeof(p));
  std::memcpy(&share, numbers, sizeof(share));
  const Given g{(const Stored*)operands[0], (const Stored*)operands[1], (const Stored*)operands[2], (const bool*)operands[3],
                (const Acc*)operands[4], (const Acc*)operands[5], (const Acc*)operands[6], (Stored*)operands[7]};
  const int64_t rows = p.heads / p.kv_heads * p.queries;
  const int64_t step = p.keys > 16384 ? kLanes : kMost, tiles = (rows + step - 1) / step;
#pragma omp parallel for schedule(dynamic) num_threads(p.threads)
  for (int64_t task = 0; task < p.batch * p.kv_heads * tiles; ++task) {
    const int64_t first = task % tiles * step, pair = task / tiles;
    attend(p, share, g, rows_of(p, pair / p.kv_heads, pair % p.kv_heads, first, std::min(step, rows - first)));
  }
}
"""

attention = kernel_operator("row_attention", op, _attention, kernel_id="lz.row_attention")
