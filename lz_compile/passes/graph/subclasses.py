"""Tensors of a class of their own around others, by what PyTorch asks such a class for (``__tensor_flatten__``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_subclass(value: Any) -> bool:
    """Whether a value is such a tensor."""
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def inner_tensors(value: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The plain tensors inside of one, each with the attributes that lead to it."""
    if not is_subclass(value):
        yield (), value
        return
    for name in value.__tensor_flatten__()[0]:
        for path, tensor in inner_tensors(getattr(value, name)):
            yield (name, *path), tensor


def rebuilt(value: Any, left: Iterator[torch.Tensor]) -> Any:
    """A tensor of the same class around other tensors."""
    if not is_subclass(value):
        return next(left)
    names, context = value.__tensor_flatten__()
    inner = {name: rebuilt(getattr(value, name), left) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())
