"""Attentions that a graph break tears apart are said, with the break; what no break tears is not."""

from __future__ import annotations

import re

import pytest
import torch
from backends import Rewriting
from torch import Tensor, nn

import lz_compile as lz

pytestmark = pytest.mark.usefixtures("no_preference")


def between_softmax_and_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.transpose(-2, -1)).softmax(-1)
    torch._dynamo.graph_break()
    return weights @ value


def between_scores_and_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * 0.25
    if scores.isnan().any():
        raise ValueError("NaN")
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ value


def twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1)
    torch._dynamo.graph_break()
    weights = scores.softmax(-1)
    torch._dynamo.graph_break()
    return weights @ value


@torch.compiler.disable
def plain_softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def in_a_function_that_is_not_compiled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return plain_softmax(query @ key.transpose(-2, -1)) @ value


TORN = [between_softmax_and_values, between_scores_and_softmax, twice, in_a_function_that_is_not_compiled]


def operands() -> list[Tensor]:
    return [torch.randn(2, 3, length, 8) for length in (7, 17, 17)]


@pytest.mark.parametrize("function", TORN, ids=lambda function: function.__name__)
def test_an_attention_that_a_graph_break_tears_is_a_near_miss_with_the_break(function):
    report = lz.explain(function, *operands(), print_report=False)
    (miss,) = [miss for miss in report.near_misses if miss.reason.code == "GRAPH_BREAK"]
    assert report.matches == []
    assert miss.op == "attention"
    line = function.__code__.co_firstlineno + 1
    assert miss.where == f"{__file__}:{line}"
    assert re.search(rf"since {re.escape(__file__)}:\d+ \(.+\) breaks the graph", miss.reason.message)
    assert "TORCH_LOGS=graph_breaks" in miss.edit


def test_a_dry_run_says_so_too():
    report = lz.dry_run(between_softmax_and_values, *operands(), print_report=False)
    assert [miss.reason.code for miss in report.near_misses] == ["GRAPH_BREAK"]


def test_a_compile_tells_the_break_behind_probabilities_that_meet_no_values():
    backend = Rewriting()
    torch.compile(between_softmax_and_values, backend=backend)(*operands())
    (miss,) = backend.report.near_misses
    line = between_softmax_and_values.__code__.co_firstlineno + 2
    assert str(miss.reason).startswith(
        f"[NO_VALUES] the probabilities meet no values in this graph, which ends at the graph break {__file__}:{line} ("
    )


def test_a_layer_that_runs_several_times_is_told_once():
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for _ in range(3):
            value = between_softmax_and_values(query, key, value[..., :17, :])
            value = torch.cat([value] * 3, -2)
        return value

    report = lz.explain(model, *operands(), print_report=False)
    assert [miss.reason.code for miss in report.near_misses] == ["GRAPH_BREAK"]


class Layer(nn.Module):
    """With a break where it is asked for: every second layer is compiled anew."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 24)

    def forward(self, hidden: Tensor, is_torn: bool) -> Tensor:
        query, key, value = self.projection(hidden).chunk(3, -1)
        weights = (query @ key.mT).softmax(-1)
        if is_torn:
            torch._dynamo.graph_break()
        return hidden + weights @ value


def test_of_layers_that_are_compiled_one_by_one_the_torn_ones_are_told_once_and_the_others_match():
    layers = nn.ModuleList(Layer() for _ in range(4))

    def model(hidden: Tensor) -> Tensor:
        for index, layer in enumerate(layers):
            hidden = layer(hidden, index % 2 == 0)
        return hidden

    report = lz.explain(model, torch.randn(2, 10, 8), print_report=False)
    assert [miss.reason.code for miss in report.near_misses] == ["GRAPH_BREAK"]
    assert {match.op for match in report.matches} == {"attention"}


class Router(nn.Module):
    """Products with weights, a softmax over them, and a break: nothing of that is an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.gate(hidden).softmax(-1)
        torch._dynamo.graph_break()
        return self.up(weights) + hidden


def beside(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = (query @ key.transpose(-2, -1)).softmax(-1) @ value
    torch._dynamo.graph_break()
    return out @ out.mT


@pytest.mark.parametrize("given", [(Router(), [torch.randn(3, 5, 8)]), (beside, operands())], ids=["router", "beside"])
def test_a_break_that_tears_no_attention_is_none(given):
    model, inputs = given
    report = lz.explain(model, *inputs, print_report=False)
    assert len(report.graphs) == 2
    assert "GRAPH_BREAK" not in [miss.reason.code for miss in report.near_misses]
    assert report.events == []
