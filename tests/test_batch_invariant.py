"""Kernels that say that a row has the same bits in every batch: shown bit by bit, and alone chosen under the policy."""

from __future__ import annotations

import pytest
import torch
from row_bits import CASES, differences

from lz_compile.ground import events
from lz_compile.lowering import ops
from lz_compile.runtime.kernels.registry import kernels

DECLARED = [
    (op, spec.kernel_id)
    for op in ops.names()
    for spec in kernels(op).values()
    if (spec.batch_invariant or spec.split_invariant) and {"cpu", "*"} & spec.platforms
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "kernel_id"), DECLARED)
def test_what_is_declared_gives_a_row_the_same_bits_in_every_batch(op, kernel_id, dtype):
    with events.collect() as happened:
        assert differences(kernels(op)[kernel_id], dtype) == []
    assert happened == []  # nothing was completed by another kernel


@pytest.mark.parametrize(("op", "kernel_id"), [("attention", "torch.sdpa"), ("linear", "lz.cpp_linear")])
def test_the_test_sees_kernels_that_are_not(op, kernel_id):
    assert differences(kernels(op)[kernel_id], torch.float32) != []
