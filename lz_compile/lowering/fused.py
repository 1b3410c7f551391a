"""What a kernel is given that computes an op together with the ops directly before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lz_compile.lowering import ops


@dataclass(frozen=True)
class Fused:
    """An operand that is still to be computed, by ``op`` over ``operands`` in that op's canonical layout.

    A kernel whose descriptor names the op under ``fuses_ops`` gets these as ``fused``, by the name of its own operand,
    which it is not given. The op's canonical result, reshaped, is the operand in the kernel's canonical layout.
    """

    op: str
    operands: Mapping[str, Any]
    attrs: Any

    def reference(self) -> torch.Tensor:
        """The operand, by the op's definition."""
        value: torch.Tensor = ops.module(self.op).reference(**self.operands, attrs=self.attrs)
        return value
