"""Measure the kernels of one problem: compiled, timed in turns with each other, and kept in the database.

A kernel that does not compile or run is an event and is left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lz_compile import __version__
from lz_compile.ground import events, health, machine, telemetry
from lz_compile.lowering import frames, inductor
from lz_compile.passes.proof.cases import tried
from lz_compile.runtime.choose.calls import DISPATCH
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.estimate import INDUCTOR, is_current, workload
from lz_compile.runtime.measure.perf_record import PerfRecord, canonical
from lz_compile.runtime.measure.perfdb import database
from lz_compile.runtime.measure.timing import Timing, measure
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.context import SelectionContext

Sizes = Mapping[str, int]
#: What failed in this process: kernel, environment, workload and surroundings.
_failed: set[tuple[str, str, str, str]] = set()
#: Features of results that no two kernels have alike.
_DRAWING = frozenset({"dropout", "random"})
#: The relative error (2-norm of a result) that is no rounding in any dtype.
_ROUNDING = 0.1
#: Compiles a kernel's form of a problem: given None, the form that is left to Inductor.
Form = Callable[[Callable[..., Any] | None], Callable[..., Any]]


@dataclass(frozen=True)
class Measured:
    """One problem and the latency of every kernel that ran it, in µs (medians)."""

    context: SelectionContext
    latency_us: Mapping[str, float]


def runnable(context: SelectionContext) -> list[KernelSpec]:
    """The kernels that can run a problem, Inductor first; not the one that chooses among them."""
    specs = sorted(kernels(context.operation).values(), key=lambda spec: spec.kernel_id != INDUCTOR)
    return [spec for spec in specs if spec.kernel_id == INDUCTOR or _can_run(spec, context)]


def _can_run(spec: KernelSpec, context: SelectionContext) -> bool:
    return spec.kernel_id != DISPATCH and health.retired(spec.kernel_id) is None and not spec.check(context)


def may_differ(context: SelectionContext) -> bool:
    """Whether a kernel can be expected to differ from Inductor's own code: not where all are the same code to Inductor."""
    sizes = context.hints()
    others = [spec for spec in runnable(context) if spec.kernel_id != INDUCTOR]
    priors = [row.relative_latency for spec in others for row in spec.prior if row.fits(context, sizes)]
    return any(spec.is_opaque for spec in others) or any(ratio != 1.0 for ratio in priors)


def is_measured(
    context: SelectionContext,
    specs: Iterable[KernelSpec],
    sizes: Sizes,
    *,
    alone: str | None = None,
    surroundings: str | None = None,
) -> bool:
    """Whether every one of the kernels has been measured, together, at exactly these sizes (or fails in this process)."""
    where, text = machine.environment(context.device_type), canonical(workload(context, alone, sizes))
    found = database(policy.current().settings.perfdb.path).lookup(
        context.operation, context.dtype_name, where, workload=text, surroundings=surroundings
    )
    by_id = {spec.kernel_id: spec for spec in specs}
    groups: dict[str, set[str]] = {"" if surroundings is None else surroundings: set()}
    for record in found:
        if record.kernel_id in by_id and is_current(record, by_id[record.kernel_id]):
            groups.setdefault(record.surroundings, set()).add(record.kernel_id)
    return any(
        by_id.keys() <= measured | {spec_id for spec_id in by_id if (spec_id, where, text, around) in _failed}
        for around, measured in groups.items()
    )


def measure_forms(
    context: SelectionContext,
    specs: Sequence[KernelSpec],
    form: Form,
    inputs: Sequence[Any],
    sizes: Sizes,
    *,
    alone: str | None = None,
    surroundings: str = "",
    samples: int | None = None,
    budget_s: float | None = None,
    deadline: float | None = None,
) -> Measured:
    """Compile every kernel's form of one problem, time them in turns and keep the latencies.

    Args:
        context: the problem.
        specs: the kernels; ``inductor`` stands for the form as written.
        form: gives the function of ``inputs`` for a kernel's ``call``.
        inputs: real ones.
        sizes: what the symbolic sizes of the context are here.
        alone: the kernel that leaving the problem alone runs.
        surroundings: a hash of what the forms hold beside the problem.
        samples: rounds (default: the policy's ``perfdb.tune_samples``).
        budget_s: for the timing, not for the compiling.
        deadline: on the clock of ``time.perf_counter``; no kernel is compiled after it, and nothing is measured then.
    """
    settings = policy.current().settings.perfdb
    operation, names = context.operation, [spec.kernel_id for spec in specs]
    with events.collect() as happened, telemetry.span("measure", operation=operation, kernels=names):
        calls = compile_forms(context, specs, form, inputs, deadline)
        if not calls and deadline is not None:  # the time is up, which is nobody's failure
            return Measured(context, {})
        timings: dict[str, Timing] = {}
        if INDUCTOR in calls:  # the others are compared with it
            rounds = settings.tune_samples if samples is None else samples
            timings = measure(calls, device_of(inputs), rounds=rounds, block_ms=10.0, budget_s=budget_s)
    broken = _broken(timings, happened)
    timings = {kernel_id: timing for kernel_id, timing in timings.items() if kernel_id not in broken}
    where, text = machine.environment(context.device_type), canonical(workload(context, alone, sizes))
    _failed.update((spec.kernel_id, where, text, surroundings) for spec in specs if spec.kernel_id not in timings)
    if len(timings) > 1:  # one alone is faster than nothing
        keep(context, specs, timings, sizes, alone=alone, surroundings=surroundings)
    return Measured(context, {kernel_id: timing.latency_us.median for kernel_id, timing in timings.items()})


def _broken(kernel_ids: Iterable[str], happened: Collection[events.Event]) -> list[str]:
    """The kernels that failed while a fallback went on: what was timed was not they."""
    failures = [event.message for event in happened if event.code in health.FAILURE_EVENTS]
    return [
        kernel_id
        for kernel_id in kernel_ids
        if health.retired(kernel_id) is not None or any(kernel_id in message for message in failures)
    ]


def compile_forms(
    context: SelectionContext,
    specs: Sequence[KernelSpec],
    form: Form,
    inputs: Sequence[Any],
    deadline: float | None = None,
) -> dict[str, Callable[[], Any]]:
    """Every kernel's form of a problem, compiled and run once, as something to time; what fails or is wrong is an event.

    Empty where the time is up before all of them are.

    Results are held against the source's, for what Inductor makes of a kernel is not what its proof ran.
    """
    calls: dict[str, Callable[[], Any]] = {}
    expected: list[torch.Tensor] = []
    for spec in specs:
        if deadline is not None and time.perf_counter() > deadline:
            events.record(
                "NOT_MEASURED", f"{context.operation} {context.hints()}: the time for it is up", level=logging.INFO
            )
            return {}
        try:
            function = form(spec.call)
            if not spec.is_shipped:  # what hangs or exits does so in a process of its own
                tried(spec, {device_of(inputs)}, partial(_try, function, inputs, context.is_training))
            call, results = _prepared(function, inputs, context.is_training)
            if spec.kernel_id == INDUCTOR:
                expected = results
            elif not _DRAWING & context.features.keys() and (difference := _difference(results, expected)):
                raise ArithmeticError(difference)
            calls[spec.kernel_id] = call
        except Exception as error:  # noqa: BLE001 a kernel that does not run here is named and left out
            events.record("MEASUREMENT_FAILED", f"{spec.kernel_id} for {context.operation} {context.hints()}", error)
    return calls


def keep(
    context: SelectionContext,
    specs: Iterable[KernelSpec],
    timings: Mapping[str, Timing],
    sizes: Sizes,
    *,
    alone: str | None = None,
    surroundings: str = "",
) -> None:
    """Put the timings of one problem into the database, unless the policy has none."""
    settings = policy.current().settings.perfdb
    if settings.enabled:
        by_id = {spec.kernel_id: spec for spec in specs}
        database(settings.path).put(
            _record(by_id[kernel_id], timing, context, sizes, alone, surroundings)
            for kernel_id, timing in timings.items()
        )


def device_of(inputs: Iterable[Any]) -> torch.device:
    """The device of the first tensor."""
    return next(each.device for each in inputs if isinstance(each, torch.Tensor))


def _try(function: Callable[..., Any], inputs: Sequence[Any], is_training: bool) -> None:
    """Run a form once as it is, without its results."""
    outputs = [each for each in _tensors(function(*inputs)) if each.requires_grad and is_training]
    leaves = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(each) for each in outputs], allow_unused=True)


def _difference(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """How results differ by more than rounding, in words; where all is next to zero, anything small is rounding."""
    for one, other in zip(results, expected, strict=False):
        known = other.isfinite()
        ours, theirs = one[known].double(), other[known].double()
        error, size = (ours - theirs).norm().item(), theirs.norm().item()
        if not error <= _ROUNDING * max(size, _ROUNDING * len(theirs) ** 0.5):
            return f"what is compiled of it is off by {error / max(size, 1e-30):.2g} of the source's result"
    return ""


def _prepared(
    function: Callable[..., Any], inputs: Sequence[Any], is_training: bool
) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """The compiled function as something to time, and its results; numbers and shapes among the inputs are constants."""
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]

    def of_tensors(*given: torch.Tensor) -> Any:
        left = iter(given)
        return function(*(next(left) if isinstance(each, torch.Tensor) else each for each in inputs))

    compiled = inductor.compile_apart(of_tensors, tensors)

    def forward() -> Any:
        return compiled(*tensors)

    def forward_and_backward() -> Any:
        outputs = [each for each in _tensors(compiled(*tensors)) if each.requires_grad]
        leaves = [each for each in tensors if each.requires_grad]
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(each) for each in outputs], allow_unused=True)

    call = forward_and_backward if is_training else forward
    torch.manual_seed(0)  # what is around the match may draw: every form the same then
    with frames.apart():
        return call, [each for each in _tensors(call()) if each.is_floating_point()]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    for each in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(each, torch.Tensor):
            yield each


def _record(
    spec: KernelSpec, timing: Timing, context: SelectionContext, sizes: Sizes, alone: str | None, surroundings: str
) -> PerfRecord:
    conditions = machine.conditions(context.device_type)
    return PerfRecord(
        kernel_id=spec.kernel_id,
        operation=context.operation,
        device_id=context.hardware.device_name,
        dtype=context.dtype_name,
        environment=machine.environment(context.device_type),
        workload=canonical(workload(context, alone, sizes)),
        surroundings=surroundings,
        median_us=timing.latency_us.median,
        p95_us=timing.p95_us,
        samples=len(timing.rounds_us),
        variance_us=timing.variance_us,
        warmup_ms=timing.warmup_s * 1e3,
        sm_version=context.hardware.sm_version,
        head_dim=sizes.get("head_dim"),
        seq_bucket=_bucket(sizes.get("seq_len_q")),
        batch_bucket=_bucket(sizes.get("batch_size")),
        kernel_version=spec.version,
        layerzero_version=__version__,
        capabilities_hash=spec.capabilities_hash,
        power_state=conditions.get("power_state"),
        conditions=canonical(conditions),
    )


def _bucket(size: int | None) -> int | None:
    """The power of two at or above a size."""
    return None if size is None else 1 << max(size - 1, 0).bit_length()
