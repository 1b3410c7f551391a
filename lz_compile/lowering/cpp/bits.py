"""C++ that lists the bits that are set: a step for each of them, where array operations take one for every token."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from lz_compile.lowering import inductor

_SOURCE = """
#include <cstdint>
extern "C" int64_t set_bits(const uint32_t* words, int64_t count, int32_t* places) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i)
    for (uint32_t word = words[i]; word; word &= word - 1) places[found++] = int32_t(32 * i + __builtin_ctz(word));
  return found;
}
"""


def set_bits(words: torch.Tensor) -> torch.Tensor:
    """The places of the bits that are set in contiguous int32 words on a CPU, ascending, int32.

    Raises:
        RuntimeError: there is no C++ compiler, or it refuses the source.
    """
    places = torch.empty(32 * words.numel(), dtype=torch.int32)
    found = _function()(words.data_ptr(), words.numel(), places.data_ptr())
    return places[:found].clone()


@cache
def _function() -> Any:
    function = inductor.load_cpp(_SOURCE).set_bits
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_int64
    return function
