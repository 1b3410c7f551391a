"""A causal language model shaped like Llama: grouped queries, rotary positions, RMSNorm and a gated MLP.

Shape suffixes:
    B  batch            H  query heads        D  width of a head
    T  query positions  K  key-value heads    F  width of the MLP
    S  key positions    G  queries per key    V  vocabulary
    C  channels, H * D, with H = K * G

**Source** Touvron et al., Llama 2 (2023), section 2.2; Su et al., RoFormer (2021), equation 34.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder. ``heads`` is a multiple of ``kv_heads``; a head is ``channels // heads`` wide."""

    vocabulary: int = 1000
    channels: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    mlp_width: int = 1408
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.channels // self.heads


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``, computed in float32."""

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.epsilon = epsilon

    def forward(self, x_BTC: Tensor) -> Tensor:
        """The normalised input, in its dtype."""
        wide_BTC = x_BTC.float()
        scale_BT1 = torch.rsqrt(wide_BTC.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide_BTC * scale_BT1).to(x_BTC.dtype) * self.weight


def rotary_angles(positions_T: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, ``[T, D]`` each, in float32; both halves of a head share them."""
    exponents = torch.arange(0, head_dim, 2, device=positions_T.device, dtype=torch.float32) / head_dim
    half = positions_T[:, None].float() * base**-exponents
    angles_TD = torch.cat((half, half), dim=-1)
    return angles_TD.cos(), angles_TD.sin()


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """The input with the pairs ``(x[d], x[d + D / 2])`` turned by their position's angles."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD


class Attention(nn.Module):
    """Causal self-attention in which ``G`` query heads read the same key head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        kv_channels = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.channels, config.channels, bias=False)
        self.key = nn.Linear(config.channels, kv_channels, bias=False)
        self.value = nn.Linear(config.channels, kv_channels, bias=False)
        self.output = nn.Linear(config.channels, config.channels, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor, keep_TS: Tensor) -> Tensor:
        """What every position reads from the positions that ``keep_TS`` lets it see."""
        q_BHTD = rotate(self._split(self.query(x_BTC), self.heads), cos_TD, sin_TD)
        k_BKSD = rotate(self._split(self.key(x_BTC), self.kv_heads), cos_TD, sin_TD)
        v_BKSD = self._split(self.value(x_BTC), self.kv_heads)
        group = self.heads // self.kv_heads
        k_BHSD, v_BHSD = k_BKSD.repeat_interleave(group, dim=1), v_BKSD.repeat_interleave(group, dim=1)
        scores_BHTS = q_BHTD @ k_BHSD.transpose(-2, -1) / math.sqrt(self.head_dim)
        scores_BHTS = scores_BHTS.masked_fill(~keep_TS, float("-inf"))
        weights_BHTS = F.softmax(scores_BHTS, dim=-1, dtype=torch.float32).to(x_BTC.dtype)
        out_BHTD = weights_BHTS @ v_BHSD
        y_BTC: Tensor = self.output(out_BHTD.transpose(1, 2).flatten(2))
        return y_BTC

    def _split(self, x_BTC: Tensor, heads: int) -> Tensor:
        return x_BTC.view(*x_BTC.shape[:2], heads, self.head_dim).transpose(1, 2)


class Layer(nn.Module):
    """Attention, then SwiGLU (``down(silu(gate(x)) * up(x))``); both read a normed input and add to the residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.channels, config.norm_epsilon)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.channels, config.norm_epsilon)
        self.gate = nn.Linear(config.channels, config.mlp_width, bias=False)
        self.up = nn.Linear(config.channels, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.channels, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor, keep_TS: Tensor) -> Tensor:
        """The residual stream after this layer."""
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), cos_TD, sin_TD, keep_TS)
        normed_BTC = self.mlp_norm(x_BTC)
        hidden_BTF = F.silu(self.gate(normed_BTC)) * self.up(normed_BTC)
        y_BTC: Tensor = x_BTC + self.down(hidden_BTF)
        return y_BTC


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.channels)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.channels, config.norm_epsilon)
        self.head = nn.Linear(config.channels, config.vocabulary, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of the token after each position."""
        x_BTC = self.embedding(ids_BT)
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        cos_TD, sin_TD = rotary_angles(positions_T, self.config.head_dim, self.config.rope_base)
        cos_TD, sin_TD = cos_TD.to(x_BTC.dtype), sin_TD.to(x_BTC.dtype)
        keep_TS = positions_T[:, None] >= positions_T
        for layer in self.layers:
            x_BTC = layer(x_BTC, cos_TD, sin_TD, keep_TS)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV
