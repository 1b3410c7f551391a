"""A layer of the gated delta rule, its recurrence written as a loop over tokens.

    S_t = g_t S_{t-1} + b_t k_t (v_t - k_t^T g_t S_{t-1})^T        o_t = q_t^T S_t

Shape suffixes:
    B  batch   T  positions   H  heads   K  width of keys   V  width of values   C  channels

**Source** Yang et al., Gated Delta Networks (2024), equation 10.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedDelta(nn.Module):
    """The layer with its projections, an output gate and a norm per head."""

    def __init__(self, channels: int = 64, heads: int = 2, key_dim: int = 16, value_dim: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(channels, heads * key_dim, bias=False)
        self.key = nn.Linear(channels, heads * key_dim, bias=False)
        self.value = nn.Linear(channels, heads * value_dim, bias=False)
        self.write = nn.Linear(channels, heads)
        self.decay = nn.Linear(channels, heads)
        self.gate = nn.Linear(channels, heads * value_dim, bias=False)
        self.norm = nn.RMSNorm(value_dim)
        self.output = nn.Linear(heads * value_dim, channels, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """The layer over a sequence, from an empty state."""
        q_BTHK = F.normalize(self.query(x_BTC).unflatten(-1, (self.heads, -1)), dim=-1)
        k_BTHK = F.normalize(self.key(x_BTC).unflatten(-1, (self.heads, -1)), dim=-1)
        v_BTHV = self.value(x_BTC).unflatten(-1, (self.heads, -1))
        b_BTH = self.write(x_BTC).sigmoid()
        g_BTH = torch.exp(-F.softplus(self.decay(x_BTC)))
        s_BHKV = x_BTC.new_zeros(x_BTC.shape[0], self.heads, k_BTHK.shape[-1], v_BTHV.shape[-1])
        outputs = []
        for q, k, v, b, g in zip(*(each.unbind(1) for each in (q_BTHK, k_BTHK, v_BTHV, b_BTH, g_BTH)), strict=True):
            s_BHKV = s_BHKV * g[..., None, None]
            held = (s_BHKV * k.unsqueeze(-1)).sum(-2)
            delta = (v - held) * b.unsqueeze(-1)
            s_BHKV = s_BHKV + k.unsqueeze(-1) * delta.unsqueeze(-2)
            outputs.append((s_BHKV * q.unsqueeze(-1)).sum(-2))
        o_BTHV = self.norm(torch.stack(outputs, 1)) * F.silu(self.gate(x_BTC).unflatten(-1, (self.heads, -1)))
        y_BTC: Tensor = self.output(o_BTHV.flatten(2))
        return y_BTC
