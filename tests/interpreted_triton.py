"""Triton kernels in its interpreter, on the CPU: ``TRITON_INTERPRET=1 pytest tests/interpreted_triton.py``.

The variable must be set before Triton is imported, by anything; so test_triton.py runs this file in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import Rewriting
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lz_compile.ground import health
from lz_compile.lowering.encoded_attributes import encode
from lz_compile.lowering.fused import Fused, Siblings
from lz_compile.lowering.kernels.mlp import triton_mlp
from lz_compile.lowering.kernels.mlp.triton_source import ACTIVATIONS
from lz_compile.lowering.kernels.norm import triton_norm
from lz_compile.lowering.kernels.norm.triton_residual import _operator as residual_operator
from lz_compile.lowering.kernels.norm.triton_source import Norm
from lz_compile.lowering.kernels.rope import triton_rope
from lz_compile.lowering.kernels.rope.triton_source import rope_pair as pair_operator
from lz_compile.lowering.ops import mlp as mlp_op
from lz_compile.lowering.ops import norm as norm_op
from lz_compile.lowering.ops import rope as rope_op
from lz_compile.lowering.ops.mlp import MlpAttrs
from lz_compile.lowering.ops.norm import NormAttrs
from lz_compile.lowering.ops.rope import RopeAttrs
from lz_compile.lowering.triton_launch import is_interpreted
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.registry import kernels

#: Absolute error, and error relative to the largest value of a tensor, against float64.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
for_every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
drawn = settings(max_examples=12, deadline=None, derandomize=True, database=None)
OPS = torch.ops.layerzero


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    assert is_interpreted() or torch.get_default_device().type == "cuda", (
        "set TRITON_INTERPRET=1 or LZ_TEST_DEVICE=cuda"
    )
    yield
    assert not health.retirements()


def with_gradients(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The result, and the gradients of a sum that weighs its elements differently."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, max(out.numel(), 1), dtype=torch.float64)[: out.numel()].view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype))]


def assert_near(found: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype) -> None:
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        scale = max(other.abs().max().item(), 1.0) if other.numel() else 1.0
        torch.testing.assert_close(one.double(), other, atol=4 * TOLERANCE[dtype] * scale, rtol=0, equal_nan=True)


def exactly(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


# ---- normalisation ---------------------------------------------------------------------------------------------------

_NORMS = {
    "rms": NormAttrs(eps=1e-6, has_weight=True),
    "rms_without_weight": NormAttrs(eps=1e-6),
    "rms_offset": NormAttrs(eps=1e-6, has_weight=True, weight_offset=1.0),
    "rms_bias": NormAttrs(eps=1e-6, has_weight=True, has_bias=True),
    "layer": NormAttrs(True, eps=1e-5, has_weight=True, has_bias=True),
    "layer_without_weights": NormAttrs(True, eps=1e-5),
    "layer_of_a_bias": NormAttrs(True, eps=1e-5, has_bias=True),
    "outside": NormAttrs(True, eps=1e-3, eps_at="outside", has_weight=True),
    "floor": NormAttrs(eps=0.8, eps_at="floor", has_weight=True),
}
for_every_norm = pytest.mark.parametrize("case", _NORMS)


def norm_operands(attrs: NormAttrs, rows: int, hidden: int, dtype: torch.dtype) -> list[Tensor]:
    found = [torch.randn(rows, hidden), *(torch.randn(hidden) for _ in range(attrs.has_weight + attrs.has_bias))]
    return [tensor.to(dtype) for tensor in found]


def by_name(attrs: NormAttrs, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    names = [name for name, there in (("weight", attrs.has_weight), ("bias", attrs.has_bias)) if there]
    return dict(zip(names, weights, strict=True))


def expected_norm(attrs: NormAttrs, operands: Sequence[Tensor]) -> list[Tensor]:
    form = replace(attrs, out_dtype=torch.float64)
    return with_gradients(
        lambda x, *w: norm_op.reference(norm_op.Operands(x, **by_name(attrs, w)), form), exactly(operands)
    )


def check_norm(attrs: NormAttrs, rows: int, hidden: int, dtype: torch.dtype) -> None:
    attrs = replace(attrs, out_dtype=dtype)
    operands = norm_operands(attrs, rows, hidden, dtype)
    found = with_gradients(lambda x, *w: triton_norm.norm(norm_op.Operands(x, **by_name(attrs, w)), attrs), operands)
    assert [tensor.dtype for tensor in found] == [dtype] * len(found)
    assert_near(found, expected_norm(attrs, operands), dtype)


_LONG = ("rms_offset", "layer", "floor")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "rows", "hidden"),
    [
        (case, *size)
        for case in _NORMS
        for size in [(3, 3), (33, 100), *([(2, 1000), (1, 4097)] if case in _LONG else [])]
    ],
)
def test_a_norm_and_its_gradients_are_the_references(case, rows, hidden):
    check_norm(_NORMS[case], rows, hidden, torch.float32)


@pytest.mark.sampled
@for_every_norm
@for_every_dtype
def test_a_norm_is_computed_in_every_dtype(case, dtype):
    check_norm(_NORMS[case], 5, 33, dtype)


def test_a_norm_of_one_column_is_the_references():
    check_norm(_NORMS["rms"], 7, 1, torch.float64)
    check_norm(_NORMS["rms_bias"], 1, 1, torch.float64)
    check_norm(_NORMS["layer"], 4, 1, torch.float64)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "rows", "hidden", "part"),
    [
        (case, *size)
        for case in _NORMS
        for size in [(5, 3, 2), (20, 100, 32), *([(2, 1000, 256), (2, 4097, 2048)] if case in _LONG else [])]
    ],
)
def test_a_norm_of_rows_longer_than_a_block_is_the_references(case, rows, hidden, part):
    attrs = replace(_NORMS[case], out_dtype=torch.float32)
    operands = norm_operands(attrs, rows, hidden, torch.float32)
    weights = by_name(attrs, operands[1:])
    norm = Norm(operands[0], weights.get("weight"), weights.get("bias"), attrs, largest_block=1, part=part)
    result, total = norm.forward()
    assert total is operands[0]
    gradient = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape).float()
    found = [each for each in norm.backward(gradient) if each is not None]
    assert_near([result, *found], expected_norm(attrs, operands), torch.float32)


@given(
    case=st.sampled_from(sorted(_NORMS)),
    rows=st.integers(1, 70),
    hidden=st.integers(2, 70),
    gap=st.integers(0, 3),
    is_transposed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@drawn
def test_a_norm_takes_rows_of_any_number_length_and_memory_order(case, rows, hidden, gap, is_transposed, dtype):
    attrs = replace(_NORMS[case], out_dtype=dtype)
    operands = norm_operands(attrs, rows, hidden + gap, dtype)
    operands = [tensor[..., :hidden] for tensor in operands]
    if is_transposed:
        operands[0] = operands[0].T.contiguous().T
    found = with_gradients(lambda x, *w: triton_norm.norm(norm_op.Operands(x, **by_name(attrs, w)), attrs), operands)
    assert_near(found, expected_norm(attrs, operands), dtype)


def test_weights_may_have_a_dtype_of_their_own_and_the_result_a_wider_one():
    attrs = replace(_NORMS["layer"], out_dtype=torch.float32)
    given, weight, bias = norm_operands(attrs, 9, 50, torch.float32)
    operands = [given.bfloat16(), weight, bias.half()]
    found = with_gradients(lambda x, w, b: triton_norm.norm(norm_op.Operands(x, w, b), attrs), operands)
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.bfloat16, torch.float32, torch.float16]
    exact = expected_norm(attrs, operands)
    assert_near([found[0], found[2]], [exact[0], exact[2]], torch.float32)
    assert_near(found, exact, torch.bfloat16)


def test_statistics_are_in_float64_where_the_source_has_them_there():
    attrs = replace(_NORMS["layer_without_weights"], compute_dtype=torch.float64)
    given = torch.randn(3, 40) + 1e4
    exact = norm_op.reference(norm_op.Operands(given.double()), replace(attrs, out_dtype=torch.float64))
    torch.testing.assert_close(triton_norm.norm(norm_op.Operands(given), attrs).double(), exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("largest_block", [None, 1])
def test_a_large_mean_costs_no_more_digits_than_it_must(largest_block):
    given = torch.randn(3, 1000) + 300.0
    attrs = _NORMS["layer_without_weights"]
    found, _ = Norm(given, None, None, attrs, largest_block, 64).forward()
    exact = norm_op.reference(norm_op.Operands(given.double()), replace(attrs, out_dtype=torch.float64))
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)


@for_every_norm
def test_no_rows_are_no_error_and_give_weights_gradients_of_zero(case):
    attrs = _NORMS[case]
    result, *gradients = with_gradients(
        lambda x, *w: triton_norm.norm(norm_op.Operands(x, **by_name(attrs, w)), attrs),
        norm_operands(attrs, 0, 12, torch.float32),
    )
    assert result.shape == gradients[0].shape == (0, 12)
    assert all(torch.equal(each, torch.zeros(12)) for each in gradients[1:])


@pytest.mark.sampled
@pytest.mark.parametrize("largest_block", [None, 1])
@for_every_norm
def test_what_is_not_a_number_stays_in_its_row(case, largest_block):
    attrs = _NORMS[case]
    given, *weights = norm_operands(attrs, 5, 20, torch.float32)
    given[1, 3], given[3, 7] = torch.nan, torch.inf
    norm = Norm(given, *(by_name(attrs, weights).get(name) for name in ("weight", "bias")), attrs, largest_block, 8)
    found, _ = norm.forward()
    expected = norm_op.reference(norm_op.Operands(given, **by_name(attrs, weights)), attrs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    gradient, *_ = norm.backward(torch.ones_like(found))
    assert gradient[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("case", ["rms", "layer", "floor"])
def test_rows_of_zeros_have_finite_gradients(case):
    attrs = _NORMS[case]
    given, *weights = norm_operands(attrs, 3, 20, torch.float32)
    given[1] = 0.0
    found = with_gradients(
        lambda x, *w: triton_norm.norm(norm_op.Operands(x, **by_name(attrs, w)), attrs), [given, *weights]
    )
    assert all(tensor.isfinite().all() for tensor in found)


@pytest.mark.parametrize("largest_block", [None, 1])
def test_the_same_inputs_give_the_same_bits(largest_block):
    attrs = _NORMS["layer"]
    given, weight, bias = norm_operands(attrs, 40, 40, torch.float32)
    norm = Norm(given, weight, bias, attrs, largest_block, 32)
    gradient = torch.randn(40, 40)
    first, second = (norm.backward(gradient) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("eps_at", ["inside", "outside", "floor"])
@pytest.mark.parametrize("is_centred", [False, True])
def test_gradients_of_a_norm_are_those_of_differences(is_centred, eps_at):
    attrs = NormAttrs(is_centred, 0.1, eps_at, True, True, 0.5, torch.float64, out_dtype=torch.float64)
    operands = [x.requires_grad_() for x in norm_operands(attrs, 2, 3, torch.float64)]
    assert torch.autograd.gradcheck(lambda x, w, b: triton_norm.norm(norm_op.Operands(x, w, b), attrs), operands)


def test_a_gradient_may_be_one_number_for_all():
    attrs = _NORMS["rms"]
    leaves = [x.requires_grad_() for x in norm_operands(attrs, 4, 9, torch.float32)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = torch.autograd.grad(triton_norm.norm(norm_op.Operands(*leaves), attrs).sum(), leaves)
    expected = norm_op.reference(norm_op.Operands(*exact), replace(attrs, out_dtype=torch.float64)).sum()
    assert_near(found, torch.autograd.grad(expected, exact), torch.float32)


# ---- a residual before -----------------------------------------------------------------------------------------------


def residual_norm(x: Tensor, other: Tensor, *weights: Tensor, attrs: NormAttrs) -> tuple[Tensor, Tensor]:
    total: Any = Fused("residual", {"input": x, "residual": other}, None)
    return triton_norm.residual_norm(norm_op.Operands(total, **by_name(attrs, weights)), attrs)


@pytest.mark.sampled
@pytest.mark.parametrize("hidden", [1, 3, 100, 1000])
@pytest.mark.parametrize("case", ["rms", "rms_offset", "layer", "layer_without_weights", "layer_of_a_bias", "floor"])
def test_a_residual_is_added_and_normalised_with_gradients_through_both_results(case, hidden):
    attrs = replace(_NORMS[case], out_dtype=torch.float64)
    given, *weights = norm_operands(attrs, 7, hidden, torch.float64)
    operands = [given, torch.randn(7, hidden, dtype=torch.float64), *weights]

    def expected(x: Tensor, other: Tensor, *w: Tensor) -> Tensor:
        return torch.cat([norm_op.reference(norm_op.Operands(x + other, **by_name(attrs, w)), attrs), x + other])

    found = with_gradients(lambda *x: torch.cat(residual_norm(*x, attrs=attrs)), operands)
    assert_near(found, with_gradients(expected, operands), torch.float64)


@pytest.mark.parametrize("which", [0, 1])
def test_of_a_residual_and_its_norm_one_result_may_have_no_gradient(which):
    attrs = replace(_NORMS["rms_offset"], out_dtype=torch.float64)
    given, weight = norm_operands(attrs, 3, 10, torch.float64)
    operands = [given, torch.randn(3, 10, dtype=torch.float64)]

    def expected(x: Tensor, other: Tensor) -> Tensor:
        return (norm_op.reference(norm_op.Operands(x + other, weight), attrs), x + other)[which]

    found = with_gradients(lambda *x: residual_norm(*x, weight, attrs=attrs)[which], operands)
    assert_near(found, with_gradients(expected, operands), torch.float64)


def test_a_residual_before_a_wider_result_keeps_its_dtype():
    attrs = replace(_NORMS["rms"], out_dtype=torch.float32)
    given, weight = norm_operands(attrs, 5, 40, torch.float16)
    result, total = residual_norm(given, given.flip(0), weight, attrs=attrs)
    assert (result.dtype, total.dtype) == (torch.float32, torch.float16)
    torch.testing.assert_close(result, norm_op.reference(norm_op.Operands(total, weight), attrs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("largest_block", [None, 1])
def test_the_sum_with_a_residual_is_rounded_before_it_is_normalised(largest_block):
    """In float16: the interpreter cuts bits off where a GPU rounds to bfloat16."""
    attrs = replace(_NORMS["rms"], out_dtype=torch.float16)
    given, weight = norm_operands(attrs, 5, 40, torch.float16)
    residual = torch.randn(5, 40, dtype=torch.float16)
    result, total = Norm(given, weight, None, attrs, largest_block, 16).forward(residual)
    assert torch.equal(total, given + residual)
    torch.testing.assert_close(
        result, norm_op.reference(norm_op.Operands(given + residual, weight), attrs), atol=0.0, rtol=2e-3
    )


@pytest.mark.parametrize("largest_block", [None, 1])
def test_the_gradient_of_a_sum_is_added_in_rows_of_any_length(largest_block):
    attrs = _NORMS["layer"]
    given, weight, bias = norm_operands(attrs, 5, 40, torch.float32)
    norm = Norm(given, weight, bias, attrs, largest_block, 16)
    gradient, of_total = torch.randn(2, 5, 40)
    plain, more = (norm.backward(gradient, each)[0] for each in (None, of_total))
    torch.testing.assert_close(more, plain + of_total, atol=1e-5, rtol=1e-5)


# ---- rotary embedding ------------------------------------------------------------------------------------------------

_ROPES = {
    "whole": (16, 16, 0),
    "first_features": (13, 6, 0),
    "last_features": (13, 6, 7),
    "features_between": (13, 6, 3),
    "one_pair": (2, 2, 0),
}


def rope_operands(dim: int, width: int, dtype: torch.dtype, *, is_token_major: bool = False) -> list[Tensor]:
    given = torch.randn(2, 5, 3, dim).transpose(1, 2) if is_token_major else torch.randn(2, 3, 5, dim)
    return [given.to(dtype), torch.randn(2, 1, 5, width).to(dtype), torch.randn(1, 1, 5, width).to(dtype)]


def check_rope(operands: Sequence[Tensor], attrs: RopeAttrs, dtype: torch.dtype) -> None:
    given, cos, sin = operands
    found = with_gradients(lambda x: triton_rope.rope(rope_op.Operands(x, cos, sin), attrs), [given])
    assert found[0].stride() == torch.empty_like(given).stride()
    exact = replace(attrs, out_dtype=torch.float64)
    wide = exactly(operands)
    assert_near(
        found, with_gradients(lambda x: rope_op.reference(rope_op.Operands(x, *wide[1:]), exact), wide[:1]), dtype
    )


@pytest.mark.sampled
@pytest.mark.parametrize("case", _ROPES)
@pytest.mark.parametrize("has_half_tables", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_features_are_turned_and_turned_back(dtype, is_interleaved, has_half_tables, case):
    dim, rotary, start = _ROPES[case]
    attrs = RopeAttrs(is_interleaved, rotary, start, has_half_tables, out_dtype=dtype)
    width = rotary // 2 if has_half_tables else rotary
    for is_token_major in (False, True):
        check_rope(rope_operands(dim, width, dtype, is_token_major=is_token_major), attrs, dtype)


def test_tables_may_be_wider_and_the_same_for_all_positions():
    given, cos, sin = rope_operands(8, 8, torch.float32)
    attrs = RopeAttrs(rotary_dim=8, out_dtype=torch.float16)
    check_rope([given.half(), cos[:, :, :1], sin], attrs, torch.float16)
    check_rope([given.half(), cos[:, :, :1], sin[:, :, :1]], attrs, torch.float16)
    check_rope([given.half(), cos[:1].expand(2, 1, 5, 8), sin.mT.contiguous().mT], attrs, torch.float16)
    check_rope([given.half(), cos, sin], replace(attrs, out_dtype=torch.float32), torch.float16)


def test_no_positions_are_no_error():
    attrs = RopeAttrs(rotary_dim=8)
    given, cos, sin = (tensor[:, :, :0] for tensor in rope_operands(8, 8, torch.float32))
    assert triton_rope.rope(rope_op.Operands(given, cos, sin), attrs).shape == (2, 3, 0, 8)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", ["whole", "features_between"])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_query_and_key_are_turned_in_one_launch(is_interleaved, case, dtype):
    dim, rotary, start = _ROPES[case]
    query, cos, sin = rope_operands(dim, rotary, dtype)
    key = torch.randn(2, 5, 1, dim).to(dtype).transpose(1, 2)
    attrs = RopeAttrs(is_interleaved, rotary, start, out_dtype=dtype)

    def ours(q: Tensor, k: Tensor) -> Tensor:
        other = Fused("rope", rope_op.Operands(k, cos, sin), attrs)
        return torch.cat(triton_rope.rope_pair(Siblings(rope_op.Operands(q, cos, sin), other), attrs), 1)

    exact = replace(attrs, out_dtype=torch.float64)

    def expected(q: Tensor, k: Tensor) -> Tensor:
        return torch.cat([rope_op.reference(rope_op.Operands(x, cos.double(), sin.double()), exact) for x in (q, k)], 1)

    found = with_gradients(ours, [query, key])
    assert_near(found, with_gradients(expected, exactly([query, key])), dtype)


# ---- activations -----------------------------------------------------------------------------------------------------


def check_mlp(operands: Sequence[Tensor], attrs: MlpAttrs, dtype: torch.dtype) -> None:
    exact = replace(attrs, out_dtype=torch.float64)
    found = with_gradients(lambda *x: triton_mlp.mlp(mlp_op.Operands(*x), attrs), operands)
    assert_near(
        found, with_gradients(lambda *x: mlp_op.reference(mlp_op.Operands(*x), exact), exactly(operands)), dtype
    )


@pytest.mark.sampled
@for_every_dtype
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_and_its_gradients_are_the_references(activation, is_gated, dtype):
    attrs = MlpAttrs(activation, is_gated, out_dtype=dtype)
    packed = torch.randn(3, 140).to(dtype) * 2  # halves of one tensor: rows have gaps between them
    check_mlp([packed[:, :70], packed[:, 70:]][: 1 + is_gated], attrs, dtype)


@pytest.mark.parametrize("columns", [1, 3, 1000, 4097])
def test_rows_of_any_length_are_activated(columns):
    check_mlp([torch.randn(2, columns), torch.randn(2, columns)], MlpAttrs("silu"), torch.float32)


def test_factors_may_have_other_dtypes_and_memory_orders():
    gate, up = torch.randn(9, 5).T.half(), torch.randn(5, 9)
    check_mlp([gate, up], MlpAttrs("gelu", out_dtype=torch.float16), torch.float16)
    check_mlp([gate, up], MlpAttrs("gelu", out_dtype=torch.float32), torch.float16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_and_infinite_values_and_nan_are_those_of_the_definition(activation):
    gate = torch.tensor([[0.0, -0.0, 20.0, -20.0, 90.0, -90.0, 1e4, -1e4, torch.inf, torch.nan]])
    attrs = MlpAttrs(activation, is_gated=False)
    # In float32, PyTorch's GELU of infinity is NaN where it is computed with AVX-512.
    wide = MlpAttrs(activation, is_gated=False, out_dtype=torch.float64)
    found, expected = (
        triton_mlp.mlp(mlp_op.Operands(gate), attrs),
        mlp_op.reference(mlp_op.Operands(gate.double()), wide),
    )
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    gradient = with_gradients(lambda x: triton_mlp.mlp(mlp_op.Operands(x), attrs), [gate[:, :8]])[1]
    assert gradient.isfinite().all()


@pytest.mark.parametrize("is_gated", [False, True])
def test_no_rows_are_activated_without_an_error(is_gated):
    operands = [torch.randn(0, 6), torch.randn(0, 6)][: 1 + is_gated]
    found = with_gradients(lambda *x: triton_mlp.mlp(mlp_op.Operands(*x), MlpAttrs("relu", is_gated)), operands)
    assert all(tensor.shape == (0, 6) for tensor in found)


def test_the_kernel_claims_the_activations_that_it_has():
    assert kernels("mlp")["lz.triton_mlp"].supports & set(mlp_op.ACTIVATIONS) == set(ACTIVATIONS)


# ---- operators -------------------------------------------------------------------------------------------------------


def operators() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every operator with arguments."""
    rope = rope_operands(8, 8, torch.float32)
    form = encode(replace(_NORMS["layer"], out_dtype=torch.float16))
    norm = [torch.randn(3, 10), torch.randn(10), torch.randn(10)]
    pair = [torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)]
    for tensor in (rope[0], *norm, *pair):
        tensor.requires_grad_()
    gate, up = (torch.randn(3, 10, requires_grad=True) for _ in range(2))
    residual = (norm[0], torch.randn(3, 10, requires_grad=True))
    plain = encode(replace(_NORMS["rms_without_weight"], out_dtype=torch.float32))
    return {
        "norm": (OPS.triton_norm.default, (*norm, form)),
        "rope": (OPS.triton_rope.default, (*rope, encode(RopeAttrs(rotary_dim=8)))),
        "gated": (OPS.triton_activation.default, (gate, up, None, None, encode(MlpAttrs("silu")))),
        "plain": (OPS.triton_activation.default, (gate, None, None, None, encode(MlpAttrs("gelu", is_gated=False)))),
        "residual": (residual_operator, (*residual, *norm[1:], form)),
        "residual_without_weights": (residual_operator, (*residual, None, None, plain)),
        "pair": (pair_operator, (*pair, *rope[1:], encode(RopeAttrs(rotary_dim=8)))),
    }


@pytest.mark.parametrize("name", operators())
def test_an_operator_is_what_pytorch_asks_of_one(name):
    operator, arguments = operators()[name]
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("name", ["norm", "rope", "gated", "plain"])
def test_a_cuda_graph_may_capture_the_kernel_as_its_descriptor_says(name):
    operator = operators()[name][0]
    inner = getattr(OPS, f"{operator._schema.name.partition('::')[2]}_kernel").default
    assert torch.Tag.cudagraph_unsafe not in inner.tags
    assert kernels(name if name in ("norm", "rope") else "mlp")[
        f"lz.triton_{name if name in ('norm', 'rope') else 'mlp'}"
    ].is_cuda_graph_safe


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_operators_run_with_gradients_inside_compiled_code(backend):
    form = encode(replace(_NORMS["layer"], has_bias=False))
    offset = encode(_NORMS["rms_offset"])

    def model(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        first, total = residual_operator(x * 2, residual, weight, None, offset)
        return OPS.triton_norm(first + total, weight, None, form).cos()

    def expected(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        total = x * 2 + residual
        first = norm_op.reference(norm_op.Operands(total, weight), _NORMS["rms_offset"])
        return norm_op.reference(
            norm_op.Operands(first + total, weight), replace(_NORMS["layer"], has_bias=False)
        ).cos()

    operands = [torch.randn(4, 10), torch.randn(4, 10), torch.randn(10)]
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found, wanted = with_gradients(compiled, operands), with_gradients(expected, operands)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    row = x.float()
    return weight * (row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def residual(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    total = x + other
    return rms_norm(total, weight) @ total.mT


def both_turned(x: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turned(x, cos, sin).tanh() @ turned(key, cos, sin).mT


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


_SIZES = (2, 3, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8)
#: By kernel, a function that a model could have, its op, how many operands are no tables, and the sizes of all of them.
_MODELS: dict[str, tuple[Callable[..., Tensor], str, int, tuple[tuple[int, ...], ...]]] = {
    "triton_norm": (rms_norm, "norm", 2, ((2, 5, 12), (12,))),
    "triton_residual_norm": (residual, "norm", 3, ((2, 5, 12), (2, 5, 12), (12,))),
    "triton_rope": (turned, "rope", 1, _SIZES),
    "triton_rope_pair": (both_turned, "rope", 2, ((2, 3, 5, 8), *_SIZES)),
    "triton_mlp": (swiglu, "mlp", 4, ((2, 5, 12), (12, 20), (12, 20), (20, 12))),
}


@pytest.fixture
def here() -> Any:
    """Makes a kernel that is for GPUs one for every device, by its op and name."""
    registered: list[str] = []

    def register(op: str, name: str) -> str:
        spec = kernels(op)[f"lz.{name}"]
        kernel_id = f"test.{name}"
        registry.register(replace(spec, kernel_id=kernel_id, platforms=frozenset({"*"}), prior=()))
        registered.append(kernel_id)
        return kernel_id

    yield register
    for kernel_id in registered:
        registry.unregister_kernel(kernel_id)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", _MODELS)
def test_what_is_recognised_in_a_model_runs_on_the_kernel_as_compiled_code(here, name, is_dynamic):
    function, op, count, shapes = _MODELS[name]
    operands = [torch.randn(shape) * 0.4 for shape in shapes]
    if is_dynamic:
        torch._dynamo.mark_dynamic(operands[0], 0)
    backend = Rewriting(lock={op: here(op, name)})
    trained = operands[:count]
    compiled = torch.compile(lambda *x: function(*x).cos(), backend=backend, fullgraph=True)
    found = with_gradients(lambda *x: compiled(*x, *operands[len(x) :]), trained)
    matches = [match for match in backend.report.matches if match.op == op]
    assert matches, backend.why_not()
    assert (matches[-1].kernel, matches[-1].rewritten) == (f"test.{name}", True), backend.why_not()
    of_others = [reason.code for match in matches[:-1] for reason in match.reasons]
    assert of_others == (["PART_OF_ANOTHER"] if name == "triton_rope_pair" else [])
    wanted = with_gradients(lambda *x: function(*x, *operands[len(x) :]).cos(), trained)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
