"""``lz.cpp_blend``: gated blends in C++ against the definition, forward, backward, margins alone, and what it takes over."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lz_compile as lz
from lz_compile.lowering.kernels.blend import cpp_blend
from lz_compile.lowering.ops import blend as op
from lz_compile.lowering.ops.blend import BlendAttrs

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9),
    channels=st.integers(1, 70),
    inner=st.sampled_from((1, 1, 3, 40)),
    classes=st.sampled_from((2, 3, 15, 16, 17, 100)),
    alpha=st.sampled_from(("number", "scalar", "rows", "channels", "both", "mask")),
    host=st.sampled_from(("whole", "one_row", "channels", "number")),
    is_residual=st.booleans(),
    bounds=st.sampled_from(((None, None), (0.0, 1.0), (0.1, 0.6))),
    dtype=st.sampled_from(tuple(TOLERANCE)),
    seed=st.integers(0, 2**20),
)
def test_a_gated_blend_and_its_gradient_are_the_references(
    rows, channels, inner, classes, alpha, host, is_residual, bounds, dtype, seed
):
    torch.manual_seed(seed)
    grafted, gradient = (torch.randn(rows, channels, inner).to(dtype) for _ in range(2))
    host_shape = {"whole": (rows, channels, inner), "one_row": (1, channels, inner), "channels": (1, channels, 1)}
    host = torch.randn(host_shape.get(host, (1, 1, 1))).to(dtype)
    logits = torch.randn(rows, classes).to(dtype)
    logits[:1, :2] = logits[:1].amax(-1, keepdim=True)  # a tie
    shape = {
        "mask": (rows, 1, 1),
        "scalar": (),
        "rows": (rows, 1, 1),
        "channels": (1, channels, 1),
        "both": (rows, channels, 1),
    }
    weight = 0.7 if alpha == "number" else torch.rand(shape[alpha]).to(dtype)
    weight = weight > 0.5 if alpha == "mask" else weight
    attrs = BlendAttrs("confidence", is_residual, has_gate=True, is_sorted=True, compute_dtype=dtype, out_dtype=dtype)
    grafted.requires_grad_()
    given = {"gain": 4.0, "offset": torch.tensor(0.8), "low": bounds[0], "high": bounds[1]}
    found = cpp_blend.blend(op.Operands(host=host, seed=grafted, alpha=weight, logits=logits, **given), attrs)
    exact = grafted.detach().double().requires_grad_()
    wide = BlendAttrs(
        "confidence", is_residual, has_gate=True, is_sorted=True, compute_dtype=torch.float64, out_dtype=torch.float64
    )
    exact_weight = weight if alpha == "number" else weight.double()
    expected = op.reference(op.Operands(host.double(), exact, exact_weight, logits=logits.double(), **given), wide)
    slack = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=slack, atol=slack)
    (of_seed,) = torch.autograd.grad(found, grafted, gradient)
    (of_exact,) = torch.autograd.grad(expected, exact, gradient.double())
    torch.testing.assert_close(of_seed.double(), of_exact, rtol=slack, atol=slack)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_infinities_and_nan_in_host_and_seed_give_what_the_sum_gives(weight):
    host, seed, logits = torch.randn(8, 19, 1), torch.randn(8, 19, 1), torch.randn(8, 5)
    for row, (one, other) in enumerate(
        [(math.inf, 0), (0, math.inf), (math.nan, 0), (0, math.nan), (math.inf, -math.inf)]
    ):
        host[row, [0, 17], 0], seed[row, [0, 17], 0] = one, other  # in a register and behind the last
    logits[:, 0] = 1e9  # the gate is exactly one
    attrs = BlendAttrs("confidence", has_gate=True, is_sorted=True)
    found = cpp_blend.blend(op.Operands(host=host, seed=seed, alpha=weight, logits=logits, gain=6.0, offset=1.2), attrs)
    torch.testing.assert_close(found, weight * seed + (1 - weight) * host, equal_nan=True)


@pytest.mark.parametrize("classes", [1, 2, 16, 33])
def test_margins_are_a_sorts_with_infinities_and_nan(classes):
    logits = torch.randn(6, classes)
    logits[1, 0] = math.nan
    logits[2] = -math.inf
    logits[3, -1] = math.inf
    logits[4, :2] = 5.0
    attrs = BlendAttrs("margin", is_sorted=True)
    found = cpp_blend.blend(op.Operands(logits=logits), attrs)
    two = (
        torch.cat((logits, torch.full((6, 1), -math.inf)), 1).topk(2).values if classes == 1 else logits.topk(2).values
    )
    assert torch.equal(found.nan_to_num(7.5), (two[:, 0] - two[:, 1]).nan_to_num(7.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_left_to_pytorch(dtype):
    host, seed, logits = torch.randn(3, 4, 1).to(dtype), torch.randn(3, 4, 1).to(dtype), torch.randn(3, 5).to(dtype)
    attrs = BlendAttrs("confidence", has_gate=True, is_sorted=True, compute_dtype=dtype, out_dtype=dtype)
    found = cpp_blend.blend(op.Operands(host=host, seed=seed, alpha=0.5, logits=logits), attrs)
    wide = BlendAttrs("confidence", has_gate=True, is_sorted=True, compute_dtype=torch.float64, out_dtype=torch.float64)
    expected = op.reference(op.Operands(host.double(), seed.double(), 0.5, logits=logits.double()), wide)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_a_model_that_gates_by_the_margin_runs_it_and_trains_as_before():
    def model(host, seed, alpha):
        top = seed.topk(2, dim=-1).values
        gate = torch.sigmoid(6.0 * (top[:, 0] - top[:, 1] - 0.2))
        weight = (alpha * gate).clamp(0, 1)[:, None].detach()
        return weight * seed + (1 - weight) * host.detach()

    host, seed, alpha = torch.randn(8, 600), torch.randn(8, 600, requires_grad=True), torch.tensor(0.6)
    compiled = torch.compile(model, backend="layerzero", options={"layerzero.lock": {"blend": "lz.cpp_blend"}})
    lz.clear_reports()
    found = compiled(host, seed, alpha)
    assert [match.kernel for match in lz.Report(lz.reports()).matches] == ["lz.cpp_blend"]
    expected = model(host, seed, alpha)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(each.square().sum(), seed)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
