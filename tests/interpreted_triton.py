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

from lz_compile.errors import GradientUnsupportedError
from lz_compile.ground import health
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.fused import Fused
from lz_compile.lowering.kernels.norm import triton_norm
from lz_compile.lowering.ops import norm as norm_op
from lz_compile.lowering.ops.norm import NormAttrs
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


def assert_near(found: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype) -> None:
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        scale = max(other.abs().max().item(), 1.0) if other.numel() else 1.0
        torch.testing.assert_close(one.double(), other, atol=4 * TOLERANCE[dtype] * scale, rtol=0, equal_nan=True)


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


def ours(attrs: NormAttrs, given: Tensor, *weights: Tensor) -> Tensor:
    return triton_norm.norm(norm_op.Operands(given, **by_name(attrs, weights)), attrs)


def expected_norm(attrs: NormAttrs, given: Tensor, *weights: Tensor) -> Tensor:
    wide = by_name(attrs, [each.double() for each in weights])
    return norm_op.reference(norm_op.Operands(given.double(), **wide), replace(attrs, out_dtype=torch.float64))


def check_norm(attrs: NormAttrs, rows: int, hidden: int, dtype: torch.dtype) -> None:
    attrs = replace(attrs, out_dtype=dtype)
    operands = norm_operands(attrs, rows, hidden, dtype)
    found = ours(attrs, *operands)
    assert found.dtype == dtype
    assert_near([found], [expected_norm(attrs, *operands)], dtype)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "rows", "hidden"),
    [
        (case, *size)
        for case in _NORMS
        for size in [(3, 3), (33, 100), *([(2, 1000), (1, 4097)] if case in ("rms_offset", "layer", "floor") else [])]
    ],
)
def test_a_norm_is_the_reference(case, rows, hidden):
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
    assert_near([ours(attrs, *operands)], [expected_norm(attrs, *operands)], dtype)


def test_weights_may_have_a_dtype_of_their_own_and_the_result_a_wider_one():
    attrs = replace(_NORMS["layer"], out_dtype=torch.float32)
    given, weight, bias = norm_operands(attrs, 9, 50, torch.float32)
    operands = [given.bfloat16(), weight, bias.half()]
    found = ours(attrs, *operands)
    assert found.dtype == torch.float32
    assert_near([found], [expected_norm(attrs, *operands)], torch.float32)


def test_statistics_are_in_float64_where_the_source_has_them_there():
    attrs = replace(_NORMS["layer_without_weights"], compute_dtype=torch.float64)
    given = torch.randn(3, 40) + 1e4
    torch.testing.assert_close(ours(attrs, given).double(), expected_norm(attrs, given), atol=1e-6, rtol=1e-6)


def test_a_large_mean_costs_no_more_digits_than_it_must():
    given = torch.randn(3, 1000) + 300.0
    attrs = _NORMS["layer_without_weights"]
    torch.testing.assert_close(ours(attrs, given).double(), expected_norm(attrs, given), atol=1e-4, rtol=0)


def test_rows_that_no_block_holds_are_pytorchs():
    attrs = _NORMS["layer"]
    operands = norm_operands(attrs, 2, triton_norm.LARGEST + 1, torch.float32)
    assert_near([ours(attrs, *operands)], [expected_norm(attrs, *operands)], torch.float32)
    result, total = residual_norm(operands[0], operands[0], *operands[1:], attrs=attrs)
    torch.testing.assert_close(total, 2 * operands[0])
    assert_near([result], [expected_norm(attrs, total, *operands[1:])], torch.float32)


@for_every_norm
def test_no_rows_are_no_error(case):
    assert ours(_NORMS[case], *norm_operands(_NORMS[case], 0, 12, torch.float32)).shape == (0, 12)


@for_every_norm
def test_what_is_not_a_number_stays_in_its_row(case):
    attrs = _NORMS[case]
    given, *weights = norm_operands(attrs, 5, 20, torch.float32)
    given[1, 3], given[3, 7] = torch.nan, torch.inf
    found, exact = ours(attrs, given, *weights).double(), expected_norm(attrs, given, *weights)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_gradients_are_refused():
    attrs = _NORMS["rms"]
    given, weight = norm_operands(attrs, 3, 8, torch.float32)
    with pytest.raises(GradientUnsupportedError, match="triton_norm"):
        ours(attrs, given.requires_grad_(), weight)


# ---- a residual before -----------------------------------------------------------------------------------------------


def residual_norm(x: Tensor, other: Tensor, *weights: Tensor, attrs: NormAttrs) -> tuple[Tensor, Tensor]:
    total: Any = Fused("residual", {"input": x, "residual": other}, None)
    return triton_norm.residual_norm(norm_op.Operands(total, **by_name(attrs, weights)), attrs)


@pytest.mark.sampled
@pytest.mark.parametrize("hidden", [1, 3, 100, 1000])
@pytest.mark.parametrize("case", ["rms", "rms_offset", "layer", "layer_without_weights", "layer_of_a_bias", "floor"])
def test_a_residual_is_added_and_normalised(case, hidden):
    attrs = replace(_NORMS[case], out_dtype=torch.float64)
    given, *weights = norm_operands(attrs, 7, hidden, torch.float64)
    other = torch.randn(7, hidden, dtype=torch.float64)
    result, total = residual_norm(given, other, *weights, attrs=attrs)
    torch.testing.assert_close(total, given + other)
    assert_near([result], [expected_norm(attrs, total, *weights)], torch.float64)


def test_a_residual_before_a_wider_result_keeps_its_dtype():
    attrs = replace(_NORMS["rms"], out_dtype=torch.float32)
    given, weight = norm_operands(attrs, 5, 40, torch.float16)
    result, total = residual_norm(given, given.flip(0), weight, attrs=attrs)
    assert (result.dtype, total.dtype) == (torch.float32, torch.float16)
    torch.testing.assert_close(result, norm_op.reference(norm_op.Operands(total, weight), attrs), atol=1e-5, rtol=1e-5)


def test_the_sum_with_a_residual_is_rounded_before_it_is_normalised():
    """In float16: the interpreter cuts bits off where a GPU rounds to bfloat16."""
    attrs = replace(_NORMS["rms"], out_dtype=torch.float16)
    given, weight = norm_operands(attrs, 5, 40, torch.float16)
    other = torch.randn(5, 40, dtype=torch.float16)
    result, total = residual_norm(given, other, weight, attrs=attrs)
    assert torch.equal(total, given + other)
    torch.testing.assert_close(
        result, norm_op.reference(norm_op.Operands(given + other, weight), attrs), atol=0.0, rtol=2e-3
    )


# ---- operators -------------------------------------------------------------------------------------------------------


def operators() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every operator with arguments."""
    form = encode(replace(_NORMS["layer"], out_dtype=torch.float16))
    norm = [torch.randn(3, 10), torch.randn(10), torch.randn(10)]
    plain = encode(replace(_NORMS["rms_without_weight"], out_dtype=torch.float32))
    return {
        "norm": (OPS.triton_norm.default, (*norm, form)),
        "residual": (OPS.triton_residual_norm.default, (norm[0], torch.randn(3, 10), *norm[1:], form)),
        "residual_without_weights": (
            OPS.triton_residual_norm.default,
            (norm[0], torch.randn(3, 10), None, None, plain),
        ),
    }


@pytest.mark.parametrize("name", operators())
def test_an_operator_is_what_pytorch_asks_of_one(name):
    operator, arguments = operators()[name]
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("name", ["triton_norm", "triton_residual_norm"])
def test_a_cuda_graph_may_capture_the_kernel_as_its_descriptor_says(name):
    inner = getattr(OPS, f"{name}_kernel").default
    assert torch.Tag.cudagraph_unsafe not in inner.tags
    assert kernels("norm")[f"lz.{name}"].is_cuda_graph_safe


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_operators_run_inside_compiled_code(backend):
    form = encode(replace(_NORMS["layer"], has_bias=False))
    offset = encode(_NORMS["rms_offset"])

    def model(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        first, total = OPS.triton_residual_norm(x * 2, residual, weight, None, offset)
        return OPS.triton_norm(first + total, weight, None, form).cos()

    def expected(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        total = x * 2 + residual
        first = norm_op.reference(norm_op.Operands(total, weight), _NORMS["rms_offset"])
        return norm_op.reference(
            norm_op.Operands(first + total, weight), replace(_NORMS["layer"], has_bias=False)
        ).cos()

    operands = [torch.randn(4, 10), torch.randn(4, 10), torch.randn(10)]
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*operands), expected(*operands), atol=1e-4, rtol=1e-4)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    row = x.float()
    return weight * (row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def residual(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    total = x + other
    return rms_norm(total, weight) @ total.mT


#: By kernel, a function that a model could have, and the sizes of its operands.
_MODELS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "triton_norm": (rms_norm, ((2, 5, 12), (12,))),
    "triton_residual_norm": (residual, ((2, 5, 12), (2, 5, 12), (12,))),
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
    function, shapes = _MODELS[name]
    operands = [torch.randn(shape) * 0.4 for shape in shapes]
    for each in operands if is_dynamic else ():
        if each.dim() == 3:
            torch._dynamo.mark_dynamic(each, 0)
    backend = Rewriting(lock={"norm": here("norm", name)})
    found = torch.compile(lambda *x: function(*x).cos(), backend=backend, fullgraph=True)(*operands)
    (match,) = [match for match in backend.report.matches if match.op == "norm"]
    assert (match.kernel, match.rewritten) == (f"test.{name}", True), backend.why_not()
    torch.testing.assert_close(found, function(*operands).cos(), atol=1e-4, rtol=1e-4)
