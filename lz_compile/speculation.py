"""``lz.speculative_verify``: the drafted tokens that a target model keeps, and the next one, as it would draw them itself."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lz_compile.errors import ConstraintError
from lz_compile.lowering.ops.sampling import bits
from lz_compile.sampling import sample

__all__ = ["Verification", "speculative_verify"]

_MOST_SEED = 2**63 - 1
#: Seeds of acceptance are those of draws with other bits, so that one tells nothing of the other.
_ACCEPTANCE = 0x2545F4914F6CDD1D


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
) -> Verification:
    """Accept drafted tokens, and draw the next one, such that all are distributed as if the target model had drawn them.

    A drafted token is accepted with probability ``min(1, p / q)``. After the first that is not, the next token is drawn
    from the positive part of ``p - q``; after all, from the target's last distribution.

    Args:
        draft_tokens: what the draft model drew.
        draft_probs: the distributions ``q`` that it drew from; None if it takes the likeliest token.
        target_probs: the distributions ``p`` of the target model at the same places, and at the one after.
        seeds: one for each row, or a number that counts up; by default they are drawn.
        generator: that draws seeds.

    Shapes:
        draft_tokens ``[B, K]`` integers, draft_probs ``[B, K, V]``, target_probs ``[B, K + 1, V]``.

    Raises:
        ConstraintError: shapes or dtypes do not fit; or (on a CPU, where it is not compiled) a drafted token is none of the
            vocabulary, or has what is no probability.

    **Source** Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2023, algorithm 1.
    """
    _check(draft_tokens, draft_probs, target_probs)
    rows, count = draft_tokens.shape
    given = _seeds(rows, seeds, generator, target_probs.device)
    drafted = draft_tokens.to(torch.int64)
    target = target_probs.float() if target_probs.itemsize < 4 else target_probs
    p = target[:, :count].gather(-1, drafted[..., None])[..., 0]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.to(p.dtype).gather(-1, drafted[..., None])[..., 0]
    _check_probabilities("target_probs", p)
    _check_probabilities("draft_probs", q)
    uniform = (bits(given ^ _ACCEPTANCE, count).to(torch.float64) + 0.5) * 2.0**-32  # below 1, which float32 is not
    accepted = (uniform * q < p).to(torch.int32).cumprod(-1).sum(-1)
    own = sample(_residual(target, drafted, draft_probs, accepted).log(), seeds=given)
    places = torch.arange(count + 1, device=drafted.device)
    padded = torch.nn.functional.pad(drafted.to(torch.int32), (0, 1), value=-1)
    tokens = torch.where(places < accepted[:, None], padded, -1)
    tokens = torch.where(places == accepted[:, None], own[:, None], tokens)
    return Verification(tokens, accepted.to(torch.int32))


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


def _seeds(
    rows: int, seeds: torch.Tensor | int | None, generator: torch.Generator | None, device: torch.device
) -> torch.Tensor:
    if isinstance(seeds, torch.Tensor):
        if tuple(seeds.shape) != (rows,) or seeds.dtype not in (torch.int64, torch.int32):
            raise _error(f"int64 seeds of shape {[rows]}", f"{seeds.dtype} of shape {list(seeds.shape)}")
        return seeds.to(device, torch.int64)
    if seeds is not None and not isinstance(seeds, int):
        raise _error("seeds as a whole number or a tensor", f"{seeds!r}")
    if seeds is not None:
        return torch.arange(rows, device=device) + seeds
    own = device if generator is None else generator.device
    return torch.randint(0, _MOST_SEED, (rows,), generator=generator, device=own).to(device)


def _check(draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None, target_probs: torch.Tensor) -> None:
    if draft_tokens.dim() != 2 or draft_tokens.is_floating_point() or draft_tokens.dtype == torch.bool:
        raise _error("draft_tokens [B, K] of integers", f"{draft_tokens.dtype} of shape {list(draft_tokens.shape)}")
    rows, count = draft_tokens.shape
    if target_probs.dim() != 3 or tuple(target_probs.shape[:2]) != (rows, count + 1):
        raise _error(f"target_probs of shape [{rows}, {count + 1}, V]", f"{list(target_probs.shape)}")
    if not target_probs.is_floating_point() or not target_probs.shape[2]:
        found = f"{target_probs.dtype} over {target_probs.shape[2]}"
        raise _error("floating-point target_probs over at least one token", found)
    wanted = (rows, count, target_probs.shape[2])
    if draft_probs is not None and tuple(draft_probs.shape) != wanted:
        raise _error(f"draft_probs of shape {list(wanted)}", f"{list(draft_probs.shape)}")
    if _is_looked_at(draft_tokens) and not bool(((draft_tokens >= 0) & (draft_tokens < wanted[2])).all()):
        found = f"{int(draft_tokens.min())}..{int(draft_tokens.max())}"
        raise _error(f"draft_tokens within 0..{wanted[2] - 1}", found)


def _check_probabilities(name: str, found: torch.Tensor) -> None:
    """What drafted tokens have of it: logits in their place are seen here, sums are not looked at."""
    if _is_looked_at(found) and not bool(((found >= 0) & (found <= 1.01)).all()):
        raise _error(f"probabilities in {name}", f"{float(found.min()):g} to {float(found.max()):g} of drafted tokens")


def _is_looked_at(tensor: torch.Tensor) -> bool:
    return not torch.compiler.is_compiling() and tensor.device.type == "cpu" and tensor.numel() > 0


def _error(expected: str, received: str) -> ConstraintError:
    return ConstraintError(f"lz.speculative_verify: expected {expected}, received {received}")
