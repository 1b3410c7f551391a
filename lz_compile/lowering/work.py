"""What a kernel does in one call, in amounts that a machine has rates for (:mod:`lz_compile.runtime.measure.cost`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from lz_compile.ground.hardware import hardware, has_short_products

#: Kinds of work, and the units of their amounts:
#:
#: product          floating-point operations of batched matrix products in compiled code, at a number of rows
#: own_product      the same in the dtype that kernels of ours multiply in (:func:`product_dtype`)
#: row              elements that products with one row read (in float32: Inductor widens), at a number of keys
#: group            elements that products with a few rows read, at a number of keys
#: pointwise        elements of which an exponential is taken and a sum made (a softmax), at a number of rows
#: fused            floating-point operations of attention in PyTorch's own fused kernel, at a number of queries
#: fused_training   those of its forward, where a backward follows
#: fused_row        elements of keys and values that the fused kernel reads for one query, at a number of keys
#: fresh            bytes of memory that the allocator takes from the operating system at every call
#: unheld           such bytes where a heap may hold them ready as well, which no size tells
#: call             operators that are called one by one
Kind: TypeAlias = Literal[
    "product",
    "own_product",
    "row",
    "group",
    "pointwise",
    "fused",
    "fused_training",
    "fused_row",
    "fresh",
    "unheld",
    "call",
]

#: Blocks of at least so many bytes go back to the operating system when they are freed (glibc's DEFAULT_MMAP_THRESHOLD_MAX),
#: unless they fit into what a heap keeps at its end, which is up to twice as much.
FRESH_FROM = 1 << 25
KEPT = 2 * FRESH_FROM
#: Instruction sets of a usual machine.
USUAL = frozenset({"avx2", "avx512", "avx512_fp16", "amx", "amx_bf16"})


def is_looped(dtype: torch.dtype, isa: frozenset[str] | None = None) -> bool:
    """Whether PyTorch multiplies ``dtype`` in plain loops for want of instructions: of this CPU, or of one with ``isa``."""
    here = hardware("cpu").isa
    isa = here if isa is None else isa
    if dtype == torch.float16 and isa == here:
        has_library = torch.backends.mkldnn.is_available()
        return "avx2" in isa and not (has_library and torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if dtype == torch.float16:
        return "avx2" in isa and "avx512_fp16" not in isa
    return dtype == torch.bfloat16 and not has_short_products(isa)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels of ours multiply ``dtype`` in on this CPU: 16 bits are widened where it has no fast products of them."""
    return torch.float32 if dtype == torch.float16 or is_looped(dtype) else dtype


@dataclass(frozen=True)
class Work:
    """Amounts of work by kind; ``size`` is what the rates of some kinds depend on."""

    amounts: Mapping[Kind, float]
    size: Mapping[Kind, float] = field(default_factory=dict)


def fresh(*buffers: float, times: float = 1) -> dict[Kind, float]:
    """Of buffers of so many bytes, the bytes of those that are new memory at every call, or may be."""
    large = [each for each in buffers if each >= FRESH_FROM]
    return {
        "fresh": times * sum(each for each in large if each >= KEPT),
        "unheld": times * sum(each for each in large if each < KEPT),
    }
