"""``lz.Blender``: its buffers and their ramps, what keeps it from flapping, fallbacks, telemetry, and no second compile."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import lz_compile as lz
from lz_compile.api.blend_telemetry import SAMPLED, Reader, measured, percentile
from lz_compile.api.blending import capped, confidence_gate, steady
from lz_compile.errors import ArgumentError
from lz_compile.ground import events
from tests.backends import Rewriting
from tests.blend_modes import ALPHA, M, alpha_of, extras_of

# ---- the module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", M)
def test_nothing_is_compiled_again_for_other_weights_gates_and_numbers(mode: lz.BlendMode) -> None:
    counter = CompileCounterWithBackend("eager")
    blender = lz.Blender(lz.BlenderConfig(mode, ramp_batches=500), torch.zeros(6) if mode is M.CHANNEL else 0.0)
    run = torch.compile(blender, backend=counter, fullgraph=True)
    host, seed = torch.randn(2, 4, 6)
    for step in range(1000 if mode is M.CONFIDENCE else 300):
        extras = {name: each.detach() * step for name, each in extras_of(mode, 4).items()}
        run(host, seed, **extras)
        blender.advance()
        if step % 50 == 0:
            blender.configure(gain=4 + step / 100, threshold=step / 1e4, low=step / 1e5, high=1 - step / 1e5)
        if step % 70 == 0:
            blender.request(float(step % 140 == 0))  # exactly zero and exactly one
    assert counter.frame_count <= 2


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


def test_a_gate_multiplies_the_ramp() -> None:
    blender = lz.Blender(lz.BlenderConfig(M.CONFIDENCE, ramp_batches=4, hysteresis=0.0))
    host, seed = torch.randn(2, 4, 6)
    for _ in range(2):
        blender.advance()
    weight = (0.5 * confidence_gate(seed))[:, None]
    torch.testing.assert_close(blender(host, seed), weight * seed + (1 - weight) * host)


def test_a_blender_without_bounds_has_none() -> None:
    blender = lz.Blender(lz.BlenderConfig(low=None, high=None, hysteresis=0.0), -2.0)
    assert float(blender.target) == 1.0
    host, seed = torch.randn(2, 4, 6)
    torch.testing.assert_close(blender(host, seed), 3 * host - 2 * seed)
    blender.request(5.0)
    assert float(blender.alpha) == 5.0


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
    with pytest.raises(ValueError, match=r"expected a number as one of low, .* received 'mode'"):
        blender.configure(mode=1.0)


# ---- what does not fit -----------------------------------------------------------------------------------------------


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


def test_a_weight_that_is_no_number_stays_none_and_is_critical(caplog: pytest.LogCaptureFixture) -> None:
    blender = lz.Blender()
    blender.alpha.fill_(math.nan)
    out = blender(torch.randn(4, 6), torch.randn(4, 6))
    assert out.isnan().all()
    with events.collect() as found:
        figures = blender.telemetry()
    assert figures is not None
    assert [event.code for event in found] == ["BLEND_ALPHA_NAN", "BLEND_TELEMETRY"]
    assert any(record.levelname == "CRITICAL" for record in caplog.records)
    assert figures.to_dict()["alpha_mean"] is None


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


def test_an_empty_batch_is_blended_and_tells_nothing() -> None:
    for mode in M:
        blender = lz.Blender(lz.BlenderConfig(mode), torch.rand(6) if mode is M.CHANNEL else 0.3)
        extras = {name: each[:0] for name, each in extras_of(mode, 4).items()}
        assert blender(torch.empty(0, 6), torch.empty(0, 6), **extras).shape == (0, 6)


# ---- what keeps it steady --------------------------------------------------------------------------------------------


def test_numbers_that_are_none_never_reach_the_state() -> None:
    blender = lz.Blender(alpha=0.3)
    before = {name: each.clone() for name, each in blender.named_buffers()}
    for call in (
        lambda: blender.request(math.nan),
        lambda: blender.request(torch.tensor(math.inf)),
        lambda: blender.request(torch.rand(3)),
        lambda: blender.aim(torch.empty(0)),
        lambda: blender.configure(gain=1.0, hysteresis=math.nan),
        lambda: lz.Blender(alpha=torch.empty(0)),
        lambda: lz.Blender(alpha=math.nan),
        lambda: lz.Blender(target="all"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError, match=r"expected (alpha|target|hysteresis) "):
            call()
    for name, each in blender.named_buffers():
        torch.testing.assert_close(each, before[name], equal_nan=True)


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
    with pytest.raises(ValueError, match="width as a whole number from 1 to 64"):
        lz.SoftGate(6, 65)


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


@pytest.mark.sampled
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("mode", M)
def test_a_blender_as_it_comes_compiles_to_the_kernel(mode: lz.BlendMode, records: bool) -> None:
    shape = (4, 6, 5)
    host, seed = torch.randn(shape), torch.randn(shape, requires_grad=records)
    extras = [{name: each.detach() for name, each in extras_of(mode, 4).items()}]
    extras += [{}] if mode is M.CONFIDENCE else []  # a gate that follows the drift
    for given in extras:
        torch._dynamo.reset()
        blender, backend = lz.Blender(lz.BlenderConfig(mode), alpha_of(mode)), Rewriting(lock={"blend": "torch.blend"})
        plain = copy.deepcopy(blender)
        for _ in range(2):  # what the first one has learnt, the second one reads
            got = torch.compile(blender, backend=backend, fullgraph=True)(host, seed, **given)
            torch.testing.assert_close(got, plain(host, seed, **given), rtol=1e-4, atol=1e-5)
        assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
        plain.telemetry()  # works out what was put off
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(blender.get_buffer(name), buffer, equal_nan=True)


def test_figures_are_of_the_last_batch_whoever_ran_it() -> None:
    host, seed = torch.randn(2, 4, 6)
    blender = lz.Blender(alpha=0.3)
    compiled = torch.compile(blender, backend="eager", fullgraph=True)
    for run, alpha in ((blender, 0.2), (compiled, 0.7), (blender, 0.1)):
        blender.alpha.fill_(alpha)
        run(host, seed)
        told = [alpha] if run is blender else [alpha, alpha]
        for expected in told:
            found = blender.telemetry()
            assert found is not None
            assert found.alpha_mean == pytest.approx(expected)
    blender.alpha.fill_(0.6)
    blender(host, seed)
    blender.alpha.fill_(0.9)  # what was put off is of the batch, not of now
    copied = copy.deepcopy(blender).telemetry()
    assert copied is not None
    assert copied.alpha_mean == pytest.approx(0.6)
    blender(host, seed)
    compiled(host, seed)
    assert float(blender.state_dict()["figures"][1]) == pytest.approx(0.9)


def test_a_blend_around_a_write_that_may_be_to_its_operands_is_matched_as_its_near_miss_says() -> None:
    def early(host: Tensor, seed: Tensor, alpha: Tensor, note: Tensor) -> Tensor:
        note.copy_(alpha.mean() + 1)
        return alpha * seed + (1 - alpha) * host.detach()

    def amid(host: Tensor, seed: Tensor, alpha: Tensor, note: Tensor) -> Tensor:
        own = alpha * seed
        note.copy_(alpha.mean() + 1)
        return own + (1 - alpha) * host.detach()

    def late(host: Tensor, seed: Tensor, alpha: Tensor, note: Tensor) -> Tensor:
        out = alpha * seed + (1 - alpha) * host.detach()
        note.copy_(alpha.mean() + 1)
        return out

    tensors = torch.randn(2, 4, 6)

    def given(is_same: bool) -> tuple[Tensor, ...]:
        alpha = torch.tensor([0.3])
        return *tensors, alpha, alpha[:] if is_same else torch.zeros(1)

    backend = Rewriting(lock={"blend": "torch.blend"})
    torch.compile(amid, backend=backend, fullgraph=True)(*given(is_same=False))
    (miss,) = backend.report.near_misses
    assert "memory of which copy_ (" in str(miss.reason), miss
    assert miss.edit.startswith("overwrite it after the last use of this result")
    for blend in (early, late):
        for is_same in (False, True):
            torch._dynamo.reset()
            backend = Rewriting(lock={"blend": "torch.blend"})
            found = torch.compile(blend, backend=backend, fullgraph=True)(*given(is_same))
            assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
            torch.testing.assert_close(found, blend(*given(is_same)))


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


def test_without_telemetry_nothing_is_noted() -> None:
    blender = lz.Blender(alpha=0.3, has_telemetry=False)
    assert lz.Blender(alpha=0.3).telemetry() is None
    blender(*torch.randn(2, 4, 6))
    assert blender.telemetry() is None
