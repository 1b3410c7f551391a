"""Several spellings of one computation, checked against eager and timed in turns in one process.

A slow spell of the machine then hits every variant alike, and ratios are taken within a round, where they are paired.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import lz_compile
from lz_compile.backend import layerzero
from lz_compile.runtime.measure.timing import Quartiles, Timing
from lz_compile.runtime.measure.timing import measure as time_in_turns

__all__ = [
    "EAGER", "INDUCTOR", "LAYERZERO", "DisagreementError", "Function", "Prepared", "Quartiles", "Run", "Timing", "Variant",
    "compare", "compiled", "measure", "prepare", "tensors",
]  # fmt: skip

EAGER, INDUCTOR, LAYERZERO = "eager", "inductor", "layerzero"

#: The largest relative error (2-norm over the last axis) that any row of an output may have against eager. The models'
#: own rounding adds up over layers; a wrong mask or scale errs by about 1.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 1e-1,
}

Function = Callable[..., Any]
Run = Callable[[Function], Any]


class DisagreementError(AssertionError):
    """A variant computes something else than eager: its time means nothing."""


@dataclass(frozen=True)
class Variant:
    """A callable that has run once and agrees with eager.

    ``kernels`` is what layerzero ran for what it recognised, with how often ("4x torch.sdpa"), ``refusals`` why not
    something else. ``difference`` is the largest absolute difference from eager, ``row_error`` the largest relative
    error of a row. ``first_call_s`` contains the compile, which is short where Inductor's caches are warm.
    """

    name: str
    call: Callable[[], Any]
    first_call_s: float
    kernels: str
    refusals: tuple[str, ...]
    difference: float
    row_error: float


def compiled(model: Function, locks: Sequence[str] = (), op: str = "attention") -> dict[str, Function]:
    """The model in eager, by Inductor, by layerzero, and by layerzero with ``op`` locked to each of ``locks``."""
    functions: dict[str, Function] = {
        EAGER: model,
        INDUCTOR: torch.compile(model, backend="inductor", dynamic=False),
        LAYERZERO: torch.compile(model, backend=layerzero, dynamic=False),
    }
    for kernel in locks:
        options: dict[str, Any] = {"layerzero.lock": {op: kernel}}
        functions[kernel] = torch.compile(model, backend=layerzero, dynamic=False, options=options)
    return functions


@dataclass(frozen=True)
class Prepared:
    """The variants that agree with eager, and what is wrong with the others, by name."""

    variants: tuple[Variant, ...]
    disagreements: Mapping[str, str]

    def without(self, names: Container[str]) -> Prepared:
        """All but some variants."""
        return replace(self, variants=tuple(variant for variant in self.variants if variant.name not in names))


def prepare(functions: Mapping[str, Function], run: Run, *, is_cold: bool = False) -> Prepared:
    """Compile every function by running it once, and hold its outputs against eager's.

    A variant that disagrees or fails is left out, so that it cannot be timed; whoever publishes the rest must name it.

    Args:
        functions: as :func:`compiled` gives them; the one called ``eager`` is the reference.
        run: calls a function and returns the tensors that must agree (outputs, and gradients in training).
        is_cold: give every function empty caches of Inductor, so that ``first_call_s`` can be compared.
    """
    expected = tensors(run(functions[EAGER]))
    variants, disagreements = [], {}
    if is_cold:
        start_inductor()
    limit = 8 + len(functions)  # past it Dynamo runs eager and says nothing; every variant counts
    for name, function in functions.items():
        try:
            with torch._dynamo.config.patch(recompile_limit=limit):
                variants.append(_prepare(name, function, run, expected, is_cold))
        except DisagreementError as error:
            disagreements[name] = str(error)
        except Exception as error:  # noqa: BLE001 a variant that fails is named like a wrong one; the rest is measured
            disagreements[name] = f"running {name}: {type(error).__name__}: {error}"
    return Prepared(tuple(variants), disagreements)


def _prepare(name: str, function: Function, run: Run, expected: Sequence[Tensor], is_cold: bool) -> Variant:
    before = len(lz_compile.reports())
    with _fresh_caches() if is_cold else contextlib.nullcontext():
        start = time.perf_counter()
        outputs = tensors(run(function))
        first_call_s = time.perf_counter() - start
    difference, row_error = compare(name, outputs, expected)
    report = lz_compile.Report(lz_compile.reports()[before:])
    kernels = Counter(match.kernel for match in report.matches)
    refusals = [str(reason) for match in report.matches for reason in match.reasons]
    return Variant(
        name=name,
        call=lambda: run(function),
        first_call_s=first_call_s,
        kernels=", ".join(f"{count}x {kernel}" for kernel, count in kernels.most_common()),
        refusals=tuple(dict.fromkeys([*refusals, *(f"{event.code}: {event.message}" for event in report.events)])),
        difference=difference,
        row_error=row_error,
    )


def start_inductor() -> None:
    """Compile something small, so that the first variant does not pay for what Inductor sets up once in a process."""
    with _fresh_caches():
        torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(64))


def _fresh_caches() -> contextlib.AbstractContextManager[None]:
    from torch._inductor.utils import fresh_cache

    context: contextlib.AbstractContextManager[None] = fresh_cache()
    return context


def tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def compare(name: str, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """The largest absolute difference, and the largest relative error of a row.

    A row smaller than its tensor's mean row is held against the mean row.

    Raises:
        DisagreementError: the outputs differ in number or shape, or by more than :data:`TOLERANCE`.
    """
    if [output.shape for output in outputs] != [output.shape for output in expected]:
        shapes = ([tuple(output.shape) for output in found] for found in (outputs, expected))
        raise DisagreementError("comparing {} with eager: shapes {}, eager's {}".format(name, *shapes))
    difference, row_error = 0.0, 0.0
    for output, reference in zip(outputs, expected, strict=True):
        wide, deviation = reference.double(), output.double() - reference.double()
        norms = wide.norm(dim=-1)
        errors = deviation.norm(dim=-1) / norms.clamp_min(norms.mean()).clamp_min(1e-30)
        error = errors.nan_to_num(nan=float("inf")).max().item()
        if error > TOLERANCE[reference.dtype]:
            raise DisagreementError(
                f"comparing {name} with eager: a row of {tuple(reference.shape)} {reference.dtype} has a relative "
                f"error of {error:.2e}, rounding gives {TOLERANCE[reference.dtype]:.0e} at most; see lz_compile.explain"
            )
        difference, row_error = max(difference, deviation.abs().max().item()), max(row_error, error)
    return difference, row_error


def measure(
    variants: Sequence[Variant], device: torch.device, *, rounds: int = 15, block_ms: float = 20.0
) -> dict[str, Timing]:
    """Time the variants in turns (see :func:`lz_compile.runtime.measure.timing.measure`)."""
    return time_in_turns({variant.name: variant.call for variant in variants}, device, rounds=rounds, block_ms=block_ms)
