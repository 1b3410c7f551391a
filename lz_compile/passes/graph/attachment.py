"""Whether a tensor required a gradient before anything was written to it.

What Dynamo notes for a tensor is the tensor itself: once something with a gradient is written to it, its note has one, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.fakes import faking
from lz_compile.passes.graph.view import called, tensor_of
from lz_compile.passes.graph.writes import overwritten


def note_as_handed_in(graph: fx.Graph, inputs: Sequence[Any]) -> None:
    """Let the notes of a graph's inputs have a gradient only where the inputs themselves do."""
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=False):
        noted = tensor_of(node)
        if noted is not None and isinstance(value, torch.Tensor) and noted.requires_grad and not value.requires_grad:
            node.meta["example_value"] = noted.detach()


def is_made_attached(node: fx.Node, effects: Effects) -> bool:
    """Whether a tensor required a gradient as it was made: its call is made again, on operands as they were then."""
    noted = tensor_of(node)
    if noted is None or not noted.requires_grad:
        return False
    if node.op not in ("call_function", "call_method") or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True

    call = effects.calls[node]
    targets = [] if call is None else overwritten(call)

    def as_read(operand: fx.Node) -> Any:
        value = operand.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        is_later = effects.is_overwritten(operand) and effects.overwritten_after(operand, operand, node) is None
        read_then = value.detach().requires_grad_(not is_later or is_made_attached(operand, effects))
        if operand not in targets:
            return read_then
        with torch.enable_grad():
            return read_then.clone()  # PyTorch writes to no leaf

    with faking(noted.fake_mode, effects.ambient(node)):  # type: ignore[attr-defined]
        made = called(node.target, *fx.map_arg((node.args, node.kwargs), as_read))
    return isinstance(made, torch.Tensor) and made.requires_grad
