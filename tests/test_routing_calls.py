"""Calls of ``lz.routed_adapter`` in their surroundings: memory, records, checkpoints, autocast, transforms and compilers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lz_compile as lz
from lz_compile.backend import layerzero
from lz_compile.errors import DoubleBackwardError, TransformUnsupportedError
from lz_compile.ground.fingerprint import source_hash
from lz_compile.lowering.ops.routing import cosine
from tests.graphs import capture
from tests.routing_problems import ARMS, D, E, G, Q, R, S, adapter, by_rollout, gradients, plain, weights

# ---- memory ----------------------------------------------------------------------------------------------------------


class _Made(TorchDispatchMode):
    """Weak references to every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.refs += [weakref.ref(each) for each in torch.utils._pytree.tree_leaves(out) if isinstance(each, Tensor)]
        return out


@pytest.mark.parametrize("arm", ARMS)
def test_no_tensor_of_a_step_lives_past_it(arm: str) -> None:
    operands, v = adapter()
    record = lz.RoutingRecord(G, R)
    gc.disable()
    try:
        with _Made() as made:
            out = lz.routed_adapter(*operands, v=v, arm=arm, record=record)
            out.backward(weights(out))
            del out
        kept = {
            each.untyped_storage().data_ptr()
            for each in (*(o.grad for o in operands if o.requires_grad), record._read())
        }
        alive = [each() for each in made.refs]
        left = [each.shape for each in alive if each is not None and each.untyped_storage().data_ptr() not in kept]
        assert left == []
    finally:
        gc.enable()


class _Mark:
    """Something to have a weak reference to."""


@pytest.mark.parametrize("arm", ARMS)
def test_nothing_of_a_compiled_step_lives_past_it(arm: str) -> None:
    operands, v = adapter()
    record = lz.RoutingRecord(G, R)
    step = torch.compile(
        lambda *given: lz.routed_adapter(*given, v=v, arm=arm, record=record), backend="aot_eager", fullgraph=True
    )

    def run() -> list[weakref.ref[Any]]:
        x, mark = operands[0].detach().clone().requires_grad_(), _Mark()
        out = step(x, *operands[1:])
        assert out.grad_fn is not None
        out.grad_fn.metadata["mark"] = mark  # lives as long as the graph and what it saved
        alive = [weakref.ref(each) for each in (x, out, mark)]
        out.backward(weights(out))
        return alive

    run()  # what compiles may leave cycles
    gc.disable()
    try:
        assert [each() for each in run()] == [None] * 3
    finally:
        gc.enable()
    assert not record.cosines.isnan().any()


def test_what_is_saved_for_backward_has_no_product_by_token_and_no_gate() -> None:
    operands, v = adapter()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        lz.routed_adapter(*operands, v=v)
    made = [each for each in saved if not any(each.data_ptr() == one.data_ptr() for one in (*operands, v))]
    assert [tuple(each.shape) for each in made] == [(G * S, R + Q)], "both projections, and nothing else"


# ---- the record ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_record_has_cosines_flags_norms_and_gradients_of_the_last_backward(is_packed: bool) -> None:
    operands, v = adapter()
    found, flags = by_rollout(operands, v)
    given: dict[str, Any] = {"cu_seqlens": torch.arange(G + 1) * S} if is_packed else {}
    x = operands[0].detach().reshape(-1, D) if is_packed else operands[0]
    record = lz.RoutingRecord(G, R)
    assert record.is_empty
    for _ in range(2):  # the second is not added to the first
        out = lz.routed_adapter(x, *operands[1:], v=v, record=record, **given)
        out.backward(weights(out))
    g = torch.stack(found).float()
    torch.testing.assert_close(record.gradients, g)
    torch.testing.assert_close(record.cosines, cosine(g, v.float()))
    assert record.flagged.tolist() == [float(each) for each in flags]
    torch.testing.assert_close(record.norms, g.norm(dim=1))
    torch.testing.assert_close(record.passed_norms, g.norm(dim=1) * ~torch.tensor(flags))
    unwanted = torch.tensor(flags)
    assert float(record.leakage(unwanted)) == 0.0
    assert float(record.leakage(~unwanted)) == 1.0
    record.clear()
    assert record.is_empty


def test_without_an_arm_a_record_tells_what_would_have_been_flagged() -> None:
    operands, v = adapter()
    record = lz.RoutingRecord(G)
    lz.routed_adapter(*operands, v=v, arm="none", record=record).backward(weights(torch.empty(G, S, E).double()))
    _, flags = by_rollout(operands, v)
    assert (record.cosines > 0).tolist() == flags
    assert record.flagged.sum() == 0
    assert float(record.leakage(torch.tensor(flags))) == 1.0


def test_a_record_of_the_act_arm_has_the_share_of_tokens() -> None:
    operands, v = adapter()
    record = lz.RoutingRecord(G, R)
    out = lz.routed_adapter(*operands, v=v, arm="act", record=record)
    out.backward(weights(out))
    of_tokens = cosine(operands[0] @ operands[1].T, v).float()
    torch.testing.assert_close(record.flagged, (of_tokens > 0).float().mean(1))
    torch.testing.assert_close(record.cosines, of_tokens.mean(1))
    found, _ = by_rollout(operands, v)
    torch.testing.assert_close(record.norms, torch.stack(found).norm(dim=1).float())
    assert float(record.leakage(torch.ones(G, dtype=torch.bool))) > 0
    assert (record.passed_norms != record.norms).all()


def test_two_calls_that_share_a_record_have_no_figures() -> None:
    operands, v = adapter()
    record = lz.RoutingRecord(G)
    out = lz.routed_adapter(*operands, v=v, record=record) + lz.routed_adapter(*operands, v=v, record=record)
    out.sum().backward()
    assert record.cosines.isnan().all()


def test_a_copy_of_a_record_is_filled_by_its_own_calls() -> None:
    operands, v = adapter()
    record = lz.RoutingRecord(G, R)
    lz.routed_adapter(*operands, v=v, record=record).sum().backward()
    copies = [copy.deepcopy(record), pickle.loads(pickle.dumps(record))]
    assert all(each.is_empty for each in copies)
    for each in copies:
        lz.routed_adapter(*operands, v=v, record=each).sum().backward()
        torch.testing.assert_close(each.gradients, record.gradients)


def test_a_record_that_does_not_fit_or_was_not_filled_says_so() -> None:
    operands, v = adapter()
    with pytest.raises(ValueError, match=r"expected record of 6 rollouts and rank 5 .* received one of 2 and None"):
        lz.routed_adapter(*operands, v=v, record=lz.RoutingRecord(2))
    with pytest.raises(RuntimeError, match=r"expected a backward through its adapter"):
        _ = lz.RoutingRecord(2).cosines
    with pytest.raises(RuntimeError, match=r"Make it with rank=R"):
        _ = lz.RoutingRecord(2).gradients


# ---- surroundings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_that_computes_again_routes_the_same(is_reentrant: bool) -> None:
    operands, v = adapter()
    record = lz.RoutingRecord(G)
    wanted = gradients(lz.routed_adapter, operands, v=v)

    def call(x: Tensor, *rest: Tensor) -> Tensor:
        return lz.routed_adapter(x, *rest, v=v, record=record)

    out = checkpoint(call, *operands, use_reentrant=is_reentrant)
    out.backward(weights(out))
    torch.testing.assert_close([each.grad for each in operands if each.requires_grad], wanted)
    assert not record.cosines.isnan().any()


def test_gradients_of_several_backwards_add_up_as_if_each_were_alone() -> None:
    alone = []
    for seed in (0, 1):
        operands, v = adapter(seed=seed)
        alone.append(gradients(lz.routed_adapter, operands, v=v)[1])
    operands, _ = adapter(seed=0)
    delta = torch.zeros(R, dtype=torch.float64)
    for seed in (0, 1):
        given, v = adapter(seed=seed)
        out = lz.routed_adapter(*given, v=v)
        out.backward(weights(out))
        assert given[3].grad is not None
        delta += given[3].grad
    torch.testing.assert_close(delta, alone[0] + alone[1])


def test_autocast_multiplies_in_its_dtype_and_gives_gradients_in_that_of_the_operands() -> None:
    operands, v = adapter(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = lz.routed_adapter(*operands, v=v, weight=torch.randn(E, D))
        alone = lz.routed_adapter(*operands, v=v, arm="none")
        source = plain(*operands)
    assert out.dtype == alone.dtype == source.dtype == torch.bfloat16
    torch.testing.assert_close(alone, source, atol=0.2, rtol=0.05)
    out.sum().backward()
    assert [each.grad.dtype for each in operands if each.grad is not None] == [torch.float32] * 4


def test_a_loss_that_is_scaled_is_routed_by_the_same_flags() -> None:
    operands, v = adapter(torch.float32)
    expected = gradients(lz.routed_adapter, operands, v=v)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**16), torch.optim.SGD(operands[3:], lr=0.1)
    out = lz.routed_adapter(*operands, v=v)
    scaler.scale((out * weights(out)).sum()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close([each.grad for each in operands[3:]], expected[1:])


def test_a_second_derivative_is_refused() -> None:
    operands, v = adapter()
    out = lz.routed_adapter(*operands, v=v)
    with pytest.raises(
        DoubleBackwardError, match=r"differentiating lz.routed_adapter twice: .* Leave create_graph out"
    ):
        torch.autograd.grad(out.sum(), operands[3], create_graph=True)


def test_transforms_take_the_arms_that_autograd_can_see_into_and_refuse_the_other() -> None:
    operands, v = adapter()

    def loss(delta: Tensor, arm: str) -> Tensor:
        return lz.routed_adapter(*operands[:3], delta, *operands[4:], v=v, arm=arm).square().sum()

    for arm in ("none", "act"):
        found = torch.func.grad(loss)(operands[3].detach(), arm)
        torch.testing.assert_close((found,), torch.autograd.grad(loss(operands[3], arm), operands[3]))
    with pytest.raises(TransformUnsupportedError, match=r"expected the arm 'none' or 'act' .* received the arm 'grad'"):
        torch.func.grad(loss)(operands[3].detach(), "grad")


def compiled(backend: Any, arm: str, **given: Any) -> None:
    """A compiled function gives the values, gradients and record of one that is not."""
    results = []
    for is_compiled in (False, True):
        operands, v = adapter(torch.float32, *(() if not given else (G * S, D)))
        record = lz.RoutingRecord(G, R)

        def step(*operands: Tensor, v: Tensor = v, record: lz.RoutingRecord = record) -> Tensor:
            return lz.routed_adapter(operands[0] * 1.5, *operands[1:], v=v, arm=arm, record=record, **given).sin()

        out = (torch.compile(step, backend=backend, fullgraph=True) if is_compiled else step)(*operands)
        out.backward(weights(out))
        results.append([out.detach(), *(each.grad for each in operands if each.requires_grad), record._read()])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("way", ["even", "packed"])
def test_a_compiled_call_is_the_same_with_its_record(arm: str, way: str) -> None:
    compiled("aot_eager", arm, **({"cu_seqlens": torch.tensor([0, 3, 3, 20, 29, 40, 54])} if way == "packed" else {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "way"),
    [pytest.param("inductor", "packed", marks=pytest.mark.thorough), (layerzero, "even")],
    ids=["inductor", "layerzero"],
)
def test_a_call_compiled_into_code_is_the_same_with_its_record(backend: Any, way: str) -> None:
    compiled(backend, "grad", **({"cu_seqlens": torch.tensor([0, 3, 3, 20, 29, 40, 54])} if way == "packed" else {}))


def test_a_graph_says_which_version_of_the_source_its_operator_is() -> None:
    """Compilers' caches know operators by their names: without that they would give back what an older version computed."""
    operands, v = adapter()
    module = capture(lambda *given: lz.routed_adapter(*given, v=v), *operands)
    (node,) = (node for node in module.graph.nodes if node.target is torch.ops.layerzero.routing.default)
    assert node.args[-1] == source_hash()[:16]


def test_a_compiled_checkpoint_routes_the_same() -> None:
    operands, v = adapter()

    def step(*operands: Tensor) -> Tensor:
        return checkpoint(lambda *given: lz.routed_adapter(*given, v=v).sin(), *operands, use_reentrant=False)

    found = gradients(torch.compile(step, backend="aot_eager", fullgraph=True), operands)
    torch.testing.assert_close(found, gradients(lambda *given: lz.routed_adapter(*given, v=v).sin(), operands))


@pytest.mark.parametrize("way", ["flat", "packed"])
def test_a_compiled_call_takes_rollouts_of_any_number_without_compiling_again(way: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lz.routed_adapter, backend=counter, dynamic=True, fullgraph=True)
    counts = []
    for rollouts, length in ((4, 9), (8, 13), (3, 17)):
        tokens = rollouts * length
        operands, v = adapter(torch.float64, tokens, D)
        where: dict[str, Any] = {
            "flat": {"rollouts": (rollouts, length)},
            "packed": {"cu_seqlens": torch.tensor([0, *range(2, tokens, length), tokens])},
        }[way]
        found = gradients(step, operands, v=v, **where)
        torch.testing.assert_close(found, gradients(lz.routed_adapter, operands, v=v, **where))
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1
