"""Sampling on CPUs in C++ of our own (``lowering/cpp/sampling.py``): one pass over a row, and limits without a sort."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lz_compile.lowering.opaque_sampling import sampler
from lz_compile.lowering.ops.sampling import SamplingAttrs


def _fill(operands: Mapping[str, torch.Tensor], attrs: SamplingAttrs, out: torch.Tensor) -> None:
    from lz_compile.lowering.cpp import sampling as code

    readable = {name: code.readable(each) for name, each in operands.items()}
    written = out if out.dtype in (*code.DTYPES, torch.int32) else out.float()
    code.run(readable, attrs, written)
    if written is not out:
        out.copy_(written)


sampling = sampler("cpp_sampling", "lz.cpp_sampling", _fill)
