"""How domains are fused, and the same as JSON for a serving backend that runs elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from lz_compile.domains.levels import Domain, IntensityLevel
from lz_compile.errors import ConfigError


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
