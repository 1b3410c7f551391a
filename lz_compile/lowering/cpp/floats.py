"""C++ that hand-written loops share: registers of ``kLanes`` floats."""

from __future__ import annotations

import torch


def floats(lanes: int) -> str:
    """With so many lanes, which the preprocessor knows as well: instructions of other widths do not compile."""
    return f"#define LANES {lanes}{_FLOATS}"


_FLOATS = """
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(_OPENMP)
#include <omp.h>
#endif
constexpr int kLanes = LANES;
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
typedef float Floats __attribute__((vector_size(kLanes * 4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), may_alias));
constexpr float kNothing = -std::numeric_limits<float>::infinity();

INLINE Floats filled(float x) { return Floats{} + x; }
INLINE Words words(uint32_t x) { return Words{} + x; }
INLINE Words counting(uint32_t first) {
  Words x;
  for (int j = 0; j < kLanes; ++j) x[j] = first + j;
  return x;
}

template <typename Element> INLINE Floats load(const Element* at) {
  Floats x;
  if constexpr (sizeof(Element) == 4) {
    std::memcpy(&x, at, sizeof(x));
  } else {  // bfloat16: the upper half of a float
    typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), may_alias));
    Halves halves;
    std::memcpy(&halves, at, sizeof(halves));
    x = (Floats)(__builtin_convertvector(halves, Words) << 16);
  }
  return x;
}

// Lanes j and j ^ kDistance change places.
template <int kDistance> INLINE Floats crossed(Floats x) {
#if defined(__clang__)
  Floats y;
  for (int j = 0; j < kLanes; ++j) y[j] = x[j ^ kDistance];
  return y;
#else
  Ints places;
  for (int j = 0; j < kLanes; ++j) places[j] = j ^ kDistance;
  return __builtin_shuffle(x, places);
#endif
}

// Of all lanes, halves against halves. A NaN may hide others.
template <int kDistance = kLanes / 2> INLINE float largest(Floats x) {
  const Floats other = crossed<kDistance>(x);
  x = other > x ? other : x;
  if constexpr (kDistance > 1) {
    return largest<kDistance / 2>(x);
  } else {
    return x[0];
  }
}
INLINE bool any(Ints x) {
  uint64_t parts[kLanes / 2], found = 0;
  std::memcpy(parts, &x, sizeof(x));
  for (int j = 0; j < kLanes / 2; ++j) found |= parts[j];
  return found != 0;
}
"""

#: Elements that :data:`STORED` reads as floats, as C++ has them (of bfloat16 the bits).
STORED_TYPES = {
    torch.float32: "float",
    torch.bfloat16: "uint16_t",
    torch.float16: "Half",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.float8_e4m3fn: "E4M3",
    torch.float8_e5m2: "E5M2",
}

#: ``floats_at`` (``kLanes`` elements) and ``number_of`` (one) of all these (it needs ``Half``). Compilers make single
#: elements of ``__builtin_convertvector`` from bytes.
STORED = """
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
enum class E4M3 : uint8_t {};
enum class E5M2 : uint8_t {};

#if defined(__AVX512F__) && LANES == 16
#define WIDENED(letter) return (Ints)_mm512_cvtep##letter##8_epi32(_mm_loadu_si128((const __m128i*)at));
#define WIDENED_HALVES return (Floats)((Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)) << 16);
#define WIDENED_FLOAT16 return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__AVX2__) && LANES == 8
#define WIDENED(letter) return (Ints)_mm256_cvtep##letter##8_epi32(_mm_loadl_epi64((const __m128i*)at));
#define WIDENED_HALVES return (Floats)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)) << 16);
#define WIDENED_FLOAT16 return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#else
#define WIDENED(letter)
#define WIDENED_HALVES return load(at);
#define WIDENED_FLOAT16
#endif
#define WHOLE(Element, letter)                     \\
  INLINE Ints whole(const Element* at) {           \\
    WIDENED(letter) Ints x;                        \\
    for (int j = 0; j < kLanes; ++j) x[j] = at[j]; \\
    return x;                                      \\
  }
WHOLE(int8_t, i)
WHOLE(uint8_t, u)

// Of eight bits: sign, exponent, and so many of a mantissa; the exponent is moved to where a float has it. What is below the
// smallest normal number is (m - 1) * 2 of what that gives.
template <int kMantissa, typename Int, typename Float> INLINE Float float8(Int bits, Float) {
  constexpr int kBias = kMantissa == 3 ? 7 : 15;
  constexpr float kLeast = kMantissa == 3 ? 0x1p-7f : 0x1p-15f;
  const Int size = bits & 0x7f, moved = (size << (23 - kMantissa)) + ((127 - kBias) << 23);
  Float x;
  std::memcpy(&x, &moved, sizeof(x));
  x = size < (1 << kMantissa) ? (x - kLeast) * 2.0f : x;
  const Float none = Float{} + std::numeric_limits<float>::quiet_NaN(), most = Float{} - kNothing;
  if constexpr (kMantissa == 3) {
    x = size == 0x7f ? none : x;
  } else {
    x = size == 0x7c ? most : x;
    x = size > 0x7c ? none : x;
  }
  return (bits & 0x80) != 0 ? -x : x;
}

INLINE Floats floats_at(const float* at) { return load(at); }
INLINE Floats floats_at(const uint16_t* at) { WIDENED_HALVES }
INLINE Floats floats_at(const Half* at) {
  WIDENED_FLOAT16 Floats x;
  for (int j = 0; j < kLanes; ++j) x[j] = at[j];
  return x;
}
INLINE Floats floats_at(const int8_t* at) { return __builtin_convertvector(whole(at), Floats); }
INLINE Floats floats_at(const uint8_t* at) { return __builtin_convertvector(whole(at), Floats); }
INLINE Floats floats_at(const E4M3* at) { return float8<3>(whole(reinterpret_cast<const uint8_t*>(at)), Floats{}); }
INLINE Floats floats_at(const E5M2* at) { return float8<2>(whole(reinterpret_cast<const uint8_t*>(at)), Floats{}); }
INLINE float number_of(float x) { return x; }
INLINE float number_of(Half x) { return x; }
INLINE float number_of(int8_t x) { return x; }
INLINE float number_of(uint8_t x) { return x; }
INLINE float number_of(E4M3 x) { return float8<3>(int32_t(x), 0.0f); }
INLINE float number_of(E5M2 x) { return float8<2>(int32_t(x), 0.0f); }
INLINE float number_of(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}
"""
