"""Rows of `benchmarks/third_party.py`: recurrences of spiking networks and of Mamba as libraries write them.

Instances are counted by hand: what Inductor's own code is a single pass for, with a compile of seconds, is to be left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Row:
    """One model: ``build`` gives it and its inputs; ``expected`` are the rewritten instances by op."""

    name: str
    package: str
    build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    expected: Mapping[str, int] = field(default_factory=dict)


class Stepped(nn.Module):
    """A function of one step and its state, over time in dimension 1."""

    def __init__(self, step: Callable[[Tensor, Any], tuple[Tensor, Any]], first: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.step, self.first = step, first

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all steps."""
        state, found = self.first(x[:, 0]), []
        for time in range(x.shape[1]):
            out, state = self.step(x[:, time], state)
            found.append(out)
        return torch.stack(found, 1)


def _integrator() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from norse.torch.functional import leaky_integrator as norse  # type: ignore[import-not-found]  # a library of this benchmark

    def first(x: Tensor) -> Any:
        return norse.LIState(torch.zeros_like(x), torch.zeros_like(x))

    return Stepped(norse.li_feed_forward_step, first), (torch.randn(8, 24, 32),)


def _linear_integrator() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from norse.torch.functional import leaky_integrator as norse

    weight = torch.randn(16, 32) / 6

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        out: tuple[Tensor, Any] = norse.li_step(x, state, weight)
        return out

    def first(x: Tensor) -> Any:
        return norse.LIState(x.new_zeros(x.shape[0], 16), x.new_zeros(x.shape[0], 16))

    return Stepped(step, first), (torch.randn(8, 24, 32),)


def _leaky() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import snntorch  # type: ignore[import-not-found]  # a library of this benchmark

    return Stepped(snntorch.Leaky(beta=0.9), torch.zeros_like), (torch.randn(8, 24, 64),)


def _mamba(*, pscan: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    from mambapy.mamba import Mamba, MambaConfig  # type: ignore[import-untyped]

    return Mamba(MambaConfig(d_model=64, n_layers=2, pscan=pscan)), (torch.randn(2, 64, 64),)


ROWS = (
    Row("norse LI, 24 steps", "norse", _integrator),
    Row("norse linear LI, 24 steps", "norse", _linear_integrator, {"scan": 2}),
    Row("snntorch Leaky, 24 steps", "snntorch", _leaky),
    Row("mambapy loop, 64 steps, 2 layers", "mambapy", lambda: _mamba(pscan=False)),
    Row("mambapy pscan, 64 steps, 2 layers", "mambapy", lambda: _mamba(pscan=True), {"scan": 2}),
)
