"""C++ that verifies drafts: rows are looked at, drafts accepted, and what is left for the next draw written, in one pass."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lz_compile.lowering import inductor
from lz_compile.lowering.cpp.floats import FLOATS
from lz_compile.lowering.cpp.sampling_source import VECTORS

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
  const int64_t rows = numbers[0], count = numbers[1], size = numbers[2], threads = numbers[3], salt = numbers[4];
  const bool looks = numbers[5];
  const double tolerance = 1e-6 * double(numbers[6]);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t n = 0; n < rows; ++n) {
    const float* p = target + n * (count + 1) * size;
    const float* q = drafted ? drafted + n * count * size : nullptr;
    const int64_t* own = drafts + n * count;
    const Keys keys(seeds[n] ^ salt);
    bool is_bad = false, goes_on = true;
    int64_t kept = 0;
    for (int64_t k = 0; k < count; ++k) is_bad |= own[k] < 0 || own[k] >= size;
    if (is_bad) {
      *is_any_bad = 1;  // whoever writes it, writes this
      continue;
    }
    for (int64_t k = 0; k < count; ++k) {
      const float of_draft = q ? q[k * size + own[k]] : 1.0f;
      const uint32_t h = mixed_number(mixed_number(uint32_t(k) + keys.first) ^ keys.second);
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
"""


class Verified(NamedTuple):
    """Tokens ``[B, K + 1]`` but for the last, how many are kept ``[B]``, and weights of the last ``[B, V]``."""

    tokens: torch.Tensor
    accepted: torch.Tensor
    left: torch.Tensor


def can_read(drafts: torch.Tensor, drafted: torch.Tensor | None, target: torch.Tensor) -> bool:
    """Whether the code reads tensors as they are."""
    floats = (target,) if drafted is None else (drafted, target)
    is_alike = drafts.dtype == torch.int64 and all(each.dtype == torch.float32 for each in floats)
    return is_alike and drafts.is_contiguous() and all(each.is_contiguous() for each in floats)


def verify(
    drafts: torch.Tensor,
    drafted: torch.Tensor | None,
    target: torch.Tensor,
    seeds: torch.Tensor,
    *,
    salt: int,
    looks: bool,
    tolerance: float,
) -> Verified | None:
    """Accept drafts ``[B, K]`` of distributions ``[B, K, V]`` by those of the target ``[B, K + 1, V]``.

    None where a draft is no token, or with ``looks`` a row is no distribution or a draft none that could be drawn.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    rows, places, size = target.shape
    tokens = torch.empty((rows, places), dtype=torch.int32, device="cpu")
    accepted = torch.empty(rows, dtype=torch.int32, device="cpu")
    is_any_bad = ctypes.c_int32(0)
    left = torch.empty((rows, size), dtype=torch.float32, device="cpu")
    addresses = (drafts.data_ptr(), 0 if drafted is None else drafted.data_ptr(), target.data_ptr(), seeds.data_ptr())
    threads = max(1, min(torch.get_num_threads(), rows))
    numbers = (rows, places - 1, size, threads, salt, looks, round(tolerance * 1e6))
    _function(inductor.vector_bits() // 32)(
        (ctypes.c_void_p * 8)(
            *addresses, tokens.data_ptr(), accepted.data_ptr(), left.data_ptr(), ctypes.addressof(is_any_bad)
        ),
        (ctypes.c_int64 * 7)(*numbers),
    )
    return None if is_any_bad.value else Verified(tokens, accepted, left)


@lru_cache(maxsize=4)
def _function(lanes: int) -> Any:
    source = f"#include <cstdint>\nconstexpr int kLanes = {lanes};\n{FLOATS}{VECTORS}{_CODE}"
    function = inductor.load_cpp(source, ("-ffp-contract=off",)).speculation
    function.restype = None
    return function
