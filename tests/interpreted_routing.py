"""Triton's routed adapter in its interpreter, on the CPU: ``TRITON_INTERPRET=1 pytest tests/interpreted_routing.py``.

The variable must be set before Triton is imported, by anything; so test_triton_routing.py runs this file in a process of its
own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from routing_problems import Problem, expected, misses, with_gradients

from lz_compile.ground import health
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.kernels.routing import steps as routing_steps
from lz_compile.lowering.kernels.routing import triton_routing
from lz_compile.lowering.kernels.routing import triton_source as kernels
from lz_compile.lowering.ops.routing import COLUMNS, Operands
from lz_compile.lowering.triton_launch import is_interpreted

#: Longer than a tile in every dimension, and no multiple of one.
LARGE = {"rollouts": 3, "length": 70, "wide": 40, "out": 140, "rank": 37, "few": 5}
FORMS = [
    Problem(arm, gate, is_packed, **LARGE)
    for arm in ("none", "grad", "act")
    for gate in ("none", "rollout")
    for is_packed in (False, True)
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPS = torch.ops.layerzero


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    assert is_interpreted() or torch.get_default_device().type == "cuda", (
        "set TRITON_INTERPRET=1 or LZ_TEST_DEVICE=cuda"
    )
    yield
    assert not health.retirements()


def check(problem: Problem, dtype: torch.dtype) -> None:
    operands, attrs = problem.operands(dtype), problem.attrs(dtype)
    found = with_gradients(triton_routing.routing, operands, attrs)
    assert [each.dtype for each in found.values()] == [dtype] * len(found)
    assert not list(misses(found, expected(operands, attrs), dtype))


@pytest.mark.parametrize("problem", FORMS, ids=str)
def test_every_form_and_its_gradients_are_the_references(problem):
    check(problem, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("arm", ["grad", "act"])
def test_every_dtype_is_as_near_to_float64_as_it_can_be(arm, dtype):
    check(Problem(arm, "rollout", **LARGE), dtype)


@pytest.mark.parametrize(
    "sizes",
    [
        {"rollouts": 1, "length": 1, "wide": 1, "out": 1, "rank": 1, "few": 1},
        {"rollouts": 2, "length": 3, "wide": 5, "out": 300, "rank": 130, "few": 20},
        {"rollouts": 5, "length": 64, "wide": 32, "out": 128, "rank": 16, "few": 16},
        {"rollouts": 66, "length": 2, "wide": 4, "out": 4, "rank": 3, "few": 2},
    ],
    ids=["ones", "wide", "whole_tiles", "many_rollouts"],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_sizes_of_any_kind_are_the_references(sizes, is_packed):
    check(Problem("grad", "none", is_packed, has_layer=False, **sizes), torch.float32)
    check(Problem("act", "none", is_packed, has_layer=False, **sizes), torch.float32)


def test_a_record_says_what_was_done():
    problem = Problem("grad", **{**LARGE, "rollouts": 9})
    operands, attrs = problem.operands(torch.float32), problem.attrs(torch.float32)
    record = torch.zeros(problem.rollouts, len(COLUMNS) + problem.rank, requires_grad=True)
    out = triton_routing.routing(Operands(**operands, record=record), attrs)
    out.backward(torch.linspace(-1, 1, out.numel()).sin().view(out.shape))
    flags, g = record.grad[:, 1] > 0, record.grad[:, len(COLUMNS) :]
    assert 0 < int(flags.sum()) < problem.rollouts
    torch.testing.assert_close(record.grad[:, 0] > 0, flags)
    torch.testing.assert_close(operands["delta"].grad, g[~flags].sum(0), atol=1e-4, rtol=1e-4)


def test_the_same_numbers_come_out_again():
    problem = Problem("grad", "none", True, **LARGE)
    operands, attrs = problem.operands(torch.float32), problem.attrs(torch.float32)
    first, second = (with_gradients(triton_routing.routing, operands, attrs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_not_a_number_stays_in_its_rollout_and_is_not_left_out():
    g, v = torch.randn(6, 5), torch.randn(5)
    g[2, 1], g[4, 3] = torch.nan, torch.inf
    nowhere = v.clone()
    nowhere[0] = torch.nan
    for direction in (v, nowhere):
        passed, found = kernels.decide(g, direction, 0.0)
        expected_sum, expected_cosines = routing_steps.decide(g, direction, 0.0)
        assert passed.isnan().all()
        torch.testing.assert_close(found, expected_cosines, equal_nan=True)
        torch.testing.assert_close(passed, expected_sum, equal_nan=True)


def test_small_norms_count_as_the_least_and_the_threshold_is_a_number():
    g, v = torch.randn(9, 5), torch.randn(5) * 1e-9
    g[0] *= 1e-9
    for threshold in (0.0, 0.2, -0.3):
        torch.testing.assert_close(kernels.decide(g, v, threshold), routing_steps.decide(g, v, threshold))
    torch.testing.assert_close(kernels.cosines(g, v), routing_steps.cosines(g, v))


def test_no_tokens_at_all_give_empty_results_and_no_gradient():
    problem = replace(Problem("none"), length=0, has_layer=False)
    operands, attrs = problem.operands(torch.float32), problem.attrs(torch.float32)
    found = with_gradients(triton_routing.routing, operands, attrs)
    assert found["result"].shape == (4, 0, 6)
    assert found["delta"].abs().sum() == 0


def test_the_operators_keep_their_promises():
    columns, first, second = torch.randn(12, 5), torch.randn(3, 7), torch.randn(2, 7)
    place, keep = torch.randint(0, 4, (12,)), torch.rand(12) > 0.3
    torch.library.opcheck(OPS.triton_routing_project_kernel.default, (torch.randn(12, 7), first, second))
    torch.library.opcheck(
        OPS.triton_routing_expand_kernel.default, (columns, torch.randn(4, 3), place, keep, first, second, None)
    )
    torch.library.opcheck(OPS.triton_routing_cosines_kernel.default, (columns[:, :3], torch.randn(3)))
    torch.library.opcheck(OPS.triton_routing_sums_kernel.default, (columns[:, :3], columns[:, 2:], place, keep, 4, 12))
    torch.library.opcheck(OPS.triton_routing_decide_kernel.default, (torch.randn(4, 3), torch.randn(3), 0.0))


@pytest.mark.parametrize("arm", ["none", "grad", "act"])
def test_a_compiled_call_is_the_same(arm):
    problem = Problem(arm, "rollout")
    operands, attrs = problem.operands(torch.float32), problem.attrs(torch.float32)

    def call(x, attrs):
        return OPS.triton_routing.default(*x.flat(), attrs) * 2.0

    step = torch.compile(call, backend="aot_eager", fullgraph=True)
    found, wanted = (with_gradients(each, operands, encode(attrs)) for each in (step, call))
    torch.testing.assert_close(found, wanted)
