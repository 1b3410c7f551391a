"""Gated MLPs and activations of projections: every spelling is read, and the rewrite is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from tiers import examples
from torch import Tensor, nn

from lz_compile.lowering.kernels.mlp import torch_mlp
from lz_compile.lowering.ops import mlp as op
from lz_compile.passes.formula import projections
from lz_compile.passes.formula.pointwise import AT_LEAST, evaluate
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.mlp.matching import matches
from lz_compile.passes.mlp.recogniser import name_of_values, points
from lz_compile.runtime.kernels.registry import kernels
from tests import zoo
from tests.backends import Rewriting, rewritten
from tests.mlp_spellings import ACTIVATIONS, GATES, SPLITS, TOLERANCES, Spelling, allows, spellings

LOCK = {"mlp": "torch.mlp"}
X = sympy.Symbol("x", real=True)

many = settings(
    max_examples=examples(15, 60),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def _run(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK, assume_finite=True)
    return torch.compile(function, backend=backend, fullgraph=True, **options)(*inputs), backend


def _check(spelling: Spelling) -> dict[str, Any]:
    """Recognised and right; with which attributes."""
    inputs = spelling.inputs(0)
    with torch.no_grad():
        result, backend = _run(spelling.build(), *inputs)
    assert [match.op for match in backend.report.matches] == ["mlp"], f"{spelling}\n{backend.why_not()}"
    (found,) = backend.report.matches
    assert found.rewritten, f"{spelling}\n{backend.why_not()}"
    wanted = spelling.attributes()
    assert {name: found.attributes[name] for name in wanted} == wanted
    slack = TOLERANCES[spelling.dtype]
    torch.testing.assert_close(result.double(), spelling.reference(*inputs), rtol=slack, atol=slack)
    return found.attributes


# ---- activations by what they compute -----------------------------------------------------------------------------------


def named(expression: sympy.Expr) -> str | None:
    found = name_of_values(evaluate(expression, {X: points()}))
    return None if found is None else found[0]


def test_an_expression_of_one_symbol_is_named_by_its_values() -> None:
    sigmoid = 1 / (1 + sympy.exp(-X))
    assert named(X * sigmoid) == "silu"
    assert named(X - X / (1 + sympy.exp(X))) == "silu"
    assert named(X * (1 + sympy.erf(X / sympy.sqrt(2))) / 2) == "gelu"
    assert named(X / (1 + sympy.exp(-1.702 * X))) == "quick_gelu"
    assert named(AT_LEAST(X, 0) ** 2) == "relu_squared"
    assert named((X + sympy.Abs(X)) / 2) == "relu"
    assert named(2 / (1 + sympy.exp(-2 * X)) - 1) == "tanh"


def test_other_expressions_have_no_name() -> None:
    assert named(X / (1 + sympy.exp(-1.7 * X))) is None
    assert named(AT_LEAST(X, sympy.Rational(1, 100))) is None
    assert named(2 * AT_LEAST(X, 0)) is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_names_of_spellings_are_those_of_the_op(activation: str) -> None:
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(op.ACTIVATIONS[activation](x), ACTIVATIONS[activation]["functional"](x))


# ---- spellings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_spelling_of_an_activation_is_recognised(activation: str) -> None:
    for index, name in enumerate(ACTIVATIONS[activation]):  # every other one without a second factor
        is_gated = activation in GATES or index % 2 == 0
        _check(Spelling(activation=activation, spelled=name, is_gated=is_gated, bias="none" if is_gated else "gate"))


@pytest.mark.parametrize("split", SPLITS)
def test_every_way_to_split_one_projection_is_recognised(split: str) -> None:
    if split == "glu":
        _check(Spelling(activation="sigmoid", projection="glu"))
        return
    for is_up_first in (False, True):
        spelling = Spelling(projection=split, is_up_first=is_up_first, bias="first")
        attributes = _check(spelling)
        assert (attributes["is_packed"], attributes["is_up_first"]) == (True, is_up_first)
        assert attributes["is_interleaved"] == (split == "interleaved")


@many
@given(spelling=spellings())
def test_any_spelling_is_recognised_and_right(spelling: Spelling) -> None:
    assert allows(spelling)
    _check(spelling)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
def test_gradients_are_those_of_the_source(activation: str, is_gated: bool) -> None:
    spelling = Spelling(activation=activation, is_gated=is_gated, bias="gate")
    inputs = [each.requires_grad_() for each in spelling.inputs(0)]
    used = inputs if is_gated else [*inputs[:2], inputs[3]]
    wanted = torch.autograd.grad(spelling.build()(*inputs).square().sum(), used, allow_unused=True)
    result, backend = _run(spelling.build(), *inputs)
    assert backend.report.matches[0].rewritten, backend.why_not()
    for mine, theirs in zip(torch.autograd.grad(result.square().sum(), used, allow_unused=True), wanted, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_sizes_may_be_symbolic() -> None:
    spelling = Spelling(projection="chunk")
    x, *weights = spelling.inputs(0)
    result = rewritten(spelling.build(), x, *weights, dynamic=True, lock=LOCK)
    torch.testing.assert_close(result.double(), spelling.reference(x, *weights), rtol=1e-4, atol=1e-4)


PROJECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by hand": lambda x, weight: (x[:, None] * weight).sum(-1),
    "by hand, the weight first": lambda x, weight: (weight.T * x[..., None]).sum(1),
    "multi_dot": lambda x, weight: torch.linalg.multi_dot([x, weight.T]),
    "of what is computed": lambda x, weight: (x[:, None] * torch.sin(x[:, :1, None])).sum(-1).expand(-1, len(weight)),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_by_other_calls_are_projections(name: str) -> None:
    def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(PROJECTIONS[name](x, gate)) * (x @ up.T)

    inputs = torch.randn(5, 8), torch.randn(12, 8), torch.randn(12, 8)
    result, backend = _run(gated, *inputs)
    assert [match.rewritten for match in backend.report.matches] == [True] * (name != "of what is computed")
    torch.testing.assert_close(result, gated(*inputs))


def test_symbolic_sizes_among_the_terms_of_indices_are_no_weights() -> None:
    def biased(x: Tensor, up: Tensor, gate: Tensor, table: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0])
        return F.silu(x @ gate) * (x @ up) + F.relu(F.embedding(positions + x.shape[0], table))

    inputs = torch.randn(5, 8), torch.randn(8, 12), torch.randn(8, 12), torch.randn(30, 12)
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    found = torch.compile(biased, backend=backend, fullgraph=True, dynamic=True)(*inputs)
    assert not backend.report.events
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(found, biased(*inputs))


def test_equal_layers_are_read_once() -> None:
    spelling = Spelling()
    x, *weights = spelling.inputs(0)
    back = torch.randn(20, 24) * 0.2

    def layers(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + spelling.build()(x, *weights) @ back
        return x

    result, backend = _run(layers, x)
    assert [match.rewritten for match in backend.report.matches] == [True] * 3, backend.why_not()
    torch.testing.assert_close(result, layers(x), rtol=1e-4, atol=1e-4)


def test_a_projection_may_be_overwritten_by_its_activation() -> None:
    x, gate, up = _projections()
    packed = torch.randn(40, 24)

    def halves(x: Tensor) -> Tensor:
        first, second = F.linear(x, packed).chunk(2, -1)
        return F.silu(first, inplace=True).mul_(second)

    for block in (halves, lambda x: F.relu_(gate(x)), lambda x: F.silu(gate(x), inplace=True) * up(x)):
        torch.testing.assert_close(rewritten(block, x, lock=LOCK), block(x), rtol=1e-5, atol=1e-5)


def test_a_projection_that_is_overwritten_and_read_again_is_kept() -> None:
    x, gate, up = _projections()

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        row = gate(x)
        return F.silu(row, inplace=True) * up(x), row.sum()

    result, backend = _run(block, x)
    assert not backend.report.matches
    assert [miss.reason.code for miss in backend.report.near_misses] == ["INTERIOR_USED"]
    for mine, theirs in zip(result, block(x), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_halves_along_another_dimension_are_a_gated_linear_unit() -> None:
    x, weight = torch.randn(3, 24, 11), torch.randn(40, 24, 1) * 0.2

    def block(x: Tensor) -> Tensor:
        return F.glu(F.conv1d(x, weight), dim=1)

    torch.testing.assert_close(rewritten(block, x, lock=LOCK), block(x), rtol=1e-5, atol=1e-5)


def test_experts_with_a_bias_of_their_own_are_recognised() -> None:
    x, weight, bias = torch.randn(3, 7, 24), torch.randn(3, 24, 40) * 0.2, torch.randn(3, 40)

    def experts(x: Tensor) -> Tensor:
        both = torch.bmm(x, weight) + bias[:, None, :]
        gate, up = both[..., ::2].clamp(max=1.25), both[..., 1::2].clamp(-1.25, 1.25)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

    result, backend = _run(experts, x)
    (found,) = backend.report.matches
    assert found.rewritten, backend.why_not()
    assert (found.attributes["activation"], found.attributes["limit"], found.attributes["up_offset"]) == ("quick_gelu", 1.25, 1.0)  # fmt: skip
    torch.testing.assert_close(result, experts(x), rtol=1e-5, atol=1e-5)


def test_the_source_may_round_once_and_the_kernel_does_as_well() -> None:
    spelling = Spelling(activation="sigmoid", projection="glu", dtype=torch.bfloat16)
    _, backend = _run(spelling.build(), *spelling.inputs(0))
    assert backend.report.matches[0].attributes["compute_dtype"] == "torch.float32"


# ---- refusals --------------------------------------------------------------------------------------------------------


def _projections() -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    x, *weights = torch.randn(5, 7, 24), torch.randn(20, 24), torch.randn(20, 24)
    return x, lambda x: F.linear(x, weights[0]), lambda x: F.linear(x, weights[1])


@pytest.mark.parametrize(
    "activation",
    [
        *(
            F.leaky_relu,
            partial(F.celu, alpha=0.5),
            F.selu,
            nn.Softsign(),
            lambda x: x.sin() ** 2 + x,
            torch.special.i0,
        ),
        *(F.hardshrink, partial(F.softshrink, lambd=0.1), partial(torch.logit, eps=0.1), torch.round, torch.sign),
        *(
            lambda x: x.fmod(1.5),
            lambda x: x.remainder(0.7),
            lambda x: x.copysign(2.0),
            lambda x: torch.polygamma(1, x),
        ),
        *(lambda x: torch.atan2(x, x.square() + 1), lambda x: torch.copysign(x.abs().sqrt(), x)),
        *(lambda x: torch.fmax(x, torch.zeros_like(x)), lambda x: F.prelu(x, torch.full((1,), 0.2))),
    ],
)
def test_an_unknown_activation_between_two_projections_is_a_near_miss(activation: Callable[[Tensor], Tensor]) -> None:
    x, gate, up = _projections()
    _, backend = _run(lambda x: activation(gate(x)) * up(x), x)
    assert not backend.report.matches
    (miss,) = backend.report.near_misses
    assert str(miss.reason) == "[NO_MLP] the activation is none that is known"
    _, backend = _run(lambda x, bias: activation(gate(x) + bias) * (up(x) + bias), x, torch.randn(20))
    assert [miss.reason.code for miss in backend.report.near_misses] == ["NO_MLP"]


@pytest.mark.parametrize("bend", [torch.tanh, lambda x: x.clamp(-7, 7), F.gelu])
def test_an_activation_beside_a_projection_that_bends_too_is_a_near_miss(bend: Callable[[Tensor], Tensor]) -> None:
    x, gate, up = _projections()
    for function in (lambda x: F.silu(gate(x)) * bend(up(x)), lambda x: bend(up(x)) * F.silu(gate(x))):
        _, backend = _run(function, x)
        assert [miss.reason.code for miss in backend.report.near_misses] == ["NO_MLP"], backend.why_not()


def test_the_cell_of_a_recurrence_is_no_near_miss() -> None:
    x, gate, up = _projections()
    _, backend = _run(lambda x: torch.sigmoid(gate(x)) * torch.tanh(up(x)), x)
    assert not backend.report.near_misses
    assert not backend.report.events


@pytest.mark.parametrize("function", [F.softshrink, F.hardshrink, lambda x, at: torch.logit(x, at / 2)])
def test_functions_with_other_parameters_are_others(function: Callable[[Tensor, float], Tensor]) -> None:
    def gated(x: Tensor) -> Tensor:
        row, other = gate(x), up(x)
        return F.silu(row) * other + function(row, 0.1) * other - function(row, 0.9) * other

    x, gate, up = _projections()
    result, backend = _run(gated, x)
    torch.testing.assert_close(result, gated(x), equal_nan=True)
    assert any(match.rewritten for match in backend.report.matches), backend.why_not()


def test_a_gate_that_hides_nan_is_no_relu_and_that_is_told() -> None:
    x, gate, up = _projections()
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    torch.compile(lambda x: torch.where(gate(x) > 0, gate(x), 0.0) * up(x), backend=backend, fullgraph=True)(x)
    assert [match.rewritten for match in backend.report.matches] == [False]
    assert "which hides what is NaN in an operand" in backend.why_not()


#: Of projections that are zero, or negative: what is left of them is a number that is added, or the least that is let through.
BESIDE_ZERO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bound": lambda gate, up: gate.clamp(min=1e-6),
    "added to a gate": lambda gate, up: F.relu(up + 1e-8),
    "added to a product": lambda gate, up: torch.tanh(gate + 1) * (up + 1) + 1e-7,
    "added to a factor": lambda gate, up: torch.sigmoid(gate) * (up + 1e-12),
}


@pytest.mark.parametrize("name", BESIDE_ZERO)
def test_numbers_that_keep_logarithms_finite_stay(name: str) -> None:
    weight = torch.full((6, 4), -0.25)

    def function(x: Tensor) -> Tensor:
        gate, up = F.linear(x, weight), F.linear(x - 1, weight)
        return BESIDE_ZERO[name](gate, up).log()

    x = torch.ones(3, 4)
    got, _ = _run(function, x)
    assert function(x).isfinite().all()
    torch.testing.assert_close(got, function(x))


def test_exponents_may_be_held_to_where_they_overflow() -> None:
    x, gate, up = _projections()

    def function(x: Tensor) -> Tensor:
        row = gate(x)
        return row / (1 + torch.exp((-row).clamp(max=88.0))) * up(x)

    got, backend = _run(function, x)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(got, function(x))


def test_an_activation_is_read_around_a_mode_that_is_left_and_refused_where_it_changes_inside() -> None:
    x, gate, up = _projections()

    def around(x: Tensor) -> tuple[Tensor, Tensor]:
        active = F.silu(gate(x))
        with torch.no_grad():  # behind it, the graph says that gradients are on, as they were before
            mean = x.mean()
        return active * up(x), mean

    def inside(x: Tensor) -> Tensor:
        row = gate(x)
        with torch.no_grad():
            sigmoid = torch.sigmoid(row)
        return row * sigmoid * up(x)

    _, backend = _run(around, x)
    assert [match.op for match in backend.report.matches] == ["mlp"], backend.why_not()
    _, backend = _run(inside, x)
    assert [miss.reason.code for miss in backend.report.near_misses] == ["MODE_CHANGES_INSIDE"]


def test_an_activation_that_is_used_twice_is_a_near_miss() -> None:
    x, gate, up = _projections()

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        row = gate(x)
        sigmoid = torch.sigmoid(row)
        return row * sigmoid, sigmoid

    def gated(x: Tensor) -> tuple[Tensor, Tensor]:
        row = gate(x)
        sigmoid = torch.sigmoid(row)
        return row * sigmoid * up(x), sigmoid

    _, backend = _run(gated, x)
    assert [miss.reason.code for miss in backend.report.near_misses] == ["INTERIOR_USED"]
    assert not backend.report.matches
    _, backend = _run(plain, x)
    assert not backend.report.matches
    assert not backend.report.near_misses


@pytest.mark.parametrize(
    "block",
    [
        lambda x, gate, up: torch.sigmoid(gate(x)),
        lambda x, gate, up: torch.sigmoid(gate(x)[..., :1]) * up(x),
        lambda x, gate, up: torch.sigmoid(gate(x)) * torch.tanh(up(x)),
        lambda x, gate, up: gate(x) * up(x),
        lambda x, gate, up: F.silu(x),
        lambda x, gate, up: F.softmax(gate(x), -1) * up(x),
        lambda x, gate, up: F.silu(gate(x)) * F.normalize(up(x), dim=-1),
        lambda x, gate, up: torch.tanh(gate(x) @ up(x).mT / 30) * 30,
    ],
    ids=[
        "router",
        "one_number",
        "two_activations",
        "bilinear",
        "no_projection",
        "softmax",
        "gate_of_a_norm",
        "soft_cap",
    ],
)
def test_what_is_no_mlp_is_left_alone(block: Callable[..., Tensor]) -> None:
    x, gate, up = _projections()
    _, backend = _run(lambda x: block(x, gate, up), x)
    assert not [match for match in backend.report.matches if match.op == "mlp"]
    assert not [miss for miss in backend.report.near_misses if miss.op == "mlp"], backend.why_not()


def test_what_a_kernel_emitted_is_not_read_again() -> None:
    spelling = Spelling(spelled="sigmoid")
    _, backend = _run(spelling.build(), *spelling.inputs(0))
    graph = backend.graphs[0].graph
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    assert list(matches(graph, Effects(graph))) == []


# ---- op and kernel ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", op.VARIANT_ATTRIBUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_kernel_agrees_with_the_reference(variant: str, dtype: torch.dtype) -> None:
    sizes = {"num_rows": 5, "intermediate_size": 12}
    sample = op.sample(sizes, dtype, torch.device("cpu"), variant=variant)
    operands = dict(zip(("gate", "up"), sample.inputs, strict=False))
    for attrs in (
        sample.attrs,
        replace(sample.attrs, limit=0.5, up_offset=1.0, activation="quick_gelu"),
        replace(sample.attrs, out_dtype=torch.float64),
    ):
        exact = op.reference(op.Operands(**{name: each.double() for name, each in operands.items()}), replace(attrs, out_dtype=torch.float64))  # fmt: skip
        slack = TOLERANCES[dtype]
        result = torch_mlp.mlp(op.Operands(**operands), attrs)
        assert result.dtype == attrs.out_dtype
        torch.testing.assert_close(result.double(), exact, rtol=slack, atol=slack)
    slack = TOLERANCES[dtype]
    torch.testing.assert_close(sample.with_kernel(torch_mlp.mlp)(*sample.inputs), sample.as_written()(*sample.inputs), rtol=slack, atol=slack)  # fmt: skip


def test_features_say_what_a_kernel_must_support() -> None:
    attrs = op.MlpAttrs("gelu", has_gate_bias=True, limit=7.0, up_offset=1.0, out_dtype=torch.float32)
    facts = op.MlpFacts(8, 64, torch.bfloat16, "cpu", needs_grad=True)
    needed = op.features(attrs, facts)
    assert needed.keys() == {"gelu", "bias", "limit", "up_offset", "wide_result", "training"}
    assert op.features(op.MlpAttrs(is_gated=False), replace(facts, dtype=torch.float32, needs_grad=False)).keys() == {
        "silu",
        "plain",
    }
    assert set(needed) <= {*op.features(attrs, facts), *op.ACTIVATIONS}
    assert "torch.mlp" in kernels("mlp")
    assert attrs.to_dict()["limit"] == 7.0
    assert math.isclose(attrs.up_offset, 1.0)


# ---- models ----------------------------------------------------------------------------------------------------------

#: Families with gated MLPs, and how many of them one forward pass runs.
GATED = {"llama": 2, "phi3": 2, "mixtral": 2, "gpt_oss": 2, "modernbert": 2, "umt5": 4}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
def test_every_gated_mlp_of_a_model_is_rewritten(name: str) -> None:
    model, inputs = zoo.family(name).build("eager")
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    with torch.no_grad():
        wanted = zoo.tensors(model(**inputs))
        result = zoo.tensors(torch.compile(model, backend=backend)(**inputs))
    found = [match for match in backend.report.matches if match.op == "mlp" and match.attributes["is_gated"]]
    assert len(found) == GATED[name], backend.why_not()
    assert all(match.rewritten for match in found), backend.why_not()
    for mine, theirs in zip(result, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_module_in_training_is_rewritten_with_its_gradients() -> None:
    gate, up, down = (nn.Linear(*sizes, bias=False) for sizes in ((24, 20), (24, 20), (20, 24)))
    x = torch.randn(5, 7, 24)

    def block(x: Tensor) -> Tensor:
        return down(F.dropout(F.silu(gate(x)) * up(x), 0.1, training=True))

    result, backend = _run(block, x)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    result.sum().backward()
    assert gate.weight.grad is not None
    assert up.weight.grad is not None


CORNERS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "clamp": lambda x: x.clamp(min=0),
    "maximum": lambda x: torch.maximum(x, torch.zeros(())),
    "where": lambda x: torch.where(x >= 0, x, 0.0),
    "absolute": lambda x: (x + x.abs()) / 2,
}


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", CORNERS)
def test_at_a_corner_gradients_stay_those_of_the_source(name: str, is_gated: bool) -> None:
    """A layer of zeros learns, or does not, as its source has it."""

    def layer(x: Tensor, weight: Tensor, up: Tensor) -> Tensor:
        gate = CORNERS[name](x @ weight)
        return gate * (x @ up) if is_gated else gate

    x, weight, up = torch.randn(3, 8), torch.zeros(8, 8, requires_grad=True), torch.randn(8, 8)
    backend = Rewriting(lock={"mlp": "torch.mlp"})
    got = torch.compile(layer, backend=backend, fullgraph=True)(x, weight, up)
    ours, theirs = (torch.autograd.grad(each.sum(), weight)[0] for each in (got, layer(x, weight, up)))
    torch.testing.assert_close(ours, theirs)
    (match,) = backend.report.matches
    assert match.rewritten == (not theirs.any()), "PyTorch 2.14's clamp has relu's gradient"
    assert match.rewritten or name != "relu"


def test_zeros_for_nan_and_limits_far_away_stay() -> None:
    def without_nan(x: Tensor, weight: Tensor) -> Tensor:
        scores = x @ weight
        return torch.where(scores > 0, scores, torch.zeros_like(scores))

    def limited(x: Tensor, weight: Tensor) -> Tensor:
        return F.relu(x @ weight).clamp(max=1e5)

    x, weight = 1e6 * torch.randn(5, 8), torch.randn(8, 8)
    poisoned = x.clone()
    poisoned[0, 0] = torch.nan
    for function, rows in ((without_nan, poisoned), (limited, x)):
        torch._dynamo.reset()
        backend = Rewriting(lock={"mlp": "torch.mlp"})
        got = torch.compile(function, backend=backend, fullgraph=True)(rows, weight)
        assert backend.report.matches
        torch.testing.assert_close(got, function(rows, weight))


@pytest.mark.parametrize(
    "gate",
    [
        lambda x: torch.sigmoid(x) * x.clamp(max=1e8),
        lambda x: torch.sigmoid(x) * x.clamp(-1e17, 1e17),
        lambda x: torch.where(x.abs() < 1e-5, 0, F.silu(x)),
    ],
)
def test_numbers_far_away_and_next_to_zero_are_looked_at(gate: Callable[[Tensor], Tensor]) -> None:
    """A limit that only the largest numbers reach, and a dead zone: its gradient at zero is none."""
    x = torch.tensor([[1e9], [3e17], [0.0]], requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return gate(x @ torch.ones(1, 2)) * F.linear(x, torch.ones(2, 1), torch.ones(2))

    torch._dynamo.reset()
    backend = Rewriting(lock={"mlp": "torch.mlp"})
    results = [each(x) for each in (torch.compile(function, backend=backend, fullgraph=True), function)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in results))


class Adapted(nn.Module):
    """A projection with low-rank adapters beside it, each with a scale of its own."""

    def __init__(self, width: int, hidden: int, scales: list[float]) -> None:
        super().__init__()
        self.base, self.scales = nn.Linear(width, hidden), scales
        self.down = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in scales)
        self.up = nn.ModuleList(nn.Linear(2, hidden, bias=False) for _ in scales)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for down, up, scale in zip(self.down, self.up, self.scales, strict=True):
            result = result + up(down(x)) * scale if scale > 0 else result - up(down(x)) * -scale
        return result


@pytest.mark.parametrize("scales", [[2.0], [0.5, -3.0]])
def test_a_gate_of_projections_with_adapters_is_one_of_projections(scales: list[float]) -> None:
    torch.manual_seed(0)
    gate, up = Adapted(16, 24, scales).double(), Adapted(16, 24, scales).double()
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    result, backend = _run(lambda x: F.silu(gate(x)) * up(x), x)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    assert backend.report.matches[0].attributes["activation"] == "silu"
    expected = F.silu(gate(x)) * up(x)
    weights = [x, *gate.parameters(), *up.parameters()]
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
    for got, wanted in zip(
        *(torch.autograd.grad(each.square().sum(), weights) for each in (result, expected)), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


#: How rows are computed by parts of their weight: the parts of an input times those of a weight are summed.
BY_PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cat": lambda x, w: torch.cat([F.linear(x, each) for each in w.split(12)], -1),
    "cat with a bias": lambda x, w: torch.cat([F.linear(x, each) + w[:12, 0] for each in w.split(12)], -1),
    "cat of heads": lambda x, w: torch.cat([F.linear(x, each).unflatten(-1, (3, 4)) for each in w.split(12)], -2),
    "stack": lambda x, w: torch.stack([F.linear(x, each) for each in w.split(12)], -2),
    "sum": lambda x, w: sum(F.linear(a, b) for a, b in zip(x.split(4, -1), w.split(4, 1), strict=True)),
    "sum from zeros": lambda x, w: (
        torch.zeros(3, 24, dtype=x.dtype) + F.linear(x[:, :4], w[:, :4]) + F.linear(x[:, 4:], w[:, 4:])
    ),
    "sum of a stack": lambda x, w: torch.stack([F.linear(x[:, at::2], w[:, at::2]) for at in range(2)]).sum(0),
}


@pytest.mark.parametrize("parts", BY_PARTS)
def test_a_gate_is_computed_by_parts_of_its_weight(parts: str) -> None:
    """As in models that are cut for several devices."""
    gate, up = (torch.randn(24, 8, dtype=torch.float64) for _ in range(2))

    def mlp(x: Tensor) -> Tensor:
        return F.silu(BY_PARTS[parts](x, gate)) * BY_PARTS[parts](x, up)

    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    result, backend = _run(mlp, x)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    pairs = [(each, *torch.autograd.grad(each.square().sum(), x)) for each in (result, mlp(x))]
    torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-9)


def test_a_row_is_also_read_in_the_view_in_which_it_is_activated() -> None:
    """As in RecurrentGemma, whose gates are made of the row that they gate."""
    weight, mix = torch.randn(6, 5, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)

    def gated(x: Tensor) -> tuple[Tensor, Tensor]:
        row = F.linear(x, weight).transpose(1, 2)
        return torch.sigmoid(row @ mix) * row, row.flatten(1)

    x = torch.randn(2, 8, 5, dtype=torch.float64)
    result, backend = _run(gated, x)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(result, gated(x), rtol=1e-9, atol=1e-9)


def test_residuals_beside_projections_are_no_row_of_an_activation() -> None:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)

    def model(x: Tensor) -> Tensor:
        residual = x + first(x)
        return F.relu(residual + second(residual))

    result, backend = _run(model, x := torch.randn(3, 16))
    assert not backend.report.matches
    torch.testing.assert_close(result, model(x))


def test_sums_of_many_projections_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum asks for its summands: what they are made of was read twice as often with each."""
    graph = torch.fx.Graph()
    x, weight = (graph.placeholder(name) for name in ("x", "weight"))
    node = graph.call_function(F.linear, (x, weight))
    for _ in range(14):
        node = graph.call_function(torch.add, (node, graph.call_function(F.linear, (x, weight))))
    graph.output(node)
    asked, is_weight = [], projections._is_weight
    monkeypatch.setattr(projections, "_is_weight", lambda *given: asked.append(given) or is_weight(*given))
    projections.projection(Effects(graph), node)
    assert len(asked) < 50


def test_the_columns_of_a_row_are_those_that_its_bias_has() -> None:
    """The weight comes first, so that features are in the second dimension; the result may be turned, or may not."""
    gate, up, first, second = torch.randn(20, 8), torch.randn(20, 8), torch.randn(20), torch.randn(20)

    def turned(x: Tensor) -> Tensor:
        return F.gelu((gate @ x.mT).mT + first) * ((up @ x.mT).mT + second)

    def left(x: Tensor) -> Tensor:
        return F.silu(gate @ x.mT + first[:, None])

    x = torch.randn(3, 5, 8)
    for function in (turned, left):
        result, backend = _run(function, x)
        assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
        torch.testing.assert_close(result, function(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shapes", [((20,), (5, 1)), ((3, 5, 20), (3, 5, 20))])
def test_biases_of_other_columns_or_of_every_element_are_told(shapes: tuple[tuple[int, ...], ...]) -> None:
    x, gate, up = _projections()
    first, second = (torch.randn(shape) for shape in shapes)
    _, backend = _run(lambda x: F.silu(gate(x) + first) * (up(x) + second), x[:3, :5])
    assert [miss.reason.code for miss in backend.report.near_misses] == ["BIAS_NOT_A_ROW"], backend.why_not()


#: How gate and other row are cut out of one.
MOVES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "index_select": lambda x: (x.index_select(-1, torch.arange(12)), x.index_select(-1, torch.arange(12, 24))),
    "gather": lambda x: tuple(x.gather(-1, at.expand(3, 12)) for at in torch.arange(24).chunk(2)),  # type: ignore[dict-item]
    "roll": lambda x: (x[:, :12], x.roll(12, -1)[:, :12]),
    "flip": lambda x: x.unflatten(-1, (2, 12)).flip(1).unbind(1),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("moves", MOVES)
def test_rows_may_be_cut_out_by_whatever_moves_elements(moves: str) -> None:
    weight = torch.randn(24, 8)

    def gated(x: Tensor) -> Tensor:
        gate, up = MOVES[moves](F.linear(x, weight))
        return F.silu(gate) * up

    x = torch.randn(3, 8)
    result, backend = _run(gated, x)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(result, gated(x), rtol=1e-5, atol=1e-5)


def test_scores_of_given_queries_and_keys_are_no_projections() -> None:
    q, k, v = torch.randn(3, 2, 3, 5, 8)
    _, backend = _run(lambda q, k, v: F.relu(q @ k.mT) @ v, q, k, v)
    assert not backend.report.matches
    assert [miss.reason.code for miss in backend.report.near_misses] == ["NO_SOFTMAX"], backend.why_not()
