"""The norm recogniser: equivalent spellings, lookalikes, attributes, rounding, and real models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from backends import Rewriting
from graphs import capture
from hypothesis import HealthCheck, Phase, given, settings
from norm_near_misses import inputs as lookalike_inputs
from norm_near_misses import near_misses
from norm_spellings import PRODUCTS, TOLERANCES, Spelling, spellings
from tiers import examples, shallow
from torch import Tensor, nn

import lz_compile
from lz_compile.backend import layerzero
from lz_compile.lowering.kernels.norm import torch_norm
from lz_compile.lowering.ops import norm as op
from lz_compile.lowering.ops.norm import NormAttrs, NormFacts
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.norm.matching import matches
from lz_compile.passes.proof import validate
from lz_compile.passes.rewriting.match import Match
from lz_compile.report.report import MatchReport

many = settings(
    max_examples=examples(12, 70),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
some = settings(many, max_examples=examples(6, 30))
few = settings(many, max_examples=examples(4, 12))
LOCK = {"norm": "torch.norm"}
#: Modules that normalise, by the ends of their names.
NORMS = ("Norm", "NormGated")


def compiled(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> tuple[Any, Rewriting]:
    """The function's result with every norm on PyTorch's kernel that it can run, and what was done."""
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs), backend


def norms(backend: Rewriting) -> list[MatchReport]:
    return [match for match in backend.report.matches if match.op == "norm"]


def only(backend: Rewriting) -> MatchReport:
    """The one norm that was found."""
    found = norms(backend)
    assert len(found) == 1, backend.why_not()
    return found[0]


def attributes(function: Callable[..., Any], *inputs: Any) -> dict[str, Any]:
    return only(compiled(function, *inputs)[1]).attributes


def check_close(spelling: Spelling, got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCES[spelling.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def check_match(spelling: Spelling, match: MatchReport) -> None:
    """The right attributes; rewritten, or not with a reason."""
    want = spelling.attributes()
    assert {name: match.attributes[name] for name in want} == want
    assert match.attributes["eps"] == pytest.approx(spelling.eps, rel=1e-6)
    codes = [reason.code for reason in match.reasons]
    if match.attributes["eps_at"] != "inside":
        assert codes[0] == "LOCK_NOT_POSSIBLE"
    elif not match.rewritten:
        assert codes == ["ALREADY_THIS_KERNEL"], match.reasons


# ---- every spelling --------------------------------------------------------------------------------------------------


@given(spelling=spellings())
@many
def test_every_spelling_is_found_and_gives_the_same(spelling: Spelling) -> None:
    inputs = spelling.inputs(0)
    got, backend = compiled(spelling.build(), *inputs)
    check_close(spelling, got, spelling.reference(*inputs))
    check_match(spelling, only(backend))


@pytest.mark.slow
@given(spelling=spellings(call="none"))
@settings(many, max_examples=examples(15, 120))
def test_every_spelling_by_hand_is_found_and_gives_the_same(spelling: Spelling) -> None:
    inputs = spelling.inputs(1)
    got, backend = compiled(spelling.build(), *inputs)
    check_close(spelling, got, spelling.reference(*inputs))
    check_match(spelling, only(backend))


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("product", PRODUCTS)
def test_squares_may_be_summed_by_one_product(product: str, is_centred: bool) -> None:
    spelling = Spelling(is_centred=is_centred, squared_by=product, averaged_by="sum_over_number", weight="plain")
    inputs = spelling.inputs(0)
    torch._dynamo.mark_dynamic(inputs[0], 0)
    got, backend = compiled(spelling.build(), *inputs)
    check_close(spelling, got, spelling.reference(*inputs))
    check_match(spelling, only(backend))


def test_products_of_a_tensor_with_itself_are_no_squares_where_rows_meet_others() -> None:
    """``x @ x.T`` is of pairs of rows, and a sum over both axes apart is of no row."""

    def pairs(x: Tensor) -> Tensor:
        return x * torch.rsqrt((x @ x.mT) + 30)[:, :1]

    def sums(x: Tensor) -> Tensor:
        return x * torch.rsqrt(torch.einsum("sd,te->sd", x, x).square().mean(-1, keepdim=True) + 1e-6).abs()

    for function in (pairs, sums):
        x = torch.randn(4, 8)
        got, backend = compiled(function, x)
        torch.testing.assert_close(got, function(x))
        assert not backend.report.events, backend.why_not()
        assert all(match.op != "norm" for match in backend.report.matches), backend.why_not()
        assert not backend.report.near_misses, backend.why_not()


@given(spelling=spellings(dtype=torch.float64))
@some
def test_gradients_of_every_spelling_are_those_of_the_reference(spelling: Spelling) -> None:
    ours, theirs = ([each.requires_grad_() for each in spelling.inputs(2)] for _ in range(2))
    got, backend = compiled(spelling.build(), *ours)
    want = spelling.reference(*theirs)
    check_match(spelling, only(backend))
    weight = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).reshape(want.shape)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        if other.grad is not None and mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-6)
        assert (mine.grad is None) == (other.grad is None)


@given(spelling=spellings())
@few
def test_every_spelling_is_found_where_rows_have_symbolic_sizes(spelling: Spelling) -> None:
    inputs = spelling.inputs(3)
    positions = (1,) if spelling.over.startswith("second") else spelling.positions
    hidden = {position % len(spelling.shape) for position in positions}
    for each in inputs[:2]:
        torch._dynamo.mark_dynamic(each, [d for d, size in enumerate(spelling.shape) if d not in hidden and size > 1])
    got, backend = compiled(spelling.build(), *inputs)
    check_close(spelling, got, spelling.reference(*inputs))
    check_match(spelling, only(backend))


@pytest.mark.parametrize("width", [16, 24])
def test_gradients_of_a_bias_are_proven_where_rows_have_symbolic_sizes(width: int) -> None:
    """PyTorch's kernel sums up rows one by one."""

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    inputs = [torch.randn(shape, requires_grad=True) for shape in ((4, 7, width), (width,), (width,))]
    got, backend = compiled(layer, *inputs, dynamic=True)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(got, layer(*inputs))


def test_rows_of_symbolic_size_run_at_other_sizes_without_another_compile() -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    backend = Rewriting(lock=LOCK)
    run = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    weight = torch.randn(24)
    for rows in (7, 11, 64):
        x = torch.randn(3, rows, 24)
        torch.testing.assert_close(run(x, weight), layer(x, weight))
    assert only(backend).rewritten
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("shape", [(3, 24), (3, 5, 24)])
def test_symbolic_rows_elements_are_counted_by_what_the_graph_knows(shape: tuple[int, ...]) -> None:
    def unit(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)

    def length_one(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True))

    for function in (unit, length_one):
        x = torch.randn(shape)
        got, backend = compiled(function, x, dynamic=True)
        torch.testing.assert_close(got, function(x))
        assert only(backend).rewritten, backend.why_not()


@pytest.mark.parametrize("is_centred", [False, True])
def test_what_was_emitted_is_not_read_again(is_centred: bool) -> None:
    spelling = Spelling(is_centred=is_centred, squared_by="pow", averaged_by="mean", weight="plain", bias=True)
    graph = compiled(spelling.build(), *spelling.inputs(4))[1].graphs[0].graph
    assert list(matches(graph, Effects(graph))) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16])
def test_norms_compile_through_inductor(dtype: torch.dtype) -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean = x.float().mean(-1, keepdim=True)
        centred = x.float() - mean
        row = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        first = (weight * row + bias).to(x.dtype)
        return first * torch.rsqrt(first.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)

    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((3, 5, 32), (32,), (32,)))
    lz_compile.clear_reports()
    got = torch.compile(layer, backend=layerzero, fullgraph=True, options={"layerzero.lock": LOCK})(x, weight, bias)
    (report,) = lz_compile.reports()
    assert [match.rewritten for match in report.matches] == [True, True], report.to_dict()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got, layer(x, weight, bias), rtol=tolerance, atol=tolerance)


# ---- what is a norm, and what is not ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", near_misses())
def test_lookalikes_are_left_alone_with_their_reason(name: str) -> None:
    function, reason = near_misses()[name]
    got, backend = compiled(function, *lookalike_inputs())
    assert not backend.report.events
    torch.testing.assert_close(got, function(*lookalike_inputs()))
    assert not any(match.rewritten for match in backend.report.matches)
    misses = [miss for miss in backend.report.near_misses if miss.op == "norm"]
    assert any(reason in str(miss.reason) for miss in misses) if reason else not misses, misses
    assert all(miss.edit and miss.where for miss in misses)


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _gated_after(x: Tensor, gate: Tensor) -> Tensor:
    return _rms(x) * F.silu(gate)


def _times_rows(x: Tensor, gate: Tensor) -> Tensor:
    return _rms(x) * gate[..., :1]


def _modulated(x: Tensor, gate: Tensor) -> Tensor:
    return _rms(x) * (1 + gate[:, :1].tanh()) + gate[:, 1:2]


def _times_other(x: Tensor, gate: Tensor) -> Tensor:
    return gate * _rms(x)


@pytest.mark.parametrize("function", [_gated_after, _times_rows, _modulated, _times_other])
def test_what_depends_on_the_row_stays_outside(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, gate = torch.randn(3, 7, 24), torch.randn(3, 7, 24)
    got, backend = compiled(function, x, gate)
    torch.testing.assert_close(got, function(x, gate))
    match = only(backend)
    assert match.rewritten
    assert not match.attributes["has_weight"]
    assert not match.attributes["has_bias"]


def test_a_gate_at_the_end_of_a_deep_model_stays_outside() -> None:
    def deep(x: Tensor) -> Tensor:
        gate = x
        for _ in range(1200):
            gate = gate + 0.001
        return _rms(x) * gate

    graph = capture(deep, torch.randn(3, 24)).graph
    (match,) = matches(graph, Effects(graph))
    assert isinstance(match, Match)
    assert not match.found.attributes.has_weight


@pytest.mark.parametrize("dim", [0, 1])
def test_a_weight_for_each_row_of_a_matrix_comes_after_its_norm(dim: int) -> None:
    """Weights of DoRA and weight normalisation: ``magnitude * v / |v|``, of rows or of columns."""

    def layer(x: Tensor, v: Tensor, magnitude: Tensor) -> Tensor:
        return x @ (magnitude.unsqueeze(dim) * v / v.norm(dim=dim, keepdim=True)).T

    x, v = torch.randn(5, 24), torch.randn(32, 24)
    inputs = x, v, torch.randn(v.shape[1 - dim])
    got, backend = compiled(layer, *inputs)
    torch.testing.assert_close(got, layer(*inputs))
    assert only(backend).rewritten, backend.why_not()


def test_one_tensor_that_weights_rows_and_elements_is_one_of_the_two() -> None:
    def layer(v: Tensor, m: Tensor) -> Tensor:
        return m[:, None] * m * v / v.norm(dim=1, keepdim=True)

    inputs = torch.randn(16, 16), torch.randn(16)
    got, backend = compiled(layer, *inputs)
    torch.testing.assert_close(got, layer(*inputs))
    assert not norms(backend), backend.why_not()


def test_an_epsilon_beside_a_sum_of_unknown_length_is_told_as_such() -> None:
    def layer(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-2)

    assert "[SIZE_UNKNOWN]" in compiled(layer, torch.randn(5, 24), dynamic=True)[1].why_not()


@pytest.mark.parametrize(("most", "dynamic"), [(None, False), (None, True), (100, False)])
@pytest.mark.parametrize("shape", [(5, 24, 3), (5, 7, 1), (3, 40, 5)])
def test_a_length_that_is_held_above_zero_is_a_number(shape: tuple[int, ...], most: int | None, dynamic: bool) -> None:
    def layer(x: Tensor) -> Tensor:  # observed steps are counted, as PatchTST does it
        observed = torch.ones_like(x)
        count = observed.sum(1, keepdim=True).clamp(1.0, most)
        centre = (x * observed).sum(1, keepdim=True) / count
        return (x - centre) / torch.sqrt(((x - centre) * observed).square().sum(1, keepdim=True) / count + 1e-2)

    x = torch.randn(shape)
    got, backend = compiled(layer, x, dynamic=dynamic)
    torch.testing.assert_close(got, layer(x))
    assert only(backend).attributes["is_centred"]
    assert only(backend).rewritten, backend.why_not()


def test_a_root_may_be_spelled_by_a_logarithm() -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.exp(-0.5 * torch.log(x.square().mean(-1, keepdim=True) + 1e-6)) * weight

    inputs = torch.randn(5, 24), torch.randn(24)
    got, backend = compiled(layer, *inputs)
    torch.testing.assert_close(got, layer(*inputs))
    assert only(backend).attributes["has_weight"]


def test_a_root_may_drop_its_dimension_by_an_index() -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)[..., 0]
        return torch.einsum("bs,d,bsd->bsd", root, weight, x)

    inputs = torch.randn(2, 5, 24), torch.randn(24)
    got, backend = compiled(layer, *inputs)
    torch.testing.assert_close(got, layer(*inputs))
    assert only(backend).attributes["has_weight"]


def test_a_gate_before_is_part_of_the_row() -> None:
    def mamba(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return weight * _rms(x * F.silu(gate))

    x, gate, weight = torch.randn(3, 7, 24), torch.randn(3, 7, 24), torch.randn(24)
    got, backend = compiled(mamba, x, gate, weight)
    torch.testing.assert_close(got, mamba(x, gate, weight))
    assert only(backend).attributes["has_weight"]
    assert F.silu in {node.target for node in backend.graphs[0].graph.nodes}


def test_a_residual_that_is_used_again_is_kept() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + residual
        return weight * _rms(residual), residual

    inputs = torch.randn(3, 7, 24), torch.randn(3, 7, 24), torch.randn(24)
    got, backend = compiled(block, *inputs)
    torch.testing.assert_close(got, block(*inputs))
    assert only(backend).rewritten


def test_a_scale_of_the_row_is_told_by_what_it_does_to_epsilon() -> None:
    def scaled(x: Tensor) -> Tensor:
        return 3.0 * x * torch.rsqrt((3.0 * x).pow(2).mean(-1, keepdim=True) + 9e-3)

    x = torch.randn(3, 24)
    got, backend = compiled(scaled, x)
    torch.testing.assert_close(got, scaled(x))
    assert only(backend).rewritten


@pytest.mark.parametrize(
    ("of", "is_weight"),
    [(torch.exp, True), (torch.tanh, True), (lambda w: w.reshape(4, 6).flatten(), True), (lambda w: 2 / (1 + w * w), True),
     (torch.abs, False), (lambda w: w.clamp(min=0), False), (lambda w: w.flip(0), False), (lambda w: w.cumsum(0), False)],
)  # fmt: skip
def test_a_weight_may_be_computed(of: Callable[[Tensor], Tensor], is_weight: bool) -> None:
    x, weight = torch.randn(3, 24), torch.randn(24)
    got, backend = compiled(lambda x, weight: of(weight) * _rms(x), x, weight)
    torch.testing.assert_close(got, of(weight) * _rms(x))
    match = only(backend)
    assert (match.rewritten, match.attributes["has_weight"]) == (True, is_weight), backend.why_not()


def test_a_norm_of_a_norm_is_two() -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        first = (weight * _rms(x.float())).to(x.dtype)
        return _rms(first.float()).to(x.dtype)

    inputs = torch.randn(3, 24), torch.randn(24)
    got, backend = compiled(layer, *inputs)
    torch.testing.assert_close(got, layer(*inputs))
    assert [match.rewritten for match in norms(backend)] == [True, True], backend.why_not()


def test_a_tensor_that_lends_its_dtype_or_shape_is_no_operand() -> None:
    def layer(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        row = (x + other).sin().type_as(other)
        row = _rms(row.double()).type_as(row) * weight.expand_as(other).type_as(x)
        return row.view_as(other)

    inputs = torch.randn(3, 24), torch.randn(3, 24), torch.randn(24)
    got, backend = compiled(layer, *inputs)
    torch.testing.assert_close(got, layer(*inputs))
    match = only(backend)
    assert (match.rewritten, match.attributes["has_weight"]) == (True, True), backend.why_not()


def test_a_weight_that_is_multiplied_in_by_a_statement_stays_outside() -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        row = _rms(x)
        row.mul_(weight)
        row += 1
        return row

    x, weight = torch.randn(3, 24), torch.randn(24)
    got, backend = compiled(layer, x, weight)
    torch.testing.assert_close(got, layer(x, weight))
    assert only(backend).rewritten


@pytest.mark.parametrize("normalised", [F.layer_norm, F.rms_norm])
def test_a_call_of_the_kernel_itself_stays_as_it_is(normalised: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(3, 24), torch.randn(24)
    got, backend = compiled(lambda x, weight: normalised(x, (24,), weight, eps=1e-3), x, weight)
    torch.testing.assert_close(got, normalised(x, (24,), weight, eps=1e-3))
    match = only(backend)
    assert not match.rewritten
    assert [reason.code for reason in match.reasons] == ["ALREADY_THIS_KERNEL"]
    assert match.attributes["eps"] == pytest.approx(1e-3)


def test_rms_norm_without_an_epsilon_has_that_of_its_dtype() -> None:
    assert attributes(lambda x: F.rms_norm(x, (24,)), torch.randn(3, 24))["eps"] == torch.finfo(torch.float32).eps
    half = attributes(lambda x: F.rms_norm(x, (24,)), torch.randn(3, 24).bfloat16())
    assert half["eps"] == torch.finfo(torch.float32).eps  # what it is computed in


class ChannelsFirst(nn.Module):
    """As ConvNeXt spells it: over dimension 1 of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(24)), nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (3, 8))
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class GroupedByHand(nn.Module):
    """Group norm: a view, statistics over the rest, a view back, and one weight per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(24)), nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(x.shape[0], 4, -1)
        groups = (groups - groups.mean(-1, keepdim=True)) / (groups.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        return groups.view(x.shape) * self.weight[:, None] + self.bias[:, None]


class ScaleNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(24**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale / torch.linalg.norm(x, dim=-1, keepdim=True).clamp(min=1e-5)


class NormalisedAndScaled(nn.Module):
    """As lucidrains' repositories spell RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.gamma * 24**0.5


class DeviationOfTheFirst(nn.Module):
    """As The Annotated Transformer spells LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(24)), nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b


class StatisticsOfTheFlattened(nn.Module):
    """Statistics are taken over what is flattened, and used where it is not."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (4, 6))
        square = parts.flatten(-2).pow(2).mean(-1)
        return parts * torch.rsqrt(square + 1e-6)[..., None, None]


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24, eps=1e-3)
        self.weight, self.bias = nn.Parameter(torch.randn(24)), nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.weight + self.bias


MODULES: list[tuple[nn.Module, dict[str, Any]]] = [
    (ChannelsFirst(), {"is_centred": True, "has_weight": True, "has_bias": True, "eps": 1e-6}),
    (GroupedByHand(), {"is_centred": True, "has_weight": False, "has_bias": False, "eps": 1e-5}),
    (ScaleNorm(), {"is_centred": False, "has_weight": False, "eps_at": "floor"}),
    (NormalisedAndScaled(), {"is_centred": False, "has_weight": True, "eps_at": "floor"}),
    (DeviationOfTheFirst(), {"is_centred": True, "has_weight": True, "has_bias": True, "eps_at": "outside"}),
    (StatisticsOfTheFlattened(), {"is_centred": False, "has_weight": False, "eps": 1e-6}),
    (TwoWeights(), {"is_centred": True, "has_weight": True, "has_bias": True, "eps": 1e-3}),
    (nn.Sequential(nn.LayerNorm((24, 24)), nn.Identity()), {"is_centred": True, "has_weight": True, "has_bias": True}),
    (nn.RMSNorm(24, eps=1e-4), {"is_centred": False, "has_weight": True, "has_bias": False, "eps": 1e-4}),
]


@pytest.mark.parametrize(("module", "want"), MODULES, ids=[type(module).__name__ for module, _ in MODULES])
def test_modules_as_people_write_them(module: nn.Module, want: dict[str, Any]) -> None:
    x = torch.randn(2, 24, 24, requires_grad=True)
    got, backend = compiled(module, x)
    torch.testing.assert_close(got, module(x), rtol=1e-5, atol=1e-5)
    weight = torch.linspace(-1, 1, got.numel()).reshape(got.shape)
    leaves = [x, *module.parameters()]
    gradients = [torch.autograd.grad((out * weight).sum(), leaves) for out in (got, module(x))]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    match = only(backend)
    assert {name: match.attributes[name] for name in want} == pytest.approx(want)
    codes = {reason.code for reason in match.reasons}
    assert match.rewritten or codes <= {"ALREADY_THIS_KERNEL", "LOCK_NOT_POSSIBLE", "LEFT_TO_INDUCTOR"}, (
        backend.why_not()
    )


def test_layer_norm_of_a_module_has_weight_and_bias() -> None:
    found = attributes(nn.LayerNorm(24), torch.randn(3, 24))
    assert (found["is_centred"], found["has_weight"], found["has_bias"]) == (True, True, True)


# ---- rounding --------------------------------------------------------------------------------------------------------


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    return weight * _rms(x.float()).to(x.dtype)


def _gemma(x: Tensor, weight: Tensor) -> Tensor:
    return (_rms(x.float()) * (1.0 + weight.float())).type_as(x)


def _half(x: Tensor, weight: Tensor) -> Tensor:
    return _rms(x) * weight


def _olmo(x: Tensor, weight: Tensor) -> Tensor:
    return (weight * _rms(x.float())).to(x.dtype)


def _wide(x: Tensor, weight: Tensor) -> Tensor:
    return weight * _rms(x.float())


@pytest.mark.parametrize(
    ("function", "compute_dtype", "rounded_to", "out_dtype", "offset"),
    [
        (_llama, "float32", "bfloat16", "bfloat16", 0.0),
        (_gemma, "float32", "float32", "bfloat16", 1.0),
        (_half, "bfloat16", "bfloat16", "bfloat16", 0.0),
        (_olmo, "float32", "float32", "bfloat16", 0.0),
        (_wide, "float32", "float32", "float32", 0.0),
    ],
)
def test_spellings_that_round_differently_have_other_attributes(
    function: Callable[[Tensor, Tensor], Tensor], compute_dtype: str, rounded_to: str, out_dtype: str, offset: float
) -> None:
    x, weight = (torch.randn(*shape).to(torch.bfloat16) for shape in ((3, 24), (24,)))
    got, backend = compiled(function, x, weight)
    torch.testing.assert_close(got.float(), function(x, weight).float(), rtol=2e-2, atol=2e-2)
    match = only(backend)
    assert match.rewritten
    kinds = {"compute_dtype": compute_dtype, "rounded_to": rounded_to, "out_dtype": out_dtype}
    assert {name: match.attributes[name] for name in kinds} == {name: f"torch.{kind}" for name, kind in kinds.items()}
    assert match.attributes["weight_offset"] == offset


def test_calls_compute_in_float32() -> None:
    x = torch.randn(3, 24).to(torch.bfloat16)
    for function in (
        lambda x: F.layer_norm(x.to(torch.float32), (24,), eps=1e-5).to(x.dtype),
        lambda x: F.rms_norm(x.float(), (24,), eps=1e-5).type_as(x),
    ):
        found = only(compiled(function, x)[1])
        assert (found.context["dtype"], found.attributes["compute_dtype"]) == ("bfloat16", "torch.float32")
        assert found.attributes["out_dtype"] == "torch.bfloat16"
    assert attributes(lambda x: F.layer_norm(x, (24,)), x)["compute_dtype"] == "torch.float32"
    assert attributes(lambda x: F.rms_norm(x, (24,), None, 1e-6), x)["rounded_to"] == "torch.float32"


# ---- equal layers ----------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, eps: float = 1e-6, weight: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.randn(24)) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        row = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return row if self.weight is None else self.weight * row


def matches_of(*layers: nn.Module) -> list[Match]:
    stack = nn.Sequential(*(each for layer in layers for each in (nn.Linear(24, 24), layer)), nn.Linear(24, 24))
    graph = capture(stack, torch.randn(3, 24).requires_grad_()).graph
    return [found for found in matches(graph, Effects(graph)) if isinstance(found, Match)]


def test_layers_after_the_first_are_its_twins() -> None:
    first, *others = matches_of(*(Norm() for _ in range(4)))
    assert first.prototype is None
    assert [match.prototype for match in others] == [first] * 3
    assert len({match.site.output for match in (first, *others)}) == 4


@pytest.mark.parametrize("other", [Norm(eps=1e-5), Norm(weight=False), nn.LayerNorm(24), nn.RMSNorm(24)])
def test_a_layer_that_differs_is_read_by_itself(other: nn.Module) -> None:
    first, second, third = matches_of(Norm(), other, Norm())
    assert second.prototype is None
    assert third.prototype is first
    assert second.found.attributes != first.found.attributes or isinstance(other, nn.RMSNorm)


def test_twins_are_rewritten_each_with_its_own_weight() -> None:
    layers = nn.Sequential(*(each for _ in range(3) for each in (nn.Linear(24, 24), Norm())))
    x = torch.randn(5, 24)
    got, backend = compiled(layers, x)
    torch.testing.assert_close(got, layers(x))
    assert [match.rewritten for match in norms(backend)] == [True] * 3


# ---- the op and its kernel -------------------------------------------------------------------------------------------


ATTRIBUTES = [
    NormAttrs(eps=1e-5),
    NormAttrs(eps=1e-5, has_weight=True),
    NormAttrs(eps=1e-5, has_weight=True, weight_offset=1.0),
    NormAttrs(eps=1e-5, has_weight=True, has_bias=True),
    NormAttrs(is_centred=True, eps=1e-5),
    NormAttrs(is_centred=True, eps=1e-5, has_weight=True),
    NormAttrs(is_centred=True, eps=1e-5, has_weight=True, has_bias=True, weight_offset=1.0),
    NormAttrs(is_centred=True, eps=1e-5, has_bias=True),
]


def operands(attrs: NormAttrs, dtype: torch.dtype) -> dict[str, Tensor]:
    found = {"input": torch.randn(7, 24).to(dtype)}
    names = [name for name in ("weight", "bias") if getattr(attrs, f"has_{name}")]
    return found | {name: torch.randn(24).to(dtype) for name in names}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("attrs", ATTRIBUTES, ids=str)
def test_the_kernel_computes_the_reference(attrs: NormAttrs, dtype: torch.dtype) -> None:
    for out_dtype in {dtype, torch.promote_types(dtype, torch.float32)}:
        attrs = replace(attrs, out_dtype=out_dtype)
        given = operands(attrs, dtype)
        want = op.reference(op.Operands(**{name: each.double() for name, each in given.items()}), attrs)
        for got in (torch_norm.norm(op.Operands(**given), attrs), op.reference(op.Operands(**given), attrs)):
            assert got.dtype == out_dtype
            tolerance = TOLERANCES[dtype] / 4
            torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("eps", [0.0, 1e-3, 1.0])
def test_epsilon_stands_where_the_attributes_say(eps: float) -> None:
    x = torch.randn(7, 24, dtype=torch.float64)
    root = x.square().mean(-1, keepdim=True).sqrt()
    attrs = NormAttrs(eps=eps, out_dtype=torch.float64)
    for place, want in (
        ("inside", x / (root.square() + eps).sqrt()),
        ("outside", x / (root + eps)),
        ("floor", x / root.clamp(min=eps)),
    ):
        torch.testing.assert_close(op.reference(op.Operands(x), replace(attrs, eps_at=place)), want)


def test_features_say_what_a_kernel_must_support() -> None:
    facts = NormFacts(7, 24, torch.float32, "cpu")
    assert op.features(NormAttrs(eps=1e-5), facts) == {}
    attrs = NormAttrs(eps=1e-5, eps_at="floor", has_weight=True, has_bias=True, weight_offset=1.0)
    wide = replace(facts, dtype=torch.bfloat16, needs_grad=True)
    assert set(op.features(attrs, wide)) == {"weight", "bias", "weight_offset", "eps_floor", "wide_result", "training"}
    assert set(op.features(replace(attrs, eps_at="outside"), facts)) >= {"eps_outside"}


def test_variants_are_told_by_the_mean() -> None:
    assert [NormAttrs(is_centred=centred).variant for centred in (False, True)] == list(op.VARIANT_ATTRIBUTES)


@pytest.mark.parametrize("variant", op.VARIANT_ATTRIBUTES)
def test_samples_are_recognised_as_what_they_are(variant: str) -> None:
    sample = op.sample({"num_rows": 7, "hidden_size": 24}, torch.float32, torch.device("cpu"), variant=variant)
    got, backend = compiled(sample.as_written(), *sample.inputs)
    torch.testing.assert_close(got, sample.with_kernel(op.reference)(*sample.inputs), rtol=1e-5, atol=1e-5)
    assert only(backend).attributes["is_centred"] == sample.attrs.is_centred


# ---- epsilon ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0.0, 0.5, 4.0])
@pytest.mark.parametrize(
    ("dtype", "eps"),
    [(torch.float64, 1e-12), (torch.float32, 1e-12), (torch.float32, 1e-8), (torch.float32, 1e-6), (torch.float32, 1e-3),
     (torch.bfloat16, 1e-6), (torch.float16, 1e-6)],
)  # fmt: skip
def test_a_kernel_with_another_epsilon_is_quarantined(
    dtype: torch.dtype, eps: float, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layer(x: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.to(wide).pow(2).mean(-1, keepdim=True) + eps)).to(dtype)

    def other(x: op.Operands, attrs: NormAttrs) -> Tensor:
        return op.reference(x, replace(attrs, eps=attrs.eps * wrong))

    wide = torch.promote_types(dtype, torch.float32)
    monkeypatch.setattr(torch_norm, "norm", other)
    x = torch.randn(7, 20).to(dtype)  # a size of its own: verdicts are kept for everyone
    got, backend = compiled(layer, x)
    torch.testing.assert_close(got, layer(x))
    match = only(backend)
    assert not match.rewritten
    assert match.reasons[0].code == "VALIDATION_FAILED"
    assert "magnitude" in match.reasons[0].message or eps >= 1e-3
    validate.forget()


@pytest.mark.parametrize("magnitude", [1e-7, 1e-3, 1e3, 1e15])
def test_rows_of_any_magnitude_are_as_in_the_source(magnitude: float) -> None:
    x = torch.randn(7, 24) * magnitude
    got, backend = compiled(_rms, x)
    torch.testing.assert_close(got, _rms(x), rtol=1e-5, atol=1e-7)
    assert only(backend).rewritten


def test_a_row_of_zeros_stays_zero_and_nan_stays_in_its_row() -> None:
    x = torch.randn(4, 24)
    x[0], x[1, 3], x[2, 5] = 0.0, math.nan, math.inf
    got, backend = compiled(_rms, x)
    torch.testing.assert_close(got, _rms(x), equal_nan=True)
    assert only(backend).rewritten


def _by_differences(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)


def _by_moments(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5)


def _by_variance(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)


@pytest.mark.parametrize("function", [_rms, _by_differences, _by_moments, _by_variance])
def test_norms_agree_up_to_where_squares_overflow(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 24)
    x = torch.cat((x, x * 1e18, x * 1e-18))
    got, backend = compiled(function, x)
    assert only(backend).rewritten
    torch.testing.assert_close(got, function(x), rtol=1e-4, atol=1e-4)


# ---- real models -----------------------------------------------------------------------------------------------------

FAMILIES = ("llama", "gemma2", "t5", "bert", "swin", "olmo2", "qwen3")


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model of a family, and inputs."""
    if name != "mamba2":
        return shallow(zoo.family(name)).build("eager")
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "chunk_size": 8}
    config = Mamba2Config(vocab_size=101, num_hidden_layers=2, use_cache=False, **sizes)
    return Mamba2ForCausalLM(config).eval(), {"input_ids": torch.randint(0, 101, (3, 19))}


def norm_calls(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """How often modules that normalise are called."""
    calls: list[nn.Module] = []
    modules = [module for module in model.modules() if type(module).__name__.endswith(NORMS)]
    hooks = [module.register_forward_hook(lambda module, *_: calls.append(module)) for module in modules]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return len(calls)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*FAMILIES, "mamba2"])
def test_every_norm_of_a_model_is_found(name: str) -> None:
    model, inputs = build(name)
    backend = Rewriting(lock=LOCK)
    with torch.no_grad():
        got, want = (zoo.tensors(run(**inputs)) for run in (torch.compile(model, backend=backend), model))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    found = norms(backend)
    assert len(found) == norm_calls(model, inputs), backend.why_not()
    kept = {reason.code for match in found if not match.rewritten for reason in match.reasons}
    assert kept <= {"ALREADY_THIS_KERNEL"}, backend.why_not()


@pytest.mark.parametrize("count", [2, 6])
def test_norms_of_norms_are_read_one_by_one_and_quickly(count: int) -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(count):
            x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()
        return x

    backend = Rewriting(lock={"norm": "torch.norm"})
    x = torch.randn(5, 16)
    torch.testing.assert_close(torch.compile(chain, backend=backend, fullgraph=True)(x), chain(x), rtol=1e-4, atol=1e-4)
    assert [match.rewritten for match in backend.report.matches] == [True] * count


def test_a_variance_and_its_root_together_are_no_norm() -> None:
    def other(x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x / (variance + variance.sqrt() + 1e-6)

    backend = Rewriting()
    x = torch.randn(5, 16)
    torch.testing.assert_close(torch.compile(other, backend=backend, fullgraph=True)(x), other(x))
    assert not backend.report.matches


def test_a_norm_is_read_around_a_mode_that_is_left() -> None:
    def around(x: Tensor) -> tuple[Tensor, Tensor]:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        with torch.no_grad():  # behind it, the graph says that gradients are on, as they were before
            mean = x.mean()
        return x * inverse, mean

    backend = Rewriting(lock={"norm": "torch.norm"})
    x = torch.randn(5, 16, requires_grad=True)
    found, wanted = torch.compile(around, backend=backend, fullgraph=True)(x), around(x)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(each[0].cos().sum(), x) for each in (found, wanted)))


def test_long_chains_of_operations_do_not_stop_recognition() -> None:
    def long(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(150):
            x = x * 1.001 + 0.01
        return F.layer_norm(x @ weight, (8,)) @ weight

    backend = Rewriting()
    torch.compile(long, backend=backend, fullgraph=True)(torch.randn(5, 8), torch.randn(8, 8))
    assert [match.op for match in backend.report.matches] == ["norm"]
    assert not backend.report.events


def test_what_nobody_reads_does_not_stand_in_the_way() -> None:
    def norm(x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, -1, keepdim=True, unbiased=False)
        x - mean
        return x * torch.rsqrt(variance + 1e-5) - mean * torch.rsqrt(variance + 1e-5)

    backend = Rewriting(lock={"norm": "torch.norm"})
    x = torch.randn(5, 16)
    torch.testing.assert_close(torch.compile(norm, backend=backend, fullgraph=True)(x), norm(x))
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()


def test_a_deviation_that_is_taken_with_its_mean_is_a_norms() -> None:
    def norm(x: Tensor) -> Tensor:
        deviation, mean = torch.std_mean(x, -1, keepdim=True, unbiased=False)
        return (x - mean) / deviation

    backend = Rewriting(lock={"norm": "torch.norm"})
    x = torch.randn(5, 16)
    torch.testing.assert_close(torch.compile(norm, backend=backend, fullgraph=True)(x), norm(x))
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()


@pytest.mark.parametrize("is_trained", [False, True])
def test_detached_statistics_are_a_norms_where_nothing_has_a_gradient(is_trained: bool) -> None:
    """As time series are made stationary: elsewhere, what was taken off is a constant to whoever differentiates."""

    def stationary(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True).detach()
        return centred / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5).detach()

    x = torch.randn(4, 3, 16, requires_grad=is_trained)
    got, backend = compiled(stationary, x)
    torch.testing.assert_close(got.double(), stationary(x.double()), rtol=1e-5, atol=1e-5)
    assert [match.rewritten for match in norms(backend)] == [True] * (not is_trained), backend.why_not()
    assert [miss.reason.code for miss in backend.report.near_misses] == ["STATISTIC_DETACHED"] * is_trained


@pytest.mark.parametrize("second", ["sum", "mean"])
@pytest.mark.parametrize("first", ["sum", "mean"])
def test_squares_may_be_summed_over_one_dimension_after_the_other(first: str, second: str) -> None:
    """As equivariant layers and graph norms do; what was summed first counts once."""

    def norm(x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True).mean(-2, keepdim=True)
        squares = getattr(getattr(x.square(), first)(-2, keepdim=True), second)(-1, keepdim=True)
        return x * torch.rsqrt(squares / 3 + 1e-3)

    x = torch.randn(5, 3, 16, requires_grad=True)
    got, backend = compiled(norm, x)
    assert only(backend).rewritten, backend.why_not()
    exact = x.detach().double().requires_grad_()
    want = norm(exact)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for output, row in ((got, x), (want, exact)):
        (output * torch.arange(16).to(output)).sum().backward(inputs=[row])
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_rows_behind_differences_of_all_pairs_are_no_near_miss() -> None:
    """An equivariant layer moves points along unit vectors to each other: it divides none of them by its own length."""

    def move(x: Tensor, weight: Tensor) -> Tensor:
        apart = x[:, :, None] - x[:, None]
        length = (apart.square().sum(-1, keepdim=True) + 1e-8).sqrt()
        return x + (apart / (length + 1) * weight).mean(2)

    inputs = torch.randn(2, 6, 3), torch.randn(2, 6, 6, 1)
    got, backend = compiled(move, *inputs)
    torch.testing.assert_close(got, move(*inputs))
    assert not norms(backend), backend.why_not()
    assert not backend.report.near_misses, backend.why_not()


def test_a_product_of_tensors_behind_layouts_that_do_not_factor_is_no_fault() -> None:
    """Windows of an image of symbolic sizes: whether both are one tensor cannot be told."""

    def function(q: Tensor, k: Tensor) -> Tensor:
        q, k = (x.reshape(2, 3, 8, 4, x.shape[2] // 4, 4, -1).permute(0, 4, 6, 1, 3, 5, 2) for x in (q, k))
        q, k = (x.reshape(2, *x.shape[1:4], 16, 8) for x in (q, k))
        return torch.einsum("bxyhid,bxyhjd->bxyhij", q, k).softmax(-1)

    inputs = torch.randn(2, 24, 8, 12), torch.randn(2, 24, 8, 12)
    torch.testing.assert_close((result := compiled(function, *inputs, dynamic=True))[0], function(*inputs))
    assert not result[1].report.events, result[1].why_not()


def test_a_row_that_gets_a_dimension_in_place_after_a_product_read_it_is_no_fault() -> None:
    """Dynamo notes its later shape: a product of matrices has an operand with more dimensions than its result."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 1.0
        y *= (y.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        z = w @ y
        y.unsqueeze_(0)
        return y, z.view_as(y)

    torch._dynamo.reset()
    backend, inputs = Rewriting(), (torch.randn(6, 6), torch.randn(6, 6))
    for one, other in zip(torch.compile(function, backend=backend)(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(one, other)
    assert not [event for event in backend.report.events if event.code == "RECOGNISER_FAILED"], backend.why_not()


def test_a_number_that_is_normalised_is_no_fault() -> None:
    """It has no dimension, and PyTorch takes the last one all the same."""

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) * F.normalize(scale, dim=-1, eps=0.01)

    _, backend = compiled(norm, torch.randn(2, 5, 8), torch.tensor(3.0))
    assert not [each for each in backend.report.events if each.code == "RECOGNISER_FAILED"]
