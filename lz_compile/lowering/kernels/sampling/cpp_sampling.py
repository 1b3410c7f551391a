"""Sampling on CPUs in C++ of our own (``cpp_source.py``): one pass over a row, and limits without a sort."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import sampling as op
from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs


def _sampling(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.sampling import cpp_source as code

    return code.run(x, attrs)


def _bind(x: Operands, attrs: SamplingAttrs) -> Callable[[Operands], torch.Tensor] | None:
    from lz_compile.lowering.kernels.sampling import cpp_source as code

    return code.bound(x, attrs)


sampling = kernel_operator("cpp_sampling", op, _sampling, kernel_id="lz.cpp_sampling")
sampling.bind = _bind  # type: ignore[attr-defined]  # what eager calls look for
