"""C++ that every generated loop shares: blocks of columns in vector registers, conversions, memory.

``Acc`` is what is computed in, ``kLanes`` how many of it a register holds, a ``Block`` is ``kVectors`` registers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

#: The C++ types of elements.
ELEMENTS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "BFloat16", torch.float16: "Half"}

#: Those of 16 bits, rounded as PyTorch's are, to the bit: its headers take as long to compile as all else.
_HALVES = {
    torch.bfloat16: """
struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  INLINE_MEMBER explicit BFloat16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof(x));
    bits = x != x ? 0x7fc0 : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  }
  INLINE_MEMBER operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, sizeof(x));
    return x;
  }
};
""",
    torch.float16: """
#if defined(__F16C__)
struct Half {
  typedef short Bits __attribute__((vector_size(16)));
  typedef float Floats __attribute__((vector_size(16)));
  short bits;
  Half() = default;
  INLINE_MEMBER explicit Half(float x) : bits(Bits(__builtin_ia32_vcvtps2ph(Floats{x}, 0))[0]) {}
  INLINE_MEMBER operator float() const { return __builtin_ia32_vcvtph2ps(Bits{bits})[0]; }
};
#else
#include <c10/util/Half.h>
using c10::Half;
#endif
""",
}


def halves(dtypes: Iterable[torch.dtype]) -> str:
    """C++ of those of the dtypes that it has no types for."""
    return "".join(_HALVES[dtype] for dtype in _HALVES if dtype in set(dtypes))


def vectors(compute: torch.dtype, lanes: int, count: int, dtypes: Iterable[torch.dtype]) -> str:
    """Types and functions for blocks of ``count`` registers of ``lanes`` elements each, and elements of some dtypes."""
    constants = f"""
using Acc = {ELEMENTS[compute]};
using Mask = {"int32_t" if compute == torch.float32 else "int64_t"};
constexpr int64_t kLanes = {lanes};
constexpr int64_t kVectors = {count};
constexpr int64_t kColumns = kLanes * kVectors;
"""
    return HEADERS + halves(dtypes) + constants + TYPES + PICK + BLOCKS + lane_sums(lanes) + MEMORY


def lane_sums(lanes: int) -> str:
    """``sums``: of the elements of each of ``kLanes`` registers (``Vec``), as one register; it needs :data:`PICK`.

    Two registers become one that holds half sums of both, and so on: a third of the work of one sum after the other.
    """
    lines, names = [], [f"x[{lane}]" for lane in range(lanes)]
    distance = lanes // 2
    while distance:
        low = [lanes + lane if lane & distance else lane for lane in range(lanes)]
        high = [lanes + (lane ^ distance) if lane & distance else lane ^ distance for lane in range(lanes)]
        merged = []
        for index, (first, second) in enumerate(zip(names[:distance], names[distance:], strict=True)):
            name = f"s{distance}_{index}"
            picked = [f"PICK({first}, {second}, {', '.join(map(str, mask))})" for mask in (low, high)]
            lines.append(f"  const Vec {name} = {picked[0]} + {picked[1]};")
            merged.append(name)
        names, distance = merged, distance // 2
    body = "\n".join(lines)
    return f"""
INLINE Vec sums(const Vec* x) {{
{body}
  return {names[0]};
}}
"""


HEADERS = """
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>
#include <type_traits>
#if defined(_OPENMP)
#include <omp.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
// <algorithm> would take as long to compile as the loop.
INLINE int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }
"""

TYPES = """
typedef Acc Vec __attribute__((vector_size(kLanes * sizeof(Acc)), may_alias));
typedef Acc LooseVec __attribute__((vector_size(kLanes * sizeof(Acc)), aligned(sizeof(Acc)), may_alias));
typedef Mask MaskVec __attribute__((vector_size(kLanes * sizeof(Acc))));
"""

#: Lanes of two registers by their numbers, which are lanes of a ``MaskVec``.
PICK = """
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, MaskVec{__VA_ARGS__})
#endif
"""

BLOCKS = """
struct Block { Vec v[kVectors]; };

INLINE Block splat(Acc x) {
  Block out;
  for (int64_t n = 0; n < kVectors; ++n) out.v[n] = Vec{} + x;
  return out;
}
INLINE Block zero() { return splat(0); }
INLINE void add(Block& to, const Block& x) { for (int64_t n = 0; n < kVectors; ++n) to.v[n] += x.v[n]; }
INLINE void add(Block& to, Acc x) { for (int64_t n = 0; n < kVectors; ++n) to.v[n] += x; }
INLINE void subtract(Block& to, const Block& x) { for (int64_t n = 0; n < kVectors; ++n) to.v[n] -= x.v[n]; }
INLINE void scale(Block& to, const Block& x) { for (int64_t n = 0; n < kVectors; ++n) to.v[n] *= x.v[n]; }
INLINE void scale(Block& to, Acc x) { for (int64_t n = 0; n < kVectors; ++n) to.v[n] *= x; }
// Zero where the other is this number.
INLINE void clear(Block& x, const Block& other, Acc number) {
  for (int64_t n = 0; n < kVectors; ++n) x.v[n] = other.v[n] == number ? Vec{} : x.v[n];
}
INLINE void clear(Block& x, Acc other, Acc number) { if (other == number) x = zero(); }
INLINE void add_product(Block& to, Acc a, const Block& x) {
  for (int64_t n = 0; n < kVectors; ++n) to.v[n] += a * x.v[n];
}
INLINE void subtract_product(Block& to, Acc a, const Block& x) {
  for (int64_t n = 0; n < kVectors; ++n) to.v[n] -= a * x.v[n];
}
INLINE void add_product(Block& to, const Block& a, const Block& x) {
  for (int64_t n = 0; n < kVectors; ++n) to.v[n] += a.v[n] * x.v[n];
}
// What is left to be summed of the product of two blocks.
INLINE Vec dot(const Block& a, const Block& x) {
  Vec out = a.v[0] * x.v[0];
  for (int64_t n = 1; n < kVectors; ++n) out += a.v[n] * x.v[n];
  return out;
}
INLINE Vec folded(const Block& x) {
  Vec out = x.v[0];
  for (int64_t n = 1; n < kVectors; ++n) out += x.v[n];
  return out;
}
"""

MEMORY = """
// A tensor of up to five dimensions: batch, head, step and two more; of a gradient, with a part for each panel of columns.
template <class T> struct View {
  T* data;
  const int64_t* s;
  T* at(int64_t b, int64_t h, int64_t t) const { return data + b * s[0] + h * s[1] + t * s[2]; }
  T* at(int64_t b, int64_t h, int64_t t, int64_t part) const { return at(b, h, t) + part * s[5]; }
};

// `count` columns as a block; zeros in those beyond.
template <class T> INLINE Block load(const T* from, int64_t stride, int64_t count) {
  Block out;
  if (count == kColumns && stride == 1) {
    if constexpr (std::is_same_v<T, Acc>) {
      for (int64_t n = 0; n < kVectors; ++n) out.v[n] = *reinterpret_cast<const LooseVec*>(from + n * kLanes);
    } else {
      alignas(64) Acc row[kColumns];
      for (int64_t j = 0; j < kColumns; ++j) row[j] = static_cast<Acc>(from[j]);
      std::memcpy(&out, row, sizeof(out));
    }
    return out;
  }
  if (count == kColumns && stride == 0) return splat(static_cast<Acc>(*from));
  alignas(64) Acc row[kColumns] = {};
  for (int64_t j = 0; j < count; ++j) row[j] = static_cast<Acc>(from[j * stride]);
  std::memcpy(&out, row, sizeof(out));
  return out;
}

template <class T> INLINE void store(T* to, int64_t stride, int64_t count, const Block& x) {
  if (count == kColumns && stride == 1 && std::is_same_v<T, Acc>) {
    for (int64_t n = 0; n < kVectors; ++n) *reinterpret_cast<LooseVec*>(to + n * kLanes) = x.v[n];
    return;
  }
  alignas(64) Acc row[kColumns];
  std::memcpy(row, &x, sizeof(x));
  if (stride == 1) {
    for (int64_t j = 0; j < count; ++j) to[j] = static_cast<T>(row[j]);
  } else {
    for (int64_t j = 0; j < count; ++j) to[j * stride] = static_cast<T>(row[j]);
  }
}
INLINE void store(Acc* to, int64_t stride, int64_t count, const Block& x, bool adds) {
  Block sum = x;
  if (adds) add(sum, load(to, stride, count));
  store(to, stride, count, sum);
}

// `count` elements next to one another: where they are, or copied.
template <class T> INLINE const Acc* row(const T* from, int64_t stride, int64_t count, Acc* copy) {
  if constexpr (std::is_same_v<T, Acc>) {
    if (stride == 1) return from;
  }
  for (int64_t i = 0; i < count; ++i) copy[i] = static_cast<Acc>(from[i * stride]);
  return copy;
}

// Memory of one thread, in pieces that are aligned to cache lines.
class Memory {
 public:
  explicit Memory(int64_t bytes) : start_(static_cast<char*>(::operator new(bytes, kAlign))), next_(start_) {}
  ~Memory() { ::operator delete(start_, kAlign); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  template <class T> T* take(int64_t count) {
    char* found = next_;
    next_ += padded(count * sizeof(T));
    return reinterpret_cast<T*>(found);
  }
  static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  static constexpr std::align_val_t kAlign{64};
  char* start_;
  char* next_;
};
"""
