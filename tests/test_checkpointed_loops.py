"""Loops inside of `torch.utils.checkpoint`, or of a loop that was rolled itself: PyTorch compiles no scan there.

Kernels that take the place of a scan as a whole it compiles.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Traced
from torch import Tensor
from torch.utils.checkpoint import checkpoint

B, T, D = 2, 16, 3


def attended(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(-1, -2) / D**0.5, -1) @ x


def opaque(x: Tensor) -> Tensor:
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(T):
        h = torch.tanh(h + x[:, t])
        found.append(h)
    return torch.stack(found, 1)


def affine(x: Tensor) -> Tensor:
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(T):
        h = torch.sigmoid(x[:, t]) * h + x[:, t]
        found.append(h)
    return torch.stack(found, 1)


def compiled(function: Callable[[Tensor], Tensor], is_graded: bool = True, **options) -> Traced:
    """The backend, after values and gradients were compared."""
    torch.manual_seed(0)
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=is_graded)
    backend = Traced(loops="roll", **options)
    torch._dynamo.reset()
    found, expected = torch.compile(function, backend=backend, fullgraph=True)(x), function(x)
    torch.testing.assert_close(found, expected)
    if is_graded:
        gradients = [torch.autograd.grad(y.square().sum(), x) for y in (found, expected)]
        torch.testing.assert_close(*gradients)
    assert not backend.report.events, backend.why_not()
    return backend


def test_a_loop_in_a_checkpoint_stays_and_the_rest_of_its_graph_is_rewritten():
    backend = compiled(lambda x: checkpoint(lambda y: opaque(attended(y)), x, use_reentrant=False))
    (loop,) = backend.report.loops
    assert (loop.rolled, loop.reason.code) == (False, "IN_CHECKPOINT")
    assert [match.rewritten for match in backend.report.matches if match.op == "attention"] == [True]


def test_a_kernel_takes_the_place_of_a_loop_in_a_checkpoint():
    backend = compiled(lambda x: checkpoint(affine, x, use_reentrant=False), lock={"scan": "lz.rolled_scan"})
    assert [loop.rolled for loop in backend.report.loops] == [True]
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()


def test_a_loop_in_a_checkpoint_that_a_kernel_could_but_does_not_compute_is_unrolled_again():
    backend = compiled(lambda x: checkpoint(affine, x, use_reentrant=False), lock={"scan": "inductor"})
    (loop,) = backend.report.loops
    assert (loop.rolled, loop.reason.code) == (False, "IN_CHECKPOINT")


def test_a_loop_in_a_checkpoint_within_a_checkpoint_stays():
    def inner(y: Tensor) -> Tensor:
        return checkpoint(opaque, y.sin(), use_reentrant=False)

    backend = compiled(lambda x: checkpoint(inner, x, use_reentrant=False))
    assert [loop.reason.code for loop in backend.report.loops] == ["IN_CHECKPOINT"]


@pytest.mark.parametrize("place", ["beside", "without gradients"])
def test_loops_elsewhere_are_rolled(place):
    def beside(x: Tensor) -> Tensor:
        return opaque(checkpoint(attended, x, use_reentrant=False))

    def without(x: Tensor) -> Tensor:
        with torch.no_grad():
            return checkpoint(opaque, x, use_reentrant=False)

    backend = compiled(beside if place == "beside" else without, is_graded=place == "beside")
    assert [loop.rolled for loop in backend.report.loops] == [True]


def layered(step: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Layers of a loop, which are equal themselves."""

    def run(x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for _ in range(4):
            for t in range(T):
                h = step(h, x[:, t])
            h = torch.sin(h).clone()
        return h

    return run


@pytest.mark.parametrize("is_graded", [True, False])
def test_a_loop_in_the_step_of_another_stays_where_a_gradient_is_taken(is_graded: bool):
    backend = compiled(layered(lambda h, x: torch.tanh(h + x)), is_graded=is_graded)
    loops = {loop.steps: loop for loop in backend.report.loops}
    assert loops[4].rolled
    assert [loop.reason.code for loop in loops.values() if not loop.rolled] == (["IN_LOOP"] if is_graded else [])


def test_a_kernel_takes_the_place_of_a_loop_in_the_step_of_another():
    backend = compiled(layered(lambda h, x: torch.sigmoid(x) * h + x), lock={"scan": "lz.rolled_scan"})
    assert [loop.rolled for loop in backend.report.loops] == [True, True]
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
