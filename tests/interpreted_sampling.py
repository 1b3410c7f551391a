"""Triton's sampling in its interpreter, on the CPU: ``TRITON_INTERPRET=1 pytest tests/interpreted_sampling.py``.

The variable must be set before Triton is imported, by anything; so test_sampling.py runs this file in a process of its own.
"""

from __future__ import annotations

import math

import pytest
import torch

from lz_compile.lowering.kernels import triton_sampling
from lz_compile.lowering.ops import sampling as op
from lz_compile.lowering.triton.launch import is_interpreted
from lz_compile.runtime import health
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
    assert is_interpreted(), "set TRITON_INTERPRET=1"
    yield
    assert not health.retirements()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5000])
@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_draws_are_the_references(names, vocab, dtype):
    operands = problem(3, vocab, names, dtype=dtype, seed=vocab)
    attrs = op.SamplingAttrs.of(operands, "ids", torch.float32)
    expected = op.reference(**wide(operands), attrs=attrs)
    assert triton_sampling.sampling(**operands, attrs=attrs).tolist() == expected.tolist()


@pytest.mark.parametrize("result", ["scores", "probs"])
@pytest.mark.parametrize("names", [(), ("bitmask", "bias"), LIMITS], ids="-".join)
def test_scores_and_probabilities_are_the_references(names, result):
    operands = problem(3, 700, names)
    attrs = op.SamplingAttrs.of(operands, result, torch.float32)
    expected = op.reference(**wide(operands), attrs=op.SamplingAttrs.of(operands, result, torch.float64))
    found = triton_sampling.sampling(**operands, attrs=attrs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_without_a_distribution_are_told_from_others(value):
    logits = torch.stack((torch.arange(5.0), torch.full((5,), value)))
    attrs = op.SamplingAttrs.of({"logits": logits}, "ids", torch.float32)
    assert triton_sampling.sampling(logits=logits, attrs=attrs).tolist() == [4, -1]
    attrs = op.SamplingAttrs.of({"logits": logits}, "probs", torch.float32)
    assert triton_sampling.sampling(logits=logits, attrs=attrs).isnan().all(-1).tolist() == [False, True]
