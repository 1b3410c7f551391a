"""Gradients where a training step overwrites its inputs: states, statistics, caches, weights that decay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from lz_compile.lowering.overwritten_inputs import keep_what_was


def states(first: Tensor, second: Tensor, cache: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Read, then overwritten, as a whole, in part and by steps; and read once more."""
    gate = (x * weight).sigmoid()
    carried = gate * first.clone() + x
    first.copy_(carried.detach()[:1])
    rows = (second * 2).exp() * gate
    second.mul_(0.9).add_(carried.detach().mean(0), alpha=0.1)
    again = (carried * second).tanh()
    past = cache.clone()
    cache[1:3] = x.detach()
    return rows + again + (gate @ past.mT) @ past + (gate @ cache.clone().mT.sin()).sum(1, keepdim=True)


def decayed(first: Tensor, second: Tensor, cache: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """A weight that is made smaller ahead of its product, and states that move on."""
    with torch.no_grad():
        weight.mul_(0.5)
        first.copy_(second)
        second.copy_(x[0])
    return (x * weight).sin() * first + cache[:2].clone().cos() * weight


@pytest.mark.parametrize("function", [states, decayed], ids=lambda function: function.__name__)
def test_a_backward_pass_reads_what_was_there_before(function: Callable[..., Tensor]) -> None:
    def run(called: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        given = [torch.randn(1, 8), torch.randn(8), torch.randn(4, 8)]
        x, weight = torch.randn(2, 8).requires_grad_(), torch.randn(8).requires_grad_()
        found = []
        for _ in range(2):  # the second step goes on from what the first one left
            found += [y := called(*given, x, weight), *torch.autograd.grad(y.square().sum(), [x, weight])]
        return [*found, *given, weight.detach()]

    expected = run(function)
    torch.testing.assert_close(run(torch.compile(function, backend="layerzero")), expected, rtol=1e-4, atol=1e-4)


def test_what_only_updates_an_input_reads_no_copy() -> None:
    graph = fx.Graph()
    mean, x, tangent = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    smaller = graph.call_function(torch.ops.aten.mul.Tensor, (mean, 0.9))
    copied = graph.call_function(torch.ops.aten.copy_.default, (mean, smaller))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, tangent)), copied))
    for node in graph.nodes:
        node.meta["val"] = torch.ones(2)
    keep_what_was(graph)
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
