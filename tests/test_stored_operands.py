"""A tensor that is filled by stores is an operand like any other for whoever reads it after the last of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Rewriting
from torch import Tensor

LOCKS = {"norm": "torch.norm", "rope": "torch.rope", "blend": "torch.blend"}


def joined(one: Tensor, other: Tensor) -> Tensor:
    """Rows of two tensors, put together by stores: as many of each as each sequence has, zeros behind them."""
    rows = one.new_zeros(one.shape[0], 11, one.shape[-1])
    for index, (first, last) in enumerate(((3, 9), (4, 8))):
        rows[index, :first] = one[index, :first]
        rows[index, first:last] = other[index, : last - first]
    return rows


def norm(rows: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    return weight * rows / (rows.square().sum(-1, keepdim=True) / rows.shape[-1] + 1e-5).sqrt()


def rope(rows: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    angles = torch.arange(11.0)[:, None] * weight[:8]
    even, odd = rows[..., :8], rows[..., 8:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def blend(rows: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    return 0.3 * rows.detach() + 0.7 * joined(other, other)


@pytest.mark.parametrize("function", [norm, rope, blend])
def test_what_was_stored_before_it_is_read_is_an_operand(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    one, other = torch.randn(2, 6, 16), torch.randn(2, 7, 16)
    weight = torch.rand(16, requires_grad=True)
    backend = Rewriting(lock=LOCKS)
    torch._dynamo.reset()

    def stored(one: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        return function(joined(one, other), other, weight)

    ours = torch.compile(stored, backend=backend, fullgraph=True)(one, other, weight)
    assert [(match.op, match.rewritten) for match in backend.report.matches] == [(function.__name__, True)], (
        backend.why_not()
    )
    wide = weight.detach().double().requires_grad_()
    truth = stored(one.double(), other.double(), wide)
    torch.testing.assert_close(ours, truth, check_dtype=False, rtol=1e-5, atol=1e-6)
    if truth.requires_grad:
        found, expected = (torch.autograd.grad(y.sin().sum(), w)[0] for y, w in ((ours, weight), (truth, wide)))
        torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["norm", "rope"])
def test_what_is_stored_between_two_reads_of_it_is_none(op: str) -> None:
    def of_norm(rows: Tensor, weight: Tensor) -> Tensor:
        square = rows.square().mean(-1, keepdim=True)
        rows[:, 5] = 1
        return rows * torch.rsqrt(square + 1e-5) * weight

    def of_rope(rows: Tensor, weight: Tensor) -> Tensor:
        angles = (torch.arange(11.0)[:, None] * weight[:8]).repeat(1, 2)
        turned = torch.cat([-rows[..., 8:], rows[..., :8]], -1) * angles.sin()
        rows[:, 2] = 3
        return rows * angles.cos() + turned

    def stored(one: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        return {"norm": of_norm, "rope": of_rope}[op](joined(one, other), weight)

    inputs = torch.randn(2, 6, 16), torch.randn(2, 7, 16), torch.rand(16)
    backend = Rewriting(lock=LOCKS)
    torch._dynamo.reset()
    result = torch.compile(stored, backend=backend, fullgraph=True)(*inputs)
    assert not any(match.rewritten for match in backend.report.matches)
    assert {(miss.op, miss.reason.code) for miss in backend.report.near_misses} == {(op, "OPERAND_MUTATED")}
    torch.testing.assert_close(result, stored(*inputs), rtol=0, atol=0)
