"""C++ that hand-written loops share: registers of ``kLanes`` floats, which must be defined before."""

from __future__ import annotations

FLOATS = """
#include <cmath>
#include <cstring>
#include <limits>
#if defined(_OPENMP)
#include <omp.h>
#endif
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

// Of all lanes.
INLINE float largest(Floats x) {
  float found = x[0];
  for (int j = 1; j < kLanes; ++j) found = x[j] > found ? x[j] : found;
  return found;
}
INLINE bool any(Ints x) {
  uint64_t parts[kLanes / 2], found = 0;
  std::memcpy(parts, &x, sizeof(x));
  for (int j = 0; j < kLanes / 2; ++j) found |= parts[j];
  return found != 0;
}
"""
