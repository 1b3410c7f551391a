"""Blends: every spelling is read, nothing else is, and the rewrite is right; margins without sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn

from lz_compile.lowering.kernels import torch_blend
from lz_compile.lowering.ops import blend as op
from lz_compile.passes.patterns.blend import recognise
from lz_compile.runtime.registry import kernels
from tests.backends import Rewriting
from tests.blend_spellings import (
    BOUNDS,
    CONVEX,
    DETACHED,
    DIFFERENT,
    MARGINS,
    MODES,
    RESIDUAL,
    SHAPES,
    SIGMOIDS,
    SLOPES,
    SORTED,
    SPREADS,
    Spelling,
    spellings,
)
from tests.graphs import capture, effects_of

LOCK = {"blend": "torch.blend"}
many = settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
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
        exact = function(*(each.detach().double() for each in inputs))
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
    _check(Spelling(mixed=mixed))
    _check(Spelling(mode="channel", mixed=mixed, is_training=False))


@pytest.mark.parametrize("mixed", RESIDUAL)
def test_every_way_to_add_a_weighed_tensor_is_recognised(mixed: str) -> None:
    _check(Spelling(mode="residual", mixed=mixed))


@pytest.mark.parametrize("margin", MARGINS)
def test_every_way_to_find_the_two_largest_is_recognised(margin: str) -> None:
    _check(Spelling(mode="confidence", margin=margin, bounds="clamp"))


@pytest.mark.parametrize("sigmoid", SIGMOIDS)
def test_every_way_to_write_a_gate_is_recognised(sigmoid: str) -> None:
    for slope in SLOPES:
        _check(Spelling(mode="confidence", sigmoid=sigmoid, slope=slope))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_recognised_in_every_shape(mode: str) -> None:
    for shape in SHAPES:
        _check(Spelling(mode=mode, mixed="sum" if mode == "residual" else "delta", shape=shape))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_weights_may_be_bounded_in_any_way(bounds: str) -> None:
    for mode in ("convex", "confidence"):
        _check(Spelling(mode=mode, bounds=bounds))


@pytest.mark.parametrize("spread", SPREADS)
def test_weights_may_be_broadcast_in_any_way(spread: str) -> None:
    for mode in ("per_row", "channel", "confidence", "soft_gate"):
        _check(Spelling(mode=mode, spread=spread))


@pytest.mark.parametrize("detached", DETACHED)
def test_a_host_may_be_detached_in_any_way(detached: str) -> None:
    for mode in ("convex", "residual"):
        _check(Spelling(mode=mode, mixed="sum" if mode == "residual" else "delta", detached=detached, is_sum=True))


@settings(many, max_examples=25)
@given(spelling=spellings())
def test_any_spelling_is_recognised_and_right(spelling: Spelling) -> None:
    _check(spelling)


@pytest.mark.slow
@many
@given(spelling=spellings())
def test_many_spellings_are_recognised_and_right(spelling: Spelling) -> None:
    _check(spelling)
