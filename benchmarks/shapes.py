"""Models of well-known shapes with random weights, from `transformers` and from ``models/``, at any size.

Weights are spread wider than transformers initialises them, so that attention is not uniform and a wrong mask shows.

**Source** transformers 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.decoder import Decoder, DecoderConfig
from models.encoder import Encoder, EncoderConfig

VOCABULARY, PATCH, SPREAD = 1000, 16, 0.06
T5_TARGET = 4  # times shorter than the source


@dataclass(frozen=True)
class Size:
    """How large a model and its input are; heads are 64 wide. Images have about ``length`` patches."""

    length: int
    layers: int = 4
    hidden: int = 512
    batch: int = 1
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, sizes: Mapping[str, Any]) -> Size:
        """Those that were told by name."""
        return cls(**sizes)

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.hidden // 64


Built = tuple[nn.Module, dict[str, Tensor]]


def build(name: str, size: Size, device: torch.device | str = "cpu") -> Built:
    """The model called ``name`` in :data:`SHAPES`, in eval mode, and its inputs; the same for every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = SHAPES[name](size)
    return model.eval().to(device), {name: value.to(device) for name, value in inputs.items()}


def _transformers(kind: str, size: Size, **settings: Any) -> nn.Module:
    """A model without a head; its own rotary tables stay in float32 whatever the dtype."""
    import transformers

    settings = {"vocab_size": VOCABULARY, "initializer_range": SPREAD, "use_cache": False, **settings}
    config = transformers.AutoConfig.for_model(kind, **settings)
    model: nn.Module = transformers.AutoModel.from_config(config, attn_implementation="eager", dtype=size.dtype)
    return model


def _common(size: Size, mlp_ratio: float = 4) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": int(size.hidden * mlp_ratio),
        "max_position_embeddings": max(size.length, 512),
    }


def _ids(size: Size, length: int | None = None) -> Tensor:
    return torch.randint(5, VOCABULARY, (size.batch, length or size.length))


def _padding(size: Size) -> Tensor:
    """A mask of ones, zero over the last eighth of every other row."""
    mask = torch.ones(size.batch, size.length, dtype=torch.long)
    mask[::2, size.length - size.length // 8 :] = 0
    return mask


def _llama(size: Size) -> Built:
    groups = max(1, size.heads // 4)
    model = _transformers("llama", size, **_common(size, mlp_ratio=2.75), num_key_value_heads=groups)
    return model, {"input_ids": _ids(size)}


def _gemma2(size: Size) -> Built:
    """Capped scores; every other layer slides over 4,096 tokens."""
    groups, dims = max(1, size.heads // 2), {"head_dim": 64, "query_pre_attn_scalar": 64}
    model = _transformers("gemma2", size, **_common(size), **dims, num_key_value_heads=groups)
    return model, {"input_ids": _ids(size)}


def _gpt2(size: Size) -> Built:
    sizes = {"n_embd": size.hidden, "n_layer": size.layers, "n_head": size.heads, "n_positions": max(size.length, 512)}
    return _transformers("gpt2", size, **sizes, bos_token_id=1, eos_token_id=2), {"input_ids": _ids(size)}


def _bert(size: Size) -> Built:
    return _transformers("bert", size, **_common(size)), {"input_ids": _ids(size), "attention_mask": _padding(size)}


def _t5(size: Size) -> Built:
    sizes = {"d_model": size.hidden, "num_layers": size.layers, "num_heads": size.heads, "d_ff": size.hidden * 4}
    ids = {"input_ids": _ids(size), "decoder_input_ids": _ids(size, size.length // T5_TARGET)}
    return _transformers("t5", size, **sizes, d_kv=64), ids | {"attention_mask": _padding(size)}


def _vit(size: Size) -> Built:
    side = round(math.sqrt(size.length)) * PATCH
    model = _transformers("vit", size, **_common(size), image_size=side, patch_size=PATCH)
    return model, {"pixel_values": torch.randn(size.batch, 3, side, side).to(size.dtype)}


def _decoder(size: Size) -> Built:
    sizes = {"channels": size.hidden, "layers": size.layers, "heads": size.heads, "mlp_width": int(size.hidden * 2.75)}
    config = DecoderConfig(vocabulary=VOCABULARY, kv_heads=max(1, size.heads // 4), **sizes)
    return _spread(Decoder(config)).to(size.dtype), {"ids_BT": _ids(size)}


def _encoder(size: Size) -> Built:
    sizes = {"channels": size.hidden, "layers": size.layers, "heads": size.heads, "mlp_width": size.hidden * 4}
    config = EncoderConfig(vocabulary=VOCABULARY, max_length=max(size.length, 512), **sizes)
    return _spread(Encoder(config)).to(size.dtype), {"ids_BT": _ids(size), "keep_BS": _padding(size).bool()}


def _spread(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=SPREAD)
    return model


SHAPES: dict[str, Callable[[Size], Built]] = {
    "llama": _llama,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "models.decoder": _decoder,
    "models.encoder": _encoder,
}
