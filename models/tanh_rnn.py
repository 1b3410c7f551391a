"""Elman's recurrent network, as a loop over tokens: a recurrence that is not affine in its state.

Shape suffixes:
    B  batch   T  positions   C  channels   N  width of the state

**Source** Elman, Finding structure in time (1990).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TanhRNN(nn.Module):
    """``h_t = tanh(W x_t + U h_{t-1} + b)``."""

    def __init__(self, channels: int = 64, width: int = 64) -> None:
        super().__init__()
        self.given = nn.Linear(channels, width)
        self.recurrent = nn.Linear(width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """The states at every position ``[B, T, N]``, and the last one."""
        h_BN = x_BTC.new_zeros(x_BTC.shape[0], self.recurrent.in_features)
        states = []
        for x_BC in x_BTC.unbind(1):
            h_BN = torch.tanh(self.given(x_BC) + self.recurrent(h_BN))
            states.append(h_BN)
        return torch.stack(states, dim=1), h_BN
