"""Spike-KDA: the parallel form is the sequential one, streams continue it, and dropped tokens leave no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.spike_kda import (
    MaskedLinear,
    SpikeKDA,
    SpikeKDAConfig,
    SpikeKDALM,
    exclusive_prefixes,
    forward_fill,
    spike,
    updates,
)

CONFIG = SpikeKDAConfig(channels=24, heads=2, key_dim=5, value_dim=7, neurons=4, layers=2, mlp_width=32, scan_tile=4)


def _layer(mode: str, dtype: torch.dtype = torch.float64) -> SpikeKDA:
    torch.manual_seed(0)
    return SpikeKDA(replace(CONFIG, kda_mode=mode)).to(dtype)


def _input(length: int = 13, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2 * torch.randn(3, length, CONFIG.channels, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("length", [1, 4, 13])
@pytest.mark.parametrize("drops", [False, True])
def test_the_scan_gives_what_the_loop_gives(length: int, drops: bool) -> None:
    x = _input(length).requires_grad_()
    drop = torch.rand(3, length, generator=torch.Generator().manual_seed(2)) < 0.4 if drops else None
    results = []
    for mode in ("sequential", "scan"):
        layer = _layer(mode)
        y, state = layer(x, drop)
        grads = torch.autograd.grad(y.square().sum() + state.weights.sum(), (x, *layer.parameters()))
        results.append((y, *state, *grads))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)


def test_a_stream_continues_a_sequence() -> None:
    layer, x = _layer("sequential"), _input()
    whole, last = layer(x)
    y, state = layer(x[:, :6])
    outputs = [y]
    for t in range(6, x.shape[1]):
        one, state = layer.stream(x[:, t], state)
        outputs.append(one[:, None])
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    for one, two in zip(state, last, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("mode", ["sequential", "scan"])
def test_a_dropped_token_changes_nothing_and_repeats_the_last_output(mode: str) -> None:
    layer, x = _layer(mode), _input()
    drop = torch.zeros(3, 13, dtype=torch.bool)
    drop[0, 5] = drop[1, 0] = drop[2, -3:] = True
    y, _ = layer(x, drop)
    torch.testing.assert_close(y[0, 5], y[0, 4])
    torch.testing.assert_close(y[1, 0], torch.zeros_like(y[1, 0]))
    torch.testing.assert_close(y[2, -3:], y[2, -4].expand(3, -1))
    assert not torch.allclose(y[0, 5], y[1, 5])


def test_a_head_without_a_spike_keeps_its_weights_and_is_read() -> None:
    layer = _layer("sequential")
    with torch.no_grad():
        layer.current.weight.zero_()
    weights = torch.randn(3, 2, 5, 7, dtype=torch.float64)
    state = layer.initial_state(_input())._replace(weights=weights)
    y, after = layer(_input(), None, state)
    torch.testing.assert_close(after.weights, weights)
    assert y.abs().max() > 0


def test_prefixes_are_those_of_a_loop() -> None:
    k, a = torch.rand(2, 6, 2, 3, dtype=torch.float64), torch.rand(2, 6, 2, 3, dtype=torch.float64)
    v, b = torch.rand(2, 6, 2, 4, dtype=torch.float64), torch.rand(2, 6, 2, dtype=torch.float64)
    transitions, writes = updates(k, v, a, b)
    before, added = exclusive_prefixes(transitions, writes)
    expected_a, expected_b = torch.eye(3, dtype=torch.float64).expand(2, 2, 3, 3), torch.zeros(2, 2, 3, 4).double()
    for t in range(6):
        torch.testing.assert_close(before[:, :, t], expected_a)
        torch.testing.assert_close(added[:, :, t], expected_b)
        expected_a = transitions[:, :, t] @ expected_a
        expected_b = transitions[:, :, t] @ expected_b + writes[:, :, t]


def test_a_spike_is_a_step_with_the_gradient_of_a_sigmoid() -> None:
    potential = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    fired = spike(potential, 0.5, 4.0)
    assert fired.tolist() == [0.0, 1.0, 1.0]
    (grad,) = torch.autograd.grad(fired.sum(), potential)
    soft = torch.sigmoid(4 * (potential - 0.5))
    torch.testing.assert_close(grad, 4 * soft * (1 - soft))


def test_weights_that_are_off_are_not_read_and_get_no_gradient() -> None:
    projection = MaskedLinear(8, 4)
    projection.keep_largest(0.25)
    assert int(projection.mask.sum()) == 8
    projection(torch.randn(3, 8)).sum().backward()
    assert projection.weight.grad is not None
    assert not projection.weight.grad[~projection.mask].any()
    assert projection.weight.abs()[projection.mask].min() >= projection.weight.abs()[~projection.mask].max()


def test_a_filled_output_before_the_first_token_is_the_one_from_before() -> None:
    outputs, earlier = torch.arange(4.0).reshape(1, 4, 1, 1), torch.full((1, 1, 1), -1.0)
    drop = torch.tensor([[True, False, True, True]])
    assert forward_fill(outputs, drop, earlier).flatten().tolist() == [-1.0, 1.0, 1.0, 1.0]


def test_the_model_streams_what_it_gives_for_a_sequence() -> None:
    torch.manual_seed(0)
    model = SpikeKDALM(replace(CONFIG, vocabulary=11)).double()
    ids = torch.randint(0, 11, (2, 9))
    logits, _ = model(ids)
    states, streamed = None, []
    for t in range(9):
        one, states = model.stream(ids[:, t], states)
        streamed.append(one)
    torch.testing.assert_close(torch.stack(streamed, 1), logits)
