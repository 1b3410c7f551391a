"""``lz.routed_adapter`` in training: the gradients of gates without any gate, in every way of training and compiling."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lz_compile
from lz_compile.backend import layerzero
from models.routed_adapter import Arm, Rollouts, Routing
from tests.routing_exact import ARMS, ExactLinear
from tests.routing_toys import NAMES, by_rollout, filtered, loss_of, rollout_batch, routed, trained_step

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def exact(arm: Arm, **options: Any) -> Routing:
    return routed(arm, layer_type=ExactLinear, **options)


def same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def run_by(routing: Routing, function: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Gradients of one prompt through some form of the model."""
    routing.begin(Rollouts(*x.shape[:2]))
    loss_of(function(x), weights).backward()
    routing.collect()
    return {name: each.grad.clone() for name, each in routing.model.named_parameters()}


@pytest.mark.parametrize("arm", ARMS)
def test_the_op_gives_the_gradients_of_the_gate_form(arm):
    batches = [rollout_batch(4, 5, seed) for seed in range(3)]
    same(trained_step(exact(arm), batches), trained_step(routed(arm), batches), **EXACT)


def test_axes_without_delta_s_are_routed_exactly_where_a_gate_cannot():
    (x, weights), fresh = rollout_batch(4, 5), exact(Arm.GRAD_ROLLOUT, delta=0.0)
    wanted = by_rollout(routed(Arm.GRAD_ROLLOUT, delta=0.0), x, weights)
    found = run_by(fresh, fresh.model, x, weights)
    gated = routed(Arm.GRAD_ROLLOUT, delta=0.0)
    late = run_by(gated, gated.model, x, weights)
    for name, expected in filtered(gated, wanted).items():
        assert not torch.allclose(expected, wanted[name].sum(0))
        torch.testing.assert_close(found[f"{name}.delta_s_R"], expected, **EXACT)
        torch.testing.assert_close(late[f"{name}.delta_s_R"], wanted[name].sum(0), **EXACT)


def test_packed_and_ragged_rollouts_are_those_of_the_gate_form():
    (x, weights), ids = rollout_batch(1, 9), torch.tensor([2, 0, 1, 1, 0, 1, 2, 2, 0])
    gradients = []
    for routing in (exact(Arm.GRAD_ROLLOUT), routed(Arm.GRAD_ROLLOUT)):
        routing.begin(Rollouts(3, ids=ids))
        loss_of(routing.model(x[0]), weights[0]).backward()
        routing.collect()
        gradients.append({name: each.grad for name, each in routing.model.named_parameters()})
    same(*gradients, **EXACT)


@pytest.mark.parametrize("arm", ARMS)
def test_prompts_one_by_one_add_up_to_one_big_batch(arm):
    batches = [rollout_batch(4, 5, seed) for seed in range(3)]
    big = torch.cat([x for x, _ in batches]), torch.cat([weights for _, weights in batches])
    same(trained_step(exact(arm), batches), trained_step(exact(arm), [big]), **EXACT)


def test_gradients_accumulate_in_place_as_well():
    batches, routing = [rollout_batch(4, 5, seed) for seed in range(3)], exact(Arm.GRAD_ROLLOUT)
    expected = trained_step(exact(Arm.GRAD_ROLLOUT), batches)
    for x, weights in batches:
        routing.begin(Rollouts(4, 5))
        loss_of(routing.model(x), weights).backward()
    same({name: each.grad for name, each in routing.model.named_parameters()}, expected, **EXACT)


@pytest.mark.parametrize("arm", ARMS)
def test_checkpointed_layers_are_routed_as_without(arm):
    batch, plain, routing = rollout_batch(4, 5), exact(arm), exact(arm)
    expected = run_by(plain, plain.model, *batch)
    found = run_by(routing, lambda x: checkpoint(routing.model, x, use_reentrant=False), *batch)
    same(found, expected, rtol=0, atol=0)


def test_autocast_gives_the_gradients_of_the_gate_form_under_autocast():
    (x, weights), found = rollout_batch(4, 5), []
    for routing in (exact(Arm.GRAD_ROLLOUT), routed(Arm.GRAD_ROLLOUT)):
        routing.model.float()

        def under_autocast(x: Tensor, model: nn.Module = routing.model) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float()

        found.append(run_by(routing, under_autocast, x.float(), weights.float()))
    same(*found, rtol=0.05, atol=0.05 * float(found[1]["0.delta_s_R"].abs().max()))


def test_nothing_of_a_step_lives_past_it():
    routing, (x, weights) = exact(Arm.GRAD_ROLLOUT), rollout_batch(4, 5)
    alive: list[weakref.ref[Tensor]] = []

    def pack(saved: Tensor) -> Tensor:
        alive.append(weakref.ref(saved := saved.detach()))
        return saved

    gc.disable()
    try:
        routing.begin(Rollouts(4, 5))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            loss = loss_of(routing.model(x), weights)
        assert sum(each() is not None for each in alive) > len(NAMES)
        loss.backward()
        routing.collect()
        assert all(each() is None for each in alive)
    finally:
        gc.enable()


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_ddp_reduces_what_was_routed_already(tmp_path):
    from tests.routing_ranks import run_ranks

    found = run_ranks(tmp_path)
    for form, routing in (("gates", routed(Arm.GRAD_ROLLOUT)), ("exact", exact(Arm.GRAD_ROLLOUT))):
        expected = trained_step(routing, [rollout_batch(4, 5)])
        same(*found[form], rtol=0, atol=0)
        same({name: gradient * 2 for name, gradient in found[form][0].items()}, expected, **EXACT)


# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_traced_by_aot_it_is_the_same(arm):
    torch._dynamo.reset()
    batch, plain, routing = rollout_batch(4, 5), exact(arm), exact(arm)
    compiled = torch.compile(routing.model, backend="aot_eager", fullgraph=True)
    same(run_by(routing, compiled, *batch), run_by(plain, plain.model, *batch), **EXACT)


@pytest.mark.slow
def test_compiled_by_layerzero_it_is_the_same():
    """The other arms by Inductor are in test_routing_calls.py."""
    torch._dynamo.reset()
    arm = Arm.ACT
    batches, plain, routing = [rollout_batch(4, 5, seed) for seed in range(2)], exact(arm), exact(arm)
    model, routing.model = routing.model, torch.compile(routing.model, backend=layerzero, fullgraph=True)
    routing.model.named_parameters = model.named_parameters
    same(trained_step(routing, batches), trained_step(plain, batches), **EXACT)


@pytest.mark.usefixtures("no_code_generation")
@pytest.mark.slow
@pytest.mark.parametrize("arm", [Arm.NONE, Arm.ACT, Arm.GRAD_TOKEN])  # per rollout: test_routing.py
def test_gates_and_masks_of_plain_pytorch_are_recognised_and_train_alike(arm):
    torch._dynamo.reset()
    batches, plain, routing = [rollout_batch(4, 5, seed) for seed in range(2)], routed(arm), routed(arm)
    model = routing.model
    options = {"layerzero.lock": {"routing": "torch.routing"}}
    routing.model = torch.compile(model, backend=layerzero, fullgraph=True, options=options)
    routing.model.named_parameters = model.named_parameters
    same(trained_step(routing, batches), trained_step(plain, batches), **EXACT)
    found = [match for report in lz_compile.reports() for match in report.matches if match.op == "routing"]
    assert [match.rewritten for match in found] == [True] * len(NAMES), lz_compile.reports()
