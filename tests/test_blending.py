"""``lz.blend`` and ``lz.Blender``: isolation, bounds, fallbacks, hysteresis, schedules, telemetry, and no second compile."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import lz_compile as lz
from lz_compile.blending import capped, confidence_gate, drift_gate, steady
from lz_compile.lowering.ops.blend import BlendAttrs, reference, top2_margin
from lz_compile.runtime import events, health, policy, registry
from lz_compile.runtime.blend_telemetry import SAMPLED, Reader, measured, percentile
from tests.backends import Rewriting

M = lz.BlendMode
#: What the kernel of these tests runs.
reference_of_tests = {"call": reference}
SHAPES = ((4, 6), (4, 6, 5), (4, 6, 3, 5), (2, 6, 3, 2, 2))
ALPHA = torch.tensor(0.4)


def _extras(mode: lz.BlendMode, rows: int) -> dict[str, Tensor]:
    if mode is M.CONFIDENCE:
        return {"logits": torch.randn(rows, 9, requires_grad=True)}
    return {"gate_logits": torch.randn(rows, 2, requires_grad=True)} if mode is M.SOFT_GATE else {}


def _alpha(mode: lz.BlendMode) -> Tensor:
    return torch.rand(6) if mode is M.CHANNEL else ALPHA.clone()


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
    alpha, extras = _alpha(mode).requires_grad_(), _extras(mode, shape[0])
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
        lz.blend(host(x), seed(x), _alpha(mode), mode, **_extras(mode, 4)).square().sum().backward()
    assert called == []
    assert all(parameter.grad is None for parameter in host.parameters())
    assert all(parameter.grad is not None for parameter in seed.parameters())


@pytest.mark.parametrize("mode", M)
def test_a_compiled_blend_is_recognised_and_the_same(mode: lz.BlendMode) -> None:
    host, seed = (torch.randn(4, 6, 5, requires_grad=True) for _ in range(2))
    alpha, extras, backend = _alpha(mode), _extras(mode, 4), Rewriting(lock={"blend": "torch.blend"})

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
            out = lz.blend(host, seed, given, mode, config=config, **_extras(mode, 4))
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


# ---- eager calls -----------------------------------------------------------------------------------------------------


@pytest.fixture
def other() -> Iterator[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A kernel beside PyTorch's that is preferred; it notes the shapes of seed and alpha."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def call(host: Tensor, seed: Tensor, alpha: Tensor, *, attrs: BlendAttrs) -> Tensor:
        seen.append((tuple(seed.shape), tuple(alpha.shape)))
        return reference_of_tests["call"](host, seed, alpha, attrs=attrs)

    own = registry.kernels("blend")["torch.blend"]
    registry.register(replace(own, kernel_id="test.blend", implementation=call, prior=(), is_opaque=True))
    policy.prefer("test.blend")
    yield seen
    registry.unregister_kernel("test.blend")
    health.restore("test.blend")


@pytest.mark.parametrize("mode", [M.CONVEX, M.RESIDUAL, M.CHANNEL, M.CONFIDENCE, M.DELTA])
def test_an_eager_blend_is_one_call_of_the_kernel_that_policy_asks_for(mode: lz.BlendMode, other: list[Any]) -> None:
    host, seed = (torch.randn(4, 6, 3, 5, requires_grad=True) for _ in range(2))
    alpha, extras = _alpha(mode), _extras(mode, 4)
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
    ("mode", "alpha", "given"),
    [
        (M.CONFIDENCE, ALPHA, {"logits": torch.randn(4, 1)}),  # of one class, which is the first by any margin
        (M.CONFIDENCE, ALPHA, {"logits": torch.randn(3, 9)}),
        (M.CONFIDENCE, torch.rand(6), {"logits": torch.randn(4, 9)}),
        (M.CHANNEL, torch.rand(5), {}),
        (M.SOFT_GATE, ALPHA, {"gate_logits": torch.randn(4, 3)}),
    ],
)
def test_a_blender_falls_back_as_the_function_does_and_tells_of_the_mode_that_it_used(
    mode: lz.BlendMode, alpha: Tensor, given: dict[str, Tensor]
) -> None:
    host, seed, blender = *torch.randn(2, 4, 6, 5), lz.Blender(lz.BlenderConfig(mode), alpha)
    with events.collect() as found:
        out = blender(host, seed, **given)
    assert [event.code for event in found] == ["BLEND_FELL_BACK"]
    torch.testing.assert_close(out, torch.lerp(host, seed, alpha.mean()))
    figures = blender.telemetry()
    assert figures is not None
    assert figures.blend_mode == "convex"
    assert figures.gate_mean != figures.gate_mean
    assert figures.alpha_mean == pytest.approx(float(alpha.mean()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cap_share": -0.1}, "cap_share as a share"),
        ({"ramp_batches": 0}, "ramp_batches as one or more"),
        ({"max_step": 0.0}, "max_step as more than zero"),
        ({"hysteresis": -1.0}, "hysteresis as zero or more"),
        ({"low": 1.0, "high": 0.5}, "low up to high, received 1.0 and 0.5"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lz.BlenderConfig(**given)


def test_what_is_no_blend_in_any_mode_is_critical(caplog: pytest.LogCaptureFixture) -> None:
    host, seed = torch.randn(4, 6), torch.randn(4, 7)
    with events.collect() as found, pytest.raises(ValueError, match="differ in shape"):
        lz.blend(host, seed, ALPHA)
    assert [event.code for event in found] == ["BLEND_IMPOSSIBLE"]
    assert caplog.records[-1].levelname == "CRITICAL"
    with pytest.raises(ValueError, match="floating-point"):
        lz.blend(host.long(), host, ALPHA)
    with pytest.raises(ValueError, match="as a tensor"):
        lz.blend(host, host, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="BlendMode, received 'residual'"):
        lz.blend(host, host, ALPHA, "residual")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="different devices"):
        lz.blend(host.to("meta"), host.to("meta"), torch.rand(6), M.CHANNEL)


def test_a_weight_that_is_no_number_stays_none_and_is_critical(caplog: pytest.LogCaptureFixture) -> None:
    blender = lz.Blender(alpha=float("nan"))
    out = blender(torch.randn(4, 6), torch.randn(4, 6))
    assert out.isnan().all()
    with events.collect() as found:
        figures = blender.telemetry()
    assert figures is not None
    assert [event.code for event in found] == ["BLEND_ALPHA_NAN", "BLEND_TELEMETRY"]
    assert any(record.levelname == "CRITICAL" for record in caplog.records)
    assert figures.to_dict()["alpha_mean"] is None


# ---- the module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", M)
def test_nothing_is_compiled_again_for_other_weights_gates_and_numbers(mode: lz.BlendMode) -> None:
    counter = CompileCounterWithBackend("eager")
    blender = lz.Blender(lz.BlenderConfig(mode, ramp_batches=500), torch.zeros(6) if mode is M.CHANNEL else 0.0)
    run = torch.compile(blender, backend=counter, fullgraph=True)
    host, seed = torch.randn(2, 4, 6)
    for step in range(1000 if mode is M.CONFIDENCE else 300):
        extras = {name: each.detach() * step for name, each in _extras(mode, 4).items()}
        run(host, seed, **extras)
        blender.advance()
        if step % 50 == 0:
            blender.configure(gain=4 + step / 100, threshold=step / 1e4, low=step / 1e5, high=1 - step / 1e5)
        if step % 70 == 0:
            blender.request(float(step % 140 == 0))  # exactly zero and exactly one
    assert counter.frame_count <= 2


def test_a_function_is_compiled_once_for_a_thousand_alphas() -> None:
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(lz.blend, backend=counter, fullgraph=True)
    host, seed = torch.randn(2, 4, 6)
    for step in range(1000):
        run(host, seed, torch.tensor(step / 999))
    assert counter.frame_count == 1


def test_weights_are_buffers_and_never_parameters() -> None:
    blender = lz.Blender(alpha=torch.rand(6, requires_grad=True))
    assert list(blender.parameters()) == []
    assert not any(buffer.requires_grad for buffer in blender.buffers())
    assert blender.double().alpha.dtype == torch.float64


def test_alpha_ramps_to_its_target_and_on_to_the_next() -> None:
    blender = lz.Blender(lz.BlenderConfig(ramp_batches=10), 0.0, 0.5)
    seen = []
    for _ in range(12):
        blender.advance()
        seen.append(float(blender.alpha))
    assert seen == pytest.approx([min(0.05 * step, 0.5) for step in range(1, 13)], abs=1e-6)
    blender.aim(1.0)
    blender.advance()
    assert float(blender.alpha) == pytest.approx(0.55)
    vector = lz.Blender(lz.BlenderConfig(M.CHANNEL, ramp_batches=4), torch.zeros(3), torch.tensor([0.0, 0.5, 1.0]))
    for _ in range(4):
        vector.advance()
    torch.testing.assert_close(vector.alpha, torch.tensor([0.0, 0.5, 1.0]))


def test_a_ramp_arrives_in_time_in_any_precision() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        blender = lz.Blender(lz.BlenderConfig(ramp_batches=1000)).to(dtype)
        for _ in range(1000):
            blender.advance()
        assert float(blender.alpha) == 1.0


def test_a_blender_without_bounds_has_none() -> None:
    blender = lz.Blender(lz.BlenderConfig(low=None, high=None, hysteresis=0.0), -2.0)
    assert float(blender.target) == 1.0
    host, seed = torch.randn(2, 4, 6)
    torch.testing.assert_close(blender(host, seed), 3 * host - 2 * seed)
    blender.request(5.0)
    assert float(blender.alpha) == 5.0


def test_a_batch_without_numbers_does_not_enter_the_memory() -> None:
    host, seed = torch.randn(2, 4, 6, 5)
    bad = seed.clone()
    bad[0, 0] = torch.nan
    soft = lz.Blender(lz.BlenderConfig(M.SOFT_GATE))
    assert soft(host, seed, gate_logits=torch.full((4, 2), torch.nan)).isnan().all()
    drifting = lz.Blender(lz.BlenderConfig(M.CONFIDENCE), 1.0)
    assert drifting(host, bad).isnan().any()
    assert soft(host, seed, gate_logits=torch.zeros(4, 2)).isfinite().all()
    assert drifting(host, seed).isfinite().all()


def test_a_gate_multiplies_the_ramp() -> None:
    blender = lz.Blender(lz.BlenderConfig(M.CONFIDENCE, ramp_batches=4, hysteresis=0.0))
    host, seed = torch.randn(2, 4, 6)
    for _ in range(2):
        blender.advance()
    weight = (0.5 * confidence_gate(seed))[:, None]
    torch.testing.assert_close(blender(host, seed), weight * seed + (1 - weight) * host)


def test_nothing_oscillates_within_the_dead_band() -> None:
    jitter = [0.5 + 0.015 * (-1) ** step for step in range(50)]
    blender, changes = lz.Blender(alpha=0.5), 0
    for value in jitter:
        before = blender.alpha.clone()
        blender.request(value)
        changes += int(not torch.equal(before, blender.alpha))
    assert changes == 0
    blender.request(0.53)
    assert float(blender.alpha) == pytest.approx(0.53)
    blender.request(0.99)
    blender.request(1.0)
    assert float(blender.alpha) == 1.0
    held = torch.tensor([0.1, 0.5])
    torch.testing.assert_close(steady(torch.tensor([0.11, 0.6]), held), torch.tensor([0.1, 0.6]))


def test_a_gate_at_its_threshold_does_not_flap() -> None:
    """A margin that swings around the threshold by less than the band changes the decision once at most."""
    flips = {}
    for band in (0.0, 0.02):
        blender = lz.Blender(lz.BlenderConfig(M.CONFIDENCE, threshold=0.2, hysteresis=band), 0.5)
        decisions = []
        for step in range(40):
            logits = torch.zeros(4, 3)
            logits[:, 0] = 0.2 + 0.01 * (-1) ** step
            blender(torch.zeros(4, 3), torch.zeros(4, 3), logits=logits)
            decisions.append(bool(blender.is_confident))
        flips[band] = sum(one != two for one, two in pairwise(decisions))
    assert flips[0.0] > 30
    assert flips[0.02] <= 1


def test_without_classes_a_gate_follows_the_drift_of_the_output() -> None:
    blender = lz.Blender(lz.BlenderConfig(M.CONFIDENCE), 1.0)
    host, still = torch.zeros(4, 6, 5), torch.ones(4, 6, 5)
    for _ in range(60):
        calm = blender(host, still)
    for step in range(10):
        wild = blender(host, still * 4 * (-1) ** step)
    assert calm.mean() > 0.7
    assert wild.abs().mean() / 4 < 0.5


def test_a_soft_gate_moves_by_a_step_at_most() -> None:
    blender = lz.Blender(lz.BlenderConfig(M.SOFT_GATE, max_step=0.1))
    host, seed = torch.zeros(4, 6), torch.ones(4, 6)
    last = 0.0
    for _ in range(15):
        out = blender(host, seed, gate_logits=torch.tensor([[30.0, 0.0]]).expand(4, 2))
        assert abs(float(out.mean()) - last) <= 0.1 + 1e-6
        last = float(out.mean())
    assert last == pytest.approx(1.0)
    torch.testing.assert_close(blender.weights, torch.tensor([1.0, 0.0]))


def test_a_soft_gate_learns_and_is_held_back_by_its_penalty() -> None:
    torch.manual_seed(0)
    gate, x = lz.SoftGate(6), torch.randn(16, 6, 3, 3)
    host, seed = torch.zeros(16, 6, 3, 3), torch.ones(16, 6, 3, 3)
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.5)
    for _ in range(30):
        loss = (lz.blend(host, seed, ALPHA, M.SOFT_GATE, gate_logits=gate(x)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.softmax(gate(x), -1)[:, 0].mean() > 0.8
    even, sharp = torch.zeros(4, 2), torch.tensor([[9.0, -9.0]]).expand(4, 2)
    assert gate.penalty(even, l2=0.0) < gate.penalty(sharp, l2=0.0)
    assert gate.penalty(sharp, entropy=0.0, l2=1.0) > 0
    with pytest.raises(ValueError, match="width of 1 to 64"):
        lz.SoftGate(6, 65)


def test_the_state_is_saved_and_restored() -> None:
    torch.manual_seed(0)
    config = lz.BlenderConfig(M.CONFIDENCE, ramp_batches=9)
    blender, host, seed = lz.Blender(config, 0.1), *torch.randn(2, 4, 6)
    for _ in range(5):
        blender.advance()
        blender(host, seed)
    restored = lz.Blender(config)
    restored.load_state_dict(blender.state_dict())
    for other in (restored, copy.deepcopy(blender)):
        torch.testing.assert_close(other(host, seed), copy.deepcopy(blender)(host, seed))
        other.advance()
    again = copy.deepcopy(blender)
    again.advance()
    torch.testing.assert_close(restored.alpha, again.alpha)
    with pytest.raises(ValueError, match="no number 'mode'"):
        blender.configure(mode=1.0)


# ---- telemetry -------------------------------------------------------------------------------------------------------


def test_telemetry_tells_what_was_blended() -> None:
    config = lz.BlenderConfig(M.CHANNEL, high=0.9, cap_above=0.5, cap_share=0.25)
    alpha = torch.tensor([0.0, 0.0, 0.2, 0.6, 0.7, 0.8, 0.95, 1.0])
    blender = lz.Blender(config, alpha)
    blender(*torch.randn(2, 4, 8, 3))
    found = blender.telemetry()
    assert found is not None
    used = capped(alpha.clamp(0, 0.9), 0.5, 0.25)
    assert found.blend_mode == "channel"
    assert found.alpha_mean == pytest.approx(float(used.mean()), abs=1e-6)
    assert found.alpha_p95 == pytest.approx(0.9)
    assert found.alpha_sparsity == pytest.approx(0.25)
    assert found.clamped_fraction == pytest.approx(float((used != alpha).float().mean()))
    assert found.gate_mean != found.gate_mean
    assert found.kernel_ms is not None
    assert found.kernel_ms > 0


def test_telemetry_of_a_gate_is_the_same_in_compiled_code() -> None:
    host, seed, logits = torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 9)
    found = []
    for run_compiled in (False, True):
        blender = lz.Blender(lz.BlenderConfig(M.CONFIDENCE), 0.8)
        run = torch.compile(blender, backend="aot_eager", fullgraph=True) if run_compiled else blender
        run(host, seed, logits=logits)
        figures = blender.telemetry()
        assert figures is not None
        found.append(figures)
    assert found[0].gate_mean == pytest.approx(found[1].gate_mean)
    assert found[0].alpha_mean == pytest.approx(found[1].alpha_mean)
    assert found[1].kernel_ms is None
    assert 0 < found[0].alpha_mean < 0.8


def test_a_percentile_is_near_the_exact_one() -> None:
    torch.manual_seed(0)
    for values in (torch.rand(5000), torch.rand(40), torch.zeros(9), torch.ones(9), torch.rand(1) * 0.5):
        exact = values.quantile(0.95, interpolation="higher")
        assert abs(float(percentile(values)) - float(exact)) <= (0.04 if len(values) > SAMPLED else 1e-6)
    assert measured(torch.full((3,), torch.nan), torch.full((3,), torch.nan), None)[1:3].isnan().all()


def test_times_that_nobody_asks_for_are_forgotten() -> None:
    reader, device = Reader(), torch.device("cpu")
    for _ in range(100):
        reader.took(reader.now(device), device)
    assert len(reader._moments) < 20
    reader.poll(torch.zeros(6))
    assert not reader._moments
    assert reader.kernel_ms is not None


def test_a_copy_is_all_of_a_blender_but_what_is_on_its_way() -> None:
    class Other(lz.Blender):
        pass

    blender = Other(lz.BlenderConfig(M.CHANNEL), torch.rand(6)).half().eval()
    blender(*torch.randn(2, 4, 6))
    copied = copy.deepcopy(blender)
    assert type(copied) is Other
    assert (copied.training, copied.alpha.dtype) == (False, torch.float16)
    assert len(blender._reader._moments) == 1
    assert not copied._reader._moments
    torch.testing.assert_close(copied.alpha, blender.alpha)


def test_an_empty_batch_is_blended_and_tells_nothing() -> None:
    for mode in M:
        blender = lz.Blender(lz.BlenderConfig(mode), torch.rand(6) if mode is M.CHANNEL else 0.3)
        extras = {name: each[:0] for name, each in _extras(mode, 4).items()}
        assert blender(torch.empty(0, 6), torch.empty(0, 6), **extras).shape == (0, 6)


def test_without_telemetry_nothing_is_noted() -> None:
    blender = lz.Blender(alpha=0.3, has_telemetry=False)
    assert lz.Blender(alpha=0.3).telemetry() is None
    blender(*torch.randn(2, 4, 6))
    assert blender.telemetry() is None


def test_two_maxima_are_what_gates_are_made_of() -> None:
    x = torch.randn(5, 30)
    torch.testing.assert_close(confidence_gate(x), torch.sigmoid(6.0 * (top2_margin(x) - 0.2)))
