"""Triton's products with stored weights in its interpreter, on the CPU: ``TRITON_INTERPRET=1 pytest tests/interpreted_linear.py``.

The variable must be set before Triton is imported, by anything; so test_triton_linear.py runs this file in a process of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lz_compile.ground import health
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.kernels.linear.triton_linear import linear
from lz_compile.lowering.kernels.linear.triton_source import constants_of, run
from lz_compile.lowering.ops import linear as op
from lz_compile.lowering.ops.linear import LinearAttrs, Operands
from lz_compile.lowering.triton_launch import is_interpreted
from tests.test_linear import FLOAT8, PACKINGS, many, stored_numbers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ZEROS = (*DTYPES, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
#: Columns, rows of the weight, groups: whole tiles and parts of them, groups of many tiles, of one, and of parts of one; an odd
#: number of groups, whose middle lies in one of them, and odd groups, of which two share a byte.
SHAPES = (
    (1, 3, 1), (2, 1, 1), (130, 34, 1), (512, 5, 1), (64, 33, 2), (96, 7, 3), (192, 3, 3), (160, 40, 2), (512, 2, 2),
    (40, 9, 2), (36, 4, 4), (60, 3, 12), (128, 3, 64), (6, 2, 6), (1056, 2, 32),
)  # fmt: skip
#: How far a result may be off that is rounded to a dtype; the interpreter cuts digits of bfloat16 off.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    assert is_interpreted() or torch.get_default_device().type == "cuda", (
        "set TRITON_INTERPRET=1 or LZ_TEST_DEVICE=cuda"
    )
    yield
    assert not health.retirements()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def within(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in the middle of more memory, all of which would be seen in a result."""
    bits = tensor.dtype.itemsize == 1
    memory = torch.empty([size + 3 for size in tensor.shape], dtype=torch.uint8 if bits else tensor.dtype)
    memory.fill_(127 if bits else torch.nan if tensor.is_floating_point() else 10**9)
    memory = memory.view(tensor.dtype)
    part = memory[tuple(slice(1, 1 + size) for size in tensor.shape)]
    part.copy_(tensor)
    return part


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.repeat_interleave(2)[::2]


@dataclass(frozen=True)
class Problem:
    """A product: ``shared`` are operands that are the same for all groups or all rows of the weight."""

    rows: int = 3
    shape: tuple[int, int, int] = (64, 5, 4)
    stored: Any = torch.int8
    names: tuple[str, ...] = ("scale",)
    shared: tuple[tuple[bool, bool], ...] = ((False, False),) * 3
    dtype: torch.dtype = torch.float32
    other_dtype: torch.dtype = torch.float32
    zero_dtype: torch.dtype = torch.float32
    laid: Callable[[torch.Tensor], torch.Tensor] = plain
    seed: int = 0

    @property
    def packing(self) -> Any:
        return self.stored if isinstance(self.stored, str) else "none"

    def operands(self) -> Operands:
        torch.manual_seed(self.seed)
        columns, outs, groups = self.shape
        found = {
            "input": torch.randn(self.rows, columns).to(self.dtype),
            "weight": stored_numbers(
                outs, columns, torch.uint8 if self.packing != "none" else self.stored, self.packing
            ),
        }
        for (name, size), (for_rows, for_groups) in zip(
            {"scale": 0.05, "zero": 15, "offset": 0.1}.items(), self.shared, strict=True
        ):
            if name in self.names:
                number = torch.rand(1 if for_rows else outs, 1 if for_groups else groups) * size
                found[name] = number.to(self.zero_dtype if name == "zero" else self.other_dtype)
        if "bias" in self.names:
            found["bias"] = torch.randn(outs).to(self.other_dtype)
        return Operands(**{name: self.laid(each) for name, each in found.items()})

    def attrs(self, x: Operands, **given_: Any) -> LinearAttrs:
        sizes = {"N": self.rows, "K": self.shape[0], "O": self.shape[1], "W": x.weight.shape[1], "G": op.groups_of(x)}
        return op.from_operands(x, sizes, packing=self.packing, **given_)[0]


def exact(x: Operands, attrs: LinearAttrs) -> torch.Tensor:
    """The definition in float64."""
    return op.reference(replace(x, input=x.input.double()), replace(attrs, out_dtype=torch.float64))


def check(problem: Problem, out_dtype: torch.dtype = torch.float32) -> None:
    x = problem.operands()
    attrs = problem.attrs(x, out_dtype=out_dtype)
    truth, found = exact(x, attrs), run(x, attrs)
    assert found.dtype == out_dtype
    assert found.is_contiguous()
    size = 1 + float(truth.abs().max())
    torch.testing.assert_close(found.double(), truth, rtol=ROUNDING[out_dtype], atol=3e-6 * size)


@st.composite
def problems(draw):
    shape = draw(st.sampled_from(SHAPES))
    stored = draw(st.sampled_from((torch.int8, torch.uint8, *FLOAT8, *(PACKINGS if shape[0] % 2 == 0 else ()))))
    return Problem(
        draw(st.sampled_from((1, 2, 16, 17, 70))), shape, stored,
        tuple(draw(st.sets(st.sampled_from(("scale", "zero", "offset", "bias"))))),
        tuple(draw(st.tuples(st.booleans(), st.booleans())) for _ in range(3)), *draw_dtypes(draw),
        draw(st.sampled_from((plain, within, transposed))), draw(st.integers(0, 99)),
    )  # fmt: skip


def draw_dtypes(draw):
    dtype = draw(st.sampled_from(DTYPES))
    return dtype, draw(st.sampled_from((dtype, torch.float32, torch.float64))), draw(st.sampled_from(ZEROS))


@settings(many, max_examples=examples(15, 100))
@given(problem=problems(), is_rounded=st.booleans())
def test_products_are_the_definitions(problem, is_rounded):
    check(problem, problem.dtype if is_rounded else torch.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("stored", [torch.int8, "low_first", "high_half"], ids=str)
def test_groups_of_any_size_are_the_definitions(stored, shape, dtype):
    check(Problem(3, shape, stored, ("scale", "zero", "offset"), dtype=dtype))


def test_inputs_of_16_bits_are_multiplied_with_stored_numbers_where_a_tile_lies_in_one_group():
    forms = {}
    for stored in (torch.int8, "low_first", "low_half"):
        for shape in ((4096, 3, 1), (4096, 3, 32), (4096, 3, 128), (4096, 3, 256), (96, 3, 3), (36, 3, 4)):
            problem = Problem(1, shape, stored, dtype=torch.bfloat16)
            x = problem.operands()
            found = constants_of(x, problem.attrs(x))
            forms[stored, shape[0], shape[2]] = found["DEPTH"] if not found["IS_CUT"] else 0
    assert [*forms.values()] == [256, 128, 32, 16, 32, 0, 64, 64, 16, 0, 16, 0, 64, 64, 32, 16, 16, 0]


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["stored", "meant", "cut"])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("given_dtype", DTYPES, ids=str)
def test_every_number_of_eight_bits_is_that_number(given_dtype, dtype, form):
    x = torch.zeros(1, 24, dtype=given_dtype)
    bits = torch.zeros(256, 24, dtype=torch.uint8)
    x[0, 9], bits[:, 9] = 1, torch.arange(256)
    scale = {"stored": None, "meant": torch.ones(256, 1), "cut": torch.ones(1, 3)}[form]
    operands = Operands(x, bits.view(dtype), scale)
    attrs, _ = op.from_operands(
        operands, {"N": 1, "K": 24, "O": 256, "W": 24, "G": 3 if form == "cut" else 1}, out_dtype=torch.float32
    )
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    torch.testing.assert_close(run(operands, attrs)[0], expected, rtol=0, atol=0, equal_nan=True)


# ---- what is no number, and what is nothing --------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 5, 1), (40, 5, 2), (64, 5, 2)], ids=str)
@pytest.mark.parametrize("name", ["input", "weight", "scale", "zero", "offset", "bias"])
def test_nan_stays_where_it_is(name, shape, dtype):
    problem = Problem(3, shape, FLOAT8[0], ("scale", "zero", "offset", "bias"), dtype=dtype, laid=within)
    x = problem.operands()
    getattr(x, name)[(2, -1)[: getattr(x, name).dim()]] = torch.nan
    attrs = problem.attrs(x)
    found = run(x, attrs).isnan()
    assert torch.equal(found, exact(x, attrs).isnan())
    assert found.sum() == (5 if name == "input" else 3)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_input_that_is_not_finite_does_not_become_so(value):
    for dtype in DTYPES:
        problem = Problem(3, (64, 5, 2), "low_first", ("scale", "zero"), dtype=dtype)
        x = problem.operands()
        x.input[1, 7] = value
        found = run(x, problem.attrs(x)).isfinite()
        assert found.all(1).tolist() == [True, False, True]
        assert not found[1].any()


@pytest.mark.parametrize("sizes", [(0, 8, 3), (2, 8, 0), (2, 0, 3)], ids=["no_rows", "nothing_out", "no_columns"])
def test_of_nothing_comes_nothing(sizes):
    rows, columns, outs = sizes
    problem = Problem(rows, (columns, outs, 1), names=("scale", "zero", "bias"))
    x = problem.operands()
    torch.testing.assert_close(run(x, problem.attrs(x)), x.bias.expand(rows, outs))


# ---- as an operator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.int8, "high_half"], ids=str)
def test_an_operator_is_what_pytorch_asks_of_one(stored):
    problem = Problem(3, (32, 5, 2), stored, ("scale", "zero", "bias"))
    x = problem.operands()
    attrs = problem.attrs(x)
    results = torch.library.opcheck(torch.ops.layerzero.triton_linear_kernel.default, (*x.flat(), encode(attrs)))
    assert set(results.values()) == {"SUCCESS"}, results
    assert torch.equal(linear(x, attrs), run(x, attrs))
