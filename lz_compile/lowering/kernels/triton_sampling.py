"""Sampling in Triton (``lowering/triton/sampling.py``), which is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lz_compile.lowering.opaque_sampling import sampler
from lz_compile.lowering.ops.sampling import SamplingAttrs


def _fill(operands: Mapping[str, torch.Tensor], attrs: SamplingAttrs, out: torch.Tensor) -> None:
    from lz_compile.lowering.triton.sampling import run

    run(operands, attrs, out)


sampling = sampler("triton_sampling", "lz.triton_sampling", _fill, is_cuda_graph_safe=True)
