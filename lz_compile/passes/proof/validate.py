"""Prove a rewrite numerically before it is accepted.

The original subgraph and its replacement run at small sizes on adversarial inputs: rows that are masked completely, large
magnitudes, unusual strides, extents of one. Both are held against the original in float64. The replacement may round
less than the original, never noticeably more; where gradients are on, the same holds for them.

Results are remembered by structure, in memory and on disk, so that equal layers and later processes pay nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch
from torch import fx

from lz_compile.ground import machine
from lz_compile.ground.isolation import Outside, isolated
from lz_compile.ground.store import Store
from lz_compile.lowering import ops
from lz_compile.passes.formula.axes import axes_of
from lz_compile.passes.graph.gradients import has_gradient
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.snapshot import described
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.proof.agreement import TOLERANCE, Special, doubled, elementwise
from lz_compile.passes.proof.cases import Case, cases, inputs_of, run_kernel, some_axes
from lz_compile.passes.proof.cases import run as run_side
from lz_compile.passes.proof.resize import resized, shape, whole
from lz_compile.passes.proof.running import Sizes, Subgraph
from lz_compile.passes.proof.sizes import real_sizes, representative_sizes
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.rewrite import KernelCall, emit

if TYPE_CHECKING:
    from lz_compile.runtime.kernels.kernel import KernelSpec


def verdict_key(match: Match, source: Subgraph, kernel_id: str, real: Sizes | None) -> str:
    """A hash of everything that the verdict depends on, and of nothing else (no names; real sizes if they are tried).

    What runs the kernel is part of it: its code may differ between instruction sets and compilers. ``source`` is what is
    replaced, at small sizes.
    """
    sizes = representative_sizes(match)
    order: dict[fx.Node, str] = {}
    ambient = match.site.ambient
    lines = [f"{match.op} {kernel_id} {match.found.attributes!r} {ambient!r} {grad_enabled(ambient)}"]
    lines += [repr(Outside.now()), *sorted({machine.proven_on(device) for device in devices_of(match)})]
    for index, (node, known) in enumerate(match.found.inputs.items()):
        order[node] = f"i{index}"
        tensor = tensor_of(node)
        kind = "number" if tensor is None else f"{tensor.dtype} {tensor.device.type} {tensor.requires_grad}"
        lines.append(f"i{index} {kind} {shape(match.inputs[node], sizes)} {known.fill}")
        lines += [] if real is None else [f"{shape(match.inputs[node], real)}"]
        lines.append(f"{bool(known.rows)} {bool(known.dropped)} {known.selects}")
        lines.append(f"{known.keeps} {known.implied} {known.range} {known.scale}")
    calls = [*source.inputs, *source.nodes]
    lines += [*described(calls, source.held), str([calls.index(node) for node in source.outputs])]
    axes = {axis: f"a{i}" for i, axis in enumerate(sizes)}
    for node, known in match.found.inputs.items():
        counted = known.counts and (axes[known.counts], known.is_shuffled)
        lines.append(f"{order[node]} {[[axes[a] for a in axes_of((dim,))] for dim in known.dims]} {counted}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def devices_of(match: Match) -> set[torch.device]:
    """Where the inputs and outputs of a match are."""
    return {tensor.device for tensor in map(tensor_of, (*match.inputs, *match.outputs)) if tensor is not None}


_Error = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Validation:
    """The verdict on one rewrite.

    ``error`` and ``source_error`` are the largest absolute deviations from float64 (of outputs) of the replacement and of
    the original; ``grad_error`` that of gradients. ``reason`` says what failed. ``origin`` is ``"run"``, ``"memory"`` or
    ``"disk"``, ``seconds`` what it cost now.
    """

    ok: bool
    error: float = 0.0
    source_error: float = 0.0
    grad_error: float | None = None
    cases: int = 0
    reason: str = ""
    origin: str = "run"
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {
            "ok": self.ok,
            "error": self.error,
            "source_error": self.source_error,
            "grad_error": self.grad_error,
            "cases": self.cases,
            "reason": self.reason,
            "origin": self.origin,
            "seconds": round(self.seconds, 4),
        }


_memory: dict[str, Validation] = {}


def forget() -> None:
    """Drop what was remembered in memory (not on disk)."""
    _memory.clear()


def validate(match: Match, kernel: KernelSpec, call: KernelCall, store: Store | None) -> Validation:
    """Whether ``call``, which is that of a kernel, may replace ``match``.

    It is remembered by structure, dtypes, attributes, modes, machine, kernel and source version; what is not shipped with
    this package is also tried at the real sizes, and remembered for these.

    Raises:
        TrialError: the kernel failed, or nothing can be found out about it.
        Exception: what the kernel raises.
    """
    real = None if kernel.is_shipped else real_sizes(match)
    source = _Source(whole(match))
    key = verdict_key(match, source.at(representative_sizes(match)), kernel.identity, real)
    return recalled(key, store, lambda: _run(match, source, kernel, call, real))


def recalled(key: str, store: Store | None, run: Callable[[], Validation]) -> Validation:
    """The verdict that is known under a key, in memory or on disk; else that of ``run``, which is known from then on."""
    start = time.perf_counter()
    known = _memory.get(key)
    if known is not None:
        return replace(known, origin="memory", seconds=time.perf_counter() - start)
    verdict = None if store is None else _stored(store, key)
    if verdict is not None:
        _memory[key] = verdict
        return replace(verdict, origin="disk", seconds=time.perf_counter() - start)
    verdict = run()
    _memory[key] = verdict
    if store is not None:
        store.save(key, verdict.to_dict())
    return replace(verdict, seconds=time.perf_counter() - start)


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """A verdict on disk: :meth:`Validation.to_dict`, of a run that tried something."""

    ok: bool
    error: _Error
    source_error: _Error
    grad_error: _Error | None
    cases: Annotated[int, msgspec.Meta(ge=1)]
    reason: str
    origin: Literal["run"]
    seconds: _Error


@dataclass(frozen=True)
class _Source:
    """What is replaced, at the sizes at which it is tried: each is made once."""

    whole: Subgraph
    _known: dict[tuple[Any, ...], Subgraph] = field(default_factory=dict)

    def at(self, sizes: Sizes, dtype: torch.dtype | None = None) -> Subgraph:
        """At these sizes, in its own dtypes or another one."""
        key = (dtype, *sizes.items())
        if key not in self._known:
            self._known[key] = resized(self.whole, sizes, dtype)
        return self._known[key]


def _stored(store: Store, key: str) -> Validation | None:
    record = store.load(key, _Record)
    return None if record is None else Validation(**msgspec.structs.asdict(record))


def _run(match: Match, source: _Source, kernel: KernelSpec, call: KernelCall, real: Sizes | None) -> Validation:
    total = Validation(ok=True)
    tried = list(cases(match))  # which gradients are wanted, is decided outside
    if real is not None:
        tried.append(replace(tried[0], name="real sizes"))
    with isolated() as outside:
        for case in tried:
            small = representative_sizes(match, ones=some_axes(match) if case.ones else frozenset())
            sizes = real if real is not None and case is tried[-1] else small
            total = _merge(total, _run_case(match, source, kernel, call, case, sizes, outside))
            if not total.ok:
                break
    return total


def _merge(total: Validation, case: Validation) -> Validation:
    grads = [error for error in (total.grad_error, case.grad_error) if error is not None]
    return replace(
        total,
        ok=case.ok,
        error=max(total.error, case.error),
        source_error=max(total.source_error, case.source_error),
        grad_error=max(grads) if grads else None,
        cases=total.cases + 1,
        reason=case.reason,
    )


def _run_case(
    match: Match, source: _Source, kernel: KernelSpec, call: KernelCall, case: Case, sizes: Sizes, outside: Outside
) -> Validation:
    inputs = inputs_of(match, sizes, case)
    replaced = partial(run_side, _replacement(match, call, sizes), match, inputs, sizes)
    ours = run_kernel(kernel, devices_of(match), partial(replaced, gradients=case.gradients, outside=outside))
    given = run_side(source.at(sizes).run, match, inputs, sizes, gradients=case.gradients, outside=outside)
    exact = source.at(sizes, torch.float64).run
    truth = run_side(exact, match, [*map(doubled, inputs)], sizes, gradients=case.gradients)
    if ours.written:
        return Validation(ok=False, reason=f"it writes into {', '.join(ours.written)}, with {case.name}")
    if ours.is_view and not given.is_view:
        return Validation(ok=False, reason=f"its result lies in the memory of an input, with {case.name}")
    return _compared(match, case, truth.values, given.values, ours.values)


def _replacement(match: Match, call: KernelCall, sizes: Sizes) -> Callable[..., Any]:
    """The kernel with the code around it that :func:`rewrite.splice` emits, as a function of the match's inputs."""

    def run(*inputs: Any) -> Any:
        values = dict(zip(match.inputs, inputs, strict=True))
        attributes = match.found.emitter.attributes_at(sizes).deterministic()
        return emit(Builder(values.__getitem__, sizes=sizes), match, call, attributes)

    return run


def _compared(
    match: Match, case: Case, truth: Sequence[torch.Tensor], given: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]
) -> Validation:
    """The verdict on results: float64's, the source's and the kernel's."""
    outputs = [tensor_of(node) for node in match.outputs]
    grown = max(case.magnitude, 1.0) ** getattr(ops.module(match.op), "ROUNDING_POWER", 0)
    is_filled = any(each.fill is not None for each in match.found.inputs.values())
    verdict = Validation(ok=True)
    for index, (name, expected, base, actual) in enumerate(zip(_names(match, case), truth, given, ours, strict=True)):
        output = outputs[index] if index < len(outputs) else None
        slack = TOLERANCE.get(base.dtype if output is None else output.dtype, 0.0) * grown
        # A lowest number that is added to float16 scores may overflow by rounding; one that is filled in does not.
        special = Special(not case.masked_rows, not is_filled, case.is_poisoned)
        error, source_error, is_near = elementwise(expected, base, actual, slack, special)
        if output is not None:
            errors = max(verdict.error, error), max(verdict.source_error, source_error)
            verdict = replace(verdict, error=errors[0], source_error=errors[1])
        else:
            verdict = replace(verdict, grad_error=max(verdict.grad_error or 0.0, error))
        if not bool(is_near.all()):
            told = f"off by {error:.3g} where the source is off by {source_error:.3g}"
            apart = _special(base[~is_near], actual[~is_near], is_poisoned=case.is_poisoned)
            return replace(verdict, ok=False, reason=f"{name} with {case.name}: {apart or told}")
    return verdict


def _special(given: torch.Tensor, ours: torch.Tensor, *, is_poisoned: bool) -> str | None:
    """What sets wrong elements apart that no error counts: it is of finite numbers."""
    finite, other = given.isfinite(), ours.isfinite()
    if bool((finite & ~other).any()):
        hides = (
            ", which hides what is NaN in an operand (assume_finite=True promises that nothing is)"
            if is_poisoned
            else ""
        )
        return f"NaN or infinite where the source is finite{hides}"
    return "finite where the source is NaN or infinite" if bool((other & ~finite).any()) else None


def _names(match: Match, case: Case) -> list[str]:
    outputs = [f"output {node.name}" for node in match.outputs] if match.site.extra_outputs else ["output"]
    if not case.gradients:
        return outputs
    return [*outputs, *(f"gradient of {node.name}" for node in match.inputs if has_gradient(node))]
