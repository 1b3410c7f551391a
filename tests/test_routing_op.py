"""``lz.routed_adapter`` and its kernel of PyTorch's: what is routed, what is not, and that nothing of a step stays behind."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
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
from lz_compile.lowering.kernels import torch_routing
from lz_compile.lowering.ops import routing as op
from lz_compile.lowering.ops.routing import cosine
from lz_compile.runtime.registry import kernels
from tests.routing_problems import PROBLEMS, TOLERANCE, Problem, expected, misses, with_gradients

G, S, D, E, R, Q = 6, 9, 11, 7, 5, 3
NAMES = ("x", "Vh", "U", "delta_S", "A_q", "B_q")
ARMS = ("grad", "act", "none")


def adapter(dtype: torch.dtype = torch.float64, *shape: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """The operands of ``lz.routed_adapter``, and a direction."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape or (G, S, D), (R, D), (E, R), (R,), (Q, D), (E, Q))
    found = [torch.randn(each, generator=generator, dtype=torch.float64).to(dtype) for each in shapes]
    for name, each in zip(NAMES, found, strict=True):
        each.requires_grad_(name not in ("Vh", "U"))
    return found, torch.randn(R, generator=generator, dtype=torch.float64).to(dtype)


def plain(x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, gate: Any = 1.0) -> Tensor:
    """The sum of both adapters."""
    return ((x @ vh.T) * gate * delta) @ u.T + (x @ a_q.T) @ b_q.T


def weights(like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, like.numel(), dtype=torch.float64).mul(37).sin().view(like.shape).to(like.dtype)


def by_rollout(operands: list[Tensor], v: Tensor) -> tuple[list[Tensor], list[bool]]:
    """The gradient of every rollout for ``delta_S`` by a backward of its own, and whether it is flagged."""
    whole = weights(plain(*operands))
    found, flags = [], []
    for number in range(operands[0].shape[0]):
        delta = operands[3].detach().clone().requires_grad_()
        out = plain(operands[0][number], *operands[1:3], delta, *operands[4:])
        (g,) = torch.autograd.grad(out, delta, whole[number])
        found.append(g)
        flags.append(bool(torch.dot(g, v) > 0))
    return found, flags


def gradients(call: Callable[..., Tensor], operands: list[Tensor], **given: Any) -> list[Tensor]:
    """Of every operand that wants one."""
    leaves = [each for each in operands if each.requires_grad]
    out = call(*operands, **given)
    return list(torch.autograd.grad(out, leaves, weights(out)))


# ---- kernels and the definition --------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_kernel_is_the_definition_with_all_gradients(problem: Problem) -> None:
    operands, attrs = problem.operands(torch.float64), problem.attrs(torch.float64)
    found = with_gradients(torch_routing.routing, operands, attrs)
    assert not list(misses(found, expected(operands, attrs), torch.float64))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("arm", ARMS)
def test_every_dtype_is_as_near_to_float64_as_it_can_be(arm: str, dtype: torch.dtype) -> None:
    problem = Problem(arm, rollouts=5, length=40, wide=30, out=20, rank=9)
    operands, attrs = problem.operands(dtype, seed=3), problem.attrs(dtype)
    found = with_gradients(torch_routing.routing, operands, attrs)
    assert found["result"].dtype == dtype
    assert not list(misses(found, expected(operands, attrs), dtype))


def test_a_basis_that_wants_gradients_gets_those_of_the_plain_sum() -> None:
    problem = Problem("none", has_layer=False)
    operands = problem.operands(torch.float64)
    for name in ("vh", "u"):
        operands[name].requires_grad_()
    attrs = problem.attrs(torch.float64)
    assert not list(
        misses(with_gradients(torch_routing.routing, operands, attrs), expected(operands, attrs), torch.float64)
    )


def test_the_descriptor_says_what_the_kernel_is() -> None:
    spec = kernels("routing")["torch.routing"]
    assert not spec.is_opaque
    assert spec.call is torch_routing.routing
    assert "estimate" in spec.prior_source


@pytest.mark.parametrize("variant", op.VARIANTS)
def test_a_sample_is_the_same_as_written_and_by_the_kernel(variant: str) -> None:
    sizes = {
        "num_rollouts": 3,
        "rollout_length": 4,
        "in_features": 8,
        "out_features": 6,
        "rank": 5,
        "quarantine_rank": 2,
    }
    sample = op.sample(sizes, torch.float64, torch.device("cpu"), variant=variant, is_training=True)
    assert sample.attrs.variant == variant
    written, ours = sample.as_written(), sample.with_kernel(torch_routing.routing)
    torch.testing.assert_close(written(*sample.inputs), ours(*sample.inputs))
    quarantine = sample.inputs[4:6]
    found = [torch.autograd.grad(call(*sample.inputs).square().sum(), quarantine) for call in (written, ours)]
    torch.testing.assert_close(*found)


# ---- the value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
def test_the_value_is_the_plain_sum_whatever_is_routed(dtype: torch.dtype) -> None:
    operands, v = adapter(dtype)
    exact = plain(*(each.double() for each in operands))
    found = [lz.routed_adapter(*operands, v=v, arm=arm) for arm in ARMS]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    ours, theirs = ((each.double() - exact).abs().max() for each in (found[0], plain(*operands)))
    assert ours <= 2 * theirs + 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_the_layer_and_a_base_are_added_and_get_all_their_gradients() -> None:
    operands, v = adapter()
    weight, bias, base = (
        torch.randn(each, dtype=torch.float64, requires_grad=True) for each in ((E, D), (E,), (G, S, E))
    )
    out = lz.routed_adapter(*operands, v=v, weight=weight, bias=bias, base=base)
    wanted = torch.nn.functional.linear(operands[0], weight, bias) + base + plain(*operands)
    torch.testing.assert_close(out, wanted)
    leaves = [operands[0], weight, bias, base]
    torch.testing.assert_close(*(torch.autograd.grad(each, leaves, weights(each)) for each in (out, wanted)))


# ---- what is routed --------------------------------------------------------------------------------------------------


def test_a_gate_of_ones_gets_delta_times_what_its_rollout_sends() -> None:
    operands, v = adapter()
    found, _ = by_rollout(operands, v)
    wanted = torch.stack(found) * operands[3]
    given = dict(zip(("x", "vh", "u", "delta", "a_q", "b_q"), operands, strict=True))
    for gate, kind in ((torch.ones(G, R), "rollout"), (torch.ones(G, S, R), "token")):
        c = gate.double().requires_grad_()
        attrs = op.RoutingAttrs(gate=kind, compute_dtype=torch.float64, out_dtype=torch.float64)  # type: ignore[arg-type]
        out = torch_routing.routing(**given, gate=c, attrs=attrs)
        (of_gate,) = torch.autograd.grad(out, c, weights(out))
        assert of_gate.shape == c.shape
        torch.testing.assert_close(of_gate if kind == "rollout" else of_gate.sum(1), wanted)
        source = plain(*operands, gate=c if kind == "token" else c[:, None])
        torch.testing.assert_close(of_gate, *torch.autograd.grad(source, c, weights(source)))


def test_flagged_rollouts_are_left_out_of_the_gradient_of_delta_and_of_nothing_else() -> None:
    operands, v = adapter()
    found, flags = by_rollout(operands, v)
    assert 0 < sum(flags) < G, "both kinds are there"
    routed = gradients(lz.routed_adapter, operands, v=v)
    unrouted = gradients(plain, operands)
    wanted = torch.stack([g for g, is_flagged in zip(found, flags, strict=True) if not is_flagged]).sum(0)
    torch.testing.assert_close(routed[1], wanted)
    torch.testing.assert_close(torch.stack(found).sum(0), unrouted[1])
    for place in (0, 2, 3):
        torch.testing.assert_close(routed[place], unrouted[place])


def test_axes_where_delta_is_zero_are_routed_which_the_gate_cannot() -> None:
    operands, v = adapter()
    with torch.no_grad():
        operands[3][::2] = 0.0
    found, flags = by_rollout(operands, v)
    assert any(flags)
    wanted = torch.stack([g for g, is_flagged in zip(found, flags, strict=True) if not is_flagged]).sum(0)
    routed = gradients(lz.routed_adapter, operands, v=v)[1]
    torch.testing.assert_close(routed, wanted)
    c = torch.ones(G, 1, R, dtype=torch.float64, requires_grad=True)
    out = plain(*operands, gate=c)
    (of_gate,) = torch.autograd.grad(out, c, weights(out))
    assert (of_gate[..., ::2] == 0).all(), "the gate sees nothing there"
    assert (routed[::2] - sum(found)[::2]).abs().max() > 0.1, "and yet there is something to leave out"


def test_all_zero_delta_is_routed_on_the_first_step() -> None:
    operands, v = adapter()
    with torch.no_grad():
        operands[3].zero_()
    found, flags = by_rollout(operands, v)
    wanted = sum((g for g, is_flagged in zip(found, flags, strict=True) if not is_flagged), torch.zeros(R).double())
    torch.testing.assert_close(gradients(lz.routed_adapter, operands, v=v)[1], wanted)


def test_the_act_arm_detaches_the_kept_adapter_of_flagged_tokens() -> None:
    operands, v = adapter()

    def source(*given: Tensor) -> Tensor:
        x, vh, u, delta, a_q, b_q = given
        a = x @ vh.T
        kept = (a * delta) @ u.T
        is_flagged = torch.nn.functional.cosine_similarity(a, v, -1, 1e-6) > 0
        assert is_flagged.any()
        assert not is_flagged.all()
        return torch.where(is_flagged[..., None], kept.detach(), kept) + (x @ a_q.T) @ b_q.T

    found = gradients(lz.routed_adapter, operands, v=v, arm="act")
    torch.testing.assert_close(found, gradients(source, operands))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_rollout_that_is_no_number_is_not_silently_left_out(bad: float) -> None:
    operands, v = adapter(torch.float32)
    with torch.no_grad():
        operands[0][2, 3, 1] = bad
    found = gradients(lz.routed_adapter, operands, v=v)[1]
    assert not found.isfinite().all()


def noisy(seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Clean rollouts push delta one way, unwanted ones the other, each token with three times as much noise."""
    generator = torch.Generator().manual_seed(seed)
    rollouts, length, rank = 16, 256, 8
    v = torch.nn.functional.normalize(torch.randn(rank, generator=generator), dim=0)
    is_unwanted = torch.arange(rollouts) % 4 == 0
    noise = torch.randn(rollouts, length, rank, generator=generator) * 3 / rank**0.5
    wanted = torch.where(is_unwanted[:, None, None], v, -v) + noise
    # With x of ones and an identity for a basis, the gradient of the result is what a token sends to delta.
    return [torch.ones(rollouts, length, rank), torch.eye(rank), torch.eye(rank), wanted], v, is_unwanted


def test_rollouts_are_told_apart_where_tokens_scatter() -> None:
    (x, vh, u, wanted), v, is_unwanted = noisy()
    rollouts, length, rank = x.shape
    a_q, b_q = torch.zeros(1, rank), torch.zeros(rank, 1)
    shares = {}
    for unit, shape in (("rollout", (rollouts, length)), ("token", (rollouts * length, 1))):
        delta, record = torch.zeros(rank, requires_grad=True), lz.RoutingRecord(shape[0])
        out = lz.routed_adapter(x.view(-1, rank), vh, u, delta, a_q, b_q, v=v, rollouts=shape, record=record)
        out.backward(wanted.view(-1, rank))
        flags = record.flagged.view(rollouts, -1).mean(1)
        shares[unit] = float(flags[~is_unwanted].mean()), float(flags[is_unwanted].mean())
    assert shares["rollout"] == (0.0, 1.0)
    clean, unwanted = shares["token"]
    assert 0.1 < clean < 0.5, f"{clean:.2f} of the tokens of clean rollouts are flagged by noise"
    assert 0.5 < unwanted < 0.9, f"{1 - unwanted:.2f} of those of unwanted rollouts are not"


def test_routing_is_given_nothing_that_knows_what_is_unwanted() -> None:
    given = set(inspect.signature(lz.routed_adapter).parameters)
    assert given == {
        *NAMES, "v", "arm", "rollouts", "cu_seqlens", "num_rollouts", "weight", "bias", "base", "threshold", "record",
    }  # fmt: skip


# ---- rollouts --------------------------------------------------------------------------------------------------------


def test_all_ways_to_say_where_rollouts_are_are_the_same() -> None:
    operands, v = adapter()
    flat = operands[0].detach().reshape(G * S, D).requires_grad_()
    numbers = torch.arange(G).repeat_interleave(S)
    ways: list[tuple[Tensor, dict[str, Any]]] = [
        (operands[0], {"rollouts": (G, S)}),
        (operands[0], {"rollouts": numbers.view(G, S), "num_rollouts": G}),
        (flat, {"rollouts": (G, S)}),
        (flat, {"rollouts": numbers}),
        (flat, {"rollouts": numbers.int(), "num_rollouts": G + 3}),
        (flat, {"cu_seqlens": torch.arange(G + 1) * S}),
        (flat, {"cu_seqlens": (torch.arange(G + 1) * S).int()}),
        (flat.detach()[None].requires_grad_(), {"cu_seqlens": torch.arange(G + 1) * S}),
    ]
    wanted = gradients(lz.routed_adapter, operands, v=v)
    for x, given in ways:
        out = lz.routed_adapter(x, *operands[1:], v=v, **given)
        assert out.shape == (*x.shape[:-1], E)
        found = gradients(lz.routed_adapter, [x, *operands[1:]], v=v, **given)
        torch.testing.assert_close([each.reshape(one.shape) for each, one in zip(found, wanted, strict=True)], wanted)


def test_packed_rollouts_of_any_length_and_order_are_those_one_by_one() -> None:
    lengths = torch.tensor([3, 0, 17, 1, 8, 5])
    operands, v = adapter(torch.float64, 36, D)
    numbers = torch.arange(6).repeat_interleave(lengths)
    rest = torch.full((2,), -1)
    shuffled = torch.randperm(36, generator=torch.Generator().manual_seed(1))
    numbers = torch.cat((numbers, rest))
    whole = weights(torch.empty(36, E, dtype=torch.float64))
    total = torch.zeros(R, dtype=torch.float64)
    for number in (*range(6), -1):
        mine = numbers == number
        out = plain(operands[0][mine], *operands[1:])
        (g,) = torch.autograd.grad(out, operands[3], whole[mine])
        total += g if number < 0 or not cosine(g, v) > 0 else 0.0
    bounds = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    for order, given in (
        (shuffled, {"rollouts": numbers[shuffled], "num_rollouts": 6}),
        (torch.arange(36), {"cu_seqlens": bounds}),
    ):
        out = lz.routed_adapter(operands[0][order], *operands[1:], v=v, **given)
        torch.testing.assert_close(torch.autograd.grad(out, operands[3], whole[order]), (total,))


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


def test_a_record_that_does_not_fit_or_was_not_filled_says_so() -> None:
    operands, v = adapter()
    with pytest.raises(ValueError, match=r"expected a record of 6 rollouts and rank 5 .* received one of 2 and None"):
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


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("way", ["even", "packed"])
def test_a_compiled_call_is_the_same_with_its_record(arm: str, way: str) -> None:
    compiled("aot_eager", arm, **({"cu_seqlens": torch.tensor([0, 3, 3, 20, 29, 40, 54])} if way == "packed" else {}))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", layerzero], ids=["inductor", "layerzero"])
@pytest.mark.parametrize("way", ["even", "packed"])
def test_a_call_compiled_into_code_is_the_same_with_its_record(backend: Any, way: str) -> None:
    compiled(backend, "grad", **({"cu_seqlens": torch.tensor([0, 3, 3, 20, 29, 40, 54])} if way == "packed" else {}))


def test_a_compiled_checkpoint_routes_the_same() -> None:
    operands, v = adapter()

    def step(*operands: Tensor) -> Tensor:
        return checkpoint(lambda *given: lz.routed_adapter(*given, v=v).sin(), *operands, use_reentrant=False)

    found = gradients(torch.compile(step, backend="aot_eager", fullgraph=True), operands)
    torch.testing.assert_close(found, gradients(lambda *given: lz.routed_adapter(*given, v=v).sin(), operands))


def test_a_compiled_call_takes_rollouts_of_any_number_without_compiling_again() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(
        lambda *given, v: lz.routed_adapter(*given, v=v), backend=counter, dynamic=True, fullgraph=True
    )
    counts = []
    for rollouts, length in ((4, 9), (8, 13), (3, 17)):
        operands, v = adapter(torch.float64, rollouts, length, D)
        torch.testing.assert_close(gradients(step, operands, v=v), gradients(lz.routed_adapter, operands, v=v))
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1


# ---- refusals --------------------------------------------------------------------------------------------------------

_FLAT = {"x": torch.randn(G * S, D)}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "arm": ({"arm": "token"}, r"no arm 'token'; valid are none, grad, act"),
    "no_direction": ({"v": None}, r"the arm 'grad' compares with a direction: expected v \[R\], received none"),
    "no_rollouts": (_FLAT, r"the unit of routing is the rollout, and x \(54, 11\) does not say"),
    "other_rollouts": ({**_FLAT, "rollouts": (G, S + 1)}, r"expected x of 6 rollouts of 10 tokens, received \(54, 11\)"),
    "twice": ({"rollouts": (G, S), "cu_seqlens": torch.tensor([0, 54])}, r"expected rollouts or cu_seqlens, received both"),
    "number_alone": ({"num_rollouts": 3}, r"num_rollouts goes with the number of a rollout for every token"),
    "numbers": ({**_FLAT, "rollouts": torch.zeros(3).long()}, r"for each token, \(54,\), received \(3,\)"),
    "beyond": (
        {**_FLAT, "rollouts": torch.full((G * S,), 7), "num_rollouts": 7}, r"numbers of rollouts below 7, received 7",
    ),
    "float_numbers": ({**_FLAT, "rollouts": torch.zeros(G * S)}, r"expected rollouts in int32 or int64, received torch.float32"),
    "float_bounds": ({**_FLAT, "cu_seqlens": torch.tensor([0.0, 54])}, r"expected cu_seqlens in int32 or int64"),
    "packed": ({"cu_seqlens": torch.tensor([0, 54])}, r"of packed tokens \[tokens, D\], received \(2,\) and \(6, 9, 11\)"),
    "shape_of_x": ({"x": torch.randn(D)}, r"expected x \[G, s, D\] or \[tokens, D\], received \(11,\)"),
    "shape": ({"Vh": torch.randn(R, D + 1)}, r"expected Vh of shape \(5, 11\) \(RD\), received \(5, 12\)"),
    "base": ({"base": torch.randn(G, S, E + 1)}, r"expected base of shape \(6, 9, 7\)"),
    "dtype": ({"A_q": torch.randn(Q, D).double()}, r"expected A_q in the dtype of x, torch.float32, received torch.float64"),
    "integers": ({"v": torch.ones(R).long()}, r"expected v of floating-point numbers, received torch.int64"),
    "device": ({"U": torch.randn(E, R, device="meta")}, r"expected U on cpu as x is, received meta"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_what_would(case: str) -> None:
    operands, v = adapter(torch.float32)
    changes, message = REFUSED[case]
    given = {**dict(zip(NAMES, operands, strict=True)), "v": v, **changes}
    with pytest.raises(ValueError, match=f"lz.routed_adapter: .*{message}"):
        lz.routed_adapter(**given)
