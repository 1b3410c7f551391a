"""C++ that multiplies a few rows with a stored weight, which it reads once: numbers are widened in registers.

A sum goes over the groups of a row of the weight, and is multiplied by the group's scale. Zero points are taken off the sum
of each lane of a register (some eight numbers, so that little cancels), or off each number where inputs are infinite or close
to it, groups do not fill registers, or numbers have eight bits.
Threads share the weight's rows. Products are joined with sums explicitly, and the order of a sum depends on the sizes of the
weight alone: rows give the same bits whatever is beside them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering import cpp_builds
from lz_compile.lowering.cpp import calls
from lz_compile.lowering.cpp.floats import STORED, STORED_TYPES, floats
from lz_compile.lowering.cpp.vectors import halves
from lz_compile.lowering.ops.linear import LinearAttrs, Operands, fake, groups_of, ordered

#: Beside Inductor's own.
FLAGS = ("-ftree-loop-vectorize",)
#: Multiplications below which a thread is not worth its start.
THREAD_WORK = 1 << 17


def source(stored: torch.dtype, lanes: int, **has: bool) -> str:
    """The translation unit for a stored dtype and registers of so many floats; each takes a second to compile.

    ``has`` are ``kIsPacked``, ``kHasZero``, ``kHasOffset`` and ``kHasCodebook``.
    """
    return f"""#include <cstdint>
#include <vector>
{calls.truths(**has)}{floats(lanes)}{halves(STORED_TYPES)}{STORED}
using Stored = {STORED_TYPES[stored]};
{LINEAR}"""


def run(x: Operands, attrs: LinearAttrs) -> torch.Tensor:
    """The product over operands that lie anywhere in memory.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    out = fake(x, attrs)
    if not out.numel():
        return out
    if not x.input.shape[1]:
        return out.zero_() if x.bias is None else out.copy_(x.bias.expand_as(out))
    written = out if out.dtype == torch.float32 else out.float()
    x = replace(x, input=ordered(x), order=None)
    given = {name: each if name == "weight" else each.to(torch.float32) for name, each in x.given().items()}
    count = groups_of(x)
    groups = {name: each.expand(x.weight.shape[0], count) for name, each in given.items() if name in _GROUPED}
    y = Operands(**{**{name: each.contiguous() for name, each in given.items()}, **groups})
    stored = y.weight if y.weight.stride(1) == 1 else y.weight.contiguous()
    rows, columns = y.input.shape
    threads = max(1, min(torch.get_num_threads(), rows * columns * stored.shape[0] // THREAD_WORK))
    is_half, is_high = attrs.packing.endswith("half"), attrs.packing.startswith("high")
    strides = [stored.stride(0)]
    for name in _GROUPED:
        strides += [0, 0] if name not in groups else [*groups[name].stride()]
    numbers = [rows, columns, stored.shape[0], count, is_half, is_high, threads, *strides]
    tensors = [y.input, stored, y.scale, y.zero, y.offset, y.bias, y.codebook, written]
    has = {f"kHas{name.title()}": getattr(y, name) is not None for name in ("zero", "offset", "codebook")}
    function = _function(stored.dtype, cpp_builds.vector_bits() // 32, kIsPacked=attrs.packing != "none", **has)
    function(calls.addresses(tensors), calls.integers(numbers))
    return written.to(out.dtype)


_GROUPED = ("scale", "zero", "offset")


@lru_cache(maxsize=64)
def _function(stored: torch.dtype, lanes: int, **has: bool) -> Any:
    return calls.function("linear", source(stored, lanes, **has), FLAGS)


LINEAR = """
// Sums that do not wait for each other.
constexpr int kChains = kIsPacked ? 2 : 4;
// Products that are sums less other sums; of infinities, or close to them, these differ from sums of differences.
constexpr float kMostPlain = 1e30f;
// So many elements are summed before zero points are taken off. Of eight bits, more cancels than may.
constexpr int64_t kMostElements = 64;
constexpr bool kMayBePlain = (kIsPacked && !kHasCodebook) || !(kHasZero || kHasOffset);

struct Numbers {
  int64_t rows, columns, out, groups, is_half, is_high, threads, weight, scale[2], zero[2], offset[2];
};
// What the stored numbers of a group mean: factor * ((x - zero) * inner + offset), where one of the factors is 1.
struct Meaning {
  float factor, inner, zero, offset;
  const float* codebook;
};
struct Meanings {
  const float *scale, *zero, *offset, *codebook;
  const Numbers& n;
  Meaning of(int64_t o, int64_t g) const {
    const float own = scale ? scale[o * n.scale[0] + g * n.scale[1]] : 1.0f;
    return {kHasOffset ? 1.0f : own, kHasOffset ? own : 1.0f, zero ? zero[o * n.zero[0] + g * n.zero[1]] : 0.0f,
            offset ? offset[o * n.offset[0] + g * n.offset[1]] : 0.0f, codebook};
  }
};

// a * b + c, rounded once: how a compiler joins them would depend on what is beside them.
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__) && LANES == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && LANES == 8
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
INLINE float fused(float a, float b, float c) { return std::fma(a, b, c); }

// What numbers of four bits stand for.
INLINE Floats decoded(Ints x, const float* codebook) {
  if constexpr (!kHasCodebook) return __builtin_convertvector(x, Floats);
#if defined(__AVX512F__) && LANES == 16
  return (Floats)_mm512_permutexvar_ps((__m512i)x, (__m512)load(codebook));
#elif defined(__AVX2__) && LANES == 8
  const __m256 low = _mm256_permutevar8x32_ps((__m256)load(codebook), (__m256i)x);
  const __m256 high = _mm256_permutevar8x32_ps((__m256)load(codebook + 8), (__m256i)x);
  return (Floats)_mm256_blendv_ps(low, high, (__m256)(x << 28));
#else
  Floats found{};
  for (int j = 0; j < kLanes; ++j) found[j] = codebook[x[j]];
  return found;
#endif
}
INLINE float decoded(int x, const float* codebook) { return kHasCodebook ? codebook[x] : float(x); }

template <typename T> INLINE T meant(T x, const Meaning& m) {
  if constexpr (kHasZero) x = x - m.zero;
  if constexpr (kHasOffset) x = fused(x, T{} + m.inner, T{} + m.offset);
  return x;
}

// Sums over stored elements from `begin` to before `end`, of kRows rows of the input: of whole elements, or of both halves
// of bytes, with a plane of the input each. Where kPlain, they fill registers, and what they mean is left to the caller.
template <int kRows, bool kPlain>
INLINE void sums_of(const Stored* weight, const float* const* low, const float* const* high, int64_t begin, int64_t end,
                    const Meaning& of_low, const Meaning& of_high, Floats* first, Floats* second, float* first_rest,
                    float* second_rest) {
  int64_t k = begin;
  Floats one[kRows][kChains], other[kRows][kChains];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kChains; ++c) one[r][c] = other[r][c] = Floats{};
  }
  auto step = [&](int64_t at, int c) __attribute__((always_inline)) {
    if constexpr (kIsPacked) {
      const Ints bytes = whole(reinterpret_cast<const uint8_t*>(weight) + at);
      Floats x = decoded(bytes & 15, of_low.codebook), y = decoded(bytes >> 4, of_low.codebook);
      if constexpr (!kPlain) x = meant(x, of_low), y = meant(y, of_high);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        one[r][c] = fused(x, load(low[r] + at), one[r][c]);
        other[r][c] = fused(y, load(high[r] + at), other[r][c]);
      }
    } else {
      Floats x = floats_at(weight + at);
      if constexpr (!kPlain) x = meant(x, of_low);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) one[r][c] = fused(x, load(low[r] + at), one[r][c]);
    }
  };
#pragma GCC unroll 4
  for (; k + kChains * kLanes <= end; k += kChains * kLanes) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) step(k + c * kLanes, c);
  }
  if constexpr (!kPlain) {
    for (; k + kLanes <= end; k += kLanes) step(k, 0);
  }
  for (int r = 0; r < kRows; ++r) {
    first[r] = one[r][0], second[r] = other[r][0];
    for (int c = 1; c < kChains; ++c) first[r] += one[r][c], second[r] += other[r][c];
  }
  for (; !kPlain && k < end; ++k) {
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kIsPacked) {
        first_rest[r] = fused(meant(decoded(uint8_t(weight[k]) & 15, of_low.codebook), of_low), low[r][k], first_rest[r]);
        second_rest[r] = fused(meant(decoded(uint8_t(weight[k]) >> 4, of_low.codebook), of_high), high[r][k], second_rest[r]);
      } else {
        first_rest[r] = fused(meant(number_of(weight[k]), of_low), low[r][k], first_rest[r]);
      }
    }
  }
}

INLINE float total(Floats x) {
  float found = 0.0f;
  for (int j = 0; j < kLanes; ++j) found += x[j];
  return found;
}

// Elements of a row of the weight whose numbers belong to one group each, of lower and of upper halves of bytes.
struct Span {
  int64_t begin, end, low, high;
};
static std::vector<Span> spans_of(const Numbers& n) {
  const int64_t elements = kIsPacked ? n.columns / 2 : n.columns;
  const bool is_half = kIsPacked && n.is_half;
  const int64_t size = kIsPacked && !n.is_half ? n.columns / n.groups / 2 : n.columns / n.groups;
  std::vector<Span> found;
  for (int64_t begin = 0, end; begin < elements; begin = end) {
    const int64_t one = begin / size;
    int64_t other = one;
    end = (one + 1) * size;
    if (is_half) {  // the group of the other half may end earlier
      other = (elements + begin) / size;
      const int64_t until = (other + 1) * size - elements;
      end = until < end ? until : end;
    }
    end = end < elements ? end : elements;
    if (kIsPacked && end > begin + kMostElements) end = begin + kMostElements;
    const bool swaps = is_half && n.is_high;
    found.push_back({begin, end, swaps ? other : one, swaps ? one : other});
  }
  return found;
}

// Sums of the lanes of the input, for each span and plane: what zero points and offsets of plain products are multiplied by.
INLINE bool sum_up(const Numbers& n, const std::vector<Span>& spans, const float* low, const float* high, float* sums) {
  float largest = 0.0f;
  auto look_at = [&](float x) { largest = std::fabs(x) > largest ? std::fabs(x) : largest; };
  for (int64_t k = 0; k < n.columns / (kIsPacked ? 2 : 1); ++k) {
    look_at(low[k]);
    if constexpr (kIsPacked) look_at(high[k]);
  }
  bool is_plain = kMayBePlain && largest < kMostPlain;
  for (const Span& span : spans) {
    is_plain = is_plain && (span.end - span.begin) % (kChains * kLanes) == 0;
    Floats sum[2] = {};
    for (int64_t k = span.begin; k + kLanes <= span.end; k += kLanes) {
      sum[0] += load(low + k);
      if constexpr (kIsPacked) sum[1] += load(high + k);
    }
    if (kIsPacked && span.low == span.high) sum[0] += sum[1];
    std::memcpy(sums, sum, sizeof(sum));
    sums += 2 * kLanes;
  }
  return is_plain;
}
// The same as `meant`, of sums: a register of numbers takes one step instead of three.
INLINE Floats meant(Floats x, const Meaning& m, const float* sums) {
  if constexpr (kHasZero) x = fused(Floats{} - m.zero, load(sums), x);
  if constexpr (kHasOffset) x = fused(Floats{} + m.offset, load(sums), m.inner * x);
  return x;
}

// The product of kRows rows of the input with row `o` of the weight. Planes are where what belongs to lower and upper halves
// of bytes lies in the input.
template <int kRows, bool kPlain>
static void product(const Stored* weight, const float* const* low, const float* const* high, const Meanings& meanings,
                    const std::vector<Span>& spans, const float* const* sums, int64_t o, float* found) {
  Floats all[kRows];
  float rest[kRows] = {};
  for (int r = 0; r < kRows; ++r) all[r] = Floats{};
  for (size_t i = 0; i < spans.size(); ++i) {
    const Span& span = spans[i];
    Floats first[kRows], second[kRows];
    float first_rest[kRows] = {}, second_rest[kRows] = {};
    const Meaning of_low = meanings.of(o, span.low), of_high = meanings.of(o, span.high);
    sums_of<kRows, kPlain>(weight, low, high, span.begin, span.end, of_low, of_high, first, second, first_rest, second_rest);
    const bool is_one = kIsPacked && kPlain && span.low == span.high;
    for (int r = 0; r < kRows; ++r) {
      if (is_one) first[r] += second[r];
      if constexpr (kPlain) first[r] = meant(first[r], of_low, sums[r] + 2 * i * kLanes);
      all[r] = fused(Floats{} + of_low.factor, first[r], all[r]);
      if constexpr (!kPlain) rest[r] = fused(of_low.factor, first_rest[r], rest[r]);
      if (!kIsPacked || is_one) continue;
      if constexpr (kPlain) second[r] = meant(second[r], of_high, sums[r] + (2 * i + 1) * kLanes);
      all[r] = fused(Floats{} + of_high.factor, second[r], all[r]);
      if constexpr (!kPlain) rest[r] = fused(of_high.factor, second_rest[r], rest[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) found[r] = total(all[r]) + rest[r];
}

extern "C" void linear(const void* const* operands, const int64_t* counts) {
  Numbers n;
  std::memcpy(&n, counts, sizeof(n));
  const auto* input = static_cast<const float*>(operands[0]);
  const auto* weight = static_cast<const Stored*>(operands[1]);
  const Meanings meanings{static_cast<const float*>(operands[2]), static_cast<const float*>(operands[3]),
                          static_cast<const float*>(operands[4]), static_cast<const float*>(operands[6]), n};
  const auto* bias = static_cast<const float*>(operands[5]);
  float* out = static_cast<float*>(const_cast<void*>(operands[7]));

  // What belongs to the first and to the second number of bytes, next to each other.
  const int64_t half = n.columns / 2;
  std::vector<float> planes(kIsPacked && !n.is_half ? n.rows * n.columns : 0);
  std::vector<const float*> low(n.rows), high(n.rows);
  for (int64_t r = 0; r < n.rows; ++r) {
    const float* row = input + r * n.columns;
    const float *first = row, *second = row + half;
    if (kIsPacked && !n.is_half) {
      float* own = planes.data() + r * n.columns;
      for (int64_t j = 0; j < half; ++j) own[j] = row[2 * j], own[half + j] = row[2 * j + 1];
      first = own, second = own + half;
    }
    low[r] = n.is_high ? second : first;
    high[r] = n.is_high ? first : second;
  }
  const std::vector<Span> spans = spans_of(n);
  const int64_t sum_count = int64_t(spans.size()) * 2 * kLanes;
  std::vector<float> all_sums(n.rows * sum_count);
  std::vector<const float*> sums(n.rows);
  std::vector<char> is_plain(n.rows);
  for (int64_t r = 0; r < n.rows; ++r) {
    float* own = all_sums.data() + r * sum_count;
    is_plain[r] = sum_up(n, spans, low[r], high[r], own);
    sums[r] = own;
  }
  // Cores are not equally fast while others work on them.
  const int64_t share = n.out / (8 * n.threads), chunk = share < 1 ? 1 : share < 64 ? share : 64;
#pragma omp parallel for num_threads(n.threads) schedule(dynamic, chunk)
  for (int64_t o = 0; o < n.out; ++o) {
    const Stored* at = weight + o * n.weight;
    for (int64_t r = 0, count; r < n.rows; r += count) {
      count = r + 1 < n.rows && is_plain[r] && is_plain[r + 1] ? 2 : 1;
      float found[2];
      const auto multiply = count == 2 ? product<2, true> : is_plain[r] ? product<1, true> : product<1, false>;
      multiply(at, &low[r], &high[r], meanings, spans, &sums[r], o, found);
      for (int64_t i = 0; i < count; ++i) out[(r + i) * n.out + o] = found[i] + (bias ? bias[o] : 0.0f);
    }
  }
}
"""
