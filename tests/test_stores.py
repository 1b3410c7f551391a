"""What is written in place becomes a value of its own: with the strides that the memory had, and in linear time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import Rewriting
from torch import Tensor

#: What overwrites scores ``[V, B]`` that lie as ``[B, V]``, and whether it has a form out of place that keeps that.
WRITES: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "masked_fill_": (lambda a: a.masked_fill_(a < 0, 0), True),
    "setitem": (lambda a: a.__setitem__(a < 0, -torch.inf), True),
    "mul_": (lambda a: a.mul_(2), True),
    "clamp_": (lambda a: a.clamp_(0.0), True),
    "masked_fill_ of a tensor": (lambda a: a.masked_fill_(a < 0, torch.tensor(0.5)), False),
    "scatter_": (lambda a: a.scatter_(0, torch.zeros(1, 3, dtype=torch.long), 0.0), False),
}

TORCH = os.path.dirname(torch.__file__)
CACHED = (os.path.join(TORCH, "_subclasses"), os.path.join(TORCH, "_prims"), os.path.join(TORCH, "utils"))


def rewritten(function: Callable[[Tensor], Any], x: Tensor) -> Rewriting:
    backend = Rewriting()
    torch._dynamo.reset()
    found, expected = torch.compile(function, backend=backend, fullgraph=True)(x), function(x)
    torch.testing.assert_close(found, expected)
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    assert not backend.report.events, backend.why_not()
    return backend


def writes(backend: Rewriting) -> list[str]:
    (graph,) = backend.graphs
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_method" and node.target.endswith("_")]


@pytest.mark.parametrize("name", WRITES)
def test_a_transposed_tensor_keeps_its_strides_or_is_left_alone(name):
    write, has_form = WRITES[name]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        a, b = (x * 2).t(), x * 3
        first = a.sort().values
        write(a)
        b.mul_(2)
        return first, a, b

    left = writes(rewritten(function, torch.randn(3, 50)))
    assert "mul_" not in left
    assert bool(left) == (not has_form and name != "setitem")


def test_reads_through_another_name_are_views_of_the_value():
    def function(x: Tensor) -> tuple[Tensor, ...]:
        a = x * 2
        v = a[0]
        a.mul_(2)
        b = x * 3
        b.mul_(2)
        w = b[0]
        b.add_(w.sum())
        return a.sort().values, v, b

    assert not writes(rewritten(function, torch.randn(3, 50)))


def test_growth_with_the_number_of_writes_is_linear():
    def cost(length: int) -> int:
        def function(x: Tensor) -> tuple[Tensor, ...]:
            h, kept = x[0].clone(), []
            for t in range(length):
                h.mul_(0.9).add_(x[t])
                kept.append(h.clone() if t % 5 else h * 2)
            return torch.stack(kept), x[0].topk(1)[0]

        from lz_compile.passes.inlining.values import with_values

        made = 0

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal made  # what PyTorch computes example values with is cached
            made += event in ("call", "c_call") and not frame.f_code.co_filename.startswith(CACHED)

        def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
            sys.setprofile(count)
            try:
                assert with_values(module.graph) == 2 * length
            finally:
                sys.setprofile(None)
            module.recompile()
            return module.forward

        torch._dynamo.reset()
        x = torch.randn(length, 3)
        found = torch.compile(function, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(found, function(x))
        return made

    first = cost(40)
    assert cost(80) < 2.5 * first
