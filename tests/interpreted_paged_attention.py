"""Attention over blocks in Triton, in its interpreter: ``TRITON_INTERPRET=1 pytest tests/interpreted_paged_attention.py``.

The variable must be set before Triton is imported, by anything; so test_triton_paged_attention.py runs this file in a process
of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lz_compile.ground import health
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.kernels.paged_attention.triton_paged_attention import paged_attention
from lz_compile.lowering.kernels.paged_attention.triton_source import run
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import NARROW, Operands
from lz_compile.lowering.triton_launch import is_interpreted
from tests.test_paged_attention import Problem, assert_near, attributes

#: Tiles and parts: those that shapes ask for, and others that meet what long requests meet.
LAUNCHES = ({}, {"rows": 16, "keys": 16, "parts": 3}, {"rows": 32, "keys": 32, "parts": 1})
FLOATING = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    assert is_interpreted() or torch.get_default_device().type == "cuda", (
        "set TRITON_INTERPRET=1 or LZ_TEST_DEVICE=cuda"
    )
    yield
    assert not health.retirements()


def exactly(x, attrs):
    """The definition in float64."""
    return op.reference(replace(x, query=x.query.double()), replace(attrs, out_dtype=torch.float64))


def check(x, launches=LAUNCHES, **attributes_):
    attrs = attributes(x, **attributes_)
    exact = exactly(x, attrs)
    for launch in launches:
        found = run(x, attrs, **launch)
        assert found.is_contiguous()
        assert found.dtype == attrs.out_dtype
        assert_near(found, exact, x.query.dtype)


@st.composite
def problems(draw):
    requests = draw(st.integers(1, 3))
    lengths = st.lists(st.sampled_from((0, 1, 15, 16, 17, 40)), min_size=requests, max_size=requests)
    counts = st.lists(st.sampled_from((0, 1, 2, 5, 18)), min_size=requests, max_size=requests).filter(any)
    heads, kv_heads = draw(st.sampled_from(((4, 4), (4, 2), (3, 1), (6, 2))))
    dims, value_dims = draw(st.sampled_from(((16, 16), (20, 12), (5, 80))))
    dtype = draw(st.sampled_from(FLOATING))
    counts = draw(st.none() | counts)
    return Problem(
        draw(lengths), counts, draw(st.sampled_from((1, 3, 16, 256))), heads, kv_heads, dims, value_dims,
        draw(st.sampled_from((dtype, *NARROW))), dtype, draw(st.integers(0, 2)) if counts is not None else 0,
        draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 99)),
    )  # fmt: skip


@settings(max_examples=examples(6, 30), deadline=None, derandomize=True, database=None)
@given(
    problem=problems(),
    launch=st.sampled_from(LAUNCHES),
    window=st.sampled_from((None, 1, 7, 64)),
    softcap=st.sampled_from((None, 2.0)),
    scale=st.sampled_from((None, 0.3)),
)
def test_whatever_is_asked_is_the_definition(problem, launch, window, softcap, scale):
    check(problem.operands(), [launch], window=window, softcap=softcap, scale=scale)


@pytest.mark.parametrize("slots", [3, 256])
def test_requests_of_many_parts_are_the_definition(slots):
    x = Problem([300, 0, 7], heads=2, kv_heads=1, slots=slots, dims=80, value_dims=20).operands()
    check(x, [{}, {"keys": 32, "parts": 4}])
    check(x, [{"keys": 16, "parts": 17}], window=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [None, [1, 5, 0]], ids=["decode", "ragged"])
def test_more_heads_than_a_tile_has_rows_are_the_definition(counts, dtype):
    x = Problem([5, 40, 0], counts, heads=20, kv_heads=1, dtype=dtype, stored=dtype, has_sinks=True).operands()
    check(x, [{}, {"parts": 2}])


def test_requests_are_found_wherever_they_begin():
    counts = [0, 3, 0, 0, 1, 7, 0, 1, 1, 0]
    x = Problem([2, 3, 0, 5, 1, 9, 4, 30, 1, 0], counts, heads=4, kv_heads=1, padding=6).operands()
    check(x, [{}, {"rows": 32}])
    assert not run(x, attributes(x))[-6:].any()
    empty = replace(x, block_table=x.block_table[:0], lengths=x.lengths[:0], query_starts=x.query_starts[:1])
    assert not run(empty, attributes(empty)).any()


def test_operands_may_have_any_strides():
    x = Problem([40, 9, 17], [3, 2, 1], has_sinks=True, stored=torch.int8).operands()

    check(x.map(_gaps))


def _gaps(tensor):
    """The same with gaps in every dimension, and dimensions in another order in memory."""
    order = tuple(reversed(range(tensor.dim())))
    wide = tensor.new_empty([2 * tensor.shape[each] for each in order])
    found = wide[tuple(slice(None, None, 2) for _ in order)].permute(order)
    return found.copy_(tensor)


def test_a_result_may_be_wider_than_the_query():
    x = Problem([40, 9], dtype=torch.bfloat16, stored=torch.bfloat16).operands()
    check(x, out_dtype=torch.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("query", FLOATING, ids=str)
def test_every_number_of_eight_bits_is_that_number(dtype, query):
    values = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(1, 1, 1, 256)
    x = Operands(
        torch.zeros(1, 1, 16, dtype=query),
        torch.zeros(1, 1, 1, 16).to(dtype),
        values,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
    )
    found = run(x, attributes(x, out_dtype=torch.float32))
    torch.testing.assert_close(found.flatten(), values.float().flatten(), rtol=0, atol=0, equal_nan=True)


# ---- what is no number -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("counts", [None, [1, 9]], ids=["decode", "ragged"])
def test_scores_that_are_no_numbers_come_out_as_in_the_definition(value, counts):
    for place in (0, 33):
        x = Problem([3, 40], counts, heads=2, kv_heads=1).operands()
        x.key_cache[x.block_table[1, place // 16], place % 16] = value
        for launch in LAUNCHES[:2]:
            found = run(x, attributes(x), **launch).double()
            torch.testing.assert_close(found, exactly(x, attributes(x)), atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("sink", [0.5, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("has_scores", [False, True])
def test_sinks_beside_scores_of_minus_infinity_and_nothing_come_out_as_in_the_definition(has_scores, sink):
    x = Problem([20, 0], heads=2, kv_heads=1, has_sinks=True).operands()
    x.sinks[1] = sink
    if not has_scores:
        x.query[:] = 1.0
        x.key_cache[:] = -math.inf
    for launch in LAUNCHES:
        found = run(x, attributes(x), **launch).double()
        torch.testing.assert_close(found, exactly(x, attributes(x)), atol=1e-5, rtol=1e-5, equal_nan=True)
        assert not found[1].any()


def test_a_query_that_sees_only_scores_of_minus_infinity_is_nan_and_one_that_sees_none_is_zero():
    x = Problem([20, 1], [1, 3], heads=2, kv_heads=1).operands()
    x.query[:] = 1.0
    x.key_cache[:] = -math.inf
    for launch in LAUNCHES:
        found = run(x, attributes(x), **launch)
        assert found.isnan().all(-1).all(-1).tolist() == [True, False, False, True]
        assert not found[1:3].any()


# ---- tables that lie -------------------------------------------------------------------------------------------------


def within_marks(x):
    """The operands, with caches in the middle of more memory, all of it numbers that would be seen in a result.

    Tables name no block that there is not.
    """
    caches = []
    for each in (x.key_cache, x.value_cache):
        memory = torch.full((3 * each.shape[0], *each.shape[1:]), 1e4, dtype=each.dtype)
        memory[each.shape[0] : 2 * each.shape[0]] = each.nan_to_num()
        caches.append(memory[each.shape[0] : 2 * each.shape[0]])
    return replace(x, key_cache=caches[0], value_cache=caches[1], block_table=x.block_table.clamp(min=0))


def assert_only_the_second_is_nan(x, changed):
    attrs = attributes(x)
    exact = exactly(x, attrs)
    rows = slice(1, 2) if x.query_starts is None else slice(*x.query_starts[1:3].tolist())
    for launch in LAUNCHES[:2]:
        found = run(changed, attrs, **launch)
        assert found[rows].isnan().all()
        assert_near(found[: rows.start], exact[: rows.start], torch.float32)
        assert_near(found[rows.stop :], exact[rows.stop :], torch.float32)


@pytest.mark.parametrize("counts", [None, [5, 3, 1]], ids=["decode", "ragged"])
def test_a_block_that_is_not_there_is_not_read_and_makes_its_request_nan(counts):
    x = within_marks(Problem([20, 33, 9], counts, heads=2, kv_heads=1).operands())
    for block in (-1, len(x.key_cache), 2**31 - 1):
        table = x.block_table.clone()
        table[1, 1] = block
        assert_only_the_second_is_nan(x, replace(x, block_table=table))


def test_a_block_before_a_window_may_be_anywhere():
    x = Problem([20, 33], [2, 1], heads=2, kv_heads=1).operands()
    x.block_table[0, 0] = x.block_table[1, :2] = -1
    check(x, LAUNCHES[:2], window=1)


@pytest.mark.parametrize("counts", [None, [5, 3, 1]], ids=["decode", "ragged"])
def test_a_length_that_cannot_be_makes_its_request_nan(counts):
    x = within_marks(Problem([20, 33, 9], counts, heads=2, kv_heads=1).operands())
    for length in (-1, 65, 2**31 - 1):
        lengths = x.lengths.clone()
        lengths[1] = length
        assert_only_the_second_is_nan(x, replace(x, lengths=lengths))


def test_wrong_starts_read_and_write_nothing_that_is_not_there():
    x = within_marks(Problem([20, 33, 9], [5, 3, 1], heads=2, kv_heads=1).operands())
    for starts in ([0, 5, 8, 2**31 - 1], [3, 5, 8, 9], [0, 8, 5, 9], [-9, 9, 9, -(2**31)]):
        wrong = replace(x, query_starts=torch.tensor(starts, dtype=torch.int32))
        for launch in LAUNCHES[:2]:
            found = run(wrong, attributes(x), **launch)
            assert (found.isnan() | (found.abs() < 1e3)).all()
            assert starts[0] != 3 or found[:3].isnan().all(), "whose these are nobody says"
            assert starts[3] <= 9 or found[8].isnan().all(), "there are no queries where it ends"


# ---- as an operator --------------------------------------------------------------------------------------------------


def test_an_operator_is_what_pytorch_asks_of_one():
    x = Problem([17, 3], [2, 1], has_sinks=True).operands()
    x = x.map(
        lambda each: each.nan_to_num() if each.is_floating_point() else each
    )  # it compares operands before and after
    results = torch.library.opcheck(
        torch.ops.layerzero.triton_paged_attention_kernel.default, (*x.flat(), encode(attributes(x)))
    )
    assert set(results.values()) == {"SUCCESS"}, results
    assert_near(paged_attention(x, attributes(x)), exactly(x, attributes(x)), torch.float32)


def test_no_queries_are_no_error():
    x = Problem([17], [1]).operands()
    x = replace(x, query=x.query[:0], query_starts=torch.zeros(2, dtype=torch.int32))
    assert paged_attention(x, attributes(x)).shape == (0, 4, 16)
