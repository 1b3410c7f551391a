"""C++ that verifies drafts: rows are looked at, drafts accepted, and what is left for the next draw written, in one pass."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering import cpp_builds
from lz_compile.lowering.cpp.floats import floats
from lz_compile.lowering.kernels.sampling.cpp_vectors import VECTORS
from lz_compile.lowering.ops.sampling import Operands

_CODE = """
constexpr int kParts = 16;
// Whether numbers are none below zero (nor NaN) whose sum is one, about.
static bool is_distribution(const float* row, int64_t size, double tolerance) {
  double sum = 0;
  int64_t bad = 0;
  for (int64_t first = 0; first < size; first += 1 << 12) {  // sums in float stay short
    const int64_t stop = first + (1 << 12) < size ? first + (1 << 12) : size;
    float sums[kParts] = {};
    int32_t wrong[kParts] = {};
    int64_t i = first;
    for (; i + kParts <= stop; i += kParts)
      for (int j = 0; j < kParts; ++j) {
        sums[j] += row[i + j];
        wrong[j] += !(row[i + j] >= 0);
      }
    for (; i < stop; ++i) {
      sums[0] += row[i];
      wrong[0] += !(row[i] >= 0);
    }
    for (int j = 0; j < kParts; ++j) {
      sum += sums[j];
      bad += wrong[j];
    }
  }
  return bad == 0 && sum >= 1 - tolerance && sum <= 1 + tolerance;
}

// What the next token is drawn from, up to a factor: p, or after a draft that was refused the part of it above q.
static void write_left(const float* p, const float* q, int64_t draft, bool is_refused, int64_t size, float* left) {
  float most = 0;
  if (is_refused) {
    for (int64_t i = 0; i < size; ++i) {
      const float own = p[i] - (q ? q[i] : float(i == draft));
      left[i] = own > 0 ? own : 0.0f;
      most = left[i] > most ? left[i] : most;
    }
  }
  if (!(most > 0)) std::memcpy(left, p, size * sizeof(float));
}

extern "C" void speculation(const void* const* tensors, const int64_t* numbers) {
  const auto* drafts = (const int64_t*)tensors[0];
  const auto* drafted = (const float*)tensors[1];
  const auto* target = (const float*)tensors[2];
  const auto* seeds = (const int64_t*)tensors[3];
  auto* tokens = (int32_t*)tensors[4];
  auto* accepted = (int32_t*)tensors[5];
  auto* left = (float*)tensors[6];
  auto* is_any_bad = (int32_t*)tensors[7];
  auto* draw_seeds = (int64_t*)tensors[8];
  const int64_t rows = numbers[0], count = numbers[1], size = numbers[2], threads = numbers[3], salt = numbers[4];
  const bool looks = numbers[5];
  const double tolerance = 1e-6 * double(numbers[6]);
  const int64_t draw_salt = numbers[7];
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t n = 0; n < rows; ++n) {
    const float* p = target + n * (count + 1) * size;
    const float* q = drafted ? drafted + n * count * size : nullptr;
    const int64_t* own = drafts + n * count;
    const Keys keys(seeds[n] ^ salt);
    draw_seeds[n] = seeds[n] ^ draw_salt;
    bool is_bad = false, goes_on = true;
    int64_t kept = 0;
    for (int64_t k = 0; k < count; ++k) is_bad |= own[k] < 0 || own[k] >= size;
    if (is_bad) {
      *is_any_bad = 1;  // whoever writes it, writes this
      continue;
    }
    for (int64_t k = 0; k < count; ++k) {
      const float of_draft = q ? q[k * size + own[k]] : 1.0f;
      const uint32_t h = mixed(mixed(uint32_t(k) + keys.first) ^ keys.second);
      const double uniform = (double(h) + 0.5) * 0x1p-32;
      is_bad |= looks && !(of_draft > 0);
      goes_on = goes_on && uniform * double(of_draft) < double(p[k * size + own[k]]);
      kept += goes_on;
      tokens[n * (count + 1) + k] = goes_on ? int32_t(own[k]) : -1;
    }
    tokens[n * (count + 1) + count] = -1;
    accepted[n] = int32_t(kept);
    if (looks) {
      for (int64_t k = 0; k <= count; ++k) is_bad |= !is_distribution(p + k * size, size, tolerance);
      for (int64_t k = 0; q && k < count; ++k) is_bad |= !is_distribution(q + k * size, size, tolerance);
    }
    if (is_bad) *is_any_bad = 1;
    const int64_t last = kept < count ? kept : count ? count - 1 : 0;
    write_left(p + kept * size, q ? q + last * size : nullptr, count ? own[last] : 0, kept < count, size, left + n * size);
  }
}

// Puts what was drawn behind the drafts that are kept.
extern "C" void place(int32_t* tokens, const int32_t* accepted, const int32_t* drawn, int64_t rows, int64_t places) {
  for (int64_t n = 0; n < rows; ++n) tokens[n * places + accepted[n]] = drawn[n];
}
"""


def can_read(drafts: torch.Tensor, drafted: torch.Tensor | None, target: torch.Tensor) -> bool:
    """Whether the code reads tensors as they are."""
    floats = (target,) if drafted is None else (drafted, target)
    is_alike = drafts.dtype == torch.int64 and all(each.dtype == torch.float32 for each in floats)
    return is_alike and drafts.is_contiguous() and all(each.is_contiguous() for each in floats)


def prepare(
    target: torch.Tensor,
    draw: Callable[[Operands], torch.Tensor],
    *,
    salts: tuple[int, int],
    looks: bool,
    tolerance: float,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor] | None]:
    """What verifies drafts ``[B, K]`` of distributions ``[B, K, V]`` by those of a target like ``[B, K + 1, V]``, and seeds.

    It gives the tokens ``[B, K + 1]`` and how many drafts are kept ``[B]``; None where a draft is no token, or with ``looks``
    a row is no distribution or a draft none that could be drawn.

    Args:
        target: all that is called with is like it.
        draw: gives the next tokens ``[B]`` of a sampling by logits and seeds.
        salts: of seeds: those that drafts are accepted by, and those of the draw.
        looks: whether rows are looked at.
        tolerance: of their sums.

    Raises:
        RuntimeError: there is no C++ compiler (when it is called).
    """
    rows, places, size = target.shape
    threads = max(1, min(torch.get_num_threads(), rows))
    numbers = _Numbers(rows, places - 1, size, threads, salts[0], looks, round(tolerance * 1e6), salts[1])
    empty, lanes = cpp_builds.empty_cpu, cpp_builds.vector_bits() // 32

    def run(
        drafts: torch.Tensor, drafted: torch.Tensor | None, target: torch.Tensor, seeds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        library = _library(lanes)
        tokens, accepted = empty((rows, places), (places, 1), torch.int32), empty((rows,), (1,), torch.int32)
        left, draw_seeds = empty((rows, size), (size, 1), torch.float32), empty((rows,), (1,), torch.int64)
        given = drafts.data_ptr(), 0 if drafted is None else drafted.data_ptr(), target.data_ptr(), seeds.data_ptr()
        made, is_any_bad = (tokens.data_ptr(), accepted.data_ptr()), ctypes.c_int32(0)
        others = left.data_ptr(), ctypes.addressof(is_any_bad), draw_seeds.data_ptr()
        library.speculation(_Pointers(*given, *made, *others), numbers)
        if is_any_bad.value:
            return None
        last = draw(Operands(left.log_(), seeds=draw_seeds))
        library.place(*made, last.data_ptr(), rows, places)
        return tokens, accepted

    return run


_Pointers = ctypes.c_void_p * 9
_Numbers = ctypes.c_int64 * 8


@lru_cache(maxsize=4)
def _library(lanes: int) -> Any:
    source = f"{floats(lanes)}{VECTORS}{_CODE}"
    library = cpp_builds.load_cpp(source, ("-ffp-contract=off",))
    library.speculation.restype = None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.place.argtypes = [pointer, pointer, pointer, number, number]
    library.place.restype = None
    return library
