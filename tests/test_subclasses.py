"""Tensors of a class of their own around others: calls on them are spelled out, and what is inside is recognised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import lz_compile as lz
from lz_compile.passes.graph.view import inner_tensors, is_subclass, rebuilt
from tests.backends import Rewriting

pytestmark = pytest.mark.usefixtures("no_preference")


class Int8Weight(torch.Tensor):
    """A weight in int8 with a scale for each row, as libraries of quantised weights make them."""

    @staticmethod
    def __new__(cls, stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Int8Weight:
        return torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=dtype, device=stored.device)

    def __init__(self, stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.stored, self.scale, self.kind = stored, scale, dtype

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["stored", "scale"], self.kind

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], kind: Any, _size: Any, _stride: Any) -> Int8Weight:
        return Int8Weight(inner["stored"], inner["scale"], kind)

    def __repr__(self, **_: Any) -> str:
        return "Int8Weight()"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Int8Weight(args[0].stored.detach(), args[0].scale.detach(), args[0].kind)
        if func is torch.ops.aten.t.default:
            return args[0].stored.to(args[0].kind).mul(args[0].scale).t()
        plain = pytree.tree_map_only(
            Int8Weight, lambda each: each.stored.to(each.kind) * each.scale, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


class Linear(torch.nn.Module):
    def __init__(self, columns: int, out: int, *, has_bias: bool = True) -> None:
        super().__init__()
        stored = torch.randint(-128, 128, (out, columns), dtype=torch.int8)
        weight = Int8Weight(stored, torch.rand(out, 1) / 128, torch.float32)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(out)) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def test_what_is_inside_is_found_and_put_around_again():
    weight = Linear(8, 4).weight
    assert is_subclass(weight)
    assert not is_subclass(torch.ones(2))
    found = dict(inner_tensors(weight))
    assert set(found) == {("stored",), ("scale",)}
    again = rebuilt(weight, iter(found.values()))
    assert type(again) is type(weight)
    assert again.stored is weight.stored
    assert [path for path, _ in inner_tensors(torch.ones(2))] == [()]


@pytest.mark.parametrize("is_bare", [False, True])
def test_products_of_such_weights_are_recognised(is_bare):
    model = torch.nn.Sequential(Linear(32, 64, has_bias=not is_bare), torch.nn.ReLU(), Linear(64, 16)).eval()
    x = torch.randn(3, 32)
    torch._dynamo.reset()
    backend = Rewriting(lock={"linear": "lz.cpp_linear"})
    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True)(x)
        expected = model(x)
    kernels = [match.kernel for match in backend.report.matches if match.op == "linear"]
    assert kernels == ["lz.cpp_linear"] * 2, backend.why_not()
    assert not backend.report.unproven
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_they_are_compiled_and_follow_their_parameters():
    model = torch.nn.Sequential(Linear(32, 64), Linear(64, 16)).eval()
    x = torch.randn(1, 32)
    with torch.no_grad():
        compiled = torch.compile(model, backend="layerzero", options={"layerzero.lock": {"linear": "lz.cpp_linear"}})
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        model[1].weight.stored.fill_(3)
        model[0].weight.scale.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert "lz.cpp_linear" in {match.kernel for report in lz.reports()[-1:] for match in report.matches}


def test_other_tensors_may_be_written_to():
    """As to a cache beside the weights; only what is made of others must not be."""
    model, x = Linear(32, 16).eval(), torch.randn(3, 32)

    def function(x, cache):
        cache.add_(1)
        return model(x) + cache

    torch._dynamo.reset()
    backend = Rewriting(lock={"linear": "lz.cpp_linear"})
    caches = torch.zeros(16), torch.zeros(16)
    with torch.no_grad():
        found = torch.compile(function, backend=backend, fullgraph=True)(x, caches[0])
        torch.testing.assert_close(found, function(x, caches[1]), rtol=1e-4, atol=1e-4)
    assert torch.equal(*caches)
    assert [match.kernel for match in backend.report.matches if match.op == "linear"] == ["lz.cpp_linear"]


@pytest.mark.parametrize("is_dynamic", [True, None])
def test_rows_may_be_symbolic(is_dynamic):
    model = torch.nn.Sequential(Linear(32, 64), Linear(64, 16)).eval()
    torch._dynamo.reset()
    backend = Rewriting(lock={"linear": "lz.cpp_linear"})
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=is_dynamic)
    with torch.no_grad():
        for rows in (3, 5, 1, 9):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert {match.kernel for match in backend.report.matches if match.op == "linear"} == {"lz.cpp_linear"}
    assert not backend.report.events


def test_calls_that_are_differentiated_or_cast_stay_whole():
    model, x = Linear(32, 16).eval(), torch.randn(3, 32, requires_grad=True)
    torch._dynamo.reset()
    backend = Rewriting()
    found = torch.compile(model, backend=backend, fullgraph=True)(x)
    assert not [match for match in backend.report.matches if match.op == "linear"]
    (gradient,) = torch.autograd.grad(found.sum(), x)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(gradient, expected)

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    torch._dynamo.reset()
    backend = Rewriting()
    with torch.no_grad():
        found = torch.compile(cast, backend=backend, fullgraph=True)(x.detach())
        torch.testing.assert_close(found, cast(x.detach()))
    assert not [match for match in backend.report.matches if match.op == "linear"]


def test_results_of_such_a_class_are_left_alone():
    weight = Linear(8, 4).weight

    def function(x, w):
        return F.linear(x, w.detach())

    torch._dynamo.reset()
    backend = Rewriting()
    x = torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(function, backend=backend)(x, weight), function(x, weight))


def test_a_spelling_that_computes_something_else_is_refuted(monkeypatch):
    """What is traced is held against the call."""
    from lz_compile.passes.inlining import subclasses

    honest = subclasses.make_fx

    def wrong(run):
        return honest(lambda *tensors: run(*tensors) * 2)

    monkeypatch.setattr(subclasses, "make_fx", wrong)
    model, x = Linear(32, 16).eval(), torch.randn(3, 32)
    torch._dynamo.reset()
    backend = Rewriting(lock={"linear": "lz.cpp_linear"})
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))
    assert not backend.report.matches
    assert "EDIT_REFUTED" in {event.code for event in backend.report.events}


class Named(torch.Tensor):
    """A tensor that only carries something along, as those of torchvision and fastai do."""


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_kernels_take_tensors_of_a_class_that_holds_no_others(requires_grad):
    def model(query, key, value):
        future = torch.ones(24, 24, dtype=torch.bool).triu(1)
        return (query @ key.transpose(-2, -1)).masked_fill(future, -torch.inf).softmax(-1) @ value

    def run(call, dtype):
        torch.manual_seed(0)
        inputs = [torch.randn(1, 2, 24, 8).to(dtype).as_subclass(Named).requires_grad_(requires_grad) for _ in "qkv"]
        result = call(*inputs)
        grads = torch.autograd.grad(result.sum(), inputs) if requires_grad else ()
        return type(result), [each.as_subclass(torch.Tensor).double() for each in (result, *grads)]

    compiled = torch.compile(model, backend="layerzero", options={"layerzero.lock": {"attention": "torch.sdpa"}})
    found, values = run(compiled, torch.float32)
    assert [match.rewritten for match in lz.reports()[0].matches] == [True]
    assert found is Named
    torch.testing.assert_close(values, run(model, torch.float64)[1], atol=1e-5, rtol=1e-5)


def test_results_that_are_made_of_other_tensors_are_left_with_a_reason():
    def model(x):
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).values()

    backend = Rewriting(lock={"norm": "torch.norm"}, strict=True)
    x = torch.nested.nested_tensor([torch.randn(5, 32), torch.randn(3, 32)], layout=torch.jagged)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert [str(reason) for match in backend.report.matches for reason in match.reasons] == [
        "[TENSOR_SUBCLASS] it gives a NestedTensor, which is made of other tensors; kernels give plain ones"
    ]
    assert not backend.report.events
