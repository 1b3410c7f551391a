"""Calls of our own functions, which graphs hold as operators ``layerzero::<op>``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lz_compile.lowering.operands import Operands
from lz_compile.passes.graph.view import tensor_of


def is_own_call(op: str, node: fx.Node) -> bool:
    """Whether a node calls one of these, and somebody reads it."""
    packet = getattr(node.target, "overloadpacket", node.target) if node.op == "call_function" else None
    return bool(node.users) and getattr(packet, "_qualified_op_name", "") == f"layerzero::{op}"


def arguments_of(
    node: fx.Node, operands: type[Operands], *named: str
) -> tuple[dict[str, fx.Node], dict[str, torch.Tensor], dict[str, Any]]:
    """The operands that a call is given, what is known of these, and the arguments of other names, which come behind."""
    arguments: dict[str, Any] = dict(zip((*operands.names, *named), node.args, strict=False)) | node.kwargs
    given = {name: each for name in operands.names if isinstance(each := arguments.get(name), fx.Node)}
    tensors = {name: tensor for name, each in given.items() if (tensor := tensor_of(each)) is not None}
    return given, tensors, {name: arguments[name] for name in named}
