"""Where a call takes a tensor of one element as well as a number: a loop's counter becomes a stream of numbers there."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx

from lz_compile.passes.graph.purity import is_arithmetic
from lz_compile.passes.graph.view import read, tensor_of

_WIDE = (torch.float32, torch.float64)


def may_be_tensor(node: fx.Node, number: Any) -> Literal["any dtype", "own dtype", ""]:
    """Whether a call's number may be a tensor, and whether that has to be of the call's dtype.

    An operand of arithmetic may; so may the weight of ``lerp``, and ``alpha`` where two tensors are added.
    """
    call = read(node)
    if call is None or not is_arithmetic(node):
        return ""
    if call.name == "lerp":
        return "own dtype" if number is call.get("weight") else ""
    if any(given is number for given in node.args[:2]):
        return "any dtype"
    tensor, are_tensors = tensor_of(node), all(tensor_of(each) is not None for each in node.args[:2])
    is_alpha = call.name in ("add", "sub") and number is call.get("alpha") and len(node.args) >= 2
    return "own dtype" if is_alpha and are_tensors and tensor is not None and tensor.dtype in _WIDE else ""


def with_tensor_of_alpha(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """``add(x, y, alpha=number)`` as a call that takes a tensor for the number: target and arguments; None for others."""
    call = read(node)
    alpha = args[2] if len(args) > 2 else kwargs.get("alpha")
    if call is None or call.name not in ("add", "sub") or alpha is None or isinstance(alpha, (int, float)):
        return None
    return torch.addcmul, (*args[:2], alpha), {"value": -1 if call.name == "sub" else 1}
