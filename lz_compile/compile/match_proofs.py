"""A kernel for a match on this rank: whether its library imports, and whether it proves to be right."""

from __future__ import annotations

import torch

from lz_compile.compile.stages import State, timed
from lz_compile.errors import RewriteFailedError
from lz_compile.ground import events
from lz_compile.ground.records import Reason
from lz_compile.passes.graph.view import is_subclass, tensor_of
from lz_compile.passes.rewriting.match import Match
from lz_compile.report.report import MatchReport
from lz_compile.runtime.kernels.kernel import KernelSpec


def why_aside(match: Match) -> Reason | None:
    """Why no kernel is asked for: nobody reads what it would give, or its results are no plain tensors with numbers."""
    if not any(node.users for node in match.outputs):
        return Reason("PART_OF_ANOTHER", "a rewrite of what it is part of made it superfluous")
    tensors = [tensor for tensor in map(tensor_of, match.outputs) if tensor is not None]
    away = next((each.device.type for each in tensors if not _is_here(each.device.type)), None)
    if away is not None:
        return Reason(
            "NO_NUMBERS", f"it is on a device {away}, where nothing can be run here that would prove a kernel"
        )
    given = next((each for each in tensors if is_subclass(each)), None)
    if given is None:
        return None
    return Reason(
        "TENSOR_SUBCLASS", f"it gives a {type(given).__name__}, which is made of other tensors; kernels give plain ones"
    )


def _is_here(device: str) -> bool:
    """Whether a kind of device computes numbers on this machine; graphs are also made for others, with fake tensors."""
    if device in ("cpu", "meta"):
        return device == "cpu"
    module = getattr(torch, device, None)  # none where nobody registered one, as for "xla"
    return module is not None and (not hasattr(module, "is_available") or bool(module.is_available()))


def is_loaded(match: Match, kernel: KernelSpec, entry: MatchReport, state: State) -> bool:
    """Whether a kernel's library can be imported; why not is noted. One waits for a kernel that was asked for by name."""
    lock = state.choices.policy.resolved_policy(state.choices.problem(match).context).lock
    missing = kernel.load(waits=not state.choices.is_dry and (state.options.strict or kernel.kernel_id == lock))
    if missing is not None:
        entry.reasons.append(missing)
    return missing is None


def proven(match: Match, kernel: KernelSpec, entry: MatchReport, state: State) -> bool:
    """Whether a kernel is right for a match; it is quarantined if not."""
    subject = state.choices.subject(match, kernel)
    with timed(state.report, "validate", operation=match.op, kernel=kernel.kernel_id, where=match.site.where) as span:
        verdict = state.choices.prove(subject, kernel)
        span.set(is_proven=verdict.ok, reason=None if verdict.ok else str(verdict.reason))
    entry.validation = {"kernel": kernel.kernel_id, **verdict.to_dict()}
    if not verdict.ok:
        text = f"{kernel.kernel_id} for {match.op} at {match.site.where} is quarantined: {verdict.reason}"
        events.record("VALIDATION_FAILED", text)
        entry.reasons.append(Reason("VALIDATION_FAILED", f"{kernel.kernel_id}: {verdict.reason}"))
        if state.options.strict:
            raise RewriteFailedError(text)
    return verdict.ok


def why_not(match: Match, entry: MatchReport, state: State, kernel: KernelSpec) -> Reason | None:
    """Why other ranks are not to follow with a kernel: on this one it does not load, or proves wrong."""
    if kernel.call is None or kernel.kernel_id == match.found.source_kernel:
        return None
    try:
        is_right = is_loaded(match, kernel, entry, state) and proven(match, kernel, entry, state)
    except Exception as error:  # noqa: BLE001 as where it is put in: it is an event, and the next one is tried
        state.fail("REWRITE_FAILED", f"{kernel.kernel_id} for {match.op} at {match.site.where} is no candidate", error)
        entry.reasons.append(Reason("REWRITE_FAILED", f"{kernel.kernel_id}: {type(error).__name__}: {error}"))
        return entry.reasons[-1]
    return None if is_right else entry.reasons[-1]
