"""float8 in Triton kernels: converted by a GPU that knows the format, elsewhere read as bits."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from lz_compile.lowering.triton_launch import is_interpreted

#: The first compute capability that converts from e4m3 by itself: on an H100 a product takes 26 us then, and 46 by bits.
CONVERTS_E4M3 = (8, 9)

_BITS = {torch.float8_e4m3fn: "e4m3 bits", torch.float8_e5m2: "e5m2 bits"}


@lru_cache(maxsize=64)
def format_of(dtype: torch.dtype, device: torch.device) -> str:
    """How :func:`decoded` reads the bytes of a dtype; empty where elements are numbers already."""
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and torch.version.cuda and not is_interpreted():
        return "e4m3" if torch.cuda.get_device_capability(device) >= CONVERTS_E4M3 else _BITS[dtype]
    return _BITS.get(dtype, "")


def as_read(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel is given: bytes in the place of float8."""
    return tensor.view(torch.uint8) if tensor.dtype in _BITS else tensor


@triton.jit
def decoded(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """What is stored as numbers, by a format that :func:`format_of` gives."""
    if FORMAT == "e4m3":
        stored = stored.to(tl.float8e4nv, bitcast=True)
    if FORMAT == "e5m2 bits":
        stored = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    if FORMAT == "e4m3 bits":
        bits = stored.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        stored = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    return stored.to(DTYPE)
