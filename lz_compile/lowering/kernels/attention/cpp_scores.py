"""What happens to a tile of float32 scores, in C++: one pass for a soft cap, and a softmax whose rows stay in a cache.

PyTorch calls a library for each register of exponentials, and for each tanh, which takes as long as the products of the tile.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from lz_compile.ground import events
from lz_compile.lowering import cpp_builds
from lz_compile.lowering.cpp import calls
from lz_compile.lowering.cpp.floats import floats
from lz_compile.lowering.kernels.attention.capping import TANGENT
from lz_compile.lowering.kernels.sampling.cpp_vectors import VECTORS

#: Beside Inductor's own: no more than the rounding of ``a * b + c`` depends on it.
_FLAGS = ("-ffp-contract=fast", "-ftree-loop-vectorize")


def cap_(scores: torch.Tensor, cap: float, tanh: torch.Tensor) -> None:
    """``cap * tanh(scores / cap)`` in place, and that ``tanh``; both are contiguous."""
    run = _function("cap", scores)
    if run is None:
        torch.tanh(scores.div_(cap), out=tanh)
        torch.mul(tanh, cap, out=scores)
    else:
        run(*_places(scores, tanh), *map(ctypes.c_int64, (scores.numel(), _threads(scores))), ctypes.c_float(cap))


def softmax_(scores: torch.Tensor) -> None:
    """The softmax over the last dimension of what is contiguous, in place."""
    run = _function("softmax", scores)
    if run is None:
        torch.softmax(scores, -1, out=scores)
    else:
        keys = scores.shape[-1]
        run(*_places(scores), *map(ctypes.c_int64, (scores.numel() // keys, keys, _threads(scores))))


def _places(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(each.data_ptr()) for each in tensors]


def _threads(scores: torch.Tensor) -> int:
    """As PyTorch has them: one where little is to be done."""
    return torch.get_num_threads() if scores.numel() >= 1 << 15 else 1


def _function(name: str, scores: torch.Tensor) -> Any:
    """That of the C++; None where PyTorch does it."""
    return None if scores.dtype != torch.float32 else _functions(cpp_builds.vector_bits() // 32).get(name)


@lru_cache(maxsize=4)
def _functions(lanes: int) -> dict[str, Any]:
    try:
        return {name: calls.function(name, source(lanes), _FLAGS) for name in ("cap", "softmax")}
    except RuntimeError as error:
        events.record("TILES_WITHOUT_CPP", "PyTorch's softmax and tanh are taken for tiles of attention scores", error)
        return {}


def source(lanes: int) -> str:
    """The translation unit for registers of so many floats."""
    return f"{floats(lanes)}{VECTORS}{TANGENT}{_SCORES}"


_SCORES = """
INLINE void store(float* at, Floats x) { std::memcpy(at, &x, sizeof(x)); }
INLINE Floats first_of(const float* at, int64_t count, float rest) {
  Floats x = filled(rest);
  std::memcpy(&x, at, count * sizeof(float));
  return x;
}

extern "C" void cap(float* scores, float* tanhs, int64_t count, int64_t threads, float cap) {
  const float share = 1.0f / cap;
  const int64_t registers = count / kLanes;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < registers; ++i) {
    const Floats x = tangent(load(scores + i * kLanes) * share);
    store(tanhs + i * kLanes, x);
    store(scores + i * kLanes, x * cap);
  }
  const int64_t done = registers * kLanes;
  Floats x = tangent(first_of(scores + done, count - done, 0.0f) * share);
  std::memcpy(tanhs + done, &x, (count - done) * sizeof(float));
  x *= cap;
  std::memcpy(scores + done, &x, (count - done) * sizeof(float));
}

// A NaN is in the sum, and so in all weights, and what is infinite makes one, as a row without a finite score does.
static void softmax_of(float* row, int64_t keys) {
  const int64_t whole = keys / kLanes * kLanes, rest = keys - whole;
  const Floats last = first_of(row + whole, rest, kNothing);
  Floats most = last, also = last;
  int64_t i = 0;
  for (; i + 2 * kLanes <= whole; i += 2 * kLanes) {
    const Floats one = load(row + i), other = load(row + i + kLanes);
    most = one > most ? one : most;
    also = other > also ? other : also;
  }
  if (i < whole) {
    const Floats one = load(row + i);
    most = one > most ? one : most;
  }
  const float top = largest(also > most ? also : most);
  Floats sum = exponential(last - top);
  const Floats behind = sum;
  for (i = 0; i < whole; i += kLanes) {
    const Floats weight = exponential(load(row + i) - top);
    store(row + i, weight);
    sum += weight;
  }
  float total = 0.0f;
  for (int j = 0; j < kLanes; ++j) total += sum[j];
  const float share = 1.0f / total;
  for (i = 0; i < whole; i += kLanes) store(row + i, load(row + i) * share);
  const Floats shares = behind * share;
  std::memcpy(row + whole, &shares, rest * sizeof(float));
}

extern "C" void softmax(float* scores, int64_t rows, int64_t keys, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) softmax_of(scores + row * keys, keys);
}
"""
