"""What a call is whatever it is given: a cast, or a tensor that is filled with one number."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lz_compile.passes.formula.expressions import plain_number, rounded
from lz_compile.passes.graph.view import Call, tensor_of

CASTS = frozenset(
    {"to", "float", "half", "bfloat16", "double", "type_as", "type", "bool", "_to_copy", "convert_element_type"}
)


_CONSTANTS: Mapping[str, float | None] = {
    "tensor": None,
    "scalar_tensor": None,
    "full": None,
    "full_like": None,
    "new_full": None,
    "new_tensor": None,
    "zeros": 0.0,
    "zeros_like": 0.0,
    "new_zeros": 0.0,
    "ones": 1.0,
    "ones_like": 1.0,
    "new_ones": 1.0,
}


def is_cast(call: Call) -> bool:
    """Whether the call changes the dtype only (or nothing)."""
    if call.name not in CASTS:
        return False
    source, result = tensor_of(call.input), tensor_of(call.node)
    if source is None or result is None or source.device != result.device:
        return False
    return result.is_floating_point() or result.dtype == torch.bool


def narrows(call: Call) -> bool:
    """Whether a cast goes to a dtype of smaller range."""
    kinds = [tensor_of(node).dtype for node in (call.input, call.node)]  # type: ignore[union-attr]
    return all(kind.is_floating_point for kind in kinds) and torch.finfo(kinds[1]).max < torch.finfo(kinds[0]).max


def is_constant(call: Call) -> bool:
    """Whether the call makes a tensor that is filled with one number (or with nothing in particular)."""
    return call.name in ("empty", "empty_like", "new_empty") or constant_value(call) is not None


def constant_value(call: Call) -> int | float | None:
    """The value of a tensor that is filled with one number, None for others."""
    if call.name not in _CONSTANTS or tensor_of(call.node) is None:
        return None
    filled = _CONSTANTS[call.name]
    value = filled if filled is not None else _fill_value(call)
    return None if value is None else rounded(value, tensor_of(call.node).dtype)  # type: ignore[union-attr]


def _fill_value(call: Call) -> int | float | None:
    if "fill_value" in call.arguments:
        return plain_number(call.get("fill_value"))
    position = {"full": "#1", "full_like": "#1", "new_full": "#2", "new_tensor": "#1"}.get(call.name, "input")
    value = call.arguments.get(position, call.get("data") if call.name == "tensor" else None)
    return plain_number(value)
