"""Sizes of tensors, as numbers or as expressions where they are symbols. Nothing here adds a guard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import sympy
import torch

Size: TypeAlias = "int | sympy.Expr"
Shape: TypeAlias = "tuple[Size, ...]"


def as_size(value: int | torch.SymInt) -> Size:
    """An extent as a plain ``int``, or as the sympy expression behind a ``SymInt`` (adds no guard)."""
    if isinstance(value, int):
        return value
    expr: sympy.Expr = value.node.expr
    return int(expr) if expr.is_Integer else expr


def shape_of(tensor: torch.Tensor) -> Shape:
    """The shape of a (fake) tensor without guarding on symbolic extents."""
    return tuple(as_size(size) for size in tensor.shape)


def product(sizes: Iterable[Size]) -> Size:
    """The product of extents; an ``int`` where all of them are."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def is_one(size: Any) -> bool:
    """Whether a size is known to be one, so that the dimension broadcasts; a symbol never stands for one."""
    return isinstance(size, int) and size == 1
