"""Means of rows that no ``mean`` computes are those of norms, too; what only looks like one is left alone, or told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

from lz_compile.report.report import MatchReport


def compiled(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting(lock={"norm": "torch.norm"})
    return torch.compile(function, backend=backend, fullgraph=True)(*inputs), backend


def norms(backend: Rewriting) -> list[MatchReport]:
    return [match for match in backend.report.matches if match.op == "norm"]


def only(backend: Rewriting) -> MatchReport:
    (found,) = norms(backend)
    return found


#: Sums of rows that are no ``sum`` and no ``mean``, over the last dimension.
MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ torch.ones(24, 1) / 24,
    "vector": lambda x: (x @ x.new_ones(24)).unsqueeze(-1) / 24,
    "everywhere": lambda x: x @ torch.full((24, 24), 1 / 24),
    "linear": lambda x: F.linear(x, torch.full((1, 24), 1 / 24)),
    "einsum": lambda x: torch.einsum("...d->...", x)[..., None] / 24,
    "einsum_with_ones": lambda x: torch.einsum("bsd,d->bs", x, torch.ones(24))[..., None] / 24,
    "product": lambda x: (x * torch.ones_like(x)).sum(-1, keepdim=True) / 24,
    "pool": lambda x: F.avg_pool1d(x, 24),
    "adaptive_pool": lambda x: F.adaptive_avg_pool1d(x, 1),
}


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_rows_that_are_summed_by_a_product_or_a_pool_are_normalised(mean: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        row = x - mean(x)
        return row / (mean(row.square()) + 1e-3).sqrt() * weight

    x, weight = torch.randn(5, 7, 24) + 1, torch.randn(24)
    got, backend = compiled(function, x, weight)
    match = only(backend)
    assert match.rewritten, backend.why_not()
    assert match.attributes["is_centred"]
    torch.testing.assert_close(
        got.double(), F.layer_norm(x.double(), (24,), weight.double(), eps=1e-3), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("number", [0.0, math.inf])
def test_rows_that_are_summed_by_a_product_with_no_plain_number_are_left_alone(number: float) -> None:
    def function(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square() @ torch.full((24, 1), number) + 1e-3)

    x = torch.randn(5, 7, 24)
    got, backend = compiled(function, x)
    assert not norms(backend)
    torch.testing.assert_close(got, function(x), equal_nan=True)


def test_a_quotient_that_is_added_and_a_hypotenuse_are_read() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        root = torch.hypot(x.norm(dim=-1, keepdim=True) / 24**0.5, torch.full((), 0.1))
        return torch.addcdiv(bias, x * weight, root, value=2)

    x, weight, bias = torch.randn(5, 24), torch.randn(24), torch.randn(24)
    got, backend = compiled(function, x, weight, bias)
    assert only(backend).rewritten, backend.why_not()
    exact = [each.double() for each in (x, weight, bias)]
    torch.testing.assert_close(got.double(), function(*exact), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["nanmean", "nansum"])
def test_statistics_without_missing_numbers_are_told(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        return x * torch.rsqrt(getattr(x.square(), name)(-1, keepdim=True) + 1e-3)

    _, backend = compiled(function, torch.randn(5, 24))
    assert [miss.reason.code for miss in backend.report.near_misses] == ["NAN_SKIPPED"]
    assert name in backend.why_not()


def test_squares_in_another_view_are_tried_at_the_sizes_of_their_row() -> None:
    def function(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().view(35, 24).mean(-1).view(5, 7, 1) + 1e-3)

    x = torch.randn(5, 7, 24)
    got, backend = compiled(function, x)
    assert only(backend).rewritten, backend.why_not()
    assert not backend.report.events
    torch.testing.assert_close(got, function(x))
