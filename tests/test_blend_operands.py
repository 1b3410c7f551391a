"""Blends of odd operands, compiled and not: single rows, what is overwritten, other dtypes, infinities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lz_compile.passes.blend.matching import matches
from tests.backends import Rewriting
from tests.blend_spellings import CONVEX
from tests.graphs import capture, effects_of

KERNELS = ("torch.blend", "lz.cpp_blend")


def _gate(x: Tensor) -> Tensor:
    top = x.detach().topk(2, 1).values
    return torch.sigmoid(6.0 * (top[:, 0] - top[:, 1] - 0.2))


def _gated(h: Tensor, s: Tensor, a: Tensor, x: Tensor, mixed: str = "weighted_sum") -> Tensor:
    weight = (a * _gate(x))[(slice(None), *(None for _ in s.shape[1:]))].clamp(0, 1)
    return CONVEX[mixed](h.detach(), s, weight)


def _is_same(lock: str, function: Callable[..., Any], *inputs: Tensor, codes: tuple[str, ...] = ()) -> Rewriting:
    """Compiled and not: results and gradients, and what is left in the inputs."""
    torch._dynamo.reset()
    backend, found = Rewriting(lock={"blend": lock}), []
    for run in (torch.compile(function, backend=backend, fullgraph=True), function):
        given = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
        out = run(*given)
        leaves = [each for each in given if each.requires_grad]
        gradients = torch.autograd.grad(out.sum(), leaves, allow_unused=True) if out.requires_grad else ()
        found.append((out.detach(), *gradients, *(each.detach() for each in given)))
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            slack = 3e-2 if any(each.dtype == torch.bfloat16 for each in inputs) else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=slack, atol=slack, equal_nan=True)
    assert [miss.reason.code for miss in backend.report.near_misses] == list(codes)
    return backend


@pytest.mark.parametrize("lock", KERNELS)
def test_one_row_of_logits_for_one_row_and_for_all(lock: str) -> None:
    for rows, logit_rows, shape in ((1, 1, (9,)), (1, 1, (3, 5, 6)), (4, 1, (9,)), (5, 5, (1,)), (1, 1, (1,))):
        host, seed = torch.randn(rows, *shape), torch.randn(rows, *shape, requires_grad=True)
        backend = _is_same(lock, _gated, host, seed, torch.tensor(0.4), torch.randn(logit_rows, 7))
        (match,) = backend.report.matches
        assert (match.rewritten, match.kernel) == (True, lock), backend.why_not()


@pytest.mark.parametrize("lock", KERNELS)
def test_values_that_are_overwritten_are_read_before_or_not_at_all(lock: str) -> None:
    def host_after_half(h: Tensor, s: Tensor, a: Tensor, x: Tensor) -> Tensor:
        weight = (a * _gate(x))[:, None]
        half = (1 - weight) * h
        h.mul_(2)
        return weight * s + half

    def host_after(h: Tensor, s: Tensor, a: Tensor, x: Tensor) -> Tensor:
        out = _gated(h, s, a, x)
        h.zero_()
        return out

    def logits_between(h: Tensor, s: Tensor, a: Tensor, x: Tensor) -> Tensor:
        gate = _gate(x)[:, None]
        x.zero_()
        return a * gate * s + (1 - a * gate) * h

    def weight_between(h: Tensor, s: Tensor, a: Tensor, x: Tensor) -> Tensor:
        weight = (a * _gate(x))[:, None]
        rest = 1 - weight
        weight.mul_(0.5)
        return weight * s + rest * h

    for function, codes in (
        (host_after_half, ("OPERAND_MUTATED",)),
        (host_after, ()),
        (logits_between, ()),  # what may share memory with the logits is read after them only
        (weight_between, ()),
    ):
        inputs = torch.randn(4, 9), torch.randn(4, 9), torch.tensor(0.4), torch.randn(4, 7)
        _is_same(lock, function, *inputs, codes=codes)


@pytest.mark.parametrize("lock", KERNELS)
def test_a_host_may_be_the_seed_and_be_detached_more_than_once(lock: str) -> None:
    seed, alpha, x = torch.randn(4, 9, requires_grad=True), torch.tensor(0.4), torch.randn(4, 7)
    _is_same(lock, lambda s, a, x: _gated(s, s, a, x), seed, alpha, x)
    _is_same(lock, lambda s, a: _gated(s, s, a, s), seed, alpha)
    _is_same(
        lock,
        lambda h, s, a, x: h.detach().detach() + (a * _gate(x))[:, None] * (s - h.detach()),
        *(torch.randn(4, 9, requires_grad=True), seed, alpha, x),
    )


@pytest.mark.parametrize("lock", KERNELS)
def test_dtypes_may_differ(lock: str) -> None:
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    for host, seed, alpha, logits in (
        (half, half, single, half),
        (single, half, half, half),
        (half, single, single, single),
        (half, half, half, single),
        (single, single, double, single),
        (single, single, single, double),
    ):
        tensors = torch.randn(4, 9).to(host), torch.randn(4, 9).to(seed).requires_grad_()
        _is_same(lock, _gated, *tensors, torch.tensor(0.4, dtype=alpha), torch.randn(4, 7).to(logits))


def test_integers_complex_numbers_and_single_numbers_are_left_alone() -> None:
    host, seed, alpha = torch.randn(4, 6), torch.randn(4, 6), torch.tensor(0.3)
    for tensors in (
        (host, seed.long(), alpha),
        (host.long(), seed, alpha),
        (host, seed + 1j, alpha),
        (host, seed, alpha + 1j),
        (host[0, 0], seed[0, 0], alpha),
        (host[:0], seed[:0], alpha),
    ):
        module = capture(lambda h, s, a: a * s + (1 - a) * h.detach(), *tensors)
        assert list(matches(module.graph, effects_of(module))) == []


@pytest.mark.parametrize("mixed", ["weighted_sum", "delta", "lerp", "multiplied_out"])
def test_no_blend_is_nan_where_its_source_is_none(mixed: str) -> None:
    """A difference of infinities is NaN where the sum that replaces it may still be one of them, never the other way round."""
    host, seed = torch.randn(4, 9), torch.randn(4, 9)
    host[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.inf])
    seed[0, 2:7] = torch.tensor([torch.inf, -torch.inf, torch.inf, -torch.inf, torch.nan])
    for alpha in (0.0, 0.5, 1.0):
        inputs = host, seed, torch.tensor(alpha), torch.eye(4, 7) * 1e9
        torch._dynamo.reset()
        backend = Rewriting(lock={"blend": "torch.blend"})
        found = torch.compile(lambda *given: _gated(*given, mixed=mixed), backend=backend)(*inputs)
        assert backend.report.matches[0].rewritten, backend.why_not()
        expected = _gated(*inputs, mixed=mixed)
        assert not (found.isnan() & ~expected.isnan()).any()
        torch.testing.assert_close(found[~expected.isnan()], expected[~expected.isnan()])
        if mixed == "weighted_sum":
            assert (found.isnan() == expected.isnan()).all()


@pytest.mark.parametrize(
    "mixed",
    [
        lambda h, s, a, b: (a + b - a * b) * s + (1 - a) * (1 - b) * h,
        lambda h, s, a, b: (1 - (1 - a) * (1 - b)) * s + (1 - a) * (1 - b) * h,
        lambda h, s, a, b: (a + b - a * b) * s.mul(1e-8) + (1 - a) * (1 - b) * h,
        lambda h, s, a, b: b * s + (1 - b) * (a * s + (1 - a) * h),
        lambda h, s, a, b: torch.lerp(torch.lerp(h, s, a), s, b),
        lambda h, s, a, b: torch.lerp(torch.lerp(h, s, 0.25), s, b),
        lambda h, s, a, b: 0.3 * (1 - b) * h + (1 - 0.3 * (1 - b)) * s,
        lambda h, s, a, b: (2 * a - a * a) * s + (1 - a) ** 2 * h,
        lambda h, s, a, b: a * b * (1 - b) * s + a * (1 - b * (1 - b)) * s + (1 - a) * h,
    ],
)
def test_a_hosts_weight_that_is_a_product_is_none_less_the_seeds(mixed: Callable[..., Tensor]) -> None:
    """Of which float32 holds the fewer digits the smaller it is."""
    generator = torch.Generator().manual_seed(0)
    host, seed = torch.randn(2, 6, 32, generator=generator) * torch.tensor([1e6, 1.0])[:, None, None]
    a, b = 1 - torch.rand(2, 6, 1, generator=generator) * 1e-3
    backend = Rewriting(lock={"blend": "torch.blend"})
    compiled = torch.compile(lambda *given: mixed(given[0].detach(), *given[1:]), backend=backend)
    found, exact = compiled(host, seed.requires_grad_(), a, b), mixed(*(each.double() for each in (host, seed, a, b)))
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
