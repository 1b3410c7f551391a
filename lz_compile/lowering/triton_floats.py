"""float8 in Triton kernels: read as bits, for not every GPU knows its formats."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoded(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """What is stored as numbers: bits of ``FORMAT`` where that is float8, else elements as they are."""
    if FORMAT == "float8_e5m2":
        stored = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    if FORMAT == "float8_e4m3fn":
        bits = stored.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        stored = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    return stored.to(DTYPE)
