"""Recurrences in the space of logarithms are scans; what is used as a logarithm, or is complex, is told what it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan


def heinsen(a: Tensor, x: Tensor) -> Tensor:
    """Of decays and summands, both positive."""
    sums = a.sigmoid().log().cumsum(1)
    return (sums + (x.exp().log() - sums).logcumsumexp(1)).exp()


def min_gru(a: Tensor, x: Tensor) -> Tensor:
    """As gates: what one lets in, the other lets go."""
    sums = torch.cumsum(-F.softplus(a), dim=1)
    return torch.exp(torch.logcumsumexp(-F.softplus(-a) + x - sums, dim=1) + sums)


def min_gru_with_state(a: Tensor, x: Tensor) -> Tensor:
    """With a first state in front, whose decay is one."""
    sums = F.pad(torch.cumsum(-F.softplus(a), dim=1), (0, 0, 1, 0))
    values = torch.cat((x[:, :1] * 0, x - F.softplus(-a)), dim=1)
    return torch.exp(sums + torch.logcumsumexp(values - sums, dim=1))[:, 1:]


def last_dimension(a: Tensor, x: Tensor) -> Tensor:
    """Time at the end."""
    logs, values = F.logsigmoid(a).mT, x.mT
    sums = logs.cumsum(-1)
    return (sums + (values - sums).logcumsumexp(-1)).exp().mT


def used_as_logarithms(a: Tensor, x: Tensor) -> Tensor:
    """What is read is not the states alone."""
    sums = a.sigmoid().log().cumsum(1)
    logs = sums + (x - sums).logcumsumexp(1)
    return logs.exp() + logs


def compiled(
    function: Callable[[Tensor, Tensor], Tensor], *, wants_grad: bool = False
) -> tuple[Rewriting, Tensor, Tensor]:
    """The backend, what it gives and what eager gives, with gradients behind the result where they are wanted."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    leaves = [torch.randn(2, 16, 17, dtype=torch.float64, requires_grad=wants_grad) for _ in range(2)]
    backend, results = Rewriting(), []
    for each in (torch.compile(function, backend=backend, fullgraph=True), function):
        found = each(*leaves)
        parts = torch.autograd.grad(found.square().sum(), leaves) if wants_grad else ()
        results.append(torch.cat([part.detach().flatten() for part in (found, *parts)]))
    return backend, results[0], results[1]


@pytest.mark.sampled
@pytest.mark.parametrize("function", [heinsen, min_gru, min_gru_with_state, last_dimension])
@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_recurrence_of_logarithms_is_a_scan(function: Callable[..., Tensor], wants_grad: bool) -> None:
    backend, got, want = compiled(function, wants_grad=wants_grad)
    assert [match.rewritten for match in backend.report.matches if match.op == "scan"] == [True], backend.why_not()
    assert "logcumsumexp" not in str(backend.graphs[0].graph)
    torch.testing.assert_close(got, want)


def by_products(a: Tensor, x: Tensor) -> Tensor:
    """Running products in place of running sums."""
    products = a.sigmoid().cumprod(1)
    return products * (x / products).cumsum(1)


@pytest.mark.parametrize("function", [min_gru, min_gru_with_state, by_products])
def test_lengths_may_be_symbolic(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    backend = Rewriting()
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for length in (40, 2, 65):
        a, x = torch.randn(2, 2, length, 5, dtype=torch.float64)
        torch.testing.assert_close(run(a, x), function(a, x))
    assert [match.rewritten for match in backend.report.matches if match.op == "scan"] == [True], backend.why_not()


def by_logarithms(a: Tensor, x: Tensor) -> Tensor:
    sums = a.log().cumsum(1)
    return (sums + (x - sums).logcumsumexp(1)).exp()


def by_factors(a: Tensor, x: Tensor) -> Tensor:
    products = a.cumprod(1)
    return products * (x / products).cumsum(1)


@pytest.mark.parametrize("function", [by_logarithms, by_factors])
def test_a_decay_of_zero_is_no_number_from_there_on(function: Callable[..., Tensor]) -> None:
    a, x = torch.rand(2, 32, 9) + 0.1, torch.randn(2, 32, 9)
    a[0, 7, 3], a[1, 0, 2] = 0, 0
    torch._dynamo.reset()
    backend = Rewriting()
    got = torch.compile(function, backend=backend, fullgraph=True)(a, x)
    assert any(match.rewritten for match in backend.report.matches), backend.why_not()
    torch.testing.assert_close(got, function(a, x), equal_nan=True, rtol=1e-4, atol=1e-4)


def test_states_that_are_used_as_logarithms_are_left_with_that_reason() -> None:
    backend, got, want = compiled(used_as_logarithms)
    (miss,) = backend.report.near_misses
    assert miss.reason.code == "LOG_SPACE_STATES", miss
    assert "by add" in str(miss.reason), miss
    torch.testing.assert_close(got, want)


def complex_numbers(a: Tensor, x: Tensor) -> Tensor:
    """States of complex numbers."""

    def combine(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return other[0] * one[0], torch.addcmul(other[1], other[0], one[1])

    pairs = torch.complex(a.sigmoid(), a.tanh()), torch.complex(x, a)
    return associative_scan(combine, pairs, 1, combine_mode="generic")[1].real


def complex_pairs(a: Tensor, x: Tensor) -> Tensor:
    """The same with real and imaginary parts apart."""

    def combine(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (ar, ai, xr, xi), (br, bi, yr, yi) = one, other
        return br * ar - bi * ai, br * ai + bi * ar, yr + br * xr - bi * xi, yi + br * xi + bi * xr

    found = associative_scan(combine, (a.sigmoid(), a.tanh(), x, a * 2), 1, combine_mode="generic")
    return found[2] + found[3]


@pytest.mark.parametrize("function", [complex_numbers, complex_pairs])
def test_complex_states_in_logarithmic_depth_are_told_that_they_are(function: Callable[..., Tensor]) -> None:
    backend, got, want = compiled(function)
    assert [miss.reason.code for miss in backend.report.near_misses if miss.op == "scan"] == ["COMPLEX_STATE"]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("function", [heinsen, min_gru, by_products])
def test_few_steps_are_told_to_be_few(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    backend = Rewriting()
    a, x = torch.randn(2, 2, 12, 17, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(a, x), function(a, x))
    (miss,) = backend.report.near_misses
    assert miss.reason.code == "SCAN_SHORT", miss
    assert "12 steps" in str(miss.reason), miss
