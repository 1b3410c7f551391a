"""What a kernel is given that computes an op together with others around it, as its descriptor's ``fuses_ops`` names them.

Beside the name of an op that comes directly before, ``fuses_ops`` may name

    residual   an operand is the sum of two tensors of its shape and dtype. The kernel gives the sum, too.
    sibling    another match of the same op with the same attributes, which shares operands: the op's module says
               which, and what else may differ (``SIBLINGS_SHARE``, ``SIBLINGS_DIFFER``). The kernel gives both results.

A kernel that gives more than its own result returns a tuple: its own first, then those of ``fused`` by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lz_compile.lowering import ops

RESIDUAL, SIBLING = "residual", "sibling"
#: What a kernel that computes it along gives as well, so that others may read it.
GIVEN = frozenset({RESIDUAL, SIBLING})


@dataclass(frozen=True)
class Fused:
    """A value that is still to be computed, by ``op`` over ``operands`` in that op's canonical layout.

    A kernel whose descriptor names the op under ``fuses_ops`` gets these in the place of its own operand; a sibling beside
    its own operands (:class:`Siblings`). The op's canonical result, reshaped, is the operand in the kernel's canonical
    layout. A residual has the operands ``input`` and ``residual``, both in that layout already.
    """

    op: str
    operands: Any
    attrs: Any

    def reference(self) -> torch.Tensor:
        """The value, by the op's definition."""
        if self.op == RESIDUAL:
            whole: torch.Tensor = self.operands["input"] + self.operands["residual"]
            return whole
        found: torch.Tensor = ops.module(self.op).reference(self.operands, self.attrs)
        return found


@dataclass(frozen=True)
class Siblings:
    """What a kernel is given that computes two matches of an op: its own operands, and the other match."""

    own: Any
    other: Fused
