"""Conditions as the numbers zero and one, and what holds integers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from lz_compile.passes.graph.view import Call, is_boolean, tensor_of

#: Calls that may give integers of what are none.
CASTS = frozenset({"to", "type", "type_as", "long", "int", "short", "char", "byte", "_to_copy", "convert_element_type"})


def is_integer(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds integers."""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def integers_of(nodes: Iterable[fx.Node]) -> frozenset[torch.dtype]:
    """The dtypes of those that hold integers."""
    tensors = [tensor_of(node) for node in nodes]
    return frozenset(tensor.dtype for tensor in tensors if tensor is not None and is_integer(tensor))


def is_count(call: Call) -> bool:
    """Whether a condition becomes the integer zero or one."""
    result = tensor_of(call.node)
    return call.name in CASTS and is_boolean(call.input) and result is not None and is_integer(result)


def chooses_numbers(call: Call) -> bool:
    """Whether it is a condition that is given two numbers; of tensors, what is not chosen may be no number."""
    return all(isinstance(call.get(name), (int, float)) for name in ("input", "other"))
