"""``lz.blend``: the formulas of its modes, isolation, bounds, fallbacks, kernels for eager calls, and no second compile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import lz_compile as lz
from lz_compile.api.blending import capped, confidence_gate, drift_gate
from lz_compile.ground import events, health
from lz_compile.lowering.ops.blend import BlendAttrs, Operands, reference, top2_margin
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.policy import policy
from tests.backends import Rewriting
from tests.blend_modes import ALPHA, M, alpha_of, extras_of

#: What the kernel of these tests runs.
reference_of_tests = {"call": reference}
SHAPES = ((4, 6), (4, 6, 5), (4, 6, 3, 5), (2, 6, 3, 2, 2))


def _expected(mode: lz.BlendMode, host: Tensor, seed: Tensor, alpha: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
    """The formulas of the modes."""
    row = (-1, *(1 for _ in host.shape[1:]))
    if mode is M.RESIDUAL:
        return host + alpha * seed
    if mode is M.CHANNEL:
        alpha = alpha.view(1, -1, *(1 for _ in host.shape[2:]))
    if mode is M.CONFIDENCE:
        top = extras["logits"].topk(2).values
        alpha = (alpha * torch.sigmoid(6 * (top[:, 0] - top[:, 1] - 0.2))).clamp(0, 1).view(row)
    if mode is M.SOFT_GATE:
        alpha = torch.softmax(extras["gate_logits"], -1)[:, 0].view(row)
    mixed = alpha * seed + (1 - alpha) * host
    return torch.softmax(mixed, 1) if mode is M.LOGIT else mixed


# ---- the function ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=len)
@pytest.mark.parametrize("mode", M)
def test_every_mode_is_its_formula_and_isolates_the_host(mode: lz.BlendMode, shape: tuple[int, ...]) -> None:
    host, seed = (torch.randn(shape, requires_grad=True) for _ in range(2))
    if len(shape) == 4:
        host, seed = (x.detach().to(memory_format=torch.channels_last).requires_grad_() for x in (host, seed))
    alpha, extras = alpha_of(mode).requires_grad_(), extras_of(mode, shape[0])
    out = lz.blend(host, seed, alpha, mode, **extras)
    torch.testing.assert_close(out, _expected(mode, host, seed, alpha, extras))
    assert out.dtype == seed.dtype
    out.square().sum().backward()
    assert host.grad is None
    assert alpha.grad is None
    assert seed.grad is not None
    assert seed.grad.abs().sum() > 0
    if mode is M.CONFIDENCE:
        assert extras["logits"].grad is None
    if mode is M.SOFT_GATE:
        assert extras["gate_logits"].grad is not None


def test_no_hook_of_the_host_branch_is_called_in_any_mode() -> None:
    host, seed, called = nn.Linear(6, 6), nn.Linear(6, 6), []
    host.register_full_backward_hook(lambda *_: called.append("host"))
    x = torch.randn(4, 6)
    for mode in M:
        lz.blend(host(x), seed(x), alpha_of(mode), mode, **extras_of(mode, 4)).square().sum().backward()
    assert called == []
    assert all(parameter.grad is None for parameter in host.parameters())
    assert all(parameter.grad is not None for parameter in seed.parameters())


@pytest.mark.parametrize("mode", M)
def test_a_compiled_blend_is_recognised_and_the_same(mode: lz.BlendMode) -> None:
    host, seed = (torch.randn(4, 6, 5, requires_grad=True) for _ in range(2))
    alpha, extras, backend = alpha_of(mode), extras_of(mode, 4), Rewriting(lock={"blend": "torch.blend"})

    def function(host: Tensor, seed: Tensor, alpha: Tensor, extras: dict[str, Tensor]) -> Tensor:
        return lz.blend(host, seed, alpha, mode, **extras)

    out = torch.compile(function, backend=backend, fullgraph=True)(host, seed, alpha, extras)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    name = "convex" if mode is M.DELTA else mode.value
    assert backend.report.matches[0].attributes["mode"] == name
    torch.testing.assert_close(out, function(host, seed, alpha, extras), rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(out.sum(), [host], allow_unused=True) == (None,)


def test_groups_of_channels_and_numbers_for_rows_and_elements_broadcast() -> None:
    host, seed = torch.randn(2, 4, 6, 3)
    grouped = torch.tensor([0.1, 0.5, 0.9])
    whole = grouped.repeat_interleave(2)[:, None]
    torch.testing.assert_close(lz.blend(host, seed, grouped, M.CHANNEL), whole * seed + (1 - whole) * host)
    last = lz.blend(host, seed, grouped, M.CHANNEL, config=lz.BlenderConfig(channel_dim=-1))
    torch.testing.assert_close(last, torch.lerp(host, seed, grouped))
    for alpha, spread in (
        (torch.rand(4), (4, 1, 1)),
        (torch.rand(4, 6, 3), (4, 6, 3)),
        (torch.rand(1, 6, 1), (1, 6, 1)),
    ):
        torch.testing.assert_close(lz.blend(host, seed, alpha), torch.lerp(host, seed, alpha.view(spread)))


def test_weights_stay_within_their_bounds() -> None:
    host, seed = torch.zeros(4, 6), torch.ones(4, 6)
    for alpha in (-0.5, 0.0, 0.3, 1.0, 1.7):
        for mode in (M.CONVEX, M.CHANNEL, M.CONFIDENCE, M.DELTA):
            given = torch.full((6,), alpha) if mode is M.CHANNEL else torch.tensor(alpha)
            config = lz.BlenderConfig(low=0.1, high=0.8)
            out = lz.blend(host, seed, given, mode, config=config, **extras_of(mode, 4))
            assert 0.1 - 1e-6 <= out.min() <= out.max() <= 0.8 + 1e-6


def test_probabilities_add_up_to_one_and_lie_between_the_confidences_of_both() -> None:
    host, seed = torch.randn(2, 64, 10) * 3
    for alpha in (0.0, 0.25, 1.0):
        p = lz.blend(host, seed, torch.tensor(alpha), M.LOGIT)
        torch.testing.assert_close(p.sum(1), torch.ones(64))
        assert (p >= 0).all()
    torch.testing.assert_close(lz.blend(host, seed, torch.tensor(0.0), M.LOGIT), host.softmax(1))
    torch.testing.assert_close(lz.blend(host, seed, torch.tensor(1.0), M.LOGIT), seed.softmax(1))


def test_a_batch_without_confidence_lets_less_of_the_seed_in() -> None:
    sure = torch.eye(8) * 10
    gates = [confidence_gate(scale * sure) for scale in (0.0, 0.01, 0.05, 1.0)]
    means = [float(gate.mean()) for gate in gates]
    assert means == sorted(means)
    assert means[0] < 0.25
    assert means[-1] > 0.99
    tied = torch.tensor([[5.0, 5.0, 1.0]])
    torch.testing.assert_close(confidence_gate(tied), torch.sigmoid(torch.tensor([-1.2])))
    assert drift_gate(torch.tensor(0.0)) > 0.7
    assert drift_gate(torch.tensor(0.5)) < 0.3


def test_no_more_than_a_share_of_a_map_lies_above_the_threshold() -> None:
    torch.manual_seed(0)
    for values in (torch.rand(50), torch.rand(7, 9), torch.full((40,), 0.9), torch.linspace(0, 1, 21)):
        found = capped(values, 0.8, 0.2)
        assert (found > 0.8).float().mean() <= 0.2
        assert ((found == values) | (found == torch.tensor(0.8))).all()
        assert (found[values <= 0.8] == values[values <= 0.8]).all()
    few = torch.tensor([0.9, 0.1, 0.2, 0.3, 0.4])
    assert torch.equal(capped(few, 0.8, 0.2), few)
    assert torch.equal(capped(torch.tensor(0.9), 0.8, 0.0), torch.tensor(0.9))


def test_two_maxima_are_what_gates_are_made_of() -> None:
    x = torch.randn(5, 30)
    torch.testing.assert_close(confidence_gate(x), torch.sigmoid(6.0 * (top2_margin(x) - 0.2)))


def test_a_function_is_compiled_once_for_a_thousand_alphas() -> None:
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(lz.blend, backend=counter, fullgraph=True)
    host, seed = torch.randn(2, 4, 6)
    for step in range(1000):
        run(host, seed, torch.tensor(step / 999))
    assert counter.frame_count == 1


# ---- eager calls -----------------------------------------------------------------------------------------------------


@pytest.fixture
def other() -> Iterator[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A kernel beside PyTorch's that is preferred; it notes the shapes of seed and alpha."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def call(x: Operands, attrs: BlendAttrs) -> Tensor:
        seen.append((tuple(x.seed.shape), tuple(x.alpha.shape)))
        return reference_of_tests["call"](x, attrs)

    own = registry.kernels("blend")["torch.blend"]
    registry.register(replace(own, kernel_id="test.blend", implementation=call, prior=(), is_opaque=True))
    policy.prefer("test.blend")
    yield seen
    registry.unregister_kernel("test.blend")
    health.restore("test.blend")


@pytest.mark.parametrize("mode", [M.CONVEX, M.RESIDUAL, M.CHANNEL, M.CONFIDENCE, M.DELTA])
def test_an_eager_blend_is_one_call_of_the_kernel_that_policy_asks_for(mode: lz.BlendMode, other: list[Any]) -> None:
    host, seed = (torch.randn(4, 6, 3, 5, requires_grad=True) for _ in range(2))
    alpha, extras = alpha_of(mode), extras_of(mode, 4)
    out = lz.blend(host, seed, alpha, mode, **extras)
    torch.testing.assert_close(out, _expected(mode, host, seed, alpha, extras))
    shapes = {M.CHANNEL: ((4, 6, 15), (1, 6, 1)), M.CONFIDENCE: ((4, 1, 90), (4, 1, 1))}
    assert other == [shapes.get(mode, ((1, 1, 360), (1, 1, 1)))]
    assert torch.autograd.grad(out.sum(), [host, seed], allow_unused=True)[0] is None
    with lz.lock("blend", "torch.blend"):
        lz.blend(host, seed, alpha, mode, **extras)
    assert len(other) == 1


def test_what_no_kernel_takes_is_left_to_pytorch(other: list[Any]) -> None:
    host, seed = torch.randn(2, 4, 6, 3, 5)
    gate_logits = torch.randn(4, 2, requires_grad=True)
    for call in (
        lambda: lz.blend(host, seed, torch.rand(4, 6, 1, 1)),
        lambda: lz.blend(host, seed, ALPHA, M.LOGIT),
        lambda: lz.blend(host, seed, ALPHA, M.SOFT_GATE, gate_logits=gate_logits),
        lambda: lz.blend(host.transpose(0, 1), seed.transpose(0, 1), ALPHA),
        lambda: lz.blend(host.double(), seed, ALPHA),
        lambda: lz.blend(host[:0], seed[:0], ALPHA),
        lambda: torch.func.vmap(lz.blend, in_dims=(0, 0, None))(host, seed, ALPHA),
        lambda: torch.compile(lz.blend, backend="eager", fullgraph=True)(host, seed, ALPHA),
    ):
        call()
    assert not other


def test_a_blend_whose_kernel_fails_is_completed_and_the_kernel_retired(
    other: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("broken")

    monkeypatch.setitem(reference_of_tests, "call", fails)
    host, seed = torch.randn(2, 4, 6)
    with events.collect() as found:
        torch.testing.assert_close(lz.blend(host, seed, ALPHA), torch.lerp(host, seed, ALPHA))
    assert "KERNEL_FAILED" in {event.code for event in found}
    assert health.retired("test.blend")


# ---- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        (M.CHANNEL, {"alpha": torch.rand(5)}, "not one number for each channel"),
        (M.CHANNEL, {"alpha": ALPHA}, "not one number for each channel"),
        (M.CONFIDENCE, {}, "no logits of two classes"),
        (M.CONFIDENCE, {"logits": torch.randn(3, 9)}, "no logits of two classes"),
        (M.CONFIDENCE, {"gate": torch.rand(3)}, "not one gate for each row"),
        (M.SOFT_GATE, {"gate_logits": torch.randn(4, 3)}, "no two gate logits"),
        (M.RESIDUAL, {"alpha": torch.rand(5)}, "broadcasts to no dimension"),
        (M.LOGIT, {"config": lz.BlenderConfig(channel_dim=7)}, "no two classes"),
    ],
)
def test_a_mode_that_does_not_fit_falls_back_to_convex(
    mode: lz.BlendMode, options: dict[str, Any], reason: str
) -> None:
    host, seed = torch.randn(2, 4, 6, 5)
    given = dict(options)
    alpha = given.pop("alpha", ALPHA)
    with events.collect() as found:
        out = lz.blend(host, seed, alpha, mode, **given)
    torch.testing.assert_close(out, torch.lerp(host, seed, alpha.mean()))
    assert [event.code for event in found] == ["BLEND_FELL_BACK"]
    assert reason in found[0].message
    assert mode.name in found[0].message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "residual"}, "mode as a BlendMode, received 'residual'"),
        ({"low": math.nan}, "low as a finite number, received nan"),
        ({"gain": torch.zeros(3)}, "gain"),
        ({"threshold": "high"}, "threshold as a finite number"),
        ({"cap_share": -0.1}, "cap_share as a finite number from 0 to 1"),
        ({"ramp_batches": 0}, "ramp_batches as a whole number, 1 or more"),
        ({"max_step": 0.0}, "max_step as a finite number above 0"),
        ({"hysteresis": -1.0}, "hysteresis as a finite number, 0 or more"),
        ({"low": 1.0, "high": 0.5}, "low up to high, 0.5, received 1.0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lz.BlenderConfig(**given)


def test_what_is_no_blend_in_any_mode_is_critical(caplog: pytest.LogCaptureFixture) -> None:
    host, seed = torch.randn(4, 6), torch.randn(4, 7)
    with events.collect() as found, pytest.raises(ValueError, match="seed in the shape of host"):
        lz.blend(host, seed, ALPHA)
    assert [event.code for event in found] == ["BLEND_IMPOSSIBLE"]
    assert caplog.records[-1].levelname == "CRITICAL"
    with pytest.raises(ValueError, match="floating-point"):
        lz.blend(host.long(), host, ALPHA)
    with pytest.raises(ValueError, match="as a tensor"):
        lz.blend(host, host, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="BlendMode, received 'residual'"):
        lz.blend(host, host, ALPHA, "residual")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="alpha on meta as host is, received cpu"):
        lz.blend(host.to("meta"), host.to("meta"), torch.rand(6), M.CHANNEL)
