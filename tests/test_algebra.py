"""Pointwise expressions: one meaning for all spellings, and the numbers that eager gives."""

# ruff: noqa: PLW0108 - a lambda names the inputs that it is given, and Dynamo traces it as a user's function

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.algebra import MOST_PARTS, Region
from lz_compile.passes.formula.axes import Axis, LayoutError, atoms, axes_of, fresh
from lz_compile.passes.formula.expressions import (
    DROPOUT,
    FLOORED,
    INFINITY,
    NAN_TO_NUM,
    indicators,
    is_indicator,
    number,
    reduce_indicators,
    tidy,
)
from lz_compile.passes.formula.layout import read_input_dims
from lz_compile.passes.graph.refusal import MutatedError
from lz_compile.passes.graph.view import read, tensor_of
from lz_compile.passes.rewriting.builder import Builder
from tests.graphs import (
    at,
    call_named,
    capture,
    effects_of,
    in_order,
    output_of,
    outputs_of,
    parameters_of,
    placeholders,
    run,
    symbols,
)

ROWS, COLUMNS = 3, 4
EPSILON = 1e-6


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1

    return {
        "a": rand(ROWS, COLUMNS),
        "b": rand(COLUMNS),
        "c": rand(ROWS, 1),
        "d": rand(),
        "m": rand(ROWS, COLUMNS) > 0,
        "n": rand(1, COLUMNS) > 0,
        "q": rand(ROWS, 5),
        "k": rand(5, COLUMNS),
    }


INPUTS = inputs()


def captured(fn: Callable[..., Any]) -> fx.GraphModule:
    """The graph of ``fn``, whose parameter names choose its inputs."""
    return capture(fn, *[INPUTS[name] for name in parameters_of(fn)])


def expressed(module: fx.GraphModule, *, expand_masks: bool = True) -> tuple[sympy.Expr, Region, tuple[Any, ...]]:
    """The output as an expression over the leaves of a region, at fresh axes."""
    region, node = Region(effects_of(module), expand_masks=expand_masks), output_of(module)
    dims = fresh(shape_of(tensor_of(node)))
    reader = next(iter(node.users))
    return region.express(node, dims, reader), region, dims


def canonical(fn: Callable[..., Any], *, expand_masks: bool = True) -> sympy.Expr:
    """The expression with leaves named by what they are and how they lie in the result."""
    expression, region, dims = expressed(captured(fn), expand_masks=expand_masks)
    place = {axis: str(position) for position, dim in enumerate(dims) for axis in atoms(dim)}

    def described(node: fx.Node, leaf_dims: Any) -> str:
        call = read(node)
        while call is not None and (source := read_input_dims(call, leaf_dims)) is not None:
            node, leaf_dims = call.input, source
            call = read(node)
        runs = [list(dict.fromkeys(place.get(axis, "summed") for axis in atoms(dim))) for dim in leaf_dims if dim]
        return f"{node.name if call is None else call.name}{runs}"

    names = {}
    for symbol, leaf in region.leaves.items():
        product = leaf.contraction
        factors = () if product is None else (product.left, product.right)
        name = " ".join(sorted(described(f.node, f.dims) for f in factors)) or described(leaf.node, leaf.dims)
        names[symbol] = sympy.Symbol(f"{leaf.kind}:{name}", real=True, integer=symbol.is_integer)
    return expression.xreplace(names)


def are_equal(first: sympy.Expr, second: sympy.Expr) -> bool:
    difference = reduce_indicators(first - second)
    return difference == 0 or sympy.simplify(difference) == 0


EQUAL: Mapping[str, Sequence[Callable[..., Tensor]]] = {
    "normalising": [
        lambda a, c: a * torch.rsqrt(c * c + EPSILON),
        lambda a, c: a / torch.sqrt(c.square() + EPSILON),
        lambda a, c: a * (c.pow(2) + EPSILON) ** -0.5,
        lambda a, c: a / (c**2 + EPSILON).pow(0.5),
        lambda a, c: torch.div(a, torch.add(c * c, EPSILON).sqrt()),
        lambda a, c: a * torch.pow(c.square() + EPSILON, -0.5),
        lambda a, c: a * (c.square() + EPSILON).sqrt().reciprocal(),
        lambda a, c: torch.rsqrt(EPSILON + c * c) * a,
    ],
    "mixing": [
        lambda a, b, c: c * a + (1 - c) * b,
        lambda a, b, c: b + c * (a - b),
        lambda a, b, c: torch.lerp(b.expand_as(a), a, c.expand_as(a)),
        lambda a, b, c: a - (1 - c) * (a - b),
        lambda a, b, c: torch.addcmul(b, c, a - b),
        lambda a, b, c: a.mul(c).add(b.mul(torch.rsub(c, 1))),
        lambda a, b, c: torch.sub(a * c, (c - 1) * b),
    ],
    "choosing": [
        lambda a, b, m: torch.where(m, a, b),
        lambda a, b, m: a.where(m, b),
        lambda a, b, m: torch.where(~m, b, a),
        lambda a, b, m: torch.where(m.logical_not(), b, a),
        lambda a, b, m: torch.where(m == 0, b, a),
        lambda a, b, m: torch.where(m.double() == 0, b, a),
        lambda a, b, m: torch.where(m.double() != 1, b, a),
        lambda a, b, m: m * a + ~m * b,
        lambda a, b, m: m.double() * a + (1 - m.double()) * b,
        lambda a, b, m: a * m.to(a.dtype) + b * (1.0 - m.to(a.dtype)),
        lambda a, b, m: b + m.type_as(a) * (a - b),
        lambda a, b, m: torch.where((1 - m.double()).bool(), b, a),
    ],
    "filling": [
        lambda a, m: a.masked_fill(m, -10000.0),
        lambda a, m: torch.masked_fill(a, m, -10000.0),
        lambda a, m: torch.where(m, -10000.0, a),
        lambda a, m: torch.where(m, torch.tensor(-10000.0, dtype=a.dtype), a),
        lambda a, m: torch.where(m, torch.full_like(a, -10000.0), a),
        lambda a, m: a.masked_fill(m, torch.tensor(-10000.0, dtype=a.dtype)),
        lambda a, m: a * ~m + m * -1e4,
        lambda a, m: a * (1 - m.double()) - 10000 * m.double(),
    ],
    "both_masks": [
        lambda a, m, n: a * (m & n),
        lambda a, m, n: a * m * n,
        lambda a, m, n: a * torch.logical_and(m, n),
        lambda a, m, n: a * m.logical_and(n).double(),
        lambda a, m, n: a * ~(~m | ~n),
        lambda a, m, n: torch.where(m, torch.where(n, a, 0.0), 0.0),
        lambda a, m, n: a.masked_fill(~m, 0).masked_fill(~n, 0),
        lambda a, m, n: a * (m & n & m),
    ],
    "either_mask": [
        lambda a, m, n: a * (m | n),
        lambda a, m, n: a * torch.logical_or(m, n),
        lambda a, m, n: a * ~(~m & ~n),
        lambda a, m, n: torch.where(m | n, a, 0.0),
        lambda a, m, n: torch.where(m, a, torch.where(n, a, 0.0)),
    ],
    "scaling": [
        lambda a: a * 0.5,
        lambda a: 0.5 * a,
        lambda a: a / 2,
        lambda a: a / 2.0,
        lambda a: a.mul(0.5),
        lambda a: torch.mul(a, 0.5),
        lambda a: a * torch.tensor(0.5, dtype=a.dtype),
        lambda a: a * torch.full((), 0.5, dtype=a.dtype),
        lambda a: a * a.new_full((1,), 0.5),
        lambda a: a * torch.full_like(a, fill_value=0.5),
        lambda a: a * a.new_tensor(0.5),
        lambda a: a * torch.scalar_tensor(0.5),
        lambda a: a - a * 0.5,
        lambda a: a * math.sqrt(4) ** -2 * 2,
        lambda a: -(a * -0.5),
        lambda a: torch.sub(a, a, alpha=0.5),
        lambda a: a * torch.sqrt(torch.tensor(0.25)),
    ],
    "constants_of_ones_and_zeros": [
        lambda a: a + 1,
        lambda a: a + torch.ones(COLUMNS),
        lambda a: a + torch.ones_like(a),
        lambda a: a + a.new_ones(1) + torch.zeros_like(a),
        lambda a: a + torch.zeros(1).exp(),
    ],
    "subtracting": [
        lambda a, b: a - b,
        lambda a, b: a.sub(b),
        lambda a, b: torch.rsub(b, a),
        lambda a, b: a + -b,
        lambda a, b: a.add(b, alpha=-1),
        lambda a, b: -(b - a),
    ],
    "exponentials": [
        lambda a: torch.exp(a),
        lambda a: a.exp(),
        lambda a: 1 / torch.exp(-a),
        lambda a: torch.exp(a * 0.5) ** 2,
        lambda a: torch.exp(torch.log(torch.exp(a))),
    ],
    "powers_of_two": [lambda a: torch.exp2(a), lambda a: torch.exp(a * math.log(2.0)), lambda a: torch.special.exp2(a)],
    "casts": [
        lambda a: a * 2,
        lambda a: a.double() * 2,
        lambda a: a.to(torch.float64) * 2,
        lambda a: (a.float() * 2).double(),
        lambda a: a.type_as(a).to(dtype=torch.float64) * 2,
        lambda a: a.half().to(a.dtype) * 2,
    ],
    "layouts": [
        lambda a, b: a + b,
        lambda a, b: (a.t() + b[:, None]).t(),
        lambda a, b: (a.reshape(ROWS, 2, 2) + b.view(2, 2)).flatten(1),
        lambda a, b: (a.unsqueeze(0) + b).squeeze(0),
        lambda a, b: a + b.expand(ROWS, COLUMNS),
        lambda a, b: a + b.unsqueeze(0).repeat(ROWS, 1),
        lambda a, b: (a.contiguous() + b[None].clone()).mT.mT.clone(),
    ],
    "products": [
        lambda q, k: q @ k * 0.5,
        lambda q, k: torch.matmul(q, k) / 2,
        lambda q, k: torch.mm(q, k).mul(0.5),
        lambda q, k: (k.t() @ q.t()).t() * 0.5,
        lambda q, k: torch.einsum("ik,kj->ij", q, k) * 0.5,
        lambda q, k: torch.addmm(torch.zeros(COLUMNS, dtype=torch.float64), q, k, alpha=0.5),
        lambda q, k: torch.baddbmm(q.new_zeros(1, 1, 1), q[None], k[None], beta=0, alpha=0.5).squeeze(0),
    ],
    "products_and_bias": [
        lambda q, k, b: q @ k * 2 + b,
        lambda q, k, b: torch.addmm(b, q, k, alpha=2),
        lambda q, k, b: torch.baddbmm(b, q[None], k[None], alpha=2).squeeze(0),
        lambda q, k, b: torch.add(b, q @ k, alpha=2),
        lambda q, k, b: 2 * torch.addmm(b, q, k, beta=0.5),
    ],
    "bounds_below": [
        lambda a: torch.clamp(a, min=-1e38),
        lambda a: a.clamp(min=-1e38),
        lambda a: a.clip(-1e38),
        lambda a: a.clamp_min(-1e38),
        lambda a: torch.maximum(a, torch.tensor(-1e38, dtype=a.dtype)),
        lambda a: torch.max(a, torch.tensor(-1e38, dtype=a.dtype)),
        lambda a: torch.maximum(a, torch.full_like(a, -1e38)),
    ],
}


@pytest.mark.parametrize("case", EQUAL)
def test_all_spellings_are_one_expression(case: str) -> None:
    first, *others = [canonical(fn) for fn in EQUAL[case]]
    different = [position for position, other in enumerate(others, 1) if not are_equal(first, other)]
    assert not different, f"{first} against {[others[position - 1] for position in different]}"


DIFFERENT: Sequence[tuple[Callable[..., Tensor], Callable[..., Tensor]]] = [
    (lambda a, b: a - b, lambda a, b: b - a),
    (lambda a, b, m: torch.where(m, a, b), lambda a, b, m: torch.where(m, b, a)),
    (lambda a, c: a * torch.rsqrt(c * c + EPSILON), lambda a, c: a * torch.rsqrt(c * c)),
    (lambda k: k[:4] @ k[:4], lambda k: k[:4].t() @ k[:4]),
    (lambda a, m, n: a * (m & n), lambda a, m, n: a * (m | n)),
    (lambda a: a.masked_fill(a > 0, 0.0), lambda a: a.masked_fill(a < 0, 0.0)),
    (lambda a: a // 1, lambda a: a / 1),
    (lambda a: torch.div(a, 2, rounding_mode="floor"), lambda a: a / 2),
    (lambda a: a.clamp(min=-1e38), lambda a: a.clamp(min=-1e38, max=0)),
    (lambda a: a.clamp(min=0), lambda a: a),
    (lambda a: torch.add(a, a, alpha=2), lambda a: a + a),
    (lambda a: a.nan_to_num(nan=1.0), lambda a: a.nan_to_num()),
    (lambda a: a.to(torch.int64).double(), lambda a: a),
    (lambda a: a.bool().double(), lambda a: a),
    (lambda a: F.dropout(a, 0.5), lambda a: a),
]


@pytest.mark.parametrize("pair", range(len(DIFFERENT)))
def test_what_computes_something_else_is_another_expression(pair: int) -> None:
    first, second = (canonical(fn) for fn in DIFFERENT[pair])
    assert not are_equal(first, second)


# ---- against eager --------------------------------------------------------------------------------------------------

_NUMBERS: Mapping[Any, Callable[..., Any]] = {
    sympy.exp: torch.exp,
    sympy.log: torch.log,
    sympy.tanh: torch.tanh,
    sympy.Abs: torch.abs,
    FLOORED: lambda x, _: x,
    NAN_TO_NUM: torch.nan_to_num,
}


def computed(expression: sympy.Expr, leaves: Mapping[sympy.Symbol, Tensor]) -> Tensor:
    """The numbers of an expression, one function at a time, in float64."""
    if expression is INFINITY:
        return torch.tensor(math.inf, dtype=torch.float64)
    if isinstance(expression, sympy.Symbol):
        return leaves[expression].double()
    if expression.is_number:
        return torch.tensor(float(expression), dtype=torch.float64)
    arguments = [computed(argument, leaves) for argument in expression.args]
    if isinstance(expression, sympy.Add):
        return sum(arguments[1:], arguments[0])
    if isinstance(expression, sympy.Mul):
        return math.prod(arguments[1:], start=arguments[0])
    if isinstance(expression, sympy.Pow):
        return torch.pow(*arguments)
    return _NUMBERS[expression.func](*arguments)


def check(module: fx.GraphModule, given_inputs: Sequence[Tensor], node: fx.Node) -> None:
    """``node`` in eager is its expression over the leaves; so it is when the builder evaluates it."""
    values, known = run(module, *given_inputs), symbols(module, *given_inputs)
    region = Region(effects_of(module), expand_masks=True)
    dims = fresh(shape_of(tensor_of(node)))
    expression = region.express(node, dims)
    axes = axes_of(dims)
    leaves = {}
    for symbol, leaf in region.leaves.items():
        value = values[leaf.node]
        leaves[symbol] = at(value, leaf.dims, axes, known) if isinstance(value, Tensor) else torch.tensor(float(value))
    expected = at(values[node], dims, axes, known).double()
    numbers = computed(expression, leaves)
    torch.testing.assert_close(numbers.expand_as(expected), expected, rtol=1e-9, atol=1e-9)
    if expression.has(FLOORED, NAN_TO_NUM, sympy.Abs) or not expression.free_symbols:
        return
    sizes = {axis: axis.size if isinstance(axis.size, int) else int(axis.size.subs(known)) for axis in axes}
    built = Builder(values.__getitem__, sizes=sizes).evaluate(
        expression, region.leaves, [[axis] for axis in axes], torch.float64
    )
    torch.testing.assert_close(built.double().expand_as(expected), expected, rtol=1e-9, atol=1e-9)


FLOATS = ["a", "b", "c", "d", "a.square()", "b[None]", "c.expand(3, 4)", "torch.tensor(0.5, dtype=torch.float64)"]
MASKS = ["m", "n", "~m", "m & n", "m | ~n", "m.logical_and(n)", "torch.logical_or(n, m)", "m == 0", "n != 0", "m.eq(1)"]
GROW: Sequence[str] = [
    "({0} + {1})",
    "({0} - {1})",
    "({0} * {1})",
    "({0} / ({1}.square() + 1.5))",
    "({0} * torch.rsqrt({1} * {1} + 0.5))",
    "({0} / torch.sqrt({1}.square() + 0.5))",
    "({0} * ({1}**2 + 0.5) ** -0.5)",
    "(1 - {0})",
    "(2.0 / ({0}.abs() + 1))",
    "(-{0})",
    "torch.tanh({0})",
    "torch.exp(torch.tanh({0}))",
    "torch.exp2(torch.tanh({0}))",
    "torch.log({0} * {0} + 1)",
    "torch.add({0}, {1}, alpha=0.5)",
    "torch.sub({0}, {1}, alpha=-3)",
    "torch.rsub({0}, {1}, alpha=2)",
    "torch.addcmul({0}, {1}, {2}, value=0.25)",
    "torch.lerp(*torch.broadcast_tensors({0}, {1}), 0.25)",
    "torch.where({3}, {0}, {1})",
    "torch.where({3}, {0}, 0.25)",
    "torch.where({3}, 2, {0})",
    "({0} + torch.zeros_like(a)).masked_fill({3}, -3.5)",
    "({0} * ({3}))",
    "({0} * (1 - ({3}).double()))",
    "({0} + (1.0 - ({3}).to(torch.float64)) * -7)",
    "({0} + torch.zeros_like(a)).t().contiguous().t()",
    "({0} + torch.zeros_like(a)).view(3, 2, 2).flatten(1)",
    "(({0} + torch.zeros_like(a)).t() * ({1} + torch.zeros_like(a)).mT).mT",
    "({0} + torch.zeros_like(a))[:, None].squeeze(1)",
    "({0}.reciprocal().tanh())",
    "torch.clamp({0}, min=-1e35)",
    "torch.nan_to_num({0})",
    "F.dropout({0}, 0.5, training=False)",
    "({0}).sin()",
]


@st.composite
def pointwise(draw: st.DrawFn) -> str:
    """An expression in torch code over the inputs."""
    pool = [draw(st.sampled_from(FLOATS)) for _ in range(3)]
    for _ in range(draw(st.integers(1, 5))):
        parts = [draw(st.sampled_from(pool[-4:])) for _ in range(3)]
        pool.append(draw(st.sampled_from(GROW)).format(*parts, draw(st.sampled_from(MASKS))))
    return pool[-1]


NAMES = ("a", "b", "c", "d", "m", "n")


def check_code(texts: Sequence[str]) -> None:
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(f"def program({', '.join(NAMES)}):\n    return [{', '.join(f'({text}) + 0 * a' for text in texts)}]", scope)
    module = capture(scope["program"], *[INPUTS[name] for name in NAMES])
    given_inputs = in_order(module, INPUTS)
    for node, text in zip(outputs_of(module), texts, strict=True):
        try:
            check(module, given_inputs, node)
        except AssertionError as error:
            raise AssertionError(f"{text}: {error}") from error


@pytest.mark.parametrize("rule", range(len(GROW)))
def test_every_pointwise_operation_computes_what_eager_does(rule: int) -> None:
    check_code([GROW[rule].format("a", "b", "c", mask) for mask in ("m", "n | m")])
    check_code([GROW[rule].format("c", "d", "b", "~n"), GROW[rule].format("d", "a", "d", "m & n")])


@settings(max_examples=25)
@given(st.lists(pointwise(), min_size=4, max_size=4))
def test_random_pointwise_expressions_compute_what_eager_does(texts: list[str]) -> None:
    check_code(texts)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: (a * b.tanh() + 1) / (a.square() + 1),
        lambda a, b: torch.where(a > b, a.t().t() * 2, b.expand_as(a)),
        lambda a, b: a * a.shape[0] + b / b.shape[-1],
        lambda a, b: (a.reshape(-1) * 2).view(a.shape) + b,
    ],
)
def test_expressions_of_symbolic_sizes_compute_what_eager_does(fn: Callable[..., Tensor]) -> None:
    given_inputs = torch.rand(5, 7, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    module = capture(fn, *given_inputs, dynamic=True)
    check(module, in_order(module, dict(zip("ab", given_inputs, strict=True))), output_of(module))


# ---- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "(m + n).double() * a",
        "torch.where(m + n, a, b)",
        "torch.add(m, n) * a",
        "(m * n).double() * a",
        "(m ^ n).double() * a",
        "torch.maximum(m, n).double() * a",
        "(m == n).double() * a",
        "(m != n).double() * a",
        "(m > 0).double() * a",
        "(m < 1).double() * a",
        "(m.double() + n.double()) * a",
        "(m.double() + n.double()).bool() * a",
        "(m.long() + n.long()) * a",
        "(m.double() + n.double() == 1) * a",
        "torch.logical_not(m.double() - n.double()) * a",
        "(a.bool() & m) * a",
        "((m | n) & ~(m & n)).double() * a",
        "(1 - m.double()).bool() * a",
        "m.double().masked_fill(n, 0.0) * a",
        "torch.where(m, n, ~n) * a",
        "(m.int() * n.int() == 0) * a",
        "((m & n) == 1) * a",
        "(m.double() * 0.5 == 0) * a",
        "(m == 0.5) * a",
        "m.logical_xor(n) * a",
        "torch.full((4,), True) * a * m",
        "torch.ones(3, 4, dtype=torch.bool).tril() * a",
    ],
)
def test_arithmetic_on_booleans_means_what_it_does_in_torch(text: str) -> None:
    check_code([text])


@pytest.mark.parametrize(
    "text",
    [
        "torch.full((4,), 2.7, dtype=torch.int64) * a",
        "torch.full((4,), 5, dtype=torch.bool) * a",
        "torch.tensor(2.5, dtype=torch.int32) * a",
        "torch.full_like(m, 3) * a",
        "a.new_tensor(3, dtype=torch.int32) * a",
    ],
)
def test_a_constant_is_the_number_that_its_dtype_holds(text: str) -> None:
    check_code([text])


def test_what_takes_only_zero_and_one_is_an_indicator() -> None:
    m, n = sympy.Symbol("m0", real=True, integer=True), sympy.Symbol("m1", real=True, integer=True)
    x = sympy.Symbol("x2", real=True)
    for yes in (sympy.S.Zero, sympy.S.One, m, 1 - m, m * n, m + n - m * n, m * (1 - n)):
        assert is_indicator(yes)
    for no in (m + n, 2 * m, -m, m - n, x, m * x, sympy.Integer(2), sympy.Rational(1, 2), INFINITY, m * INFINITY):
        assert not is_indicator(no)


def test_indicators_are_listed_in_the_order_found() -> None:
    m9, m10 = (sympy.Symbol(name, real=True, integer=True) for name in ("m9", "m10"))
    x = sympy.Symbol("x3", real=True)
    assert indicators(m10 * x + m9 * INFINITY) == [m9, m10]


def test_powers_of_indicators_are_reduced_and_others_kept() -> None:
    m, x = sympy.Symbol("m0", real=True, integer=True), sympy.Symbol("x1", real=True)
    assert reduce_indicators(m**2 + m**3 * x**2) == m + m * x**2
    assert reduce_indicators((m + x) ** 2) == m + 2 * m * x + x**2
    assert reduce_indicators(m * (1 - m)) == 0


def test_whole_floats_are_integers_and_others_are_kept() -> None:
    x = sympy.Symbol("x0", real=True)
    assert tidy(sympy.Float(2.0) * x) == 2 * x
    assert tidy(sympy.Float(2.5) * x) == 2.5 * x
    assert tidy(sympy.Float(1e300) * x).has(sympy.Float)


def test_numbers_are_read_exactly_and_infinities_as_their_symbol() -> None:
    assert number(math.inf) is INFINITY
    assert number(-math.inf) == -INFINITY
    assert number(True) == 1
    assert number(0.1) == sympy.Float(0.1)
    assert float(number(0.1)) == 0.1
    assert number(-3) == -3
    for no in (math.nan, "1", None, 1j):
        with pytest.raises(LayoutError):
            number(no)


def test_infinite_fills_keep_their_sign_behind_an_indicator() -> None:
    expression, region, _ = expressed(captured(lambda a, m: a.masked_fill(m, float("-inf"))))
    (flag,) = indicators(expression)
    assert reduce_indicators(expression.xreplace({flag: sympy.S.One})) == -INFINITY
    kept = reduce_indicators(expression.xreplace({flag: sympy.S.Zero}))
    assert region.leaves[kept].node.name == "l_a_"


def test_a_factor_that_is_a_mask_is_noted() -> None:
    for fn, is_noted in [
        (lambda a, m: a * m, True),
        (lambda a, m: (1 - m.double()) * a, True),
        (lambda a, m: torch.where(m, a, 0.0), False),
        (lambda a, m: a * 2 + torch.where(m, a, 0.0), False),
    ]:
        _, region, _ = expressed(captured(fn))
        assert region.multiplies_masks is is_noted


# ---- leaves ---------------------------------------------------------------------------------------------------------


def test_values_without_a_contraction_are_leaves_unless_masks_are_expanded() -> None:
    module = captured(lambda q, k, b: q @ k + b.exp() * 2)
    short, region, _ = expressed(module, expand_masks=False)
    assert {leaf.node.name for leaf in region.leaves.values()} == {"matmul", "mul"}
    assert len(short.free_symbols) == 2
    long, region, _ = expressed(module)
    assert {leaf.node.name for leaf in region.leaves.values()} == {"matmul", "l_b_"}
    assert long.has(sympy.exp)


def test_reductions_and_softmaxes_are_leaves_of_their_kind() -> None:
    for fn, kind in [
        (lambda a: a.softmax(-1) * 2, "softmax"),
        (lambda a: a.amax(-1) + 1, "amax"),
        (lambda a: a.max(-1)[0] + 1, "amax"),
        (lambda a: a.max(dim=-1).values + 1, "amax"),
        (lambda a: a.sum(-1) + 1, "sum"),
        (lambda a: a.logsumexp(-1) + 1, "logsumexp"),
        (lambda a: a.sin() + 1, "tensor"),
    ]:
        _, region, _ = expressed(captured(fn))
        assert [leaf.kind for leaf in region.leaves.values()] == [kind]


def test_a_log_softmax_is_the_logarithm_of_a_softmax() -> None:
    expression, region, _ = expressed(captured(lambda a: a.log_softmax(-1) + 1))
    ((symbol, leaf),) = region.leaves.items()
    assert expression == sympy.log(symbol) + 1
    assert leaf.kind == "softmax"


def test_the_indices_of_a_maximum_are_not_its_values() -> None:
    _, region, _ = expressed(captured(lambda a: a.max(-1)[1] + 1))
    assert [leaf.kind for leaf in region.leaves.values()] == ["tensor"]


def test_a_tensor_read_twice_in_one_layout_is_one_leaf_and_in_two_layouts_two() -> None:
    _, region, _ = expressed(captured(lambda a: a + a.exp() + a.t().t()))
    assert len(region.leaves) == 1
    _, region, _ = expressed(captured(lambda q: q[:, :3] + q[:, :3].t()))
    assert len(region.leaves) == 2


def test_a_leaf_is_the_same_after_one_of_its_axes_was_cut() -> None:
    def fn(a: Tensor) -> Tensor:
        return a + (a.view(ROWS, 2, 2) * 2).flatten(1)

    _, region, _ = expressed(captured(fn))
    assert len(region.leaves) == 1


def _in_one_step(q: Tensor) -> Tensor:
    with torch.no_grad():
        halved = q / 2
    return halved + q


def _in_two_steps(q: Tensor) -> Tensor:
    with torch.no_grad():
        halved = q / 2
        turned = -halved
    return turned + q


def _read_without_gradients_only(q: Tensor) -> Tensor:
    with torch.no_grad():
        return -(q / 2)


@pytest.mark.parametrize(("fn", "leaves"), [(_in_one_step, 2), (_in_two_steps, 2), (_read_without_gradients_only, 1)])
def test_what_was_made_without_gradients_is_not_read_through(fn: Callable[..., Tensor], leaves: int) -> None:
    """However far up it is that something has one: what is read through has a gradient."""
    module = capture(fn, INPUTS["q"].clone().requires_grad_())
    _, region, _ = expressed(module)
    assert len(region.leaves) == leaves


def test_dropout_stays_with_its_probability_and_vanishes_where_it_does_nothing() -> None:
    expression, region, _ = expressed(captured(lambda a: F.dropout(a, 0.25) * 2))
    (symbol,) = region.leaves
    assert expression == 2 * DROPOUT(symbol, sympy.Float(0.25))
    for fn in (
        lambda a: F.dropout(a, 0.25, training=False) + 0,
        lambda a: F.dropout(a, 0.0) + 0,
        lambda a: F.dropout(a, 0.25, False) + 0,
        lambda a: torch.dropout(a, 0.25, train=False) + 0,
    ):
        expression, region, _ = expressed(captured(fn))
        assert [expression] == list(region.leaves)


def test_only_what_replaces_nan_by_zero_is_read_as_such() -> None:
    assert canonical(lambda a: torch.nan_to_num(a)).has(NAN_TO_NUM)
    assert canonical(lambda a: torch.nan_to_num(a, 0.0)).has(NAN_TO_NUM)
    assert not canonical(lambda a: torch.nan_to_num(a, nan=1.0)).has(NAN_TO_NUM)


def test_constants_without_a_reading_are_refused() -> None:
    module = captured(lambda a: a.masked_fill(a > 0, float("nan")))
    with pytest.raises(LayoutError):
        expressed(module)


# ---- in-place operations --------------------------------------------------------------------------------------------


def check_leaves_at_the_end(fn: Callable[..., Tensor], *, expand_masks: bool = True) -> None:
    """The expression over the leaves *as they are when the graph has run* is the output, or somebody says that it is not.

    A rewrite reads leaves at the end of what it replaces. It asks ``writes`` and ``overwritten_after`` for every leaf.
    """
    module = captured(fn)
    try:
        expression, region, dims = expressed(module, expand_masks=expand_masks)
    except MutatedError:
        return
    effects, output = effects_of(module), output_of(module)
    end = next(iter(output.users))
    readers = {leaf.node: region.readers.get(leaf.node, leaf.node) for leaf in region.leaves.values()}
    if any(
        effects.writes(reader, node) or effects.overwritten_after(node, reader, end) for node, reader in readers.items()
    ):
        return
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.run(*[value.clone() for value in in_order(module, INPUTS)])
    axes = axes_of(dims)
    leaves = {s: at(interpreter.env[leaf.node], leaf.dims, axes) for s, leaf in region.leaves.items()}
    expected = at(interpreter.env[output], dims, axes)
    torch.testing.assert_close(computed(expression, leaves).expand_as(expected), expected)


def _scaled_in_place(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k
    scores *= 0.5
    scores.add_(1)
    return scores + 0


def _masked_in_place(q: Tensor, k: Tensor, m: Tensor) -> Tensor:
    scores = q @ k
    scores.masked_fill_(m, -3.0)
    return scores * 2


def _assigned(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k
    scores[:, 0] = 0.5
    return scores * 2


def _viewed(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k
    scores.view(-1).mul_(3)
    return scores * 2


def _bias_scaled_in_place(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    bias = b.sin()
    bias.mul_(2)
    return q @ k + bias


def _bias_assigned(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    bias = b.sin()
    bias[1:3] = -7.0
    return q @ k + bias


def _bias_assigned_and_scaled(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    bias = b.sin()
    bias[1:3] = -7.0
    bias.mul_(2)
    return q @ k + bias


def _bias_used_before_and_after(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    bias = b.sin()
    scores = q @ k + bias
    bias[1:3] = -7.0
    return scores + bias


def _input_scaled(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    scores = q @ k + b
    b.mul_(3)
    return scores * b


def _input_scaled_before(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    b.mul_(3)
    return q @ k + b


def _zeros_assigned(q: Tensor, k: Tensor) -> Tensor:
    bias = q.new_zeros(COLUMNS)
    bias[1:3] = -7.0
    return q @ k + bias


def _zeros_filled(q: Tensor, k: Tensor, n: Tensor) -> Tensor:
    bias = q.new_zeros(1, COLUMNS)
    bias.masked_fill_(n, -7.0)
    return q @ k + bias


def _constant_overwritten_through_a_view(q: Tensor, k: Tensor) -> Tensor:
    bias = q.new_zeros(1, COLUMNS)
    bias.view(-1)[0] = -7.0
    return q @ k + bias


def _relu_by_position(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    bias = b * 2
    F.relu(bias, True)
    return q @ k + bias


def _floor_divided(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    bias = alias = b * 7
    alias //= 2
    return q @ k + bias


def _alias_in_eval_dropout(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    bias = b * 2
    dropped = F.dropout(bias, 0.5, training=False)
    dropped.add_(1)
    return q @ k + bias


def _addmm_in_place(q: Tensor, k: Tensor, a: Tensor) -> Tensor:
    scores = a.sin()
    scores.addmm_(q, k)
    return scores * 2


IN_PLACE = [
    _scaled_in_place,
    _masked_in_place,
    _assigned,
    _viewed,
    _bias_scaled_in_place,
    _bias_assigned,
    _bias_assigned_and_scaled,
    _bias_used_before_and_after,
    _input_scaled,
    _input_scaled_before,
    _zeros_assigned,
    _zeros_filled,
    _constant_overwritten_through_a_view,
    _relu_by_position,
    _floor_divided,
    _alias_in_eval_dropout,
    _addmm_in_place,
]


@pytest.mark.parametrize("expand_masks", [False, True])
@pytest.mark.parametrize("fn", IN_PLACE)
def test_leaves_hold_what_the_expression_needs_when_it_is_evaluated(
    fn: Callable[..., Tensor], expand_masks: bool
) -> None:
    check_leaves_at_the_end(fn, expand_masks=expand_masks)


def test_in_place_chains_on_scores_are_the_plain_expression() -> None:
    assert are_equal(canonical(_scaled_in_place), canonical(lambda q, k: (q @ k) * 0.5 + 1))
    assert are_equal(canonical(_masked_in_place), canonical(lambda q, k, m: (q @ k).masked_fill(m, -3.0) * 2))


def test_scores_overwritten_in_part_are_refused() -> None:
    for fn in (_assigned, _viewed):
        with pytest.raises(MutatedError):
            expressed(captured(fn))


def test_the_first_reader_of_a_value_is_remembered() -> None:
    module = captured(lambda q, k, b: (q @ k + b) * b)
    _, region, _ = expressed(module, expand_masks=False)
    assert region.readers[placeholders(module)[2]] is call_named(module, "add").node


def test_interior_nodes_hold_the_axes_that_they_were_read_with() -> None:
    module = captured(lambda a: (a.t() * 2).t() + 1)
    _, region, dims = expressed(module)
    assert region.interior[call_named(module, "mul").node] == dims[::-1]
    assert region.interior[call_named(module, "add").node] == dims
    assert placeholders(module)[0] not in region.interior


def test_reaching_stops_at_what_is_neither_pointwise_nor_layout() -> None:
    module = captured(lambda q, k: (q @ k).sin() + (q @ k).exp().t().t() * 2)
    region = Region(effects_of(module))
    goal = frozenset({"matmul"})
    assert not region.reaches(call_named(module, "sin").node, goal)
    assert region.reaches(call_named(module, "exp").node, goal)
    assert region.reaches(output_of(module), goal)
    assert not region.reaches(placeholders(module)[0], goal)


def test_a_leafs_axes_are_those_of_its_dimensions() -> None:
    _, region, dims = expressed(captured(lambda a, b, c, d: a + b + c + d))
    rows, columns = (set(dim) for dim in dims)
    axes = {leaf.node.name: set(leaf.axes) for leaf in region.leaves.values()}
    assert axes == {"l_a_": rows | columns, "l_b_": columns, "l_c_": rows, "l_d_": set()}
    assert all(isinstance(axis, Axis) for found in axes.values() for axis in found)


def _repeated(step: Callable[[Tensor, Tensor], Tensor], steps: int) -> Callable[..., Tensor]:
    def repeated(a: Tensor, b: Tensor) -> Tensor:
        for _ in range(steps):
            a = step(a, b)
        return a

    return repeated


#: Whose expressions grow with every step: as they are, or once they are multiplied out.
GROWING: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "read twice": lambda a, b: a * b + a.exp(),
    "a product of sums": lambda a, b: a * (b.tanh() + a.exp()),
    "a power of a sum": lambda a, b: (a + b).square(),
    "a quotient of sums": lambda a, b: (a + b) / (a.square() + b.exp()),
    "a function of a sum": lambda a, b: (a + b).tanh() + (a + 2 * b).exp(),
    "rows of each other": lambda a, b: a + a[0] * b,
}


@pytest.mark.parametrize("name", GROWING)
def test_a_graph_is_read_in_linear_time_and_no_expression_grows_beyond_a_bound(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    express = Region.express

    def counted(region: Region, node: Any, dims: Any, reader: fx.Node | None = None) -> sympy.Expr:
        nonlocal reads
        reads += 1
        if reads >= 20 * steps:
            pytest.fail("a value is read again and again", pytrace=False)
        found = express(region, node, dims, reader)
        if region.facts(found).parts > MOST_PARTS:  # printing it would take for ever
            pytest.fail("an expression has more parts than it may", pytrace=False)
        return found

    monkeypatch.setattr(Region, "express", counted)
    for steps in (16, 32):
        reads = 0
        _, region, _ = expressed(captured(_repeated(GROWING[name], steps)))
    assert name == "rows of each other" or any(leaf.kind == "large" for leaf in region.leaves.values())


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b, c, d: (a + b) * (c + d) * (a + d + 2),
        lambda a, b, c: (a + b + c) ** 3,
        lambda a, b: (a + b).exp() * (a + b.exp()),
        lambda a, b, c: (a * b * c + c) * 3,
        lambda a, b: 1 / (a + b).square(),
        lambda m, a, b: torch.where(m, a + b, a * b),
    ],
)
def test_parts_are_counted_as_they_are_multiplied_out(fn: Callable[..., Tensor]) -> None:
    expression, region, _ = expressed(captured(fn))
    facts, expanded = region.facts(expression), sympy.expand(expression)
    assert facts.parts >= len(sympy.Add.make_args(expanded))
    assert facts.symbols == expression.free_symbols
    assert facts.numbers == expression.atoms(sympy.Number)
