"""Tiny, randomly initialised `transformers` models: how attention is spelled by people who did not know of this project.

Each family is a line of data: its configuration and model class, what differs from the common small sizes, its inputs,
and two counts that were observed, not guessed. `instances` counts softmax results that reach a product with the values,
in a library call or spelled out; `expressible` counts those that our attention op can state exactly (a scale, a soft cap,
sinks, a boolean or additive mask, fewer key-value heads than query heads, values of another width than the keys) and that
Dynamo leaves in one graph. Both are the same for eager and SDPA attention of `transformers`, where it has both.

Sizes are small and, where an architecture lets us choose, distinct, so that no two axes share a symbol: batch 5, heads
4, key-value heads 2, head dim 16, hidden 64, sequence 19 (encoder side 23), vocabulary 101.

**Source** transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Kind = Literal["decoder", "encoder", "encoder_decoder", "vision", "audio", "multimodal"]
Inputs = Callable[[torch.Generator], dict[str, Tensor]]
Wrap = Callable[[nn.Module], nn.Module]

#: The attention implementations of transformers that run on any machine.
MODES = ("eager", "sdpa")

BATCH, SEQUENCE, SOURCE_SEQUENCE, PAST, SLOTS, VOCABULARY = 5, 19, 23, 21, 31, 101
_ANY_FLOAT = (torch.float32, torch.float64, torch.bfloat16)
_NO_FLOAT64 = (torch.float32, torch.bfloat16)
_NO_BFLOAT16 = (torch.float32, torch.float64)
IMAGE = 40  # with patches of 8: 25 patches, 26 tokens with the class token

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_UNBOUNDED = {name: size for name, size in _TEXT.items() if name != "max_position_embeddings"}
_LAYERS_BY_SIDE = {name: size for name, size in _TEXT.items() if name != "num_hidden_layers"}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_MOE = {**_GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 88,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": 8,
}
_SWIN = {
    "image_size": 48,
    "patch_size": 4,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 3,
    "mlp_ratio": 2.0,
}
_SPEECH = {
    **_TEXT,
    "conv_dim": [32, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}
_TOWERS = {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 48}

#: Families whose two layers are not alike, or whose counts are not those of their layers.
_LAYERS_DIFFER = frozenset(
    "gpt2_upcast gpt_neo gemma2 gemma3 cohere2 deepseek_v3 llama4 gpt_oss modernbert funnel t5 umt5 lxmert sam_vision".split()
)
_LAYERS = frozenset(
    "num_hidden_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers encoder_num_hidden_layers "
    "decoder_num_hidden_layers".split()
)


@dataclass(frozen=True)
class Family:
    """One architecture, how to build it, and how much attention it holds.

    `instances` and `expressible` count one eager forward pass on the inputs that `build` returns. `note` says why
    `expressible` is the smaller one, or what is unusual about the spelling. `dtypes` are those that the model's own code
    runs in without an error or a NaN: a mask of float64's least number is -inf in a float32 softmax, grouped expert
    products take no float64, and some tables are always float32.
    """

    name: str
    kind: Kind
    classes: tuple[str, str]
    settings: Mapping[str, Any]
    inputs: Inputs
    instances: int
    expressible: int
    note: str = ""
    wrap: Wrap = field(default=lambda model: model)
    dtypes: tuple[torch.dtype, ...] = _ANY_FLOAT
    modes: tuple[str, ...] = MODES

    def build(self, attn: str = "eager", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model in eval mode and keyword arguments for its forward, the same for every call.

        Weights are drawn in float32 and rounded to `dtype`, so two dtypes are comparable. They are spread further than
        transformers initialises them: near-equal scores would hide a wrong scale or mask.
        """
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._model(attn, torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.125)
            if dtype != torch.float32:
                weights = model.state_dict()
                model = self._model(attn, dtype)
                model.load_state_dict(weights)
        inputs = self.inputs(generator)
        return self.wrap(model).eval(), {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}

    def with_one_layer(self) -> Family:
        """The same with one layer in each stack, where the two are alike, and half of what they hold."""
        settings = _one_layer(self.settings)
        if settings == self.settings or self.name in _LAYERS_DIFFER or self.wrap in (DecodeStep, StaticStep):
            return self
        instances, expressible = (-(-count // 2) for count in (self.instances, self.expressible))
        return replace(self, settings=settings, instances=instances, expressible=expressible)

    def lacks(self, attn: str) -> str:
        """Why there is no model with this attention; empty where there is."""
        import transformers

        model_class = getattr(transformers, self.classes[1])
        if attn not in self.modes:
            return f"{self.name} is about {' and '.join(self.modes)} attention"
        return "" if attn != "sdpa" or model_class._supports_sdpa else f"{model_class.__name__} has no SDPA attention"

    def _model(self, attn: str, dtype: torch.dtype) -> Any:
        import transformers

        config_class, model_class = (getattr(transformers, name) for name in self.classes)
        config = config_class(**self.settings)
        _switch_off(config)
        return model_class._from_config(config, attn_implementation=attn, dtype=dtype)


def _one_layer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, those of towers too, with one layer wherever layers are counted."""
    return {
        name: _one_layer(each) if isinstance(each, dict) else 1 if name in _LAYERS else each
        for name, each in settings.items()
    }


def _switch_off(config: Any) -> None:
    """Set every dropout rate to zero and the cache to unused, in the configuration and those inside it."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _switch_off(value)
        elif name == "use_cache":
            setattr(config, name, False)
        elif ("drop" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


class DecodeStep(nn.Module):
    """One new token against a cache: `past_keys` and `past_values` hold every layer's, stacked.

    The cache object is made inside forward, so that the inputs are tensors only and a second call sees the same past.

    **Shapes** `past_keys`, `past_values`: (layers, batch, key-value heads, past, head dim).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, past_keys: Tensor, past_values: Tensor, **inputs: Tensor) -> Any:
        """The wrapped model's output for the new token."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(past_keys.shape[0]):
            cache.update(past_keys[layer], past_values[layer], layer)
        return self.model(**inputs, past_key_values=cache, use_cache=True)[0]


class StaticStep(nn.Module):
    """New tokens against a cache of a fixed size, as `generate(cache_implementation="static")` keeps it.

    How much of it is filled is a tensor, so the mask depends on data. The cache is filled from tensors inside forward.

    **Shapes** `past_keys`, `past_values`: (layers, batch, key-value heads, slots, head dim); `past`: ().
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        from transformers import StaticCache

        self.model: Any = model
        config: Any = self.model.config
        self.cache = StaticCache(config=config, max_cache_len=SLOTS)
        self.cache.early_initialization(BATCH, config.num_key_value_heads, 16, self.model.dtype, torch.device("cpu"))

    def forward(self, past_keys: Tensor, past_values: Tensor, past: Tensor, **inputs: Tensor) -> Any:
        """The wrapped model's output for the new tokens."""
        for layer, keys, values in zip(self.cache.layers, past_keys, past_values, strict=True):
            layer.keys, layer.values, layer.cumulative_length = keys.clone(), values.clone(), past.clone()
        return self.model(**inputs, past_key_values=self.cache, use_cache=True)[0]


class WithWeights(nn.Module):
    """The wrapped model, also returning its attention probabilities."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        """The last hidden state, then one probability tensor per layer."""
        output = self.model(**inputs, output_attentions=True)
        return output.last_hidden_state, output.attentions


def tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in a model's output, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _ids(length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(5, VOCABULARY, (BATCH, length), generator=generator)


def _padding(length: int, side: str) -> Tensor:
    """A mask of ones with 0 to 4 zeros at the `side` of its rows.

    On the right every query still sees a key, also through a window of 7; on the left a causal row of padding sees none.
    """
    kept = torch.arange(length) < (length - torch.arange(BATCH))[:, None]
    return (kept if side == "right" else kept.flip(-1)).long()


def _tokens(padding: str | None = None, *, length: int = SEQUENCE) -> Inputs:
    def make(generator: torch.Generator) -> dict[str, Tensor]:
        inputs = {"input_ids": _ids(length, generator)}
        return inputs | ({"attention_mask": _padding(length, padding)} if padding else {})

    return make


def _pair(padding: str | None = None) -> Inputs:
    def make(generator: torch.Generator) -> dict[str, Tensor]:
        inputs = _tokens(padding, length=SOURCE_SEQUENCE)(generator)
        return inputs | {"decoder_input_ids": _ids(SEQUENCE, generator)}

    return make


def _packed(generator: torch.Generator) -> dict[str, Tensor]:
    """Documents of 6, 9 and 4 tokens in every row, told by positions that begin again."""
    positions = torch.cat([torch.arange(length) for length in (6, 9, 4)]).expand(BATCH, -1)
    return _tokens()(generator) | {"position_ids": positions}


def _past(kv_heads: int, slots: int, generator: torch.Generator) -> dict[str, Tensor]:
    past = torch.randn(2, 2, BATCH, kv_heads, slots, 16, generator=generator)
    return {"past_keys": past[0], "past_values": past[1]}


def _step(kv_heads: int, padding: str | None = None, *, tokens: int = 1) -> Inputs:
    def make(generator: torch.Generator) -> dict[str, Tensor]:
        inputs = _past(kv_heads, PAST, generator) | {"input_ids": _ids(tokens, generator)}
        return inputs | ({"attention_mask": _padding(PAST + tokens, padding)} if padding else {})

    return make


def _static_step(kv_heads: int, past: int, padding: str | None = None, *, tokens: int = 1) -> Inputs:
    def make(generator: torch.Generator) -> dict[str, Tensor]:
        inputs = _past(kv_heads, SLOTS, generator) | {"input_ids": _ids(tokens, generator), "past": torch.tensor(past)}
        return inputs | ({"attention_mask": _padding(past + tokens, padding)} if padding else {})

    return make


def _boxed(generator: torch.Generator) -> dict[str, Tensor]:
    corner = torch.randint(0, 400, (BATCH, SEQUENCE, 2), generator=generator)
    return _tokens("right")(generator) | {"bbox": torch.cat((corner, corner + 50), dim=-1)}


def _images(size: int = IMAGE, name: str = "pixel_values") -> Inputs:
    return lambda generator: {name: torch.randn(BATCH, 3, size, size, generator=generator)}


def _captioned(padding: str | None = None) -> Inputs:
    return lambda generator: _tokens(padding)(generator) | _images()(generator)


def _waves(length: int = 470) -> Inputs:
    return lambda generator: {"input_values": torch.randn(BATCH, length, generator=generator)}


def _family(
    name: str,
    kind: Kind,
    instances: int,
    inputs: Inputs,
    base: Mapping[str, Any],
    *,
    classes: str | tuple[str, str],
    expressible: int | None = None,
    note: str = "",
    wrap: Wrap = lambda model: model,
    dtypes: tuple[torch.dtype, ...] = _ANY_FLOAT,
    modes: tuple[str, ...] = MODES,
    **settings: Any,
) -> Family:
    """A row of the table: `classes` is the common prefix of the two class names, or both; `settings` override `base`."""
    pair = (f"{classes}Config", f"{classes}Model") if isinstance(classes, str) else classes
    expressible = instances if expressible is None else expressible
    return Family(name, kind, pair, {**base, **settings}, inputs, instances, expressible, note, wrap, dtypes, modes)


# A head dim of 16 whatever the hidden size would give; families that ignore it take hidden / heads, which is 16 too.
_DECODERS = [
    _family("gpt2", "decoder", 2, _tokens("right"), _TEXT, classes="GPT2"),
    _family("gpt2_upcast", "decoder", 2, _tokens(), _TEXT, classes="GPT2", reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True, note="baddbmm with beta 0 in float32, scale by layer", dtypes=_NO_FLOAT64),
    _family("gpt2_decode", "decoder", 2, _step(4), _TEXT, classes="GPT2", wrap=DecodeStep),
    _family("gpt_neo", "decoder", 2, _tokens("right"), _TEXT, classes="GPTNeo", attention_types=[[["global", "local"], 1]], window_size=7, note="no scale; one layer sees a window"),
    _family("gpt_neox", "decoder", 2, _tokens("right"), _TEXT, classes="GPTNeoX"),
    _family("gptj", "decoder", 2, _tokens("right"), _TEXT, classes="GPTJ", rotary_dim=8),
    _family("gpt_bigcode", "decoder", 2, _tokens("right"), _TEXT, classes="GPTBigCode", note="one key-value head"),
    _family("openai_gpt", "decoder", 2, _tokens(), _TEXT, classes="OpenAIGPT", expressible=0, note="scores times a 0/1 buffer, plus -1e4 where it is 0: a mask only to who knows the buffer's values"),
    _family("ctrl", "decoder", 2, _tokens(), _TEXT, classes="CTRL", dff=80),
    _family("codegen", "decoder", 2, _tokens("right"), _TEXT, classes="CodeGen", rotary_dim=8, note="mask added before the scale"),
    _family("opt", "decoder", 2, _tokens("right"), _TEXT, classes="OPT", ffn_dim=80, word_embed_proj_dim=64),
    _family("xglm", "decoder", 2, _tokens("right"), _TEXT, classes="XGLM", ffn_dim=80, note="torch.max with finfo.min after the mask; bmm with views between", dtypes=_NO_FLOAT64),
    _family("biogpt", "decoder", 2, _tokens("right"), _TEXT, classes="BioGpt"),
    _family("bloom", "decoder", 2, _tokens("right"), _TEXT, classes="Bloom", note="ALiBi as the addend of baddbmm"),
    _family("mpt", "decoder", 2, _tokens("right"), _TEXT, classes="Mpt", max_seq_len=96, note="ALiBi added, then masked_fill"),
    _family("falcon", "decoder", 2, _tokens("right"), _TEXT, classes="Falcon", note="one key-value head; scores divided in place"),
    _family("falcon_alibi", "decoder", 2, _tokens("right"), _TEXT, classes="Falcon", alibi=True, multi_query=False, note="ALiBi added before the scale, in place"),
    _family("falcon_grouped", "decoder", 2, _tokens("right"), _GROUPED, classes="Falcon", num_kv_heads=2, new_decoder_architecture=True),
    _family("llama", "decoder", 2, _tokens(), _GROUPED, classes="Llama"),
    _family("llama_left_padded", "decoder", 2, _tokens("left"), _GROUPED, classes="Llama", note="rows of padding see no key at all", dtypes=_NO_FLOAT64),
    _family("llama_packed", "decoder", 2, _packed, _GROUPED, classes="Llama", note="three documents in a row, told by positions"),
    _family("llama_decode", "decoder", 2, _step(2), _GROUPED, classes="Llama", wrap=DecodeStep),
    _family("llama_chunk", "decoder", 2, _step(2, tokens=3), _GROUPED, classes="Llama", wrap=DecodeStep, note="three tokens after a cache: causal from the end"),
    _family("llama_static_prefill", "decoder", 2, _static_step(2, 0, tokens=SEQUENCE), _GROUPED, classes="Llama", wrap=StaticStep, note="keys that are not there yet are masked"),
    _family("llama_static_decode", "decoder", 2, _static_step(2, PAST), _GROUPED, classes="Llama", wrap=StaticStep),
    _family("mistral", "decoder", 2, _tokens("right"), _GROUPED, classes="Mistral", sliding_window=7, note="sliding window"),
    _family("mistral_decode", "decoder", 2, _step(2), _GROUPED, classes="Mistral", sliding_window=7, wrap=DecodeStep),
    _family("mixtral", "decoder", 2, _tokens("right"), _MOE, classes="Mixtral", dtypes=_NO_FLOAT64),
    _family("qwen2", "decoder", 2, _tokens("right"), _GROUPED, classes="Qwen2"),
    _family("qwen2_decode", "decoder", 2, _step(2, "left"), _GROUPED, classes="Qwen2", wrap=DecodeStep),
    _family("qwen2_static_decode", "decoder", 2, _static_step(2, PAST, "left"), _GROUPED, classes="Qwen2", wrap=StaticStep),
    _family("qwen3", "decoder", 2, _tokens("right"), _GROUPED, classes="Qwen3", head_dim=16),
    _family("qwen3_moe", "decoder", 2, _tokens(), _MOE, classes="Qwen3Moe", head_dim=16, dtypes=_NO_FLOAT64),
    _family("gemma", "decoder", 2, _tokens("right"), _GROUPED, classes="Gemma", head_dim=16, num_key_value_heads=1),
    _family("gemma2", "decoder", 2, _tokens("right"), _GROUPED, classes="Gemma2", head_dim=16, sliding_window=7, note="tanh soft cap on the scores"),
    _family("gemma3", "decoder", 2, _tokens("right"), _GROUPED, classes=("Gemma3TextConfig", "Gemma3TextModel"), head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
    _family("phi", "decoder", 2, _tokens("right"), _GROUPED, classes="Phi"),
    _family("phi3", "decoder", 2, _tokens("right"), _GROUPED, classes="Phi3"),
    _family("persimmon", "decoder", 2, _tokens("right"), _TEXT, classes="Persimmon"),
    _family("stablelm", "decoder", 2, _tokens("right"), _GROUPED, classes="StableLm"),
    _family("olmo", "decoder", 2, _tokens("right"), _GROUPED, classes="Olmo"),
    _family("olmo2", "decoder", 2, _tokens("right"), _GROUPED, classes="Olmo2"),
    _family("cohere", "decoder", 2, _tokens("right"), _GROUPED, classes="Cohere", use_qk_norm=True),
    _family("cohere2", "decoder", 2, _tokens("right"), _GROUPED, classes="Cohere2", sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
    _family("granite", "decoder", 2, _tokens("right"), _GROUPED, classes="Granite", attention_multiplier=0.3),
    _family("starcoder2", "decoder", 2, _tokens("right"), _GROUPED, classes="Starcoder2"),
    _family("glm4", "decoder", 2, _tokens("right"), _GROUPED, classes="Glm4", head_dim=16),
    _family("nemotron", "decoder", 2, _tokens("right"), _GROUPED, classes="Nemotron"),
    _family("deepseek_v3", "decoder", 2, _tokens("right"), _MOE, classes="DeepseekV3", num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=28, qk_rope_head_dim=8, qk_nope_head_dim=10, v_head_dim=14, num_local_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, note="MLA: keys of width 18, written in place into new_empty, and values of 14", dtypes=_NO_FLOAT64),
    _family("diffllama", "decoder", 4, _tokens("right"), _GROUPED, classes="DiffLlama", note="two attentions over the same scores, subtracted after"),
    _family("llama4", "decoder", 2, _tokens("right"), _MOE, classes=("Llama4TextConfig", "Llama4TextModel"), head_dim=16, intermediate_size_mlp=80, interleave_moe_layer_step=2, attention_chunk_size=7, layer_types=["chunked_attention", "full_attention"], note="temperature by position on q; attention in chunks"),
    _family("gpt_oss", "decoder", 2, _tokens("right"), _MOE, classes="GptOss", head_dim=16, sliding_window=7, note="a sink column takes part in the softmax and is dropped after it", dtypes=_NO_FLOAT64),
]  # fmt: skip  # one line a family

_ENCODERS = [
    _family("bert", "encoder", 2, _tokens("right"), _TEXT, classes="Bert"),
    _family("bert_weights", "encoder", 2, _tokens("right"), _TEXT, classes="Bert", wrap=WithWeights, modes=("eager",), expressible=0, note="the probabilities are returned"),
    _family("roberta", "encoder", 2, _tokens("right"), _TEXT, classes="Roberta"),
    _family("xlm_roberta", "encoder", 2, _tokens("right"), _TEXT, classes="XLMRoberta"),
    _family("camembert", "encoder", 2, _tokens(), _TEXT, classes="Camembert"),
    _family("distilbert", "encoder", 2, _tokens("right"), _TEXT, classes="DistilBert", hidden_dim=80),
    _family("electra", "encoder", 2, _tokens("right"), _TEXT, classes="Electra", embedding_size=48),
    _family("albert", "encoder", 2, _tokens("right"), _TEXT, classes="Albert", embedding_size=48),
    _family("mpnet", "encoder", 2, _tokens("right"), _TEXT, classes="MPNet", note="bucketed relative bias added in place after the scale"),
    _family("deberta", "encoder", 2, _tokens("right"), _TEXT, classes="Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=24, expressible=0, note="`.item()` breaks the graph between the scores and the softmax, so neither half is whole", dtypes=_NO_BFLOAT16),
    _family("deberta_v2", "encoder", 2, _tokens("right"), _TEXT, classes="DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, max_relative_positions=24, share_att_key=True, note="scale on k; gathered relative bias; bmm on three dims"),
    _family("modernbert", "encoder", 2, _tokens("right"), _TEXT, classes="ModernBert", layer_types=["sliding_attention", "full_attention"], local_attention=8, cls_token_id=1, sep_token_id=2),
    _family("esm", "encoder", 2, _tokens("right"), _TEXT, classes="Esm", position_embedding_type="rotary", mask_token_id=4, note="q scaled before the rotation; scores not scaled"),
    _family("roformer", "encoder", 2, _tokens("right"), _TEXT, classes="RoFormer"),
    _family("megatron_bert", "encoder", 2, _tokens("right"), _TEXT, classes="MegatronBert"),
    _family("mobilebert", "encoder", 2, _tokens("right"), _TEXT, classes="MobileBert", embedding_size=48, intra_bottleneck_size=32, true_hidden_size=32),
    _family("squeezebert", "encoder", 2, _tokens("right"), _TEXT, classes="SqueezeBert", embedding_size=64, note="k is built as (batch, heads, dim, tokens) by a grouped convolution"),
    _family("convbert", "encoder", 2, _tokens("right"), _TEXT, classes="ConvBert", embedding_size=48, head_ratio=2),
    _family("xlnet", "encoder", 2, _tokens("right"), _UNBOUNDED, classes="XLNet", d_head=16, d_inner=80, note="einsum over (token, batch, head, dim); shifted relative scores added before the scale", dtypes=(torch.float32,)),
    _family("funnel", "encoder", 5, _tokens("right"), _LAYERS_BY_SIDE, classes="Funnel", d_head=16, d_inner=80, block_sizes=[2, 1], num_decoder_layers=2, note="einsum; pooled queries; bias masked by 1e6"),
    _family("xlm", "encoder", 2, _tokens("right"), _TEXT, classes="XLM", note="q divided by the scale; masked_fill in place"),
    _family("lilt", "encoder", 4, _boxed, _TEXT, classes="Lilt", hidden_size=96, channel_shrink_ratio=2, expressible=0, note="two score products, each the other's bias: both stay needed"),
    _family("nystromformer", "encoder", 2, _tokens(), _TEXT, classes="Nystromformer", num_landmarks=32, segment_means_seq_len=32, conv_kernel_size=5),
]  # fmt: skip  # one line a family

_ENCODER_DECODERS = [
    _family("t5", "encoder_decoder", 6, _pair("right"), _TEXT, classes="T5", num_decoder_layers=2, d_kv=16, d_ff=80, note="no scale; bucketed relative bias with the mask added to it"),
    _family("umt5", "encoder_decoder", 6, _pair("right"), _TEXT, classes="UMT5", num_layers=2, num_decoder_layers=2, num_heads=4, d_model=64, d_kv=16, d_ff=80),
    _family("bart", "encoder_decoder", 6, _pair("right"), _SEQ2SEQ, classes="Bart"),
    _family("mbart", "encoder_decoder", 6, _pair("right"), _SEQ2SEQ, classes="MBart"),
    _family("pegasus", "encoder_decoder", 6, _pair(), _SEQ2SEQ, classes="Pegasus"),
    _family("marian", "encoder_decoder", 6, _pair("right"), _SEQ2SEQ, classes="Marian"),
    _family("m2m_100", "encoder_decoder", 6, _pair("right"), _SEQ2SEQ, classes="M2M100"),
    _family("prophetnet", "encoder_decoder", 8, _pair("right"), _LAYERS_BY_SIDE, classes="ProphetNet", encoder_ffn_dim=80, decoder_ffn_dim=88, num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4, ngram=2, num_buckets=8, relative_max_distance=24, dtypes=_NO_FLOAT64),
]  # fmt: skip  # one line a family

_VISIONS = [
    _family("vit", "vision", 2, _images(), _VISION, classes="ViT"),
    _family("deit", "vision", 2, _images(), _VISION, classes="DeiT"),
    _family("beit", "vision", 2, _images(), _VISION, classes="Beit", use_relative_position_bias=True, note="relative position bias gathered from a table"),
    _family("dinov2", "vision", 2, _images(), _VISION, classes="Dinov2"),
    _family("dinov3", "vision", 2, _images(), _VISION, classes="DINOv3ViT", num_register_tokens=3),
    _family("siglip_vision", "vision", 3, _images(), _VISION, classes=("SiglipVisionConfig", "SiglipVisionModel"), note="the third, one query per image, is a single F.multi_head_attention_forward node"),
    _family("swin", "vision", 4, _images(48), _SWIN, classes="Swin", note="windows in the batch axis; the shift mask is added to the relative bias first"),
    _family("swinv2", "vision", 4, _images(48), _SWIN, classes="Swinv2", note="cosine scores times a learned scale per head; the shift mask added twice through a five-dim view"),
    _family("segformer", "vision", 4, _images(64), {}, classes="Segformer", num_encoder_blocks=2, depths=[2, 2], sr_ratios=[4, 2], hidden_sizes=[32, 64], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2], decoder_hidden_size=32, note="fewer keys than queries"),
    _family("pvt", "vision", 4, _images(64), {}, classes="Pvt", image_size=64, depths=[1, 1, 1, 1], sequence_reduction_ratios=[8, 4, 2, 1], hidden_sizes=[16, 32, 48, 64], num_attention_heads=[1, 2, 3, 4], mlp_ratios=[2, 2, 2, 2], note="fewer keys than queries"),
    _family("videomae", "vision", 2, lambda generator: {"pixel_values": torch.randn(BATCH, 4, 3, IMAGE, IMAGE, generator=generator)}, _VISION, classes="VideoMAE", num_frames=4, tubelet_size=2),
    _family("sam_vision", "vision", 2, _images(48), _VISION, classes=("SamVisionConfig", "SamVisionModel"), image_size=48, output_channels=24, window_size=4, global_attn_indexes=[1], mlp_dim=80, note="decomposed relative position bias of two einsums"),
]  # fmt: skip  # one line a family

_AUDIOS = [
    _family("wav2vec2", "audio", 2, _waves(), _SPEECH, classes="Wav2Vec2"),
    _family("hubert", "audio", 2, _waves(), _SPEECH, classes="Hubert"),
    _family("wavlm", "audio", 2, _waves(), _SPEECH, classes="WavLM", note="single F.multi_head_attention_forward nodes with a float mask"),
    _family("wav2vec2_conformer", "audio", 2, _waves(), _SPEECH, classes="Wav2Vec2Conformer", conv_depthwise_kernel_size=7, position_embeddings_type="relative"),
    _family("wav2vec2_bert", "audio", 2, lambda generator: {"input_features": torch.randn(BATCH, SOURCE_SEQUENCE, 40, generator=generator)}, _TEXT, classes="Wav2Vec2Bert", feature_projection_input_dim=40, conv_depthwise_kernel_size=7, position_embeddings_type="relative_key", left_max_position_embeddings=9, right_max_position_embeddings=5, apply_spec_augment=False),
    _family("speech_to_text", "audio", 6, lambda generator: {"input_features": torch.randn(BATCH, 91, 12, generator=generator), "decoder_input_ids": _ids(SEQUENCE, generator)}, _SEQ2SEQ, classes="Speech2Text", input_feat_per_channel=12, max_source_positions=96, max_target_positions=96, conv_channels=48),
    _family("moonshine", "audio", 6, lambda generator: {"input_values": torch.randn(BATCH, 9000, generator=generator), "decoder_input_ids": _ids(SEQUENCE, generator)}, _TEXT, classes="Moonshine", encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4, encoder_num_key_value_heads=4, decoder_num_key_value_heads=4, decoder_start_token_id=1),
    _family("whisper", "audio", 6, lambda generator: {"input_features": torch.randn(BATCH, 12, 46, generator=generator), "decoder_input_ids": _ids(SEQUENCE, generator)}, _SEQ2SEQ, classes="Whisper", num_mel_bins=12, max_source_positions=23, max_target_positions=96),
    _family("ast", "audio", 2, lambda generator: {"input_values": torch.randn(BATCH, 40, 24, generator=generator)}, _VISION, classes=("ASTConfig", "ASTModel"), num_mel_bins=24, max_length=40, frequency_stride=6, time_stride=6),
]  # fmt: skip  # one line a family

_MULTIMODALS = [
    _family("clip", "multimodal", 4, _captioned("right"), _TOWERS, classes="CLIP"),
    _family("siglip", "multimodal", 5, _captioned(), _TOWERS, classes="Siglip", note="the fifth is a single F.multi_head_attention_forward node"),
    _family("chinese_clip", "multimodal", 4, _captioned("right"), _TOWERS, classes="ChineseCLIP"),
    _family("blip", "multimodal", 4, _captioned("right"), _TOWERS, classes="Blip"),
    _family("owlvit", "multimodal", 4, _captioned(), _TOWERS, classes="OwlViT"),
    _family("altclip", "multimodal", 4, _captioned("right"), _TOWERS, classes="AltCLIP"),
    _family("flava_text", "multimodal", 2, _tokens("right"), _TEXT, classes=("FlavaTextConfig", "FlavaTextModel")),
    _family("lxmert", "multimodal", 6, lambda generator: _tokens("right")(generator) | {"visual_feats": torch.randn(BATCH, 13, 48, generator=generator), "visual_pos": torch.rand(BATCH, 13, 4, generator=generator)}, _TEXT, classes="Lxmert", note="cross attention both ways", l_layers=1, r_layers=1, x_layers=1, visual_feat_dim=48),
    _family("perceiver", "multimodal", 3, lambda generator: {"inputs": torch.randn(BATCH, 29, 40, generator=generator)}, {}, classes="Perceiver", d_model=40, d_latents=64, num_latents=11, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4),
    _family("git", "multimodal", 4, _captioned("right"), _TEXT, classes="Git", vision_config=_VISION),
]  # fmt: skip  # one line a family

FAMILIES: dict[str, Family] = {
    row.name: row for row in [*_DECODERS, *_ENCODERS, *_ENCODER_DECODERS, *_VISIONS, *_AUDIOS, *_MULTIMODALS]
}


def family(name: str) -> Family:
    """The family called `name`.

    Raises:
        KeyError: no family has that name.
    """
    return FAMILIES[name]


def names(kind: Kind | None = None) -> list[str]:
    """The names of all families, or of one kind, in the order of the table."""
    return [name for name, row in FAMILIES.items() if kind in (None, row.kind)]
