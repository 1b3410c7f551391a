"""Every spelling of a sum of products, rebuilt from nothing but its axes."""

# ruff: noqa: PLW0108 - a lambda names the inputs that it is given, and Dynamo traces it as a user's function

from __future__ import annotations

import contextlib
import string
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Dims, atoms, axes_of, fresh
from lz_compile.passes.formula.contraction import Contraction, Factor
from lz_compile.passes.graph.refusal import MutatedError
from lz_compile.passes.graph.view import read, tensor_of
from tests.graphs import capture, effects_of, in_order, number_of, output_of, outputs_of, parameters_of, run, symbols


def contraction_of(module: fx.GraphModule, node: fx.Node | None = None) -> Contraction | None:
    """The reading of the last call of the graph."""
    node = node or output_of(module)
    region = Region(effects_of(module))
    call = read(node)
    assert call is not None
    return contraction.read(region, call, fresh(shape_of(tensor_of(node))))


def rebuilt(found: Contraction, values: dict[fx.Node, Any], known: Any) -> Tensor:
    """The product as ``torch.einsum`` over one letter per axis, plus the addend."""
    letters: dict[Any, str] = {}

    def flat(tensor: Tensor, dims: Dims) -> tuple[Tensor, str]:
        axes = [axis for dim in dims for axis in atoms(dim)]
        for axis in axes:
            letters.setdefault(axis, string.ascii_letters[len(letters)])
        return tensor.reshape([number_of(axis.size, known) for axis in axes]), "".join(letters[axis] for axis in axes)

    def product_of(factor: Factor) -> tuple[Tensor, str]:
        return flat(values[factor.node], factor.dims)

    (left, left_letters), (right, right_letters) = product_of(found.left), product_of(found.right)
    wanted = [axis for dim in found.dims for axis in atoms(dim)]
    summed = set(atoms(found.summed))
    assert not summed & set(wanted)
    assert set(letters) == summed | (set(letters) & set(wanted)), "an axis is neither summed nor in the result"
    present = [axis for axis in wanted if axis in letters]
    result = torch.einsum(f"{left_letters},{right_letters}->{''.join(letters[a] for a in present)}", left, right)
    shape = [number_of(axis.size, known) if axis in letters else 1 for axis in wanted]
    full = result.reshape(shape).expand([number_of(axis.size, known) for axis in wanted])
    result = float(found.coefficient) * full
    if found.addend is not None:
        node, dims, weight = found.addend
        added = values[node].reshape([number_of(a.size, known) for d in dims for a in atoms(d)])
        spread = [number_of(a.size, known) if a in {b for d in dims for b in atoms(d)} else 1 for a in wanted]
        result = result + float(weight) * added.reshape(spread)
    return result


def check(fn: Callable[..., Tensor], *inputs: Tensor, dynamic: bool | None = None) -> Contraction:
    """``fn`` is read as a contraction, and its axes give the same numbers."""
    module = capture(fn, *inputs, dynamic=dynamic)
    found = contraction_of(module)
    assert found is not None, "no contraction is read"
    compare(found, module, output_of(module), in_order(module, dict(zip(parameters_of(fn), inputs, strict=True))))
    return found


def compare(found: Contraction, module: fx.GraphModule, node: fx.Node, inputs: Sequence[Tensor]) -> None:
    values = run(module, *inputs)
    result = rebuilt(found, values, symbols(module, *inputs))
    torch.testing.assert_close(result.reshape(values[node].shape), values[node])


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


A, B = rand(2, 3, 5), rand(2, 5, 7)

SPELLINGS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "matrix_by_vector": (lambda a, b: a @ b, (rand(3, 5), rand(5))),
    "vector_by_vector": (lambda a, b: a @ b, (rand(5), rand(5))),
    "mv": (lambda a, b: torch.mv(a, b), (rand(3, 5), rand(5))),
    "inner": (lambda a, b: torch.inner(a, b), (rand(3, 5), rand(4, 5))),
    "vector_by_matrices": (lambda a, b: a @ b, (rand(3), rand(2, 4, 3, 5))),
    "matrices_by_vector": (lambda a, b: torch.matmul(a, b), (rand(2, 4, 3, 5), rand(5))),
    "dot": (lambda a, b: torch.dot(a, b), (rand(5), rand(5))),
    "inner_of_vectors": (lambda a, b: a.inner(b), (rand(5), rand(5))),
    "vector_of_one": (lambda a, b: a @ b, (rand(3, 1), rand(1))),
    "operator": (lambda a, b: a @ b, (A, B)),
    "matmul": (lambda a, b: torch.matmul(a, b), (A, B)),
    "method": (lambda a, b: a.matmul(b), (A, B)),
    "matmul_named": (lambda a, b: torch.matmul(input=a, other=b), (A, B)),
    "bmm": (lambda a, b: torch.bmm(a, b), (A, B)),
    "bmm_named": (lambda a, b: a.bmm(mat2=b), (A, B)),
    "mm": (lambda a, b: a.mm(b), (A[0], B[0])),
    "matmul_of_matrices": (lambda a, b: a @ b, (A[0], B[0])),
    "matmul_broadcast": (lambda a, b: a @ b, (rand(4, 1, 3, 5), B)),
    "matmul_matrix_right": (lambda a, b: a @ b, (A, B[0])),
    "matmul_matrix_left": (lambda a, b: a @ b, (A[0], B)),
    "matmul_one_summed": (lambda a, b: a @ b, (rand(2, 3, 1), rand(2, 1, 7))),
    "matmul_one_row": (lambda a, b: a @ b, (rand(2, 1, 5), B)),
    "matmul_square": (lambda a, b: a @ b, (rand(4, 4), rand(4, 4))),
    "matmul_with_itself": (lambda a: a @ a, (rand(4, 4),)),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b), (rand(2, 3, 7), A, B)),
    "baddbmm_scaled": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), (rand(2, 3, 7), A, B)),
    "baddbmm_broadcast": (lambda c, a, b: c.baddbmm(a, b, beta=2), (rand(1, 3, 1), A, B)),
    "baddbmm_row": (lambda c, a, b: torch.baddbmm(c, a, b), (rand(7), A, B)),
    "baddbmm_without_addend": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0, alpha=0.5), (rand(2, 3, 7), A, B)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b), (rand(3, 7), A[0], B[0])),
    "addmm_row": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (rand(7), A[0], B[0])),
    "addmm_named": (lambda c, a, b: torch.addmm(c, mat1=a, mat2=b), (rand(7), A[0], B[0])),
    "linear": (lambda a, b: F.linear(a, b), (A, rand(7, 5))),
    "linear_named": (lambda a, b: F.linear(input=a, weight=b), (A, rand(7, 5))),
    "linear_of_a_vector": (lambda a, b: F.linear(a, b), (rand(5), rand(7, 5))),
    "linear_one_output": (lambda a, b: F.linear(a, b), (A, rand(1, 5))),
    "einsum": (lambda a, b: torch.einsum("bik,bkj->bij", a, b), (A, B)),
    "einsum_transposed": (lambda a, b: torch.einsum("bik,bkj->jib", a, b), (A, B)),
    "einsum_list": (lambda a, b: torch.einsum("bik,bkj->bij", [a, b]), (A, B)),
    "einsum_implicit": (lambda a, b: torch.einsum("bik,bkj", a, b), (A, B)),
    "einsum_capitals": (lambda a, b: torch.einsum("BiK,BKj", a, b), (A, B)),
    "einsum_spaces": (lambda a, b: torch.einsum(" b i k , b k j -> b i j ", a, b), (A, B)),
    "einsum_ellipsis": (lambda a, b: torch.einsum("...ik,...kj->...ij", a, b), (A, B)),
    "einsum_ellipsis_ranks": (lambda a, b: torch.einsum("...ik,...kj->...ij", a, b), (rand(4, 1, 3, 5), B)),
    "einsum_ellipsis_implicit": (lambda a, b: torch.einsum("...ik,...kj", a, b), (A, B)),
    "einsum_ellipsis_one_side": (lambda a, b: torch.einsum("...k,jk->...j", a, b), (A, rand(7, 5))),
    "einsum_ellipsis_last": (lambda a, b: torch.einsum("k...,kj->j...", a, b), (rand(5, 2, 3), rand(5, 7))),
    "einsum_ellipsis_summed": (lambda a, b: torch.einsum("...k,...k->k", a, b), (A, rand(3, 5))),
    "einsum_one_side_summed": (lambda a, b: torch.einsum("bik,bkj->bj", a, b), (A, B)),
    "einsum_outer": (lambda a, b: torch.einsum("i,j->ij", a, b), (rand(3), rand(4))),
    "einsum_pointwise": (lambda a, b: torch.einsum("ij,ij->ij", a, b), (rand(3, 4), rand(3, 4))),
    "einsum_everything": (lambda a, b: torch.einsum("ij,ij->", a, b), (rand(3, 4), rand(3, 4))),
    "einsum_size_one_repeated": (lambda a, b: torch.einsum("ik,kj->ij", a, b), (rand(3, 1), rand(5, 4))),
    "multiply_sum": (lambda a, b: (a[:, :, :, None] * b[:, None]).sum(2), (A, B)),
    "multiply_sum_last": (lambda a, b: (a * b).sum(-1), (rand(2, 3, 1, 5), rand(2, 1, 7, 5))),
    "multiply_sum_keepdim": (lambda a, b: (a * b).sum(-1, keepdim=True), (rand(2, 3, 5), rand(3, 5))),
    "multiply_sum_named": (lambda a, b: torch.sum(torch.mul(a, other=b), dim=(0, -1)), (rand(2, 3, 5), rand(3, 5))),
    "multiply_sum_many": (lambda a, b: torch.mul(a, b).sum((0, 1)), (rand(2, 3, 5), rand(2, 1, 5))),
    "multiply_sum_axis": (lambda a, b: (a * b).sum(axis=1, keepdims=True), (rand(2, 3, 5), rand(3, 5))),
    "multiply_sum_of_one": (lambda a, b: (a * b).sum(-1), (rand(2, 3, 1), rand(2, 3, 1))),
    "multiply_sum_by_scalar_tensor": (lambda a, b: (a * b).sum(-1), (rand(2, 3, 5), rand(()))),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_the_axes_of_a_contraction_give_its_numbers(case: str) -> None:
    fn, inputs = SPELLINGS[case]
    check(fn, *inputs)


def test_coefficients_and_addends_are_told_apart() -> None:
    module = capture(
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), rand(2, 3, 7), rand(2, 3, 5), rand(2, 5, 7)
    )
    found = contraction_of(module)
    assert (found.coefficient, found.addend[0].name, found.addend[2]) == (2, "l_c_", 0.5)
    module = capture(lambda c, a, b: torch.baddbmm(c, a, b, beta=0), rand(2, 3, 7), rand(2, 3, 5), rand(2, 5, 7))
    assert contraction_of(module).addend is None


def test_a_summed_axis_of_size_one_is_no_axis() -> None:
    found = check(lambda a, b: a @ b, rand(3, 1), rand(1, 4))
    assert found.summed == ()


SIZES = {"b": 2, "c": 3, "i": 4, "j": 5, "k": 6, "l": 7}


@st.composite
def einsums(draw: st.DrawFn) -> tuple[str, tuple[Tensor, Tensor]]:
    """Two operands with their letters in any order, some of size one, any output, with or without an ellipsis."""
    letters = st.lists(st.sampled_from("bcijkl"), unique=True, max_size=4)
    left, right = draw(letters), draw(letters)
    either = list(dict.fromkeys([*left, *right]))
    output = draw(st.permutations(either))[: draw(st.integers(0, len(either)))]
    hidden = [draw(st.integers(0, 2)), draw(st.integers(0, 2))] if draw(st.booleans()) else None
    terms, operands = [], []
    for side, term in enumerate((left, right)):
        shape = [1 if draw(st.integers(0, 5)) == 0 else SIZES[letter] for letter in term]
        text = "".join(term)
        if hidden is not None:
            place = draw(st.integers(0, len(term)))
            text = text[:place] + "..." + text[place:]
            extents = [draw(st.sampled_from([1, size])) for size in (8, 9)[2 - hidden[side] :]]
            shape[place:place] = extents
        terms.append(text)
        operands.append(torch.rand(shape, dtype=torch.float64))
    equation = ",".join(terms)
    if draw(st.booleans()):
        place = draw(st.integers(0, len(output)))
        dots = "..." if hidden is not None and draw(st.booleans()) else ""
        equation += "->" + "".join(output[:place]) + dots + "".join(output[place:])
    return equation, (operands[0], operands[1])


@settings(max_examples=12)
@given(st.lists(einsums(), min_size=4, max_size=4))
def test_einsum_in_any_letter_order_is_read_by_its_axes(drawn: list[tuple[str, tuple[Tensor, Tensor]]]) -> None:
    runnable = []
    for equation, operands in drawn:
        try:
            torch.einsum(equation, *operands)
        except RuntimeError:
            continue
        runnable.append((equation, operands))
    assume(runnable)
    equations = [equation for equation, _ in runnable]
    inputs = [operand for _, operands in runnable for operand in operands]

    def fn(*given_inputs: Tensor) -> list[Tensor]:
        return [torch.einsum(e, given_inputs[2 * i], given_inputs[2 * i + 1]) for i, e in enumerate(equations)]

    module = capture(fn, *inputs)
    for equation, node in zip(equations, outputs_of(module), strict=True):
        found = contraction_of(module, node)
        assert found is not None, equation
        compare(found, module, node, inputs)


@st.composite
def broadcast_pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes that broadcast."""
    full = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=3))
    pair = []
    for _ in range(2):
        shape = [draw(st.sampled_from([1, size])) for size in full]
        pair.append(shape[draw(st.integers(0, len(shape))) :])
    return pair[0], pair[1]


@settings(max_examples=12)
@given(st.lists(st.tuples(broadcast_pairs(), st.tuples(*[st.sampled_from([1, 2, 4])] * 3)), min_size=4, max_size=4))
def test_matmul_with_any_broadcast_batch_is_read_by_its_axes(drawn) -> None:
    inputs = []
    for (left, right), (rows, inner, columns) in drawn:
        inputs += [torch.rand([*left, rows, inner]).double(), torch.rand([*right, inner, columns]).double()]
    module = capture(lambda *given_inputs: [given_inputs[i] @ given_inputs[i + 1] for i in range(0, 8, 2)], *inputs)
    for node in outputs_of(module):
        found = contraction_of(module, node)
        assert found is not None
        compare(found, module, node, inputs)


@settings(max_examples=12)
@given(st.data())
def test_a_multiply_and_sum_over_any_dimensions_is_read_by_its_axes(data: st.DataObject) -> None:
    inputs, reductions = [], []
    for _ in range(4):
        left, right = data.draw(broadcast_pairs().filter(lambda pair: len(pair[0]) + len(pair[1]) > 0))
        rank = max(len(left), len(right))
        reduced = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, unique=True))
        reduced = [dim - rank if data.draw(st.booleans()) else dim for dim in reduced]
        reductions.append((reduced[0] if len(reduced) == 1 else tuple(reduced), data.draw(st.booleans())))
        inputs += [torch.rand(left).double(), torch.rand(right).double()]

    def fn(*x: Tensor) -> list[Tensor]:
        return [(x[2 * i] * x[2 * i + 1]).sum(dim, keepdim=keep) for i, (dim, keep) in enumerate(reductions)]

    module = capture(fn, *inputs)
    for node in outputs_of(module):
        found = contraction_of(module, node)
        assert found is not None
        compare(found, module, node, inputs)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: a @ b,
        lambda a, b: torch.bmm(a, b),
        lambda a, b: torch.einsum("bik,bkj->bij", a, b),
        lambda a, b: (a[:, :, :, None] * b[:, None]).sum(2),
    ],
)
def test_contractions_of_symbolic_sizes_are_read_by_their_axes(fn: Callable[..., Tensor]) -> None:
    check(fn, rand(2, 3, 5), rand(2, 5, 7), dynamic=True)


def test_an_einsum_whose_symbolic_size_is_one_by_a_guard_is_read() -> None:
    def halves(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bts,bsc->btc", x, (y @ weight).view(y.shape[0], y.shape[1], -1, 2)[..., 0])

    found = check(halves, rand(2, 3, 4), rand(2, 4, 2), rand(2, 2), dynamic=True)
    # The size of the second operand is an expression, which that guard says is one.
    assert shape_of(tensor_of(found.call.node))[-1] == 1


NOT_READ: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "linear_by_vector": (lambda a, b: F.linear(a, b), (rand(3, 5), rand(5))),
    "einsum_of_three": (lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), (rand(2, 3), rand(3, 4), rand(4, 5))),
    "einsum_of_one": (lambda a: torch.einsum("ij->ji", a), (rand(2, 3),)),
    "einsum_diagonal": (lambda a, b: torch.einsum("ii,ij->ij", a, b), (rand(3, 3), rand(3, 4))),
    "einsum_by_numbers": (lambda a, b: torch.einsum(a, [0, 1], b, [1, 2]), (rand(2, 3), rand(3, 4))),
    "sum_of_a_sum": (lambda a, b: (a + b).sum(-1), (rand(2, 3), rand(2, 3))),
    "sum_of_everything": (lambda a, b: (a * b).sum(), (rand(2, 3), rand(2, 3))),
    "sum_in_another_dtype": (lambda a, b: (a * b).sum(-1, dtype=torch.float32), (rand(2, 3), rand(2, 3))),
    "sum_of_a_multiple": (lambda a: (a * 2).sum(-1), (rand(2, 3),)),
    "sum_of_a_multiple_named": (lambda a: torch.mul(a, other=2.0).sum(-1), (rand(2, 3),)),
}


@pytest.mark.parametrize("case", NOT_READ)
def test_what_is_no_product_of_two_tensors_is_not_read(case: str) -> None:
    fn, inputs = NOT_READ[case]
    assert contraction_of(capture(fn, *inputs)) is None


def test_the_bias_of_a_linear_is_what_is_added() -> None:
    found = contraction_of(capture(lambda a, b, c: F.linear(a, b, c), rand(3, 5), rand(7, 5), rand(7)))
    assert found is not None
    assert found.addend is not None
    assert found.addend[1:] == (found.dims[-1:], 1)


def test_a_sum_of_multiples_is_expressed_without_a_contraction() -> None:
    module = capture(lambda a: torch.mul(a, other=2.0).sum(-1) + 1, rand(2, 3))
    region = Region(effects_of(module), expand_masks=True)
    region.express(output_of(module), fresh((2,)))
    assert all(leaf.contraction is None for leaf in region.leaves.values())


def test_a_product_that_was_overwritten_before_its_sum_is_not_the_product() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        product = a * b
        product[0] = 0
        return product.sum(-1)

    with contextlib.suppress(MutatedError):  # saying so is as good
        assert contraction_of(capture(fn, rand(2, 3), rand(2, 3))) is None


def test_a_product_that_was_scaled_in_place_before_its_sum_is_not_the_plain_product() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        product = a * b
        product.add_(1)
        return product.sum(-1)

    assert contraction_of(capture(fn, rand(2, 3), rand(2, 3))) is None


def test_a_product_made_in_place_does_not_hand_out_the_overwritten_factor() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        copy = a.exp()
        return copy.mul_(b).sum(-1)

    module = capture(fn, rand(2, 3), rand(2, 3))
    found = contraction_of(module)
    if found is None:
        return
    effects, reader = effects_of(module), output_of(module)
    for factor in (found.left, found.right):
        assert effects.overwritten_after(factor.node, factor.node, reader) is None


def test_the_axes_of_the_result_are_the_given_ones() -> None:
    module = capture(lambda a, b: a @ b, rand(3, 5), rand(5, 7))
    region, node = Region(effects_of(module)), output_of(module)
    dims = fresh((3, 7))
    found = contraction.read(region, read(node), dims)
    assert found.dims == dims
    assert found.left.dims[0] == dims[0]
    assert found.right.dims[1] == dims[1]
    assert found.left.dims[1] == found.right.dims[0] == found.summed
    assert axes_of(found.left.dims) == (*dims[0], *found.summed)
