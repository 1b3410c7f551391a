"""What is asked of an op's attributes, a frozen dataclass per op: most are not random, and do not assume finite numbers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from typing_extensions import Self


class OpAttributes:
    """The attributes of an op, whose dataclass says what differs."""

    def deterministic(self) -> Self:
        """The same without anything random."""
        return self

    def assuming_finite(self) -> Self:
        """The same for operands without NaN or infinities; most kernels keep NaN anyway."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Names and values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]  # subclasses are
        return {name: str(value) if isinstance(value, torch.dtype) else value for name, value in values.items()}
