"""Hugging Face families, spelled out and calling SDPA: kernels run every attention that has a form, nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from backends import Rewriting
from tiers import shallow

import lz_compile
from lz_compile.backend import layerzero
from lz_compile.report.report import MatchReport

#: Families whose attention is, word for word, that of a family that stays, and whose masks and embeddings others have.
TWINS = frozenset(
    "altclip ast bert_weights biogpt camembert cohere2 deit dinov2 distilbert electra gpt2_upcast granite hubert m2m_100 marian "
    "mbart nemotron olmo pegasus phi qwen2 qwen2_static_decode qwen3_moe roberta siglip_vision speech_to_text stablelm "
    "starcoder2 umt5 videomae xlm_roberta".split()
)
assert set(zoo.names()) >= TWINS
#: Every other family spelled out, which is what a recogniser can get wrong; a call of SDPA stays what it is.
CASES = [
    pytest.param(name, attn, marks=() if place % 16 == 0 or is_other else pytest.mark.thorough)
    for place, name in enumerate(zoo.names())
    for attn in zoo.MODES
    for is_other in [attn == "eager" and name not in TWINS]
]
#: Gradients end where scores are clamped, in rows that padding covers: these are rewritten in inference alone.
CLAMPED = ("xglm",)
#: Through Inductor as well; the other families run the rewritten graph eagerly.
COMPILED = ("gpt2", "llama", "bert", "t5", "vit", "bloom", "gemma2", "deepseek_v3")


@pytest.mark.parametrize(("name", "attn"), CASES)
def test_every_expressible_attention_is_run_by_a_kernel_and_outputs_and_gradients_stay(name: str, attn: str) -> None:
    family = shallow(zoo.family(name))
    if reason := family.lacks(attn):
        pytest.skip(reason)
    model, inputs = family.build(attn)
    backend = Rewriting()
    want, want_gradients = _run(model, model, inputs)
    got, got_gradients = _run(model, torch.compile(model, backend=backend), inputs)
    kept = [miss for miss in backend.report.near_misses if name in CLAMPED and miss.reason.code == "FLOORED_GRADIENT"]
    assert sum(map(_runs_by_a_kernel, backend.report.matches)) + len(kept) >= family.expressible, backend.why_not()
    told = len(backend.report.matches) + len(backend.report.near_misses)
    assert told >= family.instances or "breaks the graph" in family.note
    assert not backend.report.events, backend.why_not()
    _close(got, want)
    for key, expected in want_gradients.items():
        scale = expected.abs().max().clamp(min=1e-3)
        assert (got_gradients[key] - expected).abs().max() <= 5e-3 * scale, key


def _runs_by_a_kernel(match: MatchReport) -> bool:
    """Whether a kernel was emitted, or is what the source calls already."""
    return match.rewritten or any(reason.code == "ALREADY_THIS_KERNEL" for reason in match.reasons)


@pytest.mark.parametrize("name", CLAMPED)
def test_scores_that_are_clamped_run_by_a_kernel_where_no_gradients_are_wanted(name: str) -> None:
    family = shallow(zoo.family(name))
    model, inputs = family.build("eager")
    backend = Rewriting()
    with torch.no_grad():
        _close(zoo.tensors(torch.compile(model, backend=backend)(**inputs)), zoo.tensors(model(**inputs)))
    assert sum(map(_runs_by_a_kernel, backend.report.matches)) >= family.expressible, backend.why_not()


@pytest.mark.sampled("llama")
@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_families_compile_through_inductor_and_match(name: str) -> None:
    model, inputs = zoo.family(name).build()
    lz_compile.clear_reports()
    with torch.no_grad():
        got = torch.compile(model, backend=layerzero)(**inputs)
        _close(zoo.tensors(got), zoo.tensors(model(**inputs)))
    assert any(match.rewritten for report in lz_compile.reports() for match in report.matches)


def _close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)


def _run(
    model: torch.nn.Module, run: Any, inputs: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, and gradients of a sum over them, by parameter."""
    model.zero_grad()
    outputs = zoo.tensors(run(**inputs))
    wanted = [x for x in outputs if x.is_floating_point() and x.requires_grad]
    sum((x.float() * torch.linspace(-1, 1, x.numel()).reshape(x.shape)).mean() for x in wanted).backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
