"""Scans in Triton, in its interpreter, on the CPU: ``TRITON_INTERPRET=1 pytest tests/interpreted_triton_scan.py``.

The variable must be set before Triton is imported, by anything; so test_triton_scan.py runs this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_kernel_problems import PROBLEMS, Problem, assert_near, exactly, with_gradients
from tiers import examples

from benchmarks.scan_accuracy import DECAYS, Case, errors
from lz_compile.ground import health
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.kernels.scan import triton_scan
from lz_compile.lowering.kernels.scan.triton_source import Scan
from lz_compile.lowering.ops.scan import sizes_of
from lz_compile.lowering.triton_launch import is_interpreted

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
drawn = settings(max_examples=examples(4, 8), deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    assert is_interpreted() or torch.get_default_device().type == "cuda", (
        "set TRITON_INTERPRET=1 or LZ_TEST_DEVICE=cuda"
    )
    torch.manual_seed(0)
    yield
    assert not health.retirements()


def small(problem: Problem, length: int = 4) -> Problem:
    return replace(problem, length=min(length, problem.length), heads=1)


#: What differs in the kernel's code; the others differ in sizes only.
_STEPPED = (
    "kda_shared_keys", "two_erasing_updates", "two_erasing_updates_one_decay", "erasing_with_a_row_as_summand",
    "retention", "one_column", "no_input", "average_before", "channels", "mamba_1", "every_element",
    "erasing_under_column_decays", "erasing_under_element_decays", "one_step", "dropping", "dropping_what_was_read",
    "dropping_what_is_erased",
)  # fmt: skip


def test_kda_shared_keys_are_computed_in_float32_under_autocast():
    problem = small(PROBLEMS["kda_shared_keys"], 8)
    operands, attrs = problem.operands(torch.float32), problem.attrs(torch.float32)
    exact = exactly(operands, attrs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = with_gradients(triton_scan.scan, operands, attrs)
    assert_near(found, exact, 1e-5)


@pytest.mark.parametrize("case", _STEPPED)
def test_steps_are_the_references_with_gradients(case):
    problem = small(PROBLEMS[case])
    operands, attrs = problem.operands(), problem.attrs()
    assert_near(with_gradients(triton_scan.scan, operands, attrs), exactly(operands, attrs), 1e-9)


@given(
    decay=st.sampled_from([None, "scalar", "key", "value", "full", "constant"]),
    erases=st.booleans(),
    reads=st.sampled_from(["after", "before"]),
    drive=st.sampled_from([None, "key", "value", "full"]),
    length=st.integers(1, 7),
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    shares=st.booleans(),
    tile=st.sampled_from([1, 16, 1024]),
    span=st.integers(1, 8),
)
@drawn
def test_steps_are_the_references_for_any_tile_and_span(tile, span, **form):
    problem = Problem(**form, heads=1)
    operands, attrs = problem.operands(), problem.attrs()
    exact = exactly(operands, attrs)
    scan = Scan(operands, attrs, tile=tile, span=span)
    results = scan.forward()
    weights = (torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view(each.shape) for each in results)
    gradients = {f"of_{name}": each for name, each in scan.backward(*weights).items()}
    assert_near({"reads": results[0], "last": results[1], **gradients}, exact, 1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_operands_of_every_dtype_are_computed_in_float32(dtype):
    problem = small(PROBLEMS["kda"], 6)
    operands = problem.operands(dtype)
    attrs = replace(problem.attrs(dtype), state_dtype=torch.float32)
    found = with_gradients(triton_scan.scan, operands, attrs)
    assert (found["reads"].dtype, found["last"].dtype) == (dtype, torch.float32)
    assert all(found[f"of_{name}"].dtype == dtype for name in operands.given())
    assert_near(found, exactly(operands, attrs), TOLERANCE[dtype])


@pytest.mark.parametrize("decay", DECAYS)
def test_no_decay_costs_digits(decay):
    case = Case("kda", decay, length=20, heads=1, key_dim=4, value_dim=4)
    found = errors(triton_scan.scan, case, torch.float32, torch.device("cpu"))
    assert max(found.values()) < 5e-6, found


def test_the_same_inputs_give_the_same_bits():
    problem = small(PROBLEMS["kda"])
    operands, attrs = problem.operands(torch.float32), problem.attrs(torch.float32)
    scan = Scan(operands, attrs, tile=4)
    gradients = [torch.randn_like(each) for each in scan.forward()]
    first, second = (scan.backward(*gradients) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_batch_without_elements_is_no_error():
    problem = replace(small(PROBLEMS["kda"]), batch=0)
    operands, attrs = problem.operands(), problem.attrs()
    reads, last = triton_scan.scan(operands, attrs)
    assert reads.numel() == last.numel() == 0


def test_an_operator_is_what_pytorch_asks_of_one():
    problem = small(PROBLEMS["kda"], 2)
    operands, attrs = problem.operands(torch.float32), problem.attrs(torch.float32)
    assert sizes_of(operands).length == 2
    given = (*operands.flat(), encode(attrs))
    results = torch.library.opcheck(torch.ops.layerzero.triton_scan.default, given)
    assert set(results.values()) == {"SUCCESS"}, results
