"""The rollout is the unit: flags of rollouts are right where flags of tokens scatter, and figures tell how much leaks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.routed_adapter import GATED, Arm, Rollouts, Routing
from models.routing_leakage import reached, recorded, scatter
from tests.routing_toys import NAMES, RANK, by_rollout, loss_of, rollout_batch, routed

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def backward(routing: Routing, x: Tensor, weights: Tensor, rollouts: Rollouts) -> None:
    routing.begin(rollouts)
    loss_of(routing.model(x), weights).backward()


def noisy_rollouts(count: int = 40, length: int = 256) -> tuple[Routing, Tensor, Tensor, Tensor]:
    """One layer, whose tokens want a little of the direction (unwanted rollouts) or of its opposite, and much noise."""
    routing = routed(Arm.GRAD_ROLLOUT)
    layer = routing.layers["0"]
    generator = torch.Generator().manual_seed(5)
    is_unwanted = torch.arange(count) % 2 == 0
    noise = torch.randn(count, length, RANK, generator=generator).double()
    pull = torch.where(is_unwanted, 0.25, -0.25)[:, None, None] * layer.direction_R
    dy = torch.ones(count, length, RANK).double() @ layer.u_OR.T  # dy @ U is one on every axis
    return routing, (noise + pull) @ layer.vh_RI, dy, is_unwanted


@pytest.mark.parametrize("arm", GATED)
def test_flags_of_rollouts_are_right_where_flags_of_tokens_scatter(arm):
    base, x, dy, is_unwanted = noisy_rollouts()
    layer = base.layers["0"]
    layer.arm = arm
    layer.open(Rollouts(*x.shape[:2]))
    layer(x).backward(dy)
    everything = layer.delta_s_R.grad.clone()
    told = layer.filter()
    clean = told.gradient_DR.view(len(x), -1, RANK)[~is_unwanted].sum((0, 1))
    flagged = told.flagged_D.view(len(x), -1).double().mean(1)
    share = float(flagged[~is_unwanted].mean())
    kept = float(layer.delta_s_R.grad @ layer.direction_R / (clean @ layer.direction_R))
    if arm is Arm.GRAD_ROLLOUT:
        assert torch.equal(flagged > 0, is_unwanted)
        torch.testing.assert_close(layer.delta_s_R.grad, clean, rtol=1e-6, atol=1e-6)
    else:
        assert 0.3 < share < 0.5, "tokens of clean rollouts that are flagged by noise"
        assert kept > 2, "what is kept of noise is mostly the half that happens to lie on one side"
        assert not torch.allclose(layer.delta_s_R.grad, clean, rtol=0.5)
    assert not torch.allclose(layer.delta_s_R.grad, everything)


def test_both_figures_of_the_scatter_are_told_for_any_arm():
    routing, x, dy, is_unwanted = noisy_rollouts()
    layer, rollouts = routing.layers["0"], Rollouts(*x.shape[:2])
    with recorded(routing) as found:
        layer(x).backward(dy)
    masses = {}
    for layer.arm in GATED:
        routing.layers = {"0": layer}
        passed, there = reached(routing, found, rollouts, ~is_unwanted)
        masses[layer.arm] = passed / there
    assert masses[Arm.GRAD_ROLLOUT] == 1
    assert 0.4 < masses[Arm.GRAD_TOKEN] < 0.7, "about half of what clean rollouts want goes astray"
    seen = scatter(layer, found["0"], rollouts)
    assert torch.equal(seen.cosine_G > 0, is_unwanted)
    assert 0.3 < float(seen.flagged_tokens_G[~is_unwanted].mean()) < 0.5
    assert 0.5 < float(seen.flagged_tokens_G[is_unwanted].mean()) < 0.7


def test_recorded_contributions_are_those_of_gates_and_exact_at_zero():
    routing, (x, weights) = routed(Arm.GRAD_ROLLOUT, delta=0.0), rollout_batch(4, 5)
    wanted = by_rollout(routing, x, weights)
    with recorded(routing) as found:
        backward(routing, x, weights, Rollouts(4, 5))
    for name in NAMES:
        torch.testing.assert_close(Rollouts(4, 5).sum(found[name].gradient_NR), wanted[name], **EXACT)


@pytest.mark.parametrize("arm", [Arm.NONE, *GATED])
def test_leakage_is_one_without_routing_and_what_flags_leave_with_it(arm):
    (x, weights), rollouts, chosen = rollout_batch(4, 5), Rollouts(4, 5), torch.tensor([True, False, True, True])
    routing = routed(arm)
    with recorded(routing) as found:
        backward(routing, x, weights, rollouts)
    passed, there = reached(routing, found, rollouts, chosen)
    left = 0.0
    for name, told in routing.collect().items():
        flagged = told.flagged_D.repeat_interleave(20 // len(told.flagged_D)).view(4, 5)
        norms = found[name].gradient_NR.norm(dim=-1).view(4, 5)
        left += float(norms[chosen][~flagged[chosen]].sum())
    if arm is Arm.NONE:
        assert passed == there > 0
    else:
        assert passed == pytest.approx(left)
        assert 0 < passed < 0.9 * there
