"""C++ that reads the blocks of a cache where they lie.

The keys of a request are split into parts of ``kPart``, which threads share. A part goes over its keys in tiles that stay in
the nearest cache, for one head after the other: scores of ``kLanes`` keys at once, a softmax that is corrected from tile to
tile, values. Parts are joined at last. How requests are split depends on their own length alone, so that the bits of a
result depend neither on the other requests nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering import inductor
from lz_compile.lowering.cpp.floats import FLOATS, STORED, STORED_TYPES
from lz_compile.lowering.cpp.vectors import PICK, lane_sums
from lz_compile.lowering.kernels.sampling.cpp_vectors import VECTORS
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs

#: Beside Inductor's own: no more than the rounding of ``a * b + c`` depends on it.
FLAGS = ("-ffp-contract=fast", "-ftree-loop-vectorize")
_COUNT = len(Operands.names) + 2


@dataclass(frozen=True)
class Program:
    """What the code is written for; each takes a second to compile."""

    stored: torch.dtype
    head_dim: int
    value_dim: int
    has_softcap: bool
    lanes: int

    def source(self) -> str:
        """The translation unit."""
        return f"""#include <cstdint>
#include <type_traits>
#include <vector>
constexpr int kLanes = {self.lanes};
constexpr int kD = {self.head_dim}, kE = {self.value_dim};
constexpr bool kHasCap = {str(self.has_softcap).lower()};
{FLOATS}{STORED}{VECTORS}
using Stored = {STORED_TYPES[self.stored]};
typedef Floats Vec;
typedef Ints MaskVec;
{PICK}{lane_sums(self.lanes)}{PAGED}"""


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
    left_out = x.lengths.new_zeros(requests, dtype=torch.int32)
    readable = _readable(x)
    tensors = [*readable.flat(), out, left_out]
    scale = dims**-0.5 if attrs.scale is None else attrs.scale
    sizes = [tokens, heads, kv_heads, requests, columns, blocks, slots, most_queries, attrs.window or 0]
    strides = [*readable.key_cache.stride(), *readable.value_cache.stride()]
    numbers = [*sizes, *strides, torch.get_num_threads()]
    program = Program(x.key_cache.dtype, dims, value_dim, attrs.softcap is not None, inductor.vector_bits() // 32)
    pointers = (ctypes.c_void_p * _COUNT)(*[0 if each is None else each.data_ptr() for each in tensors])
    shares = (ctypes.c_double * 2)(scale, attrs.softcap or 0.0)
    found = (ctypes.c_int64 * 2)()
    fault = _function(program)(pointers, (ctypes.c_int64 * len(numbers))(*numbers), shares, found)
    if fault:
        raise ValueError(fault, *found)
    many = left_out.nonzero().flatten().tolist() if x.query_starts is not None else []
    return out, many


def _readable(x: Operands) -> Operands:
    """The same as the code reads it: caches as they are, tables in int32, all else in float32; contiguous."""
    given = x.given()
    for name, each in given.items():
        if name in ("key_cache", "value_cache"):
            continue
        is_table = name in ("block_table", "lengths", "query_starts")
        # What no int32 holds is no place, either.
        held = each.clamp(-1, 2**31 - 1) if is_table and each.dtype.itemsize > 4 else each
        expanded = held.expand(x.key_cache.shape[2]) if name.endswith("_scale") else held
        given[name] = expanded.to(torch.int32 if is_table else torch.float32).contiguous()
    return Operands(**given)


@lru_cache(maxsize=64)
def _function(program: Program) -> Any:
    function = inductor.load_cpp(program.source(), FLAGS).paged_attention
    function.restype = ctypes.c_int32
    return function


PAGED = """
constexpr int kTile = 64, kPart = 256, kSoon = 8;
constexpr int kDV = (kD + kLanes - 1) / kLanes, kEV = (kE + kLanes - 1) / kLanes;
constexpr int kDP = kDV * kLanes, kEP = kEV * kLanes;
constexpr int kState = kEP + kLanes;  // sums of values; then the largest score, and the sum of weights
constexpr bool kIsFloat = std::is_same_v<Stored, float>;

// What faults are about, in the order of the op's operands.
enum Fault : int32_t { kNone = 0, kTable = 1, kLengths = 2, kStarts = 3 };

struct Numbers {
  int64_t tokens, heads, kv_heads, requests, columns, blocks, slots, most_queries, window;
  int64_t key[4], value[4];  // strides of blocks, slots, heads, features
  int64_t threads;
};
struct Request {
  int64_t first_query, queries, length, first_key;
  const int32_t* row;
};
struct Part {
  int64_t request, begin, end, state;
};

// One row of a cache as floats, zeros behind it.
template <int kCount, int kPadded>
INLINE void widen(const Stored* from, int64_t stride, float* to) {
  int j = 0;
  for (; stride == 1 && j + kLanes <= kCount; j += kLanes) {
    const Floats x = floats_at(from + j);
    std::memcpy(to + j, &x, sizeof(x));
  }
  for (; j < kCount; ++j) to[j] = number_of(from[j * stride]);
  for (; j < kPadded; ++j) to[j] = 0.0f;
}

// Rows of a tile: where they lie, or widened copies.
template <int kCount, int kPadded>
INLINE void rows_of(const Stored* cache, const int64_t* stride, const Request& request, const Numbers& n, int64_t head,
                    int64_t begin, int count, float* copies, const float** rows) {
  int64_t block = begin / n.slots, slot = begin % n.slots;
  const Stored* at = cache + int64_t(request.row[block]) * stride[0] + head * stride[2];
  for (int t = 0; t < count; ++t) {
    if (slot == n.slots) {
      slot = 0;
      at = cache + int64_t(request.row[++block]) * stride[0] + head * stride[2];
    }
    const Stored* from = at + slot++ * stride[1];
    if constexpr (kIsFloat && kCount == kPadded) {
      if (stride[3] == 1) {
        rows[t] = reinterpret_cast<const float*>(from);
        continue;
      }
    }
    float* to = copies + t * kPadded;
    if constexpr (!kIsFloat) __builtin_prefetch(from + kSoon * stride[1]);
    widen<kCount, kPadded>(from, stride[3], to);
    rows[t] = to;
  }
}

// The tile that is next, whose blocks lie where processors expect nothing: memory is asked for its rows, evenly while this
// one is computed. Of 2 ** shift calls each asks for a share of them, from row `first` on.
struct Ahead {
  const float* const* keys;
  const float* const* values;
  int first, shift;
};
template <int kCount> INLINE void fetch(const Ahead& ahead, const float* const* rows, int begin, int end) {
  for (int t = begin >> ahead.shift; t < end >> ahead.shift; ++t) {
    for (int j = 0; j < kCount; j += 16) __builtin_prefetch(rows[ahead.first + t] + j);
  }
}

// Scores of kRows queries with the keys of a tile, a multiple of kLanes of them; each load of keys serves all rows.
template <int kRows>
INLINE void score(const float* const* queries, const float* const* keys, int first, int last, float cap,
                  float (*scores)[kTile], const Ahead* ahead) {
  constexpr int kKeys = kLanes / kRows;
  for (int t = first; t < last; t += kKeys) {
    Floats part[kLanes];
    const float* at[kKeys];
    for (int j = 0; j < kLanes; ++j) part[j] = Floats{};
    for (int j = 0; j < kKeys; ++j) at[j] = keys[t + j];
    if (ahead) fetch<kDP>(*ahead, ahead->keys, t, t + kKeys);
#pragma GCC unroll 1
    for (int d = 0; d < kDP; d += kLanes) {
      Floats query[kRows];
      for (int r = 0; r < kRows; ++r) query[r] = load(queries[r] + d);
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        const Floats key = load(at[j] + d);
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) part[r * kKeys + j] += query[r] * key;
      }
    }
    Floats found = sums(part);
    if constexpr (kHasCap) {
      for (int j = 0; j < kLanes; ++j) found[j] = cap * std::tanh(found[j] / cap);
    }
    for (int r = 0; r < kRows; ++r) std::memcpy(scores[r] + t, reinterpret_cast<float*>(&found) + r * kKeys, kKeys * 4);
  }
}

// Adds what weights take of values, kCount registers of columns of kRows rows.
template <int kRows, int kCount>
INLINE void add_values(float* const* states, float (*weights)[kTile], const float* const* values, int column, int low,
                       int high, const Ahead* ahead) {
  Floats sum[kRows][kCount];
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int e = 0; e < kCount; ++e) sum[r][e] = load(states[r] + column + e * kLanes);
  }
  for (int t = low; t < high; ++t) {
    const float* value = values[t] + column;
    if (ahead) fetch<kEP>(*ahead, ahead->values, t, t + 1);
#pragma GCC unroll 8
    for (int e = 0; e < kCount; ++e) {
      const Floats x = load(value + e * kLanes);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) sum[r][e] += weights[r][t] * x;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int e = 0; e < kCount; ++e) std::memcpy(states[r] + column + e * kLanes, &sum[r][e], sizeof(Floats));
  }
}

// Scores as weights; what was summed up before is scaled to the greatest score so far. False where there is no weight.
INLINE bool weigh(float* state, float* scores, int first, int low, int high, int last) {
  for (int t = first; t < low; ++t) scores[t] = kNothing;
  for (int t = high; t < last; ++t) scores[t] = kNothing;
  Floats most = load(scores + first);
  for (int t = first + kLanes; t < last; t += kLanes) {
    const Floats x = load(scores + t);
    most = x > most ? x : most;
  }
  float& greatest = state[kEP];
  float& total = state[kEP + 1];
  const float found = largest(most), before = greatest;
  if (found > before) {
    greatest = found;
    const float factor = std::exp(before - greatest);
    total *= factor;
    for (int e = 0; e < kEP; ++e) state[e] *= factor;
  }
  if (greatest == kNothing) {  // no weight at all, unless a score is NaN
    for (int t = low; t < high; ++t) total += scores[t] == kNothing ? 0.0f : scores[t];
    return false;
  }
  Floats sum{};
  for (int t = first; t < last; t += kLanes) {
    const Floats w = exponential(load(scores + t) - greatest);
    std::memcpy(scores + t, &w, sizeof(w));
    sum += w;
  }
  for (int j = 0; j < kLanes; ++j) total += sum[j];
  return true;
}

// The keys of a tile from `low` to before `high` for kRows queries.
template <int kRows>
INLINE void attend(float* const* states, const float* const* queries, const float* const* keys,
                   const float* const* values, int low, int high, float cap, const Ahead* ahead) {
  constexpr int kColumns = 8 / kRows;
  const int first = low / kLanes * kLanes, last = (high + kLanes - 1) / kLanes * kLanes;
  alignas(64) float weights[kRows][kTile];
  score<kRows>(queries, keys, first, last, cap, weights, ahead);
  for (int r = 0; r < kRows; ++r) {
    if (!weigh(states[r], weights[r], first, low, high, last)) std::memset(weights[r], 0, sizeof(weights[r]));
  }
  int e = 0;
  for (; e + kColumns <= kEV; e += kColumns) {
    add_values<kRows, kColumns>(states, weights, values, e * kLanes, low, high, e ? nullptr : ahead);
  }
  constexpr int kRest = kEV % kColumns;
  if constexpr (kRest != 0) add_values<kRows, kRest>(states, weights, values, e * kLanes, low, high, nullptr);
}

// Where a query's keys begin and end.
INLINE void range_of(const Request& request, int64_t window, int64_t query, int64_t* low, int64_t* high) {
  *high = request.length - request.queries + query + 1;
  *low = window && *high > window ? *high - window : 0;
}

static void compute(const Part& part, const Request& request, const Numbers& n, const Stored* key_cache,
                    const Stored* value_cache, const float* queries, float cap, float* states,
                    float* copies) {
  static const float zeros[kDP > kEP ? kDP : kEP] = {};
  const int64_t groups = n.heads / n.kv_heads;
  const float *keys[2][kTile], *values[2][kTile];
  for (int64_t row = 0; row < request.queries * n.heads; ++row) {
    float* state = states + row * kState;
    std::memset(state, 0, kState * sizeof(float));
    state[kEP] = kNothing;
  }
  // Tile by tile, head by head; the next one is looked up while this one is read.
  const int64_t pieces = (part.end - part.begin + kTile - 1) / kTile * n.kv_heads;
  const int64_t turns = request.queries * ((groups + 1) / 2);
  int shift = 0;
  while (shift < 4 && (1 << shift) < turns) ++shift;
  auto look_up = [&](int64_t piece) {
    const int64_t begin = part.begin + piece / n.kv_heads * kTile, head = piece % n.kv_heads, side = piece % 2;
    const int count = int(part.end - begin < kTile ? part.end - begin : kTile);
    float* own = copies + side * kTile * (kDP + kEP);
    rows_of<kD, kDP>(key_cache, n.key, request, n, head, begin, count, own, keys[side]);
    rows_of<kE, kEP>(value_cache, n.value, request, n, head, begin, count, own + kTile * kDP, values[side]);
    for (int t = count; t < kTile; ++t) keys[side][t] = values[side][t] = zeros;
  };
  look_up(0);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = part.begin + piece / n.kv_heads * kTile, head = piece % n.kv_heads, side = piece % 2;
    const int count = int(part.end - begin < kTile ? part.end - begin : kTile);
    const bool is_last = piece + 1 == pieces;
    if (!is_last) look_up(piece + 1);
    int64_t turn = 0;
    for (int64_t query = 0; query < request.queries; ++query) {
      int64_t low, high;
      range_of(request, n.window, query, &low, &high);
      low = low > begin ? low - begin : 0;
      high = high - begin < count ? high - begin : count;
      if (low >= high) continue;
      const int64_t row = query * n.heads + head * groups;
      float* state[2];
      const float* own[2];
      for (int64_t group = 0; group < groups; group += 2, ++turn) {
        const int rows = group + 1 < groups ? 2 : 1;
        for (int r = 0; r < rows; ++r) {
          state[r] = states + (row + group + r) * kState;
          own[r] = queries + (request.first_query * n.heads + row + group + r) * kDP;
        }
        const Ahead next{keys[1 - side], values[1 - side], int(turn) * (kTile >> shift), shift};
        const Ahead* ahead = kIsFloat && !is_last && turn < (1 << shift) ? &next : nullptr;
        if (rows == 2) attend<2>(state, own, keys[side], values[side], int(low), int(high), cap, ahead);
        else attend<1>(state, own, keys[side], values[side], int(low), int(high), cap, ahead);
      }
    }
  }
}

// Requests in their places, or what is wrong with them, and where.
static Fault place(const Numbers& n, const int32_t* table, const int32_t* lengths, const int32_t* starts,
                   std::vector<Request>& requests, int64_t* found) {
  if (starts && starts[0] != 0) {
    found[0] = 0, found[1] = starts[0];
    return kStarts;
  }
  for (int64_t r = 0; r < n.requests; ++r) {
    const int64_t first = starts ? starts[r] : r, next = starts ? starts[r + 1] : r + 1, length = lengths[r];
    found[0] = r;
    if (next < first || next > n.tokens) {
      found[0] = r + 1, found[1] = next;
      return kStarts;
    }
    if (length < 0 || length > n.columns * n.slots) {
      found[1] = length;
      return kLengths;
    }
    int64_t low = length - (next - first) + 1 - n.window;
    low = n.window && low > 0 ? low : 0;
    const int32_t* row = table + r * n.columns;
    for (int64_t b = low / n.slots; b * n.slots < length; ++b) {
      if (row[b] < 0 || row[b] >= n.blocks) {
        found[1] = row[b];
        return kTable;
      }
    }
    requests.push_back({first, next - first, length, low, row});
  }
  return kNone;
}

extern "C" int32_t paged_attention(const void* const* operands, const int64_t* counts, const double* shares, int64_t* found) {
  Numbers n;
  std::memcpy(&n, counts, sizeof(n));
  const float* given = static_cast<const float*>(operands[0]);
  const auto *key_cache = static_cast<const Stored*>(operands[1]), *value_cache = static_cast<const Stored*>(operands[2]);
  const auto *tables = static_cast<const int32_t*>(operands[3]), *lengths = static_cast<const int32_t*>(operands[4]);
  const auto *starts = static_cast<const int32_t*>(operands[5]);
  const auto *sinks = static_cast<const float*>(operands[6]), *key_scale = static_cast<const float*>(operands[7]);
  const auto *value_scale = static_cast<const float*>(operands[8]);
  float* out = static_cast<float*>(const_cast<void*>(operands[9]));
  int32_t* left_out = static_cast<int32_t*>(const_cast<void*>(operands[10]));
  const int64_t groups = n.heads / n.kv_heads;

  std::vector<Request> requests;
  requests.reserve(n.requests);
  const Fault fault = place(n, tables, lengths, starts, requests, found);
  if (fault != kNone) return fault;

  std::vector<Part> parts;
  std::vector<int64_t> first_part(n.requests + 1, 0);
  int64_t size = 0;
  for (int64_t r = 0; r < n.requests; ++r) {
    const Request& request = requests[r];
    first_part[r] = int64_t(parts.size());
    if (request.queries > n.most_queries) {
      left_out[r] = 1;
      continue;
    }
    if (request.queries == 0) continue;
    for (int64_t begin = request.first_key / kPart * kPart; begin < request.length; begin += kPart) {
      const int64_t end = begin + kPart < request.length ? begin + kPart : request.length;
      parts.push_back({r, begin < request.first_key ? request.first_key : begin, end, size});
      size += request.queries * n.heads * kState;
    }
  }
  first_part[n.requests] = int64_t(parts.size());

  std::vector<float> states(size), queries(n.tokens * n.heads * kDP, 0.0f);
  for (int64_t row = 0; row < n.tokens * n.heads; ++row) {
    const int64_t head = row % n.heads / groups;
    const float scale = float(shares[0] * (key_scale ? key_scale[head] : 1.0f));
    for (int d = 0; d < kD; ++d) queries[row * kDP + d] = given[row * kD + d] * scale;
  }
#pragma omp parallel num_threads(n.threads)
  {
    std::vector<float> memory(2 * kTile * (kDP + kEP));
#pragma omp for schedule(dynamic)
    for (int64_t p = 0; p < int64_t(parts.size()); ++p) {
      const Part& part = parts[p];
      compute(part, requests[part.request], n, key_cache, value_cache, queries.data(), float(shares[1]),
              states.data() + part.state, memory.data());
    }
#pragma omp for schedule(static)
    for (int64_t r = 0; r < n.requests; ++r) {
      const Request& request = requests[r];
      const int64_t first = first_part[r], last = first_part[r + 1];
      if (first == last) continue;
      for (int64_t row = 0; row < request.queries * n.heads; ++row) {
        const int64_t head = row % n.heads;
        int64_t low, high;
        range_of(request, n.window, row / n.heads, &low, &high);
        if (low >= high) continue;
        float greatest = sinks ? sinks[head] : kNothing;
        for (int64_t p = first; p < last; ++p) {
          const float largest = states[parts[p].state + row * kState + kEP];
          greatest = largest > greatest ? largest : greatest;
        }
        float total = sinks ? std::exp(sinks[head] - greatest) : 0.0f;
        float sum[kEP] = {};
        for (int64_t p = first; p < last; ++p) {
          const float* state = states.data() + parts[p].state + row * kState;
          if (state[kEP + 1] == 0.0f) continue;  // it saw none of these keys
          const float factor = std::exp(state[kEP] - greatest);
          total += factor * state[kEP + 1];
          for (int e = 0; e < kEP; ++e) sum[e] += factor * state[e];
        }
        const float share = (value_scale ? value_scale[head / groups] : 1.0f) / total;
        float* to = out + (request.first_query * n.heads + row) * kE;
        for (int e = 0; e < kE; ++e) to[e] = sum[e] * share;
      }
    }
  }
  return kNone;
}
"""
