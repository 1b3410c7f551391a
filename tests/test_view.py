"""All spellings of an operation are one call: the same name, the same arguments by parameter."""

# ruff: noqa: PLW0108 - a lambda names the inputs that it is given, and Dynamo traces it as a user's function

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from lz_compile.passes.graph.refusal import told, where_of
from lz_compile.passes.graph.view import Call, read, tensor_of, value_of
from tests.graphs import call_named, calls, capture, output_of, placeholders

aten = torch.ops.aten

X = torch.rand(3, 4, 5) + 1
SAME = torch.rand(3, 4, 5) + 1
W = torch.rand(3, 5, 2)
B = torch.rand(3, 4, 2)
M = X > 1.5
N = X < 1.7


def reading(fn: Callable[..., Any], *inputs: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the last call; inputs of ``fn`` stand for themselves by their parameter names."""
    module = capture(fn, *inputs)
    return _named(calls(module)[-1])


def _named(call: Call) -> tuple[str, dict[str, Any]]:
    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(plain(item) for item in value)
        return value.name.removeprefix("l_").removesuffix("_") if isinstance(value, fx.Node) else value

    return call.name, {name: plain(value) for name, value in call.arguments.items() if name != "_stacklevel"}


Spellings = tuple[str, dict[str, Any], tuple[Any, ...], list[Callable[..., Any]]]

SPELLINGS: Mapping[str, Spellings] = {
    "add": (
        "add",
        {"input": "x", "other": "y"},
        (X, SAME),
        [
            lambda x, y: x + y,
            lambda x, y: x.add(y),
            lambda x, y: torch.add(x, y),
            lambda x, y: torch.add(input=x, other=y),
            lambda x, y: torch.add(x, y, out=None),
            lambda x, y: x.add(other=y),
            lambda x, y: aten.add.Tensor(x, y),
            lambda x, y: x.__add__(y),
        ],
    ),
    "add_scaled": (
        "add",
        {"input": "x", "other": "y", "alpha": 2},
        (X, SAME),
        [
            lambda x, y: torch.add(x, y, alpha=2),
            lambda x, y: x.add(y, alpha=2),
            lambda x, y: aten.add.Tensor(x, y, alpha=2),
        ],
    ),
    "sub": (
        "sub",
        {"input": "x", "other": "y"},
        (X, SAME),
        [
            lambda x, y: x - y,
            lambda x, y: x.sub(y),
            lambda x, y: x.subtract(y),
            lambda x, y: torch.subtract(x, y),
            lambda x, y: aten.sub.Tensor(x, y),
        ],
    ),
    "one_minus": (
        "sub",
        {"input": 1, "other": "x"},
        (X,),
        [lambda x: 1 - x],
    ),
    "rsub": (
        "rsub",
        {"input": "x", "other": 1},
        (X,),
        [lambda x: torch.rsub(x, 1), lambda x: aten.rsub.Scalar(x, 1)],
    ),
    "mul": (
        "mul",
        {"input": "x", "other": "y"},
        (X, SAME),
        [
            lambda x, y: x * y,
            lambda x, y: x.mul(y),
            lambda x, y: x.multiply(y),
            lambda x, y: torch.multiply(x, y),
            lambda x, y: torch.mul(x, other=y),
            lambda x, y: aten.mul.Tensor(x, y),
        ],
    ),
    "scaled": (
        "mul",
        {"input": "x", "other": 0.5},
        (X,),
        [lambda x: x * 0.5, lambda x: torch.mul(x, 0.5), lambda x: aten.mul.Scalar(x, 0.5)],
    ),
    "div": (
        "div",
        {"input": "x", "other": "y"},
        (X, SAME),
        [
            lambda x, y: x / y,
            lambda x, y: x.div(y),
            lambda x, y: x.divide(y),
            lambda x, y: x.true_divide(y),
            lambda x, y: torch.true_divide(x, y),
            lambda x, y: torch.divide(x, y),
            lambda x, y: aten.div.Tensor(x, y),
        ],
    ),
    "div_floor": (
        "div",
        {"input": "x", "other": "y", "rounding_mode": "floor"},
        (X, SAME),
        [lambda x, y: x.div(y, rounding_mode="floor"), lambda x, y: torch.div(x, y, rounding_mode="floor")],
    ),
    "pow": (
        "pow",
        {"input": "x", "exponent": 2},
        (X,),
        [
            lambda x: x**2,
            lambda x: x.pow(2),
            lambda x: torch.pow(x, 2),
            lambda x: torch.pow(x, exponent=2),
            lambda x: torch.pow(input=x, exponent=2),
            lambda x: aten.pow.Tensor_Scalar(x, 2),
        ],
    ),
    "neg": (
        "neg",
        {"input": "x"},
        (X,),
        [lambda x: -x, lambda x: x.neg(), lambda x: torch.negative(x), lambda x: aten.neg.default(x)],
    ),
    "where": (
        "where",
        {"condition": "m", "input": "x", "other": "y"},
        (M, X, SAME),
        [
            lambda m, x, y: torch.where(m, x, y),
            lambda m, x, y: x.where(m, y),
            lambda m, x, y: x.where(condition=m, other=y),
            lambda m, x, y: torch.where(m, input=x, other=y),
            lambda m, x, y: torch.where(condition=m, input=x, other=y),
            lambda m, x, y: aten.where.self(m, x, y),
        ],
    ),
    "masked_fill": (
        "masked_fill",
        {"input": "x", "mask": "m", "value": -1.0},
        (X, M),
        [
            lambda x, m: x.masked_fill(m, -1.0),
            lambda x, m: torch.masked_fill(x, m, -1.0),
            lambda x, m: x.masked_fill(mask=m, value=-1.0),
            lambda x, m: aten.masked_fill.Scalar(x, m, -1.0),
        ],
    ),
    "clamp_from_below": (
        "clamp",
        {"input": "x", "min": -1.0},
        (X,),
        [
            lambda x: x.clamp(-1.0),
            lambda x: x.clamp(min=-1.0),
            lambda x: torch.clip(x, -1.0),
            lambda x: x.clip(min=-1.0),
            lambda x: aten.clamp.default(x, -1.0),
        ],
    ),
    "maximum": (
        "maximum",
        {"input": "x", "other": "y"},
        (X, SAME),
        [
            lambda x, y: torch.maximum(x, y),
            lambda x, y: x.maximum(y),
            lambda x, y: aten.maximum.default(x, y),
        ],
    ),
    "stack": (
        "stack",
        {"tensors": ("x", "y"), "dim": 1},
        (X, SAME),
        [
            lambda x, y: torch.stack([x, y], 1),
            lambda x, y: torch.stack(tensors=(x, y), dim=1),
            lambda x, y: aten.stack.default([x, y], 1),
        ],
    ),
    "gather": (
        "gather",
        {"input": "x", "dim": 1, "index": "i"},
        (X, torch.zeros(3, 4, 5, dtype=torch.long)),
        [
            lambda x, i: x.gather(1, i),
            lambda x, i: torch.gather(x, 1, i),
            lambda x, i: torch.gather(input=x, dim=1, index=i),
            lambda x, i: aten.gather.default(x, 1, i),
        ],
    ),
    "roll": (
        "roll",
        {"input": "x", "shifts": 1, "dims": 2},
        (X,),
        [lambda x: x.roll(1, 2), lambda x: torch.roll(x, 1, 2), lambda x: torch.roll(x, shifts=1, dims=2)],
    ),
    "as_strided": (
        "as_strided",
        {"input": "x", "size": (2, 2), "stride": (1, 2), "storage_offset": 1},
        (X,),
        [
            lambda x: x.as_strided((2, 2), (1, 2), 1),
            lambda x: torch.as_strided(x, (2, 2), (1, 2), storage_offset=1),
            lambda x: aten.as_strided.default(x, (2, 2), (1, 2), 1),
        ],
    ),
    "cdist": (
        "cdist",
        {"input": "x", "other": "y"},
        (X, SAME),
        [lambda x, y: torch.cdist(x, y), lambda x, y: torch.cdist(x1=x, x2=y)],
    ),
    "embedding with a largest norm": (
        "embedding",
        {"input": "i", "weight": "w", "padding_idx": None, "max_norm": 1.0},
        (torch.zeros(3, dtype=torch.long), B[0]),
        [lambda i, w: F.embedding(i, w, None, 1.0), lambda i, w: F.embedding(i, w, padding_idx=None, max_norm=1.0)],
    ),
    "lerp": (
        "lerp",
        {"input": "x", "end": "y", "weight": 0.25},
        (X, SAME),
        [
            lambda x, y: torch.lerp(x, y, 0.25),
            lambda x, y: x.lerp(y, 0.25),
            lambda x, y: x.lerp(end=y, weight=0.25),
            lambda x, y: aten.lerp.Scalar(x, y, 0.25),
        ],
    ),
    "addcmul": (
        "addcmul",
        {"input": "x", "tensor1": "y", "tensor2": "z", "value": 2},
        (X, SAME, SAME + 1),
        [
            lambda x, y, z: torch.addcmul(x, y, z, value=2),
            lambda x, y, z: x.addcmul(y, z, value=2),
            lambda x, y, z: aten.addcmul.default(x, y, z, value=2),
        ],
    ),
    "softmax": (
        "softmax",
        {"input": "x", "dim": -1},
        (X,),
        [
            lambda x: x.softmax(-1),
            lambda x: x.softmax(dim=-1),
            lambda x: torch.softmax(x, -1),
            lambda x: torch.softmax(input=x, dim=-1),
            lambda x: F.softmax(x, -1),
            lambda x: F.softmax(x, dim=-1),
            lambda x: F.softmax(input=x, dim=-1),
            lambda x: F.softmax(x, -1, 3),
            lambda x: torch.special.softmax(x, -1),
            lambda x: aten.softmax.int(x, -1),
        ],
    ),
    "softmax_in_float64": (
        "softmax",
        {"input": "x", "dim": -1, "dtype": torch.float64},
        (X,),
        [
            lambda x: x.softmax(-1, torch.float64),
            lambda x: x.softmax(-1, dtype=torch.float64),
            lambda x: torch.softmax(x, -1, torch.float64),
            lambda x: F.softmax(x, -1, 3, torch.float64),
            lambda x: F.softmax(x, -1, dtype=torch.float64),
            lambda x: aten.softmax.int(x, -1, torch.float64),
        ],
    ),
    "log_softmax": (
        "log_softmax",
        {"input": "x", "dim": 1},
        (X,),
        [
            lambda x: x.log_softmax(1),
            lambda x: torch.log_softmax(x, dim=1),
            lambda x: F.log_softmax(x, 1),
            lambda x: torch.special.log_softmax(x, 1),
            lambda x: aten.log_softmax.int(x, 1),
        ],
    ),
    "logsumexp": (
        "logsumexp",
        {"input": "x", "dim": -1, "keepdim": True},
        (X,),
        [
            lambda x: x.logsumexp(-1, True),
            lambda x: x.logsumexp(dim=-1, keepdim=True),
            lambda x: torch.logsumexp(x, -1, keepdim=True),
            lambda x: torch.special.logsumexp(x, -1, keepdim=True),
        ],
    ),
    "sum": (
        "sum",
        {"input": "x", "dim": -1, "keepdim": True},
        (X,),
        [
            lambda x: x.sum(-1, True),
            lambda x: x.sum(dim=-1, keepdim=True),
            lambda x: x.sum(axis=-1, keepdim=True),
            lambda x: x.sum(axis=-1, keepdims=True),
            lambda x: torch.sum(x, -1, True),
            lambda x: torch.sum(x, dim=-1, keepdim=True),
            lambda x: torch.sum(input=x, dim=-1, keepdim=True),
        ],
    ),
    "mean": (
        "mean",
        {"input": "x", "dim": -1, "keepdim": True},
        (X,),
        [
            lambda x: x.mean(-1, True),
            lambda x: x.mean(-1, keepdim=True),
            lambda x: torch.mean(x, dim=-1, keepdim=True),
            lambda x: torch.mean(x, axis=-1, keepdim=True),
        ],
    ),
    "amax": (
        "amax",
        {"input": "x", "dim": -1, "keepdim": True},
        (X,),
        [lambda x: x.amax(-1, True), lambda x: x.amax(dim=-1, keepdim=True), lambda x: torch.amax(x, -1, keepdim=True)],
    ),
    "dropout": (
        "dropout",
        {"input": "x", "p": 0.1, "training": False},
        (X,),
        [
            lambda x: F.dropout(x, 0.1, False),
            lambda x: F.dropout(x, p=0.1, training=False),
            lambda x: torch.dropout(x, 0.1, False),
            lambda x: torch.dropout(x, p=0.1, train=False),
            lambda x: aten.dropout.default(x, 0.1, False),
        ],
    ),
    "matmul": (
        "matmul",
        {"input": "x", "other": "w"},
        (X, W),
        [
            lambda x, w: x @ w,
            lambda x, w: x.matmul(w),
            lambda x, w: torch.matmul(x, w),
            lambda x, w: torch.matmul(input=x, other=w),
            lambda x, w: aten.matmul.default(x, w),
        ],
    ),
    "bmm": (
        "bmm",
        {"input": "x", "other": "w"},
        (X, W),
        [
            lambda x, w: torch.bmm(x, w),
            lambda x, w: x.bmm(w),
            lambda x, w: torch.bmm(x, mat2=w),
            lambda x, w: torch.bmm(input=x, mat2=w),
            lambda x, w: aten.bmm.default(x, w),
        ],
    ),
    "mm": (
        "mm",
        {"input": "x", "other": "w"},
        (X[0], W[0]),
        [lambda x, w: torch.mm(x, w), lambda x, w: x.mm(mat2=w), lambda x, w: aten.mm.default(x, w)],
    ),
    "baddbmm": (
        "baddbmm",
        {"input": "b", "batch1": "x", "batch2": "w", "beta": 0.5, "alpha": 2},
        (B, X, W),
        [
            lambda b, x, w: torch.baddbmm(b, x, w, beta=0.5, alpha=2),
            lambda b, x, w: b.baddbmm(x, w, beta=0.5, alpha=2),
            lambda b, x, w: torch.baddbmm(input=b, batch1=x, batch2=w, beta=0.5, alpha=2),
            lambda b, x, w: aten.baddbmm.default(b, x, w, beta=0.5, alpha=2),
        ],
    ),
    "addmm": (
        "addmm",
        {"input": "b", "batch1": "x", "batch2": "w"},
        (B[0], X[0], W[0]),
        [
            lambda b, x, w: torch.addmm(b, x, w),
            lambda b, x, w: b.addmm(x, w),
            lambda b, x, w: torch.addmm(b, mat1=x, mat2=w),
            lambda b, x, w: aten.addmm.default(b, x, w),
        ],
    ),
    "linear": (
        "linear",
        {"input": "x", "weight": "w"},
        (X, torch.rand(2, 5)),
        [
            lambda x, w: F.linear(x, w),
            lambda x, w: F.linear(input=x, weight=w),
            lambda x, w: aten.linear.default(x, w),
        ],
    ),
    "transpose": (
        "transpose",
        {"input": "x", "dim0": 1, "dim1": -1},
        (X,),
        [
            lambda x: x.transpose(1, -1),
            lambda x: x.transpose(dim0=1, dim1=-1),
            lambda x: torch.transpose(x, 1, -1),
            lambda x: x.swapaxes(1, -1),
            lambda x: x.swapdims(1, -1),
            lambda x: torch.swapaxes(x, 1, -1),
            lambda x: torch.swapaxes(x, axis0=1, axis1=-1),
            lambda x: torch.swapdims(x, dim0=1, dim1=-1),
            lambda x: aten.transpose.int(x, 1, -1),
        ],
    ),
    "movedim": (
        "movedim",
        {"input": "x", "source": 0, "destination": 2},
        (X,),
        [
            lambda x: x.movedim(0, 2),
            lambda x: torch.movedim(x, 0, 2),
            lambda x: x.moveaxis(0, 2),
            lambda x: torch.moveaxis(x, source=0, destination=2),
        ],
    ),
    "unsqueeze": (
        "unsqueeze",
        {"input": "x", "dim": 1},
        (X,),
        [
            lambda x: x.unsqueeze(1),
            lambda x: torch.unsqueeze(x, dim=1),
            lambda x: torch.unsqueeze(x, 1),
            lambda x: aten.unsqueeze.default(x, 1),
        ],
    ),
    "flatten": (
        "flatten",
        {"input": "x", "start_dim": 1, "end_dim": 2},
        (X,),
        [
            lambda x: x.flatten(1, 2),
            lambda x: torch.flatten(x, 1, 2),
            lambda x: torch.flatten(x, start_dim=1, end_dim=2),
        ],
    ),
    "repeat_interleave": (
        "repeat_interleave",
        {"input": "x", "repeats": 2, "dim": 1},
        (X,),
        [
            lambda x: x.repeat_interleave(2, 1),
            lambda x: x.repeat_interleave(2, dim=1),
            lambda x: x.repeat_interleave(repeats=2, dim=1),
            lambda x: torch.repeat_interleave(x, 2, dim=1),
            lambda x: torch.repeat_interleave(x, repeats=2, dim=1),
        ],
    ),
    "cat": (
        "cat",
        {"tensors": ("x", "y"), "dim": 1},
        (X, SAME),
        [
            lambda x, y: torch.cat([x, y], 1),
            lambda x, y: torch.cat((x, y), dim=1),
            lambda x, y: torch.cat([x, y], axis=1),
            lambda x, y: torch.cat(tensors=[x, y], dim=1),
            lambda x, y: torch.concat([x, y], 1),
            lambda x, y: torch.concatenate([x, y], axis=1),
            lambda x, y: aten.cat.default([x, y], 1),
        ],
    ),
    "attention_call": (
        "scaled_dot_product_attention",
        {"query": "q", "key": "k", "value": "v", "scale": 0.5},
        (torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4)),
        [
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5),
            lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.5),
            lambda q, k, v: aten.scaled_dot_product_attention.default(q, k, v, scale=0.5),
        ],
    ),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_all_spellings_of_an_operation_are_the_same_call(case: str) -> None:
    name, arguments, inputs, spellings = SPELLINGS[case]
    read_as = [reading(spelling, *inputs) for spelling in spellings]
    assert read_as == [(name, arguments)] * len(spellings)


# Operations without a signature: what counts is the name and the arguments after the first.
LOGIC: Mapping[str, tuple[str, tuple[Any, ...], list[Callable[..., Any]]]] = {
    "not": (
        "not",
        (),
        [
            lambda m, n: ~m,
            lambda m, n: m.logical_not(),
            lambda m, n: torch.bitwise_not(m),
            lambda m, n: torch.logical_not(m),
        ],
    ),
    "and": (
        "and",
        ("n",),
        [
            lambda m, n: m & n,
            lambda m, n: m.logical_and(n),
            lambda m, n: torch.bitwise_and(m, n),
            lambda m, n: torch.logical_and(m, other=n),
        ],
    ),
    "or": ("or", ("n",), [lambda m, n: m | n, lambda m, n: torch.logical_or(m, n), lambda m, n: m.bitwise_or(n)]),
    "gt": ("gt", (0,), [lambda m, n: m > 0, lambda m, n: m.gt(0), lambda m, n: torch.greater(m, 0)]),
    "le": ("le", (0,), [lambda m, n: m <= 0, lambda m, n: m.le(0), lambda m, n: torch.less_equal(m, 0)]),
    "eq": ("eq", (0,), [lambda m, n: m == 0, lambda m, n: m.eq(0), lambda m, n: torch.eq(m, other=0)]),
    "ne": ("ne", (0,), [lambda m, n: m != 0, lambda m, n: m.ne(0), lambda m, n: torch.not_equal(m, 0)]),
}


@pytest.mark.parametrize("case", LOGIC)
def test_operators_methods_and_functions_of_logic_are_the_same_call(case: str) -> None:
    name, rest, spellings = LOGIC[case]
    for spelling in spellings:
        call = calls(capture(spelling, M, N))[-1]
        assert (call.name, call.input.name) == (name, "l_m_")
        given = tuple(value.name[2:-1] if isinstance(value, fx.Node) else value for value in call.positional())
        assert given == rest


SHAPES: Mapping[str, tuple[str, tuple[Any, ...], list[Callable[..., Any]]]] = {
    "view": (
        "view",
        (3, -1),
        [lambda x: x.view(3, -1), lambda x: x.view((3, -1)), lambda x: x.view([3, -1]), lambda x: x.view(size=(3, -1))],
    ),
    "reshape": (
        "reshape",
        (3, 20),
        [lambda x: x.reshape(3, 20), lambda x: x.reshape((3, 20)), lambda x: torch.reshape(x, (3, 20))],
    ),
    "permute": (
        "permute",
        (0, 2, 1),
        [
            lambda x: x.permute(0, 2, 1),
            lambda x: x.permute((0, 2, 1)),
            lambda x: x.permute(dims=(0, 2, 1)),
            lambda x: torch.permute(x, (0, 2, 1)),
            lambda x: torch.permute(x, dims=(0, 2, 1)),
            lambda x: aten.permute.default(x, [0, 2, 1]),
        ],
    ),
    "expand": (
        "expand",
        (2, 3, 4, 5),
        [
            lambda x: x.expand(2, 3, 4, 5),
            lambda x: x.expand((2, 3, 4, 5)),
            lambda x: x.broadcast_to((2, 3, 4, 5)),
            lambda x: torch.broadcast_to(x, (2, 3, 4, 5)),
            lambda x: aten.expand.default(x, [2, 3, 4, 5]),
        ],
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_shape_may_be_given_as_one_sequence_or_as_many_numbers(case: str) -> None:
    name, sizes, spellings = SHAPES[case]
    for spelling in spellings:
        call = calls(capture(spelling, X))[-1]
        assert (call.name, call.positional()) == (name, sizes)


def test_the_core_form_of_softmax_has_no_dtype_in_the_place_of_its_flag() -> None:
    _, arguments = reading(lambda x: aten._softmax.default(x, -1, False), X)
    assert (arguments["dim"], arguments.get("dtype")) == (-1, None)


def _augmented(operation: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(f"def spelled(x, y):\n    x {operation} y\n    return x", scope)
    return scope["spelled"]


WRITES: Mapping[str, Callable[..., Any]] = {
    **{f"x {sign} y": _augmented(sign) for sign in ("+=", "-=", "*=", "/=", "**=", "//=", "%=")},
    "x + y": lambda x, y: x + y,
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y),
    "clamp_": lambda x, y: x.clamp_(min=1.5),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 1.5, 0.0),
    "fill_": lambda x, y: x.fill_(1.0),
    "zero_": lambda x, y: x.zero_(),
    "copy_": lambda x, y: x.copy_(y),
    "aten add_": lambda x, y: aten.add_.Tensor(x, y),
    "aten add": lambda x, y: aten.add.Tensor(x, y),
    "relu_": lambda x, y: torch.relu_(x),
    "relu inplace=True": lambda x, y: F.relu(x, inplace=True),
    "relu True": lambda x, y: F.relu(x, True),
    "relu False": lambda x, y: F.relu(x, False),
    "leaky_relu True": lambda x, y: F.leaky_relu(x, 0.1, True),
    "leaky_relu": lambda x, y: F.leaky_relu(x, 0.1),
    "elu True": lambda x, y: F.elu(x, 1.0, True),
    "silu inplace=True": lambda x, y: F.silu(x, inplace=True),
    "silu True": lambda x, y: F.silu(x, True),
    "hardswish True": lambda x, y: F.hardswish(x, True),
    "dropout True True": lambda x, y: F.dropout(x, 0.5, True, True),
    "dropout inplace=True": lambda x, y: F.dropout(x, 0.5, True, inplace=True),
    "dropout True": lambda x, y: F.dropout(x, 0.5, True),
    "threshold True": lambda x, y: F.threshold(x, 1.5, 0.0, True),
    "normalize out-of-place": lambda x, y: torch.exp(x),
}


@pytest.mark.parametrize("spelling", WRITES)
def test_a_call_is_in_place_exactly_when_it_overwrites_its_first_argument(spelling: str) -> None:
    fn = WRITES[spelling]
    x = X.clone()
    fn(x, SAME)
    overwrites = x._version > 0
    call = calls(capture(fn, X, SAME))[-1]
    assert call.is_inplace == overwrites
    assert call.input.name == "l_x_"


@pytest.mark.parametrize("sign", ["&=", "|=", "^="])
def test_augmented_assignment_overwrites_a_mask(sign: str) -> None:
    call = calls(capture(_augmented(sign), M.clone(), N))[-1]
    assert call.is_inplace
    assert call.input.name == "l_x_"


def test_augmented_matmul_makes_a_new_tensor() -> None:
    x = torch.rand(3, 3)
    before = x.clone()
    _augmented("@=")(x, before)
    assert torch.equal(x, before), "torch has no in-place matmul"
    call = calls(capture(_augmented("@="), x, before))[-1]
    assert call.name == "matmul"
    assert not call.is_inplace


def test_the_in_place_form_has_the_name_of_the_plain_one() -> None:
    pairs = [
        (_augmented("+="), "add"),
        (_augmented("/="), "div"),
        (lambda x, y: x.divide_(y), "div"),
        (lambda x, y: x.clip_(1.0), "clamp"),
        (lambda x, y: x.true_divide_(y), "div"),
        (lambda x, y: (x + y).swapaxes_(0, 0), "transpose"),
    ]
    for fn, name in pairs:
        call = calls(capture(fn, X, SAME))[-1]
        assert (call.name, call.is_inplace) == (name, True)


def test_in_place_logic_has_the_name_of_the_plain_one() -> None:
    for fn, name in [
        (lambda m, n: m.logical_and_(n), "and"),
        (lambda m, n: m.bitwise_or_(n), "or"),
        (lambda m, n: m.logical_not_(), "not"),
    ]:
        call = calls(capture(fn, M, N))[-1]
        assert (call.name, call.is_inplace) == (name, True)


def test_nothing_is_read_of_inputs_attributes_and_outputs() -> None:
    module = capture(lambda x: x + 1, X)
    for node in module.graph.nodes:
        assert (read(node) is None) == (node.op in ("placeholder", "output"))
    graph = fx.Graph()
    assert read(graph.get_attr("weight")) is None


def test_get_fills_nothing_in_but_the_default_asked_for() -> None:
    call = call_named(capture(lambda x: x.sum(-1), X), "sum")
    assert call.get("keepdim") is None
    assert call.get("keepdim", False) is False
    assert call.get("dim", 7) == -1


def test_values_of_constants_are_themselves_and_of_nodes_what_dynamo_knows() -> None:
    module = capture(lambda x: x + 1, X)
    (x,) = placeholders(module)
    assert value_of(3) == 3
    assert tensor_of(3) is None
    assert tensor_of(x).shape == X.shape
    x.meta.pop("example_value")
    assert tensor_of(x) is None


def _helper(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


def test_where_names_the_innermost_line_of_the_users_code() -> None:
    module = capture(lambda x: _helper(x) + 1, X)
    line = inspect.getsourcelines(_helper)[1] + 1
    assert where_of(call_named(module, "exp").node) == f"{__file__}:{line}"
    assert where_of(output_of(module)).startswith(f"{__file__}:")
    assert where_of(output_of(module)) != f"{__file__}:{line}"


def test_where_is_unknown_without_a_stack_trace() -> None:
    node = fx.Graph().placeholder("x")
    assert where_of(node) == "<unknown>"


def test_reasons_call_values_by_their_names_in_the_source_and_what_is_held_by_its_path() -> None:
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gated = x * self.weight
            gated = gated.exp()
            return gated

    said: list[str] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        said.extend(told(node) for node in module.graph.nodes if node.name.startswith(("gated", "l_")))
        return module

    torch.compile(Gate(), backend=backend)(X)
    line = inspect.getsourcelines(Gate.forward)[1] + 1
    assert sorted(said) == [f"gated (exp at {__file__}:{line + 1})", f"gated (mul at {__file__}:{line})", "weight", "x"]
    assert told(fx.Graph().placeholder("x_3")) == "x_3"
