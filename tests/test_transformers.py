"""``attn_implementation="layerzero"``: models of transformers give what they give with PyTorch's attention, or refuse."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from backends import Rewriting, Traced
from tiers import shallow
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

import lz_compile
import lz_compile.integrations.transformers as integration
from lz_compile.api import attention_calls
from lz_compile.errors import ArgumentError, IntegrationError
from lz_compile.lowering.bands import CAUSAL, Band
from lz_compile.lowering.ops import attention as op
from lz_compile.lowering.ops.attention import Operands

NAME = integration.NAME


def lacks(name: str) -> bool:
    """Whether a family computes attention by itself, or by classes of its own."""
    model = getattr(transformers, zoo.family(name).classes[1])
    return integration._has_classes_of_its_own(model) or not (model._supports_sdpa or model._supports_attention_backend)


def reference(name: str) -> str:
    """The implementation that a family is held against."""
    return "eager" if zoo.family(name).lacks("sdpa") else "sdpa"


SERVED = [name for name in zoo.names() if not lacks(name) and name != "bert_weights"]


def results(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Sequence[Tensor | None], ...]:
    """What a model gives, and its gradients of a sum of that with fixed factors."""
    found = [each for each in zoo.tensors(model(**inputs)) if each.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    total = sum((each * torch.randn(each.shape, generator=generator)).sum() for each in found if each.requires_grad)
    parameters = [each for each in model.parameters() if each.requires_grad]
    assert isinstance(total, Tensor)
    return [each.detach() for each in found], torch.autograd.grad(total, parameters, allow_unused=True)


def assert_near(*pairs: tuple[Sequence[Tensor | None], Sequence[Tensor | None]]) -> None:
    """Results and results, gradients and gradients: of one that is zero but for rounding, the largest of all is the scale."""
    for found, expected in pairs:
        scale = max(float(each.abs().max()) for each in expected if each is not None and each.numel())
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)


@pytest.mark.parametrize("name", SERVED)
def test_families_give_the_same_values_and_gradients(name: str):
    family = shallow(zoo.family(name))
    assert_near(*zip(*(results(*family.build(each)) for each in (NAME, reference(name))), strict=True))


def test_most_families_are_served():
    assert len(SERVED) >= 60


@pytest.mark.parametrize("name", ["gptj", "bloom", "deberta_v2", "falcon", "sam_vision"])
def test_models_that_ask_no_implementation_are_refused(name: str):
    with pytest.raises(ValueError, match=r"by itself, or by one of its own classes; load it with \"eager\""):
        zoo.family(name).build(NAME)


def test_other_names_are_checked_as_ever():
    with pytest.raises(ValueError, match="is not supported"):
        zoo.family("llama").build("layerone")


def test_probabilities_are_refused():
    model, inputs = zoo.family("bert_weights").build(NAME)
    with pytest.raises(ArgumentError, match=r"output_attentions False.*Load the model with 'eager'"):
        model(**inputs)


def test_tensors_that_other_kernels_understand_are_refused():
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ArgumentError, match="expected indices absent, for what it changes is not known"):
        integration.attention(nn.Module(), x, x, x, None, indices=torch.zeros(1, 3, 2))
    integration.attention(nn.Module(), x, x, x, None, indices=None, position_ids=torch.arange(3)[None])


def test_a_transformers_without_the_interfaces_is_an_error_that_says_so(monkeypatch):
    monkeypatch.delattr(PreTrainedModel, "get_correct_attn_implementation")
    with pytest.raises(IntegrationError, match=r"expected transformers >=5, as 5.23 has it, received 5\.\d+"):
        integration._register()


def test_an_additive_mask_of_the_caller_is_added():
    x, mask = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 9)
    keys = torch.randn(2, 2, 9, 8)
    found, _ = integration.attention(nn.Module(), x, keys, keys, mask)
    expected = nn.functional.scaled_dot_product_attention(x, keys, keys, mask, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("has_mask", [True, False])
def test_biases_and_sinks_join_what_drops_scores(is_causal: bool, has_mask: bool):
    x = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    bias, sinks = torch.randn(1, 4, 5, 5, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 5) > 0.3 if has_mask else None
    found, _ = integration.attention(
        nn.Module(), x, x, x, mask, is_causal=is_causal, position_bias=bias, s_aux=sinks, softcap=3.0
    )
    scores = (x @ x.mT * 8**-0.5 / 3).tanh() * 3 + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif is_causal:
        scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    joined = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(found, (joined @ x).transpose(1, 2))


# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "llama_left_padded", "mistral", "gemma2", "gpt_oss", "bert", "t5", "vit"])
def test_attention_of_a_compiled_model_is_recognised(name: str):
    family = shallow(zoo.family(name))
    model, inputs = family.build(NAME)
    backend = Rewriting()
    with torch.no_grad():
        found = zoo.tensors(torch.compile(model, backend=backend, dynamic=False)(**inputs))
        expected = zoo.tensors(family.build(reference(name))[0](**inputs))
    attentions = [match for match in backend.report.matches if match.op == "attention"]
    assert len(attentions) == family.instances, backend.why_not()
    assert not backend.report.events
    assert_near((found, expected))


def test_gradients_of_a_compiled_model():
    model, inputs = zoo.family("gemma2").build(NAME)
    compiled = torch.compile(model, backend=(backend := Traced()), dynamic=False)
    found = [*zoo.tensors(compiled(**inputs))]
    assert any(match.op == "attention" for match in backend.report.matches)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(found[0].square().sum(), parameters)
    other, _ = zoo.family("gemma2").build("eager")
    expected = torch.autograd.grad(other(**inputs)[0].square().sum(), list(other.parameters()))
    assert_near((gradients, expected))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_trainer_trains_to_the_same_losses(is_compiled: bool, tmp_path: Path):
    pytest.importorskip("accelerate", reason="needs accelerate, without which transformers has no Trainer")
    texts = [torch.randint(5, 90, (24,), generator=torch.Generator().manual_seed(each)) for each in range(16)]
    data = [
        {"input_ids": each, "labels": each, "attention_mask": (torch.arange(24) >= i % 5).long()}
        for i, each in enumerate(texts)
    ]

    def losses(implementation: str) -> list[float]:
        model = generator("llama", implementation).train()
        if is_compiled and implementation == NAME:
            model.compile(backend=Rewriting())
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, max_steps=3, learning_rate=1e-2, report_to=[], use_cpu=True,
            save_strategy="no", logging_steps=1, disable_tqdm=True, gradient_checkpointing=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]

    found, expected = losses(NAME), losses("sdpa")
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-4)


# ---- generation ------------------------------------------------------------------------------------------------------

DECODERS = (
    "gpt2 gpt_neox llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi3 olmo2 cohere2 gpt_oss mixtral deepseek_v3 llama4"
).split()


def generator(name: str, implementation: str) -> Any:
    """A family's model for generation, weights spread as the zoo's are."""
    family = zoo.family(name)
    config = getattr(transformers, family.classes[0])(**family.settings)
    zoo._switch_off(config)
    config.use_cache, config.eos_token_id, config.pad_token_id, config.bos_token_id = True, None, 0, 1
    numbers = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=numbers), alpha=0.125)
    return model.eval()


def tokens(model: Any, cache: str | None, count: int = 32) -> Tensor:
    """Greedy, of two prompts, one of which is padded."""
    prompts = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(prompts)
    mask[0, :3] = 0
    given = {"max_new_tokens": count, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    found: Tensor = model.generate(prompts, attention_mask=mask, **given)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_gives_the_same_tokens(name: str, cache: str | None):
    found, expected = (tokens(generator(name, each), cache) for each in (NAME, reference(name)))
    assert found.unique().numel() > 5
    assert torch.equal(found, expected)


@pytest.mark.parametrize("how", ["beams", "assistant", "prompt_lookup"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_beams_and_speculation_give_the_same_tokens(name: str, how: str):
    prompts = torch.randint(5, 90, (1, 11), generator=torch.Generator().manual_seed(3))

    def generated(implementation: str) -> Tensor:
        given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
        if how == "beams":
            given |= {"num_beams": 3, "early_stopping": False}
        elif how == "assistant":
            given |= {"assistant_model": generator(name, implementation)}
        else:
            given |= {"prompt_lookup_num_tokens": 3}
        found: Tensor = generator(name, implementation).generate(prompts, **given)
        return found

    found = generated(NAME)
    assert found.shape == (1, 23)
    assert torch.equal(found, generated(reference(name)))


@pytest.mark.parametrize("pair", [(NAME, "sdpa"), ("sdpa", NAME), ("eager", NAME)], ids=" drafts for ".join)
def test_who_drafts_does_not_matter_to_the_tokens(pair: tuple[str, str]):
    draft, target = (generator("llama", each) for each in pair)
    prompts = torch.randint(5, 90, (1, 11), generator=torch.Generator().manual_seed(3))
    found = target.generate(prompts, max_new_tokens=12, do_sample=False, assistant_model=draft)
    assert torch.equal(found, generator("llama", "sdpa").generate(prompts, max_new_tokens=12, do_sample=False))


def test_one_kernel_for_drafts_and_target_verifies_what_it_drafted():
    """In bfloat16, too: its sums have one order, however many queries there are."""
    model = generator("llama", NAME).to(torch.bfloat16)
    prompts = torch.randint(5, 90, (3, 11), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), lz_compile.lock("attention", "lz.tiled"):
        drafted = model.generate(prompts, max_new_tokens=12, do_sample=False)
        verified = model(drafted[:, :-1]).logits[:, 10:].argmax(-1)
    assert torch.equal(verified, drafted[:, 11:])


@pytest.mark.sampled("llama", "gpt_oss")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_compiled_generation_gives_the_same_tokens(name: str):
    model = generator(name, NAME)
    expected = tokens(generator(name, reference(name)), "static", 8)
    model.forward = torch.compile(model.forward, backend=(backend := Rewriting()))
    assert torch.equal(tokens(model, "static", 8), expected)
    attentions = [match for match in backend.report.matches if match.op == "attention"]
    assert attentions
    assert all(match.rewritten or match.kernel == "torch.sdpa" for match in attentions), backend.why_not()


@pytest.mark.sampled("llama-False", "llama-True")
@pytest.mark.parametrize(
    ("name", "is_compiled"),
    [*((name, False) for name in ("llama", "mistral", "gemma2", "gpt_oss", "qwen3")), ("llama", True)],
)
def test_continuous_batching_gives_the_same_tokens(name: str, is_compiled: bool):
    """Compiled, batches are padded with tokens that belong to no request."""
    numbers = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 90, (length,), generator=numbers).tolist() for length in (3, 19, 11, 30)]
    prompts += [prompts[1][:17]]
    given = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings: dict[str, Any] = {"max_batch_tokens": 32, "max_memory_percent": 0.02, "page_size": 16}  # prompts in parts
    if is_compiled:
        compiling = transformers.CompileConfig(backend="eager", fullgraph=False, mode=None, dynamic=None)
        settings["varlen_compile_config"] = compiling

    def generated(implementation: str) -> list[list[int]]:
        model = generator(name, implementation)
        batching = transformers.ContinuousBatchingConfig(**settings)
        found = model.generate_batch(
            prompts, generation_config=given, continuous_batching_config=batching, progress_bar=False
        )
        return [found[key].generated_tokens for key in sorted(found)]

    own = "paged|eager" if reference(name) == "eager" else "sdpa"
    expected = generated(own)
    assert [len(each) for each in expected] == [6] * 5
    assert generated(NAME) == expected
    if (name, is_compiled) == ("llama", False):
        with pytest.warns(FutureWarning, match="prefix is no longer needed"):
            assert generated(f"paged|{NAME}") == expected


def test_gradient_checkpointing():
    model, inputs = zoo.family("llama").build(NAME)
    expected = results(model, inputs)
    model.gradient_checkpointing_enable()
    assert_near(*zip(results(model.train(), inputs), expected, strict=True))


# ---- what a mask says ------------------------------------------------------------------------------------------------


def masks(seed: int) -> Tensor:
    """A boolean mask of some kind, ``[B, 1, Sq, Sk]``."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    batch, queries = number(1, 4), number(1, 12)
    keys = queries + (number(0, 6) if number(0, 2) else 0)
    upper = (0, keys - queries, number(-1, 4), None)[number(0, 4)]
    lower = (None, None, -number(0, 8), number(-3, 2))[number(0, 4)]
    keep = Band(lower, upper).mask(torch.empty(0), queries, keys).expand(batch, 1, queries, keys).clone()
    if number(0, 2):  # padding on either side
        lengths = torch.randint(0, keys + 1, (batch,), generator=draw)
        padding = torch.arange(keys) < lengths[:, None]
        keep &= (padding if number(0, 2) else padding.flip(1))[:, None, None]
    if not number(0, 3):
        documents = torch.randint(0, 2, (batch, keys), generator=draw).cumsum(1)
        keep &= (documents[:, None, -queries:, None] == documents[:, None, None]) if queries == keys else keep
    if not number(0, 4):
        keep[number(0, batch), 0, number(0, queries), number(0, keys)] ^= True
    return keep


@pytest.mark.parametrize("seed", range(300))
def test_what_is_read_of_a_mask_says_the_same(seed: int):
    mask = masks(seed)
    found = attention_calls.kept(mask)
    if found is None:
        return
    x = torch.empty(mask.shape[0], 1, mask.shape[2], 4)
    keys = torch.empty(mask.shape[0], 1, mask.shape[3], 4)
    attributes = {"band": None, **found.attributes}
    said = op.merged_mask(Operands(x, keys, keys, **found.operands), op.AttentionAttrs(**attributes))
    said = torch.ones_like(mask) if said is None else said.expand_as(mask)
    assert torch.equal(said, mask)


def test_most_masks_are_read():
    found = [attention_calls.kept(masks(seed)) for seed in range(300)]
    assert sum(each is not None for each in found) > 165
    assert sum(each is not None and "query_documents" in each.operands for each in found) > 5
    assert sum(each is not None and each.attributes.get("band") is not None for each in found) > 50


def test_a_mask_that_was_written_to_is_read_again():
    mask = CAUSAL.mask(torch.empty(0), 6, 6)[None, None].clone()
    assert attention_calls.kept(mask).attributes == {"is_causal": True}
    assert attention_calls.kept(mask) is attention_calls.kept(mask)
    mask[0, 0, 0, 5] = True
    assert attention_calls.kept(mask) is None
    with torch.inference_mode():
        assert attention_calls.kept(CAUSAL.mask(torch.empty(0), 6, 6)[None, None].clone()) is None, (
            "writes are not seen"
        )
    mask.data = CAUSAL.mask(torch.empty(0), 6, 6)[None, None].clone()
    assert attention_calls.kept(mask).attributes == {"is_causal": True}
    assert attention_calls.kept(torch.from_numpy(mask.numpy())) is None, "others may write to this memory"


def test_masks_that_were_read_are_freed():
    masks = [torch.zeros(1, 1, 4, 600, dtype=torch.bool) for _ in range(3)]
    for mask in masks:
        mask[..., :9] = True
        attention_calls.kept(mask), attention_calls.seen(mask)
    known = [weakref.ref(mask) for mask in masks]
    masks.clear()
    del mask
    gc.collect()
    assert not any(each() is not None for each in known)


def test_padding_is_no_window():
    for keep in (torch.ones(20, 20).bool(), torch.ones(20, 20).tril().bool()):
        mask = keep.expand(2, 1, 20, 20).clone()
        mask[..., :3] = False
        found = attention_calls.kept(mask)
        assert found.attributes.get("band") is None
        assert found.operands["mask"].shape == (2, 1, 1, 20)


def test_a_band_that_leaves_a_query_no_key_is_none():
    """Kernels count on a key for every query."""
    assert attention_calls.kept(Band(lower=2).mask(torch.empty(0), 6, 6)[None, None].clone()) is None
    assert attention_calls.kept(Band(lower=-2).mask(torch.empty(0), 6, 6)[None, None].clone()) is not None


@pytest.mark.parametrize("window", [4, 8, 9, 10])
def test_one_query_sees_its_window_of_the_keys(window: int):
    query, keys, values = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    found = attention_calls.attend(Operands(query, keys, values), band=Band(1 - window, 0, at_end=True))
    last = slice(max(9 - window, 0), None)
    expected = nn.functional.scaled_dot_product_attention(query, keys[:, :, last], values[:, :, last], enable_gqa=True)
    torch.testing.assert_close(found, expected)


@pytest.fixture
def square() -> Iterator[list[tuple[int, int]]]:
    """A kernel for as many keys as queries, and what it was called with."""
    calls: list[tuple[int, int]] = []

    def kernel(x: Operands, attrs: op.AttentionAttrs) -> Tensor:
        calls.append((x.query.shape[2], x.key.shape[2]))
        return op.reference(x, attrs)

    given = {"platform": "cpu", "supported_dtypes": ["float32"], "supports": ["causal"]}
    lz_compile.register_kernel(operation="attention", kernel_id="test.square", **given)(kernel)
    yield calls
    lz_compile.unregister_kernel("test.square")


def test_a_kernel_is_chosen_for_each_length(square: list[tuple[int, int]]):
    """What one can do may depend on whether there are as many keys as queries."""
    lz_compile.lock("attention", "test.square")
    for queries in (24, 28, 24):
        x, keys = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 24, 8)
        found = attention_calls.attend(Operands(x, keys, keys), is_causal=True)
        expected = nn.functional.scaled_dot_product_attention(x, keys, keys, is_causal=True)
        torch.testing.assert_close(found, expected)
    assert (24, 24) in square
    assert (28, 24) not in square


@pytest.mark.parametrize("queries", [1, 5])
def test_learned_queries_are_the_same_for_all(queries: int):
    query, keys = torch.randn(1, 4, queries, 8), torch.randn(3, 2, 9, 8)
    found, _ = integration.attention(nn.Module(), query, keys, keys, None, is_causal=False, softcap=3.0)
    expected, _ = integration.attention(
        nn.Module(), query.expand(3, -1, -1, -1), keys, keys, None, is_causal=False, softcap=3.0
    )
    torch.testing.assert_close(found, expected)
    assert found.shape == (3, queries, 4, 8)


def test_a_batch_of_none():
    query, keys = torch.randn(0, 4, 1, 8), torch.randn(0, 2, 9, 6)
    found, _ = integration.attention(nn.Module(), query, torch.randn(0, 2, 9, 8), keys, None)
    assert found.shape == (0, 1, 4, 6)


def test_a_mask_of_integers_is_refused():
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ArgumentError, match=r"expected attention_mask boolean \(True keeps\), or floating-point"):
        integration.attention(nn.Module(), x, x, x, torch.ones(1, 1, 3, 3, dtype=torch.long))


@pytest.mark.parametrize("cache", [None, "static"])
def test_queries_that_a_model_drops_keep_their_place(cache: str | None):
    """Gemma 4 drops them behind the layers whose keys others share, where no mask was left out."""

    def model(implementation: str) -> Any:
        torch.manual_seed(0)
        config = transformers.Gemma4TextConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            global_head_dim=16,
            vocab_size_per_layer_input=99,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            initializer_range=0.3,
            eos_token_id=None,
            pad_token_id=0,
        )
        return transformers.Gemma4ForCausalLM._from_config(config, attn_implementation=implementation).eval()

    prompts = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(3))
    given = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    found, expected = (model(each).generate(prompts, **given) for each in (NAME, "eager"))
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    with torch.no_grad():
        found, expected = (model(each)(prompts, logits_to_keep=3).logits for each in (NAME, "eager"))
    torch.testing.assert_close(found, expected)


def test_a_sample_that_is_all_padding_is_what_the_model_makes_of_it():
    family = zoo.family("t5")
    outputs = []
    for each in (NAME, "eager"):
        model, inputs = family.build(each)
        inputs["attention_mask"][0] = 0
        with torch.no_grad():
            outputs.append(zoo.tensors(model(**inputs)))
    assert_near(tuple(outputs))


def test_a_traced_model_gives_the_same():
    model, inputs = zoo.family("bert").build(NAME)
    model.config.return_dict = False
    given = (inputs["input_ids"], inputs["attention_mask"])
    with torch.no_grad():
        traced = torch.jit.trace(model, given, check_trace=False, strict=False)
        torch.testing.assert_close(traced(*given)[0], model(*given)[0])


@pytest.mark.filterwarnings("error")  # Dynamo warns of caches that it looks through
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_a_part_of_one_graph(dynamic: bool):
    def attend(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return integration.attention(nn.Module(), query, key, key, mask, softcap=None)[0]

    given = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.rand(2, 1, 9, 9) > 0.3
    found = torch.compile(attend, backend="eager", fullgraph=True, dynamic=dynamic)(*given)
    torch.testing.assert_close(found, attend(*given))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_heads_that_share_keys_are_rows_of_one_query(softcap: float | None, shared: int):
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, shared, 9, 8), torch.randn(2, shared, 9, 6)
    bias, mask, sinks = torch.randn(1, 4, 1, 9), torch.rand(2, 1, 1, 9) > 0.3, torch.randn(4)
    given = {"position_bias": bias, "s_aux": sinks, "softcap": softcap}
    found, _ = integration.attention(nn.Module(), query, key, value, mask, **given)
    whole, over = torch.cat([query] * 2, 2), torch.cat([bias] * 2, 2)
    expected, _ = integration.attention(nn.Module(), whole, key, value, mask, **{**given, "position_bias": over})
    assert found.shape == (2, 1, 4, 6)
    torch.testing.assert_close(found, expected[:, :1])


@pytest.mark.parametrize("is_padded", [True, False])
def test_of_a_cache_that_is_not_full_only_what_is_seen_is_read(is_padded: bool, monkeypatch):
    mask = torch.zeros(2, 1, 3, 400, dtype=torch.bool)
    mask[:, :, :, 5:70] = True
    if is_padded:
        mask[0, :, :2] = False  # rows that see no key
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 400, 8), torch.randn(2, 2, 400, 8)
    key[:, :, 300:] = torch.nan
    value[:, :, 300:] = torch.nan
    given: list[Operands] = []
    run = attention_calls._plainly
    monkeypatch.setattr(
        attention_calls, "_plainly", lambda attrs, known, plain: given.append(plain) or run(attrs, known, plain)
    )
    found, _ = integration.attention(nn.Module(), query, key, value, mask)
    (plain,) = given
    assert plain.key.shape[2] == plain.mask.shape[3] == 65
    scores = query @ key[:, :, :300].repeat_interleave(2, 1).mT * 8**-0.5
    probabilities = scores.masked_fill(~mask[..., :300], -torch.inf).softmax(-1).nan_to_num(0)
    expected = probabilities @ value[:, :, :300].repeat_interleave(2, 1)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_what_is_seen_of_a_cache_is_read_again_once_more_is():
    mask = torch.zeros(1, 1, 1, 400, dtype=torch.bool)
    assert attention_calls.seen(mask).mask is None
    mask[..., 3:9] = True
    first = attention_calls.seen(mask)
    assert first.keys == slice(3, 9)
    assert attention_calls.seen(mask) is first
    mask[..., 9] = True
    assert attention_calls.seen(mask).keys == slice(3, 10)


@pytest.mark.parametrize("name", ["mistral", "llama_packed", "llama_left_padded", "llama_static_prefill"])
def test_kernels_get_what_a_mask_says(name: str, monkeypatch):
    monkeypatch.setattr(attention_calls, "_WORTHWHILE", 0)
    given: list[Operands] = []
    run = attention_calls._through
    monkeypatch.setattr(
        attention_calls, "_through", lambda call, attrs, x, plain: given.append(x) or run(call, attrs, x, plain)
    )
    lz_compile.lock("attention", "lz.tiled")
    model, inputs = zoo.family(name).build(NAME)
    found = results(model, inputs)
    assert given
    assert all(each.mask is None or each.mask.shape[2] == 1 for each in given)
    assert any(each.query_documents is not None for each in given) == (name == "llama_packed")
    other, _ = zoo.family(name).build("sdpa")
    assert_near(*zip(found, results(other, inputs), strict=True))
