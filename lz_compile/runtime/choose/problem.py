"""What a kernel is chosen for, what it is chosen from, and what comes out, with its reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from lz_compile.ground.records import Reason
from lz_compile.runtime.choose.agreed import Agreement
from lz_compile.runtime.choose.calls import DISPATCH
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.measure.estimate import INDUCTOR, Estimate
from lz_compile.runtime.problem.context import SelectionContext, Symbols
from lz_compile.runtime.problem.decision_tree import Node

#: What a kernel must save of Inductor's latency, beyond the noise, to be taken.
MARGIN = 0.03


@dataclass(frozen=True)
class Candidate:
    """A kernel that was considered: ``against`` holds the reasons why it cannot run (empty: it can).

    ``score`` is its speed in percent of Inductor's, plus what preferences add.
    """

    kernel: KernelSpec
    against: tuple[Reason, ...]
    estimate: Estimate
    score: float
    notes: tuple[Reason, ...] = ()

    def beats(self, incumbent: Candidate | None) -> bool:
        """Whether it saves more of the incumbent's latency than the margin, and than the noise of either."""
        if incumbent is None:
            return True
        noises = [each.estimate.noise for each in (self, incumbent) if each is self or each.estimate.is_measured]
        return 1 - incumbent.score / self.score > max(MARGIN, math.hypot(*noises))

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {
            "kernel": self.kernel.kernel_id,
            "score": round(self.score, 2),
            **self.estimate.to_dict(),
            "against": [reason.to_dict() for reason in self.against],
            "notes": [reason.to_dict() for reason in self.notes],
        }


@dataclass(frozen=True)
class Decision:
    """The kernel for a problem, why, and every candidate from the best to the worst; why a lock or table was not followed.

    ``agreement`` says which ranks decide alike, ``refused_agreed`` why this one could not follow them.
    ``tree`` is the decision over symbolic sizes that ``kernel`` is one leaf of; ``asked`` are the questions that became
    guards, with their answers.
    """

    kernel: KernelSpec
    why: str
    candidates: tuple[Candidate, ...]
    refused_lock: Reason | None = None
    tree: Node | None = None
    asked: tuple[str, ...] = field(default=())
    refused_table: Reason | None = None
    refused_agreed: Reason | None = None
    agreement: Agreement | None = None

    @property
    def ranking(self) -> list[KernelSpec]:
        """The kernel, and what to take instead if it proves wrong, in order: what beats Inductor, and Inductor itself.

        The last one is always right.
        """
        last = (self.kernel.kernel_id, DISPATCH)  # which is right, but never better than leaving it alone
        others = [each for each in self.candidates if not each.against and each.kernel.kernel_id not in last]
        if self.kernel.kernel_id == INDUCTOR:
            return [self.kernel]
        base = next((each for each in others if each.kernel.kernel_id == INDUCTOR), None)
        return [self.kernel, *(each.kernel for each in others if each is base or each.beats(base))]


@dataclass(frozen=True)
class Problem:
    """What to choose a kernel for: the context, what the source calls itself, and what surrounds it.

    ``left_as`` is the kernel that Inductor makes of it by itself, as far as that is known: what is left alone takes as long.
    ``symbols`` are given where sizes are symbolic and questions about them may become guards. ``is_eager`` stands for a
    call that nobody compiles: it takes a kernel that is one call, by default PyTorch's own. ``attributes`` are the op's,
    which a proof depends on, and no choice.
    """

    context: SelectionContext
    source_kernel: str | None = None
    surroundings: str = ""
    symbols: Symbols | None = None
    is_eager: bool = False
    left_as: str | None = None
    attributes: str = ""

    @property
    def alone(self) -> str | None:
        """The kernel that runs where it is left alone, None for Inductor's own code, and for one that runs over copies."""
        return self.source_kernel or (self.left_as if self.context.copies == 1 else None)

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {
            **self.context.to_dict(),
            "source_kernel": self.source_kernel,
            "surroundings": self.surroundings,
            **({"is_eager": True} if self.is_eager else {}),
            **({"left_as": self.left_as} if self.left_as is not None else {}),
        }
