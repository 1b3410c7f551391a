"""The five domains, how many of them an intensity asks, and how a phase of generation relaxes it."""

from __future__ import annotations

import enum

from lz_compile.errors import ConstraintError


class Domain(enum.Enum):
    """Who has an opinion about a token. Hard domains forbid tokens; soft ones rank those that are left."""

    SYNTAX = "syntax"
    TYPES = "types"
    IMPORTS = "imports"
    CONTROL_FLOW = "control_flow"
    SEMANTICS = "semantics"

    @property
    def is_hard(self) -> bool:
        """Whether it forbids, rather than ranks."""
        return self in RELAXED_FIRST


#: Hard domains, the first to be dropped where no token is left first: imports are likeliest to be wrong, syntax is essential.
RELAXED_FIRST = (Domain.IMPORTS, Domain.TYPES, Domain.SYNTAX)

_SYNTAX = frozenset({Domain.SYNTAX})
_ALL = frozenset(Domain)


class IntensityLevel(enum.Enum):
    """How many domains are asked, and how long that may take for one token.

    FULL and EXHAUSTIVE ask the same domains; with EXHAUSTIVE whoever computes masks and scores may take longer.
    """

    NONE = "none"
    SYNTAX_ONLY = "syntax_only"
    STANDARD = "standard"
    FULL_HARD = "full_hard"
    FULL = "full"
    EXHAUSTIVE = "exhaustive"

    @property
    def active(self) -> frozenset[Domain]:
        """The domains that are asked."""
        return _LEVELS[self][0]

    @property
    def budget_us(self) -> int:
        """What all of them may take for one token, in microseconds."""
        return _LEVELS[self][1]


_LEVELS = {
    IntensityLevel.NONE: (frozenset[Domain](), 0),
    IntensityLevel.SYNTAX_ONLY: (_SYNTAX, 50),
    IntensityLevel.STANDARD: (_SYNTAX | {Domain.TYPES}, 200),
    IntensityLevel.FULL_HARD: (frozenset(RELAXED_FIRST), 500),
    IntensityLevel.FULL: (_ALL, 2_000),
    IntensityLevel.EXHAUSTIVE: (_ALL, 5_000),
}


class GenerationPhase(enum.Enum):
    """What a model is writing: thoughts, something formal, or the boundary between them."""

    REASONING = "reasoning"
    STRUCTURED_OUTPUT = "structured_output"
    TRANSITION = "transition"


def active_domains(
    intensity: IntensityLevel, phase: GenerationPhase | None = None, *, is_adaptive: bool = True
) -> frozenset[Domain]:
    """The domains to ask: those of the intensity; while a model reasons, syntax alone.

    Args:
        intensity: how many domains are wanted.
        phase: None where it is uncertain, which counts as STRUCTURED_OUTPUT: an error of syntax in code is worse than
            a thought that reads less well.
        is_adaptive: whether the phase matters at all.

    Raises:
        ConstraintError: it is no phase (its name, say), which would otherwise count as structured output.
    """
    if phase is not None and not isinstance(phase, GenerationPhase):
        raise ConstraintError(f"asking domains: expected a GenerationPhase or None, got {phase!r}")
    if is_adaptive and phase is GenerationPhase.REASONING:
        return intensity.active & _SYNTAX
    return intensity.active
