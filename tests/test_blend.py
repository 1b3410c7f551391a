"""Blends: every spelling is read, nothing else is, and the rewrite is right; margins without sorting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from tiers import examples
from torch import Tensor, nn

from lz_compile.lowering.kernels.blend import torch_blend
from lz_compile.lowering.ops import blend as op
from lz_compile.passes.blend.matching import matches
from lz_compile.passes.blend.ranks import TriedRanks
from lz_compile.passes.blend.terms import Sums
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.runtime.kernels.registry import kernels
from tests.backends import Rewriting
from tests.blend_spellings import (
    BOUNDED,
    BOUNDS,
    CONVEX,
    DETACHED,
    DIFFERENT,
    MARGINS,
    MASKED,
    MODES,
    NEARLY,
    RESIDUAL,
    SHAPES,
    SIGMOIDS,
    SLOPES,
    SORTED,
    SPREAD,
    SPREADS,
    Spelling,
    spellings,
)
from tests.graphs import capture, effects_of

LOCK = {"blend": "torch.blend"}
many = settings(
    max_examples=examples(25, 200),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def _run(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    return torch.compile(function, backend=backend, fullgraph=True, **options)(*inputs), backend


def _check(spelling: Spelling) -> None:
    inputs = spelling.inputs()
    function = spelling.build()
    with torch.set_grad_enabled(spelling.is_training):
        result, backend = _run(function, *inputs)
        wanted = function(*inputs)
        exact = function(*(each.detach().double() if each.is_floating_point() else each for each in inputs))
    assert [match.op for match in backend.report.matches] == ["blend"], f"{spelling}\n{backend.why_not()}"
    (found,) = backend.report.matches
    assert found.rewritten, f"{spelling}\n{backend.why_not()}"
    expected = spelling.expected()
    assert {name: found.attributes[name] for name in expected} == expected, spelling
    torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-5)
    assert result.stride() == wanted.stride()
    if spelling.is_training:
        leaves = [each for each in inputs if each.requires_grad]
        pairs = [torch.autograd.grad(each.square().sum(), leaves, allow_unused=True) for each in (result, wanted)]
        for mine, theirs in zip(*pairs, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# ---- spellings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", CONVEX)
def test_every_way_to_weigh_two_tensors_is_recognised(mixed: str) -> None:
    _check(Spelling(mode="channel", mixed=mixed))


@pytest.mark.parametrize("mixed", RESIDUAL)
def test_every_way_to_add_a_weighed_tensor_is_recognised(mixed: str) -> None:
    _check(Spelling(mode="residual", mixed=mixed))


@pytest.mark.parametrize("mixed", MASKED)
def test_every_way_to_weigh_by_a_condition_is_recognised(mixed: str) -> None:
    _check(Spelling(mode="masked", mixed=mixed))


@pytest.mark.parametrize("mixed", BOUNDED)
def test_both_weights_may_be_bounded(mixed: str) -> None:
    _check(Spelling(mode="bounded", mixed=mixed))


def test_both_weights_of_a_gated_blend_may_be_bounded() -> None:
    def function(h: Tensor, s: Tensor, a: Tensor, x: Tensor) -> Tensor:
        top = x.topk(2).values
        weight = (a * torch.sigmoid(4 * (top[:, 0] - top[:, 1])))[:, None]
        return weight.clamp(0, 1) * s + (1 - weight).clamp(0, 1) * h.detach()

    inputs = torch.randn(4, 6), torch.randn(4, 6, requires_grad=True), torch.tensor(1.7), torch.randn(4, 9)
    out, backend = _run(function, *inputs)
    found = [(match.attributes["mode"], match.attributes["has_gate"]) for match in backend.report.matches]
    assert found == [("confidence", True)], backend.why_not()
    torch.testing.assert_close(out, function(*inputs))


@pytest.mark.parametrize("function", [torch.abs, torch.erf])
def test_a_gate_may_be_a_function_of_a_weight(function: Callable[[Tensor], Tensor]) -> None:
    def blended(h: Tensor, s: Tensor, a: Tensor, x: Tensor) -> Tensor:
        top = x.topk(2).values
        weight = function(a * torch.sigmoid(4 * (top[:, 0] - top[:, 1])))[:, None]
        return (1 - weight) * h.detach() + weight * s

    inputs = torch.randn(4, 6), torch.randn(4, 6, requires_grad=True), torch.tensor(-0.3), torch.randn(4, 9)
    out, backend = _run(blended, *inputs)
    assert {match.rewritten for match in backend.report.matches} == {True}, backend.why_not()
    assert not backend.report.events, backend.report.events
    torch.testing.assert_close(out, blended(*inputs))


@pytest.mark.parametrize("host", SPREAD)
def test_a_host_may_be_smaller_than_the_seed(host: str) -> None:
    for mode, mixed in (("channel", "lerp"), ("confidence", "delta")):
        _check(Spelling(mode=mode, mixed=mixed, host=host))


@pytest.mark.parametrize("margin", MARGINS)
def test_every_way_to_find_the_two_largest_is_recognised(margin: str) -> None:
    _check(Spelling(mode="confidence", margin=margin, bounds="clamp"))


@pytest.mark.parametrize("sigmoid", SIGMOIDS)
def test_every_way_to_write_a_gate_is_recognised(sigmoid: str) -> None:
    for slope in SLOPES if sigmoid == "exponential" else ("factored",):
        _check(Spelling(mode="confidence", sigmoid=sigmoid, slope=slope, is_training=False))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_recognised_in_every_shape(mode: str) -> None:
    mixed = {"residual": "sum", "bounded": "each"}.get(mode, "delta")
    for shape in SHAPES[::2] if mode in ("convex", "residual", "logit") else SHAPES[1::2]:
        _check(Spelling(mode=mode, mixed=mixed, shape=shape, is_training=False))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_weights_may_be_bounded_in_any_way(bounds: str) -> None:
    _check(Spelling(mode="confidence", bounds=bounds, is_training=False))


@pytest.mark.parametrize("spread", SPREADS)
def test_weights_may_be_broadcast_in_any_way(spread: str) -> None:
    for mode in ("channel", "soft_gate"):
        _check(Spelling(mode=mode, spread=spread, is_training=False))


@pytest.mark.parametrize("detached", sorted(set(DETACHED) - {"kept"}))
def test_a_host_may_be_detached_in_any_way(detached: str) -> None:
    for mode in ("convex", "residual"):
        _check(Spelling(mode=mode, mixed="sum" if mode == "residual" else "delta", detached=detached, is_sum=True))


@settings(many, max_examples=15)
@given(spelling=spellings())
def test_any_spelling_is_recognised_and_right(spelling: Spelling) -> None:
    _check(spelling)


@pytest.mark.slow
@many
@given(spelling=spellings())
def test_many_spellings_are_recognised_and_right(spelling: Spelling) -> None:
    _check(spelling)


# ---- what is none ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("different", DIFFERENT)
def test_a_sum_that_is_no_blend_is_left_alone(different: str) -> None:
    host, seed = torch.randn(6, 6, 6), torch.randn(6, 6, 6, requires_grad=True)
    module = capture(
        lambda h, s, a, v: DIFFERENT[different](h.detach(), s, a, v), host, seed, torch.tensor(0.3), torch.rand(6)
    )
    assert list(matches(module.graph, effects_of(module))) == []


def test_what_is_drawn_twice_is_two_factors() -> None:
    def drawn(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) + nn.functional.dropout(x, 0.5) + x.tanh() + x.tanh()

    sums = Sums(effects_of(capture(drawn, torch.randn(4))))
    drops, bent = ([node for node in sums.effects.calls if name in node.name] for name in ("dropout", "tanh"))
    assert [sums.first(node) for node in drops] == drops
    assert [sums.first(node) for node in bent] == [bent[0]] * 2


def test_ordinary_networks_hold_no_blends() -> None:
    layer, other = nn.Linear(8, 8), nn.Linear(8, 8)
    scale = nn.Parameter(torch.full((8,), 0.1))

    def gated(h: Tensor, x: Tensor) -> Tensor:
        z = torch.sigmoid(layer(x) + other(h))
        return z * h + (1 - z) * torch.tanh(other(x))

    def layer_scale(h: Tensor, x: Tensor) -> Tensor:
        return h + scale * layer(x)

    def straight_through(h: Tensor, x: Tensor) -> Tensor:
        return layer(x) + (layer(x).round() - layer(x)).detach()

    def dropped_path(h: Tensor, x: Tensor) -> Tensor:
        return h + (torch.rand(4, 1) > 0.2).float() * layer(x) / 0.8

    def averaged(h: Tensor, x: Tensor) -> Tensor:
        return torch.lerp(h, layer(x), 0.01)

    for function in (gated, layer_scale, straight_through, dropped_path, averaged):
        for has_gradients in (True, False):
            with torch.set_grad_enabled(has_gradients):
                module = capture(function, torch.randn(4, 8, requires_grad=True), torch.randn(4, 8))
                assert list(matches(module.graph, effects_of(module))) == [], function.__name__


def test_an_activation_by_cases_is_no_blend() -> None:
    def xielu(x: Tensor, up: Tensor, down: Tensor, scale: Tensor, least: Tensor) -> Tensor:
        low = (torch.expm1(torch.min(x, least)) - x) * (scale + torch.exp(down)) + scale * x
        return torch.where(x > 0, up * x * x + scale * x, low)

    def swish(x: Tensor, up: Tensor, down: Tensor, _scale: Tensor, _least: Tensor) -> Tensor:
        gate = torch.sigmoid(up * x)
        return gate * x + (1 - gate) * torch.tanh(down * x)

    for function in (xielu, swish):
        trained = [torch.tensor(0.3, requires_grad=True) for _ in range(2)]
        numbers = torch.tensor(0.5), torch.tensor(-1e-6)
        module = capture(function, torch.randn(4, 8, requires_grad=True), *trained, *numbers)
        assert list(matches(module.graph, effects_of(module))) == [], function.__name__


def test_a_layer_beside_its_scaled_input_is_no_blend_whose_host_is_not_detached() -> None:
    def scaled_embedding(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        hidden = x * scale
        return torch.tanh(hidden @ w) + hidden

    def scaled_layer(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return x + scale * torch.tanh(x @ w)

    for function in (scaled_embedding, scaled_layer):
        inputs = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), torch.tensor(0.5)
        module = capture(function, *inputs)
        assert list(matches(module.graph, effects_of(module))) == [], function.__name__


def _only_miss(function: Callable[..., Any], *inputs: Any) -> Any:
    module = capture(function, *inputs)
    (miss,) = (found for found in matches(module.graph, effects_of(module)) if isinstance(found, NearMiss))
    return miss


def test_a_host_that_is_not_detached_is_named() -> None:
    host, seed = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    alpha, logits = torch.tensor(0.3), torch.randn(4, 2, requires_grad=True)
    for function in (
        lambda h, s, a, g: a * s + (1 - a) * h,
        lambda h, s, a, g: h + a * s,
        lambda h, s, a, g: g.softmax(-1)[:, :1] * s + g.softmax(-1)[:, 1:] * h,
        lambda h, s, a, g: Spelling(mode="confidence", detached="kept").blend(h, s, a, s),
    ):
        miss = _only_miss(function, host, seed, alpha, logits)
        assert miss.reason.code == "HOST_NOT_DETACHED"
        assert "gradients flow to the host" in miss.reason.message
        assert miss.edit.endswith(".detach()")


@pytest.mark.parametrize("nearly", NEARLY)
def test_weights_that_do_not_always_add_up_to_one_are_named(nearly: str) -> None:
    function, code = NEARLY[nearly]
    host, seed = torch.randn(4, 6), torch.randn(4, 6, requires_grad=True)
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            given = seed if is_training else seed.detach()
            miss = _only_miss(
                lambda h, s, a, k: function(h.detach(), s, a, k), host, given, torch.tensor(0.3), torch.tensor(1)
            )
        assert miss.reason.code == code
        words = {"WEIGHT_IS_INTEGER": ("wrap around", "floating-point"), "WEIGHTS_BOUNDED_APART": ("bound", "1 - w")}
        assert words[code][0] in miss.reason.message
        assert words[code][1] in miss.edit


def test_a_value_inside_that_is_used_elsewhere_is_named() -> None:
    def function(h: Tensor, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        part = a * s
        return part + (1 - a) * h.detach(), part

    miss = _only_miss(function, torch.randn(4, 6), torch.randn(4, 6, requires_grad=True), torch.tensor(0.3))
    assert miss.reason.code == "INTERIOR_USED"


def test_a_gate_that_is_used_elsewhere_is_left_outside() -> None:
    def function(h: Tensor, s: Tensor, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        top = x.topk(2).values
        gate = torch.sigmoid(4 * (top[:, 0] - top[:, 1]))
        return torch.lerp(h.detach(), s, (a * gate)[:, None]), gate

    inputs = torch.randn(4, 6), torch.randn(4, 6, requires_grad=True), torch.tensor(0.3), torch.randn(4, 9)
    (out, gate), backend = _run(function, *inputs)
    found = [(match.attributes["mode"], match.attributes["has_gate"]) for match in backend.report.matches]
    assert found == [("margin", True), ("confidence", False)]
    assert all(match.rewritten for match in backend.report.matches)
    torch.testing.assert_close((out, gate), function(*inputs))


def test_a_margin_alone_is_found_without_sorting() -> None:
    x = torch.randn(5, 40)
    x[0, 3] = x[0, 7] = 9.0
    for name in sorted(SORTED):
        function = MARGINS[name]
        found, backend = _run(lambda x, function=function: function(x) * 2 + 1, x)
        assert [match.attributes["mode"] for match in backend.report.matches] == ["margin"], name
        assert backend.report.matches[0].rewritten, backend.why_not()
        assert not any("topk" in str(node) or "sort" in str(node) for node in backend.graphs[0].graph.nodes)
        torch.testing.assert_close(found, function(x) * 2 + 1)


def test_what_was_sorted_and_is_wanted_itself_stays() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        top = x.topk(2)
        return top.values[:, 0] - top.values[:, 1], top.indices

    module = capture(function, torch.randn(4, 9))
    assert list(matches(module.graph, effects_of(module))) == []


def test_equal_logits_have_the_gradient_of_a_sort() -> None:
    """One of those that share the first place gets it, and one what the second gets, whichever a sort puts first."""
    logits = torch.randn(4, 9)
    logits[0, [2, 5]], logits[1], logits[2, 3:] = 8.0, 1.0, -torch.inf
    for name in sorted(SORTED):
        spelling = Spelling(mode="confidence", margin=name)
        host, seed, alpha, _ = spelling.inputs()
        found = []
        for is_compiled in (True, False):
            given = logits.clone().requires_grad_()
            out = (
                _run(spelling.build(), host, seed, alpha, given)[0]
                if is_compiled
                else spelling.blend(host, seed, alpha, given)
            )
            (gradient,) = torch.autograd.grad(out.square().sum(), given)
            found.append(gradient.abs().sort(-1).values)  # a sort may put either of two equal ones first
            assert ((gradient != 0).sum(-1) == 2).all()
            torch.testing.assert_close(gradient.sum(-1), torch.zeros(4))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_gate_that_learns_is_left_to_inductor_by_the_prior() -> None:
    """With gradients of the logits, two maxima are no quicker than ``topk``: nothing is to be expected of a rewrite."""
    host, seed, alpha, logits = Spelling(mode="confidence").inputs()
    for tensor, is_chosen in ((logits, False), (logits.detach(), True)):
        torch._dynamo.reset()
        backend = Rewriting()
        torch.compile(Spelling(mode="confidence").build(), backend=backend, fullgraph=True)(host, seed, alpha, tensor)
        (match,) = backend.report.matches
        assert match.attributes["is_differentiated"] is not is_chosen
        assert (match.kernel == "torch.blend") is is_chosen, backend.why_not()


def test_a_margin_with_a_sorts_gradient_is_the_same_number() -> None:
    x = torch.randn(7, 20, dtype=torch.float64)
    x[0, [4, 9]], x[1, 3], x[2], x[3, [1, 2]], x[4, 5], x[5, 1:], x[6] = (
        *(7.0, torch.nan, 1.0, torch.inf, torch.inf, -torch.inf),
        -torch.inf,
    )
    torch.testing.assert_close(op.picked_margin(x), op.sorted_margin(x), equal_nan=True)


def test_a_deep_network_without_blends_is_hardly_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all pairs of equal size, only those are expanded with which a value vanishes."""
    expanded = []
    monkeypatch.setattr(
        Sums,
        "of",
        lambda self, anchor, *others, of=Sums.of, **options: (
            expanded.append(anchor) or of(self, anchor, *others, **options)
        ),
    )

    def chain(x: Tensor, *weights: Tensor) -> Tensor:
        for one, two in zip(weights[::2], weights[1::2], strict=True):
            x = x + torch.tanh(x @ one) * torch.sigmoid(x @ two) * 0.5
        return x

    module = capture(chain, torch.randn(4, 6), *(torch.randn(6, 6, requires_grad=True) for _ in range(24)))
    assert list(matches(module.graph, effects_of(module))) == []
    assert len(expanded) < 240, "were 4,000"


# ---- the op and its kernels ------------------------------------------------------------------------------------------


def test_two_maxima_are_exact_where_logits_are_equal_or_no_numbers() -> None:
    x = torch.randn(6, 20, dtype=torch.float64)
    x[0, [4, 9]], x[1, 3], x[2], x[3, [1, 2]], x[4, 5] = 7.0, torch.nan, 1.0, torch.inf, torch.inf
    torch.testing.assert_close(op.top2_margin(x), op.sorted_margin(x), equal_nan=True)
    assert op.top2_margin(x)[[0, 2]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(op.top2_margin(x, True)[:1], op.sorted_margin(x, True)[:1])


@pytest.mark.parametrize("variant", op.VARIANT_ATTRIBUTES)
def test_the_kernel_is_the_reference(variant: str) -> None:
    sizes = {"num_rows": 5, "num_channels": 4, "inner_size": 3, "num_classes": 7}
    sample = op.sample(sizes, torch.float32, torch.device("cpu"), variant=variant)
    found = sample.with_kernel(torch_blend.blend)(*sample.inputs)
    torch.testing.assert_close(found, sample.with_kernel(op.reference)(*sample.inputs))
    torch.testing.assert_close(found, sample.as_written()(*sample.inputs))
    assert sample.attrs.variant == variant


def test_every_kernel_says_what_it_does() -> None:
    found = kernels("blend")
    assert {"inductor", "torch.blend", "lz.cpp_blend"} == set(found)
    assert not {"alpha_gradient", "normalised", "host_weight"} & found["lz.cpp_blend"].supports


def test_sizes_may_be_symbolic() -> None:
    for mode in ("channel", "confidence", "logit"):
        spelling = Spelling(mode=mode)
        inputs = spelling.inputs()
        result, backend = _run(spelling.build(), *inputs, dynamic=True)
        assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
        torch.testing.assert_close(result, spelling.build()(*inputs), rtol=1e-4, atol=1e-5)


def test_half_precision_is_rounded_no_more_than_the_source() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        inputs = [each.detach().to(dtype) for each in Spelling().inputs()]
        inputs[1].requires_grad_()
        result, backend = _run(Spelling(bounds="clamp").build(), *inputs)
        assert backend.report.matches[0].rewritten, backend.why_not()
        assert result.dtype == dtype


def _leaky(x: Tensor, beta: Tensor) -> Tensor:
    membrane, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        reset = (membrane > 1.0).float().detach()
        membrane = beta.clamp(0, 1) * membrane + x[:, t] - reset * 1.0
        membrane = membrane - reset * membrane
        found.append((membrane > 1.0).float())
    return torch.stack(found, 1)


def _integrator(x: Tensor, beta: Tensor) -> Tensor:
    voltage, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        voltage = voltage + beta * (x[:, t] - voltage)
        found.append(voltage)
    return torch.stack(found, 1)


def _ring(x: Tensor, beta: Tensor) -> Tensor:
    out, total = x[:, 0], beta
    for t in range(1, x.shape[1]):
        weight = torch.sigmoid(x[:, t, :1] - total)
        out = out - weight * (out - x[:, t])
        total = total - torch.nn.functional.logsigmoid(total - x[:, t, :1])
    return out


def _two_blocks(x: Tensor, beta: Tensor) -> Tensor:
    """Linear attention over two blocks: the first state is zero, so that there is one sum of two terms."""
    state = torch.zeros(x.shape[0], x.shape[2], x.shape[2])
    for block in x.chunk(2, 1):
        state = state * torch.exp(-beta)[..., None] + block.mT @ block
    return state


@pytest.mark.parametrize("function", [_leaky, _integrator, _ring, _two_blocks])
def test_steps_of_recurrences_are_no_blends(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    backend = Rewriting()
    torch.compile(function, backend=backend, fullgraph=True)(torch.randn(2, 6, 8).requires_grad_(), torch.rand(2, 1))
    found = [match.op for match in backend.report.matches] + [miss.op for miss in backend.report.near_misses]
    assert "blend" not in found, backend.why_not()


def test_a_host_that_is_detached_in_every_step_is_one() -> None:
    def function(x: Tensor, beta: Tensor) -> Tensor:
        out = x[:, 0]
        for t in range(1, 3):
            out = beta * x[:, t] + (1 - beta) * out.detach()
        return out

    torch._dynamo.reset()
    backend = Rewriting()
    torch.compile(function, backend=backend, fullgraph=True)(torch.randn(2, 3, 8, requires_grad=True), torch.rand(2, 1))
    assert "blend" in [match.op for match in backend.report.matches], backend.why_not()


# ---- order statistics --------------------------------------------------------------------------------------------------


def _statistics(function: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[int, int, bool]]:
    """What the result of a function of logits is of the largest and the second largest, and whether equal ones count once."""
    module = capture(function, x)
    ranks = TriedRanks(Effects(module.graph))
    found = [ranks.of(node) for node in module.graph.output_node().all_input_nodes]
    of_input = [each for each in found if each is not None and each.source.op == "placeholder"]
    return [(each.first, each.second, each.is_distinct) for each in of_input]


RANKED: Mapping[str, tuple[Callable[[Tensor], Tensor], tuple[int, int, bool]]] = {
    "largest": (lambda x: x.sort(-1, descending=True)[0][:, 0], (1, 0, False)),
    "second, of what is gathered": (lambda x: x.gather(-1, x.argsort(-1, descending=True))[:, 1], (0, 1, False)),
    "second, by its value": (lambda x: torch.where(x < x.amax(-1, True), x, -1e30).amax(-1), (0, 1, True)),
    "second, in half": (
        lambda x: x.masked_fill(x.ge(x.max(-1, keepdim=True)[0]), torch.finfo(x.dtype).min).max(-1)[0],
        (0, 1, True),
    ),
    "of many": (lambda x: x.topk(7).values.narrow(-1, 1, 1), (0, 1, False)),
    "negative margin": (lambda x: x.topk(2)[0].diff(dim=-1), (-1, 1, False)),
}


@pytest.mark.parametrize("classes", [9, 300])
@pytest.mark.parametrize("name", RANKED)
def test_the_two_largest_are_found_by_what_is_computed(name: str, classes: int) -> None:
    function, expected = RANKED[name]
    kind = torch.float16 if "half" in name else torch.float32
    assert _statistics(function, torch.randn(3, classes, dtype=kind)) == [expected]


UNRANKED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "the third": lambda x: x.topk(3).values[:, 2],
    "the second smallest": lambda x: x.sort(-1).values[:, 1],
    "of the columns": lambda x: x.masked_fill(x == x.amax(0, True), -torch.inf).amax(-1),
    "what is near the largest masked": lambda x: x.masked_fill(x > x.amax(-1, True) - 1e-6, -torch.inf).amax(-1),
    "zero filled in": lambda x: x.masked_fill(x == x.amax(-1, True), 0.0).amax(-1),
    "a low number filled in": lambda x: x.masked_fill(x == x.amax(-1, True), -1e4).amax(-1),
    "the largest, bounded": lambda x: x.topk(2).values.clamp(max=1e4)[:, 0],
    "twice the same counts, three times not": lambda x: torch.where(
        (x == x.amax(-1, True)).sum(-1) == 2, x.amax(-1), torch.where(x < x.amax(-1, True), x, -torch.inf).amax(-1)
    ),
    "rounded on the way": lambda x: x.topk(2).values.half().float()[:, 0],
    "detached on the way": lambda x: x.topk(2).values.detach()[:, 0],
}


@pytest.mark.parametrize("name", UNRANKED)
def test_what_is_nearly_one_of_the_two_largest_is_none(name: str) -> None:
    assert _statistics(UNRANKED[name], torch.randn(3, 9)) == []


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_weight_that_was_made_without_gradients_gives_none_to_what_it_is_made_of(is_whole: bool) -> None:
    def function(h: Tensor, s: Tensor, a: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            top = x.topk(2).values
            weight = ((a if is_whole else 1.7) * torch.sigmoid(4 * (top[:, 0] - top[:, 1])))[:, None]
        return weight * s + (1 - weight) * h.detach()

    inputs = tuple(torch.randn(shape, requires_grad=True) for shape in ((4, 6), (4, 6), (), (4, 9)))
    torch._dynamo.reset()
    backend = Rewriting(lock={"blend": "torch.blend"})
    out = torch.compile(function, backend=backend)(*inputs)
    assert any(match.rewritten and match.attributes["mode"] != "margin" for match in backend.report.matches), (
        backend.why_not()
    )
    found, wanted = (
        torch.autograd.grad(each.square().sum(), inputs, allow_unused=True) for each in (out, function(*inputs))
    )
    assert [each is None for each in found] == [each is None for each in wanted] == [True, False, True, True]
    torch.testing.assert_close(found[1], wanted[1])


def test_a_division_by_a_constant_of_zero_is_no_blend() -> None:
    """Nothing fails at it."""

    def function(seed: Tensor, host: Tensor) -> Tensor:
        return host.detach() / torch.tensor(0.0) + seed * 0.5

    (seed, host), none = torch.randn(2, 3, 4), Rewriting()
    got = torch.compile(function, backend=none, fullgraph=True)(seed.requires_grad_(), host)
    torch.testing.assert_close(got, function(seed, host))
    assert not none.report.events, none.why_not()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [1e-9, 1e-3])
@pytest.mark.parametrize("held", [lambda weight: weight, lambda weight: weight.clamp(0, 1)])
@pytest.mark.parametrize("first", ["seed", "host"])
def test_a_small_weight_of_a_large_host_is_no_difference_of_rounded_numbers(
    dtype: torch.dtype, share: float, held: Callable[[Tensor], Tensor], first: str
) -> None:
    """``1 - (1 - a)`` would be zero where ``a`` is below rounding, and the host would be lost."""

    def mixed(host: Tensor, seed: Tensor, weight: Tensor) -> Tensor:
        parts = [held(1 - weight) * seed, held(weight) * host.detach()]
        return parts[first == "host"] + parts[first == "seed"]

    host, seed = (torch.randn(4, 8, 16).to(dtype) for _ in range(2))
    weight = torch.tensor(share, dtype=dtype)
    host, backend = host / weight, Rewriting(lock={"blend": "torch.blend"})
    got = torch.compile(mixed, backend=backend)(host, seed.clone().requires_grad_(), weight)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(got, mixed(host, seed, weight))


class Taught(torch.nn.Module):
    """A student beside a teacher that is run without gradients, as most are."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.student, self.teacher = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.gate, self.mix = torch.nn.Parameter(torch.randn(2, 1, 1)), mix

    def forward(self, x: Tensor) -> Tensor:
        """The mix of both."""
        with torch.no_grad():
            host = self.teacher(x)
        return self.mix(self.student(x), host, self.gate.sigmoid())


def _taught(mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[list[bool], list[list[Tensor | None]]]:
    """Whether each blend was rewritten; results and gradients, compiled and not."""
    model, x, results = Taught(mix), torch.randn(2, 5, 6), []
    torch._dynamo.reset()
    backend = Rewriting(lock={"blend": "torch.blend"}, strict=True)
    for run in (torch.compile(model, backend=backend, fullgraph=True), model):
        model.zero_grad()
        result = run(x)
        result.square().sum().backward()
        results.append([result.detach(), *(each.grad for each in model.parameters())])
    return [match.rewritten for match in backend.report.matches if match.op == "blend"], results


@pytest.mark.parametrize(
    "mix",
    [
        lambda seed, host, share: share * seed + (1 - share) * host,
        lambda seed, host, share: host + share * (seed - host),
        lambda seed, host, share: torch.lerp(host, seed, share),
        lambda seed, host, share: share * seed + (1 - share) * host.mT.contiguous().mT,
        lambda seed, host, share: (torch.stack([seed, host]) * torch.stack([share, 1 - share])).sum(0),
    ],
)
def test_a_host_that_is_made_without_gradients_is_detached(mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    rewritten, results = _taught(mix)
    assert rewritten == [True]
    torch.testing.assert_close(*results)


def test_a_table_that_is_made_without_gradients_and_added_is_no_host() -> None:
    rewritten, results = _taught(lambda seed, host, share: seed * share + host)
    assert rewritten == []
    torch.testing.assert_close(*results)
