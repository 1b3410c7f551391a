"""Recurrences that are computed in place, by sweeps over strided pieces, become the op: in any spelling, in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting, reads_autograd_functions
from torch import Tensor

Sweep = Callable[[Tensor, Tensor], Tensor]


def blelloch_by_slices(a: Tensor, x: Tensor) -> Tensor:
    """Up and down over every second element, ``[B, T, D]``."""
    a, x, steps = a.clone(), x.clone(), x.shape[1]
    for level in range(int(math.log2(steps))):
        near, far = slice(2**level - 1, None, 2 ** (level + 1)), slice(2 ** (level + 1) - 1, None, 2 ** (level + 1))
        x[:, far] += a[:, far] * x[:, near]
        a[:, far] *= a[:, near]
    for level in range(int(math.log2(steps)) - 2, -1, -1):
        known = slice(2 ** (level + 1) - 1, -(2**level), 2 ** (level + 1))
        late = slice(3 * 2**level - 1, None, 2 ** (level + 1))
        x[:, late].add_(a[:, late].mul(x[:, known]))
        a[:, late].mul_(a[:, known])
    return x


def blelloch_by_views(a: Tensor, x: Tensor) -> Tensor:
    """The up sweep over pairs in the last dimension but one, the down sweep over shifted ones."""
    steps = x.shape[1]
    a, x = a.transpose(1, 2).contiguous(), x.transpose(1, 2).contiguous()
    whole, factors = x, a
    for _ in range(int(math.log2(steps))):
        whole, factors = whole.unflatten(2, (-1, 2)), factors.unflatten(2, (-1, 2))
        whole[..., 1].addcmul_(factors[..., 1], whole[..., 0])
        factors[..., 1].mul_(factors[..., 0])
        whole, factors = whole[..., 1], factors[..., 1]
    for level in range(int(math.log2(steps)) - 2, -1, -1):
        states, decays = (each[:, :, 2**level - 1 :: 2**level] for each in (x, a))
        states[:, :, 2::2].addcmul_(decays[:, :, 2::2], states[:, :, 1:-1:2])
        decays[:, :, 2::2].mul_(decays[:, :, 1:-1:2])
    return x.transpose(1, 2)


def blelloch_by_pairs(a: Tensor, x: Tensor) -> Tensor:
    """Over memory in another order, by views that name all sizes, into pieces that are cut along two dimensions at once."""
    a, x = (each.clone().transpose(1, 2) for each in (a, x))
    width, steps = x.shape[1:]
    levels = int(math.log2(steps))

    def pairs(each: Tensor) -> Tensor:
        return each.view(len(each), width, each.shape[2] // 2, 2)

    whole, factors = x, a
    for _ in range(levels):
        whole, factors = pairs(whole), pairs(factors)
        whole[..., 1].add_(factors[..., 1].mul(whole[..., 0]))
        factors[..., 1].mul_(factors[..., 0])
        whole, factors = whole[..., 1], factors[..., 1]
    for level in range(levels - 2, -1, -1):
        states, decays = (pairs(each[:, :, 2**level - 1 : steps : 2**level]) for each in (x, a))
        states[:, :, 1:, 0].add_(decays[:, :, 1:, 0].mul(states[:, :, :-1, 1]))
        decays[:, :, 1:, 0].mul_(decays[:, :, :-1, 1])
    return x.transpose(1, 2)


def beside_an_exponential(a: Tensor, x: Tensor) -> Tensor:
    """Where a piece that is written to could be one of scores."""
    return blelloch_by_pairs((-x.exp()).exp() * a, x)


def doubling(a: Tensor, x: Tensor) -> Tensor:
    """Every element from the one that is a power of two before it."""
    a, x, step = a.clone(), x.clone(), 1
    while step < x.shape[1]:
        x[:, step:] += a[:, step:] * x[:, :-step].clone()
        a[:, step:] *= a[:, :-step].clone()
        step *= 2
    return x


def backwards(sweep: Sweep) -> Sweep:
    """The same over steps in the other order."""

    def run(a: Tensor, x: Tensor) -> Tensor:
        return sweep(a.flip(1), x.flip(1)).flip(1)

    return run


def reversed_doubling(a: Tensor, x: Tensor) -> Tensor:
    """Every element from those after it."""
    a, x, step = a.clone(), x.clone(), 1
    while step < x.shape[1]:
        x[:, :-step] += a[:, :-step] * x[:, step:].clone()
        a[:, :-step] *= a[:, step:].clone()
        step *= 2
    return x


def padded(a: Tensor, x: Tensor) -> Tensor:
    """Any number of steps, as the next power of two."""
    length = x.shape[1]
    rest = (0, 0, 0, 2 ** math.ceil(math.log2(length)) - length)
    return blelloch_by_slices(F.pad(a, rest), F.pad(x, rest))[:, :length]


def summed(_: Tensor, x: Tensor) -> Tensor:
    """Without decays."""
    x, step = x.clone(), 1
    while step < x.shape[1]:
        x[:, step:] += x[:, :-step].clone()
        step *= 2
    return x


def compiled(function: Sweep, steps: int = 16, width: int = 3) -> tuple[Rewriting, Tensor, Tensor]:
    """The backend, what it gives and what eager gives."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    a, x, backend = torch.rand(2, steps, width), torch.randn(2, steps, width), Rewriting()
    with torch.no_grad():
        return backend, torch.compile(function, backend=backend, fullgraph=True)(a, x), function(a, x)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "sweep",
    [
        blelloch_by_slices,
        blelloch_by_views,
        blelloch_by_pairs,
        beside_an_exponential,
        doubling,
        backwards(doubling),
        reversed_doubling,
        padded,
        summed,
    ],
    ids=lambda each: each.__qualname__.split(".")[0],
)
@pytest.mark.parametrize("steps", [16, 32])
def test_a_sweep_in_place_is_the_op(sweep: Sweep, steps: int) -> None:
    backend, got, want = compiled(sweep, steps - 3 if sweep is padded and steps > 16 else steps)
    assert [match.op for match in backend.report.matches] == ["scan"], backend.why_not()
    assert not backend.report.near_misses
    assert "add_" not in str(backend.graphs[0].graph)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("sweep", [blelloch_by_views, blelloch_by_pairs])
def test_a_sweep_over_fewer_steps_than_another_dimension_has_is_the_op(sweep: Sweep) -> None:
    backend, got, want = compiled(sweep, 16, 64)
    assert [match.op for match in backend.report.matches] == ["scan"], backend.why_not()
    torch.testing.assert_close(got, want)


def test_what_it_overwrites_of_the_decays_stays_where_somebody_reads_it() -> None:
    def function(a: Tensor, x: Tensor) -> Tensor:
        a, x = a.clone(), x.clone()
        for step in (1, 2, 4, 8):
            x[:, step:] += a[:, step:] * x[:, :-step].clone()
            a[:, step:] *= a[:, :-step].clone()
        return x + a

    backend, got, want = compiled(function)
    assert not backend.report.matches
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("fault", ["level", "sign", "read"])
def test_a_sweep_with_a_fault_is_something_else(fault: str) -> None:
    def function(a: Tensor, x: Tensor) -> Tensor:
        a, x, seen = a.clone(), x.clone(), 0.0
        for step in (1, 2, 3 if fault == "level" else 4, 8):
            x[:, step:] += a[:, step:] * x[:, :-step].clone() * (-1 if fault == "sign" and step == 4 else 1)
            a[:, step:] *= a[:, :-step].clone()
            if fault == "read" and step == 2:
                seen = x.sum()
        return x + seen

    backend, got, want = compiled(function)
    assert not backend.report.matches
    torch.testing.assert_close(got, want)


def test_an_input_that_is_overwritten_stays_overwritten() -> None:
    def function(a: Tensor, x: Tensor) -> Tensor:
        a = a.clone()
        for step in (1, 2, 4, 8):
            x[:, step:] += a[:, step:] * x[:, :-step].clone()
            a[:, step:] *= a[:, :-step].clone()
        return x * 2

    a, x = torch.rand(2, 16, 3), torch.randn(2, 16, 3)
    other = x.clone()
    torch._dynamo.reset()
    got = torch.compile(function, backend=Rewriting(), fullgraph=True)(a, x)
    torch.testing.assert_close(got, function(a, other))
    torch.testing.assert_close(x, other)


class Parallel(torch.autograd.Function):
    """As libraries spell it: both directions in place, the gradient by a sweep from the end."""

    @staticmethod
    def forward(ctx, a, x):  # type: ignore[no-untyped-def]
        """States of all steps."""
        states = blelloch_by_slices(a, x)
        ctx.save_for_backward(a, states)
        return states

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        """Gradients of decays and summands."""
        a, states = ctx.saved_tensors
        found = reversed_doubling(F.pad(a[:, 1:], (0, 0, 0, 1)), gradient)
        of_decay = torch.zeros_like(states)
        of_decay[:, 1:].add_(states[:, :-1] * found[:, 1:])
        return of_decay, found


@reads_autograd_functions
def test_an_autograd_function_over_sweeps_is_the_op_in_both_directions() -> None:
    torch._dynamo.reset()
    backend = Rewriting()
    leaves = torch.rand(2, 16, 3, requires_grad=True), torch.randn(2, 16, 3, requires_grad=True)

    def function(a: Tensor, x: Tensor) -> Tensor:
        return Parallel.apply(a.sin(), x * 2).square().sum()  # type: ignore[no-untyped-call,no-any-return]

    got = torch.compile(function, backend=backend, fullgraph=True)(*leaves)
    assert [match.op for match in backend.report.matches] == ["scan", "scan"], backend.why_not()
    want = function(*leaves)
    torch.testing.assert_close(got, want)
    for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_a_sweep_over_too_few_steps_for_a_scan_is_values_too() -> None:
    backend, got, want = compiled(blelloch_by_views, 4)
    torch.testing.assert_close(got, want)
    assert not backend.report.matches
    assert "torch.cat" in str(backend.graphs[0].graph)
    assert "target=addcmul_]" not in str(backend.graphs[0].graph)


def test_a_sum_in_place_has_gradients() -> None:
    """With decays eager PyTorch refuses: what the backward pass needs of them is overwritten."""
    torch._dynamo.reset()
    backend, x = Rewriting(), torch.randn(2, 16, 3, requires_grad=True)
    got = torch.compile(summed, backend=backend, fullgraph=True)(x, x)
    assert [match.op for match in backend.report.matches] == ["scan"], backend.why_not()
    want = summed(x, x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sin().sum(), x), torch.autograd.grad(want.sin().sum(), x))
