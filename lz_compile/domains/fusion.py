"""One decision of all domains about the next token: one intersection, one sum, so that one renormalisation is exact."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lz_compile.domains.levels import RELAXED_FIRST, Domain, FusionConfig, GenerationPhase, active_domains
from lz_compile.domains.mask import DomainMask, everything, feasible, has_compiler, ids_of
from lz_compile.errors import ConstraintError
from lz_compile.ground import events
from lz_compile.lowering.cpp import bits

_MOST = torch.finfo(torch.float32).max


# ---- scores of soft domains, summed once and added to logits: log-odds move by what they say, and by nothing else ------


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


_DEFAULT = FusionConfig()


# ---- the decision ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FusionResult:
    """What the domains agreed upon.

    ``logit_adjustments[i]`` is what soft domains add to the logit of ``feasible_tokens[i]``; where none was asked both are
    made when they are first read, for bits are all that :meth:`apply` needs. ``active_domains`` were asked; ``relaxed`` are
    those of them that were dropped, in this order, because no token was left (``required_relaxation``). ``elapsed_us`` is
    what the fusion took, ``budget_us`` what the intensity allows for it and for the domains themselves.

    Shapes:
        words ``[ceil(vocab_size / 32)]`` int32, a bit for each of the ``count`` feasible tokens; scored: feasible tokens and
        adjustments ``[count]``, where soft domains were asked.
    """

    words: torch.Tensor
    count: int
    vocab_size: int
    active_domains: frozenset[Domain]
    required_relaxation: bool
    relaxed: tuple[Domain, ...]
    scored: tuple[torch.Tensor, torch.Tensor] | None
    elapsed_us: float
    budget_us: int

    @cached_property
    def feasible_tokens(self) -> torch.Tensor:
        """The tokens that may follow ``[count]``, int32, ascending."""
        return ids_of(self.words, self.vocab_size) if self.scored is None else self.scored[0]

    @cached_property
    def logit_adjustments(self) -> torch.Tensor:
        """What is added to the logits of these tokens ``[count]``, float32; zeros where no soft domain was asked."""
        return zeros(self.count, self.words.device) if self.scored is None else self.scored[1]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with the adjustments of feasible tokens added, and minus infinity for all others; softmax is then exact.

        Shapes:
            logits ``[..., vocab_size]``; the result is like them.

        Raises:
            ConstraintError: they are for another vocabulary, or no token is feasible (the relaxation was declined); or (on a
                CPU, where it is not compiled) a row has NaN or plus infinity among its feasible tokens, or nothing else than
                minus infinity.
        """
        if not (logits.is_floating_point() and logits.dim() and logits.shape[-1] == self.vocab_size):
            expected = f"floating-point logits of {self.vocab_size} tokens in the last dimension"
            raise _unfit(expected, f"{logits.dtype} of shape {list(logits.shape)}")
        if not self.count:
            raise ConstraintError("applying a fusion: no token is feasible. Call fuse() with may_relax=True")
        found, unusable = self._applied(logits)
        if unusable:
            rows = ", ".join(map(str, unusable[:8])) + (", ..." if len(unusable) > 8 else "")
            text = f"NaN, plus infinity or nothing else than minus infinity in row {rows}"
            raise _unfit("finite logits of feasible tokens", text)
        return found

    def _applied(self, logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """What is left of logits, and rows of it that are no distribution, where somebody looks."""
        is_compiling = torch.compiler.is_compiling()
        is_here = logits.device.type == self.words.device.type == "cpu" and not is_compiling
        if is_here and logits.dtype in bits.FLOATS and not logits.requires_grad and has_compiler():
            return bits.apply(self.words, logits, self.scored)
        tokens = self.feasible_tokens.to(logits.device, torch.int64)
        kept = logits.index_select(-1, tokens)
        if self.scored is not None:
            kept = (kept + self.logit_adjustments.to(logits.device)).to(logits.dtype)
        found = torch.full_like(logits, -math.inf).scatter_(-1, tokens.expand_as(kept), kept)
        if is_compiling or logits.device.type != "cpu":
            return found, []
        return found, (~found.detach().amax(-1).flatten().isfinite()).nonzero().flatten().tolist()


def _unfit(expected: str, found: str) -> ConstraintError:
    return ConstraintError(f"applying a fusion: expected {expected}, got {found}")


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
        ConstraintError: a domain is given twice, is of the wrong tier, or the vocabularies differ or are unknown; or phase
            is no phase.
    """
    start = time.perf_counter_ns()
    active = active_domains(config.intensity, phase, is_adaptive=config.adaptive_switching)
    size = _vocabulary(hard, soft, vocab_size)
    asked = {mask.domain: mask for mask in hard if mask.domain in active}
    words, count, required, relaxed = _feasible(asked, size, may_relax)
    scores = [each for each in soft if each.domain in active]
    scored = None
    if scores:
        tokens = ids_of(words, size)
        scored = tokens, weighed(tokens, scores, config)
    budget_us = config.intensity.budget_us
    elapsed_us = 1e-3 * (time.perf_counter_ns() - start)
    return FusionResult(words, count, size, active, required, relaxed, scored, elapsed_us, budget_us)


def _feasible(
    asked: Mapping[Domain, DomainMask], size: int, may_relax: bool
) -> tuple[torch.Tensor, int, bool, tuple[Domain, ...]]:
    """The words of what all allow and its size, whether that needed a relaxation, and the domains that were dropped."""
    left, relaxed = dict(asked), []
    words, count = _allowed(left, size)
    required = not count
    for domain in RELAXED_FIRST if required and may_relax else ():
        if domain in left:
            del left[domain]
            relaxed.append(domain)
            words, count = _allowed(left, size)
            if count:
                break
    if relaxed:
        _tell(relaxed)
    return words, count, required, tuple(relaxed)


def _allowed(masks: Mapping[Domain, DomainMask], size: int) -> tuple[torch.Tensor, int]:
    return feasible(list(masks.values())) if masks else (everything(size), size)


def _tell(relaxed: Sequence[Domain]) -> None:
    names = ", ".join(domain.name for domain in relaxed)
    if Domain.SYNTAX in relaxed:
        text = "no token passes SYNTAX alone: the grammar (or its parser) has a bug"
        events.record("GRAMMAR_BUG", f"{text}; dropped {names}, every token is feasible", level=logging.CRITICAL)
    else:
        events.record("DOMAINS_RELAXED", f"no token passes all hard domains; dropped {names}", level=logging.INFO)


def _vocabulary(hard: Sequence[DomainMask], soft: Sequence[DomainScore], given: int | None) -> int:
    """How many tokens there are, as all say alike."""
    wrong = [f"a DomainMask, got {type(each).__name__}" for each in hard if not isinstance(each, DomainMask)]
    wrong += [f"a DomainScore, got {type(each).__name__}" for each in soft if not isinstance(each, DomainScore)]
    if wrong:
        raise ConstraintError(f"fusing domains: expected {wrong[0]}")
    domains = [*(mask.domain for mask in hard), *(each.domain for each in soft)]
    if len(set(domains)) < len(domains):
        twice = sorted({domain.name for domain in domains if domains.count(domain) > 1})
        raise ConstraintError(f"fusing domains: expected one opinion of each, got two of {', '.join(twice)}")
    sizes = {*(mask.vocab_size for mask in hard), *(each.scores.numel() for each in soft)}
    if given is not None:
        sizes.add(given)
    if len(sizes) != 1 or min(sizes) < 1:
        texts = [f"{mask.domain.name} mask {mask.vocab_size}" for mask in hard]
        texts += [f"{each.domain.name} scores {each.scores.numel()}" for each in soft]
        texts += [] if given is None else [f"vocab_size {given}"]
        raise ConstraintError(
            f"fusing domains: expected one vocabulary, got {', '.join(texts) or 'nothing that says its size'}"
        )
    return sizes.pop()
