"""Sampling on CPUs in C++ of our own (``lowering/cpp/sampling.py``): one pass over a row, and thresholds without a sort."""

from __future__ import annotations

import torch

from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.sampling import OPERANDS, SamplingAttrs, reference

_KERNEL_ID = "lz.cpp_sampling"


def sampling(
    logits: torch.Tensor,
    bitmask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    *,
    attrs: SamplingAttrs,
) -> torch.Tensor:
    """A sampling in the op's canonical layout (see ``lowering/ops/sampling.py``); scores in float32 or narrower."""
    found: torch.Tensor = _sampling(logits, bitmask, bias, temperature, top_k, top_p, min_p, seeds, encode(attrs))
    return found


def _run(
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
    from lz_compile.lowering.cpp import sampling as code

    form = decode(SamplingAttrs, attrs)
    wanted = _fake(logits, bitmask, bias, temperature, top_k, top_p, min_p, seeds, attrs)
    given = dict(zip(OPERANDS, (logits, bitmask, bias, temperature, top_k, top_p, min_p, seeds), strict=True))
    operands = {name: code.readable(each) for name, each in given.items() if each is not None}
    out = wanted if wanted.dtype in (*code.DTYPES, torch.int32) else wanted.float()
    code.run(operands, form, out)
    return wanted if out is wanted else wanted.copy_(out)


def _fake(
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
    if form.result == "ids":
        return logits.new_empty(logits.shape[:1], dtype=torch.int32)
    return logits.new_empty(logits.shape, dtype=form.out_dtype)


def _fallback(
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
    return reference(logits, bitmask, bias, temperature, top_k, top_p, min_p, seeds, attrs=form).contiguous()


_sampling = opaque("cpp_sampling", _run, _fake, fallback=_fallback, kernel_id=_KERNEL_ID)
