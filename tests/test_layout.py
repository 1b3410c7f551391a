"""Chains of layout operations read backwards: the element that an output index shows is found in the input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import Dims, LayoutError, axes_of, fresh
from lz_compile.passes.formula.layout import is_view, read_input_dims, rearranges
from lz_compile.passes.graph.view import read, tensor_of
from tests.graphs import at, calls, capture, output_of, outputs_of, placeholders, symbols

Step = Callable[[Tensor], Tensor]


def read_back(module: fx.GraphModule, output: fx.Node | None = None) -> tuple[Dims, Dims]:
    """``(dims of the output, dims of the input)`` of a chain of layout operations."""
    node = output or output_of(module)
    out = dims = fresh(shape_of(tensor_of(node)))
    while (call := read(node)) is not None:
        source = read_input_dims(call, dims)
        assert source is not None, f"{call.name} is not read as a layout operation"
        assert len(source) == len(shape_of(tensor_of(call.input))), f"{call.name} changes the rank of its input"
        node, dims = call.input, source
    assert node.op == "placeholder"
    return out, dims


def check(fn: Step, x: Tensor, dynamic: bool | Sequence[int] | None = None) -> None:
    """``fn(x)`` at every index is ``x`` at the index that the axes say."""
    module = capture(fn, x, dynamic=dynamic)
    known = symbols(module, x)
    out, dims = read_back(module)
    axes = axes_of(out)
    assert torch.equal(at(fn(x), out, axes, known), at(x, dims, axes, known))


def numbered(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


SINGLE: dict[str, tuple[tuple[int, ...], Step]] = {
    "transpose": ((2, 3, 5), lambda x: x.transpose(0, -1)),
    "transpose_named": ((2, 3, 5), lambda x: torch.transpose(x, dim0=-1, dim1=1)),
    "swapaxes_named": ((2, 3, 5), lambda x: torch.swapaxes(x, axis0=0, axis1=2)),
    "swapdims": ((2, 3, 5), lambda x: x.swapdims(0, 1)),
    "t": ((3, 5), lambda x: x.t()),
    "t_of_a_vector": ((3,), lambda x: x.t()),
    "T": ((3, 5), lambda x: x.T.clone()),
    "mT": ((2, 3, 5), lambda x: x.mT.clone()),
    "T_of_three_dimensions": ((2, 3, 5), lambda x: x.T.clone()),
    "T_as_an_operator": ((3, 5), lambda x: torch.ops.aten.numpy_T(x).clone()),  # as Dynamo 2.14 traces x.T
    "mT_as_an_operator": ((2, 3, 5), lambda x: torch.ops.aten.mT.default(x).clone()),
    "permute": ((2, 3, 5), lambda x: x.permute(2, 0, 1)),
    "permute_negative": ((2, 3, 5), lambda x: x.permute(-1, 0, -2)),
    "permute_named": ((2, 3, 5), lambda x: torch.permute(x, dims=(1, 2, 0))),
    "movedim": ((2, 3, 5, 7), lambda x: x.movedim(0, 2)),
    "movedim_back": ((2, 3, 5, 7), lambda x: x.movedim(-1, 1)),
    "movedim_many": ((2, 3, 5, 7), lambda x: x.movedim((0, -1), (2, 0))),
    "moveaxis": ((2, 3, 5), lambda x: torch.moveaxis(x, 2, 0)),
    "view_split": ((2, 12), lambda x: x.view(2, 3, 4)),
    "view_inferred": ((2, 12), lambda x: x.view(2, -1, 4)),
    "view_named": ((2, 12), lambda x: x.view(size=(2, 3, 4))),
    "reshape_across": ((2, 3, 4), lambda x: x.reshape(6, 2, 2)),
    "reshape_to_scalar": ((1, 1), lambda x: x.reshape(())),
    "flatten": ((2, 3, 5), lambda x: x.flatten(1)),
    "flatten_all": ((2, 3, 5), lambda x: x.flatten()),
    "ravel": ((2, 3), lambda x: x.ravel()),
    "unflatten": ((2, 12), lambda x: x.unflatten(1, (3, 4))),
    "unflatten_named": ((2, 12), lambda x: x.unflatten(dim=-1, sizes=(-1, 4))),
    "view_as": ((2, 6), lambda x: x.view_as(torch.empty(2, 2, 3))),
    "reshape_as": ((2, 6), lambda x: x.reshape_as(torch.empty(2, 2, 3))),
    "expand": ((1, 3, 1), lambda x: x.expand(2, 3, 4)),
    "expand_kept": ((1, 3), lambda x: x.expand(2, -1)),
    "expand_more_dimensions": ((3,), lambda x: x.expand(2, 4, 3)),
    "expand_as": ((1, 3), lambda x: x.expand_as(torch.empty(2, 3))),
    "broadcast_to": ((1, 3), lambda x: torch.broadcast_to(x, (2, 3))),
    "unsqueeze": ((2, 3), lambda x: x.unsqueeze(1)),
    "unsqueeze_last": ((2, 3), lambda x: x.unsqueeze(-1)),
    "unsqueeze_negative": ((2, 3), lambda x: x.unsqueeze(-2)),
    "squeeze": ((1, 2, 1, 3), lambda x: x.squeeze()),
    "squeeze_one": ((1, 2, 1, 3), lambda x: x.squeeze(2)),
    "squeeze_nothing": ((2, 3), lambda x: x.squeeze(0)),
    "index_none": ((2, 3), lambda x: x[None]),
    "index_none_between": ((2, 3), lambda x: x[:, None, :, None]),
    "index_ellipsis_none": ((2, 3, 5), lambda x: x[..., None, :]),
    "index_none_ellipsis": ((2, 3, 5), lambda x: x[:, None, ...]),
    "index_whole": ((2, 3), lambda x: x[:, 0:3]),
    "index_beyond": ((2, 3), lambda x: x[0:9]),
    "repeat": ((2, 3), lambda x: x.repeat(2, 4)),
    "repeat_more_dimensions": ((2, 3), lambda x: x.repeat(2, 1, 4)),
    "repeat_sequence": ((2, 3), lambda x: x.repeat((3, 2))),
    "repeat_then_split": ((2, 3), lambda x: x.repeat(1, 4).view(2, 4, 3)),
    "tile": ((2, 3), lambda x: x.tile(2)),
    "tile_function": ((2, 3), lambda x: torch.tile(x, (2, 2))),
    "repeat_interleave": ((2, 3, 5), lambda x: x.repeat_interleave(4, dim=1)),
    "repeat_interleave_last": ((2, 3), lambda x: torch.repeat_interleave(x, 2, -1)),
    "repeat_interleave_of_one": ((2, 1), lambda x: x.repeat_interleave(4, 1)),
    "contiguous": ((2, 3), lambda x: x.transpose(0, 1).contiguous()),
    "clone": ((2, 3), lambda x: x.clone()),
    "grouped_heads": ((2, 3, 4, 5), lambda x: x[:, :, None].expand(2, 3, 6, 4, 5).reshape(2, 18, 4, 5)),
}


@pytest.mark.parametrize("case", SINGLE)
def test_the_axes_of_the_input_follow_from_those_of_the_output(case: str) -> None:
    shape, fn = SINGLE[case]
    check(fn, numbered(*shape))


@dataclass
class Chain:
    """Layout operations, printed as the code that they are."""

    shape: tuple[int, ...]
    steps: list[str]

    def __call__(self, x: Tensor) -> Tensor:
        return self.compile()(x)

    def compile(self) -> Step:
        scope: dict[str, Any] = {"torch": torch}
        exec("def chain(x):\n" + "".join(f"    x = {step}\n" for step in self.steps) + "    return x", scope)
        return scope["chain"]


def _factorings(total: int) -> list[tuple[int, ...]]:
    """Shapes of up to three dimensions with ``total`` elements."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    pairs = [(d, total // d) for d in divisors]
    return [(total,), *pairs, *[(a, b, total // a // b) for a in divisors for b in divisors if (total // a) % b == 0]]


def _moves(x: Tensor) -> dict[str, list[str]]:
    """Every layout operation that makes sense on ``x``, by kind."""
    rank, shape = x.dim(), tuple(x.shape)
    every, signed = range(rank), range(-rank, rank)
    whole = [":"] * rank
    moves = {
        "reshape": [f"x.reshape({s})" for s in _factorings(x.numel()) if x.numel() <= 48],
        "flatten": [f"x.flatten({i}, {j})" for i in every for j in range(i, rank)] + ["x.ravel()"],
        "unflatten": [f"x.unflatten({i}, {s})" for i in every for s in _factorings(shape[i])[1:]],
        "unsqueeze": [f"x.unsqueeze({i})" for i in range(-rank - 1, rank + 1)],
        "none": [f"x[{', '.join([*whole[:i], 'None', *whole[i:]])}]" for i in range(rank + 1)] + ["x[..., None]"],
        "squeeze": ["x.squeeze()", *[f"x.squeeze({i})" for i in signed]],
        "copy": ["x.contiguous()", "x.clone()"],
        "transpose": [f"x.transpose({i}, {j})" for i in signed for j in signed],
        "movedim": [f"x.movedim({i}, {j})" for i in signed for j in signed],
    }
    if rank > 1:
        moves["matrix"] = ["x.mT", *[f"x.movedim(({i}, {j}), ({j}, {i}))" for i in every for j in every if i != j]]
        moves["permute"] = [f"x.permute({[*range(k, rank), *range(k)]})" for k in every] + [
            f"torch.permute(x, {list(reversed(every))})"
        ]
    if x.numel() <= 24:
        moves["repeat"] = [f"x.repeat({[2 if i == j else 1 for j in every]})" for i in every] + [
            f"x.repeat({[2] + [1] * rank})"
        ]
        moves["interleave"] = [f"x.repeat_interleave(3, {i})" for i in signed]
        moves["expand"] = [f"x.expand({[2, *shape]})", f"x.expand({[3 if size == 1 else -1 for size in shape]})"]
    return {kind: found for kind, found in moves.items() if found}


def shapes(sizes: list[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.sampled_from(sizes), min_size=1, max_size=3).map(tuple)


@st.composite
def chains(draw: st.DrawFn, shape: tuple[int, ...], without: tuple[str, ...] = ()) -> Chain:
    chain, x = Chain(shape, []), numbered(*shape)
    for _ in range(draw(st.integers(1, 6))):
        moves = {kind: found for kind, found in _moves(x).items() if kind not in without}
        kind = draw(st.sampled_from(sorted(moves)))
        step = draw(st.sampled_from(moves[kind]))
        if "reshape" in step and draw(st.booleans()):
            try:
                x.view(eval(step.removeprefix("x.reshape")))
                step = step.replace("reshape", "view")
            except RuntimeError:
                pass  # not viewable with these strides
        x = eval(step, {"torch": torch, "x": x})
        chain.steps.append(step)
    return chain


def _reshapes(step: str) -> bool:
    return any(word in step for word in ("view", "reshape", "unflatten"))


def check_all(found: Sequence[Chain], x: Tensor, may_fail: Callable[[str], bool], dynamic: bool | None = None) -> None:
    """:func:`check` for many chains in one graph; a chain with no exact form has a step that may fail."""
    compiled = [chain.compile() for chain in found]
    module = capture(lambda x: [fn(x) + 0 for fn in compiled], x, dynamic=dynamic)
    known = symbols(module, x)
    for chain, node in zip(found, outputs_of(module), strict=True):
        try:
            out, dims = read_back(module, node.args[0])
        except LayoutError:
            assert any(may_fail(step) for step in chain.steps), f"{chain} has an exact form"
            continue
        axes = axes_of(out)
        assert torch.equal(at(chain(x), out, axes, known), at(x, dims, axes, known)), chain


@settings(max_examples=40)
@given(st.data())
def test_random_chains_of_layout_operations_are_read_backwards_exactly(data: st.DataObject) -> None:
    shape = data.draw(shapes([1, 2, 3, 4]))
    check_all([data.draw(chains(shape)) for _ in range(6)], numbered(*shape), _reshapes)


@settings(max_examples=20)
@given(st.data())
def test_chains_that_never_cross_a_border_are_always_read(data: st.DataObject) -> None:
    shape = data.draw(shapes([1, 2, 3, 4]))
    found = [data.draw(chains(shape, without=("reshape", "unflatten"))) for _ in range(6)]
    check_all(found, numbered(*shape), lambda step: False)


#: Chains over x of shape (batch, length, 12) with symbolic batch and length, as models write them.
DYNAMIC: dict[str, Step] = {
    "split_heads": lambda x: x.view(x.shape[0], x.shape[1], 3, 4).transpose(1, 2),
    "heads_into_batch": lambda x: x.view(*x.shape[:2], 3, 4).transpose(1, 2).reshape(-1, x.shape[1], 4),
    "merge_and_back": lambda x: x.flatten(0, 1).view(x.shape[0], x.shape[1], -1),
    "merge_heads": lambda x: (
        x.unflatten(2, (3, 4)).transpose(1, 2).transpose(1, 2).contiguous().view(x.shape[0], -1, 12)
    ),
    "repeat_interleaved_heads": lambda x: (
        x.view(x.shape[0], x.shape[1], 3, 4).transpose(1, 2).repeat_interleave(2, dim=1)
    ),
    "whole_slice": lambda x: x[:, : x.shape[1], None],
    "repeat_batch": lambda x: x.repeat(2, 1, 1),
    "repeat_length": lambda x: x.repeat(1, 3, 1),
    "transposed_flat": lambda x: x.transpose(0, 1).reshape(-1, 12).view(x.shape[1], x.shape[0], 12),
    "expand_in_front": lambda x: x.expand(5, -1, -1, -1).flatten(0, 1),
    "unsqueeze_negative": lambda x: x.unsqueeze(-2).squeeze(-2).unsqueeze(0),
}


@pytest.mark.parametrize("case", DYNAMIC)
def test_layout_with_symbolic_sizes_is_read_the_same(case: str) -> None:
    check(DYNAMIC[case], numbered(5, 7, 12), dynamic=(0, 1))


@pytest.mark.parametrize("case", DYNAMIC)
def test_layout_is_read_the_same_where_every_size_is_symbolic(case: str) -> None:
    check(DYNAMIC[case], numbered(5, 7, 12), dynamic=True)


def test_how_often_a_symbolic_length_is_repeated_is_a_number() -> None:
    module = capture(lambda x: x.repeat(1, 3, 1), torch.empty(5, 7, 12), dynamic=True)
    out = fresh(shape_of(tensor_of(output_of(module))))
    assert read_input_dims(calls(module)[-1], out) is not None
    assert [type(axis.size) for axis in axes_of(out[1:2])][:1] == [int]


@settings(max_examples=20)
@given(st.data())
def test_random_chains_with_symbolic_sizes_are_read_backwards_exactly(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(5,), (5, 7), (7, 5), (3, 5, 7)]))  # equal sizes would share a symbol
    found = [data.draw(chains(shape, without=("reshape", "unflatten", "expand"))) for _ in range(4)]
    check_all(found, numbered(*shape), lambda step: "repeat" in step, dynamic=True)


@pytest.mark.parametrize(
    ("shape", "fn"),
    [
        ((6, 4), lambda x: x.reshape(4, 6)),
        ((2, 3), lambda x: x.t().reshape(2, 3)),
        ((4, 3), lambda x: x.view(6, 2)),
        ((3, 4), lambda x: x.repeat_interleave(2)),
        ((3, 4), lambda x: x.repeat_interleave(torch.tensor([2, 2, 2]), dim=0, output_size=6)),
    ],
    ids=["borders_crossed", "transposed_then_crossed", "larger_first", "flat_repeat", "repeats_by_tensor"],
)
def test_what_has_no_exact_form_in_axes_is_an_error(shape: tuple[int, ...], fn: Step) -> None:
    with pytest.raises(LayoutError):
        read_back(capture(fn, numbered(*shape)))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[0],
        lambda x: x[:, 1:],
        lambda x: x[:, :2],
        lambda x: x[::2],
        lambda x: x[..., 0],
        lambda x: x[x > 0],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x[[1, 0]],
        lambda x: x[True],
        lambda x: x[:, -3:-1],
        lambda x: x.narrow(0, 0, 2),
        lambda x: x.select(0, 1),
        lambda x: x.flip(0),
        lambda x: x.roll(1),
        lambda x: x + 0,
        lambda x: x.view(torch.int32),
        lambda x: x.view(dtype=torch.int32),
        lambda x: x.triu(),
        lambda x: x.diagonal(),
        lambda x: x.unfold(0, 2, 1),
        lambda x: torch.as_strided(x, (2, 2), (1, 2)),
        lambda x: x.chunk(2)[0],
    ],
)
def test_what_selects_or_computes_is_not_layout(fn: Callable[[Tensor], Any]) -> None:
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        module = capture(lambda x: fn(x) if fn(x) is not None else x + 1, torch.rand(4, 3))
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False
    (x,) = placeholders(module)
    reader = next(call for call in calls(module) if call.input is x)
    value = tensor_of(reader.node)
    rank = 2 if value is None else value.dim()
    assert read_input_dims(reader, tuple(() for _ in range(rank))) is None


def test_a_slice_by_another_tensors_length_selects() -> None:
    module = capture(lambda x, y: x[:, : y.shape[0]] + y, torch.rand(5, 7), torch.rand(6), dynamic=True)
    sliced = next(call for call in calls(module) if call.name == "getitem")
    assert read_input_dims(sliced, fresh(shape_of(tensor_of(sliced.node)))) is None


def test_empty_tensors_are_read_or_refused_but_never_crash() -> None:
    for fn in (
        lambda x: x.reshape(0, 3, 4),
        lambda x: x.unsqueeze(0).transpose(0, 1),
        lambda x: x.view(0, 6, 2),
        lambda x: x.repeat(2, 1),
    ):
        try:
            out, dims = read_back(capture(fn, torch.empty(0, 12)))
        except LayoutError:
            continue
        assert len(out) == fn(torch.empty(0, 12)).dim()
        assert len(dims) == 2


@pytest.mark.parametrize("case", SINGLE)
def test_an_operation_whose_result_shares_memory_is_called_a_view(case: str) -> None:
    shape, fn = SINGLE[case]
    x = numbered(*shape)
    last = calls(capture(fn, x))[-1]
    assert rearranges(last)
    if fn(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and last.name != "contiguous":
        assert is_view(last) or last.name == "getattr"


def test_in_place_transposes_are_read_with_the_shape_before_them() -> None:
    def transposed(x: Tensor) -> Tensor:
        y = x.clone()
        y.unsqueeze_(-1)
        return y

    module = capture(transposed, numbered(2, 3))
    last = calls(module)[-1]
    dims = fresh(shape_of(tensor_of(output_of(module))))
    assert read_input_dims(last, dims) in (None, dims[:2])
