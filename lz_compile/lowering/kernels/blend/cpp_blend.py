"""Gated blends on CPUs in C++ of our own (``cpp_source.py``): a row is blended while its logits are in the cache."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernels.blend import torch_blend
from lz_compile.lowering.kernels.blend.opaque_blend import blender
from lz_compile.lowering.ops.blend import BlendAttrs, Operands

_READ = (torch.float32, torch.bfloat16)


def blend(x: Operands, attrs: BlendAttrs) -> torch.Tensor:
    """A blend in the op's canonical layout (see ``lowering/ops/blend.py``); PyTorch's for other dtypes."""
    tensors = [each for each in (x.seed, x.logits) if each is not None]
    is_wide = torch.float64 in (attrs.compute_dtype, attrs.out_dtype)
    if is_wide or any(each.dtype not in _READ for each in tensors):
        return torch_blend.blend(x, attrs)
    return _blend(x, attrs)


_blend = blender("cpp_blend", "lz.cpp_blend", "cpp_source")
