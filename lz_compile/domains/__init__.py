"""Constraint domains that decide together about a token: hard ones by one intersection, soft ones by one sum.

**Source** *Domain Fusion: 5 Domains, 1 Token* (the CLaSH algebra); ASAp (Grammar-Aligned Decoding, NeurIPS 2024) for why one
renormalisation is exact; CRANE (ICML 2025) for phases.
"""

from lz_compile.domains.fusion import FusionResult, fuse
from lz_compile.domains.levels import Domain, GenerationPhase, IntensityLevel, active_domains
from lz_compile.domains.mask import DomainMask, intersect
from lz_compile.domains.phases import THINKING, PhaseDetector, PhaseMarkers
from lz_compile.domains.settings import FusionConfig, parse_config_json, serialize_config_json
from lz_compile.domains.soft import DomainScore, soft_adjustments

__all__ = [
    "THINKING",
    "Domain",
    "DomainMask",
    "DomainScore",
    "FusionConfig",
    "FusionResult",
    "GenerationPhase",
    "IntensityLevel",
    "PhaseDetector",
    "PhaseMarkers",
    "active_domains",
    "fuse",
    "intersect",
    "parse_config_json",
    "serialize_config_json",
    "soft_adjustments",
]
