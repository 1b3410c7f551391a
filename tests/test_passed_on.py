"""Dropout that drops nothing gives its input back: what is written to one of them is read of the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Traced
from torch import Tensor, nn

Drop = Callable[[Tensor], Tensor]

DROPS: dict[str, Drop] = {
    "probability_zero": lambda x: F.dropout(x, 0.0, training=True),
    "evaluated": lambda x: F.dropout(x, 0.5, training=False),
    "module": nn.Dropout(0.0),
    "torch_dropout": lambda x: torch.dropout(x, 0.5, train=False),
    "twice": lambda x: F.dropout(F.dropout(x, 0.0), 0.5, training=False),
    "in_place": lambda x: F.dropout(x, 0.0, training=True, inplace=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.0, training=True),
    "feature": lambda x: torch.feature_dropout(x, 0.5, train=False),
    "two_dimensions": lambda x: F.dropout1d(x, 0.5, training=False),
}


def an_input(x: Tensor, w: Tensor, drop: Drop) -> Any:
    y = drop(x)
    y.add_(1)
    return x * 2, y


def an_input_later(x: Tensor, w: Tensor, drop: Drop) -> Any:
    shown = drop(x).t()
    x.add_(1)
    return shown * 2


def a_view(x: Tensor, w: Tensor, drop: Drop) -> Any:
    a = x.sin()
    drop(a[1:])[0].mul_(3)
    return a.softmax(-1)


def parts(x: Tensor, w: Tensor, drop: Drop) -> Any:
    a = x.sin()
    first, second = drop(a).chunk(2, -1)
    first.mul_(3)
    return a.softmax(-1), second


def a_result(x: Tensor, w: Tensor, drop: Drop) -> Any:
    a = x.sin()
    y = drop(a)
    a += 1
    return y.softmax(-1), y


def what_gets_a_gradient(x: Tensor, w: Tensor, drop: Drop) -> Any:
    a = torch.zeros_like(x)
    drop(a)[1] = w[0]
    return (a * 2).softmax(-1), a.view(-1)


@pytest.mark.parametrize("function", [an_input, an_input_later, a_view, parts, a_result, what_gets_a_gradient])
@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
def test_what_is_written_to_one_is_read_of_the_other(drop: Drop, function: Callable[..., Any]) -> None:
    def run(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
        found = call(x, w, drop)
        found = list(found) if isinstance(found, tuple) else [found]
        graded = [each.sum() for each in found if each.requires_grad]
        return [x, *found, *(torch.autograd.grad(sum(graded), w) if graded else ())]  # type: ignore[arg-type]

    backend = Traced()
    torch.testing.assert_close(run(torch.compile(function, backend=backend, fullgraph=True)), run(function))
    assert not [event for graph in backend.report.graphs for event in graph.events]
    assert not [node for node in backend.graphs[0].graph.nodes if "dropout" in str(node.target)]


def test_a_result_is_the_input_itself() -> None:
    x = torch.randn(3)
    assert torch.compile(DROPS["evaluated"], backend=Traced())(x).data_ptr() == x.data_ptr()


def test_one_inside_of_a_transform_goes_as_any_other() -> None:
    def doubled(row: Tensor) -> Tensor:
        x = row * 2
        F.dropout(x, 0.0).view(2, 2).add_(1)
        return x * 3

    backend = Traced()
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(torch.vmap(doubled), backend=backend)(x), torch.vmap(doubled)(x))
    assert not backend.report.events
    assert not [node for node in backend.graphs[0].graph.nodes if "dropout" in str(node.target)]
