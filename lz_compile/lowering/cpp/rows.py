"""C++ in which a row has its own bits: every number of it is one chain of sums, in an order that only its own sizes decide.

Rows lie in the lanes of vectors, so that a lane never sees another one. Where a chain is interrupted, because memory is near
or far, a register is stored and loaded again, which changes nothing. A product with zero is added like any other, and adds
nothing: padding before or behind may be of any kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering.cpp import calls
from lz_compile.lowering.cpp.vectors import ELEMENTS

#: Beside Inductor's own, which writes vectors itself.
_FLAGS = ("-ftree-loop-vectorize",)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in."""
    return torch.promote_types(dtype, torch.float32)


@lru_cache(maxsize=256)
def function(body: str, acc: torch.dtype, **types: torch.dtype) -> Any:
    """``extern "C" void run(const void* const*, const int64_t*, const double*)`` of a body: pointers, sizes, numbers.

    Args:
        body: C++ that knows ``Acc``, vectors of it (``Vec``) of ``kLanes``, and what stands below.
        acc: what is computed in, float32 or float64.
        types: further C++ types by name.

    Raises:
        RuntimeError: there is no C++ compiler, or it refuses the source.
    """
    names = "".join(f"using {name} = {ELEMENTS[dtype]};\n" for name, dtype in sorted(types.items()))
    return calls.function("run", f"{_HEADERS}using Acc = {ELEMENTS[acc]};\n{names}{_SHARED}{body}", _FLAGS)


def call(run: Any, tensors: Sequence[torch.Tensor | None], sizes: Sequence[int], numbers: Sequence[float] = ()) -> None:
    """Call what :func:`function` gave; the number of threads is the last size."""
    run(calls.addresses(tensors), calls.integers([*sizes, torch.get_num_threads()]), calls.reals(numbers))


_HEADERS = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
using c10::BFloat16;
using c10::Half;
"""

_SHARED = """
using Vec = at::vec::Vectorized<Acc>;
constexpr int64_t kLanes = Vec::size();
constexpr Acc kNothing = -std::numeric_limits<Acc>::infinity();
#define INLINE static inline __attribute__((always_inline))
INLINE int64_t up_to(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// `count` numbers next to one another: where they are, or copied.
template <class T> INLINE const Acc* numbers(const T* from, int64_t stride, int64_t count, Acc* copy) {
  if constexpr (std::is_same_v<T, Acc>) {
    if (stride == 1) return from;
  }
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) copy[i] = static_cast<Acc>(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) copy[i] = static_cast<Acc>(from[i * stride]);
  }
  return copy;
}

// For kItems items and kVectors registers of rows: the sum over `count` terms of item times row, added to `sums`.
// Rows lie in the lanes of `rows`, whose terms are `stride` apart; the terms of an item are next to one another.
template <int kItems, int kVectors>
INLINE void add_terms(const Acc* const* items, const Acc* rows, int64_t stride, int64_t count, Acc* sums) {
  Vec sum[kItems][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kItems; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[i][v] = Vec::loadu(sums + i * stride + v * kLanes);
  }
  for (int64_t k = 0; k < count; ++k) {
    Vec row[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] = Vec::loadu(rows + k * stride + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kItems; ++i) {
      const Vec item(items[i][k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] = at::vec::fmadd(item, row[v], sum[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kItems; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[i][v].store(sums + i * stride + v * kLanes);
  }
}

// The same for any number of items and `lanes` rows, up to four registers of them.
constexpr int kItems = kLanes >= 8 ? 8 : 4;
template <int kVectors>
INLINE void add_items(const Acc* const* items, int64_t many, const Acc* rows, int64_t stride, int64_t count, Acc* sums) {
  int64_t i = 0;
  for (; i + kItems <= many; i += kItems) add_terms<kItems, kVectors>(items + i, rows, stride, count, sums + i * stride);
  for (; i < many; ++i) add_terms<1, kVectors>(items + i, rows, stride, count, sums + i * stride);
}
"""
