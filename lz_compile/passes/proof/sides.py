"""One side of a proof: the source or a kernel is run on given inputs, for its results and for what it does to the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch

from lz_compile.errors import TrialError
from lz_compile.ground import events, health
from lz_compile.ground.isolation import Outside
from lz_compile.lowering import child
from lz_compile.passes.graph.modes import ambient_context
from lz_compile.passes.proof.subgraph import Sizes
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import Match

if TYPE_CHECKING:
    from lz_compile.runtime.kernels.kernel import KernelSpec


@dataclass(frozen=True)
class ProofRun:
    """Outputs, followed by the gradients of the inputs that want one, where these were asked for.

    ``written`` are the inputs that hold something else afterwards; ``is_view``: an output lies in the memory of an input.
    """

    values: Sequence[torch.Tensor]
    written: Sequence[str] = ()
    is_view: bool = False


def run(
    function: Callable[..., Any],
    match: Match,
    inputs: Sequence[Any],
    sizes: Sizes,
    *,
    gradients: bool,
    outside: Outside | None = None,
) -> ProofRun:
    """Run a side under the match's own modes; in float64, which knows no autocast, without ``outside``."""
    with ExitStack() as stack:
        if outside is not None:
            for manager in (outside.entered(), *ambient_context(match.ambient)):
                stack.enter_context(manager)
        stack.enter_context(torch.set_grad_enabled(gradients))
        values = _with_implied(match, inputs, sizes)
        given = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        found = function(*given)
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    results = [output.detach() for output in outputs]
    if gradients:
        results += gradients_of(
            outputs, [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
        )
    tensors = [
        (node.name, *each)
        for node, *each in zip(match.inputs, values, given, strict=True)
        if isinstance(each[0], torch.Tensor)
    ]
    written = tuple(name for name, before, after in tensors if not is_same(before, after))
    return ProofRun(results, written, lies_in(outputs, [after for _, _, after in tensors]))


def run_kernel(kernel: KernelSpec, devices: set[torch.device], run_it: Callable[[], ProofRun]) -> ProofRun:
    """A kernel's side. What is not shipped with this package is run apart, where it can end no process but its own.

    Raises:
        TrialError: the kernel is retired, or it failed, which its own fallback does not make good: not the kernel ran then.
        Exception: what it raises.
    """
    retired = health.retired(kernel.kernel_id)
    if retired is not None:  # its fallback would run
        raise TrialError(kernel.kernel_id, f"is retired ({retired.message})", is_fatal=False)
    with events.collect() as happened:
        if kernel.is_shipped:
            found = run_it()
        else:
            found = ProofRun(*tried(kernel, devices, lambda: astuple(run_it())))
    failures = _failures(happened)
    if failures:
        raise TrialError(kernel.kernel_id, f"failed, and something else gave the result: {failures[0]}", is_fatal=False)
    return found


def tried(kernel: KernelSpec, devices: set[torch.device], run_it: Callable[[], Any]) -> Any:
    """What a kernel that is not shipped gives in a process of its own; one that ends or holds up that one is retired.

    Raises:
        TrialError: it failed.
        Exception: what it raises where it cannot be tried apart.
    """
    with events.collect() as happened:
        try:
            return child.attempt(kernel.kernel_id, run_it, devices)
        except TrialError as error:
            if error.is_fatal:
                health.retire(kernel.kernel_id, error)
            raise
        finally:
            for message in _failures(happened)[:1]:  # it was retired there, and there only
                health.retire(kernel.kernel_id, message)


def _failures(happened: Iterable[events.Event]) -> list[str]:
    """What failed while a fallback went on."""
    return [event.message for event in happened if event.code in health.FAILURE_EVENTS]


def _with_implied(match: Match, inputs: Sequence[Any], sizes: Sizes) -> list[Any]:
    """The inputs, with masks that were proven made again, from those that they depend on: gradients flow to these."""
    values = dict(zip(match.inputs, inputs, strict=True))
    builder = Builder(values.__getitem__, sizes=sizes)
    return [
        match.emitter.implied_value(node, builder, value, sizes)
        if match.found.inputs[node].implied is not None
        else value
        for node, value in values.items()
    ]


def gradients_of(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of a weighted sum of the outputs; zeros where none flows."""
    # Of several outputs, any may be one through which no gradient flows.
    reached = [output for output in outputs if output.requires_grad]
    weights = [_weights(output) for output in reached]
    found = torch.autograd.grad(reached, leaves, weights, allow_unused=True) if reached else [None] * len(leaves)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def _weights(output: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, output.numel(), device=output.device).reshape(output.shape).to(output.dtype)


def is_same(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether two tensors hold the same, NaN included."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return bool(((before == after) | ((before != before) & (after != after))).all())  # noqa: PLR0124 NaN alone differs


def lies_in(outputs: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> bool:
    """Whether an output lies in memory that was given."""
    memory = {each.untyped_storage().data_ptr() for each in given}
    return any(each.numel() and each.untyped_storage().data_ptr() in memory for each in outputs)
