"""Choose a kernel for a match: filter by capability, then by the expected latency.

The expectation is the descriptors' documented prior, relative to Inductor's own code for the untouched subgraph (1.0).
Every candidate keeps its reasons, for and against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lz_compile.lowering import ops
from lz_compile.reasons import Reason
from lz_compile.runtime.registry import KernelSpec, kernels

if TYPE_CHECKING:
    from lz_compile.passes.match import Match

INDUCTOR = "inductor"


@dataclass(frozen=True)
class Candidate:
    """A kernel that was considered: ``against`` holds the reasons why it cannot run (empty: it can)."""

    kernel: KernelSpec
    against: tuple[Reason, ...]
    relative_latency: float

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {
            "kernel": self.kernel.kernel_id,
            "relative_latency": self.relative_latency,
            "against": [reason.to_dict() for reason in self.against],
        }


@dataclass(frozen=True)
class Decision:
    """The kernel for a match, why, and every candidate from the best to the worst; why a lock was not followed."""

    kernel: KernelSpec
    why: str
    candidates: tuple[Candidate, ...]
    refused_lock: Reason | None = None

    @property
    def ranking(self) -> list[KernelSpec]:
        """The kernel, and what to take instead if it proves wrong, in order; the last one is always right."""
        others = [each.kernel for each in self.candidates if not each.against and each.kernel is not self.kernel]
        return [self.kernel, *others]


def select(match: Match, locks: Mapping[str, str]) -> Decision:
    """The kernel for a match.

    Args:
        match: what to run.
        locks: kernel ids by op; a locked kernel is taken whatever its prior, if it can run.
    """
    found = kernels(match.op)
    candidates = sorted((_candidate(spec, match) for spec in found.values()), key=_rank)
    locked = locks.get(match.op)
    refused = None
    if locked is not None:
        chosen = next(candidate for candidate in candidates if candidate.kernel.kernel_id == locked)
        if not chosen.against:
            return Decision(chosen.kernel, "locked", tuple(candidates))
        refused = Reason("LOCK_NOT_POSSIBLE", "; ".join(reason.message for reason in chosen.against))
    best = next(candidate for candidate in candidates if not candidate.against)
    why = f"expected at {best.relative_latency:g} of Inductor's latency"
    return Decision(best.kernel, why, tuple(candidates), refused)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return bool(candidate.against), candidate.relative_latency


def _candidate(spec: KernelSpec, match: Match) -> Candidate:
    facts = match.facts
    dtype = str(facts.dtype).removeprefix("torch.")
    return Candidate(spec, tuple(_reasons(spec, match, dtype)), _relative_latency(spec, facts, dtype))


def _reasons(spec: KernelSpec, match: Match, dtype: str) -> list[Reason]:
    facts, reasons = match.facts, []
    if not {"*", facts.device} & spec.platforms:
        reasons.append(
            Reason("PLATFORM_MISMATCH", f"{spec.kernel_id} runs on {sorted(spec.platforms)}, not {facts.device}")
        )
    if not {"*", dtype} & spec.dtypes:
        reasons.append(Reason("DTYPE_UNSUPPORTED", f"{spec.kernel_id} takes {sorted(spec.dtypes)}, not {dtype}"))
    if "*" not in spec.supports:
        for feature, cause in ops.features(match).items():
            if feature not in spec.supports:
                reasons.append(Reason(f"{feature.upper()}_UNSUPPORTED", f"{spec.kernel_id} does not take {cause}"))
    return reasons


def _relative_latency(spec: KernelSpec, facts: Any, dtype: str) -> float:
    rows = [
        row
        for row in spec.prior
        if row.platform in ("*", facts.device)
        and {"*", dtype} & row.dtypes
        and row.min_query_len <= _hint(facts.query_len)
    ]
    return max(rows, key=lambda row: row.min_query_len).relative_latency if rows else 1.0


def _hint(size: Any) -> int:
    """A symbolic length counts as long."""
    return size if isinstance(size, int) else 1 << 20
