"""One decision of all domains about the next token: one intersection, one sum, so that one renormalisation is exact."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lz_compile.domains.levels import RELAXED_FIRST, Domain, GenerationPhase, active_domains
from lz_compile.domains.mask import DomainMask, ids_of, intersect, pack
from lz_compile.domains.settings import FusionConfig
from lz_compile.domains.soft import DomainScore, soft_adjustments
from lz_compile.errors import ConstraintError
from lz_compile.runtime import events

_DEFAULT = FusionConfig()


@dataclass(frozen=True, eq=False)
class FusionResult:
    """What the domains agreed upon.

    ``logit_adjustments[i]`` is what soft domains add to the logit of ``feasible_tokens[i]``. ``active_domains`` were asked;
    ``relaxed`` are those of them that were dropped, in this order, because no token was left (``required_relaxation``).
    ``elapsed_us`` is what the fusion took, ``budget_us`` what the intensity allows for it and for the domains themselves.

    Shapes:
        feasible_tokens ``[n]`` int32, ascending; logit_adjustments ``[n]`` float32; words ``[ceil(vocab_size / 32)]`` int32,
        the same tokens as bits.
    """

    feasible_tokens: torch.Tensor
    logit_adjustments: torch.Tensor
    active_domains: frozenset[Domain]
    required_relaxation: bool
    relaxed: tuple[Domain, ...]
    words: torch.Tensor
    vocab_size: int
    elapsed_us: float
    budget_us: int

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with the adjustments of feasible tokens added, and minus infinity for all others; softmax is then exact.

        Shapes:
            logits ``[..., vocab_size]``; the result is like them.

        Raises:
            ConstraintError: they are for another vocabulary, or no token is feasible (the relaxation was declined).
        """
        if logits.shape[-1] != self.vocab_size:
            found = f"logits of shape {list(logits.shape)}"
            raise ConstraintError(
                f"applying a fusion: expected {self.vocab_size} tokens in the last dimension, got {found}"
            )
        if not self.feasible_tokens.numel():
            raise ConstraintError("applying a fusion: no token is feasible. Call fuse() with may_relax=True")
        tokens = self.feasible_tokens.to(logits.device, torch.int64)
        kept = logits.index_select(-1, tokens) + self.logit_adjustments.to(logits.device, logits.dtype)
        return torch.full_like(logits, float("-inf")).index_copy(-1, tokens, kept)


def fuse(
    hard: Sequence[DomainMask],
    soft: Sequence[DomainScore] = (),
    config: FusionConfig = _DEFAULT,
    phase: GenerationPhase | None = None,
    *,
    vocab_size: int | None = None,
    may_relax: bool = True,
) -> FusionResult:
    """Fuse the opinions of all active domains about the next token.

    Where no token passes all hard domains, IMPORTS is dropped, then TYPES (event ``DOMAINS_RELAXED``); a syntax that allows
    nothing by itself is a bug of the grammar (event ``GRAMMAR_BUG``, CRITICAL), after which every token is feasible. Scores
    never bring back a token that a mask has taken away.

    Args:
        hard: masks, at most one for each domain; those that are not active are not looked at.
        soft: scores, at most one for each domain.
        config: intensity, weights and temperature.
        phase: what is being written; None, uncertain, counts as structured output.
        vocab_size: how many tokens there are; needed only if there is neither a mask nor a score.
        may_relax: whether domains may be dropped; if not, an empty result says ``required_relaxation``.

    Raises:
        ConstraintError: a domain is given twice, or the vocabularies differ or are unknown.
    """
    start = time.perf_counter_ns()
    active = active_domains(config.intensity, phase, is_adaptive=config.adaptive_switching)
    size = _vocabulary(hard, soft, vocab_size)
    asked = {mask.domain: mask for mask in hard if mask.domain in active}
    words, required, relaxed = _feasible(asked, size, may_relax)
    tokens = ids_of(words, size)
    adjustments = soft_adjustments(tokens, [each for each in soft if each.domain in active], config)
    elapsed_us = 1e-3 * (time.perf_counter_ns() - start)
    return FusionResult(
        tokens, adjustments, active, required, relaxed, words, size, elapsed_us, config.intensity.budget_us
    )


def _feasible(
    asked: Mapping[Domain, DomainMask], size: int, may_relax: bool
) -> tuple[torch.Tensor, bool, tuple[Domain, ...]]:
    """The words of what all allow, whether that needed a relaxation, and the domains that were dropped."""
    left, relaxed = dict(asked), []
    words = intersect(left.values()) if left else _everything(size)
    required = not bool(words.any())
    for domain in RELAXED_FIRST if required and may_relax else ():
        if domain in left:
            del left[domain]
            relaxed.append(domain)
            words = intersect(left.values()) if left else _everything(size)
            if words.any():
                break
    if relaxed:
        _tell(relaxed)
    return words, required, tuple(relaxed)


def _tell(relaxed: Sequence[Domain]) -> None:
    names = ", ".join(domain.name for domain in relaxed)
    if Domain.SYNTAX in relaxed:
        text = "no token passes SYNTAX alone: the grammar (or its parser) has a bug"
        events.record("GRAMMAR_BUG", f"{text}; dropped {names}, every token is feasible", level=logging.CRITICAL)
    else:
        events.record("DOMAINS_RELAXED", f"no token passes all hard domains; dropped {names}", level=logging.INFO)


def _everything(size: int) -> torch.Tensor:
    return pack(torch.ones(size, dtype=torch.bool))


def _vocabulary(hard: Sequence[DomainMask], soft: Sequence[DomainScore], given: int | None) -> int:
    """How many tokens there are, as all say alike."""
    domains = [*(each.domain for each in hard), *(each.domain for each in soft)]
    twice = sorted({domain.name for domain in domains if domains.count(domain) > 1})
    if twice:
        raise ConstraintError(f"fusing domains: expected one opinion of each, got two of {', '.join(twice)}")
    sizes = {f"{mask.domain.name} mask": mask.vocab_size for mask in hard}
    sizes |= {f"{each.domain.name} scores": each.scores.numel() for each in soft}
    if given is not None:
        sizes["vocab_size"] = given
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 1:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "nothing that says its size"
        raise ConstraintError(f"fusing domains: expected one vocabulary, got {found}")
    return next(iter(sizes.values()))
