"""C++ that multiplies a few rows with a stored weight, which it reads once: numbers are widened in registers.

A sum goes over the groups of a row of the weight, zero points taken off each number, and is multiplied by the group's scale.
Threads share the weight's rows. Products are joined with sums explicitly, and the order of a sum depends on the sizes of the
weight alone: rows give the same bits whatever is beside them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering import inductor
from lz_compile.lowering.cpp.floats import FLOATS, STORED, STORED_TYPES
from lz_compile.lowering.ops.linear import LinearAttrs, Operands, fake, groups_of

#: Beside Inductor's own.
FLAGS = ("-ftree-loop-vectorize",)
#: Multiplications below which a thread is not worth its start.
THREAD_WORK = 1 << 17


@dataclass(frozen=True)
class Program:
    """What the code is written for; each takes a second to compile."""

    stored: torch.dtype
    is_packed: bool
    has_zero: bool
    has_offset: bool
    lanes: int

    def source(self) -> str:
        """The translation unit."""
        return f"""#include <cstdint>
#include <vector>
constexpr int kLanes = {self.lanes};
constexpr bool kIsPacked = {str(self.is_packed).lower()}, kHasOffset = {str(self.has_offset).lower()};
constexpr bool kHasZero = {str(self.has_zero).lower()};
{FLOATS}{STORED}
using Stored = {STORED_TYPES[self.stored]};
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
    tensors = [y.input, stored, y.scale, y.zero, y.offset, y.bias, written]
    pointers = (ctypes.c_void_p * len(tensors))(*[0 if each is None else each.data_ptr() for each in tensors])
    program = Program(
        stored.dtype, attrs.packing != "none", y.zero is not None, y.offset is not None, inductor.vector_bits() // 32
    )
    _function(program)(pointers, (ctypes.c_int64 * len(numbers))(*map(int, numbers)))
    return written.to(out.dtype)


_GROUPED = ("scale", "zero", "offset")


@lru_cache(maxsize=64)
def _function(program: Program) -> Any:
    function = inductor.load_cpp(program.source(), FLAGS).linear
    function.restype = None
    return function


LINEAR = """
// Sums that do not wait for each other, and the rows for which there are registers then.
constexpr int kChains = kIsPacked ? 2 : 4, kMostRows = 2;

struct Numbers {
  int64_t rows, columns, out, groups, is_half, is_high, threads, weight, scale[2], zero[2], offset[2];
};
// What the stored numbers of a group mean: factor * ((x - zero) * inner + offset), where one of the factors is 1.
struct Meaning {
  float factor, inner, zero, offset;
};
struct Meanings {
  const float *scale, *zero, *offset;
  const Numbers& n;
  Meaning of(int64_t o, int64_t g) const {
    const float own = scale ? scale[o * n.scale[0] + g * n.scale[1]] : 1.0f;
    return {kHasOffset ? 1.0f : own, kHasOffset ? own : 1.0f, zero ? zero[o * n.zero[0] + g * n.zero[1]] : 0.0f,
            offset ? offset[o * n.offset[0] + g * n.offset[1]] : 0.0f};
  }
};

// a * b + c, rounded once: how a compiler joins them would depend on what is beside them.
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  if constexpr (kLanes == 16) return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
  if constexpr (kLanes == 8) return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
  return a * b + c;
}
INLINE float fused(float a, float b, float c) { return std::fma(a, b, c); }

template <typename T> INLINE T meant(T x, const Meaning& m) {
  if constexpr (kHasZero) x = x - m.zero;
  if constexpr (kHasOffset) x = fused(x, T{} + m.inner, T{} + m.offset);
  return x;
}

// Sums over stored elements from `begin` to before `end`, of kRows rows of the input: of whole elements, or of both halves
// of bytes, with a plane of the input each.
template <int kRows>
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
      const Floats x = meant(__builtin_convertvector(bytes & 15, Floats), of_low);
      const Floats y = meant(__builtin_convertvector(bytes >> 4, Floats), of_high);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        one[r][c] = fused(x, load(low[r] + at), one[r][c]);
        other[r][c] = fused(y, load(high[r] + at), other[r][c]);
      }
    } else {
      const Floats x = meant(floats_at(weight + at), of_low);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) one[r][c] = fused(x, load(low[r] + at), one[r][c]);
    }
  };
  for (; k + kChains * kLanes <= end; k += kChains * kLanes) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) step(k + c * kLanes, c);
  }
  for (; k + kLanes <= end; k += kLanes) step(k, 0);
  for (int r = 0; r < kRows; ++r) {
    first[r] = one[r][0], second[r] = other[r][0];
    for (int c = 1; c < kChains; ++c) first[r] += one[r][c], second[r] += other[r][c];
  }
  for (; k < end; ++k) {
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kIsPacked) {
        first_rest[r] = fused(meant(float(uint8_t(weight[k]) & 15), of_low), low[r][k], first_rest[r]);
        second_rest[r] = fused(meant(float(uint8_t(weight[k]) >> 4), of_high), high[r][k], second_rest[r]);
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

// The product of kRows rows of the input with row `o` of the weight. Planes are where what belongs to lower and upper halves
// of bytes lies in the input.
template <int kRows>
INLINE void product(const Stored* weight, const float* const* low, const float* const* high, const Meanings& meanings,
                    int64_t o, float* found) {
  const Numbers& n = meanings.n;
  const int64_t elements = kIsPacked ? n.columns / 2 : n.columns;
  const int64_t planes = kIsPacked && n.is_half ? 2 : 1;
  // So many elements in a row belong to one group, of either plane.
  const int64_t run = kIsPacked && !n.is_half ? n.columns / n.groups / 2 : n.columns / n.groups;
  Floats all[kRows];
  float rest[kRows] = {};
  for (int r = 0; r < kRows; ++r) all[r] = Floats{};
  int64_t begin = 0;
  while (begin < elements) {
    // Of both halves, the group of the other half may end within a run of this one.
    int64_t one = begin / run, other = one, end = (one + 1) * run;
    if (planes == 2) {
      other = (elements + begin) / run;
      const int64_t until = (other + 1) * run - elements;
      end = until < end ? until : end;
    }
    end = end < elements ? end : elements;
    Floats first[kRows], second[kRows];
    float first_rest[kRows] = {}, second_rest[kRows] = {};
    const bool swaps = planes == 2 && n.is_high;
    const Meaning of_low = meanings.of(o, swaps ? other : one), of_high = meanings.of(o, swaps ? one : other);
    sums_of<kRows>(weight, low, high, begin, end, of_low, of_high, first, second, first_rest, second_rest);
    for (int r = 0; r < kRows; ++r) {
      all[r] = fused(Floats{} + of_low.factor, first[r], all[r]);
      rest[r] = fused(of_low.factor, first_rest[r], rest[r]);
      if constexpr (kIsPacked) {
        all[r] = fused(Floats{} + of_high.factor, second[r], all[r]);
        rest[r] = fused(of_high.factor, second_rest[r], rest[r]);
      }
    }
    begin = end;
  }
  for (int r = 0; r < kRows; ++r) found[r] = total(all[r]) + rest[r];
}

extern "C" void linear(const void* const* operands, const int64_t* counts) {
  Numbers n;
  std::memcpy(&n, counts, sizeof(n));
  const auto* input = static_cast<const float*>(operands[0]);
  const auto* weight = static_cast<const Stored*>(operands[1]);
  const Meanings meanings{static_cast<const float*>(operands[2]), static_cast<const float*>(operands[3]),
                          static_cast<const float*>(operands[4]), n};
  const auto* bias = static_cast<const float*>(operands[5]);
  float* out = static_cast<float*>(const_cast<void*>(operands[6]));

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
#pragma omp parallel for num_threads(n.threads) schedule(static)
  for (int64_t o = 0; o < n.out; ++o) {
    const Stored* at = weight + o * n.weight;
    for (int64_t r = 0; r < n.rows; r += kMostRows) {
      const int64_t count = n.rows - r < kMostRows ? n.rows - r : kMostRows;
      float found[kMostRows];
      if (count == 2) product<2>(at, &low[r], &high[r], meanings, o, found);
      else product<1>(at, &low[r], &high[r], meanings, o, found);
      for (int64_t i = 0; i < count; ++i) out[(r + i) * n.out + o] = found[i] + (bias ? bias[o] : 0.0f);
    }
  }
}
"""
