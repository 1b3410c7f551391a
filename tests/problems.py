"""Problems to choose kernels for, kernels of the test's own, and measurements of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lz_compile.api.given import read
from lz_compile.ground.machine import environment
from lz_compile.lowering.attention_attributes import AttentionAttrs, AttentionFacts
from lz_compile.runtime.kernels.capabilities import Prior
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.measure.estimate import workload
from lz_compile.runtime.measure.perf_record import PerfRecord, canonical
from lz_compile.runtime.problem import context as contexts
from lz_compile.runtime.problem.context import SelectionContext

ANYWHERE = frozenset({"*"})


def problem_context(
    length: Any = 128,
    keys: Any = None,
    *,
    batch: Any = 2,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    **attributes: Any,
) -> SelectionContext:
    """The context of an attention on this CPU."""
    kv_heads = heads if kv_heads is None else kv_heads
    attrs = AttentionAttrs(enable_gqa=heads != kv_heads, **attributes)
    keys = length if keys is None else keys
    facts = AttentionFacts(batch, heads, kv_heads, length, keys, head_dim, head_dim, dtype, "cpu", needs_grad=training)
    return contexts.of_facts("attention", attrs, facts)


def kernel(kernel_id: str, prior: float | None = None, **changes: Any) -> KernelSpec:
    """A kernel that can do everything; ``prior`` is its expected latency over Inductor's."""
    rows = () if prior is None else (Prior("*", ANYWHERE, prior),)
    given = {
        "operation": "attention",
        "source": kernel_id.partition(".")[0],
        "platforms": ANYWHERE,
        "dtypes": ANYWHERE,
        "requires_layouts": ANYWHERE,
        "supports": ANYWHERE,
        "deterministic": True,
        "prior": rows,
        "implementation": None if kernel_id == "inductor" else _never,
    }
    return KernelSpec(kernel_id, **{**given, **changes})


def _never(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("nothing is run to choose a kernel")


def measured(
    kernel_id: str,
    context: SelectionContext,
    median_us: float,
    *,
    sizes: Mapping[str, int] | None = None,
    source: str | None = None,
    noise: float = 0.0,
    **changes: Any,
) -> PerfRecord:
    """A measurement of a kernel at the context's sizes, or at others; ``noise`` is the one that it is to have."""
    samples = changes.pop("samples", 25)
    given = {
        "operation": context.operation,
        "device_id": context.hardware.device_name,
        "dtype": context.dtype_name,
        "environment": environment(context.device_type),
        "workload": canonical(workload(context, source, {**context.hints(), **(sizes or {})})),
        "p95_us": median_us * 1.1,
        "variance_us": (noise * median_us / 2.5) ** 2 * samples,
    }
    return PerfRecord(kernel_id, median_us=median_us, samples=samples, **{**given, **changes})


def from_tensors(*tensors: torch.Tensor, causal: bool = False, **named: Any) -> SelectionContext:
    """The context of an attention over tensors, as ``lz.which`` reads it."""
    return read("which", "attention", tensors, {"causal": causal, **named}).context
