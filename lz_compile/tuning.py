"""Measure kernels on this machine and keep what was measured, so that selection rests on it.

Every candidate is compiled by Inductor together with what surrounds it, and timed in turns with the others. A kernel that
does not compile or run is an event and is left out.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lz_compile import __version__
from lz_compile.errors import UnknownOperationError
from lz_compile.lowering import inductor, ops
from lz_compile.passes.surroundings import Binding, Excerpt, excerpt, symbols
from lz_compile.passes.view import value_of
from lz_compile.runtime import context as contexts
from lz_compile.runtime import events, machine, policy
from lz_compile.runtime.context import SelectionContext
from lz_compile.runtime.estimate import INDUCTOR, workload
from lz_compile.runtime.kernel import KernelSpec
from lz_compile.runtime.measure import Timing, measure
from lz_compile.runtime.perf_record import PerfRecord, canonical
from lz_compile.runtime.registry import kernels
from lz_compile.runtime.select import POWERS, Problem, database_at

if TYPE_CHECKING:
    from lz_compile.passes.effects import Effects
    from lz_compile.passes.match import Match
    from lz_compile.runtime.verdict import Policy

Sizes = Mapping[str, int]
#: Compiles a kernel's form of a problem: given None, the form that is left to Inductor.
Form = Callable[[Callable[..., Any] | None], Callable[..., Any]]


@dataclass(frozen=True)
class Measured:
    """One problem and the latency of every kernel that ran it, in µs (medians)."""

    context: SelectionContext
    latency_us: Mapping[str, float]


@dataclass(frozen=True)
class TuneReport:
    """What :func:`tune` did. ``remaining`` problems were left when the budget ended: call it again to go on."""

    measured: tuple[Measured, ...]
    known: int
    remaining: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        rows = [{"context": each.context.to_dict(), "latency_us": dict(each.latency_us)} for each in self.measured]
        return {"measured": rows, "known": self.known, "remaining": self.remaining, "seconds": round(self.seconds, 3)}


def tune(
    operation: str = "attention",
    *,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    head_dim: int = 64,
    seq_lens: Sequence[int] = (128, 512, 2048),
    seq_lens_k: Sequence[int] | None = None,
    batch_sizes: Sequence[int] = (1,),
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    mask: str = "none",
    training: bool = False,
    device: torch.device | str | None = None,
    samples: int | None = None,
    budget_s: float | None = None,
    resume: bool = True,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> TuneReport:
    """Measure every kernel of an operation over a grid of problems, and keep the latencies in the database.

    Args:
        operation: ``attention`` (both variants), ``attention.causal`` or ``attention.full``.
        dtype: of query, key and value; several are measured one after the other.
        head_dim: of query, key and value.
        seq_lens: query lengths.
        seq_lens_k: key lengths, each combined with every query length; by default that of the query.
        batch_sizes: batch sizes.
        num_heads: query heads.
        num_kv_heads: key heads, by default those of the query.
        mask: ``none``, ``bool`` or ``float``.
        training: measure forward and backward.
        device: by default the accelerator, or the CPU where there is none.
        samples: rounds for each problem (default: the policy's ``perfdb.tune_samples``).
        budget_s: stop before a problem that would begin after that many seconds.
        resume: skip problems that are measured already, in this environment and for all kernels that can run.
        on_progress: is called with the number of problems done, of all problems, and the next one in words.

    Raises:
        UnknownOperationError: there is no such operation.
    """
    if operation not in contexts.operations():
        raise UnknownOperationError("tuning", operation, contexts.operations())
    where = torch.device(device) if device is not None else _default_device()
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    shared = {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim}
    grid = [
        _Problem(op_variant, kind, {"batch_size": batch, "seq_len_q": queries, "seq_len_k": keys, **shared})
        for kind in (dtype if isinstance(dtype, Sequence) else (dtype,))
        for op_variant in _variants(operation)
        for batch, (queries, keys) in itertools.product(batch_sizes, _lengths(seq_lens, seq_lens_k))
    ]
    return _tune(grid, where, mask, training, samples, budget_s, resume, on_progress)


@dataclass(frozen=True)
class _Problem:
    operation: str
    dtype: torch.dtype
    sizes: Sizes

    def __str__(self) -> str:
        sizes = "x".join(str(self.sizes[name]) for name in ("batch_size", "num_heads", "seq_len_q", "head_dim"))
        return f"{self.operation} {str(self.dtype).removeprefix('torch.')} {sizes}, {self.sizes['seq_len_k']} keys"


def _tune(
    grid: Sequence[_Problem],
    device: torch.device,
    mask: Any,
    training: bool,
    samples: int | None,
    budget_s: float | None,
    resume: bool,
    on_progress: Callable[[int, int, str], None] | None,
) -> TuneReport:
    start = time.perf_counter()
    done: list[Measured] = []
    known = 0
    for index, problem in enumerate(grid):
        if budget_s is not None and time.perf_counter() - start > budget_s:
            return TuneReport(tuple(done), known, len(grid) - index, time.perf_counter() - start)
        if on_progress is not None:
            on_progress(index, len(grid), str(problem))
        op = problem.operation.partition(".")[0]
        sample = ops.module(op).sample(
            problem.sizes,
            problem.dtype,
            device,
            is_causal=problem.operation.endswith(".causal"),
            mask=mask,
            is_training=training,
        )
        context = contexts.of_facts(op, sample.attrs, sample.facts, device=device)
        specs = runnable(context)
        if resume and is_measured(context, specs, problem.sizes):
            known += 1
            continue

        def form(call: Callable[..., Any] | None, sample: Any = sample) -> Callable[..., Any]:
            found: Callable[..., Any] = sample.as_written() if call is None else sample.with_kernel(call)
            return found

        with torch.set_grad_enabled(training):
            done.append(measure_forms(context, specs, form, sample.inputs, problem.sizes, samples=samples))
    return TuneReport(tuple(done), known, 0, time.perf_counter() - start)


def _variants(operation: str) -> list[str]:
    variants = contexts.variants(operation)
    return [f"{operation}.{variant}" for variant in variants] or [operation]


def _lengths(queries: Sequence[int], keys: Sequence[int] | None) -> list[tuple[int, int]]:
    return [(q, q) for q in queries] if keys is None else list(itertools.product(queries, keys))


def _default_device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def tune_match(match: Match, effects: Effects, problem: Problem, policy_: Policy, deadline: float) -> Problem:
    """Measure a match with its surroundings, where that is not done yet.

    Where sizes are symbolic it is measured at powers of two around those that it was traced with, the nearest first.

    Args:
        match: what was recognised.
        effects: of its graph.
        problem: what to choose a kernel for.
        policy_: forbids some kernels, and says how many samples to take.
        deadline: on the clock of ``time.perf_counter``; nothing is begun after it.

    Returns:
        the problem with its surroundings.
    """
    found = excerpt(match, effects)
    problem = replace(problem, surroundings=found.surroundings)
    verdict = policy_.verdict(problem.context)
    specs = [
        spec
        for spec in runnable(problem.context)
        if spec.kernel_id != problem.source_kernel and verdict.excluded(spec.kernel_id) is None
    ]
    for binding, sizes in _bindings(match, found, problem):
        known = is_measured(
            problem.context, specs, sizes, source_kernel=problem.source_kernel, surroundings=found.surroundings
        )
        if len(specs) == 1 or known:
            continue
        if time.perf_counter() > deadline:
            text = f"{match.op} at {match.where} at {dict(sizes)}: the tuning budget is used up"
            events.record("NOT_MEASURED", text)
            break
        with torch.set_grad_enabled(problem.context.is_training):
            measure_forms(
                problem.context,
                specs,
                found.function,
                found.make_inputs(binding),
                sizes,
                source_kernel=problem.source_kernel,
                surroundings=found.surroundings,
                budget_s=max(deadline - time.perf_counter(), 1.0),
            )
    return problem


def _bindings(match: Match, found: Excerpt, problem: Problem) -> Iterator[tuple[Binding, Sizes]]:
    """Numbers for every symbol, with the sizes that they give."""
    if problem.symbols is None:
        yield {}, problem.context.hints()
        return
    values = [value_of(node) for node in found.inputs]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    wanted = symbols(values) | {symbol.expression for symbol in problem.symbols.symbols.values()}
    hints = {symbol: inductor.symbolic_size(symbol, tensors).hint for symbol in wanted}
    traced: dict[Any, int] = {symbol: size for symbol, size in hints.items() if size is not None}
    lengths = problem.symbols.names_in(ops.module(match.op).BUCKETED_DIMS[0])
    moving = next((problem.symbols.symbols[name] for name in lengths if name in problem.symbols.symbols), None)
    sizes: list[int | None] = [None] if moving is None else [*_around(moving)]
    for size in sizes:
        binding = traced if moving is None or size is None else {**traced, moving.expression: size}
        yield binding, problem.symbols.at({str(symbol): value for symbol, value in binding.items()})


def _around(symbol: Any) -> list[int]:
    """Powers of two in a symbol's range, the nearest to the traced size first."""
    inside = [size for size in POWERS if symbol.lower <= size and (symbol.upper is None or size <= symbol.upper)]
    return sorted(inside or [symbol.hint], key=lambda size: abs(math.log2(size / max(symbol.hint, 1))))


# ---- one problem -------------------------------------------------------------------------------------------------------


def runnable(context: SelectionContext) -> list[KernelSpec]:
    """The kernels that can run a problem, Inductor first."""
    specs = kernels(context.operation).values()
    return [spec for spec in specs if spec.kernel_id == INDUCTOR or not spec.check(context)]


def is_measured(
    context: SelectionContext,
    specs: Iterable[KernelSpec],
    sizes: Sizes,
    *,
    source_kernel: str | None = None,
    surroundings: str | None = None,
) -> bool:
    """Whether every one of the kernels has been measured at exactly these sizes."""
    found = database_at(policy.current().settings.perfdb.path).lookup(
        context.operation,
        context.dtype_name,
        machine.environment(context.device_type),
        workload=workload(context, source_kernel, sizes),
        surroundings=surroundings,
    )
    return {spec.kernel_id for spec in specs} <= {record.kernel_id for record in found}


def measure_forms(
    context: SelectionContext,
    specs: Sequence[KernelSpec],
    form: Form,
    inputs: Sequence[Any],
    sizes: Sizes,
    *,
    source_kernel: str | None = None,
    surroundings: str = "",
    samples: int | None = None,
    budget_s: float | None = None,
) -> Measured:
    """Compile every kernel's form of one problem, time them in turns and keep the latencies.

    Args:
        context: the problem.
        specs: the kernels; ``inductor`` stands for the form as written.
        form: gives the function of ``inputs`` for a kernel's ``call``.
        inputs: real ones.
        sizes: what the symbolic sizes of the context are here.
        source_kernel: the kernel that the source itself calls.
        surroundings: a hash of what the forms hold beside the problem.
        samples: rounds (default: the policy's ``perfdb.tune_samples``).
        budget_s: for the timing, not for the compiling.
    """
    calls = compile_forms(context, specs, form, inputs)
    settings = policy.current().settings.perfdb
    rounds = samples or settings.tune_samples
    timings = measure(calls, _device_of(inputs), rounds=rounds, block_ms=10.0, budget_s=budget_s)
    keep(context, specs, timings, sizes, source_kernel=source_kernel, surroundings=surroundings)
    return Measured(context, {kernel_id: timing.latency_us.median for kernel_id, timing in timings.items()})


def compile_forms(
    context: SelectionContext, specs: Sequence[KernelSpec], form: Form, inputs: Sequence[Any]
) -> dict[str, Callable[[], Any]]:
    """Every kernel's form of a problem, compiled and run once, as something to time; what fails is an event."""
    calls: dict[str, Callable[[], Any]] = {}
    for spec in specs:
        try:
            calls[spec.kernel_id] = _prepared(form(spec.call), inputs, context.is_training)
        except Exception as error:  # noqa: BLE001 a kernel that does not run here is named and left out
            events.record("MEASUREMENT_FAILED", f"{spec.kernel_id} for {context.operation} {context.hints()}", error)
    return calls


def keep(
    context: SelectionContext,
    specs: Iterable[KernelSpec],
    timings: Mapping[str, Timing],
    sizes: Sizes,
    *,
    source_kernel: str | None = None,
    surroundings: str = "",
) -> None:
    """Put the timings of one problem into the database, unless the policy has none."""
    settings = policy.current().settings.perfdb
    if settings.enabled:
        by_id = {spec.kernel_id: spec for spec in specs}
        database_at(settings.path).put(
            _record(by_id[kernel_id], timing, context, sizes, source_kernel, surroundings)
            for kernel_id, timing in timings.items()
        )


def _device_of(inputs: Iterable[Any]) -> torch.device:
    return next(each.device for each in inputs if isinstance(each, torch.Tensor))


def _prepared(function: Callable[..., Any], inputs: Sequence[Any], is_training: bool) -> Callable[[], Any]:
    """The compiled function as something to time, run once."""
    compiled = inductor.compile_apart(function, inputs)

    def forward() -> Any:
        return compiled(*inputs)

    def forward_and_backward() -> Any:
        outputs = [each for each in _tensors(compiled(*inputs)) if each.requires_grad]
        leaves = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(each) for each in outputs], allow_unused=True)

    call = forward_and_backward if is_training else forward
    call()
    return call


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    for each in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(each, torch.Tensor):
            yield each


def _record(
    spec: KernelSpec,
    timing: Timing,
    context: SelectionContext,
    sizes: Sizes,
    source_kernel: str | None,
    surroundings: str,
) -> PerfRecord:
    conditions = machine.conditions(context.device_type)
    return PerfRecord(
        kernel_id=spec.kernel_id,
        operation=context.operation,
        device_id=context.hardware.device_name,
        dtype=context.dtype_name,
        environment=machine.environment(context.device_type),
        workload=canonical(workload(context, source_kernel, sizes)),
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
