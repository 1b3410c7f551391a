"""Which nodes of a graph gradients come back to, against autograd itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from structural_oracle import observe
from structural_programs import generate
from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.gradients import differentiated
from lz_compile.passes.graph.view import tensors_in


class Watched(fx.Interpreter):
    """Runs a graph; ``reached`` has the nodes that a gradient came back to once something was differentiated."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.reached: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for each in tensors_in(result):
            if each.requires_grad:
                each.register_hook(lambda _: self.reached.add(n))
        return result


class Comparing:
    """A backend that asks autograd of every graph, and runs it as it is."""

    def __init__(self) -> None:
        self.missed: list[str] = []
        self.reached = self.others = 0

    def __call__(self, module: fx.GraphModule, _inputs: Any) -> Any:
        found = differentiated(module.graph, Effects(module.graph))

        def run(*inputs: Any) -> Any:
            watched, given = Watched(module), [_copied(each) for each in inputs]
            made_by = [_maker(each) for each in given]
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                results = watched.run(*given)
            overwritten = [each for each, made in zip(given, made_by, strict=True) if _maker(each) is not made]
            ends = [each.sum() for each in tensors_in([results, overwritten]) if each.requires_grad]
            if ends:
                torch.stack(ends).sum().backward()
            self.missed += [f"{node.name} of {module.code}" for node in watched.reached - found]
            self.reached += len(watched.reached)
            self.others += len(module.graph.nodes) - len(found)
            return module.forward(*inputs)

        return run


def _maker(value: Any) -> Any:
    """What a gradient of a value goes to, which writes change."""
    return value.grad_fn if isinstance(value, torch.Tensor) else None


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad) * 1 if value.requires_grad else value.clone()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", range(0, 90, 30))
def test_gradients_come_back_to_no_other_node_of_a_random_program(first: int):
    comparing = Comparing()
    for seed in range(first, first + 30):
        try:
            observe(generate(seed), comparing)
        except Exception:  # noqa: BLE001 not every random program is one
            continue
    assert not comparing.missed, comparing.missed[0]
    assert comparing.reached > 100
    assert comparing.others > 100


def _ends_without_recording(x, w):
    y = (x * w).sin()
    torch.set_grad_enabled(False)
    return y, y.cos()


def _detaches_what_was_read(x, w):
    y = x * w
    z = y.exp()
    y.detach_()
    return z, y


def _writes_through_a_view(x, w):
    y = torch.zeros_like(x)
    y[0].select(-1, 1).add_(w[0])
    return y


def _writes_through_what_it_detached(x, w):
    y = x.clone()
    y.detach().mul_(w)
    return y


def _writes_to_an_input(x, w):
    x.select(0, 1).copy_(w)
    return w.cos().detach()


def _writes_inside_vmap(x, w):
    def inner(row):
        y = torch.zeros_like(row)
        y[:1].add_(w[:1])
        return y * row

    return torch.vmap(inner)(x)


@pytest.mark.parametrize(
    "function",
    [
        _ends_without_recording,
        _detaches_what_was_read,
        _writes_through_a_view,
        _writes_through_what_it_detached,
        _writes_to_an_input,
        _writes_inside_vmap,
    ],
)
def test_gradients_come_back_to_no_other_node(function):
    comparing = Comparing()
    try:
        torch.compile(function, backend=comparing)(torch.ones(4, 3), torch.ones(3, requires_grad=True))
    finally:
        torch.set_grad_enabled(True)
    assert not comparing.missed, comparing.missed[0]
    assert comparing.reached + comparing.others


def test_what_a_graph_itself_differentiates_is_differentiated():
    found = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Any:
        inner = differentiated(module.graph, Effects(module.graph))
        found.extend(node.name for node in module.graph.nodes if node in inner)
        return module.forward

    torch.compile(lambda w: torch.func.grad(lambda v: (v * 2).sum())(w).detach() * 0, backend=backend)(torch.ones(3))
    assert "mul" in found
