"""Scores of soft domains, summed once and added to logits: log-odds move by what the domains say, and by nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lz_compile.domains.levels import Domain
from lz_compile.domains.mask import has_compiler
from lz_compile.domains.settings import FusionConfig
from lz_compile.errors import ConstraintError
from lz_compile.lowering.cpp import bits

_MOST = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class DomainScore:
    """What a soft domain thinks of every token, from -1 to 1; 0 is no opinion.

    Shapes:
        scores: ``[vocab_size]``, floating point of two bytes at least.

    Raises:
        ConstraintError: the domain is a hard one, a score is NaN or outside of -1..1, or the weight is not finite.
    """

    domain: Domain
    scores: torch.Tensor
    weight: float = 1.0

    def __post_init__(self) -> None:
        name = f"scoring for {self.domain.name}"
        if self.domain.is_hard:
            raise ConstraintError(f"{name}: it is a hard domain, which has a mask (DomainMask) and no scores")
        if not isinstance(self.scores, torch.Tensor):
            raise ConstraintError(f"{name}: expected a tensor of scores, got {type(self.scores).__name__}")
        is_float = self.scores.is_floating_point() and self.scores.itemsize > 1
        if self.scores.dim() != 1 or not is_float or not self.scores.numel():
            found = f"{self.scores.dtype} of shape {list(self.scores.shape)}"
            raise ConstraintError(f"{name}: expected floating-point scores of shape [vocab_size], got {found}")
        if not math.isfinite(self.weight):
            raise ConstraintError(f"{name}: expected a finite weight, got {self.weight}")
        low, high = (float(each) for each in self.scores.detach().aminmax())
        if not (low >= -1 and high <= 1):  # also where they are NaN
            raise ConstraintError(f"{name}: expected scores from -1 to 1, got {low:g} to {high:g}. Scale or clamp them")


def zeros(count: int, device: torch.device) -> torch.Tensor:
    """The adjustments of so many tokens where no domain has a score."""
    return bits.zeros(count) if device.type == "cpu" else torch.zeros(count, device=device)


def soft_adjustments(tokens: torch.Tensor, scores: Sequence[DomainScore], config: FusionConfig) -> torch.Tensor:
    """What is added to the logits of ``tokens``: ``sum(config weight * domain weight * score) / temperature``, in float32.

    Shapes:
        tokens: ``[n]`` integers; the result ``[n]``, zeros where no domain has a score.

    Raises:
        ConstraintError: a token lies outside of a domain's scores, or what scores weigh is not finite in float32.
    """
    if tokens.numel():
        low, high = (int(each) for each in tokens.aminmax())
        for each in scores:
            if low < 0 or high >= each.scores.numel():
                found = f"{each.scores.numel()} scores, tokens {low}..{high}"
                raise ConstraintError(f"scoring for {each.domain.name}: expected a score for every token, got {found}")
    return weighed(tokens, scores, config)


def weighed(tokens: torch.Tensor, scores: Sequence[DomainScore], config: FusionConfig) -> torch.Tensor:
    """As :func:`soft_adjustments`, for tokens that all domains are known to have."""
    if not scores:
        return zeros(tokens.numel(), tokens.device)
    factors = [config.weight_of(each.domain) * each.weight / config.soft_temperature for each in scores]
    if not sum(map(abs, factors)) <= _MOST:
        found = ", ".join(f"{each.domain.name} {factor:g}" for each, factor in zip(scores, factors, strict=True))
        raise ConstraintError(f"scoring: expected weights / temperature that are finite in float32, got {found}")
    own = [each.scores.detach().to(tokens.device) for each in scores]
    if tokens.device.type == "cpu" and len(own) <= 2 and has_compiler():
        dtype = torch.float64 if any(each.dtype == torch.float64 for each in own) else torch.float32
        return bits.weigh(tokens.int().contiguous(), [each.to(dtype).contiguous() for each in own], factors)
    total = torch.zeros(tokens.numel(), dtype=torch.float64, device=tokens.device)
    for each, factor in zip(own, factors, strict=True):
        total.add_(each.index_select(0, tokens), alpha=factor)
    return total.float()
