"""Arranging tensors by their axes, on real tensors and as nodes of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import einops
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, fresh, regroup
from lz_compile.passes.formula.expressions import INFINITY
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.rewriting.builder import Builder, GraphBuilder, TensorProxy
from tests.graphs import arguments, capture, output_of, placeholders, symbols

LETTERS = "abcdef"


def builder(sizes: dict[Axis, int] | None = None) -> Builder:
    return Builder(lambda node: node, sizes=sizes)


def rearranged(x: Tensor, dims: Dims, groups: Sequence[Sequence[Axis]], names: dict[Axis, str], expand: bool) -> Tensor:
    """What :meth:`Builder.arrange` promises, by einops."""
    owned = {axis for dim in dims for axis in dim}

    def pattern(parts: Sequence[Sequence[str]]) -> str:
        return " ".join("(" + " ".join(part) + ")" if part else "1" for part in parts)

    left = pattern([[names[axis] for axis in dim] for dim in dims])
    kept = [group if expand or any(axis in owned for axis in group) else () for group in groups]
    right = pattern([[names[axis] for axis in group] for group in kept])
    used = {axis for part in [*dims, *kept] for axis in part}
    return einops.repeat(x, f"{left} -> {right}", **{names[axis]: axis.size for axis in used})


def _partition(draw: st.DrawFn, axes: list[Axis]) -> list[list[Axis]]:
    """The axes in any order, in runs, with empty runs between them."""
    order = draw(st.permutations(axes))
    runs: list[list[Axis]] = [[]]
    for axis in order:
        if draw(st.booleans()):
            runs.append([])
        runs[-1].append(axis)
    for _ in range(draw(st.integers(0, 2))):
        runs.insert(draw(st.integers(0, len(runs))), [])
    return runs if draw(st.booleans()) else [run for run in runs if run]


@st.composite
def arrangements(draw: st.DrawFn, *, missing: bool) -> tuple[Dims, list[list[Axis]], dict[Axis, str]]:
    """Dims of a tensor, and groups that hold all of its axes (and, with ``missing``, some more)."""
    axes = [Axis(draw(st.sampled_from([1, 2, 3, 5]))) for _ in range(draw(st.integers(0, 5)))]
    owned = [axis for axis in axes if not missing or draw(st.booleans())]
    dims = tuple(tuple(run) for run in _partition(draw, owned))
    return dims, _partition(draw, axes), dict(zip(axes, LETTERS, strict=False))


def tensor_with(dims: Dims) -> Tensor:
    shape = [int(torch.tensor([axis.size for axis in dim]).prod()) if dim else 1 for dim in dims]
    return torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)


@settings(max_examples=200)
@given(arrangements(missing=False))
def test_arranging_all_axes_is_einops_rearrange(case) -> None:
    dims, groups, names = case
    x = tensor_with(dims)
    assert torch.equal(builder().arrange(x, dims, groups), rearranged(x, dims, groups, names, False))


@settings(max_examples=200)
@given(arrangements(missing=True), st.booleans())
def test_arranging_with_axes_that_are_not_there_is_einops_repeat(case, expand: bool) -> None:
    dims, groups, names = case
    x = tensor_with(dims)
    arranged = builder().arrange(x, dims, groups, expand=expand)
    assert torch.equal(arranged, rearranged(x, dims, groups, names, expand))


@settings(max_examples=200)
@given(arrangements(missing=False))
def test_restoring_undoes_arranging(case) -> None:
    dims, groups, _ = case
    x = tensor_with(dims)
    there = builder()
    assert torch.equal(there.restore(there.arrange(x, dims, groups), groups, dims), x)


@settings(max_examples=100)
@given(arrangements(missing=False), st.integers(1, 4))
def test_sizes_take_the_place_of_the_axes_own(case, size: int) -> None:
    dims, groups, names = case
    sizes = {axis: size for group in groups for axis in group}
    resized = {axis: Axis(size) for axis in sizes}
    new_dims = tuple(tuple(resized[axis] for axis in dim) for dim in dims)
    new_groups = [[resized[axis] for axis in group] for group in groups]
    x = tensor_with(new_dims)
    expected = rearranged(x, new_dims, new_groups, {resized[axis]: name for axis, name in names.items()}, False)
    assert torch.equal(builder(sizes).arrange(x, dims, groups), expected)


def test_what_lies_right_already_is_not_touched() -> None:
    dims = fresh((2, 3, 5))
    x = torch.rand(2, 3, 5)
    assert builder().arrange(x, dims, dims) is x
    assert builder().restore(x, dims, dims) is x


def test_axes_that_belong_to_no_group_are_an_error() -> None:
    dims = fresh((2, 3))
    with pytest.raises(LookupError):
        builder().arrange(torch.rand(2, 3), dims, [dims[0]])


def test_cut_axes_are_arranged_by_their_parts() -> None:
    dims = fresh((2, 12))
    heads, features = regroup(dims[1], (3, 4))
    x = torch.rand(2, 12)
    arranged = builder().arrange(x, dims, [dims[0], heads, features])
    assert torch.equal(arranged, einops.rearrange(x, "b (h d) -> b h d", h=3))
    assert torch.equal(builder().restore(arranged, [dims[0], heads, features], dims), x)
    assert torch.equal(
        builder().arrange(x, dims, [heads, dims[0], features]), einops.rearrange(x, "b (h d) -> h b d", h=3)
    )


def test_a_size_is_the_product_of_its_axes() -> None:
    dims = fresh((2, 12))
    regroup(dims[1], (3, 4))
    assert builder().size([*dims[0], *dims[1]]) == 24
    assert builder().size([]) == 1


def test_expressions_are_evaluated_over_arranged_leaves() -> None:
    rows, columns = Axis(3), Axis(4)
    graph = fx.Graph()
    node, scalar, flag = (graph.placeholder(name) for name in "xsm")
    values = {node: torch.rand(4, 3), scalar: 2, flag: torch.tensor([True, False, True])}
    node.meta["example_value"], flag.meta["example_value"] = values[node], values[flag]
    scalar.meta["example_value"] = 2
    x, s, m = sympy.Symbol("x0", real=True), sympy.Symbol("x1", real=True), sympy.Symbol("m2", integer=True)
    region = Region(Effects(graph))
    region.leaves.update(
        {
            x: Leaf(node, ((columns,), (rows,))),
            s: Leaf(scalar, ()),
            m: Leaf(flag, ((rows,),)),
        }
    )
    groups = [[rows], [columns]]
    here = Builder(values.__getitem__)

    def value(expression: sympy.Expr) -> Any:
        return here.evaluate(expression, region.leaves, groups, torch.float32)

    left, mask = values[node].t(), values[flag][:, None]
    torch.testing.assert_close(value(sympy.exp(x) * s + 1), left.exp() * 2 + 1)
    torch.testing.assert_close(value(x**2 / 3 - x), left**2 / 3 - left)
    torch.testing.assert_close(value(m * x), mask * left)
    torch.testing.assert_close(value(x - (1 - m) * 5), left - (~mask) * 5.0)
    torch.testing.assert_close(value(sympy.log(x) + sympy.tanh(x / s)), left.log() + (left / 2).tanh())
    torch.testing.assert_close(value(x / s), left / 2)
    torch.testing.assert_close(value(x * s**-1 + 1 / s), left / 2 + 0.5)
    assert value(m).dtype == torch.bool
    assert value(m * 2).dtype == torch.float32
    assert value(sympy.Integer(3)) == 3.0
    assert float(value(-INFINITY)) == -float("inf")
    with pytest.raises(LookupError):
        value(sympy.Function("unknown")(x))


def test_a_number_divided_by_a_symbolic_number_is_a_number() -> None:
    graph = fx.Graph()
    size = graph.placeholder("s")
    size.meta["example_value"] = 16
    s = sympy.Symbol("x0", real=True)
    region = Region(Effects(graph))
    region.leaves[s] = Leaf(size, ())
    value = Builder(lambda node: 16).evaluate(1 / sympy.sqrt(s), region.leaves, [], torch.float32)
    assert float(value) == 0.25


# ---- nodes ----------------------------------------------------------------------------------------------------------


def graph_builder(module: fx.GraphModule, sources: dict[fx.Node, Dims], ambient: Ambient | None = None) -> GraphBuilder:
    return GraphBuilder(module.graph, output_of(module), ambient or Ambient(), sources)


def return_instead(module: fx.GraphModule, proxy: fx.Proxy) -> fx.GraphModule:
    """The graph with another result."""
    next(node for node in module.graph.nodes if node.op == "output").args = ((proxy.node,),)
    module.graph.lint()
    module.recompile()
    return module


def check_metadata(module: fx.GraphModule, created: Sequence[fx.Node], *inputs: Tensor) -> None:
    """The example values of new nodes have the shape, dtype and strides of what they compute."""
    known = symbols(module, *inputs)
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.run(*arguments(module, *inputs))
    for node in created:
        real, fake = interpreter.env[node], node.meta["example_value"]
        if not isinstance(real, Tensor):
            expected = as_size(fake)
            assert real == (expected if isinstance(expected, int) else expected.subs(known))
            continue
        shape = [size if isinstance(size, int) else size.subs(known) for size in shape_of(fake)]
        strides = [s if isinstance(s, int) else as_size(s) for s in fake.stride()]
        strides = [s if isinstance(s, int) else s.subs(known) for s in strides]
        assert (list(real.shape), real.dtype, list(real.stride())) == (shape, fake.dtype, strides)


@settings(max_examples=25)
@given(arrangements(missing=True), st.booleans())
def test_new_nodes_know_the_shape_and_strides_of_what_they_compute(case, expand: bool) -> None:
    dims, groups, names = case
    dims = tuple(tuple(axis for axis in dim if axis.size != 1) for dim in dims)
    groups = [[axis for axis in group if axis.size != 1] for group in groups]
    x = tensor_with(dims)
    module = capture(lambda x: x + 1, x)
    (source,) = placeholders(module)
    made = graph_builder(module, {source: dims})
    with module.graph.inserting_before(output_of(module)):
        arranged = made.arrange(made.value(source), dims, groups, expand=expand)
    return_instead(module, arranged)
    check_metadata(module, made.created, x)
    assert torch.equal(module(x)[0], rearranged(x, dims, groups, names, expand))
    assert all(node.meta.get("stack_trace") for node in made.created)


def test_symbolic_extents_are_read_from_where_they_are_known() -> None:
    x = torch.rand(5, 7, 12)
    module = capture(lambda x: x.sin(), x, dynamic=(0, 1))
    source = placeholders(module)[0]
    dims = fresh(shape_of(tensor_of(source)))
    (batch,), (length,), _ = dims
    heads, features = regroup(dims[2], (3, 4))
    guards = len(tensor_of(source).fake_mode.shape_env.guards)
    made = graph_builder(module, {source: dims})
    with module.graph.inserting_before(output_of(module)):
        arranged = made.arrange(made.value(source), dims, [[batch, *heads], [length], features])
        back = made.restore(arranged, [[batch, *heads], [length], features], dims)
    return_instead(module, back)
    check_metadata(module, made.created, x)
    assert torch.equal(module(*arguments(module, x))[0], x)
    assert len(tensor_of(source).fake_mode.shape_env.guards) == guards, "reading an extent added a guard"


def test_symbolic_graphs_run_at_other_sizes() -> None:
    x = torch.rand(5, 7, 12)
    module = capture(lambda x: x.sin(), x, dynamic=(0, 1))
    source = placeholders(module)[0]
    dims = fresh(shape_of(tensor_of(source)))
    heads, features = regroup(dims[2], (3, 4))
    made = graph_builder(module, {source: dims})
    with module.graph.inserting_before(output_of(module)):
        arranged = made.arrange(made.value(source), dims, [heads, [*dims[1], *dims[0]], features])
    return_instead(module, arranged)
    for shape in ((5, 7, 12), (2, 3, 12), (6, 4, 12)):
        other = torch.rand(shape)
        expected = einops.rearrange(other, "b t (h d) -> h (t b) d", h=3)
        assert torch.equal(module(*arguments(module, other))[0], expected)


def test_a_symbolic_extent_that_is_a_factor_of_a_dimension_is_divided_out() -> None:
    module = capture(lambda x: x.sin(), torch.rand(5, 14), dynamic=(0,))
    source = placeholders(module)[0]
    symbol = shape_of(tensor_of(source))[0]
    batch, heads = Axis(symbol), Axis(3)
    made = GraphBuilder(module.graph, output_of(module), Ambient(), {source: ((batch,), (Axis(14),))})
    with module.graph.inserting_before(output_of(module)):
        extent = made.extent(batch)
    assert isinstance(extent, fx.Proxy)
    assert as_size(extent.node.meta["example_value"]) == symbol
    assert made.extent(heads) == 3
    assert made.extent(batch) is extent


def test_an_extent_that_nothing_has_is_an_error() -> None:
    module = capture(lambda x: x.sin(), torch.rand(5, 14), dynamic=(0,))
    unknown = Axis(sympy.Symbol("s99", integer=True, positive=True))
    made = graph_builder(module, {})
    with pytest.raises(LookupError, match="s99"):
        made.extent(unknown)


def test_nodes_are_made_under_the_ambient_they_will_run_under() -> None:
    module = capture(lambda x: x @ x, torch.rand(4, 4))
    (source,) = placeholders(module)
    made = graph_builder(module, {}, Ambient((("cpu", torch.bfloat16, True, True),)))
    with module.graph.inserting_before(output_of(module)):
        product = torch.matmul(made.value(source), made.value(source))
    assert tensor_of(product.node).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_proxies_know_what_their_tensors_are() -> None:
    module = capture(lambda x: x.sin(), torch.rand(5, 12, dtype=torch.float64), dynamic=(0,))
    source = placeholders(module)[0]
    made = graph_builder(module, {})
    with module.graph.inserting_before(output_of(module)):
        proxy = made.value(source)
        assert isinstance(proxy, TensorProxy)
        assert (proxy.dtype, proxy.device) == (torch.float64, torch.device("cpu"))
        rows, columns = proxy.shape
    assert isinstance(rows, fx.Proxy)
    assert columns == 12


def test_a_result_without_a_known_layout_is_an_error_and_not_a_guess() -> None:
    dims = fresh((6,))
    with pytest.raises((LookupError, LayoutError)):
        builder().arrange(torch.rand(6), dims, [fresh((6,))[0]])
