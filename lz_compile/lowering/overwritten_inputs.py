"""Inputs that a training step overwrites, as states in buffers: its backward pass reads what was there before."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_COPY = torch.ops.aten.copy_.default


def keep_what_was(graph: fx.Graph) -> None:
    """Let a forward pass and its backward read a copy of inputs that are overwritten at last, in place.

    PyTorch (2.13) saves such an input, or computes again what was read of it, when the new values are there already:
    gradients come out wrong (pytorch/pytorch#197039). What only makes the new values reads the input itself.
    """
    inputs = graph.find_nodes(op="placeholder")
    if not any(str(each.target).startswith("tangents") for each in inputs):
        return
    written = {call.args[0]: call for call in graph.find_nodes(op="call_function", target=_COPY)}
    updates = _leading_to(written.values())
    for node in inputs:
        others = (user for user in node.users if user not in updates)
        readers = [user for user in others if user.op == "output" or isinstance(user.meta.get("val"), torch.Tensor)]
        if node not in written or not readers:
            continue
        with graph.inserting_after(inputs[-1]):
            kept = graph.call_function(torch.ops.aten.clone.default, (node,))
        kept.meta = {**node.meta, "recompute": CheckpointPolicy.MUST_SAVE}
        kept.meta["val"] = node.meta["val"].clone()
        for user in readers:
            user.replace_input_with(node, kept)


def _leading_to(calls: Iterable[fx.Node]) -> set[fx.Node]:
    """These calls, and what nobody else reads."""
    found, queue = set(calls), [operand for call in calls for operand in call.all_input_nodes]
    while queue:
        node = queue.pop()
        if node.op == "call_function" and node not in found and found.issuperset(node.users):
            found.add(node)
            queue.extend(node.all_input_nodes)
    return found
