"""What a kernel does in one call, in amounts that a machine has rates for (:mod:`lz_compile.runtime.measure.cost`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

#: Kinds of work, and the units of their amounts:
#:
#: product          floating-point operations of batched matrix products, at a number of rows
#: row              elements that products with one row read (in float32: Inductor widens), at a number of keys
#: group            elements that products with a few rows read, at a number of keys
#: pointwise        elements of which an exponential is taken and a sum made (a softmax), at a number of rows
#: fused            floating-point operations of attention in PyTorch's own fused kernel, at a number of queries
#: fused_training   those of its forward, where a backward follows
#: fused_row        elements of keys and values that the fused kernel reads for one query, at a number of keys
#: fresh            bytes of memory that the allocator takes from the operating system at every call
#: call             operators that are called one by one
Kind: TypeAlias = Literal[
    "product", "row", "group", "pointwise", "fused", "fused_training", "fused_row", "fresh", "call"
]

#: Blocks of at least so many bytes go back to the operating system when they are freed (glibc's DEFAULT_MMAP_THRESHOLD_MAX).
FRESH_FROM = 1 << 25


@dataclass(frozen=True)
class Work:
    """Amounts of work by kind; ``size`` is what the rates of some kinds depend on."""

    amounts: Mapping[Kind, float]
    size: Mapping[Kind, float] = field(default_factory=dict)


def fresh(*buffers: float) -> float:
    """Of buffers of so many bytes, the bytes of those that are new memory at every call."""
    return sum(each for each in buffers if each >= FRESH_FROM)
