"""Axes: what regrouping keeps, where it cuts, and when it is impossible."""

from __future__ import annotations

import itertools
import math
import operator

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from lz_compile.ground.sizes import as_size, product, shape_of
from lz_compile.passes.formula.axes import (
    Axis,
    LayoutError,
    atoms,
    axes_of,
    broadcast_from,
    fresh,
    regroup,
    resolve,
    take,
)
from tests.graphs import at, capture, placeholders

S = sympy.Symbol("s0", integer=True, positive=True)
T = sympy.Symbol("s1", integer=True, positive=True)


def sizes(dims):
    return [[axis.size for axis in atoms(dim)] for dim in dims]


def test_every_dimension_gets_an_axis_of_its_own_but_those_of_size_one() -> None:
    dims = fresh((2, 1, 2))
    assert sizes(dims) == [[2], [], [2]]
    assert dims[0][0] != dims[2][0]


def test_axes_of_equal_size_are_different_axes() -> None:
    first, second = Axis(3), Axis(3)
    assert first != second
    assert len({first, first, second}) == 2


def test_merging_dimensions_keeps_their_axes() -> None:
    dims = fresh((2, 3, 4))
    (merged,) = regroup(axes_of(dims), (24,))
    assert merged == axes_of(dims)


def test_a_cut_axis_keeps_its_identity_and_delegates_to_its_parts() -> None:
    dims = fresh((12,))
    (axis,) = dims[0]
    halves = regroup(axes_of(dims), (3, 4))
    assert axis.parts == (halves[0][0], halves[1][0])
    assert axes_of(dims) == axes_of(halves)
    assert resolve(dims) == ((halves[0][0], halves[1][0]),)


def test_a_cut_shows_in_every_tensor_that_shares_the_axis() -> None:
    axis = Axis(12)
    other = ((axis,), (Axis(5),))
    regroup((axis,), (3, 4))
    assert sizes(other) == [[3, 4], [5]]


def test_size_one_may_be_inserted_and_dropped_anywhere() -> None:
    dims = fresh((2, 3))
    assert regroup(axes_of(dims), (1, 2, 1, 1, 3, 1)) == ((), dims[0], (), (), dims[1], ())


@pytest.mark.parametrize(
    ("shape", "target"),
    [((6,), (4,)), ((2, 3), (3, 2)), ((6,), (2,)), ((2,), (2, 3)), ((4, 6), (3, 8)), ((), (2,)), ((6, 4), (4, 6))],
)
def test_what_does_not_factor_is_an_error(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        regroup(axes_of(fresh(shape)), target)


def test_take_leaves_the_rest_of_a_cut_axis_in_the_queue() -> None:
    queue = [Axis(6), Axis(5)]
    (taken,) = take(queue, 2)
    assert taken.size == 2
    assert [axis.size for axis in queue] == [3, 5]
    assert take(queue, 1) == ()


@st.composite
def _two_shapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 6]), max_size=5))
    shape = factors
    other = draw(st.permutations(factors))
    cuts = draw(st.lists(st.booleans(), min_size=len(other), max_size=len(other)))
    merged: list[int] = []
    for factor, is_cut in zip(other, cuts, strict=True):
        if is_cut or not merged:
            merged.append(factor)
        else:
            merged[-1] *= factor
    return shape, merged


def _borders(shape: list[int]) -> set[int]:
    return set(itertools.accumulate(shape, operator.mul, initial=1))


@settings(max_examples=300)
@given(_two_shapes())
def test_regrouping_is_what_reshape_does_and_fails_only_where_no_exact_form_exists(shapes) -> None:
    shape, target = shapes
    borders = sorted(_borders(shape) | _borders(target))
    has_exact_form = all(larger % smaller == 0 for smaller, larger in itertools.pairwise(borders))
    dims = fresh(shape)
    try:
        regrouped = regroup(axes_of(dims), target)
    except LayoutError:
        assert not has_exact_form
        return
    assert has_exact_form
    assert [math.prod(dim) for dim in sizes(regrouped)] == target
    x = torch.arange(math.prod(shape)).reshape(shape)
    axes = axes_of(dims)
    assert torch.equal(at(x, dims, axes), at(x.reshape(target), regrouped, axes))


@settings(max_examples=100)
@given(_two_shapes())
def test_regrouping_there_and_back_gives_the_same_axes(shapes) -> None:
    shape, target = shapes
    dims = fresh(shape)
    try:
        there = regroup(axes_of(dims), target)
    except LayoutError:
        return
    assert regroup(axes_of(there), shape) == resolve(dims)


def test_symbolic_extents_are_split_and_merged_exactly() -> None:
    dims = fresh((S * 8, T))
    assert sizes(regroup(axes_of(dims), (S, 8, T))) == [[S], [8], [T]]
    assert sizes(regroup(axes_of(dims), (S, 8 * T))) == [[S], [8, T]]
    assert sizes(regroup(axes_of(dims), (8 * S * T,))) == [[S, 8, T]]


def test_a_batch_splits_off_windows_whose_number_is_a_rounded_quotient() -> None:
    windows = FloorDiv(T, 4)
    assert sizes(regroup(axes_of(fresh((S * windows**2,))), (S, windows, windows))) == [[S], [windows], [windows]]
    assert sizes(regroup(axes_of(fresh((T,))), (windows, 4))) == [[windows], [4]]


def test_a_number_splits_off_the_front_of_a_symbolic_extent() -> None:
    dims = fresh((S * 8,))
    assert sizes(regroup(axes_of(dims), (4, S * 2))) == [[4], [2 * S]]


@pytest.mark.parametrize("target", [(T,), (3, S), (S, 4), (S // 2, 2)])
def test_symbolic_extents_that_do_not_factor_are_an_error(target: tuple[sympy.Expr, ...]) -> None:
    with pytest.raises(LayoutError):
        regroup(axes_of(fresh((S,))), target)


def test_sizes_that_factor_only_by_value_do_not_factor_by_symbol() -> None:
    with pytest.raises(LayoutError):
        regroup(axes_of(fresh((S, 6))), (6, S))


@pytest.mark.parametrize(
    ("shape", "target"),
    [((0, 3, 4), (0, 12)), ((0, 12), (0, 3, 4)), ((2, 0), (0,)), ((0,), (2, 0)), ((2, 0, 3), (2, 0, 3)), ((0,), (0,))],
)
def test_an_empty_tensor_is_regrouped_or_refused_like_any_other(
    shape: tuple[int, ...], target: tuple[int, ...]
) -> None:
    try:
        regrouped = regroup(axes_of(fresh(shape)), target)
    except LayoutError:
        return
    assert [math.prod(dim) for dim in sizes(regrouped)] == list(target)


def test_a_broadcast_operand_has_no_axis_where_it_has_size_one_or_no_dimension() -> None:
    dims = fresh((2, 3, 4))
    assert broadcast_from(dims, (3, 4)) == dims[1:]
    assert broadcast_from(dims, (2, 1, 4)) == (dims[0], (), dims[2])
    assert broadcast_from(dims, ()) == ()
    assert broadcast_from(dims, (1, 1, 1)) == ((), (), ())


def test_broadcasting_reads_the_operand_as_torch_does() -> None:
    result = torch.zeros(2, 3, 4)
    dims = fresh(result.shape)
    for shape in [(4,), (3, 1), (1, 4), (2, 1, 1), (1, 1, 1), (2, 3, 4), ()]:
        operand = torch.arange(math.prod(shape)).reshape(shape)
        expected = operand.expand(2, 3, 4)
        assert torch.equal(at(operand, broadcast_from(dims, shape), axes_of(dims)), expected)


def test_products_of_numbers_are_numbers() -> None:
    assert product([]) == 1
    assert product([2, 3]) == 6
    assert isinstance(product([2, 3]), int)
    assert product([2, S, 3]) == 6 * S


def test_shapes_are_read_without_a_new_guard() -> None:
    module = capture(lambda x: x.reshape(x.shape[0], -1), torch.rand(3, 5, 7), dynamic=True)
    (x,) = placeholders(module)
    value = x.meta["example_value"]
    guards = len(value.fake_mode.shape_env.guards)
    extents = shape_of(value)
    assert all(isinstance(extent, sympy.Symbol) for extent in extents)
    assert len(value.fake_mode.shape_env.guards) == guards
    assert as_size(4) == 4
    assert as_size(value.shape[1]) == extents[1]
