"""Triton's sampling in its interpreter, on the CPU: ``TRITON_INTERPRET=1 pytest tests/interpreted_sampling.py``.

The variable must be set before Triton is imported, by anything; so test_sampling.py runs this file in a process of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from lz_compile.ground import health
from lz_compile.lowering.kernels.sampling import triton_sampling, triton_source
from lz_compile.lowering.ops import sampling as op
from lz_compile.lowering.triton_launch import is_interpreted
from tests import test_sampling_ties as ties
from tests.test_sampling import LIMITS, problem, wide

COMBINATIONS = [
    (),
    ("seeds",),
    ("bitmask", "bias", "temperature", "seeds"),
    ("top_k", "seeds"),
    ("top_p", "seeds"),
    ("min_p", "seeds"),
    ("bitmask", "temperature", "top_k", "top_p", "min_p", "seeds"),
]


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    assert is_interpreted() or torch.get_default_device().type == "cuda", (
        "set TRITON_INTERPRET=1 or LZ_TEST_DEVICE=cuda"
    )
    yield
    assert not health.retirements()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 1500])
@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_draws_are_the_references(names, vocab, dtype):
    operands = problem(2, vocab, names, dtype=dtype, seed=vocab)
    attrs = op.SamplingAttrs.of(operands, "ids", torch.float32)
    expected = op.reference(op.Operands(**wide(operands)), attrs)
    assert triton_sampling.sampling(op.Operands(**operands), attrs).tolist() == expected.tolist()


@pytest.mark.parametrize("result", ["scores", "probs"])
@pytest.mark.parametrize("names", [(), ("bitmask", "bias"), LIMITS], ids="-".join)
def test_scores_and_probabilities_are_the_references(names, result):
    operands = problem(2, 700, names)
    attrs = op.SamplingAttrs.of(operands, result, torch.float32)
    expected = op.reference(op.Operands(**wide(operands)), op.SamplingAttrs.of(operands, result, torch.float64))
    found = triton_sampling.sampling(op.Operands(**operands), attrs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_without_a_distribution_are_told_from_others(value):
    logits = torch.stack((torch.arange(5.0), torch.full((5,), value)))
    attrs = op.SamplingAttrs.of({"logits": logits}, "ids", torch.float32)
    assert triton_sampling.sampling(op.Operands(logits=logits), attrs).tolist() == [4, -1]
    attrs = op.SamplingAttrs.of({"logits": logits}, "probs", torch.float32)
    assert triton_sampling.sampling(op.Operands(logits=logits), attrs).isnan().all(-1).tolist() == [False, True]


@pytest.mark.sampled
@pytest.mark.parametrize("top_p_ties", op.TIES)
@pytest.mark.parametrize("top_k_ties", op.TIES)
def test_of_equal_scores_those_are_kept_that_the_reference_keeps(top_k_ties, top_p_ties):
    modes = (top_k_ties, top_p_ties)
    operands, attrs = ties.problem(6, 37, ("top_k", "top_p"), modes, dtype=torch.bfloat16)
    operands = {name: each[4:] for name, each in operands.items()}  # the first four are as those below
    ties.assert_is_the_definitions(triton_sampling.sampling, operands, attrs, ["scores"])
    operands, attrs = ties.problem(4, 130, LIMITS, modes)
    ties.assert_is_the_definitions(triton_sampling.sampling, operands, attrs, ["scores"])


@pytest.mark.parametrize("mode", ["first", "last"])
def test_ties_are_counted_from_block_to_block(mode, monkeypatch):
    monkeypatch.setattr(triton_source, "BLOCK", 64)
    operands, attrs = ties.problem(4, 141, ("top_k", "top_p"), (mode, mode), dtype=torch.bfloat16)
    operands = {name: each[2:] for name, each in operands.items()}
    operands["top_k"] = torch.tensor([94, 117], dtype=torch.int32)
    operands["top_p"] = torch.tensor([1.0, 0.93])
    ties.assert_is_the_definitions(triton_sampling.sampling, operands, attrs, ["scores"])


def test_rows_unlike_others_are_the_references():
    operands, attrs = ties.problem(5, 40, (*LIMITS, "seeds"), ("first", "last"))
    operands["temperature"][2:4] = torch.tensor([math.nan, -0.7])
    operands = {name: each if len(each) == 1 else each[2:4] for name, each in operands.items()}
    ties.assert_is_the_definitions(triton_sampling.sampling, operands, attrs)
    assert op.reference(op.Operands(**operands), replace(attrs, result="ids")).tolist()[0] == -1


@pytest.mark.parametrize(
    "test",
    [
        ties.test_as_many_equal_scores_are_kept_as_a_limit_needs,
        ties.test_limits_that_meet_at_one_score_are_applied_one_after_the_other,
        ties.test_a_row_is_nan_where_an_open_limit_drops_one_of_several_equals,
        ties.test_temperature_zero_keeps_all_of_the_largest_and_takes_the_first,
        ties.test_without_a_draw_the_first_is_taken_of_what_is_kept,
        partial(ties.test_limits_that_are_off_keep_everything_and_no_limit_keeps_nothing, ties="last"),
        partial(ties.test_scores_of_minus_infinity_are_neither_kept_nor_counted, ties="last"),
    ],
    ids=lambda test: getattr(test, "func", test).__name__,
)
def test_what_other_kernels_keep_of_a_few_tokens_is_kept(test, monkeypatch):
    monkeypatch.setitem(ties.EVERY, "lz.triton_sampling", triton_sampling.sampling)
    test(kernel="lz.triton_sampling")
