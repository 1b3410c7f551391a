"""A learned exponential moving average over time, as a loop over tokens.

Shape suffixes:
    B  batch   T  positions   C  channels

**Source** Holt, Forecasting seasonals and trends by exponentially weighted moving averages (1957).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class EMA(nn.Module):
    """``h_t = a h_{t-1} + (1 - a) x_t`` with a factor per channel."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(-2.0, 4.0, channels))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """The average at every position."""
        factor_C = self.factor.sigmoid()
        h_BC = torch.zeros_like(x_BTC[:, 0])
        y_BTC = torch.empty_like(x_BTC)
        for t in range(x_BTC.shape[1]):
            h_BC = torch.lerp(x_BTC[:, t], h_BC, factor_C)
            y_BTC[:, t] = h_BC
        return y_BTC
