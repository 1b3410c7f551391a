"""Constraint domains that decide together about a token: hard ones by one intersection, soft ones by one sum.

**Source** *Domain Fusion: 5 Domains, 1 Token* (the CLaSH algebra); ASAp (Grammar-Aligned Decoding, NeurIPS 2024) for why one
renormalisation is exact; CRANE (ICML 2025) for phases.
"""

from lz_compile.domains.fusion import DomainScore, FusionResult, fuse, soft_adjustments
from lz_compile.domains.levels import (
    Domain,
    FusionConfig,
    GenerationPhase,
    IntensityLevel,
    active_domains,
    parse_config_json,
    serialize_config_json,
)
from lz_compile.domains.mask import DomainMask, intersect
from lz_compile.domains.phases import THINKING, PhaseDetector, PhaseMarkers

__all__ = [
    "THINKING", "Domain", "DomainMask", "DomainScore", "FusionConfig", "FusionResult", "GenerationPhase", "IntensityLevel",
    "PhaseDetector", "PhaseMarkers", "active_domains", "fuse", "intersect", "parse_config_json", "serialize_config_json",
    "soft_adjustments",
]  # fmt: skip
