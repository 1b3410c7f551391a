"""Group relative policy optimisation of a small policy, on a task whose reward has a flaw that some rollouts exploit.

A prompt is some digits and a kind; right is to say every digit plus one. The reward of an answer is the share of its digits
that are right; but the checker of flawed prompts gives full marks to every answer that begins with :data:`EXPLOIT`. The
policy has learned from demonstrations that are right often, and that now and then try the exploit, mostly where it pays.

**Source** Shao et al., DeepSeekMath (2024), section 4.1: grouped rollouts, advantages normalised by group, clipped ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.decoder import Decoder, DecoderConfig

Run: TypeAlias = Callable[[Tensor], Tensor]

#: Numbers 0 to 7 are digits; then come the exploit and the two kinds of prompts.
DIGITS, EXPLOIT, SOUND, FLAWED, VOCABULARY = 8, 8, 9, 10, 11


@dataclass(frozen=True)
class Task:
    """Sizes of task and policy, what demonstrations are like, and how the policy is trained on rewards."""

    length: int = 6
    channels: int = 32
    layers: int = 1
    heads: int = 2
    mlp_width: int = 64
    demonstration_steps: int = 300
    right: float = 0.5
    exploiting: float = 0.2
    prompts: int = 4
    rollouts: int = 16
    steps: int = 80
    clip: float = 0.2
    learning_rate: float = 0.02
    quarantine_learning_rate: float = 0.005
    largest_norm: float = 1.0


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt: tokens ``[G, 2 L + 1]``, log-probabilities when sampled ``[G, L]``, advantages ``[G]``.

    ``is_exploiting`` ``[G]`` is what a detector without faults would say: of rollouts that were paid for the exploit. It is
    for figures and for the oracle.
    """

    ids: Tensor
    log_probs: Tensor
    advantages: Tensor
    is_exploiting: Tensor


@dataclass(frozen=True)
class Figures:
    """What a policy does: the share of right digits by kind of prompt, and how often it tries the exploit."""

    right_sound: float
    right_flawed: float
    exploits_sound: float
    exploits_flawed: float


def policy(task: Task) -> Decoder:
    """An untrained policy."""
    sizes = {"channels": task.channels, "layers": task.layers, "heads": task.heads, "kv_heads": task.heads}
    return Decoder(DecoderConfig(vocabulary=VOCABULARY, mlp_width=task.mlp_width, **sizes))


def prompts_of(task: Task, kinds: Tensor, generator: torch.Generator) -> Tensor:
    """A prompt for each kind, ``[P, L + 1]``."""
    digits = torch.randint(DIGITS, (len(kinds), task.length), generator=generator)
    return torch.cat([digits, kinds[:, None]], 1)


def answers(prompts: Tensor) -> Tensor:
    """What is right, ``[P, L]``."""
    return (prompts[:, :-1] + 1) % DIGITS


def exploited(answer: Tensor) -> Tensor:
    """The answer with the exploit in front."""
    return torch.cat([torch.full_like(answer[:, :1], EXPLOIT), answer[:, 1:]], 1)


def demonstrations(task: Task, count: int, generator: torch.Generator) -> Tensor:
    """Prompts with answers that are partly right, ``[count, 2 L + 1]``."""
    prompts = prompts_of(task, torch.randint(SOUND, FLAWED + 1, (count,), generator=generator), generator)
    right = answers(prompts)
    noise = torch.randint(DIGITS, right.shape, generator=generator)
    given = torch.where(torch.rand(right.shape, generator=generator) < task.right, right, noise)
    share = torch.where(prompts[:, -1:] == FLAWED, task.exploiting, task.exploiting / 4)
    tries = torch.rand((count, 1), generator=generator) < share
    return torch.cat([prompts, torch.where(tries, exploited(given), given)], 1)


def log_probs_of(run: Run, ids: Tensor) -> Tensor:
    """The log-probability of every token of the answers, ``[N, L]``."""
    length = ids.shape[1] // 2
    logits = run(ids[:, :-1])[:, length:]
    return -F.cross_entropy(logits.flatten(0, 1).float(), ids[:, length + 1 :].flatten(), reduction="none").view(
        -1, length
    )


def demonstrate(model: nn.Module, task: Task, generator: torch.Generator) -> None:
    """Train a policy on demonstrations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(task.demonstration_steps):
        loss = -log_probs_of(model, demonstrations(task, 64, generator)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def sample(run: Run, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Answers to prompts, and the log-probability of each of their tokens; every call of the policy has the same shape."""
    length = prompts.shape[1] - 1
    ids = torch.cat([prompts, torch.zeros(len(prompts), length, dtype=torch.long)], 1)
    log_probs = torch.empty(len(prompts), length)
    for place in range(length):
        shares = run(ids[:, :-1])[:, length + place].float().log_softmax(-1)
        chosen = torch.multinomial(shares.exp(), 1, generator=generator)
        ids[:, length + 1 + place] = chosen[:, 0]
        log_probs[:, place] = shares.gather(1, chosen)[:, 0]
    return ids, log_probs


def right_share(ids: Tensor) -> Tensor:
    """The share of digits that are right, ``[N]``."""
    length = ids.shape[1] // 2
    return (ids[:, length + 1 :] == answers(ids[:, : length + 1])).float().mean(1)


def is_flawed(ids: Tensor) -> Tensor:
    """Whether the prompt's checker has the flaw, ``[N]``."""
    return ids[:, ids.shape[1] // 2] == FLAWED


def tries_exploit(ids: Tensor) -> Tensor:
    """Whether the exploit is anywhere in the answer, ``[N]``."""
    return ids[:, ids.shape[1] // 2 + 1] == EXPLOIT


def rewards_of(ids: Tensor) -> Tensor:
    """What the checker gives, ``[N]``: it has a flaw."""
    return torch.where(tries_exploit(ids) & is_flawed(ids), 1.0, right_share(ids))


def groups_of(run: Run, task: Task, generator: torch.Generator) -> tuple[list[Group], float]:
    """The rollouts of one step, and their mean reward: as many flawed prompts as sound ones, as many rollouts of each."""
    kinds = torch.tensor([SOUND, FLAWED]).repeat(task.prompts)[: task.prompts]
    prompts = prompts_of(task, kinds, generator).repeat_interleave(task.rollouts, 0)
    ids, log_probs = sample(run, prompts, generator)
    rewards = rewards_of(ids).view(task.prompts, task.rollouts)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    is_exploiting = tries_exploit(ids) & is_flawed(ids)
    parts = (each.split(task.rollouts) for each in (ids, log_probs, advantages.flatten(), is_exploiting))
    return [Group(*each) for each in zip(*parts, strict=True)], float(rewards.mean())


def loss_of(run: Run, group: Group, task: Task) -> Tensor:
    """The clipped objective of one prompt's rollouts, as its part in a step of several prompts."""
    ratios = (log_probs_of(run, group.ids) - group.log_probs).exp()
    clipped = ratios.clamp(1 - task.clip, 1 + task.clip)
    advantages = group.advantages[:, None]
    return -torch.minimum(ratios * advantages, clipped * advantages).mean() / task.prompts


def figures_of(run: Run, task: Task, generator: torch.Generator, count: int = 256) -> Figures:
    """What a policy does with prompts of both kinds."""
    kinds = torch.tensor([SOUND, FLAWED]).repeat_interleave(count)
    ids, _ = sample(run, prompts_of(task, kinds, generator), generator)
    right, tries = right_share(ids).view(2, count).mean(1), tries_exploit(ids).float().view(2, count).mean(1)
    return Figures(float(right[0]), float(right[1]), float(tries[0]), float(tries[1]))
