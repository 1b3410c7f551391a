"""C++ that reads the keys of a few queries where they lie, for attention over tensors and over caches in blocks."""

from __future__ import annotations

import torch

from lz_compile.lowering.cpp import calls
from lz_compile.lowering.cpp.floats import STORED, STORED_TYPES, floats
from lz_compile.lowering.cpp.vectors import PICK, halves, lane_sums
from lz_compile.lowering.kernels.attention.capping import TANGENT
from lz_compile.lowering.kernels.attention.cpp_loops import LOOPS
from lz_compile.lowering.kernels.attention.cpp_parts import PARTS
from lz_compile.lowering.kernels.sampling.cpp_vectors import VECTORS

#: Beside Inductor's own: no more than the rounding of ``a * b + c`` depends on it.
FLAGS = ("-ffp-contract=fast", "-ftree-loop-vectorize")


def source(
    stored: torch.dtype, head_dim: int, value_dim: int, lanes: int, *, has_softcap: bool, has_over: bool, entry: str
) -> str:
    """The translation unit for caches of a dtype and registers of so many floats; each takes a second to compile."""
    return f"""#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>
constexpr int kDV = {-(-head_dim // lanes)}, kEV = {-(-value_dim // lanes)};  // registers of a row
{calls.truths(kHasCap=has_softcap, kHasOver=has_over)}{floats(lanes)}{halves(STORED_TYPES)}{STORED}{VECTORS}{TANGENT}
using Stored = {STORED_TYPES[stored]};
typedef Floats Vec;
typedef Ints MaskVec;
{PICK}{lane_sums(lanes)}{LOOPS}{PARTS}{entry}"""
