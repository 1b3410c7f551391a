"""Attention in layers that are computed again for their gradients: what their masks say is read where masks are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from backends import Rewriting, Traced
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from lz_compile.passes.inlining.checkpointed_masks import CHECKPOINT, give_back, make_again

B, H, T, D = 2, 2, 6, 4
Layer = Callable[..., Tensor]
#: Whatever PyTorch saves of what a checkpoint is given.
again = partial(checkpoint, use_reentrant=False)


def attention(x: Tensor, bias: Tensor) -> Tensor:
    scores = x @ x.transpose(-2, -1) / math.sqrt(D) + bias
    return x + scores.softmax(-1) @ x


def chosen(x: Tensor, keep: Tensor) -> Tensor:
    scores = (x @ x.transpose(-2, -1) / math.sqrt(D)).masked_fill(~keep, -torch.inf)
    return x + scores.softmax(-1) @ x


def of_places(x: Tensor, padding: Tensor) -> Tensor:
    places = torch.arange(x.shape[-2])
    return (places[:, None] >= places) & padding[:, None, None].bool()


def two_layers(x: Tensor, padding: Tensor) -> Tensor:
    bias = torch.where(of_places(x, padding), 0.0, torch.finfo(torch.float32).min)
    return again(attention, again(attention, x, bias), bias)


def by_truth(x: Tensor, padding: Tensor) -> Tensor:
    return again(chosen, x, of_places(x, padding) | torch.eye(x.shape[-2], dtype=torch.bool))


def beside_others(x: Tensor, padding: Tensor) -> Tensor:
    """The layer is given the padding, too, and reads both."""
    keep = of_places(x, padding)
    return again(lambda x, padding, keep: chosen(x, keep) * padding[:, None, :, None], x, padding, keep)


def nested(x: Tensor, padding: Tensor) -> Tensor:
    keep = of_places(x, padding) | torch.eye(x.shape[-2], dtype=torch.bool)
    return again(lambda x, keep: again(chosen, x.sin(), keep).cos(), x, keep)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    padding = torch.ones(B, T, dtype=torch.int64)
    padding[0, -2:] = 0
    return torch.randn(B, H, T, D, dtype=dtype, requires_grad=True), padding


def with_gradients(model: Layer, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    found = model(x, *others)
    return found, *torch.autograd.grad(found.square().sum(), x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("model", [two_layers, by_truth, beside_others, nested], ids=lambda each: each.__name__)
def test_what_a_mask_says_is_read_in_the_layer(model: Layer, dynamic: bool) -> None:
    given, backend = inputs(), Traced()
    found = with_gradients(torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic), *given)
    attentions = [each for each in backend.report.matches if each.op == "attention"]
    assert len(attentions) == (2 if model is two_layers else 1), backend.why_not()
    for each in attentions:
        assert each.rewritten, backend.why_not()
        assert each.mask.startswith("causal and key padding" if model in (two_layers, beside_others) else "")
        assert "bias" not in each.mask
    assert not backend.report.events
    for one, other in zip(found, with_gradients(model, *given), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


# ---- what stays an input ---------------------------------------------------------------------------------------------


def learned(x: Tensor, padding: Tensor) -> Tensor:
    """A bias that has a gradient."""
    return again(attention, x, torch.where(of_places(x, padding), x.mean(), -1e9))


def overwritten(x: Tensor, padding: Tensor) -> Tensor:
    """The layer reads what the padding was."""
    keep = of_places(x, padding)
    padding.zero_()
    return again(chosen, x, keep)


def of_scores(x: Tensor, padding: Tensor) -> Tensor:
    """What is compared are features, which the layer would compute once more."""
    with torch.no_grad():
        scores = x @ x.transpose(-2, -1)
    return again(chosen, x, scores >= scores.median())


def no_mask(x: Tensor, padding: Tensor) -> Tensor:
    return again(lambda x, scale: x * scale, x, padding[:, None, :, None] * 2)


def bodies(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [each for each in module.modules() if isinstance(each, fx.GraphModule) and each is not module]


def captured(model: Layer, *given: Tensor) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep, fullgraph=True)(*given)
    return graphs[0]


@pytest.mark.parametrize("model", [learned, overwritten, no_mask], ids=lambda each: each.__name__)
def test_what_is_no_mask_or_another_one_by_then_stays_an_input(model: Layer) -> None:
    module = captured(model, *inputs())
    before = str(module.graph), [str(each.graph) for each in bodies(module)]
    assert not make_again(module)
    assert (str(module.graph), [str(each.graph) for each in bodies(module)]) == before


def test_features_are_not_computed_once_more() -> None:
    module = captured(of_scores, *inputs())
    assert make_again(module) == 1
    (body,) = bodies(module)
    assert not [each for each in body.graph.nodes if each.op == "call_method" and each.target == "median"]
    matmuls = [each for each in body.graph.nodes if each.name.startswith("matmul")]
    assert len(matmuls) == 2  # those of attention


def test_a_mask_that_is_read_as_a_whole_is_the_input_again() -> None:
    module = captured(two_layers, *inputs())
    given, expected = inputs(), with_gradients(two_layers, *inputs())
    before = [[node.name for node in each.graph.nodes if node.op != "placeholder"] for each in bodies(module)]
    assert make_again(module) == 2
    assert [len(each.graph.nodes) for each in bodies(module)] > [len(each) for each in before]
    torch.testing.assert_close(with_gradients(lambda *x: module(*_as_captured(module, x))[0], *given), expected)
    assert [give_back(each.graph) for each in bodies(module)] == [1, 1]
    for each, names in zip(bodies(module), before, strict=True):
        each.graph.lint()
        each.recompile()
        assert [node.name for node in each.graph.nodes if node.op != "placeholder"] == names
    torch.testing.assert_close(with_gradients(lambda *x: module(*_as_captured(module, x))[0], *given), expected)


def test_what_is_handed_in_beside_has_a_name_of_its_own() -> None:
    module, given, expected = captured(by_truth, *inputs()), inputs(), with_gradients(by_truth, *inputs())
    (body,) = bodies(module)
    (handed,) = [each for each in module.graph.find_nodes(op="placeholder") if "padding" in each.name]
    body.graph.find_nodes(op="placeholder")[0]._rename(handed.name)
    body.graph.find_nodes(op="placeholder")[0].target = handed.name
    assert make_again(module) == 1
    torch.testing.assert_close(with_gradients(lambda *x: module(*_as_captured(module, x))[0], *given), expected)


def _as_captured(module: fx.GraphModule, given: tuple[Tensor, ...]) -> list[Tensor]:
    """The inputs in the order of a graph's own."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    return [given["padding" in name] for name in names]


def test_attention_that_is_left_is_given_the_mask() -> None:
    given, backend = inputs(torch.float32), Rewriting(lock={"attention": "inductor"})
    with_gradients(torch.compile(two_layers, backend=backend, fullgraph=True), *given)
    (graph,) = backend.graphs
    assert [each.mask for each in backend.report.matches] == ["causal and key padding"] * 2
    assert graph.graph.find_nodes(op="call_function", target=CHECKPOINT)
    for body in bodies(graph):
        assert not [each for each in body.graph.nodes if each.target is torch.arange]
