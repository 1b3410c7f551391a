"""A problem of an op to measure: random inputs, what a kernel takes of them, and the same as a model's source spells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """A problem to measure; ``operands`` and ``written`` are functions of ``inputs``.

    ``operands`` gives the op's canonical operands, ``written`` the result, as models spell it.
    """

    inputs: tuple[torch.Tensor, ...]
    attrs: Any
    facts: Any
    operands: Callable[..., Any]
    written: Callable[..., torch.Tensor]

    def with_kernel(self, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The problem with a kernel over the canonical operands."""

        def run(*given: torch.Tensor) -> torch.Tensor:
            return call(self.operands(*given), self.attrs)

        return run

    def as_written(self) -> Callable[..., torch.Tensor]:
        """The problem as models spell it."""
        return self.written
