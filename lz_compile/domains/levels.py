"""The five domains, how many of them an intensity asks, and how a phase of generation relaxes it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import msgspec

from lz_compile.errors import ConfigError, ConstraintError


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


# ---- how domains are fused, and the same as JSON for a serving backend that runs elsewhere ---------------------------


@dataclass(frozen=True)
class FusionConfig:
    """Which domains are asked, and what the scores of soft ones weigh.

    ``intensity`` names the domains; with ``adaptive_switching`` a phase of reasoning is left to syntax alone. What is added
    to a logit is ``weight * score / soft_temperature``.

    Raises:
        ConfigError: the intensity is no level, a weight is not finite, or the temperature is not finite and above zero.
    """

    intensity: IntensityLevel = IntensityLevel.STANDARD
    control_flow_weight: float = 1.0
    semantics_weight: float = 1.0
    adaptive_switching: bool = True
    soft_temperature: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.intensity, IntensityLevel):
            levels = ", ".join(f"IntensityLevel.{level.name}" for level in IntensityLevel)
            raise ConfigError(f"configuring domain fusion: expected one of {levels}, got {self.intensity!r}")
        for name in ("control_flow_weight", "semantics_weight"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"configuring domain fusion: expected a finite {name}, got {getattr(self, name)}")
        if not (math.isfinite(self.soft_temperature) and self.soft_temperature > 0):
            text = f"expected a finite soft_temperature above 0, got {self.soft_temperature}"
            raise ConfigError(f"configuring domain fusion: {text}")

    def weight_of(self, domain: Domain) -> float:
        """What this configuration gives a soft domain.

        Raises:
            ConfigError: the domain is a hard one.
        """
        if domain is Domain.CONTROL_FLOW:
            return self.control_flow_weight
        if domain is Domain.SEMANTICS:
            return self.semantics_weight
        raise ConfigError(
            f"weighing {domain.name}: expected CONTROL_FLOW or SEMANTICS; a hard domain has a mask, no score"
        )


def serialize_config_json(config: FusionConfig) -> str:
    """A configuration as JSON, field by field, as a serving backend carries it in its constraint specification."""
    return msgspec.json.encode(config).decode()


def parse_config_json(text: str | bytes) -> FusionConfig:
    """What :func:`serialize_config_json` wrote; fields that are missing have their defaults.

    Raises:
        ConfigError: it is no JSON, names an unknown field, or a value has the wrong type or range.
    """
    try:
        data = msgspec.json.decode(text)
        unknown = set(data) - set(FusionConfig.__dataclass_fields__) if isinstance(data, dict) else set()
        if unknown:
            raise ConfigError(f"reading a fusion configuration: unknown field {', '.join(sorted(unknown))}")
        return msgspec.convert(data, FusionConfig)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"reading a fusion configuration: {error}") from error
