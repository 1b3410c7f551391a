"""C++ on words of bits: intersected and counted in one pass, listed, scored, applied to logits.

By one thread: what is this short would mostly wait for others to wake up, and on a busy machine for milliseconds. Every
function raises a RuntimeError where there is no C++ compiler, or it refuses the source.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from lz_compile.lowering import cpp_builds

_SOURCE = r"""
#include <cstdint>
#include <cstring>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
extern "C" int64_t intersect(const uint32_t* const* masks, int64_t masks_count, int64_t count, uint32_t last, uint32_t* out) {
  const uint32_t* first = masks[0];
  const uint32_t* second = masks[masks_count > 1];
  const uint32_t* third = masks[masks_count > 2 ? 2 : 0];
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = first[i] & second[i] & third[i];
    found += __builtin_popcount(out[i]);
  }
  for (int64_t m = 3; m < masks_count; ++m) {
    found = 0;
    for (int64_t i = 0; i < count; ++i) found += __builtin_popcount(out[i] &= masks[m][i]);
  }
  if (count) {
    found -= __builtin_popcount(out[count - 1] & ~last);
    out[count - 1] &= last;
  }
  return found;
}

extern "C" void set_bits(const uint32_t* words, int64_t count, int32_t* places) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t first = int32_t(32 * i);
    if (words[i] == 0xFFFFFFFF) {
      for (int32_t j = 0; j < 32; ++j) places[j] = first + j;
      places += 32;
      continue;
    }
    for (uint32_t word = words[i]; word; word &= word - 1) *places++ = first + __builtin_ctz(word);
  }
}

template <class T>
void weigh_scores(const int32_t* tokens, int64_t count, const T* first, double a, const T* second, double b, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = float(a * first[tokens[i]] + b * second[tokens[i]]);
}

extern "C" void weigh(const int32_t* tokens, int64_t count, int64_t bytes, const void* first, double a, const void* second,
                      double b, float* out) {
  if (bytes == 4) weigh_scores(tokens, count, (const float*)first, a, (const float*)second, b, out);
  if (bytes == 8) weigh_scores(tokens, count, (const double*)first, a, (const double*)second, b, out);
}

// A row is unusable if NaN or plus infinity is left in it, or nothing else than minus infinity.
template <class Bits, class Float, class Wide>
int64_t apply_rows(const uint32_t* words, const Bits* from, int64_t rows, int64_t size, Bits least, Bits exponent,
                   const int32_t* tokens, const float* adjustments, int64_t count, Bits* __restrict__ to, bool* unusable) {
  int64_t found = 0;
  for (int64_t row = 0; row < rows; ++row, from += size, to += size) {
    for (int64_t i = 0; i < size / 32; ++i) {
      const uint32_t word = words[i];
      for (int j = 0; j < 32; ++j) {
        const Bits all = -Bits(word >> j & 1);  // without a branch, so that it is vectorised
        to[32 * i + j] = (from[32 * i + j] & all) | (least & ~all);
      }
    }
    for (int64_t i = size / 32 * 32; i < size; ++i) to[i] = words[i / 32] >> i % 32 & 1 ? from[i] : least;
    for (int64_t i = 0; i < count; ++i) {
      Float value;
      std::memcpy(&value, from + tokens[i], sizeof(Bits));
      value = Float(Wide(value) + Wide(adjustments[i]));
      std::memcpy(to + tokens[i], &value, sizeof(Bits));
    }
    Bits is_any = 0, is_bad = 0;
    for (int64_t i = 0; i < size; ++i) {
      const Bits is_kept = to[i] != least;
      is_any |= is_kept;
      is_bad |= is_kept & Bits((to[i] & exponent) == exponent);
    }
    unusable[row] = is_bad || !is_any;
    found += unusable[row];
  }
  return found;
}

extern "C" int64_t apply(const uint32_t* words, const void* from, int64_t rows, int64_t size, int64_t kind,
                         const int32_t* tokens, const float* adjustments, int64_t count, void* to, bool* unusable) {
#define APPLY(KIND, BITS, FLOAT, WIDE, LEAST, EXPONENT)                                                               \
  if (kind == KIND)                                                                                                   \
    return apply_rows<BITS, FLOAT, WIDE>(words, (const BITS*)from, rows, size, BITS(LEAST), BITS(EXPONENT), tokens,   \
                                         adjustments, count, (BITS*)to, unusable);
  APPLY(0, uint16_t, c10::BFloat16, float, 0xFF80, 0x7F80)
  APPLY(1, uint16_t, c10::Half, float, 0xFC00, 0x7C00)
  APPLY(2, uint32_t, float, float, 0xFF800000, 0x7F800000)
  APPLY(3, uint64_t, double, double, 0xFFF0000000000000, 0x7FF0000000000000)
  return -1;
}
"""

#: Of logits, in the order of the code.
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def intersect(masks: Sequence[torch.Tensor], last: int) -> tuple[torch.Tensor, int]:
    """The bits that all of these contiguous int32 words on a CPU have, and their number.

    Args:
        masks: at least one, all of the same length.
        last: the bits of the last word that count.
    """
    words = torch.empty_like(masks[0])
    pointers = (ctypes.c_void_p * len(masks))(*[mask.data_ptr() for mask in masks])
    return words, _library().intersect(pointers, len(masks), words.numel(), last, words.data_ptr())


def zeros(count: int) -> torch.Tensor:
    """Float32 zeros on a CPU, by one thread."""
    found = torch.empty(count, dtype=torch.float32)
    ctypes.memset(found.data_ptr(), 0, found.nbytes)
    return found


def set_bits(words: torch.Tensor, last: int) -> torch.Tensor:
    """The places of the bits that are set in contiguous int32 words on a CPU, ascending, int32.

    Args:
        words: flat.
        last: the bits of the last word that count.
    """
    own, found = intersect([words], last)
    places = torch.empty(found, dtype=torch.int32)
    _library().set_bits(own.data_ptr(), own.numel(), places.data_ptr())
    return places


def weigh(tokens: torch.Tensor, scores: Sequence[torch.Tensor], factors: Sequence[float]) -> torch.Tensor:
    """The sum of factor times score of these int32 tokens, in float64, as float32.

    Args:
        tokens: contiguous, on a CPU.
        scores: one or two, of one dtype, float32 or float64, contiguous, on a CPU.
        factors: of the scores.
    """
    found = torch.empty(tokens.numel(), dtype=torch.float32)
    (first, second), (a, b) = (scores, factors) if len(scores) == 2 else ((scores[0],) * 2, (factors[0], 0.0))
    pointers = first.data_ptr(), a, second.data_ptr(), b
    _library().weigh(tokens.data_ptr(), tokens.numel(), first.itemsize, *pointers, found.data_ptr())
    return found


def apply(
    words: torch.Tensor, logits: torch.Tensor, scored: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, list[int]]:
    """Logits ``[..., size]`` on a CPU, of a dtype in :data:`FLOATS`, whose bit is set, and minus infinity for all others.

    Args:
        words: bits, flat.
        logits: not differentiated.
        scored: tokens whose bit is set (int32), and what is added to their logits (float32).

    Returns:
        these logits, and the rows of them that are no distribution.
    """
    logits, size = logits.contiguous(), logits.shape[-1]
    found = torch.empty_like(logits)
    unusable = torch.empty(logits.numel() // size, dtype=torch.bool)
    tokens = (None, None, 0) if scored is None else (scored[0].data_ptr(), scored[1].data_ptr(), scored[0].numel())
    given = words.data_ptr(), logits.data_ptr(), unusable.numel(), size, FLOATS.index(logits.dtype)
    is_any = _library().apply(*given, *tokens, found.data_ptr(), unusable.data_ptr())
    return found, unusable.nonzero().flatten().tolist() if is_any else []


@cache
def _library() -> Any:
    library = cpp_builds.load_cpp(
        _SOURCE, ["-ftree-loop-vectorize"]
    )  # Inductor, that writes vectors itself, has it off
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.intersect.argtypes = [pointer, number, number, ctypes.c_uint32, pointer]
    library.intersect.restype = number
    library.set_bits.argtypes = [pointer, number, pointer]
    library.set_bits.restype = None
    real = ctypes.c_double
    library.weigh.argtypes = [pointer, number, number, pointer, real, pointer, real, pointer]
    library.weigh.restype = None
    library.apply.argtypes = [pointer, pointer, number, number, number, pointer, pointer, number, pointer, pointer]
    library.apply.restype = number
    return library
