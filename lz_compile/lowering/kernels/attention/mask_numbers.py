"""Masks as numbers in memory, for compiled code on CPUs that reads them once for every head and pass.

Inductor's C++ widens booleans one by one: a softmax over scores takes six times as long with them. Numbers it compares as
fast as it reads them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

#: Scores that pay for one more operator.
FEWEST = 1 << 17
_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")


def selecting(mask: torch.Tensor, extents: tuple[Any, ...]) -> torch.Tensor:
    """A boolean mask of scores of some sizes, to select them by."""
    is_small = all(isinstance(size, int) for size in extents) and math.prod(extents) < FEWEST
    if mask.device.type != "cpu" or is_small:
        return mask
    numbers: torch.Tensor = torch.ops.layerzero.mask_numbers.default(mask)
    return numbers > 0


def _numbers(mask: torch.Tensor) -> torch.Tensor:
    return torch.empty(mask.shape, dtype=torch.bfloat16).copy_(mask)


_LIBRARY.define("mask_numbers(Tensor mask) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("mask_numbers", _numbers, "CompositeExplicitAutograd")
torch.library.register_fake(
    "layerzero::mask_numbers", lambda mask: mask.new_empty(mask.shape, dtype=torch.bfloat16), lib=_LIBRARY
)
