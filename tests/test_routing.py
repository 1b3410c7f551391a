"""Routed adapters in user code: every spelling is read, what only looks like one is not, and the rewrite is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from canonical import without_places
from hypothesis import HealthCheck, Phase, given, settings
from tiers import examples
from torch import Tensor, nn

import lz_compile
from lz_compile.passes.editing.dead import drop_dead
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.routing.matching import matches
from models.routed_adapter import Arm, Rollouts, RoutedLinear
from tests.backends import Rewriting
from tests.graphs import capture, effects_of
from tests.routing_spellings import (
    GROUPS,
    MASKS,
    RANK,
    THRESHOLDS,
    TOKENS,
    TOLERANCES,
    WIDE,
    Spelling,
    allows,
    spellings,
)

LOCK = {"routing": "torch.routing"}

many = settings(
    max_examples=examples(8, 30),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def run(function: Callable[..., Any], inputs: Mapping[str, Tensor], **options: Any) -> tuple[Any, Rewriting]:
    """What a function gives when it is rewritten, and what the rewriting says of it."""
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    return torch.compile(function, backend=backend, fullgraph=True, **options)(**inputs), backend


def check(spelling: Spelling, **options: Any) -> Rewriting:
    """A spelling is rewritten, and its value and all of its gradients are those of the mathematics."""
    inputs = spelling.inputs(0)
    result, backend = run(spelling.build(), inputs, **options)
    matches = [match for match in backend.report.matches if match.op == "routing"]
    assert [match.rewritten for match in matches] == [True], f"{spelling}\n{backend.why_not()}"
    wanted = spelling.attributes()
    assert {name: matches[0].attributes[name] for name in wanted} == wanted
    slack = TOLERANCES[spelling.dtype]
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(spelling.dtype)
    value, gradients = spelling.reference(inputs, upstream)
    torch.testing.assert_close(result.double(), value, rtol=slack, atol=slack)
    found = torch.autograd.grad(result, [inputs[name] for name in gradients], upstream)
    for (name, expected), mine in zip(gradients.items(), found, strict=True):
        torch.testing.assert_close(
            mine.double(), expected, rtol=slack, atol=slack * 4, msg=f"the gradient of {name} of {spelling}"
        )
    return backend


@pytest.mark.parametrize("name", [each.name for each in fields(Spelling)])
def test_every_choice_is_recognised(name: str) -> None:
    plain = Spelling()
    options = next(each for each in fields(Spelling) if each.name == name).metadata["options"]
    tried = [replace(plain, **{name: option}) for option in options]
    if name == "mask":
        tried = [replace(plain, mask=mask) for mask in ("cosine", "clamped", "threshold_distance")]
        options = tuple(each.mask for each in tried)
    if name == "stopped":
        tried = [replace(each, mask="cosine") for each in tried]
    tried = [each for each in tried if allows(each)]
    assert len(tried) == len(options)
    for spelling in tried:
        if spelling != plain or name == "dtype":  # the plain one is the first option of every choice
            check(spelling)


@pytest.mark.parametrize("mask", [*MASKS, *(f"threshold_{name}" for name in THRESHOLDS)])
def test_every_mask_is_read_as_the_cosine_that_it_is(mask: str) -> None:
    spelling = Spelling(mask=mask)
    module = capture(spelling.build(), *spelling.inputs(0).values())
    drop_dead(module.graph)  # as is done before anything is recognised
    (match,) = matches(module.graph, effects_of(module))
    assert isinstance(match, Match), match
    assert match.found.attributes.to_dict()["arm"] == "act"
    assert match.found.attributes.to_dict()["threshold"] == spelling.threshold


@many
@given(spelling=spellings())
def test_any_spelling_is_recognised_and_right(spelling: Spelling) -> None:
    check(spelling)


# ---- what only looks like one ----------------------------------------------------------------------------------------

#: What is done with the kept adapter: a function of it, of ``a``, ``v``, ``delta``, ``u`` and another tensor of tokens.
Stop = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def layer(stop: Stop) -> Callable[..., Tensor]:
    """A plain layer of which ``stop`` stops some gradients."""

    def run_layer(
        x: Tensor, weight: Tensor, bias: Tensor, vh: Tensor, u: Tensor, delta: Tensor, **rest: Tensor
    ) -> Tensor:
        a = F.linear(x, vh)
        kept = stop(F.linear(a * delta, u), a, rest["v"], delta, u, rest["more"])
        return F.linear(x, weight, bias) + kept + F.linear(F.linear(x, rest["a_q"]), rest["b_q"])

    return run_layer


def _stopped(mask: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Stop:
    return lambda kept, a, v, delta, u, more: torch.where(mask(a, v, more)[..., None], kept.detach(), kept)


REFUSED: Mapping[str, tuple[Stop, str]] = {
    "value_changes": (
        lambda kept, a, v, delta, u, more: torch.where((a @ v > 0)[..., None], 2 * kept, kept),
        "[VALUE_MASKED] the mask changes the value of the kept adapter",
    ),
    "not_strict": (
        _stopped(lambda a, v, more: a @ v >= 0),
        "[MASK_NOT_STRICT] the mask ge holds for a cosine that is the threshold itself, too: of tokens that are zero",
    ),
    "mask_of_labels": (
        _stopped(lambda a, v, more: more[..., 0] > 0),
        "[MASK_GENERAL] the mask gt of the kept adapter is no comparison of the layer's own a = Vh x",
    ),
    "threshold_of_labels": (
        _stopped(lambda a, v, more: F.cosine_similarity(a, v, dim=-1) > more[..., 0]),
        "[MASK_GENERAL] the mask gt of the kept adapter reads getitem, which is no direction along the rank",
    ),
    "another_function": (
        _stopped(lambda a, v, more: (a * v).sum(-1) + a.square().sum(-1) > 0),
        "[MASK_GENERAL] the mask gt of the kept adapter is no cosine that is compared with a threshold",
    ),
    "another_sum": (
        _stopped(lambda a, v, more: a.sum(-1) > 0),
        "[MASK_GENERAL] the mask gt of the kept adapter sums something else than products of a and v",
    ),
    "of_rollouts": (
        _stopped(lambda a, v, more: a.mean(1, keepdim=True) @ v > 0),
        "[MASK_GENERAL] the mask gt is none of tokens",
    ),
    "two_masks": (
        lambda kept, a, v, delta, u, more: torch.where(
            (a @ v > 0)[..., None], kept.detach(), torch.where(more[..., :1] > 0, kept.detach(), kept)
        ),
        "[MASK_GENERAL] the kept adapter is chosen by several masks",
    ),
    "not_normalised": (
        _stopped(lambda a, v, more: a @ v > 0.3),
        "[COSINE_NOT_NORMALISED] the mask gt depends on the lengths of a and v (1 and 0.2), not on their cosine alone",
    ),
    "another_floor": (
        _stopped(lambda a, v, more: F.cosine_similarity(a, v, dim=-1) > 0.3),
        "[COSINE_FLOOR] the mask gt treats a of length 1e-07 otherwise than a cosine with norms of at least 1e-06",
    ),
    "held_from_above": (
        _stopped(lambda a, v, more: (a @ v) / (a.norm(dim=-1).clamp(1e-6, 1e4) * v.norm().clamp_min(1e-6)) > 0.3),
        "[COSINE_NOT_NORMALISED] the mask gt depends on the lengths of a and v (1e+18 and 1), not on their cosine alone",
    ),
    "product_held_from_below": (
        _stopped(
            lambda a, v, more: (
                (a @ v).clamp_min(-1e4) / (a.norm(dim=-1).clamp_min(1e-6) * v.norm().clamp_min(1e-6)) > -0.3
            )
        ),
        "[COSINE_NOT_NORMALISED] the mask gt depends on the lengths of a and v (1e+18 and 1), not on their cosine alone",
    ),
    "half_a_gradient": (
        lambda kept, a, v, delta, u, more: 0.5 * kept.detach() + 0.5 * kept,
        "[GRADIENT_SCALED] the kept adapter is 1 times its tensors, its gradient 0.5 times",
    ),
    "one_factor_detached": (
        lambda kept, a, v, delta, u, more: F.linear(
            torch.where((a @ v > 0)[..., None], a * delta.detach(), a * delta), u
        ),
        "[PARTLY_DETACHED] some tensors of the kept adapter are detached for some tokens, others are not",
    ),
    "always_detached": (
        lambda kept, a, v, delta, u, more: kept.detach(),
        "[INPUT_DETACHED] one of the adapters reads a detached input, the other does not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_are_no_cosine_above_a_threshold_are_refused_with_the_reason(name: str) -> None:
    stop, text = REFUSED[name]
    _, backend = run(layer(stop), Spelling().inputs(0))
    assert [without_places(str(miss.reason)) for miss in backend.report.near_misses if miss.op == "routing"] == [text]
    assert not [match for match in backend.report.matches if match.op == "routing"]


def test_a_cosine_that_is_held_to_its_range_is_one() -> None:
    def mask(a: Tensor, v: Tensor, more: Tensor) -> Tensor:
        return ((a @ v) / (a.norm(dim=-1).clamp_min(1e-6) * v.norm().clamp_min(1e-6))).clamp(-1.0, 1.0) > 0.3

    _, backend = run(layer(_stopped(mask)), Spelling().inputs(0))
    (match,) = [match for match in backend.report.matches if match.op == "routing"]
    assert (match.attributes["arm"], match.attributes["threshold"]) == ("act", 0.3)


def _others(change: Callable[..., Any], gate: str = "none") -> Rewriting:
    """What is said of a layer that ``change`` computes from ``inputs()``."""
    return run(change, Spelling(gate=gate).inputs(0))[1]


def _said(backend: Rewriting) -> list[str]:
    assert not any(match.op == "routing" for match in backend.report.matches)
    return [str(miss.reason) for miss in backend.report.near_misses if miss.op == "routing"]


def test_inner_values_that_are_wanted_elsewhere_are_refused() -> None:
    def gives_activation(x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, **_: Tensor) -> Any:
        a = F.linear(x, vh)
        return F.linear(a * delta, u) + F.linear(F.linear(x, a_q), b_q), a

    (text,) = _said(_others(gives_activation))
    assert text.startswith("[INTERIOR_USED] a (")
    assert text.endswith(") is also returned")


def test_gates_elsewhere_are_refused() -> None:
    def twice(
        x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, gate: Tensor, **_: Tensor
    ) -> Tensor:
        kept = F.linear(F.linear(x, vh) * gate[:, None] * gate[:, None] * delta, u)
        return kept + F.linear(F.linear(x, a_q), b_q)

    def of_quarantine(
        x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, gate: Tensor, **_: Tensor
    ) -> Tensor:
        row = gate[:, None].mean(-1, keepdim=True)
        return F.linear(F.linear(x, vh) * delta, u) + F.linear(F.linear(x, a_q) * row, b_q)

    assert _said(_others(twice, "row")) == ["[SEVERAL_GATES] the kept adapter is multiplied by several gates"]
    assert _said(_others(of_quarantine, "row")) == ["[QUARANTINE_GATED] the quarantine is gated or masked, too"]


def test_adapters_of_a_dropped_input_are_refused() -> None:
    def dropped(x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, **_: Tensor) -> Tensor:
        return F.linear(F.linear(x, vh) * delta, u) + F.linear(F.linear(F.dropout(x, 0.1), a_q), b_q)

    expected = ["[INPUT_DROPPED] one of the adapters reads the input after dropout, the other does not"]
    assert _said(_others(dropped)) == expected


def test_what_is_no_pair_of_adapters_is_left_alone_without_a_word() -> None:
    def other_input(x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, **_: Tensor) -> Tensor:
        return F.linear(F.linear(x, vh) * delta, u) + F.linear(F.linear(x.sin(), a_q), b_q)

    def scaled_behind(x: Tensor, vh: Tensor, u: Tensor, bias: Tensor, a_q: Tensor, b_q: Tensor, **_: Tensor) -> Tensor:
        return F.linear(F.linear(x, vh), u) * bias + F.linear(F.linear(x, a_q), b_q)

    def scaled_before(
        x: Tensor, vh: Tensor, u: Tensor, weight: Tensor, a_q: Tensor, b_q: Tensor, **_: Tensor
    ) -> Tensor:
        return F.linear(F.linear(x * weight[0], vh), u) + F.linear(F.linear(x, a_q), b_q)

    def bent(x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, **_: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, vh)) * delta, u) + F.linear(F.linear(x, a_q), b_q)

    def kept_alone(x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, weight: Tensor, **_: Tensor) -> Tensor:
        return F.linear(x, weight) + F.linear(F.linear(x, vh) * delta, u)

    for change in (other_input, scaled_behind, scaled_before, bent, kept_alone):
        assert _said(_others(change)) == [], change.__name__


class LoraLinear(nn.Module):
    """A linear layer with one adapter, as PEFT adds it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.second(self.first(x.to(self.first.weight.dtype))) * 2.0
        result: Tensor = self.base(x) + added
        return result


def test_models_with_single_adapters_are_left_alone_without_a_word() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(WIDE), nn.ModuleList(LoraLinear(WIDE, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v, out = self.mix
            h = self.norm(x)
            result: Tensor = x + out(torch.softmax(q(h) @ k(h).mT, -1) @ v(h))
            return result

    model = nn.Sequential(Block(), Block())
    _, backend = run(model, {"input": torch.randn(2, 9, WIDE)})
    assert _said(backend) == []


# ---- gates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rollouts", "flat"])
def test_a_gate_per_token_is_rewritten_as_it_is_and_reported(layout: str) -> None:
    backend = check(Spelling(gate="token", layout=layout))
    (miss,) = backend.report.near_misses
    rows = "3 x 10" if layout == "rollouts" else "30"
    assert str(miss.reason) == (
        f"[GATE_PER_TOKEN] the gate l_gate_ has a row for every token ({rows}): cosines of tokens scatter, about half of the "
        "tokens of a clean rollout are flagged by noise, and half of its gradient is routed wrongly"
    )
    assert (
        miss.edit
        == "a gate per rollout, [G, 1, rank]; or sum its gradient over the tokens of each rollout before the cosine"
    )
    assert [event.code for event in backend.report.events] == ["GATE_PER_TOKEN"]


def test_nothing_is_said_of_other_gates() -> None:
    def computed(
        x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, more: Tensor, **_: Tensor
    ) -> Tensor:
        gate = torch.sigmoid(more[..., :1])
        return F.linear(F.linear(x, vh) * gate * delta, u) + F.linear(F.linear(x, a_q), b_q)

    for backend in (check(Spelling(gate="broadcast")), _others(computed)):
        assert [match.rewritten for match in backend.report.matches] == [True]
        assert not backend.report.near_misses
        assert not backend.report.events
    with torch.no_grad():
        backend = _others(Spelling(gate="token").build(), "token")
    assert [match.rewritten for match in backend.report.matches] == [True]
    assert not backend.report.near_misses


@pytest.mark.parametrize("arm", [Arm.NONE, Arm.ACT, Arm.GRAD_TOKEN, Arm.GRAD_ROLLOUT])
def test_the_layer_of_the_models_gets_the_gradients_that_it_reads(arm: Arm) -> None:
    torch.manual_seed(0)
    routed = RoutedLinear(nn.Linear(WIDE, 20), RANK, 4, arm).double()
    with torch.no_grad():
        for each in (routed.delta_s_R, routed.b_OQ, routed.direction_R):
            each.copy_(torch.randn_like(each))
    x, upstream = torch.randn(GROUPS, TOKENS, WIDE).double(), torch.randn(GROUPS, TOKENS, 20).double()
    found: list[list[Tensor]] = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        backend = Rewriting(lock=LOCK)
        routed.zero_grad()
        routed.open(Rollouts(GROUPS, TOKENS))
        function = torch.compile(routed, backend=backend) if is_compiled else routed
        function(x).backward(upstream)
        gate = [] if routed.gate is None or routed.gate.grad is None else [routed.gate.grad]
        found.append([each.grad.clone() for each in routed.parameters() if each.grad is not None] + gate)
    assert [match.rewritten for match in backend.report.matches if match.op == "routing"] == [True], backend.why_not()
    assert len(found[0]) == len(found[1]) == (3 if arm in (Arm.NONE, Arm.ACT) else 4)
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", ["index", "embedding"])
def test_packed_rollouts_gather_their_gate_which_is_not_warned_of(way: str) -> None:
    numbers = torch.randint(0, GROUPS, (GROUPS * TOKENS,), generator=torch.Generator().manual_seed(2))

    def packed(
        x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, gate: Tensor, **_: Tensor
    ) -> Tensor:
        rows = x.flatten(0, 1)
        spread = gate[numbers] if way == "index" else F.embedding(numbers, gate)
        return F.linear(F.linear(rows, vh) * spread * delta, u) + F.linear(F.linear(rows, a_q), b_q)

    inputs = Spelling(dtype=torch.float64, gate="row").inputs(0)
    result, backend = run(packed, inputs)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    assert not backend.report.near_misses
    leaves = [inputs[name] for name in ("x", "delta", "a_q", "b_q", "gate")]
    found, expected = (
        torch.autograd.grad(each, leaves, torch.linspace(-1, 1, each.numel()).double().view_as(each))
        for each in (result, packed(**inputs))
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_gate_that_is_made_at_the_start_of_a_layer_is_read_afterwards() -> None:
    """Dynamo makes no tensors that want gradients: the graph begins after that line."""
    given = Spelling(gate="row").inputs(0)

    class Layer(nn.Module):
        gate: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.gate = torch.ones(x.shape[0], 1, RANK, requires_grad=True)
            kept = F.linear(F.linear(x, given["vh"]) * self.gate * given["delta"], given["u"])
            return kept + F.linear(F.linear(x, given["a_q"]), given["b_q"])

    torch._dynamo.reset()
    backend, own = Rewriting(lock=LOCK), Layer()
    torch.compile(own, backend=backend)(given["x"]).sum().backward()
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    sent = (
        (torch.ones(GROUPS, TOKENS, 20) @ given["u"])
        * F.linear(given["x"].detach(), given["vh"])
        * given["delta"].detach()
    )
    torch.testing.assert_close(own.gate.grad, sent.sum(1, keepdim=True), rtol=1e-4, atol=1e-4)


# ---- surroundings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choices", [{"gate": "broadcast"}, {"gate": "repeated", "layout": "flattened"}, {"mask": "cosine"}], ids=str
)
def test_sizes_may_be_symbolic(choices: dict[str, Any]) -> None:
    def dynamic(
        x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, gate: Tensor, v: Tensor, **_: Tensor
    ) -> Tensor:
        rows = x.flatten(0, 1) if "layout" in choices else x
        a = F.linear(rows, vh)
        spread = gate.repeat_interleave(x.shape[1], 0) if "layout" in choices else gate[:, None]
        kept = F.linear(a * spread * delta if "gate" in choices else a * delta, u)
        if "mask" in choices:
            kept = torch.where((F.cosine_similarity(a, v, dim=-1) > 0)[..., None], kept.detach(), kept)
        return (kept + F.linear(F.linear(rows, a_q), b_q)).view(*x.shape[:2], -1)

    wanted: dict[str, Any] = {"mask": "cosine"} if "mask" in choices else {"gate": "broadcast"}
    spelling = replace(Spelling(base="none"), **wanted)
    inputs = spelling.inputs(0)
    result, backend = run(dynamic, inputs, dynamic=True)
    assert [match.rewritten for match in backend.report.matches if match.op == "routing"] == [True], backend.why_not()
    upstream = torch.randn_like(result)
    value, gradients = spelling.reference(inputs, upstream)
    torch.testing.assert_close(result.double(), value, rtol=1e-4, atol=1e-4)
    mine = torch.autograd.grad(result, [inputs[name] for name in gradients], upstream)
    for found, expected in zip(mine, gradients.values(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("choices", [{"gate": "broadcast"}, {"mask": "cosine"}], ids=str)
def test_autocast_and_inference(choices: dict[str, Any]) -> None:
    spelling = replace(Spelling(), **choices)
    inputs, function = spelling.inputs(0), spelling.build()
    with torch.no_grad():
        result, backend = run(function, inputs)
    assert [match.rewritten for match in backend.report.matches if match.op == "routing"] == [True], backend.why_not()
    assert backend.report.matches[0].attributes["arm"] == "none"  # nothing is stopped where nothing flows
    torch.testing.assert_close(result, function(**inputs), rtol=1e-4, atol=1e-4)

    def in_half(**given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(**given)

    result, backend = run(in_half, inputs)
    assert [match.rewritten for match in backend.report.matches if match.op == "routing"] == [True], backend.why_not()
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), function(**inputs), rtol=0.1, atol=0.1)


def test_a_mask_may_be_computed_without_gradients() -> None:
    def without(
        x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, v: Tensor, **_: Tensor
    ) -> Tensor:
        a = F.linear(x, vh)
        kept = F.linear(a * delta, u)
        with torch.no_grad():
            mask = F.cosine_similarity(a, v, dim=-1) > 0
        return torch.where(mask[..., None], kept.detach(), kept) + F.linear(F.linear(x, a_q), b_q)

    backend = _others(without)
    assert [
        (match.rewritten, match.attributes["arm"]) for match in backend.report.matches if match.op == "routing"
    ] == [(True, "act")]


class Attention(nn.Module):
    """Attention whose projections are routed, as a library's model has it."""

    def __init__(self, arm: Arm) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.layers = nn.ModuleList(RoutedLinear(nn.Linear(WIDE, WIDE), RANK, 4, arm) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, out = self.layers
        h = self.norm(x)
        heads = [each(h).unflatten(-1, (2, -1)).transpose(1, 2) for each in (query, key, value)]
        mixed: Tensor = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        result: Tensor = x + out(mixed.transpose(1, 2).flatten(2))
        return result


def _trained(model: nn.Module) -> tuple[nn.Module, list[RoutedLinear]]:
    torch.manual_seed(0)
    routed = [each for each in model.modules() if isinstance(each, RoutedLinear)]
    for each in routed:
        for parameter in (each.delta_s_R, each.b_OQ):
            nn.init.normal_(parameter, std=0.3)
        each.open(Rollouts(GROUPS, TOKENS))
    return model, routed


def _gradients(model: nn.Module, routed: list[RoutedLinear], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad()
    for each in routed:
        each.open(Rollouts(GROUPS, TOKENS))
    x = torch.randn(GROUPS, TOKENS, WIDE, generator=torch.Generator().manual_seed(3))
    function(x).square().mean().backward()
    wanted = [*model.parameters(), *(each.gate for each in routed if each.gate is not None)]
    return [each.grad.clone() for each in wanted if each.grad is not None]


def test_every_layer_of_a_model_is_rewritten() -> None:
    model, routed = _trained(nn.Sequential(*(Attention(Arm.GRAD_ROLLOUT) for _ in range(2))))
    expected = _gradients(model, routed, model)
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    found = _gradients(model, routed, torch.compile(model, backend=backend, fullgraph=True))
    matches = [match for match in backend.report.matches if match.op == "routing"]
    assert [match.rewritten for match in matches] == [True] * 8, backend.why_not()
    assert {(match.attributes["gate"], match.attributes["has_weight"]) for match in matches} == {("rollout", True)}
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_it_is_right_when_inductor_compiles_it() -> None:
    """Other arms by Inductor are in test_routing_training.py."""
    layer = RoutedLinear(nn.Linear(WIDE, WIDE), RANK, 4, Arm.GRAD_ROLLOUT)
    model, routed = _trained(nn.Sequential(nn.LayerNorm(WIDE), layer, nn.SiLU()))
    expected = _gradients(model, routed, model)
    torch._dynamo.reset()
    options: Any = {"layerzero.lock": LOCK}
    compiled = torch.compile(model, backend="layerzero", options=options, fullgraph=True)
    found = _gradients(model, routed, compiled)
    matches = [match for report in lz_compile.reports() for match in report.matches if match.op == "routing"]
    assert [match.rewritten for match in matches] == [True], lz_compile.reports()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
