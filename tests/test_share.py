"""Equal nodes that kernels emitted become one only where nobody can tell: not where somebody else reads or writes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

BATCH, LENGTH, HIDDEN = 2, 6, 64
GATE, UP = torch.randn(2, HIDDEN, HIDDEN) / 8


def attention(x: Tensor) -> Tensor:
    return (x @ x.transpose(-1, -2) * 0.3).softmax(-1) @ x


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def mlp(x: Tensor) -> Tensor:
    return F.silu(x @ GATE) * (x @ UP)


def scan(x: Tensor) -> Tensor:
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = h * 0.9 + x[:, t]
        found.append(h)
    return torch.stack(found, 1)


def top_k(x: Tensor) -> Tensor:
    values, places = torch.topk(x, 3)
    return torch.full_like(x, -torch.inf).scatter(-1, places, values)


def sorted_top_k(x: Tensor) -> Tensor:
    ordered, places = x.sort(-1, descending=True)
    return torch.full_like(x, -torch.inf).scatter(-1, places[..., :3], ordered[..., :3])


#: Recognised functions of one tensor [B, T, D], with the kernels that they are locked to in turn.
OPS: dict[str, tuple[Callable[[Tensor], Tensor], str, tuple[str, ...]]] = {
    "attention": (attention, "attention", ("lz.blocked", "torch.sdpa", "lz.tiled")),
    "norm": (norm, "norm", ("torch.norm",)),
    "mlp": (mlp, "mlp", ("torch.mlp",)),
    "scan": (scan, "scan", ("lz.rolled_scan", "lz.chunked_scan", "lz.associative_scan")),
    "top_k": (top_k, "sampling", ("torch.sampling", "lz.cpp_sampling")),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda a: None,
    "add_": lambda a: a.add_(1),
    "a part": lambda a: a.__setitem__(0, 0.0),
    "a view": lambda a: a.view(-1).zero_(),
    "a transposed view": lambda a: a.transpose(0, 1).mul_(2),
    "out": lambda a: torch.add(a, 1, out=a),
}


@pytest.mark.sampled
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("op", "kernel"), [(name, kernel) for name, (_, _, kernels) in OPS.items() for kernel in kernels]
)
def test_two_equal_results_are_two_tensors(op: str, kernel: str, write: str):
    function, lock, _ = OPS[op]

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = function(x), function(x)
        WRITES[write](a)
        return a, b

    torch._dynamo.reset()
    backend = Rewriting(lock={lock: kernel}, loops="roll", assume_finite=True)
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    found, expected = torch.compile(twice, backend=backend, fullgraph=True)(x), twice(x)
    assert {match.kernel for match in backend.report.matches if match.rewritten} == {kernel}, backend.why_not()
    torch.testing.assert_close(found, expected)
    found[0].fill_(3.0)  # by who calls the graph
    torch.testing.assert_close(found[1], expected[1])


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("op", "kernel"), [(name, kernel) for name, (_, _, kernels) in OPS.items() for kernel in kernels]
)
def test_equal_results_under_other_modes_are_not_one(op: str, kernel: str, is_first: bool, mode: str):
    function, lock, _ = OPS[op]

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.tanh(x)  # of which a view has a gradient under every mode
        if is_first:
            with MODES[mode]():
                a = function(s)
            return a, function(s)
        a = function(s)
        with MODES[mode]():
            return a, function(s)

    torch._dynamo.reset()
    backend = Rewriting(lock={lock: kernel}, loops="roll", assume_finite=True)
    x = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)
    found, expected = torch.compile(twice, backend=backend, fullgraph=True)(x), twice(x)
    assert any(match.rewritten for match in backend.report.matches) or op == "top_k", backend.why_not()
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    gradients = [torch.autograd.grad(sum(y.sum() for y in each if y.requires_grad), x) for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kernel", ["torch.sampling", "lz.cpp_sampling"])
def test_filters_that_differ_in_ties_alone_are_two(kernel: str):
    torch._dynamo.reset()
    backend = Rewriting(lock={"sampling": kernel})
    x = (torch.randn(5, 300) * 2).round()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return top_k(sorted_top_k(x)), sorted_top_k(top_k(x))

    assert not torch.equal(*both(x))
    torch.testing.assert_close(torch.compile(both, backend=backend, fullgraph=True)(x), both(x))
    assert backend.report.matches


def test_what_is_computed_of_overwritten_memory_is_computed_again():
    def model(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        keep = mask[:, None, :] > 0
        a = (x @ x.mT).masked_fill(~keep, -torch.inf).softmax(-1) @ x
        mask[:, 1] = 0
        keep = mask[:, None, :] > 0
        return a, (x @ x.mT).masked_fill(~keep, -torch.inf).softmax(-1) @ x

    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": "torch.sdpa"}, assume_finite=True)
    x, mask = torch.randn(BATCH, LENGTH, HIDDEN), torch.ones(BATCH, LENGTH)
    found = torch.compile(model, backend=backend, fullgraph=True)(x, mask.clone())
    torch.testing.assert_close(found, model(x, mask.clone()))
    assert any(match.rewritten for match in backend.report.matches), backend.why_not()


def test_a_mask_that_all_layers_need_is_made_once():
    def model(x: Tensor, padding: Tensor) -> Tensor:
        for _ in range(3):
            scores = (x @ x.mT).masked_fill(padding[:, None, :], -torch.inf)
            x = x + scores.softmax(-1) @ x
        return x

    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": "torch.sdpa"}, assume_finite=True)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[0, -2:] = True
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x, padding), model(x, padding))
    masks = [
        node for node in backend.graphs[0].graph.nodes if "not" in str(node.target) or "invert" in str(node.target)
    ]
    assert len(masks) == 1, backend.graphs[0].graph
