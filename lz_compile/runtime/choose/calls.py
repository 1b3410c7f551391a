"""Kernels that are one call: what an eager call can run, and what it is expected to cost.

Code that a compiler writes or fuses into is out of reach of a call that is not compiled. What is left is compared with
PyTorch's own function (for attention SDPA), which is what the call would be without us.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lz_compile.ground.records import Reason
from lz_compile.lowering import ops
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.measure.estimate import Estimate, Sizes, estimates
from lz_compile.runtime.measure.perf_record import PerfRecord
from lz_compile.runtime.problem.context import SelectionContext

#: What an eager attention runs where nothing is better, and falls back to.
SDPA = "torch.sdpa"
#: The kernel of compiled graphs that makes an eager selection at each call.
DISPATCH = "lz.dispatch"


def eager_kernel(op: str) -> str:
    """What an eager call of an op runs where nothing is better, and falls back to: PyTorch's own function.

    Of an op whose module names none, there are no eager calls.
    """
    return str(getattr(ops.module(op), "EAGER_KERNEL", "none"))


def needs_compile(spec: KernelSpec) -> Iterator[Reason]:
    """Why an eager call cannot run a kernel."""
    if spec.kernel_id == DISPATCH:
        yield Reason("NEEDS_COMPILE", f"{DISPATCH} is how a compiled graph comes to this very selection")
    elif not spec.is_opaque and spec.kernel_id != eager_kernel(spec.operation.partition(".")[0]):
        yield Reason(
            "NEEDS_COMPILE", f"{spec.kernel_id} is code for a compiler to fuse, an eager call runs single kernels"
        )


def call_estimates(
    context: SelectionContext,
    specs: Sequence[KernelSpec],
    sizes: Sizes,
    records: Sequence[PerfRecord],
    spelled_out: Sequence[PerfRecord],
) -> dict[str, Estimate]:
    """What to expect of every kernel, over the latency of PyTorch's own (1.0), which is in Inductor's place here.

    Args:
        records: measurements of problems whose source calls PyTorch's own.
        spelled_out: measurements of problems that are spelled out, as ``tune`` makes them; they count where there are
            none of the others, and PyTorch's own was measured with the rest.
    """
    own = eager_kernel(context.op)
    found = estimates(context, specs, sizes, records, source_kernel=own)
    if any(each.origin == "measured" for each in found.values()):
        return found
    found = _over_operations(context, found, own)
    others = estimates(context, specs, sizes, spelled_out)
    base = others.get(own)
    if base is None or base.origin != "measured":
        return found
    return {
        kernel_id: replace(each, relative_latency=each.relative_latency / base.relative_latency)
        if each.origin == "measured"
        else found[kernel_id]
        for kernel_id, each in others.items()
    }


def _over_operations(context: SelectionContext, found: dict[str, Estimate], own: str) -> dict[str, Estimate]:
    """Priors, which are over what Inductor makes of PyTorch's operations, over these operations one by one."""
    factor = getattr(ops.module(context.op), "UNFUSED", {}).get(context.device_type, 1.0)
    return {
        kernel_id: replace(each, relative_latency=each.relative_latency / factor)
        if each.origin == "prior" and kernel_id != own
        else each
        for kernel_id, each in found.items()
    }
