"""A compiled backward computes the scores again: nothing of their size is stored for it, and dropout draws the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from lz_compile import reports
from lz_compile.backend import layerzero
from lz_compile.lowering import frames, inductor
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernels.attention import blocked, tiled
from lz_compile.lowering.kernels.attention.blocked import recomputed
from lz_compile.lowering.ops.attention import Operands, reference

LENGTH = 200
SCORES = LENGTH * LENGTH
KERNELS = ("lz.blocked", "lz.tiled")


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def with_dropout(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)


def with_checkpoint(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return checkpoint(lambda *tensors: attention(*tensors).sin(), query, key, value, use_reentrant=False)


def under_autocast(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        scores = query @ key.transpose(-2, -1) * 0.25
        return scores.softmax(-1) @ value


def locked(function: Callable[..., Tensor], kernel: str) -> Callable[..., Tensor]:
    return torch.compile(function, backend=layerzero, options={"layerzero.lock": {"attention": kernel}})


def inputs(length: int = LENGTH, heads: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, 16, generator=generator).requires_grad_() for _ in range(3)]


def saved_sizes(call: Callable[[], Tensor]) -> list[int]:
    """How many elements each tensor has that a forward keeps for its backward."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call()
    return sizes


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_as_large_as_the_scores_is_stored_for_the_backward(kernel):
    operands, compiled = inputs(), locked(attention, kernel)
    compiled(*operands)
    (match,) = reports()[-1].matches
    assert (match.kernel, match.rewritten) == (kernel, True)
    found = saved_sizes(lambda: compiled(*operands))
    assert found
    assert max(found) == LENGTH * 16
    assert sum(found) <= 10 * LENGTH * 16
    by_inductor = torch.compile(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, backend="inductor")
    by_inductor(*operands)
    assert max(saved_sizes(lambda: by_inductor(*operands))) == SCORES


@pytest.mark.sampled
@pytest.mark.parametrize("function", [attention, with_checkpoint, under_autocast])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_are_those_of_eager(kernel, function):
    operands = inputs()
    expected = torch.autograd.grad(function(*operands).float().square().sum(), operands)
    actual = torch.autograd.grad(locked(function, kernel)(*operands).float().square().sum(), operands)
    assert [match.kernel for match in reports()[-1].matches] == [kernel]
    tolerance = 4e-2 if function is under_autocast else 1e-4
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_backward_drops_what_the_forward_dropped(kernel):
    operands = inputs()
    value, weight = operands[2], torch.randn(1, 1, LENGTH, 16)
    compiled = locked(with_dropout, kernel)
    outs = [compiled(*operands) for _ in range(2)]
    assert not torch.equal(*outs)
    for out in outs:  # linear in the values: <out, w> = <v, gradient of v> where both dropped the same
        (gradient,) = torch.autograd.grad(out, value, weight, retain_graph=True)
        torch.testing.assert_close((out * weight).sum(), (value * gradient).sum(), atol=1e-2, rtol=1e-3)
    # No scores are saved; PyTorch 2.14 saves a generator's state.
    assert max(saved_sizes(lambda: compiled(*operands))) < LENGTH * LENGTH


def test_what_is_measured_computes_the_scores_again_as_well():
    attrs = AttentionAttrs(band=Band(-40, 0))
    operands = inputs(128)
    compiled = inductor.compile_apart(lambda *x: blocked.attention(Operands(*x), attrs, block=32), operands)
    with frames.apart():
        out = compiled(*operands)
    torch.testing.assert_close(out, reference(Operands(*operands), attrs), atol=1e-5, rtol=1e-5)
    assert max(saved_sizes(lambda: compiled(*operands))) <= 128 * 16


@pytest.mark.parametrize("kernel", [blocked.attention, tiled.attention], ids=KERNELS)
def test_a_traced_graph_is_differentiable_again(kernel):
    attrs = AttentionAttrs(is_causal=True)
    operands = inputs(64)
    graph = make_fx(lambda *x: kernel(Operands(*x), attrs))(*operands)
    actual = torch.autograd.grad(graph(*operands).square().sum(), operands)
    expected = torch.autograd.grad(reference(Operands(*operands), attrs).square().sum(), operands)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def doubled(tensor: Any) -> Any:
    with recomputed(tensor):
        product = tensor * 2
    return product + 1


def test_only_what_is_made_inside_is_marked():
    graph = make_fx(doubled)(torch.ones(3)).graph
    marks = {node.target: node.meta.get("recompute") for node in graph.nodes if node.op == "call_function"}
    assert marks == {torch.ops.aten.mul.Tensor: CheckpointPolicy.MUST_RECOMPUTE, torch.ops.aten.add.Tensor: None}


def test_what_simply_runs_is_not_marked_and_neither_is_what_dynamo_traces():
    torch.testing.assert_close(doubled(torch.ones(3)), torch.full((3,), 3.0))
    seen: list[fx.Node] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.extend(module.graph.nodes)
        return module.forward

    torch.compile(doubled, backend=backend, fullgraph=True)(torch.ones(3))
    assert seen
    assert not any("recompute" in node.meta for node in seen)
