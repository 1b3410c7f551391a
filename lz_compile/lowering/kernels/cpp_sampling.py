"""Sampling on CPUs in C++ of our own (``lowering/cpp/sampling.py``): one pass over a row, and limits without a sort."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lz_compile.lowering.opaque_sampling import sampler
from lz_compile.lowering.ops.sampling import OPERANDS, SamplingAttrs


def _fill(operands: Mapping[str, torch.Tensor], attrs: SamplingAttrs, out: torch.Tensor) -> None:
    from lz_compile.lowering.cpp import sampling as code

    readable = {name: code.readable(each) for name, each in operands.items()}
    written = out if out.dtype in (*code.DTYPES, torch.int32) else out.float()
    code.run(readable, attrs, written)
    if written is not out:
        out.copy_(written)


def _bind(attrs: SamplingAttrs, like: Mapping[str, torch.Tensor]) -> Callable[..., torch.Tensor] | None:
    """One call of C++ for operands that lie in memory ``like`` these; None where the code does not read such."""
    from lz_compile.lowering.cpp import sampling as code

    dtypes = [like["logits"].dtype, *(each.dtype for name, each in like.items() if name == "bias")]
    dtypes += [] if attrs.result == "ids" else [attrs.out_dtype]
    is_flat = all(each.dim() == 1 or each.shape[-1] == 1 or each.stride(-1) == 1 for each in like.values())
    if not is_flat or not like["logits"].numel() or any(dtype not in code.DTYPES for dtype in dtypes):
        return None
    prepared: list[tuple[Any, ...]] = []

    def run(**operands: torch.Tensor) -> torch.Tensor:
        if (
            not prepared
        ):  # here, where a missing compiler is seen to; several threads may come by, and all find the same
            prepared.append(_prepared(operands, attrs))
        function, numbers, shape, dtype = prepared[0]
        out = torch.empty(shape, dtype=dtype, device="cpu")
        addresses = [0 if each is None else each.data_ptr() for each in map(operands.get, OPERANDS)]
        function(code.POINTERS(*addresses, out.data_ptr()), numbers)
        return out

    return run


def _prepared(operands: Mapping[str, torch.Tensor], attrs: SamplingAttrs) -> tuple[Any, ...]:
    from lz_compile.lowering.cpp import sampling as code

    logits = operands["logits"]
    is_ids = attrs.result == "ids"
    shape, dtype = (logits.shape[:1], torch.int32) if is_ids else (logits.shape, attrs.out_dtype)
    out = torch.empty(shape, dtype=dtype, device="cpu")
    return *code.prepare(operands, attrs, out), shape, dtype


sampling = sampler("cpp_sampling", "lz.cpp_sampling", _fill)
sampling.bind = _bind  # type: ignore[attr-defined]  # what eager calls look for
