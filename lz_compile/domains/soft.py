"""Scores of soft domains, summed once and added to logits: log-odds move by what the domains say, and by nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lz_compile.domains.levels import Domain
from lz_compile.domains.settings import FusionConfig
from lz_compile.errors import ConstraintError


@dataclass(frozen=True, eq=False)
class DomainScore:
    """What a soft domain thinks of every token, from -1 to 1; 0 is no opinion.

    Shapes:
        scores: ``[vocab_size]``, floating point.

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
        if self.scores.dim() != 1 or not self.scores.is_floating_point() or not self.scores.numel():
            found = f"{self.scores.dtype} of shape {list(self.scores.shape)}"
            raise ConstraintError(f"{name}: expected floating-point scores of shape [vocab_size], got {found}")
        if not math.isfinite(self.weight):
            raise ConstraintError(f"{name}: expected a finite weight, got {self.weight}")
        low, high = (float(each) for each in self.scores.aminmax())
        if not (low >= -1 and high <= 1):  # also where they are NaN
            raise ConstraintError(f"{name}: expected scores from -1 to 1, got {low:g} to {high:g}. Scale or clamp them")


def soft_adjustments(tokens: torch.Tensor, scores: Sequence[DomainScore], config: FusionConfig) -> torch.Tensor:
    """What is added to the logits of ``tokens``: ``sum(config weight * domain weight * score) / temperature``, in float32.

    Shapes:
        tokens: ``[n]`` ids; the result ``[n]``, zeros where no domain has a score.

    Raises:
        ConstraintError: a token lies outside of a domain's scores.
    """
    if not scores:
        return torch.zeros(tokens.numel())
    total = torch.zeros(tokens.numel(), dtype=torch.float64)
    for each in scores:
        if tokens.numel() and int(tokens[-1]) >= each.scores.numel():
            found = f"{each.scores.numel()} scores, token {int(tokens[-1])}"
            raise ConstraintError(f"scoring for {each.domain.name}: expected a score for every token, got {found}")
        picked = each.scores.index_select(0, tokens).double()
        total.add_(picked, alpha=config.weight_of(each.domain) * each.weight / config.soft_temperature)
    return total.float()
