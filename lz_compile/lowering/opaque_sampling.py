"""Kernels for sampling that PyTorch cannot look into: one operator each, on the signature of the op."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.sampling import OPERANDS, SamplingAttrs, reference

#: Fills the last argument from operands by name, rows of which are contiguous.
Fill = Callable[[Mapping[str, torch.Tensor], SamplingAttrs, torch.Tensor], None]


def sampler(name: str, kernel_id: str, fill: Fill, *, is_cuda_graph_safe: bool = False) -> Callable[..., torch.Tensor]:
    """The kernel function of the op (see ``lowering/ops/sampling.py``) that ``fill`` computes, as ``layerzero::<name>``."""

    def run(
        logits: torch.Tensor,
        bitmask: torch.Tensor | None,
        bias: torch.Tensor | None,
        temperature: torch.Tensor | None,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        min_p: torch.Tensor | None,
        seeds: torch.Tensor | None,
        attrs: str,
    ) -> torch.Tensor:
        form = decode(SamplingAttrs, attrs)
        given = (logits, bitmask, bias, temperature, top_k, top_p, min_p, seeds)
        operands = {key: _by_rows(each) for key, each in zip(OPERANDS, given, strict=True) if each is not None}
        out = _result(logits, form)
        if out.numel():
            fill(operands, form, out)
        return out

    def fake(logits: torch.Tensor, *others: Any) -> torch.Tensor:
        return _result(logits, decode(SamplingAttrs, others[-1]))

    def fallback(*given: Any) -> torch.Tensor:
        return reference(*given[:-1], attrs=decode(SamplingAttrs, given[-1])).contiguous()

    operator = opaque(name, run, fake, fallback=fallback, kernel_id=kernel_id, is_cuda_graph_safe=is_cuda_graph_safe)

    def kernel(*, attrs: SamplingAttrs, **operands: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = operator(*(operands.get(key) for key in OPERANDS), encode(attrs))
        return found

    kernel.__signature__ = inspect.signature(reference)  # type: ignore[attr-defined]  # what kernels must take
    return kernel


def _result(logits: torch.Tensor, attrs: SamplingAttrs) -> torch.Tensor:
    """Memory for the result, contiguous."""
    if attrs.result == "ids":
        return logits.new_empty(logits.shape[:1], dtype=torch.int32)
    return logits.new_empty(logits.shape, dtype=attrs.out_dtype)


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same with rows that are contiguous in memory; its first dimension may have any stride."""
    is_flat = tensor.dim() == 1 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    return tensor if is_flat else tensor.contiguous()
