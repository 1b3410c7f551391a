"""A text encoder shaped like BERT: learned positions, attention both ways, a norm after every residual sum.

Shape suffixes:
    B  batch            H  heads               C  channels, H * D
    T  query positions  D  width of a head     F  width of the MLP
    S  key positions

**Source** Devlin et al., BERT (2019); Vaswani et al., Attention Is All You Need (2017), section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of an encoder; a head is ``channels // heads`` wide."""

    vocabulary: int = 1000
    channels: int = 512
    layers: int = 4
    heads: int = 8
    mlp_width: int = 2048
    max_length: int = 4096
    segments: int = 2
    norm_epsilon: float = 1e-12


class Embeddings(nn.Module):
    """The normalised sum of a token's, its position's and its segment's vectors."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.channels)
        self.position = nn.Embedding(config.max_length, config.channels)
        self.segment = nn.Embedding(config.segments, config.channels)
        self.norm = nn.LayerNorm(config.channels, eps=config.norm_epsilon)

    def forward(self, ids_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
        """Vectors ``[B, T, C]``; without ``segments_BT`` everything is in segment 0."""
        if segments_BT is None:
            segments_BT = torch.zeros_like(ids_BT)
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        sum_BTC = self.token(ids_BT) + self.position(positions_T) + self.segment(segments_BT)
        x_BTC: Tensor = self.norm(sum_BTC)
        return x_BTC


class Attention(nn.Module):
    """Self-attention in which every position sees all that are not padding."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.scale = 1 / math.sqrt(config.channels // config.heads)
        self.query = nn.Linear(config.channels, config.channels)
        self.key = nn.Linear(config.channels, config.channels)
        self.value = nn.Linear(config.channels, config.channels)
        self.output = nn.Linear(config.channels, config.channels)

    def forward(self, x_BTC: Tensor, bias_B11S: Tensor | None) -> Tensor:
        """What every position reads; ``bias_B11S`` is added to its scores."""
        q_BTHD, k_BSHD, v_BSHD = (self._split(project(x_BTC)) for project in (self.query, self.key, self.value))
        scores_BHTS = torch.einsum("bthd,bshd->bhts", q_BTHD, k_BSHD) * self.scale
        if bias_B11S is not None:
            scores_BHTS = scores_BHTS + bias_B11S
        out_BTHD = torch.einsum("bhts,bshd->bthd", scores_BHTS.softmax(dim=-1), v_BSHD)
        y_BTC: Tensor = self.output(out_BTHD.flatten(2))
        return y_BTC

    def _split(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.view(*x_BTC.shape[:2], self.heads, -1)


class Layer(nn.Module):
    """Attention and an MLP; each is added to its input and the sum is normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.channels, eps=config.norm_epsilon)
        self.up = nn.Linear(config.channels, config.mlp_width)
        self.down = nn.Linear(config.mlp_width, config.channels)
        self.mlp_norm = nn.LayerNorm(config.channels, eps=config.norm_epsilon)

    def forward(self, x_BTC: Tensor, bias_B11S: Tensor | None) -> Tensor:
        """The positions' vectors after this layer."""
        x_BTC = self.attention_norm(x_BTC + self.attention(x_BTC, bias_B11S))
        hidden_BTF = F.gelu(self.up(x_BTC))
        y_BTC: Tensor = self.mlp_norm(x_BTC + self.down(hidden_BTF))
        return y_BTC


class Encoder(nn.Module):
    """Token ids to one vector per position."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))

    def forward(self, ids_BT: Tensor, keep_BS: Tensor | None = None, segments_BT: Tensor | None = None) -> Tensor:
        """Vectors ``[B, T, C]``; ``keep_BS`` is True for tokens and False for padding."""
        x_BTC: Tensor = self.embeddings(ids_BT, segments_BT)
        bias_B11S = None
        if keep_BS is not None:
            lowest = torch.finfo(x_BTC.dtype).min
            bias_B11S = (1 - keep_BS[:, None, None, :].to(x_BTC.dtype)) * lowest
        for layer in self.layers:
            x_BTC = layer(x_BTC, bias_B11S)
        return x_BTC
