"""Small routed models, losses that are sums over rollouts, and what routing must give, by a loop over rollouts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.routed_adapter import Arm, Rollouts, RoutedLinear, Routing, cosine

INPUTS, WIDTH, OUTPUTS, RANK, QUARANTINE = 12, 10, 7, 6, 3
NAMES = ("0", "2")


def routed(arm: Arm, *, layer_type: type[RoutedLinear] = RoutedLinear, delta: float = 0.3, seed: int = 0) -> Routing:
    """Two routed layers in float64, trained a little: no parameter is zero (unless ``delta`` is)."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS, bias=False)).double()
    kind = type("ToyRouting", (Routing,), {"layer_type": layer_type})
    routing: Routing = kind(model, NAMES, rank=RANK, quarantine_rank=QUARANTINE, arm=arm)
    with torch.no_grad():
        for layer in routing.layers.values():
            layer.delta_s_R.copy_(torch.randn_like(layer.delta_s_R) * delta)
            layer.b_OQ.copy_(torch.randn_like(layer.b_OQ) * 0.2)
    routing.aim({name: nn.functional.normalize(torch.randn(RANK).double(), dim=0) for name in NAMES})
    return routing


def rollout_batch(count: int, length: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs ``[G, S, I]``, and what outputs are weighed by, ``[G, S, O]``."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(count, length, width, generator=generator).double() for width in (INPUTS, OUTPUTS)]
    return draw[0], draw[1]


def loss_of(outputs: Tensor, weights: Tensor) -> Tensor:
    """A sum over tokens, so that rollouts are independent of each other."""
    return (outputs * weights).sum() + 0.1 * outputs.square().sum()


def by_rollout(routing: Routing, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """What each rollout wants of ``delta_S``, ``[G, R]`` by layer: a backward for each, without any gate."""
    for layer in routing.layers.values():
        layer.close()
    deltas = [layer.delta_s_R for layer in routing.layers.values()]
    rows = [
        torch.autograd.grad(loss_of(routing.model(one), weight), deltas) for one, weight in zip(x, weights, strict=True)
    ]
    return {name: torch.stack(each) for name, each in zip(routing.layers, zip(*rows, strict=True), strict=True)}


def filtered(routing: Routing, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum over the rollouts that are not flagged."""
    return {name: each[cosine(each, routing.layers[name].direction_R) <= 0].sum(0) for name, each in wanted.items()}


def trained_step(routing: Routing, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The gradients of a step with a prompt for each batch ``[G, S, ..]``."""
    for x, weights in batches:
        routing.begin(Rollouts(*x.shape[:2]))
        loss_of(routing.model(x), weights).backward()
        routing.collect()
        for parameter in routing.parameters():
            parameter.grad = None
    routing.restore()
    return {name: each.grad.clone() for name, each in routing.model.named_parameters() if each.grad is not None}
