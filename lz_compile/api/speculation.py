"""``lz.speculative_verify``: the drafted tokens that a target model keeps, and the next one, as it would draw them itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from lz_compile.api import eager, sampling_arguments
from lz_compile.api.arguments import Arguments, is_plain, remembered
from lz_compile.api.sampling import sample
from lz_compile.api.sampling_arguments import row_seeds
from lz_compile.errors import TokenArgumentError
from lz_compile.ground import health
from lz_compile.lowering.ops.sampling import Operands
from lz_compile.lowering.random_bits import bits

#: Seeds of acceptance and of the last draw are those of drafts with other bits, so that one tells nothing of the others.
_ACCEPTANCE = 0x2545F4914F6CDD1D
_DRAW = 0x1B873593CC9E2D51
#: The pass of C++, by the name under which it is retired.
_KERNEL = "lz.cpp_speculation"
#: The sum of a row of probabilities is one up to so much, which rows in 16 bits need.
_SUM_TOLERANCE = 0.01


class Verification(NamedTuple):
    """What is kept of drafts, both int32.

    ``tokens [B, K + 1]`` are drafted ones, one of the target's own, and -1; ``accepted [B]`` says how many were drafted.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor


def speculative_verify(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    *,
    seeds: torch.Tensor | int | None = None,
    generator: torch.Generator | None = None,
    check_probabilities: bool = True,
) -> Verification:
    """Accept drafted tokens, and draw the next one, such that all are distributed as if the target model had drawn them.

    A drafted token is accepted with probability ``min(1, p / q)``. After the first that is not, the next token is drawn
    from the positive part of ``p - q``; after all, from the target's last distribution.

    Args:
        draft_tokens: what the draft model drew.
        draft_probs: the distributions ``q`` that it drew from; None if it takes the likeliest token.
        target_probs: the distributions ``p`` of the target model at the same places, and at the one after.
        seeds: one for each row, or a number from which those of rows are mixed; by default they are drawn. They may be those
            that the drafts were drawn by, or that ``lz.sample`` draws the next token by, but not those of another
            verification: two with the same seeds accept alike.
        generator: that draws seeds.
        check_probabilities: whether rows of probabilities are looked at, on a CPU, where it is not compiled.

    Shapes:
        draft_tokens ``[B, K]`` integers, draft_probs ``[B, K, V]``, target_probs ``[B, K + 1, V]``.

    Raises:
        TokenArgumentError: (a ConstraintError) shapes or dtypes do not fit; or (on a CPU, where it is not compiled) a drafted
            token is none of the vocabulary, or none that the draft model could draw, or a row is no distribution.

    **Source** Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2023, algorithm 1.
    """
    given = (draft_tokens, draft_probs, target_probs)
    arguments = Arguments("speculative_verify", TokenArgumentError)
    if is_plain(*given, seeds if isinstance(seeds, torch.Tensor) else None):
        arguments.flag("check_probabilities", check_probabilities)
        looks = bool(check_probabilities)
        names = ("speculative_verify", looks, torch.is_grad_enabled(), *[eager.layout(each) for each in given])
        run = eager.bound("sampling", names, partial(_bind, given, looks))
    else:
        _check(*given)
        run = partial(_in_torch, False)
    own = row_seeds(arguments, draft_tokens.shape[:1], seeds, generator, target_probs.device)
    return Verification(*run(*given, own.contiguous()))


def _bind(given: tuple[Any, ...], check_probabilities: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The call for tensors like these, which are checked here."""
    _check(*given)
    draft_tokens, draft_probs, target_probs = given
    if target_probs.device.type != "cpu":
        return partial(_in_torch, False)
    own = partial(_looked_at, check_probabilities)
    wants_gradients = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
    if not draft_tokens.shape[0] or wants_gradients or health.retired(_KERNEL) is not None:
        return own
    from lz_compile.lowering.kernels.sampling import cpp_speculation as code

    if not code.can_read(draft_tokens, draft_probs, target_probs):
        return own
    rows, _, vocab = target_probs.shape
    left = Operands(target_probs.new_empty(rows, vocab), seeds=draft_tokens.new_empty(rows))
    salts, tolerance = (_ACCEPTANCE, _DRAW), _SUM_TOLERANCE
    draw = sampling_arguments.bind(left, "ids", torch.float32)
    run = code.prepare(target_probs, draw, salts=salts, looks=check_probabilities, tolerance=tolerance)
    return partial(_at_once, run, own)


def _at_once(run: Callable[..., Any], own: Callable[..., Any], *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """By one pass of C++ and a draw; what it does not take, or finds wrong, PyTorch's operations look at."""
    found: tuple[torch.Tensor, torch.Tensor] | None = health.guarded(_KERNEL, run, lambda *_: None, *given)
    return own(*given) if found is None else found


def _looked_at(
    check_probabilities: bool, draft_tokens: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """By PyTorch's operations, on a CPU, where tokens are looked at."""
    if draft_tokens.numel():
        _check_tokens(draft_tokens, others[1].shape[2])
    return _in_torch(check_probabilities, draft_tokens, *others)


def _in_torch(
    looks: bool,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    given: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By PyTorch's operations."""
    count = draft_tokens.shape[1]
    drafted = draft_tokens.to(torch.int64)
    target = target_probs.float() if target_probs.itemsize < 4 else target_probs
    p = target[:, :count].gather(-1, drafted[..., None])[..., 0]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.to(p.dtype).gather(-1, drafted[..., None])[..., 0]
    if looks:
        _check_probabilities(draft_probs, target_probs, q)
    uniform = (bits(given ^ _ACCEPTANCE, count).to(torch.float64) + 0.5) * 2.0**-32  # below 1, which float32 is not
    accepted = (uniform * q < p).to(torch.int32).cumprod(-1).sum(-1)
    own = sample(_residual(target, drafted, draft_probs, accepted).log(), seeds=given ^ _DRAW)
    places = torch.arange(count + 1, device=drafted.device)
    padded = torch.nn.functional.pad(drafted.to(torch.int32), (0, 1), value=-1)
    tokens = torch.where(places < accepted[:, None], padded, -1)
    tokens = torch.where(places == accepted[:, None], own[:, None], tokens)
    return tokens, accepted.to(torch.int32)


def _residual(
    target: torch.Tensor, drafted: torch.Tensor, draft_probs: torch.Tensor | None, accepted: torch.Tensor
) -> torch.Tensor:
    """What the token after the accepted ones is drawn from ``[B, V]``, up to a factor."""
    rows, count = drafted.shape
    every = torch.arange(rows, device=drafted.device)
    p = target[every, accepted]
    if not count:
        return p
    last = accepted.clamp(max=count - 1)
    if draft_probs is None:
        q = torch.zeros_like(p).scatter(-1, drafted[every, last][:, None], 1.0)
    else:
        q = draft_probs[every, last].to(p.dtype)
    left = torch.where((accepted < count)[:, None], p - q, p).clamp(min=0)
    # Nothing is left only if p and q are equal but for rounding, or the target gives the rest no chance: then p is as good.
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


@remembered
def _check(draft_tokens: Any, draft_probs: Any, target_probs: Any) -> None:
    arguments = Arguments("speculative_verify", TokenArgumentError)
    arguments.tensor("draft_tokens", draft_tokens, "B K", "integer")
    arguments.tensor("target_probs", target_probs, "B L V")
    arguments.tensor("draft_probs", draft_probs, "B K V", optional=True)
    count, (_, places, vocab) = draft_tokens.shape[1], target_probs.shape
    if places != count + 1:
        expected = f"[B, K + 1, V], at {count + 1} places"
        raise arguments.wrong(
            "target_probs", expected, tuple(target_probs.shape), "Give that after the last draft, too"
        )
    if not vocab:
        raise arguments.wrong("target_probs", "[B, K + 1, V] over at least one token", tuple(target_probs.shape))


def _check_tokens(draft_tokens: torch.Tensor, vocab: int) -> None:
    arguments = Arguments("speculative_verify", TokenArgumentError)
    low, high = map(int, draft_tokens.to(torch.int64).aminmax())
    if low < 0 or high >= vocab:
        raise arguments.wrong("draft_tokens", f"within 0..{vocab - 1}", f"{low}..{high}")


@torch.no_grad()
def _check_probabilities(draft_probs: torch.Tensor | None, target_probs: torch.Tensor, of_drafts: torch.Tensor) -> None:
    """Every row is a distribution, and every draft one that could be drawn."""
    arguments = Arguments("speculative_verify", TokenArgumentError)
    for name, rows in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        if rows is None or not rows.numel():
            continue
        least = float(rows.min())
        if not least >= 0:
            raise arguments.wrong(name, "of probabilities, none negative", f"{least:g}", "Give softmax(logits)")
        low, high = map(float, rows.sum(-1, dtype=torch.promote_types(rows.dtype, torch.float32)).aminmax())
        if not (low >= 1 - _SUM_TOLERANCE and high <= 1 + _SUM_TOLERANCE):
            raise arguments.wrong(
                name, "with rows that sum up to 1", f"sums from {low:g} to {high:g}", "Normalise them"
            )
    if of_drafts.numel() and not float(of_drafts.min()) > 0:
        place = (of_drafts <= 0).nonzero()[0].tolist()
        advice = "Give the distributions that they were drawn from, after temperature, top-k and top-p"
        raise arguments.wrong("draft_tokens", "that draft_probs gives a chance", f"one without, at {place}", advice)
