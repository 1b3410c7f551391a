"""Measure kernels on this machine and keep what was measured, so that selection rests on it.

Every candidate is compiled by Inductor together with what surrounds it, and timed in turns with the others. A kernel that
does not compile or run is an event and is left out. Nothing of the caller's is touched: neither tensors nor random numbers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lz_compile.compile.measuring import Measured, is_measured, measure_forms, runnable
from lz_compile.errors import UnknownOperationError, nearest
from lz_compile.ground.hardware import default_device
from lz_compile.ground.isolation import isolated
from lz_compile.lowering import ops
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem import context as contexts

if TYPE_CHECKING:
    pass

__all__ = ["MASKS", "TuneReport", "tune"]

Sizes = Mapping[str, int]
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
        ValueError: there is no such mask, heads do not divide, or a size or number of samples is below 1.
    """
    if operation not in contexts.operations():
        raise UnknownOperationError("tuning", operation, contexts.operations())
    if mask not in MASKS:
        raise ValueError(f"tuning: no mask '{mask}'{nearest(mask, MASKS)}; valid are {', '.join(MASKS)}")
    where = torch.device(device) if device is not None else default_device()
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    _check_numbers(
        num_heads, kv_heads, head_dim, *seq_lens, *(seq_lens_k or ()), *batch_sizes, 1 if samples is None else samples
    )
    if num_heads % kv_heads:
        raise ValueError(
            f"tuning: expected query heads in a multiple of the key heads, received {num_heads} and {kv_heads}"
        )
    shared = {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim}
    grid = [
        _Problem(op_variant, kind, {"batch_size": batch, "seq_len_q": queries, "seq_len_k": keys, **shared})
        for kind in (dtype if isinstance(dtype, Sequence) else (dtype,))
        for op_variant in _variants(operation)
        for batch, (queries, keys) in itertools.product(batch_sizes, _lengths(seq_lens, seq_lens_k))
    ]
    with isolated():
        return _tune(grid, where, mask, training, samples, budget_s, resume, on_progress)


def _check_numbers(*given: int) -> None:
    wrong = [number for number in given if number < 1]
    if wrong:
        raise ValueError(f"tuning: expected sizes and samples of 1 and more, received {', '.join(map(str, wrong))}")


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
        excluded = policy.current().verdict(context).excluded
        specs = [spec for spec in runnable(context) if excluded(spec.kernel_id) is None]
        if resume and is_measured(context, specs, problem.sizes):
            known += 1
            continue

        def form(call: Callable[..., Any] | None, sample: Any = sample) -> Callable[..., Any]:
            found: Callable[..., Any] = sample.as_written() if call is None else sample.with_kernel(call)
            return found

        with torch.set_grad_enabled(training):
            found = measure_forms(context, specs, form, sample.inputs, problem.sizes, samples=samples)
        if found.latency_us:
            done.append(found)
    return TuneReport(tuple(done), known, 0, time.perf_counter() - start)


def _variants(operation: str) -> list[str]:
    variants = () if "." in operation else contexts.variants(operation)
    return [f"{operation}.{variant}" for variant in variants] or [operation]


def _lengths(queries: Sequence[int], keys: Sequence[int] | None) -> list[tuple[int, int]]:
    return [(q, q) for q in queries] if keys is None else list(itertools.product(queries, keys))
