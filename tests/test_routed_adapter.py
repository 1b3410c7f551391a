"""The routed adapter in plain PyTorch: what gates tell, what reaches delta_S, and what lives past a step."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.routed_adapter import (
    Arm,
    CollectionError,
    Rollouts,
    RoutedLinear,
    Routing,
    activation_directions,
    cosine,
    gradient_directions,
    gradients_of_gate,
)
from models.routing_oracle import OracleRouting
from tests.routing_toys import NAMES, RANK, by_rollout, filtered, loss_of, rollout_batch, routed, trained_step

EXACT = {"rtol": 1e-9, "atol": 1e-11}
GATED = [Arm.GRAD_TOKEN, Arm.GRAD_ROLLOUT]


def backward(routing: Routing, x: Tensor, weights: Tensor, rollouts: Rollouts) -> None:
    routing.begin(rollouts)
    loss_of(routing.model(x), weights).backward()


def some_flagged(routing: Routing, wanted: dict[str, Tensor]) -> bool:
    shares = [(cosine(wanted[name], layer.direction_R) > 0).double().mean() for name, layer in routing.layers.items()]
    return all(0 < share < 1 for share in shares)


@pytest.mark.parametrize("arm", Arm)
def test_no_arm_changes_a_value(arm):
    routing, (x, _) = routed(arm), rollout_batch(4, 5)
    layer = routing.layers["0"]
    kept = layer.weight_OI + layer.u_OR @ torch.diag(layer.delta_s_R) @ layer.vh_RI
    expected = x @ (kept + layer.b_OQ @ layer.a_QI).T + layer.bias_O
    routing.begin(Rollouts(4, 5))
    torch.testing.assert_close(layer(x), expected, **EXACT)


def test_a_fresh_adapter_is_the_layer_that_it_wraps():
    linear = nn.Linear(12, 9).double()
    torch.testing.assert_close(
        RoutedLinear(linear, 5, 2, Arm.NONE)(x := torch.randn(3, 12).double()), linear(x), **EXACT
    )


@pytest.mark.parametrize("layout", ["rollouts_by_tokens", "flattened", "packed_and_ragged"])
def test_a_gate_tells_delta_s_times_the_gradient_of_each_rollout(layout):
    routing, (x, weights) = routed(Arm.GRAD_ROLLOUT), rollout_batch(4, 5)
    wanted = by_rollout(routing, x, weights)
    assert some_flagged(routing, wanted)
    rollouts = Rollouts(4, 5)
    if layout != "rollouts_by_tokens":
        x, weights = x.flatten(0, 1), weights.flatten(0, 1)
    if layout == "packed_and_ragged":
        ids = torch.arange(4).repeat_interleave(5)
        order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
        x, weights, rollouts = x[order], weights[order], Rollouts(4, ids=ids[order])
    backward(routing, x, weights, rollouts)
    for name, layer in routing.layers.items():
        torch.testing.assert_close(layer.gate.grad, wanted[name] * layer.delta_s_R, **EXACT)
        torch.testing.assert_close(gradients_of_gate(layer.gate.grad, layer.delta_s_R), wanted[name], **EXACT)
    routing.collect()
    for name, expected in filtered(routing, wanted).items():
        torch.testing.assert_close(routing.layers[name].delta_s_R.grad, expected, **EXACT)


def test_rollouts_of_different_lengths_are_summed_each():
    routing, (x, weights) = routed(Arm.GRAD_ROLLOUT), rollout_batch(1, 9)
    ids = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
    wanted = [by_rollout(routing, x[:, ids == each], weights[:, ids == each]) for each in range(3)]
    backward(routing, x, weights, Rollouts(3, ids=ids[None]))
    for name, layer in routing.layers.items():
        expected = torch.cat([each[name] for each in wanted])
        torch.testing.assert_close(gradients_of_gate(layer.gate.grad, layer.delta_s_R), expected, **EXACT)


@pytest.mark.parametrize("arm", [*GATED, Arm.NONE])
def test_the_quarantine_learns_from_every_rollout(arm):
    plain, routing, batch = routed(Arm.NONE), routed(arm), rollout_batch(4, 5)
    expected, found = trained_step(plain, [batch]), trained_step(routing, [batch])
    assert len(expected) == 3 * len(NAMES)
    for name in expected:
        if "delta_s" not in name:
            torch.testing.assert_close(found[name], expected[name], **EXACT)
        else:
            assert (arm is Arm.NONE) == torch.equal(found[name], expected[name])


def test_an_axis_without_delta_s_keeps_its_full_gradient():
    routing, (x, weights) = routed(Arm.GRAD_ROLLOUT), rollout_batch(4, 5)
    layer = routing.layers["2"]
    with torch.no_grad():
        layer.delta_s_R[2] = 1e-9
    everything = by_rollout(routing, x, weights)["2"].sum(0)
    backward(routing, x, weights, Rollouts(4, 5))
    told = routing.collect()["2"]
    assert told.flagged_D.any()
    assert torch.all(told.gradient_DR[:, 2] == 0)
    torch.testing.assert_close(layer.delta_s_R.grad[2], everything[2], **EXACT)


def test_a_fresh_adapter_is_routed_one_step_late():
    routing, (x, weights) = routed(Arm.GRAD_ROLLOUT, delta=0.0), rollout_batch(4, 5)
    everything = {name: each.sum(0) for name, each in by_rollout(routing, x, weights).items()}
    backward(routing, x, weights, Rollouts(4, 5))
    assert not any(each.flagged_D.any() for each in routing.collect().values())
    for name, layer in routing.layers.items():
        torch.testing.assert_close(layer.delta_s_R.grad, everything[name], **EXACT)


def test_the_activation_mask_detaches_flagged_tokens_only():
    routing, (x, weights) = routed(Arm.ACT), rollout_batch(4, 5)
    layer = routing.layers["0"]
    a = x @ layer.vh_RI.T
    flagged = (a @ layer.direction_R) > 0
    assert 0 < flagged.sum() < flagged.numel()
    wide = weights @ torch.randn(weights.shape[-1], layer.u_OR.shape[0]).double()
    layer(x).backward(wide)
    expected = ((wide @ layer.u_OR) * a)[~flagged].sum(0)
    torch.testing.assert_close(layer.delta_s_R.grad, expected, **EXACT)


# ---- steps of several prompts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", Arm)
def test_prompts_one_by_one_add_up_to_one_big_batch(arm):
    batches = [rollout_batch(4, 5, seed) for seed in range(3)]
    big = torch.cat([x for x, _ in batches]), torch.cat([weights for _, weights in batches])
    expected = trained_step(routed(arm), [big])
    found = trained_step(routed(arm), batches)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **EXACT)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_either_zero_grad_leaves_the_sums_of_earlier_prompts_alone(set_to_none):
    batches = [rollout_batch(4, 5, seed) for seed in range(2)]
    expected = trained_step(routed(Arm.GRAD_ROLLOUT), batches)
    routing = routed(Arm.GRAD_ROLLOUT)
    optimizer = torch.optim.SGD(routing.parameters(), lr=0.1)
    for x, weights in batches:
        backward(routing, x, weights, Rollouts(4, 5))
        routing.collect()
        optimizer.zero_grad(set_to_none=set_to_none)
    routing.restore()
    for name, parameter in routing.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], **EXACT)
    optimizer.zero_grad(set_to_none=set_to_none)
    routing.restore()
    assert all(parameter.grad is None for parameter in routing.parameters()), "the next step begins with nothing"


def test_gradients_that_nobody_collected_are_not_lost_in_silence():
    routing, (x, weights) = routed(Arm.GRAD_ROLLOUT), rollout_batch(4, 5)
    backward(routing, x, weights, Rollouts(4, 5))
    with pytest.raises(CollectionError, match="gradients of the last one were not collected"):
        routing.begin(Rollouts(4, 5))
    routing.collect()
    loss_of(routing.model(x), weights).backward()
    with pytest.raises(CollectionError, match="no gate has a gradient"):
        routing.collect()


class Mark:
    """Something to have a weak reference to."""


@pytest.mark.parametrize("arm", Arm)
def test_nothing_of_a_graph_lives_past_its_prompt(arm):
    routing, (x, weights) = routed(arm), rollout_batch(4, 5)
    alive: list[weakref.ref[object]] = []

    def mark(_layer: nn.Module, _inputs: object, y: Tensor) -> None:
        y.grad_fn.metadata["mark"] = mark_ = Mark()  # lives as long as the node does
        alive.extend((weakref.ref(y), weakref.ref(mark_)))

    hooks = [layer.register_forward_hook(mark) for layer in routing.layers.values()]
    gc.disable()
    try:
        routing.begin(Rollouts(4, 5))
        alive.extend(weakref.ref(layer.gate) for layer in routing.layers.values() if layer.gate is not None)
        loss = loss_of(routing.model(x), weights)
        assert sum(each() is not None for each in alive) >= len(NAMES), "the graph is alive before it is used"
        loss.backward()
        del loss
        assert any(each() is not None for each in alive) == (arm in GATED), "gates are alive until they are read"
        told = routing.collect()
        assert all(each() is None for each in alive)
        assert not any(each.requires_grad for routed_ in told.values() for each in routed_)
    finally:
        gc.enable()
    for hook in hooks:
        hook.remove()


# ---- deployment ------------------------------------------------------------------------------------------------------


def test_the_ablated_model_is_the_layer_and_what_was_kept():
    routing, (x, _) = routed(Arm.GRAD_ROLLOUT), rollout_batch(4, 5)
    full = routing.model(x)
    with routing.ablated():
        ablated = routing.model(x)
    assert not torch.allclose(ablated, full)
    torch.testing.assert_close(routing.model(x), full, rtol=0, atol=0)
    torch.testing.assert_close(routing.deploy()(x), ablated, **EXACT)
    assert all(type(routing.model.get_submodule(name)) is nn.Linear for name in NAMES)
    for layer in routing.layers.values():
        nn.init.zeros_(layer.b_OQ)
    torch.testing.assert_close(routing.layers["0"](x), routing.model[0](x), **EXACT)


def test_only_linear_layers_are_wrapped():
    with pytest.raises(TypeError, match=r"routing 1: expected nn\.Linear, got Tanh"):
        Routing(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), ["1"], rank=2, quarantine_rank=1, arm=Arm.NONE)


# ---- directions, and what routing may read ---------------------------------------------------------------------------


def test_directions_are_unit_differences_of_contrast_pairs_in_eval_mode():
    routing = routed(Arm.GRAD_ROLLOUT)
    modes: list[bool] = []
    routing.model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    pairs = [(rollout_batch(1, 5, seed), rollout_batch(1, 5, seed + 9)) for seed in range(3)]
    found = gradient_directions(routing, pairs, lambda batch: loss_of(routing.model(batch[0]), batch[1]))
    assert routing.model.training
    assert modes == [False] * 6
    assert all(parameter.grad is None for parameter in routing.parameters())
    for name in NAMES:
        mean = sum(by_rollout(routing, *one)[name][0] - by_rollout(routing, *two)[name][0] for one, two in pairs)
        torch.testing.assert_close(found[name], nn.functional.normalize(mean, dim=0), **EXACT)
    vh = routing.layers["0"].vh_RI
    found = activation_directions(routing, pairs, lambda batch: routing.model(batch[0]))
    mean = sum(((one[0] - two[0]) @ vh.T).mean((0, 1)) for one, two in pairs)
    torch.testing.assert_close(found["0"], nn.functional.normalize(mean, dim=0), **EXACT)


@pytest.mark.parametrize("arm", [arm.value for arm in Arm] + ["oracle"])
def test_poisoned_labels_change_nothing_but_an_oracle(arm):
    from examples import grpo, grpo_routing

    task = replace(grpo.Task(), channels=16, mlp_width=24, prompts=2, rollouts=6, steps=2, demonstration_steps=0)
    torch.manual_seed(0)
    base, weights = grpo.policy(task), []
    for poison in (False, True):
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        routing = grpo_routing.routed(base, arm, task, generator)
        optimizer, history = grpo_routing.optimizer_of(routing, task), grpo_routing.History()
        for _ in range(3):
            groups, _ = grpo.groups_of(routing.model, task, generator)
            if poison:
                groups = [replace(group, is_exploiting=~group.is_exploiting) for group in groups]
            grpo_routing.step(routing, routing.model, groups, task, optimizer, history)
        weights.append([parameter.detach().clone() for parameter in routing.parameters()])
    same = all(torch.equal(one, two) for one, two in zip(*weights, strict=True))
    assert same == (arm != "oracle")
    assert any(layer.delta_s_R.detach().abs().max() > 0 for layer in routing.layers.values())


def test_an_oracle_routes_by_what_it_is_told_for_this_prompt():
    (x, weights), told = rollout_batch(4, 5), torch.tensor([True, False, False, True])
    model = routed(Arm.NONE).deploy()
    routing = OracleRouting(model, NAMES, rank=RANK, quarantine_rank=3)
    for layer in routing.layers.values():
        nn.init.constant_(layer.delta_s_R, 0.2)
    wanted = by_rollout(routing, x, weights)
    routing.begin(Rollouts(4, 5))
    routing.tell(told)
    loss_of(model(x), weights).backward()
    routing.collect()
    for name, layer in routing.layers.items():
        torch.testing.assert_close(layer.delta_s_R.grad, wanted[name][~told].sum(0), **EXACT)
        layer.delta_s_R.grad = None
    backward(routing, x, weights, Rollouts(4, 5))
    with pytest.raises(ValueError, match="expected the labels of this prompt"):
        routing.collect()


# ---- ways to train ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", Arm)
def test_checkpointed_layers_are_routed_as_without(arm):
    batch = rollout_batch(4, 5)
    expected = trained_step(routed(arm), [batch])
    routing = routed(arm)
    model = routing.model
    routing.model = lambda x: checkpoint(model, x, use_reentrant=False)
    routing.model.named_parameters = model.named_parameters
    found = trained_step(routing, [batch])
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("arm", GATED)
def test_autocast_routes_by_the_same_flags(arm):
    (x, weights), told = rollout_batch(4, 5), []
    for dtype in (torch.float32, torch.bfloat16):
        routing = routed(arm)
        routing.model.float()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            outputs = routing_outputs(routing, x.float())
        loss_of(outputs.float(), weights.float()).backward()
        told.append(routing.collect())
    for name in NAMES:
        one, two = (each[name] for each in told)
        assert two.gradient_DR.dtype == torch.float32
        torch.testing.assert_close(
            two.gradient_DR, one.gradient_DR, rtol=0.1, atol=0.1 * float(one.gradient_DR.abs().max())
        )
        clear = cosine(one.gradient_DR, routing.layers[name].direction_R).abs() > 0.1
        assert clear.any()
        assert torch.equal(one.flagged_D[clear], two.flagged_D[clear])


def routing_outputs(routing: Routing, x: Tensor) -> Tensor:
    routing.begin(Rollouts(*x.shape[:2]))
    outputs: Tensor = routing.model(x)
    return outputs
