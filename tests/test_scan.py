"""Recurrences as model authors write them: rolled, taken apart, read, and run by kernels; the rest is refused for a true reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from recurrent_zoo import FAMILIES
from torch import Tensor, nn

from lz_compile import reports
from lz_compile.backend import layerzero
from models.ema import EMA
from models.gated_delta import GatedDelta
from models.spike_kda import SpikeKDA, SpikeKDAConfig, sequential
from models.tanh_rnn import TanhRNN

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def compiled(function: Callable[..., Any], *inputs: Tensor, **options: object) -> tuple[tuple[Tensor, ...], Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting(**options)
    found = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return (found if isinstance(found, tuple) else (found,)), backend


def compare(
    function: Callable[..., Any], *inputs: Tensor, dtype: torch.dtype = torch.float64, **options: object
) -> Rewriting:
    """The same results and gradients as eager, in float64 for reference."""
    got, backend = compiled(function, *inputs, **options)
    want = function(*inputs)
    want = want if isinstance(want, tuple) else (want,)
    leaves = [each for each in (*inputs, *getattr(function, "parameters", list)()) if each.requires_grad]
    results = []
    for outputs in (got, want):
        loss = torch.stack([output.double().square().sum() for output in outputs]).sum()
        results.append([*outputs, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)])
    tolerance = TOLERANCES[dtype]
    for one, two in zip(*results, strict=True):
        scale = float(two.detach().abs().max().clamp(min=1))
        torch.testing.assert_close(one.double() / scale, two.double() / scale, rtol=tolerance, atol=tolerance)
    return backend


def kernels(backend: Rewriting) -> list[str]:
    """What runs the scans that were rewritten."""
    return [match.kernel for match in backend.report.matches if match.op == "scan" and match.rewritten]


def kda(length: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    batch, heads, keys, values = 2, 3, 5, 7
    q, k, a = torch.randn(3, batch, length, heads, keys, generator=generator, dtype=torch.float64)
    v = torch.randn(batch, length, heads, values, generator=generator, dtype=torch.float64)
    b = torch.rand(batch, length, heads, generator=generator, dtype=torch.float64)
    given = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, torch.sigmoid(a + 1), b]
    weights, output = torch.randn(batch, heads, keys, values, generator=generator), torch.zeros(batch, heads, values)
    drop = torch.rand(batch, length, generator=generator) < 0.3
    return (*(each.to(dtype).requires_grad_() for each in given), drop, weights.to(dtype), output.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kimi_delta_attention_with_dropped_tokens_is_two_scans(dtype: torch.dtype) -> None:
    backend = compare(sequential, *kda(9, dtype), dtype=dtype)
    assert len(kernels(backend)) == 2, backend.why_not()
    formulas = [match.formula for match in backend.report.matches if match.op == "scan"]
    assert any("S[" in formula for formula in formulas), formulas
    (loop,) = backend.report.graphs[0].loops
    assert (loop.steps, loop.rolled) == (9, True)


def test_spikes_stay_a_loop_and_the_attention_that_they_modulate_does_not() -> None:
    torch.manual_seed(0)
    config = SpikeKDAConfig(channels=12, heads=2, key_dim=3, value_dim=4, neurons=3, kda_mode="sequential")
    layer, x = SpikeKDA(config).double(), torch.randn(2, 18, 12, dtype=torch.float64, requires_grad=True)
    drop = torch.rand(2, 18) < 0.3

    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, drop: Tensor) -> tuple[Tensor, ...]:
            y, state = self.layer(x, drop)
            return y, state.weights, state.output

    backend = compare(Outputs(), x, drop)
    assert len(kernels(backend)) == 2, backend.why_not()
    reasons = [str(miss.reason) for miss in backend.report.near_misses if miss.op == "scan"]
    assert any("not affine" in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    "model", [GatedDelta(10, heads=2, key_dim=3, value_dim=4), EMA(10)], ids=lambda model: type(model).__name__
)
def test_loops_of_models_run_by_a_kernel(model: nn.Module) -> None:
    x = torch.randn(2, 17, 10, dtype=torch.float64, requires_grad=True)
    backend = compare(model.double(), x)
    assert len(kernels(backend)) == 1, backend.why_not()


def test_what_is_not_affine_is_rolled_and_says_so() -> None:
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    backend = compare(TanhRNN(6, 5).double(), x, loops="roll")
    assert [loop.rolled for loop in backend.report.graphs[0].loops] == [True]
    (miss,) = [miss for miss in backend.report.near_misses if miss.op == "scan"]
    assert "tanh" in str(miss.reason), miss
    assert not kernels(backend)


def test_short_loops_that_are_not_affine_are_kept() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    backend = compare(TanhRNN(6, 5).double(), x, loops="auto")
    (loop,) = backend.report.graphs[0].loops
    assert not loop.rolled
    assert "LOOP_SHORT" in str(loop.reason)


def cumulative_mean(x: Tensor) -> Tensor:
    mean, means = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        mean = mean + (x[:, t] - mean) / (t + 1)
        means.append(mean)
    return torch.stack(means, 1)


def divided(x: Tensor, narrow: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = state / narrow[:, t] + x[:, t]
        states.append(state)
    return torch.stack(states, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_quotients_are_those_of_the_wider_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(2, 18, 3, dtype=torch.float64, requires_grad=True)
    backend = compare(divided, x, (torch.rand(2, 18, 3) * 3 + 1).to(dtype))
    assert kernels(backend) == ["lz.rolled_scan"], backend.why_not()


def test_a_mean_so_far_is_exact() -> None:
    compare(cumulative_mean, torch.randn(2, 18, 3, dtype=torch.float64, requires_grad=True))


def powers(x: Tensor, factor: Tensor) -> Tensor:
    for _ in range(12):
        x = x * factor
    return x


def few_terms(x: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros_like(x[0])
    for index in range(10):
        total = total + weights[index] * x[index]
    return total


@pytest.mark.parametrize("function", [powers, few_terms])
def test_a_few_pointwise_steps_are_left_to_inductor(function: Callable[..., Tensor]) -> None:
    x = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    backend = compare(function, x, torch.rand(10 if function is few_terms else 5, dtype=torch.float64))
    assert not any(loop.rolled for loop in backend.report.graphs[0].loops)


def test_loops_under_autocast_are_looked_at_under_autocast() -> None:
    projection = nn.Linear(6, 6)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            state, states = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                state = 0.5 * state + projection(x[:, t]).float()
                states.append(state)
            return torch.stack(states, 1)

    x = torch.randn(2, 18, 6)
    torch._dynamo.reset()
    backend = Rewriting()
    got = torch.compile(run, backend=backend)(x)
    torch.testing.assert_close(got, run(x), rtol=2e-2, atol=2e-2)
    assert not backend.report.events


@pytest.mark.slow
def test_the_last_state_alone_compiles_without_gradients() -> None:
    def last(x: Tensor, state: Tensor) -> Tensor:
        for t in range(x.shape[1]):
            state = (0.5 * state + x[:, t]).tanh()
        return state

    torch._dynamo.reset()
    with torch.no_grad():
        x, state = torch.randn(4, 40, 8), torch.randn(4, 8)
        got = torch.compile(last, backend=layerzero, options={"layerzero.loops": "roll"})(x, state)
        torch.testing.assert_close(got, last(x, state))
    assert not reports()[-1].events


def test_loops_are_kept_on_demand() -> None:
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    backend = compare(TanhRNN(6, 5).double(), x, loops="keep")
    assert [loop.rolled for loop in backend.report.graphs[0].loops] == [False]


#: What becomes of each: how many scans are rewritten at least, and what must be among the reasons for the rest.
EXPECTED = {
    "qwen3_next": (0, "CHUNKED_ALREADY"),
    "olmo_hybrid": (0, "CHUNKED_ALREADY"),
    "kimi_linear": (0, "CHUNKED_ALREADY"),
    "mamba2": (0, "CHUNKED_ALREADY"),
    "falcon_h1": (0, "CHUNKED_ALREADY"),
    "mamba": (2, ""),
    "mamba_loop": (2, ""),
    "jamba": (1, ""),
    "recurrent_gemma": (1, ""),
    "rwkv": (0, "maximum"),  # on few threads of a CPU it is one loop
    "xlstm_loop": (4, "maximum"),
}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_recurrences_of_transformers_are_rewritten_or_refused_for_a_true_reason(name: str) -> None:
    model, inputs = FAMILIES[name].build(20)
    torch._dynamo.reset()
    backend = Rewriting(loops="roll")
    with torch.no_grad():
        got = torch.compile(model, backend=backend)(**inputs).logits
        want = model(**inputs).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    least, reason = EXPECTED[name]
    assert len(kernels(backend)) >= least, backend.why_not()
    reasons = [str(miss.reason) for miss in backend.report.near_misses if miss.op == "scan"]
    assert not reason or any(reason in each for each in reasons), reasons
    assert not backend.report.events


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_through_inductor_a_loop_is_a_kernel_with_the_same_results(is_training: bool) -> None:
    inputs = kda(24, torch.float32)
    torch._dynamo.reset()
    with torch.set_grad_enabled(is_training):
        got = torch.compile(sequential, backend=layerzero)(*inputs)
        want = sequential(*inputs)
    assert {match.kernel for match in reports()[-1].matches if match.op == "scan"} == {"lz.rolled_scan"}
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    if is_training:
        losses = [torch.stack([each.square().sum() for each in outputs]).sum() for outputs in (got, want)]
        for one, two in zip(*(torch.autograd.grad(loss, inputs[:5]) for loss in losses), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("first", ["clone", "expand", "zeros"])
def test_a_first_state_of_zeros_may_be_a_copy_of_another(first: str) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[0], 5)
        held = {"clone": zeros.clone(), "expand": x.new_zeros(1, 5).expand(x.shape[0], 5), "zeros": zeros}[first]
        current, found = zeros, []
        for t in range(x.shape[1]):
            jump = current + torch.nn.functional.linear(x[:, t], weight)
            held, current = held + 0.1 * (jump - held), jump * 0.8
            found.append(held)
        return torch.stack(found, 1)

    backend = compare(
        function, torch.randn(3, 12, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64).requires_grad_()
    )
    assert all(match.rewritten for match in backend.report.matches if match.op == "scan"), backend.why_not()
    assert kernels(backend)


@pytest.mark.parametrize("view", [False, True], ids=["of the whole", "of a piece"])
def test_a_first_state_that_was_zeros_and_was_written_to_since_is_read(view):
    """In reverse order, so that the last write stands right before the loop, and of views that are results as well."""

    def function(x, a):
        filled, pieces = torch.zeros_like(x), []
        for t in reversed(range(x.shape[1])):
            piece = filled[:, t]
            piece.add_(x[:, t])
            pieces.append(piece)
        h = filled[:, 0] if view else pieces[-1]
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
        return torch.stack(pieces, 1), h

    x, a = torch.randn(2, 12, 3), torch.rand(2, 12, 3)
    backend = Rewriting(loops="roll")
    torch.testing.assert_close(torch.compile(function, backend=backend)(x, a), function(x, a))
    assert [match.op for match in backend.report.matches if match.rewritten] == ["scan"], backend.why_not()
