"""Hugging Face families with eager attention: every attention that has an SDPA form is rewritten, nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from backends import Rewriting

import lz_compile
from lz_compile.backend import layerzero

#: Through Inductor as well; the other families run the rewritten graph eagerly, which is what a recogniser can get wrong.
COMPILED = ("gpt2", "llama", "bert", "t5", "swin", "bloom", "gemma2", "deepseek_v3")


@pytest.mark.parametrize("name", zoo.names())
def test_every_expressible_attention_is_rewritten_and_outputs_stay(name: str) -> None:
    family = zoo.family(name)
    model, inputs = family.build()
    backend = Rewriting()
    with torch.no_grad():
        want = model(**inputs)
        got = torch.compile(model, backend=backend)(**inputs)
    _close(got, want)
    rewritten = [match for match in backend.report.matches if match.rewritten]
    assert len(rewritten) >= family.expressible, backend.why_not()
    assert not backend.report.events, backend.why_not()


@pytest.mark.parametrize("name", zoo.names())
def test_gradients_match_eager(name: str) -> None:
    family = zoo.family(name)
    model, inputs = family.build()
    backend = Rewriting()
    want = _gradients(model, model, inputs)
    got = _gradients(model, torch.compile(model, backend=backend), inputs)
    assert sum(match.rewritten for match in backend.report.matches) >= family.expressible, backend.why_not()
    for key, expected in want.items():
        scale = expected.abs().max().clamp(min=1e-3)
        assert (got[key] - expected).abs().max() <= 2e-3 * scale, key


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_families_compile_through_inductor_and_match(name: str) -> None:
    model, inputs = zoo.family(name).build()
    lz_compile.clear_reports()
    with torch.no_grad():
        got = torch.compile(model, backend=layerzero)(**inputs)
        _close(got, model(**inputs))
    assert any(match.rewritten for report in lz_compile.reports() for match in report.matches)


def _close(got: Any, want: Any) -> None:
    for one, other in zip(zoo.tensors(got), zoo.tensors(want), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)


def _gradients(model: torch.nn.Module, run: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    outputs = [x for x in zoo.tensors(run(**inputs)) if x.is_floating_point() and x.requires_grad]
    sum((x.float() * torch.linspace(-1, 1, x.numel()).reshape(x.shape)).mean() for x in outputs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
