"""What each token wants of ``delta_S``, exactly, and how much of it a routing lets through: for figures, never for routing.

A gate has to be divided by ``delta_S`` to tell a gradient. Here it is read off the layer's input and its output's gradient:
``(dy @ U) * a``, for every token, on every axis.

Shape suffixes as in ``models/routed_adapter.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.routed_adapter import Arm, Rollouts, RoutedLinear, Routing, cosine


class Contributions(NamedTuple):
    """Of one layer and one backward: ``a`` and what each token wants of ``delta_S``, ``[N, R]`` each."""

    a_NR: Tensor
    gradient_NR: Tensor


class Scatter(NamedTuple):
    """Of each rollout: the share of its tokens that would be flagged one by one, and the cosine of their sum; ``[G]``."""

    flagged_tokens_G: Tensor
    cosine_G: Tensor


@contextlib.contextmanager
def recorded(routing: Routing) -> Iterator[dict[str, Contributions]]:
    """A mapping by layer that is filled by a forward and backward within. It holds no graph."""
    found: dict[str, Contributions] = {}

    def hook(name: str) -> Callable[[RoutedLinear, tuple[Tensor, ...], Tensor], None]:
        def watch(layer: RoutedLinear, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            a_NR = F.linear(inputs[0].detach(), layer.vh_RI).flatten(0, -2)

            def read(dy: Tensor) -> None:
                found[name] = Contributions(a_NR, (dy @ layer.u_OR).flatten(0, -2) * a_NR)

            if y.requires_grad:
                y.register_hook(read)

        return watch

    hooks: list[Any] = [layer.register_forward_hook(hook(name)) for name, layer in routing.layers.items()]
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()


def kept_out(layer: RoutedLinear, found: Contributions, rollouts: Rollouts) -> Tensor:
    """Which tokens the layer's arm keeps away from ``delta_S``, ``[N]``."""
    if layer.arm is Arm.NONE:
        return torch.zeros(rollouts.tokens, dtype=torch.bool, device=found.a_NR.device)
    if layer.arm is Arm.ACT:
        return cosine(found.a_NR, layer.direction_R) > 0
    if layer.arm is Arm.GRAD_TOKEN:
        return layer.flags(found.gradient_NR)
    return rollouts.spread(layer.flags(rollouts.sum(found.gradient_NR))[:, None])[:, 0]


def reached(
    routing: Routing, found: Mapping[str, Contributions], rollouts: Rollouts, chosen_G: Tensor
) -> tuple[float, float]:
    """Of the chosen rollouts, how much of the gradient reaches ``delta_S``, and how much there was to reach it.

    Both are sums of the norms of all tokens' gradients, over all layers. Their quotient is the leakage where the chosen are
    the unwanted ones, and the share that is kept where they are clean.
    """
    passed = there = 0.0
    for name, layer in routing.layers.items():
        norm_N1 = found[name].gradient_NR.norm(dim=-1, keepdim=True)
        through_N1 = norm_N1.masked_fill(kept_out(layer, found[name], rollouts)[:, None], 0.0)
        passed += float(rollouts.sum(through_N1)[chosen_G].sum())
        there += float(rollouts.sum(norm_N1)[chosen_G].sum())
    return passed, there


def scatter(layer: RoutedLinear, found: Contributions, rollouts: Rollouts) -> Scatter:
    """How the tokens of each rollout would be flagged one by one, and what the rollout is worth as a whole."""
    flagged_N1 = (cosine(found.gradient_NR, layer.direction_R) > 0).to(found.gradient_NR.dtype)[:, None]
    moved_N1 = (found.gradient_NR.norm(dim=-1, keepdim=True) > 0).to(flagged_N1.dtype)
    tokens_G = rollouts.sum(moved_N1)[:, 0].clamp_min(1.0)
    return Scatter(
        rollouts.sum(flagged_N1)[:, 0] / tokens_G, cosine(rollouts.sum(found.gradient_NR), layer.direction_R)
    )
