"""Products with weights of few bits: kernels against the definition, spellings that are read, lookalikes that are refused."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiers import examples

import lz_compile as lz
from lz_compile.lowering.kernels.linear import cpp_linear, torch_linear
from lz_compile.lowering.ops import linear as op
from lz_compile.lowering.ops.linear import Operands
from lz_compile.passes.proof import validate
from lz_compile.passes.proof.resize import NATIVE
from lz_compile.passes.proof.validate import verdict_key
from tests.backends import Rewriting

pytestmark = pytest.mark.usefixtures("no_preference")
KERNELS = {"lz.cpp_linear": cpp_linear.linear, "torch.linear": torch_linear.linear}
PACKINGS = ("low_first", "high_first", "low_half", "high_half")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
many = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)

# ---- kernels ---------------------------------------------------------------------------------------------------------


def stored_numbers(out: int, columns: int, dtype: torch.dtype, packing: str = "none") -> torch.Tensor:
    if packing != "none":
        return op.packed(torch.randint(0, 16, (out, columns), dtype=torch.uint8), packing)  # type: ignore[arg-type]
    if dtype.is_floating_point:
        return torch.randn(out, columns).to(dtype)
    return torch.randint(-128 if dtype == torch.int8 else 0, 128, (out, columns)).to(dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@many
@given(
    rows=st.sampled_from((1, 2, 3, 5, 16, 17)),
    shape=st.sampled_from(((64, 5, 4), (48, 7, 1), (40, 3, 2), (36, 4, 3), (2, 1, 1), (120, 9, 5), (128, 3, 64))),
    stored=st.sampled_from((torch.int8, torch.uint8, *FLOAT8, *PACKINGS)),
    names=st.lists(st.sampled_from(("scale", "zero", "offset", "bias", "codebook")), unique=True),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 99),
)
def test_kernels_give_what_the_definition_says(kernel, rows, shape, stored, names, dtype, seed):
    torch.manual_seed(seed)
    columns, out, groups = shape
    packing, kind = (stored, torch.uint8) if isinstance(stored, str) else ("none", stored)
    weight = stored_numbers(out, columns, kind, packing)
    wide = {"scale": 0.05, "zero": 8.0, "offset": 0.1}
    given_ = {name: torch.rand(out, groups) * wide[name] for name in names if name in wide}
    if names and names[0] in wide:
        given_[names[0]] = given_[names[0]][:1]  # the same for all rows
    if "bias" in names:
        given_["bias"] = torch.randn(out)
    if "codebook" in names and packing != "none":
        given_["codebook"] = torch.randn(16)
    x = Operands(torch.randn(rows, columns).to(dtype), weight, **given_)
    sizes = {"N": rows, "K": columns, "O": out, "W": weight.shape[1], "G": op.groups_of(x)}
    attrs, _ = op.from_operands(x, sizes, packing=packing)
    exact = x.map(lambda each: each.double() if each.is_floating_point() else each)
    truth = op.reference(exact, dataclasses.replace(attrs, compute_dtype=torch.float64, out_dtype=torch.float64))
    found = KERNELS[kernel](x, attrs)
    assert found.dtype == dtype
    size = float(truth.abs().max()) + 1e-6
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("width", [1, 16])
def test_all_numbers_of_eight_bits_are_read(dtype, width):
    bits = torch.zeros(256, width, dtype=torch.uint8)
    bits[:, 0] = torch.arange(256)
    x = Operands(F.pad(torch.ones(1, 1), (0, width - 1)), bits.view(dtype))
    attrs, _ = op.from_operands(x, {"N": 1, "K": width, "O": 256, "W": width, "G": 1})
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    torch.testing.assert_close(cpp_linear.linear(x, attrs)[0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8, *FLOAT8, *PACKINGS])
@pytest.mark.parametrize("names", [(), ("scale",), ("scale", "zero"), ("scale", "offset"), ("zero", "offset")], ids=str)
def test_rows_give_the_same_bits_whatever_is_beside_them(stored, names):
    packing, kind = (stored, torch.uint8) if isinstance(stored, str) else ("none", stored)
    weight = stored_numbers(33, 256, kind, packing)
    x = Operands(torch.randn(7, 256), weight, **{name: torch.rand(33, 4) for name in names})
    sizes = {"N": 7, "K": 256, "O": 33, "W": weight.shape[1], "G": op.groups_of(x)}
    attrs, _ = op.from_operands(x, sizes, packing=packing)
    whole = cpp_linear.linear(x, attrs)
    for row in range(7):
        assert torch.equal(
            whole[row], cpp_linear.linear(dataclasses.replace(x, input=x.input[row : row + 1]), attrs)[0]
        )


@pytest.mark.parametrize("packing", ["none", "low_first", "high_half"])
@pytest.mark.parametrize("name", ["zero", "offset"])
def test_what_cancels_is_not_lost(name, packing):
    """Numbers just beside their zero point, and an input whose sum is large."""
    columns, middle = 11008, 128 if packing == "none" else 8
    numbers = torch.randint(middle - 1, middle + 2, (16, columns)).to(torch.uint8)
    stored = numbers if packing == "none" else op.packed(numbers, packing)
    x, scale = torch.rand(1, columns) + 0.5, torch.full((16, 1), 0.01)
    other = torch.full((16, 1), float(middle)) if name == "zero" else -middle * scale
    given_ = Operands(x, stored, scale, **{name: other})
    sizes = {"N": 1, "K": columns, "O": 16, "W": stored.shape[1], "G": 1}
    attrs, _ = op.from_operands(given_, sizes, packing=packing)
    exact = given_.map(lambda each: each.double() if each.is_floating_point() else each)
    truth = op.reference(exact, dataclasses.replace(attrs, compute_dtype=torch.float64, out_dtype=torch.float64))
    ours, eager = (call(given_, attrs).double() for call in (cpp_linear.linear, op.reference))
    assert float((ours - truth).abs().max()) <= 4 * float((eager - truth).abs().max()) + 1e-6


def test_infinite_inputs_stay_so():
    x = torch.ones(1, 64)
    x[0, 3] = torch.inf
    numbers = torch.full((4, 64), 20, dtype=torch.uint8)
    given_ = Operands(x, numbers, torch.full((4, 1), 0.1), torch.full((4, 1), 8.0))
    attrs, _ = op.from_operands(given_, {"N": 1, "K": 64, "O": 4, "W": 64, "G": 1})
    assert bool((cpp_linear.linear(given_, attrs) == torch.inf).all())


def test_operands_that_do_not_fit_are_named():
    x, weight = torch.randn(2, 8), torch.randint(0, 255, (3, 4), dtype=torch.uint8)
    with pytest.raises(lz.ArgumentError, match="expected weight of 8 elements in a row for 8 columns, received 4"):
        lz.which("linear", x, weight)
    with pytest.raises(lz.ArgumentError, match="expected scale of groups that divide 8 columns, received 3"):
        lz.which("linear", x, weight, torch.rand(3, 3), packing="low_half")
    with pytest.raises(lz.ArgumentError, match="expected weight in uint8, for an even number of columns"):
        lz.which("linear", x, weight.to(torch.int8), packing="low_first")
    with pytest.raises(lz.ArgumentError, match="expected codebook for two numbers in a byte"):
        lz.which("linear", x, torch.randint(0, 255, (3, 8), dtype=torch.uint8), codebook=torch.randn(16))
    with pytest.raises(lz.ArgumentError, match=r"expected packing as one of none, low_first"):
        lz.which("linear", x, weight, packing="nibbles")


# ---- spellings -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Spelling:
    """One way to write a product with a stored weight."""

    stored: Any = torch.int8
    product: str = "linear"
    scale: str = "rows"
    zero: str = "none"
    order: str = "zero_first"
    cast: str = "to"
    unpacking: str = "bits"
    table: str = "none"
    has_bias: bool = False
    dtype: torch.dtype = torch.float32
    rows: tuple[int, ...] = (3,)

    columns, out, groups = 32, 12, 4

    @property
    def is_packed(self) -> bool:
        return isinstance(self.stored, str)

    def inputs(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        found = {"x": torch.randn(*self.rows, self.columns).to(self.dtype)}
        kind = torch.uint8 if self.is_packed else self.stored
        found["weight"] = stored_numbers(self.out, self.columns, kind, self.stored if self.is_packed else "none")
        shapes = {"rows": (self.out, 1), "flat": (self.out,), "groups": (self.out, self.groups), "one": ()}
        if self.scale in shapes:
            found["scale"] = (torch.rand(shapes[self.scale]) * 0.05 + 0.01).to(self.dtype)
        if self.zero in ("tensor", "integers"):
            shape = shapes["groups" if self.scale == "groups" else "rows"]
            zero = torch.randint(0, 16, shape)
            found["zero"] = zero.to(torch.int8 if self.zero == "integers" else self.dtype)
        if self.has_bias:
            found["bias"] = torch.randn(self.out).to(self.dtype)
        if self.table != "none":
            found["codebook"] = torch.randn(16)
        return found

    def numbers(self, weight: torch.Tensor, codebook: torch.Tensor | None = None) -> torch.Tensor:
        """Stored numbers, one in each element."""
        if not self.is_packed:
            return weight
        low, high = {
            "bits": lambda: (weight & 0xF, weight >> 4),
            "functions": lambda: (torch.bitwise_and(weight, 15), torch.bitwise_right_shift(weight, 4)),
            "division": lambda: (weight % 16, weight // 16),
            "masks": lambda: (weight & 15, (weight & 0xF0) >> 4),
            "wide": lambda: (weight.to(torch.int32) & 15, (weight.to(torch.int32) >> 4) & 15),
            "functional": lambda: (torch.remainder(weight, 16), torch.div(weight, 16, rounding_mode="floor")),
        }[self.unpacking]()
        parts = (low, high) if self.stored.startswith("low") else (high, low)
        if codebook is not None and self.table_is_first:
            parts = tuple(self.looked_up(each, codebook) for each in parts)
        if self.stored.endswith("half"):
            numbers = torch.cat(parts, -1)
        else:
            numbers = torch.stack(parts, dim=-1).reshape(weight.shape[0], -1)
        return numbers if codebook is None or self.table_is_first else self.looked_up(numbers, codebook)

    @property
    def table_is_first(self) -> bool:
        """Whether halves are looked up one by one."""
        return self.unpacking in ("bits", "wide", "division")

    def looked_up(self, numbers: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
        """What numbers stand for."""
        return {
            "index": lambda: codebook[numbers.long()],
            "index_select": lambda: codebook.index_select(0, numbers.flatten().int()).view(numbers.shape),
            "take": lambda: torch.take(codebook, numbers.to(torch.int64)),
            "embedding": lambda: F.embedding(numbers.int(), codebook[:, None]).squeeze(-1),
        }[self.table]()

    def weight(self, weight, scale=None, zero=None, codebook=None):
        numbers = self.numbers(weight, codebook)
        if self.scale == "groups":
            numbers = numbers.view(self.out, self.groups, -1)
            scale, zero = (None if each is None else each.unsqueeze(-1) for each in (scale, zero))
        if self.scale == "flat":
            scale = scale[:, None]
        found = {
            "to": lambda: numbers.to(self.dtype),
            "type": lambda: numbers.type(self.dtype),
            "float": numbers.float,
            "promoted": numbers.clone,
        }[self.cast]()
        if self.zero == "number":
            zero = 8
        if zero is not None and self.order == "zero_first":
            found = (found - zero) * scale
        elif zero is not None:
            found = found * scale - zero * scale if self.order == "zero_last" else scale * found + (-zero) * scale
        elif scale is not None:
            found = scale * found if self.order == "zero_last" else found * scale
        return found.reshape(self.out, self.columns).to(self.dtype)

    def run(self, x, weight, scale=None, zero=None, bias=None, codebook=None):
        """The product as it is written."""
        outer = scale if self.scale in ("rows", "flat") and self.order == "after" else None
        inner = {"scale": None if outer is not None else scale, "zero": zero, "codebook": codebook}
        full = self.weight(weight, **inner) if outer is None else self.numbers(weight, codebook).to(self.dtype)
        if self.product == "linear":
            found = F.linear(x, full, None if outer is not None else bias)
        elif self.product == "matmul":
            found = x @ full.t()
        elif self.product == "addmm":
            found = torch.addmm(bias, x, full.T) if bias is not None and outer is None else torch.mm(x, full.mT)
        else:
            found = torch.einsum("...k,ok->...o", x, full)
        if outer is not None:
            found = found * outer.view(1, -1)
        is_added = bias is not None and (outer is not None or self.product not in ("linear", "addmm"))
        return found + bias if is_added else found


def allows(s: Spelling) -> bool:
    """Whether choices go together."""
    if s.zero != "none" and s.scale == "none":
        return False
    if s.table != "none" and not s.is_packed:
        return False
    if s.order == "after" and (s.scale not in ("rows", "flat") or s.zero != "none"):
        return False
    if s.cast == "promoted" and ((not s.is_packed and s.stored.is_floating_point) or s.scale == "none"):
        return False
    if s.cast == "promoted" and (s.zero in ("number", "integers") or s.dtype != torch.float32 or s.scale == "one"):
        return False  # the difference would be one of integers
    return not (s.product == "addmm" and len(s.rows) != 1)


@st.composite
def spellings(draw):
    options = {
        "stored": (torch.int8, torch.uint8, *FLOAT8, *PACKINGS),
        "product": ("linear", "matmul", "addmm", "einsum"),
        "scale": ("rows", "flat", "groups", "one", "none"),
        "zero": ("none", "number", "tensor", "integers"),
        "order": ("zero_first", "zero_last", "sum", "after"),
        "cast": ("to", "type", "float", "promoted"),
        "unpacking": ("bits", "functions", "division", "masks", "wide", "functional"),
        "table": ("none", "none", "index", "index_select", "take", "embedding"),
        "has_bias": (False, True),
        "dtype": (torch.float32, torch.bfloat16),
        "rows": ((3,), (1,), (2, 3)),
    }
    chosen: dict[str, Any] = {}
    for name, values in options.items():
        fitting = [each for each in values if allows(Spelling(**{**chosen, name: each}))]
        chosen[name] = draw(st.sampled_from(fitting or [getattr(Spelling, name)]))
    return Spelling(**chosen)


def rewritten(function, *inputs, **named):
    torch._dynamo.reset()
    backend = Rewriting(lock={"linear": "lz.cpp_linear"})
    with torch.no_grad():
        return torch.compile(function, backend=backend, fullgraph=True)(*inputs, **named), backend


@settings(many, max_examples=examples(25, 150))
@given(spelling=spellings())
def test_every_spelling_is_read(spelling):
    if not allows(spelling):
        return
    inputs = spelling.inputs()
    result, backend = rewritten(spelling.run, **inputs)
    matches = [match for match in backend.report.matches if match.op == "linear"]
    assert [match.rewritten for match in matches] == [True], f"{spelling}\n{backend.why_not()}"
    (match,) = matches
    assert match.kernel == "lz.cpp_linear", f"{spelling}\n{backend.why_not()}"
    assert match.attributes["packing"] == (spelling.stored if spelling.is_packed else "none")
    with torch.no_grad():
        expected = spelling.run(**inputs)
    wide = {
        name: each.double() if each.dtype in (torch.float32, torch.bfloat16) else each for name, each in inputs.items()
    }
    truth = dataclasses.replace(spelling, dtype=torch.float64).run(**wide)
    size, own = float(truth.abs().max()), float((expected.double() - truth).abs().max())
    assert (
        float((result.double() - truth).abs().max())
        <= 1.5 * own + (1e-5 if spelling.dtype == torch.float32 else 5e-3) * size
    )


@pytest.mark.parametrize("is_repeated", [True, False])
def test_scales_may_be_those_of_blocks(is_repeated):
    """As of float8 in blocks of 128 x 128."""
    scales, weight = torch.rand(3, 4), stored_numbers(12, 32, torch.float8_e4m3fn)

    def function(x, w, s):
        if is_repeated:
            return F.linear(x, w.to(x.dtype) * s.repeat_interleave(4, 0).repeat_interleave(8, 1))
        return F.linear(x, (w.to(x.dtype).view(3, 4, 4, 8) * s[:, None, :, None]).view(12, 32))

    found, backend = rewritten(function, X, weight, scales)
    assert [match.kernel for match in backend.report.matches] == ["lz.cpp_linear"], backend.why_not()
    torch.testing.assert_close(found, function(X, weight, scales), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [0, 127])
@pytest.mark.parametrize(
    "scaled",
    {
        "ldexp": torch.ldexp,
        "exp2": lambda numbers, e: numbers * torch.exp2(e.float()),
        "a power": lambda numbers, e: numbers * 2.0 ** e.float(),
        "four": lambda numbers, e: torch.ldexp(numbers, 2 * e),
    }.items(),
    ids=lambda each: each[0],
)
def test_scales_may_be_powers_of_two_and_stay_exact(scaled, bias):
    torch.manual_seed(0)
    x, table = (
        torch.randint(-4, 5, (3, 256)).float(),
        torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    )
    stored, shared = (
        torch.randint(0, 256, (64, 128), dtype=torch.uint8),
        torch.randint(-24, 24, (64, 1)) + torch.randint(3, (64, 8)) + bias,
    )

    def product(x, stored, shared, table):
        numbers = table[torch.stack((stored & 15, stored >> 4), -1).flatten(1).int()].view(64, 8, 32)
        return F.linear(x, scaled[1](numbers, (shared.int() - bias)[..., None]).reshape(64, 256))

    found, backend = rewritten(product, x, stored, shared.to(torch.uint8 if bias else torch.int8), table)
    assert [(each.kernel, each.rewritten) for each in backend.report.matches] == [("lz.cpp_linear", True)]
    # Exponents of a row differ by two at the most, so that a float32 holds all sums.
    assert torch.equal(found.double(), product(x.double(), stored, shared, table.double()))


def test_grouped_weights_are_read_with_their_groups():
    spelling = Spelling("low_half", scale="groups", zero="tensor")
    _, backend = rewritten(spelling.run, **spelling.inputs())
    (match,) = backend.report.matches
    assert match.context["dims"]["num_rows"] == 3
    assert {"int4", "groups", "scale", "zero"} <= {*match.context["features"]}
    assert "4 groups in a row" in match.context["features"]["groups"]


# ---- numbers that are unpacked in the graph ---------------------------------------------------------------------------

X, W8, P4 = torch.randn(3, 32), torch.randint(-128, 128, (12, 32), dtype=torch.int8), torch.randint(0, 256, (12, 16), dtype=torch.uint8)  # fmt: skip
S = torch.rand(12, 1)
TABLE, ORDER = torch.randn(16), torch.randperm(16)
EXTREMES = torch.randint(-128, 128, (12, 32), dtype=torch.int8)
EXTREMES[:, 0], EXTREMES[:, 1] = -128, 127
U8 = (EXTREMES.int() + 128).to(torch.uint8)
W4 = torch.randint(0, 16, (12, 32))
S4, Z4 = torch.rand(12, 4) * 0.05 + 0.01, torch.randint(0, 16, (12, 4))


def words(numbers: torch.Tensor) -> torch.Tensor:
    """Eight numbers of four bits in an int32, the first one lowest."""
    parts = numbers.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return parts.sum(-1).to(torch.int32)


def in_groups(x, numbers, scale, dtype=torch.float32):
    """What most formats go on with."""
    return F.linear(x, (numbers.view(12, 4, 8).to(dtype) * scale[..., None]).view(12, 32))


def bytes_of_words(x, w, s):  # compressed-tensors
    halves = w.contiguous().view(torch.uint8)
    numbers = torch.stack((halves & 0xF, halves >> 4), dim=-1).view(torch.int8).view(12, -1)[:, :32] - 8
    return in_groups(x, numbers, s)


def by_shifts(x, w, s):
    return in_groups(x, ((w[:, :, None] >> torch.arange(0, 32, 4)) & 15).reshape(12, 32) - 8, s)


def stored_one_after_the_other(x, w, s):  # earlier versions of compressed-tensors
    numbers = torch.zeros(12, 32, dtype=torch.int32)
    for i in range(8):
        numbers[:, i::8] = (w >> (4 * i)) & 15
    return in_groups(x, (numbers - 8).to(torch.int8), s)


def from_words_in_columns(x, w, s, z):  # GPTQ
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    zeros = (torch.bitwise_right_shift(z[..., None].expand(-1, -1, 8), shifts).to(torch.int16) & 15).flatten(1)[:, :12]
    numbers = torch.bitwise_right_shift(w.unsqueeze(1).expand(-1, 8, -1), shifts[:, None]).to(torch.int16)
    numbers = torch.bitwise_and(numbers, 15).reshape(32, 12)
    return x @ (s[:, None] * (numbers.view(4, 8, 12) - zeros[:, None])).reshape(32, 12)


def rows_in_halves(x, w, s, z):  # HQQ
    numbers = torch.empty(2 * w.shape[0], w.shape[1], dtype=torch.uint8)
    numbers[: w.shape[0]] = (w & 0b11110000) >> 4
    numbers[w.shape[0] :] = w & 0b00001111
    return x @ ((numbers.to(x.dtype) - z) * s).reshape(12, 32).t()


def rows_joined(x, w, s, z):  # quanto
    return F.linear(x, ((torch.cat([w & 15, w >> 4]).to(x.dtype) - z) * s).reshape(12, 32))


def wrong_order(x, w, s):
    return F.linear(x, torch.stack([w & 15, w & 15], -1).flatten(1) * s)


def outputs_in_words(x, w, s):  # AWQ: eight neighbours in an order of their own
    order = torch.arange(16).view(2, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].flatten()
    numbers = ((w[:, :, None] >> torch.arange(0, 32, 4)) & 15).reshape(32, 16)[:, order][:, :12]
    return x @ ((numbers.view(4, 8, 12) - 8) * s[:, None]).reshape(32, 12)


ROWS4 = W4.view(48, 8)
ROWS = (ROWS4[24:] | (ROWS4[:24] << 4)).to(torch.uint8)
UNPACKED = {
    "bytes of words": (bytes_of_words, words(W4), S4),
    "shifts by a tensor": (by_shifts, words(W4), S4),
    "words and stores": (stored_one_after_the_other, words(W4), S4),
    "words in columns": (
        from_words_in_columns,
        words(W4).T.contiguous(),
        S4.T.contiguous(),
        words(F.pad(Z4.T, (0, 4))),
    ),
    "outputs in words": (outputs_in_words, words(F.pad(W4.T, (0, 4))), S4.T.contiguous()),
    "rows in halves": (rows_in_halves, ROWS, S4.reshape(-1, 1), Z4.reshape(-1, 1).float()),
    "rows joined": (rows_joined, ROWS, S4.reshape(-1, 1), Z4.reshape(-1, 1).float()),
    "signed halves": (lambda x, w, s: F.linear(x, torch.stack([(w << 4) >> 4, w >> 4], -1).flatten(1) * s), P4.view(torch.int8), S),
    "signed by a choice": (lambda x, w, s: F.linear(x, torch.where((w & 15) > 7, (w & 15).int() - 16, (w & 15).int()) * s), U8, S),
    "signed by a bit": (lambda x, w, s: F.linear(x, (((w.int() & 15) ^ 8) - 8) * s), U8, S),
    "overwritten": (lambda x, w, s: F.linear(x, (w.short() & 15).sub_(8).float() * s), U8, S),
    "one more than 255": (lambda x, w, s: F.linear(x, (w + 1).float() * s), U8, S),
    "minus -128": (lambda x, w, s: F.linear(x, (-w).float() * s), EXTREMES, S),
    "less than -128": (lambda x, w, s: F.linear(x, (w - 1).float() * s), EXTREMES, S),
    "halves less eight": (lambda x, w, s: F.linear(x, torch.stack([w & 15, w >> 4], -1).flatten(1).sub(8) * s), P4, S),
    "other bits": (lambda x, w, s: F.linear(x, (w >> 3).float() * s), U8, S),
    "lower bits twice": (wrong_order, P4, S),
    "beside zero points of unknown size": (
        lambda x, w, s, z: F.linear(x, ((w & 15).float() - z.repeat_interleave(8, 1).float()) * s.repeat_interleave(8, 1)),
        W4, S4, Z4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPACKED)
def test_numbers_that_are_unpacked_are_read_whatever_they_are_unpacked_by(name):
    function, *inputs = UNPACKED[name]
    found, backend = rewritten(function, X, *inputs)
    matches = [match for match in backend.report.matches if match.op == "linear"]
    assert [(match.rewritten, match.kernel) for match in matches] == [(True, "lz.cpp_linear")], backend.why_not()
    assert matches[0].attributes["packing"] == "none"
    expected = function(X, *inputs)  # bytes that wrap around are large, and their sums cancel
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()) + 1e-4)


class Gathered(torch.nn.Module):
    """Scales and zero points by an index of groups, as GPTQ has it."""

    def __init__(self, index):
        super().__init__()
        buffers = {"numbers": W4.T.int(), "scale": S4.T, "zero": Z4.T.int(), "index": index}
        for name, each in buffers.items():
            self.register_buffer(name, each.clone())

    def forward(self, x):
        index = self.index.long()
        return x @ (self.scale[index] * ((self.numbers & 15) - (self.zero & 15)[index]))


def test_scales_may_be_gathered_by_an_index_that_counts_groups():
    module = Gathered(torch.arange(32, dtype=torch.int32) // 8)
    torch._dynamo.reset()
    backend = Rewriting(lock={"linear": "lz.cpp_linear"})
    call = torch.compile(module, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(call(X), module(X), rtol=1e-5, atol=1e-4)
        assert [match.kernel for match in backend.report.matches] == ["lz.cpp_linear"], backend.why_not()
        assert "4 groups in a row" in backend.report.matches[0].context["features"]["groups"]
        module.index.copy_(module.index.flip(0))
        torch.testing.assert_close(call(X), module(X), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("is_view", [False, True])
def test_numbers_that_are_overwritten_after_they_were_unpacked_have_no_bounds(is_view):
    def function(x, w, s):
        numbers = w & 15
        (numbers[:, 1:] if is_view else numbers)[:, 0] = 1000
        return F.linear(x, numbers.float() * s)

    found, _ = rewritten(function, X, W4.int(), S)
    torch.testing.assert_close(found, function(X, W4.int(), S), rtol=0, atol=0)


def test_proofs_of_other_bounds_are_other_proofs(tmp_path, monkeypatch):
    """A kernel gets uint8 or int8 by the bounds of what is unpacked: what is right for one may be wrong for the other."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    subject, keys = torch.randint(-(2**31), 2**31 - 1, (12, 32), dtype=torch.int32), []
    monkeypatch.setattr(validate, "verdict_key", lambda *given: keys.append(verdict_key(*given)) or keys[-1])
    rewritten(lambda x, w, s: F.linear(x, (w & 15).float() * s), X, subject, S)
    rewritten(lambda x, w, s: F.linear(x, (w & 63).float() * s), X, subject, S)
    rewritten(lambda x, w, s: F.linear(x, ((w & 15) - 8).float() * s), X, subject, S)
    assert len({*keys}) == 3


@pytest.mark.parametrize(("unpack", "extremes"), [(lambda w: w & 15, (0, 15)), (lambda w: (w & 15) - 8, (-8, 7))])
def test_proofs_draw_every_number_that_may_be_stored(unpack, extremes, monkeypatch):
    drawn, make = [], validate.inputs_of

    def noted(*given):
        drawn.append(make(*given))
        return drawn[-1]

    monkeypatch.setattr(validate, "inputs_of", noted)
    monkeypatch.setattr(validate, "recalled", lambda _key, _store, run: run())
    rewritten(lambda x, w, s: F.linear(x, unpack(w).float() * s), X, W4.int(), S)
    numbers = torch.cat([each.flatten() for inputs in drawn for each in inputs if each.dtype == torch.int32])
    assert (numbers.min(), numbers.max()) == extremes


def test_a_scale_that_was_changed_in_place_is_proven_with_its_change():
    def function(x, w, s):
        scale = s.clone()
        scale.mul_(2)
        return F.linear(x, w.float() * scale)

    found, backend = rewritten(function, X, W8, S)
    assert [match.kernel for match in backend.report.matches] == ["lz.cpp_linear"], backend.why_not()
    torch.testing.assert_close(found, function(X, W8, S), rtol=1e-5, atol=1e-3)


OPERATIONS = {
    "and": lambda x, n: x & abs(n),
    "or": lambda x, n: x | abs(n),
    "xor": lambda x, n: x ^ abs(n),
    "shift": lambda x, n: x >> (abs(n) % 8),
    "rest": lambda x, n: x % (abs(n) % 127 + 1),
    "add": lambda x, n: x + n,
    "less": lambda x, n: n - x if n % 2 else x - n,
    "wide": lambda x, n: x.to(torch.int32),
    "narrow": lambda x, n: x.to(torch.int8),
    "bytes": lambda x, n: x.view(torch.uint8) if x.dtype == torch.int8 else x.to(torch.uint8),
    "choice": lambda x, n: torch.where(x > n, x, x - n),
    "stacked": lambda x, n: torch.stack([x, x >> 4], -1).flatten(1)[:, ::2],
    "stored": lambda x, n: torch.zeros_like(x).index_fill(0, torch.tensor([0]), min(n, 100)) + x,
    "in place": lambda x, n: x.clone().bitwise_and_(abs(n) % 128),
}


@settings(many, max_examples=examples(20, 40))
@given(data=st.data())
def test_integers_are_never_narrowed_to_fewer_bits_than_they_have(data):
    """Any arithmetic, on all of int32: what is read is what was computed, or nothing is read."""
    names = data.draw(st.lists(st.sampled_from([*OPERATIONS]), min_size=1, max_size=5))
    numbers = [data.draw(st.sampled_from([1, 3, 7, 8, 15, 16, 100, 127, 128, 240, 255, -1, -8, -100])) for _ in names]
    torch.manual_seed(0)
    weight = torch.randint(-(2**31), 2**31 - 1, (12, 32), dtype=torch.int32)

    def function(x, w, s):
        for name, number in zip(names, numbers, strict=True):
            w = OPERATIONS[name](w, number)
        return F.linear(x, w.float() * s)

    found, backend = rewritten(function, X, weight, S)
    expected = function(X, weight, S)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()) + 1e-6)
    assert not [match for match in backend.report.matches if match.op == "linear" and not match.rewritten], (
        f"{names} {numbers}: {backend.why_not()}"
    )


# ---- what is refused, or is none -------------------------------------------------------------------------------------


def two_scales(x, w, s):
    return F.linear(x, torch.stack([(w & 15) * s, (w >> 4) * (2 * s)], -1).flatten(1))


def used_twice(x, w, s):
    full = w.float() * s
    return F.linear(x, full) + full.sum()


def for_each_row(x, w, s):
    return torch.einsum("nk,nok->no", x, w.float().expand(3, -1, -1) * s)


Z8, Z16 = torch.full((12, 1), 255, dtype=torch.uint8), torch.randint(256, 2**15, (12, 1), dtype=torch.int16)
Z32 = torch.randint(2**24, 2**26, (12, 1), dtype=torch.int32)
Z64 = Z32.long()
F8 = torch.float8_e4m3fn
#: Integers of more than eight bits, and values that are rounded on their way.
LOOKALIKES = {
    "a wide product": (lambda x, w, s: F.linear(x, (w.short() * 129).float() * s), U8, "NOT_DEQUANTISED"),
    "a wider product": (lambda x, w, s: F.linear(x, (w.int() * Z32).float() * s * 1e-8), U8, "NOT_DEQUANTISED"),
    "less integers of unknown size": (lambda x, w, s: F.linear(x, ((w & 15) - Z64).float() * s * 1e-8), W4, "NOT_DEQUANTISED"),
    "rounded to float8": (lambda x, w, s: F.linear(x, w.float().to(F8).float() * s), W8, "NOT_DEQUANTISED"),
    "squares": (lambda x, w, s: F.linear(x, w.float() ** 2 * s), W8, "NOT_AFFINE"),
    "a table of a table": (lambda x, w, s: F.linear(x, TABLE[ORDER[torch.stack([w & 15, w >> 4], -1).flatten(1).long()]] * s), P4, "NOT_DEQUANTISED"),
    "a table of 32": (lambda x, w, s: F.linear(x, torch.cat([TABLE, TABLE])[torch.stack([w & 15, w >> 4], -1).flatten(1).long()] * s), P4, "NOT_DEQUANTISED"),
    "a table and what it is read at": (lambda x, w, s: F.linear(x, torch.stack([TABLE[(w & 15).long()] + (w & 15), TABLE[(w >> 4).long()] + (w >> 4)], -1).flatten(1) * s), P4, "NOT_DEQUANTISED"),
    "the next of a table": (lambda x, w, s: F.linear(x, TABLE[torch.stack([(w & 15).int() - 1, (w >> 4).int() - 1], -1).flatten(1)] * s), P4, "NOT_DEQUANTISED"),
    "two tables": (lambda x, w, s: F.linear(x, torch.stack([TABLE[(w & 15).long()], -TABLE.flip(0)[(w >> 4).long()]], -1).flatten(1) * s), P4, "NOT_DEQUANTISED"),
    "squares of a table": (lambda x, w, s: F.linear(x, TABLE[torch.stack([w & 15, w >> 4], -1).flatten(1).long()] ** 2 * s), P4, "NOT_AFFINE"),
    "two scales in a byte": (two_scales, P4, "NOT_DEQUANTISED"),
    "rounded": (lambda x, w, s: F.linear(x, (w.float() * s).round()), W8, "NOT_DEQUANTISED"),
    "held to bounds": (lambda x, w, s: F.linear(x, (w.float() * s).clamp(-1, 1)), W8, "NOT_DEQUANTISED"),
    "used twice": (used_twice, W8, "INTERIOR_USED"),
    "a weight for each row": (for_each_row, W8, None),
    "a mask": (lambda x, w, s: F.linear(x, torch.where(w > 0, s, -s)), W8, "NOT_DEQUANTISED"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_stay_what_they_are(name):
    function, weight, code = LOOKALIKES[name]
    found, backend = rewritten(function, X, weight, S)
    assert not [match for match in backend.report.matches if match.op == "linear" and match.kernel != "inductor"], name
    torch.testing.assert_close(found, function(X, weight, S), rtol=0, atol=0)
    if code is not None:
        assert code in {miss.reason.code for miss in backend.report.near_misses}, backend.why_not()


ZERO_POINTS = {
    "one more than 255": lambda x, w, s: F.linear(x, (w.float() - (Z8 + 1).float()) * s),
    "bits of wider ones": lambda x, w, s: F.linear(x, (w.float() - (Z16 & 255).float()) * s),
    "upper bits": lambda x, w, s: F.linear(x, (w.float() - (Z8 >> 4).float()) * s),
}


@pytest.mark.parametrize("name", ZERO_POINTS)
def test_zero_points_that_are_computed_from_integers_are_right(name):
    function = ZERO_POINTS[name]
    found, backend = rewritten(function, X, U8, S)
    torch.testing.assert_close(found, function(X, U8, S), rtol=1e-4, atol=1e-3)
    assert not [event for event in backend.report.events if event.code == "REWRITE_FAILED"]


@pytest.mark.parametrize("order", [slice(None), [0, 4, 1, 5, 2, 6, 3, 7]], ids=["in order", "interleaved"])
@pytest.mark.parametrize("cut", ["shifted to int8", "int32", "int16"])
def test_zero_points_may_be_narrow_integers_that_the_numbers_are_too(cut, order):
    """AWQ: eight numbers of four bits in a word, in an order of their own, less zero points that are packed alike."""

    def unpacked(words):
        numbers = torch.bitwise_right_shift(words[:, :, None], torch.arange(0, 32, 4, dtype=torch.int32))
        numbers = numbers.to({"shifted to int8": torch.int8, "int16": torch.int16}.get(cut, torch.int32))
        return torch.bitwise_and(numbers[:, :, order].flatten(1), 15)

    def function(x, packed, zero, scale):
        less = unpacked(packed) - unpacked(zero).repeat_interleave(16, dim=0)
        return x @ (less * scale.repeat_interleave(16, dim=0))

    generator = torch.Generator().manual_seed(5)
    packed, zero = (torch.randint(-(2**31), 2**31 - 1, (rows, 2), generator=generator).int() for rows in (32, 2))
    scale = torch.rand(2, 16, generator=generator)
    found, backend = rewritten(function, X, packed, zero, scale)
    assert [match.kernel for match in backend.report.matches] == ["lz.cpp_linear"], backend.why_not()
    assert not backend.report.events, backend.why_not()
    torch.testing.assert_close(found, function(X, packed, zero, scale), rtol=1e-4, atol=1e-3)


def test_a_stored_weight_may_be_read_by_others():
    """Two layers with one weight, each of which converts it."""

    def function(x, w, s):
        return F.linear(x, w.float() * s) + F.linear(x * 2, w.float() * s)

    found, backend = rewritten(function, X, W8, S)
    assert [match.kernel for match in backend.report.matches if match.op == "linear"] == ["lz.cpp_linear"] * 2
    torch.testing.assert_close(found, function(X, W8, S), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("product", ["_int_mm", "matmul"])
def test_products_whose_rows_are_rounded_too_are_told(product):
    def function(x, w, s):
        largest = x.abs().amax(-1, keepdim=True) / 127
        rows = (x / largest).round().to(torch.int8)
        whole = torch._int_mm(rows, w.t()) if product == "_int_mm" else rows.int() @ w.t().int()
        return whole * s * largest

    x, w, s = torch.randn(32, 16), torch.randint(-99, 99, (24, 16), dtype=torch.int8), torch.rand(24)
    found, backend = rewritten(function, x, w, s)
    assert [str(miss.reason) for miss in backend.report.near_misses if miss.op == "linear"] == [
        f"[ROWS_OF_FEW_BITS] both factors of {product} are numbers of few bits"
    ]
    torch.testing.assert_close(found, function(x, w, s), rtol=0, atol=0)

    _, backend = rewritten(lambda one, other: one.int() @ other.t().int(), w, w)  # as of a graph's neighbours
    assert not backend.report.near_misses


def test_an_image_is_no_weight():
    weight = torch.randn(8, 32)

    def function(image, w):
        return F.linear(image.float() / 255, w)

    found, backend = rewritten(function, U8, weight)
    assert not backend.report.matches
    assert not backend.report.near_misses
    torch.testing.assert_close(found, function(U8, weight))

    def layers(image, w, s):
        return F.linear(image.float() / 255, w.float() * s)

    found, backend = rewritten(layers, U8, W8, S)
    assert [match.kernel for match in backend.report.matches] == ["lz.cpp_linear"]
    torch.testing.assert_close(found, layers(U8, W8, S), rtol=1e-4, atol=1e-3)


def test_steps_in_float64_are_not_for_the_kernel():
    def function(x, w, s):
        return F.linear(x, (w.double() * s.double()).float())

    _, backend = rewritten(function, X, W8, S)
    assert "steps in float64" in backend.why_not()


def test_a_weight_that_is_overwritten_is_left_alone():
    def function(x, w, s):
        full = w.float() * s
        w.zero_()
        return F.linear(x, full)

    found, backend = rewritten(function, X, W8.clone(), S)
    assert not [match for match in backend.report.matches if match.rewritten and match.kernel == "lz.cpp_linear"]
    torch.testing.assert_close(found, function(X, W8.clone(), S))


def test_products_that_are_trained_keep_their_gradients():
    scale = S.clone().requires_grad_()
    x = X.clone().requires_grad_()

    def function(x, w, s):
        return F.linear(x, w.float() * s)

    torch._dynamo.reset()
    backend = Rewriting(lock={"linear": "lz.cpp_linear"})
    found = torch.compile(function, backend=backend, fullgraph=True)(x, W8, scale)
    (match,) = [each for each in backend.report.matches if each.op == "linear"]
    assert match.kernel != "lz.cpp_linear"
    gradients = torch.autograd.grad(found.square().sum(), (x, scale))
    for one, other in zip(
        gradients, torch.autograd.grad(function(x, W8, scale).square().sum(), (x, scale)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_module_decodes_with_the_kernel_by_default():
    """As gpt-fast writes it: weights are buffers, and what is multiplied with them comes after."""

    class Int8Linear(torch.nn.Module):
        def __init__(self, columns, out):
            super().__init__()
            self.register_buffer("weight", torch.randint(-128, 128, (out, columns), dtype=torch.int8))
            self.register_buffer("scales", torch.rand(out) / 128)

        def forward(self, x):
            return F.linear(x, self.weight.to(dtype=x.dtype)) * self.scales

    model = torch.nn.Sequential(Int8Linear(1024, 2048), torch.nn.ReLU(), Int8Linear(2048, 1024)).eval()
    x = torch.randn(1, 1024)
    with torch.no_grad():
        report = lz.explain(model, x, print_report=False)
        assert [match.kernel for match in report.matches if match.op == "linear"] == ["lz.cpp_linear"] * 2
        torch.testing.assert_close(torch.compile(model, backend="layerzero")(x), model(x), rtol=1e-4, atol=1e-4)


def test_sizes_may_be_symbolic():
    spelling = Spelling("low_first", scale="groups", zero="tensor")
    inputs = spelling.inputs()
    torch._dynamo.reset()
    backend = Rewriting(lock={"linear": "lz.cpp_linear"})
    compiled = torch.compile(spelling.run, backend=backend, fullgraph=True)
    with torch.no_grad():
        for rows in (3, 5, 40):
            inputs["x"] = torch.randn(rows, 32)
            torch._dynamo.mark_dynamic(inputs["x"], 0)
            torch.testing.assert_close(compiled(**inputs), spelling.run(**inputs), rtol=1e-4, atol=1e-4)
    assert [match.kernel for match in backend.report.matches] == ["lz.cpp_linear"], backend.why_not()


@pytest.mark.parametrize("name", ["shifts by a tensor", "signed halves", "other bits", "rows joined"])
def test_unpacked_weights_of_symbolic_sizes_are_read_or_it_is_said_why_not(name):
    function, *inputs = UNPACKED[name]
    torch._dynamo.reset()
    backend = Rewriting(lock={"linear": "lz.cpp_linear"})
    compiled = torch.compile(function, backend=backend, dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X, *inputs), function(X, *inputs), rtol=1e-4, atol=1e-4)
        grown = torch.cat([inputs[0], inputs[0]]), torch.cat([inputs[1], inputs[1]])
        if name in ("signed halves", "other bits"):
            torch.testing.assert_close(compiled(X, *grown), function(X, *grown), rtol=1e-4, atol=1e-4)
    if name == "rows joined":
        assert "is unpacked into a shape that has no exact form" in backend.why_not()
    else:
        assert {match.kernel for match in backend.report.matches} == {"lz.cpp_linear"}, backend.why_not()


def test_a_weight_whose_rows_lie_apart_is_not_for_the_kernel():
    """Which would copy it at every call."""

    def function(x, w, s):
        return x @ (w.float() * s)

    inputs = (X, W8.t().contiguous(), S[:, 0])
    found, backend = rewritten(function, *inputs)
    (match,) = [each for each in backend.report.matches if each.op == "linear"]
    assert match.kernel == "inductor"
    assert "a weight whose rows lie apart in memory" in backend.why_not()
    torch.testing.assert_close(found, function(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["_weight_int8pack_mm", "aten._weight_int8pack_mm"])
def test_the_product_that_pytorch_has_as_one_call_is_read(name, dtype):
    call = torch._weight_int8pack_mm if name.startswith("_") else torch.ops.aten._weight_int8pack_mm
    x, w, s = torch.randn(3, 64).to(dtype), stored_numbers(48, 64, torch.int8), torch.rand(48).to(dtype)

    def function(x, w, s):
        return call(x * 1, w, s)

    found, backend = rewritten(function, x, w, s)
    assert [match.kernel for match in backend.report.matches] == ["lz.cpp_linear"], backend.why_not()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    expected = call(x, w, s)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    meant = NATIVE["_weight_int8pack_mm"](x, w, s)
    torch.testing.assert_close(meant, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_the_product_that_pytorch_has_as_one_call_stays_where_nothing_was_measured():
    backend = Rewriting()
    torch._dynamo.reset()
    inputs = torch.randn(3, 64), stored_numbers(48, 64, torch.int8), torch.rand(48)
    with torch.no_grad():
        found = torch.compile(torch._weight_int8pack_mm, backend=backend)(*inputs)
    assert torch.equal(found, torch._weight_int8pack_mm(*inputs))
    (match,) = backend.report.matches
    assert match.kernel == "inductor"
    assert "a source that is one call of PyTorch's" in match.context["features"]["native"]


def test_a_weight_that_is_packed_for_the_instructions_of_a_machine_is_a_near_miss():
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (64, 128), dtype=torch.int32), 1)
    inputs = torch.randn(3, 128), packed, 32, torch.rand(4, 64, 2)
    found, backend = rewritten(torch.ops.aten._weight_int4pack_mm_for_cpu, *inputs)
    assert torch.equal(found, torch.ops.aten._weight_int4pack_mm_for_cpu(*inputs))
    assert "the weight is laid out for the instructions of this machine" in backend.why_not()


def test_bytes_in_one_dimension_are_a_weight():
    """As NF4 is kept, with a scale for every so many numbers in a row."""
    rows, columns, block = 64, 128, 64
    packed = torch.randint(0, 256, (rows * columns // 2,), dtype=torch.uint8)
    scale, codebook, x = torch.rand(rows * columns // block), torch.randn(16), torch.randn(4, columns)

    def function(x, packed, scale, codebook):
        numbers = torch.stack([packed >> 4, packed & 15], -1).reshape(-1).to(torch.int32)
        return x @ (codebook[numbers].reshape(-1, block) * scale[:, None]).reshape(rows, columns).t()

    found, backend = rewritten(function, x, packed, scale, codebook)
    assert backend.report.matches[0].rewritten, backend.why_not()
    torch.testing.assert_close(
        found.double(), function(x.double(), packed, scale.double(), codebook.double()), rtol=1e-4, atol=1e-4
    )


def test_keys_that_are_picked_for_each_query_are_no_weight_of_each_row():
    """The queries of Informer, each of which meets some of the keys, by their numbers."""

    def function(q, k):
        picked = (torch.arange(9)[:, None] * 3 + torch.arange(4) * 5) % 9
        return (q[..., None, :] @ k[:, picked].mT)[..., 0, :].amax(-1)

    _, backend = rewritten(function, *torch.randn(2, 2, 9, 16))
    assert not backend.report.near_misses, backend.why_not()


def test_a_row_of_flags_for_columns_is_no_weight():
    _, backend = rewritten(
        lambda x, w, kept: F.linear(x, w * kept.bool()),
        X,
        torch.randn(12, X.shape[-1]),
        torch.ones(X.shape[-1], dtype=torch.uint8),
    )
    assert not [each for each in (*backend.report.matches, *backend.report.near_misses) if each.op == "linear"]


def test_groups_of_few_columns_are_not_for_the_kernel():
    scale = torch.rand(12, 8)

    def function(x, w, s):
        return F.linear(x, (w.view(12, 8, 4) * s[..., None]).flatten(1))

    _, backend = rewritten(function, X, W8, scale)
    assert "groups of 4 columns" in backend.why_not()


def test_all_packings_are_undone():
    for packing, rows in itertools.product(PACKINGS, (1, 3)):
        numbers = torch.randint(0, 16, (rows, 24), dtype=torch.uint8)
        assert torch.equal(op.unpacked(op.packed(numbers, packing), packing), numbers)
