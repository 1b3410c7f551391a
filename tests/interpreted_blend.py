"""Triton's blend in its interpreter, on the CPU: ``TRITON_INTERPRET=1 pytest tests/interpreted_blend.py``.

The variable must be set before Triton is imported, by anything; so test_blend.py runs this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lz_compile.ground import health
from lz_compile.lowering.encoded_attributes import encode
from lz_compile.lowering.kernels.blend import triton_blend
from lz_compile.lowering.ops import blend as op
from lz_compile.lowering.ops.blend import BlendAttrs
from lz_compile.lowering.triton_launch import is_interpreted

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
for_every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
OPS = torch.ops.layerzero


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    assert is_interpreted() or torch.get_default_device().type == "cuda", (
        "set TRITON_INTERPRET=1 or LZ_TEST_DEVICE=cuda"
    )
    torch.manual_seed(0)
    yield
    assert not health.retirements()


def check(attrs: BlendAttrs, dtype: torch.dtype, sizes: tuple[int, int, int], alpha: Tensor | float, **given: object):
    attrs = replace(attrs, compute_dtype=dtype, out_dtype=dtype)
    host, seed = (torch.randn(sizes).to(dtype) for _ in range(2))
    tensors = {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in given.items()}
    alpha = alpha.to(dtype) if isinstance(alpha, Tensor) else alpha
    seed.requires_grad_()
    out = triton_blend.blend(op.Operands(host, seed, alpha, **tensors), attrs)
    exact = {name: value.double() if isinstance(value, Tensor) else value for name, value in tensors.items()}
    wide = seed.detach().double().requires_grad_()
    form = replace(attrs, out_dtype=torch.float64, compute_dtype=torch.float64)
    exact_alpha = alpha.double() if isinstance(alpha, Tensor) else alpha
    wanted = op.reference(op.Operands(host.double(), wide, exact_alpha, **exact), form)
    slack = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=4 * slack, atol=4 * slack)
    gradient = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    (found,), (expected,) = (
        torch.autograd.grad(out, seed, gradient.to(dtype)),
        torch.autograd.grad(wanted, wide, gradient),
    )
    torch.testing.assert_close(found.double(), expected, rtol=4 * slack, atol=4 * slack)


@pytest.mark.sampled
@for_every_dtype
@pytest.mark.parametrize("is_residual", [False, True])
@pytest.mark.parametrize("shape", [(), (5, 1, 1), (1, 3, 1), (5, 3, 1)])
def test_a_blend_and_its_gradient_are_the_references(shape, is_residual, dtype):
    check(BlendAttrs(is_residual=is_residual), dtype, (5, 3, 7), torch.rand(shape))


@for_every_dtype
def test_a_gated_blend_is_the_references(dtype):
    attrs = BlendAttrs("confidence", has_gate=True)
    given = {"logits": torch.randn(5, 33), "gain": 3.0, "offset": 0.5, "low": 0.0, "high": 0.9}
    check(attrs, dtype, (5, 1, 40), torch.tensor(1.3), **given)
    check(
        attrs, dtype, (5, 4, 9), torch.rand(1, 4, 1), **{**given, "gain": torch.tensor(2.0), "low": None, "high": None}
    )


def test_a_weight_may_be_a_number_and_a_tile_may_be_cut():
    check(BlendAttrs(), torch.float32, (3, 1, 1025), 0.3)
    check(BlendAttrs(), torch.float32, (1, 1, 1), 0.3)


@pytest.mark.sampled
@pytest.mark.parametrize("classes", [2, 3, 100, 2048, 5000])
@for_every_dtype
def test_a_margin_is_that_of_the_two_largest(classes, dtype):
    logits = torch.randn(7, classes).to(dtype)
    attrs = BlendAttrs("margin", has_gate=True, compute_dtype=dtype, out_dtype=dtype)
    top = logits.double().topk(2).values
    torch.testing.assert_close(
        triton_blend.blend(op.Operands(logits=logits), attrs).double(),
        top[:, 0] - top[:, 1],
        rtol=0,
        atol=8 * TOLERANCE[dtype],
    )


def test_ties_have_no_margin_and_what_is_not_a_number_stays_in_its_row():
    logits = torch.randn(6, 3000)
    logits[0, [5, 2900]] = 9.0
    logits[1, 2] = torch.nan
    logits[2, :] = 1.0
    logits[3, [7, 2900]] = torch.inf
    logits[4, 7] = torch.inf
    attrs = BlendAttrs("margin", has_gate=True)
    found = triton_blend.blend(op.Operands(logits=logits), attrs)
    top = logits.topk(2).values
    torch.testing.assert_close(found, top[:, 0] - top[:, 1], equal_nan=True)


def test_operands_may_be_strided_and_rows_may_be_none():
    host, seed = torch.randn(7, 3, 5).transpose(0, 2), torch.randn(7, 3, 5).transpose(0, 2)
    alpha, attrs = torch.rand(1, 3, 1), BlendAttrs()
    torch.testing.assert_close(
        triton_blend.blend(op.Operands(host, seed, alpha), attrs), op.reference(op.Operands(host, seed, alpha), attrs)
    )
    logits = torch.randn(9, 5).T
    margin = BlendAttrs("margin", has_gate=True)
    torch.testing.assert_close(
        triton_blend.blend(op.Operands(logits=logits), margin), op.reference(op.Operands(logits=logits), margin)
    )
    empty = torch.randn(0, 3, 5)
    assert triton_blend.blend(op.Operands(empty, empty, alpha), attrs).shape == (0, 3, 5)


def test_the_operators_keep_their_promises():
    seed, host = torch.randn(4, 3, 5, requires_grad=True), torch.randn(4, 3, 5)
    numbers = torch.tensor([2.0, 0.3, 0.0, 1.0])
    attrs = encode(BlendAttrs("confidence", has_gate=True))
    operands = (seed, host, torch.rand(1, 3, 1), torch.randn(4, 9), numbers, attrs)
    torch.library.opcheck(OPS.triton_blend_kernel.default, operands)
    margin = encode(BlendAttrs("margin", has_gate=True))
    torch.library.opcheck(OPS.triton_blend_margin_kernel.default, (torch.randn(4, 9), margin))
