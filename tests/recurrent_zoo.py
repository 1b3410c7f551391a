"""Tiny, randomly initialised `transformers` models with recurrences, as their authors spell them without kernel libraries.

`form` says what the recurrence is in the graph that Dynamo gives: a `loop` over tokens (or over chunks of them), a `scan`
that `associative_scan` has unrolled, or `chunks` in which cumulative sums take the place of a loop.

**Source** transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Form = Literal["loop", "scan", "chunks"]

VOCABULARY = 101
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ATTENTION = {
    **_COMMON,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 600,
}
_LINEAR = {
    **_ATTENTION,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Recurrent:
    """One architecture: its configuration, the form of its recurrence, and what is set on the built model's config."""

    kind: str
    form: Form
    config: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, length: int = 64, batch: int = 2) -> tuple[nn.Module, dict[str, Tensor]]:
        """A model in eval mode and its inputs, the same for every call."""
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = AutoConfig.for_model(self.kind, **self.config, use_cache=False)
            for name, value in self.settings.items():
                setattr(config, name, value)
            model: nn.Module = AutoModelForCausalLM.from_config(config)
            ids = torch.randint(3, VOCABULARY, (batch, length))
        return model.eval(), {"input_ids": ids}


FAMILIES: Mapping[str, Recurrent] = {
    "qwen3_next": Recurrent(
        "qwen3_next", "chunks", {**_LINEAR, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16}
    ),
    "olmo_hybrid": Recurrent("olmo_hybrid", "chunks", {**_LINEAR, "linear_num_key_heads": 4}),
    "kimi_linear": Recurrent(
        "kimi_linear",
        "chunks",
        {
            **_ATTENTION,
            **_EXPERTS,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_attn_config": {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4},
        },
    ),
    "mamba": Recurrent("mamba", "scan", {**_COMMON, "state_size": 8}),
    "mamba_loop": Recurrent("mamba", "loop", {**_COMMON, "state_size": 8}, {"use_associative_scan": False}),
    "mamba2": Recurrent(
        "mamba2",
        "chunks",
        {**_COMMON, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "jamba": Recurrent(
        "jamba",
        "loop",
        {
            **_ATTENTION,
            "mamba_d_state": 8,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
        {"use_associative_scan": False},
    ),
    "falcon_h1": Recurrent(
        "falcon_h1",
        "chunks",
        {
            **_ATTENTION,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
    ),
    "recurrent_gemma": Recurrent(
        "recurrent_gemma",
        "loop",
        {
            **_ATTENTION,
            "lru_width": 32,
            "attention_window_size": 64,
            "block_types": ["recurrent", "attention"],
            "head_dim": 8,
        },
    ),
    "rwkv": Recurrent("rwkv", "loop", {**_COMMON, "attention_hidden_size": 32, "context_length": 600}),
    "xlstm": Recurrent("xlstm", "chunks", {**_COMMON, "num_heads": 4, "num_blocks": 2}),
    # Shorter than a chunk, a sequence is run token by token.
    "xlstm_loop": Recurrent("xlstm", "loop", {**_COMMON, "num_heads": 4, "num_blocks": 2, "chunk_size": 1024}),
}
