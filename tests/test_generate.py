"""`generate()` of transformers: the tokens and logits of eager, prefill and decode, with caches that grow and that do not.

Compilations are what Dynamo counts as compiled frames. A growing cache is compiled for the prompt, for the first step
and again for a length that varies; sizes that are symbolic from the start, and a cache of a fixed size, need two. Inductor
guards on one more size where sizes are symbolic, with us as without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from backends import Rewriting
from torch import Tensor
from torch._dynamo.utils import counters

import lz_compile as lz
from lz_compile.backend import layerzero
from lz_compile.report.report import MatchReport

PROMPT, NEW_TOKENS, VOCABULARY = 9, 12, 101
#: Two of one family: a layer reads a cache of its own.
LAYERS = {"llama": 2, "gpt2": 1, "gemma": 1}
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # every sequence gets all of its tokens
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "gpt2": ("GPT2", {}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}),
}
CLASSES = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel", "Gemma": "GemmaForCausalLM"}

#: How a model is compiled and generates, and how often it is compiled: by Dynamo alone, and by Inductor alone.
CACHES: dict[str, tuple[bool | None, dict[str, Any], int, int]] = {
    "growing": (None, {}, 3, 3),
    "growing, symbolic sizes": (True, {}, 2, 3),
    "fixed": (None, {"cache_implementation": "static"}, 2, 2),
}

Backend = Callable[..., Any]


def causal_model(family: str, attn: str = "eager", layers: int | None = None) -> Any:
    """A tiny model whose next tokens vary: its weights are spread further than transformers initialises them."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIG, **settings, num_hidden_layers=layers or LAYERS[family])
    model = getattr(transformers, CLASSES[name])._from_config(config, attn_implementation=attn).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.125)
    return model


def prompt() -> dict[str, Tensor]:
    """Two prompts, one shorter and padded on the left."""
    tokens = torch.randint(5, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    kept = torch.ones_like(tokens)
    kept[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": kept}


def generated(model: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The prompts with the most likely tokens appended, and the logits that each was chosen by."""
    logits: list[Tensor] = []

    def note(_tokens: Tensor, scores: Tensor) -> Tensor:
        logits.append(scores)
        return scores

    tokens = model.generate(**prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, logits_processor=[note], **options)
    return tokens, torch.stack(logits)


@functools.cache
def eagerly(family: str, attn: str = "eager", layers: int | None = None) -> tuple[Tensor, Tensor]:
    """What a model generates that is not compiled."""
    return generated(causal_model(family, attn, layers))


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert found[0].equal(expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def compiled_generation(
    family: str, attn: str, cache: str, backend: Backend, layers: int | None = None
) -> tuple[tuple[Tensor, Tensor], int]:
    """What a model whose forward is compiled generates, and how many compilations that took."""
    is_dynamic, options, *_ = CACHES[cache]
    model = causal_model(family, attn, layers)
    model.forward = torch.compile(model.forward, backend=backend, dynamic=is_dynamic)
    counters.clear()
    found = generated(model, **options)
    return found, counters["frames"]["ok"]


def runs_by_a_kernel(match: MatchReport) -> bool:
    """Whether a kernel was emitted, or is what the source calls already."""
    return match.rewritten or any(reason.code == "ALREADY_THIS_KERNEL" for reason in match.reasons)


def check_reports(matches: list[MatchReport], events: list[Any], graphs: int, layers: int) -> None:
    matches = [match for match in matches if match.op == "attention"]
    assert not events
    assert len(matches) >= graphs * layers
    assert all(runs_by_a_kernel(match) for match in matches), [match.reasons for match in matches]


def unchanged(module: torch.fx.GraphModule, _inputs: Any) -> Backend:
    """A backend that does nothing: how often Dynamo alone compiles."""
    return module.forward


#: Both spellings of attention for one family, the one that is spelled out for the others.
SPELLINGS = [("llama", "eager"), ("llama", "sdpa"), ("gpt2", "eager"), ("gemma", "eager")]


@pytest.mark.sampled("llama-sdpa-growing", "gpt2-eager-growing, symbolic sizes", "gemma-eager-fixed")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("family", "attn"), SPELLINGS)
def test_generated_tokens_are_those_of_eager_and_compilations_those_of_dynamo(family, attn, cache):
    backend = Rewriting()
    found, compilations = compiled_generation(family, attn, cache, backend)
    assert found[0].shape == (2, PROMPT + NEW_TOKENS)
    assert_same(found, eagerly(family, attn))
    assert compilations == CACHES[cache][2]
    check_reports(backend.report.matches, backend.report.events, compilations, LAYERS[family])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cache", CACHES)
def test_dynamo_alone_compiles_as_often(cache):
    assert compiled_generation("gpt2", "eager", cache, unchanged)[1] == CACHES[cache][2]


def cache_of(model: Any, kind: str) -> Any:
    if kind == "fixed":
        return transformers.StaticCache(config=model.config, max_cache_len=PROMPT + NEW_TOKENS)
    return transformers.DynamicCache(config=model.config)


@torch.no_grad()
def logits_by_step(model: Any, forward: Backend, kind: str, tokens: Tensor) -> list[Tensor]:
    """The logits of the prompt and then of every token of ``tokens`` alone, against a cache."""
    cache, kept = cache_of(model, kind), prompt()["attention_mask"]
    results = [forward(input_ids=tokens[:, :PROMPT], attention_mask=kept, past_key_values=cache).logits[:, -1]]
    for step in range(PROMPT, tokens.shape[1]):
        kept = torch.nn.functional.pad(kept, (0, 1), value=1)
        output = forward(input_ids=tokens[:, step : step + 1], attention_mask=kept, past_key_values=cache)
        results.append(output.logits[:, -1])
    return results


@pytest.mark.sampled("gpt2-eager-fixed")
@pytest.mark.parametrize("kind", ["growing", "fixed"])
@pytest.mark.parametrize(("family", "attn"), SPELLINGS)
def test_logits_are_those_of_eager_step_by_step(family, attn, kind):
    model, backend = causal_model(family, attn), Rewriting()
    tokens = torch.randint(5, VOCABULARY, (2, PROMPT + NEW_TOKENS), generator=torch.Generator().manual_seed(2))
    want = logits_by_step(model, model, kind, tokens)
    counters.clear()
    got = logits_by_step(model, torch.compile(model, backend=backend), kind, tokens)
    assert len(want) == NEW_TOKENS + 1
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda text, step=step: f"{step}: {text}")
    assert counters["frames"]["ok"] <= 3
    check_reports(backend.report.matches, backend.report.events, 2, LAYERS[family])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_prompt_compiles_nothing_new_where_the_cache_is_fixed(family):
    backend = Rewriting()
    model = causal_model(family)
    model.forward = torch.compile(model.forward, backend=backend)
    generated(model, cache_implementation="static")
    counters.clear()
    tokens = model.generate(
        prompt()["input_ids"].flip(1), max_new_tokens=NEW_TOKENS, do_sample=False, cache_implementation="static"
    )
    assert counters["frames"]["ok"] == 0
    assert tokens.shape == (2, PROMPT + NEW_TOKENS)


@pytest.mark.sampled("llama-fixed")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "cache"), [("llama", "growing, symbolic sizes"), ("llama", "fixed"), ("gpt2", "growing")]
)
def test_through_inductor_tokens_are_those_of_eager_and_compilations_those_of_inductor(family, cache):
    lz.clear_reports()
    found, compilations = compiled_generation(family, "eager", cache, layerzero, layers=1)
    assert_same(found, eagerly(family, layers=1))
    assert compilations <= CACHES[cache][3]
    reports = lz.reports()
    check_reports(
        [match for report in reports for match in report.matches],
        [event for report in reports for event in report.events],
        compilations,
        layers=1,
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_inductor_alone_compiles_as_often():
    """For the other caches it is Dynamo's number, and Inductor cannot do with less."""
    cache = "growing, symbolic sizes"
    assert compiled_generation("llama", "eager", cache, "inductor", layers=1)[1] == CACHES[cache][3]


@pytest.mark.slow
def test_generate_compiles_decoding_by_itself_with_our_backend():
    lz.clear_reports()
    model = causal_model("llama", layers=1)
    config = transformers.CompileConfig(backend=layerzero, mode=None)
    config._compile_all_devices = True
    counters.clear()
    found = generated(model, cache_implementation="static", compile_config=config)
    assert_same(found, eagerly("llama", layers=1))
    assert counters["frames"]["ok"] == 1  # the prompt runs eagerly
    reports = lz.reports()
    check_reports(
        [match for report in reports for match in report.matches],
        [event for report in reports for event in report.events],
        1,
        layers=1,
    )
