"""Drawing tokens: ``lz.sample`` and its kin, masks of bits, the fusion of constraint domains.

Every draw is a function of a seed for its row: equal wherever in a batch the row stands, on every device, compiled or not.
Without compiling, a call runs the kernel that is expected to be the fastest here; in a function that is compiled it is one
operator, ``layerzero::sampling``, for which the kernel is chosen where it is traced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lz_compile.api.arguments import Arguments
from lz_compile.api.sampling_arguments import PerRow, SamplingArguments, range_of
from lz_compile.domains.fusion import DomainScore
from lz_compile.domains.mask import DomainMask

_MOST_WEIGHT = torch.finfo(torch.float32).max


def sample(
    logits: torch.Tensor,
    *,
    temperature: PerRow = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    bitmask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    seeds: torch.Tensor | int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A token for each row, drawn from ``softmax((logits + bias) / temperature)`` of the tokens that are kept.

    Kept are those that the mask allows; of them the ``top_k`` largest; of those the fewest whose probabilities reach
    ``top_p``; of those the ones at least ``min_p`` times as probable as the likeliest. Equally likely tokens are kept
    together.

    Args:
        logits: floating point.
        temperature: 0 takes the likeliest token; others are from 1e-6 to 1e6.
        top_k: 0 keeps all.
        top_p: above 0; 1 keeps all.
        min_p: from 0 to 1.
        bitmask: bit ``t % 32`` of word ``t // 32`` allows token ``t``.
        bias: added to the logits.
        seeds: of the draws, one for each row, used as they are; from a number, such as that of a step, the seeds of rows are
            mixed, so that two numbers have none in common. By default they are drawn.
        generator: that draws seeds, by default that of PyTorch (``torch.manual_seed``).

    Shapes:
        logits ``[..., V]``; temperature, top_k, top_p and min_p numbers or ``[...]``; bitmask ``[ceil(V / 32)]`` or
        ``[..., ceil(V / 32)]`` int32; bias ``[V]`` or ``[..., V]``; seeds ``[...]`` int64; the result ``[...]`` int32.

    Raises:
        TokenArgumentError: (a ConstraintError) shapes or ranges do not fit; or (on a CPU, where it is not compiled) a row has
            no token to draw, or NaN or plus infinity among its logits. On other devices, and compiled, its token is -1.

    **Source** Gumbel-max: Yellott, 1977; top-p: Holtzman et al., 2020; min-p: Nguyen et al., 2024.
    """
    operands = SamplingArguments("sample", logits)
    operands.add_limits(temperature, top_k, top_p, min_p)
    operands.add_constraints(bitmask, bias)
    return operands.drawn(seeds, generator)


def sample_topk(
    logits: torch.Tensor,
    k: int | torch.Tensor,
    *,
    temperature: PerRow = 1.0,
    seeds: torch.Tensor | int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A token for each row, drawn from the ``k`` likeliest: :func:`sample` with ``top_k``, which says the rest.

    Shapes:
        logits ``[..., V]``; the result ``[...]`` int32.

    Raises:
        ConstraintError: as :func:`sample`.
    """
    operands = SamplingArguments("sample_topk", logits, {"top_k": "k"})
    operands.add_limits(temperature, k, 1.0, 0.0)
    return operands.drawn(seeds, generator)


def sample_topp(
    logits: torch.Tensor,
    p: PerRow,
    *,
    temperature: PerRow = 1.0,
    seeds: torch.Tensor | int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A token for each row, drawn from the fewest that are as likely as ``p`` together: :func:`sample` with ``top_p``.

    Shapes:
        logits ``[..., V]``; the result ``[...]`` int32.

    Raises:
        ConstraintError: as :func:`sample`.
    """
    operands = SamplingArguments("sample_topp", logits, {"top_p": "p"})
    operands.add_limits(temperature, 0, p, 0.0)
    return operands.drawn(seeds, generator)


def sampling_probs(
    logits: torch.Tensor,
    *,
    temperature: PerRow = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    bitmask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution that :func:`sample` draws from; differentiable in logits and bias.

    Shapes:
        as of :func:`sample`; the result is like the logits, in float32 at least. A row without a distribution is NaN.

    Raises:
        ConstraintError: shapes or ranges do not fit.
    """
    operands = SamplingArguments("sampling_probs", logits)
    operands.add_limits(temperature, top_k, top_p, min_p)
    operands.add_constraints(bitmask, bias)
    return operands.run("probs")


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Logits with minus infinity for every token that the mask does not allow.

    Shapes:
        logits ``[..., V]``; bitmask ``[ceil(V / 32)]`` or ``[..., ceil(V / 32)]`` int32, bit ``t % 32`` of word ``t //
        32`` allows token ``t``, as xgrammar and llguidance fill it; the result is like the logits.

    Raises:
        ConstraintError: the shapes do not fit.
    """
    operands = SamplingArguments("apply_token_bitmask", logits)
    operands.add_constraints(bitmask, None)
    return operands.run("scores", logits.dtype)


def domain_fusion(
    logits: torch.Tensor,
    hard: Sequence[torch.Tensor | DomainMask] = (),
    soft: Sequence[torch.Tensor | DomainScore] = (),
    weights: Sequence[float] | torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Logits under all constraint domains at once: one intersection of the hard ones, one sum of the soft ones.

    ``logits + sum(weight * score) / temperature`` where every hard mask allows the token. One softmax of it is the
    model's distribution given the constraints; a score never brings back a token that a mask has taken away.

    Args:
        logits: of the model.
        hard: masks, as words of bits (int32), as booleans, or of a domain.
        soft: scores from -1 to 1, or of a domain, with its weight.
        weights: of the scores, by default 1; finite numbers.
        temperature: of the scores, a number above 0.

    Shapes:
        logits ``[..., V]``; masks ``[ceil(V / 32)]`` or ``[..., ceil(V / 32)]`` int32, or ``[V]`` or ``[..., V]`` bool;
        scores ``[V]`` or ``[..., V]``; the result is like the logits.

    Raises:
        ConstraintError: shapes or vocabularies do not fit, a domain is given twice or is of the wrong tier, there is not a
            finite weight for each score, or (on a CPU, where it is not compiled) a score is not within -1 and 1.
    """
    operands = SamplingArguments("domain_fusion", logits)
    given, vocab = operands.arguments, logits.shape[-1]
    _check_opinions(given, hard, soft)
    if weights is not None and not isinstance(weights, (list, tuple, torch.Tensor)):
        raise given.wrong("weights", "as a list of numbers or a tensor", type(weights).__name__)
    if isinstance(weights, torch.Tensor):
        given.tensor("weights", weights, "S", "real", anywhere=True)
    factors = [1.0] * len(soft) if weights is None else list(weights)
    if len(factors) != len(soft):
        raise given.wrong("weights", f"as one for each of {len(soft)} scores", f"{len(factors)}")
    for factor in factors:
        _check_number(given, "weights", factor)
    _check_number(given, "temperature", temperature, 0.0, above=True)
    bias: torch.Tensor | None = None
    for each, factor in zip(soft, factors, strict=True):
        score = each.scores if isinstance(each, DomainScore) else each
        if isinstance(each, torch.Tensor):
            _check_scores(given, each, vocab)
        weight = (factor * each.weight if isinstance(each, DomainScore) else factor) / temperature
        _check_number(given, "weights / temperature", weight)
        part = score.to(logits.device, torch.promote_types(score.dtype, torch.float32)) * weight
        bias = part if bias is None else bias + part
    words: torch.Tensor | None = None
    for mask in hard:
        own = operands.words_of(mask, "hard")
        words = own if words is None else words & own
    operands.add_constraints(words, bias)
    return operands.run("scores", logits.dtype)


def _check_opinions(
    given: Arguments, hard: Sequence[torch.Tensor | DomainMask], soft: Sequence[torch.Tensor | DomainScore]
) -> None:
    """Masks are hard, scores are soft, and a domain has one of them."""
    domains = []
    for name, kind, opinions in (("hard", DomainMask, hard), ("soft", DomainScore, soft)):
        if not isinstance(opinions, (list, tuple)):
            raise given.wrong(
                name, f"as a list of tensors or {kind.__name__}", type(opinions).__name__, "Put it in a list"
            )
        for each in opinions:
            if isinstance(each, kind):
                domains.append(each.domain)
            elif not isinstance(each, torch.Tensor):
                raise given.wrong(name, f"as a tensor or a {kind.__name__}", type(each).__name__)
    twice = [domain.name for number, domain in enumerate(domains) if domain in domains[:number]]
    if twice:
        raise given.wrong("hard and soft", "as one opinion of each domain", f"two of {', '.join(twice)}")


def _check_number(
    given: Arguments, name: str, value: float | torch.Tensor, least: float = -_MOST_WEIGHT, *, above: bool = False
) -> None:
    if isinstance(value, torch.Tensor):
        given.tensor(name, value, kind="real", anywhere=True)
        if value.numel() != 1:
            raise given.wrong(name, "as a number", f"a tensor of shape {list(value.shape)}")
        value = range_of(value, unknown=(1.0, 1.0))[0]
    given.number(name, value, least, _MOST_WEIGHT, above=above)


def _check_scores(given: Arguments, scores: torch.Tensor, vocab: int) -> None:
    given.tensor("soft", scores, anywhere=True)
    if not scores.dim() or scores.shape[-1] != vocab:
        raise given.wrong("soft", f"with scores of {vocab} tokens", list(scores.shape))
    low, high = range_of(scores, unknown=(0.0, 0.0))
    if not (low >= -1 and high <= 1):  # also where they are NaN
        raise given.wrong("soft", "with scores from -1 to 1", f"{low:g} to {high:g}", "Scale or clamp them")
