"""Kernels that say that a row has the same bits in every batch: shown bit by bit, and alone chosen under the policy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from backends import Rewriting
from row_bits import differences
from torch import nn

import lz_compile as lz
from lz_compile.api import functional
from lz_compile.compile import row_bits
from lz_compile.ground import events
from lz_compile.lowering import inductor, ops, rows
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.attention import Operands
from lz_compile.runtime.kernels.registry import kernels

DECLARED = [
    (op, spec.kernel_id)
    for op in ops.names()
    for spec in kernels(op).values()
    if (spec.batch_invariant or spec.split_invariant) and {"cpu", "*"} & spec.platforms
]


@pytest.mark.parametrize(
    ("op", "kernel_id", "dtype"),
    [
        pytest.param(*declared, dtype, marks=pytest.mark.thorough if (place + turn) % 2 else ())
        for place, declared in enumerate(DECLARED)
        for turn, dtype in enumerate((torch.bfloat16, torch.float32))
    ],
    ids=str,
)
def test_what_is_declared_gives_a_row_the_same_bits_in_every_batch(op, kernel_id, dtype):
    with events.collect() as happened:
        assert differences(kernels(op)[kernel_id], dtype) == []
    assert happened == []  # nothing was completed by another kernel


@pytest.mark.parametrize(("op", "kernel_id"), [("attention", "torch.sdpa"), ("linear", "lz.cpp_linear")])
def test_the_test_sees_kernels_that_are_not(op, kernel_id):
    assert differences(kernels(op)[kernel_id], torch.float32) != []


# ---- a model ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of a Llama: rotations, grouped heads, gated feed-forward."""

    def __init__(self, width: int = 64, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.pair = nn.Linear(width, 2 * kv_heads * self.size, bias=False)
        self.out, self.down = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.before, self.behind = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)

    def forward(self, x_BSD: torch.Tensor, keep: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BSD.shape
        normed = self.before(x_BSD)
        query = self.query(normed).view(batch, length, self.heads, self.size).transpose(1, 2)
        key, value = self.pair(normed).view(batch, length, 2 * self.kv_heads, self.size).transpose(1, 2).chunk(2, 1)
        query, key = (
            each * cos + torch.cat([-each[..., self.size // 2 :], each[..., : self.size // 2]], -1) * sin
            for each in (query, key)
        )
        key, value = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (key, value))
        scores = (query @ key.transpose(-1, -2) * self.size**-0.5).masked_fill(~keep, -torch.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1)
        x_BSD = x_BSD + self.out(mixed)
        normed = self.behind(x_BSD)
        return x_BSD + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, vocabulary: int = 97) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 64), nn.Linear(64, vocabulary, bias=False)
        self.layers, self.norm = nn.ModuleList([Block()]), nn.RMSNorm(64, eps=1e-6)

    def forward(self, tokens: torch.Tensor, keep: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embed(tokens)
        for layer in self.layers:
            x_BSD = layer(x_BSD, keep, cos, sin)
        return self.head(self.norm(x_BSD))


def log_probabilities(model, documents, options=None):
    """Of documents in one row, each of which sees itself alone, as one tensor for each."""
    tokens = torch.cat(documents)[None]
    owner = torch.cat([torch.full((len(each),), index) for index, each in enumerate(documents)])
    places = torch.cat([torch.arange(len(each)) for each in documents])
    keep = (owner[:, None] == owner) & (torch.arange(len(owner))[:, None] >= torch.arange(len(owner)))
    angles = places[:, None] * 100.0 ** (-torch.arange(0, 16, 2) / 16)
    angles = torch.cat([angles, angles], -1)
    with torch.no_grad():
        dtype = next(model.parameters()).dtype
        logits = model(tokens, keep, angles.cos().to(dtype), angles.sin().to(dtype))[0]
    found = logits.log_softmax(-1).gather(-1, tokens[0][:, None])[:, 0]
    return found.split([len(each) for each in documents])


@pytest.mark.sampled("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_of_a_llama_are_the_same_bits_alone_and_packed(dtype):
    lz.configure(deterministic="batch_invariant")
    model = Llama().to(dtype)
    documents = [torch.randint(0, 97, (length,)) for length in (5, 23)]
    compiled = torch.compile(model, backend="layerzero", dynamic=False)
    packed = log_probabilities(compiled, documents)
    assert torch.equal(packed[1], log_probabilities(compiled, documents[1:])[0]), "which lies at an odd place"
    kernels_of = {match.op: match.kernel for report in lz.reports() for match in report.matches if match.op != "rope"}
    assert kernels_of == {"attention": "lz.row_attention", "norm": "lz.row_norm", "mlp": "lz.row_mlp"}
    torch.testing.assert_close(packed[0], log_probabilities(model, documents)[0], rtol=0.05, atol=0.05)


def test_what_nothing_covers_is_told():
    lz.configure(deterministic="batch_invariant")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch.compile(model, backend="layerzero")(torch.randn(3, 8))
    (event,) = [event for report in lz.reports() for event in report.events]
    assert str(event.message) == (
        "2 linears are not covered: a row may have other bits in another batch; "
        "kernels whose rows have bits of their own give no gradients: use torch.no_grad() (linear: 0, 1)"
    )


def told(function, *inputs, backend=None):
    torch._dynamo.reset()
    torch.compile(function, backend=backend or Rewriting())(*inputs)
    events = [event for event in lz.reports()[-1].events if event.code == "NOT_BATCH_INVARIANT"]
    return [str(event.message).partition(" not covered")[0] for event in events]


@torch.library.custom_op("row_tests::total", mutates_args=())
def total(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


@total.register_fake
def _(x):
    return torch.empty_like(x)


def _cumulated(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_summed = opaque("row_tests_summed", _cumulated, _like)

SUMS = [
    (nn.functional.cross_entropy, "1 softmax is"), (torch.inner, "1 product is"), (torch.cdist, "1 product is"),
    (nn.functional.mse_loss, "1 loss is"), (torch.kron, ""), (torch.logaddexp, "1 logaddexp (logaddexp) is"),
    (lambda x, y: torch.linalg.pinv(x @ y.T), "2 products are"), (lambda x, y: total(x) + y, "1 total (total) is"),
    (lambda x, y: nn.functional.local_response_norm(x[None], 3) + y, "1 "),
]  # fmt: skip


@pytest.mark.parametrize(("function", "expected"), SUMS)
def test_sums_by_any_name_are_told_and_those_of_nobody_we_know(function, expected):
    lz.configure(deterministic="batch_invariant")
    found = told(function, torch.randn(3, 8), torch.rand(3, 8))
    assert [each[: len(expected)] for each in found] == ([expected] if expected else [])


def test_what_moves_elements_or_takes_them_one_by_one_is_not_told():
    def moved(x, places):
        x = torch.cat([x.roll(1, 0), x.flip(1)]).reshape(2, 3, 16).transpose(0, 1)[places]
        x = nn.functional.pad(torch.where(x > 0, x.sigmoid(), x.exp() * 2), (1, 2))
        return x.amax(-1), x.to(torch.bfloat16).tril(), places.cumsum(0), (x > 0).any(0), nn.functional.one_hot(places)

    lz.configure(deterministic="batch_invariant")
    assert told(moved, torch.randn(3, 16), torch.tensor([2, 0])) == []


@pytest.mark.parametrize(
    ("function", "is_told"),
    [
        (lambda x, i: x.tanh() * i[:, None], False),
        (lambda x, i: x.remainder(0.3), True),  # vectors and the scalars after them round differently
        (lambda x, i: torch.complex(x, x).exp().real, True),
        (lambda x, i: x.topk(2).values, False),
        (lambda x, i: _summed(x), True),  # an operator of ours that no kernel declares
        (lambda x, i: x.pow(3) / x.sqrt() + x.relu(), False),
        (lambda x, i: x * i.sum(dtype=torch.float32), True),
        (lambda x, i: x * i.sum(), False),
        (lambda x, i: x.scatter(0, i[:, None].expand(3, 7), x, reduce="add"), True),
        (lambda x, i: x.scatter(0, i[:, None].expand(3, 7), x), False),
        (lambda x, i: torch.zeros(3, 7) + x, False),
    ],
)  # fmt: skip
def test_what_rounds_by_its_place_is_told_and_what_does_not_is_not(function, is_told):
    lz.configure(deterministic="batch_invariant")
    assert bool(told(function, torch.rand(3, 7), torch.tensor([2, 0, 1]))) is is_told


def test_nothing_is_told_for_sizes_that_change_nor_for_regions_of_autocast():
    def rotated(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x.flip(1) * len(x)

    lz.configure(deterministic="batch_invariant")
    x = torch.rand(3, 7)
    torch._dynamo.mark_dynamic(x, 0)
    assert told(rotated, x) == []


def test_the_last_compile_of_a_function_tells_that_other_sizes_run_eagerly():
    lz.configure(deterministic="batch_invariant")
    compiled = torch.compile(lambda x: x + 1, backend="layerzero", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (2, 3, 4):
            compiled(torch.ones(rows, 3))
    first, last = lz.reports()
    assert not first.events
    assert [str(event.message) for event in last.events] == [
        "Dynamo compiles this function no more, and runs it eagerly at any other sizes: a row may have other bits in "
        "another batch. Mark sizes that change as dynamic, or raise its limit"
    ]


def test_a_graph_that_is_compiled_as_it_was_is_told(monkeypatch):
    def fails(graph):
        raise RuntimeError("no tidying today")

    monkeypatch.setattr(inductor, "untangle", fails)
    monkeypatch.setattr(
        inductor, "has_regions", lambda module: bool(module.graph.find_nodes(op="call_function", target=rows.linear))
    )
    lz.configure(deterministic="batch_invariant")
    weight = torch.randn(5, 7)
    with torch.no_grad():
        found = told(lambda x: nn.functional.linear(x, weight), torch.randn(3, 7), backend="layerzero")
    assert found == ["the graph is compiled as it was: a row may have other bits in another batch"]


def _rows_alike(function, x):
    """Rows of x, and whether they have the same bits alone, among few and among all."""
    compiled = torch.compile(function, backend="layerzero", dynamic=False)
    with torch.no_grad():
        whole = compiled(x)
        for rows in (slice(0, 1), slice(2, 7)):
            for found, expected in zip(compiled(x[rows].contiguous()), whole, strict=True):
                torch.testing.assert_close(found, expected[rows], rtol=0, atol=0, equal_nan=True)
    assert [event for report in lz.reports() for event in report.events if event.code == "NOT_BATCH_INVARIANT"] == []


def test_functions_of_elements_have_the_same_bits_wherever_these_stand():
    names = "exp expm1 log1p sin tanh asinh sigmoid erf exp2 atan".split()
    functions = [*(getattr(torch, name) for name in names), nn.functional.gelu, lambda x: x.abs() ** 2.3, torch.square]

    def both(x):  # once in rows, once with all rows next to one another, and of one number for each
        across = [each(x.t().contiguous()).t() for each in functions]
        return *[each(x) for each in functions], *across, *[each(x.amax(-1)) for each in functions]

    lz.configure(deterministic="batch_invariant")
    x = torch.randn(33, 7) * 3
    x[5] *= 1e5  # sines of large numbers are computed by other code, in vectors for all of a vector
    x[6, 2:4] = torch.tensor([torch.nan, torch.inf])
    _rows_alike(both, x)


def test_results_of_16_bits_are_rounded_whether_or_not_what_reads_them_is_computed_along():
    weight, shift = torch.randn(48).half(), torch.randn(48).half()

    def repeated(x):  # of one row, what lies along the other dimension is no other order: nothing is copied
        x = x * 0.5 + shift
        x = nn.functional.elu((nn.functional.rms_norm(x, (48,), weight, 1e-6) + x) * 0.7)
        return (x.repeat_interleave(2, -1).transpose(0, 1).contiguous().transpose(0, 1),)

    lz.configure(deterministic="batch_invariant")
    _rows_alike(repeated, torch.randn(33, 48).half())


@pytest.mark.parametrize(("inputs", "biases"), [(7, 1), (0, 5)])
def test_linears_that_no_row_kernel_is_for_are_told(inputs, biases):
    lz.configure(deterministic="batch_invariant")
    weight, bias = torch.randn(5, inputs), torch.randn(biases)
    with torch.no_grad():
        assert told(lambda x: nn.functional.linear(x, weight, bias), torch.randn(3, inputs)) == ["1 linear is"]
    assert not [event for event in lz.reports()[-1].events if event.code == "REWRITE_FAILED"]


def test_a_linear_that_fails_its_proof_costs_no_other_its_kernel(monkeypatch):
    def sometimes_wrong(x, weight, bias):
        return rows.linear(x, weight, bias) + (weight.shape[0] == 5)

    lz.configure(deterministic="batch_invariant")
    monkeypatch.setattr(row_bits, "rows", SimpleNamespace(linear=sometimes_wrong, serves=rows.serves))
    layers = [nn.Linear(6, size) for size in (3, 5, 4)]
    with torch.no_grad():
        (text,) = told(lambda x: [layer(x) for layer in layers], torch.randn(3, 6))
    assert text.startswith("2 sometimes_wrong")
    assert text.endswith("1 linear are")
    codes = [event.code for event in lz.reports()[-1].events]
    assert codes.count("EDIT_REFUTED") == 1


def test_attention_without_keys_is_zero():
    lz.configure(deterministic="batch_invariant")
    attention = torch.compile(nn.functional.scaled_dot_product_attention, backend="layerzero")
    with torch.no_grad():
        assert torch.equal(attention(torch.randn(2, 3, 4, 8), *[torch.randn(2, 3, 0, 8)] * 2), torch.zeros(2, 3, 4, 8))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (17, 2), (5, 7), (300, 33), (33, 64)])
def test_a_linear_gives_a_row_the_same_bits_wherever_it_stands(shape, dtype):
    inputs, outputs = shape
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    left = torch.randn(37, inputs).to(dtype)
    found = rows.linear(left, weight, bias)
    expected = nn.functional.linear(left.double(), weight.double(), bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02 if dtype.itemsize == 2 else 1e-4)
    parts = [rows.linear(part, weight, bias) for part in left.split([1, 2, 15, 16, 3])]
    assert torch.equal(found, torch.cat(parts))
    assert torch.equal(found, rows.linear(left, weight.t().contiguous().t(), bias))


@pytest.mark.parametrize("masked", [-1e4, -1e30, torch.finfo(torch.float32).min, -torch.inf])
def test_padding_that_is_masked_by_any_large_number_leaves_no_trace(masked):
    query, key, value = (torch.randn(2, 2, 21, 24) for _ in range(3))
    keep = torch.ones(21, 21, dtype=torch.bool).tril()
    bias = torch.zeros(1, 1, 21, 21).masked_fill(~keep, masked)
    attrs = AttentionAttrs(has_bias=True, bias_can_mask=True)
    run = kernels("attention")["lz.row_attention"].call
    whole = run(Operands(query, key, value, bias=bias), attrs)
    for before, behind in ((1, 0), (77, 5), (128, 300)):
        padded = [nn.functional.pad(each, (0, 0, before, behind), value=3.0) for each in (key, value)]
        over = nn.functional.pad(bias, (before, behind), value=masked)
        assert torch.equal(run(Operands(query, *padded, bias=over), attrs), whole)


def test_only_kernels_that_declare_it_are_chosen_and_the_others_say_why():
    lz.configure(deterministic="batch_invariant")
    report = lz.explain("norm.rms", torch.randn(4, 64), torch.randn(64), print_report=False)
    assert report.decision.kernel.kernel_id == "lz.row_norm"
    against = {each.kernel.kernel_id: [reason.code for reason in each.against] for each in report.decision.candidates}
    assert "NOT_BATCH_INVARIANT" in against["torch.norm"]
    lz.configure(deterministic=False)
    report = lz.explain("norm.rms", torch.randn(4, 64), torch.randn(64), print_report=False)
    assert report.decision.kernel.kernel_id != "lz.row_norm"


def test_a_call_of_our_linear_gives_a_row_its_own_bits_or_says_that_it_does_not():
    lz.configure(deterministic="batch_invariant")
    weight, bias, left = torch.randn(40, 70), torch.randn(40), torch.randn(33, 70)
    with events.collect() as happened:
        found = lz.linear(left, weight, bias)
        assert torch.equal(found[5:6], lz.linear(left[5:6], weight, bias))
        torch.testing.assert_close(found, nn.functional.linear(left, weight, bias), rtol=1e-4, atol=1e-4)
        assert happened == []
        functional._tell_dependent.cache_clear()
        lz.linear(left, weight.requires_grad_(), bias).sum().backward()
        lz.linear(left, weight, bias)
        lz.mlp_fused(left, weight, None, torch.randn(70, 40))
    assert [event.code for event in happened] == ["NOT_BATCH_INVARIANT"] * 2  # each once
