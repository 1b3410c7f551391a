"""A problem of an op to measure: random inputs, what a kernel takes of them, and the same as a model's source spells it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, TypeVar

import torch
from typing_extensions import Self

Made = TypeVar("Made")


@dataclass(frozen=True)
class Asked:
    """What a sample is asked for: sizes by the names that descriptors use; only attention knows a ``mask``."""

    sizes: Mapping[str, int]
    dtype: torch.dtype
    device: torch.device
    variant: str = ""
    is_training: bool = False
    mask: Literal["none", "bool", "float"] = "none"

    def of(self, *names: str) -> tuple[int, ...]:
        """Some of the sizes."""
        return tuple(self.sizes[name] for name in names)

    def random(self, *shape: int, seeks: bool = True, scale: float = 1.0) -> torch.Tensor:
        """Random numbers; their gradient is wanted in training, if they are what ``seeks`` one."""
        return self.given(torch.randn(shape, device=self.device, dtype=torch.float32) * scale, seeks=seeks)

    def given(self, numbers: torch.Tensor, *, seeks: bool = True) -> torch.Tensor:
        """These numbers, likewise."""
        return numbers.to(self.dtype).requires_grad_(seeks and self.is_training)


def sampler(variant: str = "") -> Callable[[Callable[[Asked], Made]], Callable[..., Made]]:
    """An op's ``sample(sizes, dtype, device, *, variant, is_training, mask)``, by default of one ``variant``."""

    def made(sample: Callable[[Asked], Made]) -> Callable[..., Made]:
        @wraps(sample)
        def run(sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device, **details: Any) -> Made:
            return sample(Asked(sizes, dtype, device, **{"variant": variant, **details}))

        return run

    return made


@dataclass(frozen=True)
class Sample:
    """A problem to measure: ``operands(*inputs)`` are canonical, ``written(attrs, *inputs)`` is the op as models spell it."""

    inputs: tuple[torch.Tensor, ...]
    attrs: Any
    facts: Any
    operands: Callable[..., Any]
    written: Callable[..., torch.Tensor]

    @classmethod
    def of(
        cls,
        inputs: Sequence[torch.Tensor],
        operands: Callable[..., Any],
        written: Callable[..., torch.Tensor],
        **given: Any,
    ) -> Self:
        """The problem of some inputs; what is not given of its attributes, and its facts, the operands tell."""
        x = operands(*inputs)
        attrs, facts = sys.modules[type(x).__module__].from_operands(x, x.sizes(), **given)
        return cls(tuple(inputs), attrs, facts, operands, written)

    def with_kernel(self, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The problem with a kernel over the canonical operands."""

        def run(*given: torch.Tensor) -> torch.Tensor:
            return call(self.operands(*given), self.attrs)

        return run

    def as_written(self) -> Callable[..., torch.Tensor]:
        """The problem as models spell it."""
        return partial(self.written, self.attrs)
