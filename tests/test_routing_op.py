"""``lz.routed_adapter`` and its kernel of PyTorch's: values and gradients, what is routed, rollouts, refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import lz_compile as lz
from lz_compile.lowering.kernels.routing import torch_routing
from lz_compile.lowering.ops import routing as op
from lz_compile.lowering.ops.routing import cosine
from lz_compile.runtime.kernels.registry import kernels
from tests.routing_problems import (
    ARMS,
    NAMES,
    PROBLEMS,
    TOLERANCE,
    D,
    E,
    G,
    Problem,
    Q,
    R,
    S,
    adapter,
    by_rollout,
    expected,
    gradients,
    misses,
    plain,
    weights,
    with_gradients,
)  # fmt: skip

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


@pytest.mark.parametrize("variant", op.VARIANT_ATTRIBUTES)
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
        out = torch_routing.routing(op.Operands(**given, gate=c), attrs)
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


@pytest.mark.parametrize("way", ["even", "packed"])
def test_a_direction_that_is_no_number_lets_nothing_through_unseen(way: str) -> None:
    operands, v = adapter()
    v[2] = torch.nan
    given = {"rollouts": torch.arange(G)[:, None].repeat(1, S), "num_rollouts": G} if way == "packed" else {}
    found, unrouted = gradients(lz.routed_adapter, operands, v=v, **given), gradients(plain, operands)
    assert found[1].isnan().all()
    for place in (0, 2, 3):
        torch.testing.assert_close(found[place], unrouted[place])


def test_a_direction_of_zeros_flags_nothing() -> None:
    operands, v = adapter()
    for arm in ("grad", "act"):
        found = gradients(lz.routed_adapter, operands, v=torch.zeros_like(v), arm=arm)
        torch.testing.assert_close(found, gradients(plain, operands))


def noisy(seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Clean rollouts push delta one way, unwanted ones the other, each token with twelve times as much noise."""
    generator = torch.Generator().manual_seed(seed)
    rollouts, length, rank = 16, 256, 8
    v = torch.nn.functional.normalize(torch.randn(rank, generator=generator), dim=0)
    is_unwanted = torch.arange(rollouts) % 4 == 0
    noise = torch.randn(rollouts, length, rank, generator=generator) * 12 / rank**0.5
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
    assert 0.35 < clean < 0.5, f"{clean:.2f} of the tokens of clean rollouts are flagged by noise"
    assert 0.5 < unwanted < 0.65, f"{1 - unwanted:.2f} of those of unwanted rollouts are not"


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
        (flat.detach()[None].requires_grad_(), {"rollouts": (G, S)}),
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


# ---- refusals --------------------------------------------------------------------------------------------------------

_FLAT = {"x": torch.randn(G * S, D)}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "arm": ({"arm": "token"}, r"expected arm as one of none, grad, act, received 'token'"),
    "threshold": ({"threshold": float("nan")}, r"expected threshold as a finite number, received nan"),
    "no_tensor": ({"B_q": None}, r"expected B_q as a tensor \[E, Q\], received None"),
    "no_direction": ({"v": None}, r"expected v \[R\], the direction that the arm 'grad' compares with, received none"),
    "no_rollouts": (_FLAT, r"the unit of routing is the rollout, and x \(54, 11\) does not say"),
    "other_rollouts": ({**_FLAT, "rollouts": (G, S + 1)}, r"expected rollouts as \(G, s\), of as many tokens as x \(54, 11\) has, received \(6, 10\)"),
    "one_number": ({**_FLAT, "rollouts": G}, r"expected rollouts as \(G, s\), .* received 6"),
    "twice": ({"rollouts": (G, S), "cu_seqlens": torch.tensor([0, 54])}, r"expected rollouts or cu_seqlens, received both"),
    "number_alone": ({"num_rollouts": 3}, r"num_rollouts with the number of a rollout for every token"),
    "numbers": ({**_FLAT, "rollouts": torch.zeros(3).long()}, r"for each token, \(54,\), received \(3,\)"),
    "beyond": (
        {**_FLAT, "rollouts": torch.full((G * S,), 7), "num_rollouts": 7}, r"numbers of rollouts below 7, received 7",
    ),
    "float_numbers": ({**_FLAT, "rollouts": torch.zeros(G * S)}, r"expected rollouts in int64 or int32, received torch.float32"),
    "bounds_beyond": ({**_FLAT, "cu_seqlens": torch.tensor([0, 55])}, r"to rise from 0 to 54, .* received \[0, 55\]"),
    "bounds_falling": ({**_FLAT, "cu_seqlens": torch.tensor([0, 9, 5])}, r"to rise from 0 .* received \[0, 9, 5\]"),
    "bounds_late": ({**_FLAT, "cu_seqlens": torch.tensor([3, 54])}, r"to rise from 0 .* received \[3, 54\]"),
    "no_bounds": ({**_FLAT, "cu_seqlens": torch.tensor([]).long()}, r"cu_seqlens \[G \+ 1\] .* received \(0,\)"),
    "other_number": (
        {**_FLAT, "cu_seqlens": torch.tensor([0, 54]), "num_rollouts": 6}, r"num_rollouts 1, as cu_seqlens has them, .* 6",
    ),
    "float_bounds": ({**_FLAT, "cu_seqlens": torch.tensor([0.0, 54])}, r"expected cu_seqlens in int64 or int32"),
    "packed": ({"cu_seqlens": torch.tensor([0, 54])}, r"of packed tokens \[tokens, D\], received \(2,\) and \(6, 9, 11\)"),
    "shape_of_x": ({"x": torch.randn(D)}, r"expected x \[G, s, D\] or \[tokens, D\], received \(11,\)"),
    "shape": ({"Vh": torch.randn(R, D + 1)}, r"expected Vh \[R, D\] of shape \(5, 11\), received \(5, 12\)"),
    "base": ({"base": torch.randn(G, S, E + 1)}, r"expected base \[..., E\] of shape \(..., 7\), received \(6, 9, 8\)"),
    "dtype": ({"A_q": torch.randn(Q, D).double()}, r"expected A_q in the dtype of x, torch.float32, received torch.float64"),
    "integers": ({"v": torch.ones(R).long()}, r"expected v \[R\] of floating-point numbers, .*received torch.int64"),
    "device": ({"U": torch.randn(E, R, device="meta")}, r"expected U on cpu as x is, received meta"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_what_would(case: str) -> None:
    operands, v = adapter(torch.float32)
    changes, message = REFUSED[case]
    given = {**dict(zip(NAMES, operands, strict=True)), "v": v, **changes}
    with pytest.raises(ValueError, match=f"lz.routed_adapter: .*{message}"):
        lz.routed_adapter(**given)
