"""Measure kernels on this machine and keep what was measured, so that selection rests on it.

Every candidate is compiled by Inductor together with what surrounds it, and timed in turns with the others. A kernel that
does not compile or run is an event and is left out. Nothing of the caller's is touched: neither tensors nor random numbers.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lz_compile.api.arguments import Arguments
from lz_compile.api.given import check_operation
from lz_compile.api.sampled import SizedProblem, Sizes, grid
from lz_compile.compile.measuring import Measured, is_measured, measure_forms, runnable
from lz_compile.errors import ArgumentError, nearest
from lz_compile.ground.isolation import isolated
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem import context as contexts

MASKS = ("none", "bool", "float")


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
        return {
            "schema_version": "1.0",
            "measured": rows,
            "known": self.known,
            "remaining": self.remaining,
            "seconds": round(self.seconds, 3),
        }

    def save_chart(self, path: str | os.PathLike[str]) -> int:
        """Draw what was measured: latency over size for each kernel, the one that is chosen now, and where that changes.

        Args:
            path: its ending says how: ``.svg``, ``.png`` or ``.pdf``.

        Returns:
            how many problems there are that differ in more than one size; the first 12 are drawn.

        Raises:
            ArgumentError: nothing was measured, the path ends in something else, or matplotlib is not installed.
        """
        from lz_compile.report import charts
        from lz_compile.runtime.choose.problem import Problem
        from lz_compile.runtime.choose.select import select

        samples = [
            charts.of_problem(
                each.context.to_dict(),
                each.latency_us,
                select(Problem(each.context), policy.current()).kernel.kernel_id,
            )
            for each in self.measured
        ]
        return charts.latencies(samples, Path(path), "TuneReport.save_chart")


def tune(
    operation: str = "attention",
    *,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    sizes: Sizes | None = None,
    head_dim: int | None = None,
    seq_lens: Sequence[int] | None = None,
    seq_lens_k: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    mask: str = "none",
    training: bool = False,
    device: torch.device | str | None = None,
    samples: int | None = None,
    budget_s: float | None = None,
    resume: bool = True,
    on_progress: Callable[[int, int, str], None] | None = None,
    **unknown: Any,
) -> TuneReport:
    """Measure every kernel of an operation over a grid of problems, and keep the latencies in the database.

    Args:
        operation: an op (every variant of it), or a variant, as ``attention.causal`` or ``norm.rms``.
        dtype: of the operands; several are measured one after the other.
        sizes: one or several of each of the op's sizes by name, as ``{"num_rows": (512, 4096), "hidden_size": 1024}``; what
            is left out is typical of the op.
        head_dim: of query, key and value of attention, by default 64; this and the next five say of it what ``sizes`` says.
        seq_lens: query lengths, by default 128, 512 and 2048.
        seq_lens_k: key lengths, each combined with every query length; by default that of the query.
        batch_sizes: batch sizes, by default 1.
        num_heads: query heads, by default 8.
        num_kv_heads: key heads, by default those of the query.
        mask: of attention: ``none``, ``bool`` or ``float``.
        training: measure forward and backward.
        device: by default the accelerator, or the CPU where there is none.
        samples: rounds for each problem (default: the policy's ``perfdb.tune_samples``).
        budget_s: stop before a problem that would begin after that many seconds.
        resume: skip problems that are measured already, in this environment and for all kernels that can run.
        on_progress: is called with the number of problems done, of all problems, and the next one in words.
        unknown: nothing; a misspelt argument is told the nearest one, and the sizes of the op.

    Units:
        latencies in µs, budgets in seconds.

    Raises:
        UnknownOperationError: there is no such operation.
        ArgumentError: there is no such argument.
        ArgumentError: the op has no such size, or what is attention's is given for another op.
        ValueError: there is no such mask, heads do not divide, or a size or number of samples is below 1.
    """
    check_operation("tuning", operation)
    for name in unknown:
        raise _unknown(name, operation)
    arguments = Arguments("tune")
    arguments.instance(
        "sizes", sizes, Mapping, "as one or several numbers by name, {'num_rows': (512, 4096)}", optional=True
    )
    named = {
        "batch_size": batch_sizes,
        "seq_len_q": seq_lens,
        "seq_len_k": seq_lens_k,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    given: dict[str, int | Sequence[int]] = {name: value for name, value in named.items() if value is not None}
    dtypes = list(dtype) if isinstance(dtype, Sequence) and not isinstance(dtype, str) else [dtype]
    problems = grid("tune", operation, dtypes, _sizes(operation, given, sizes or {}))
    arguments.number("samples", samples, 1, whole=True, optional=True)
    arguments.number("budget_s", budget_s, 0, optional=True)
    arguments.instance("on_progress", on_progress, Callable, "as a function", optional=True)
    for name, value in (("training", training), ("resume", resume)):
        arguments.flag(name, value)
    where = arguments.device("device", device)
    arguments.instance("mask", mask, str, f"as one of {', '.join(MASKS)}")
    details = {} if mask == "none" else {"mask": mask}
    if details and (not operation.startswith("attention") or mask not in MASKS):
        valid = f"as one of {', '.join(MASKS)}, for attention"
        raise ArgumentError(
            "tune", "mask", valid, f"'{mask}'{'' if mask in MASKS else nearest(mask, MASKS)} for {operation}"
        )
    heads = [each.sizes for each in problems if each.op == "attention"]
    wrong = next((each for each in heads if each["num_heads"] % each["num_kv_heads"]), None)
    if wrong is not None:
        expected = "in a multiple of the key heads"
        raise ArgumentError("tune", "query heads", expected, f"{wrong['num_heads']} and {wrong['num_kv_heads']}")
    with isolated():
        return _tune(problems, where, details, training, samples, budget_s, resume, on_progress)


def _unknown(name: str, operation: str) -> ArgumentError:
    valid = [each for each in inspect.signature(tune).parameters if each != "unknown"]
    op = operation.partition(".")[0]
    sizes = contexts.dim_names(op)
    advice = f"Arguments are {', '.join(valid)}; sizes of {op}, given as sizes={{name: ...}}, are {', '.join(sizes)}"
    received = f"'{name}'{nearest(name, [*valid, *sizes])}"
    return ArgumentError("tune", "arguments", "by names that it has", received, advice)


def _sizes(operation: str, given: Sizes, sizes: Sizes) -> Sizes:
    """The sizes by name, those of attention's own arguments among them."""
    if given and operation.partition(".")[0] != "attention":
        expected = "(and other arguments of attention) for attention only"
        raise ArgumentError("tune", next(iter(given)), expected, operation, "Give sizes={...}, by name")
    twice = sorted(given.keys() & sizes.keys())
    if twice:
        raise ArgumentError("tune", twice[0], "once", "two, one of them in sizes")
    return {**given, **sizes}


def _tune(
    grid: Sequence[SizedProblem],
    device: torch.device,
    details: Mapping[str, Any],
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
        sample = problem.sample(device, training=training, **details)
        context = contexts.of_facts(problem.op, sample.attrs, sample.facts, device=device)
        excluded = policy.current().resolved_policy(context).excluded
        specs = [spec for spec in runnable(context) if excluded(spec.kernel_id) is None]
        for spec in specs:
            spec.load(waits=True)
        if resume and is_measured(context, specs, context.hints()):
            known += 1
            continue

        def form(call: Callable[..., Any] | None, sample: Any = sample) -> Callable[..., Any]:
            found: Callable[..., Any] = sample.as_written() if call is None else sample.with_kernel(call)
            return found

        with torch.set_grad_enabled(training):
            found = measure_forms(context, specs, form, sample.inputs, context.hints(), samples=samples)
        if found.latency_us:
            done.append(found)
    return TuneReport(tuple(done), known, 0, time.perf_counter() - start)
