"""Random bits and mixed seeds as one call each of a graph that is compiled.

Every step of a mix reads what it mixes twice, which Inductor writes out: for a few of them it takes minutes.
"""

from __future__ import annotations

from typing import Any

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops import sampling


def bits(seeds: torch.Tensor, count: int) -> torch.Tensor:
    """As :func:`sampling.bits`."""
    return _bits(seeds, count) if torch.compiler.is_compiling() else sampling.bits(seeds, count)


def mixed_seed(number: Any) -> Any:
    """As :func:`sampling.mixed_seed`."""
    is_traced = isinstance(number, torch.Tensor) and torch.compiler.is_compiling()
    return _mixed_seed(number) if is_traced else sampling.mixed_seed(number)


def _run_bits(seeds: torch.Tensor, count: int) -> torch.Tensor:
    return sampling.bits(seeds, count)


def _fake_bits(seeds: torch.Tensor, count: int) -> torch.Tensor:
    return seeds.new_empty(seeds.shape[0], count)


def _run_mixed(number: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = sampling.mixed_seed(number)
    return found


_bits = opaque("random_bits", _run_bits, _fake_bits, is_cuda_graph_safe=True)
_mixed_seed = opaque("mixed_seed", _run_mixed, torch.empty_like, is_cuda_graph_safe=True)
