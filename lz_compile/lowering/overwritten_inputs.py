"""Inputs that a graph overwrites, as states in buffers: what reads them sees what was there before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from lz_compile.lowering.regions import behind_views

_ATEN = torch.ops.aten
_COPY = _ATEN.copy_.default
#: What Inductor drops where the result lies as the operand of that number does.
_CLONES = {_ATEN.clone.default: 0, _ATEN.copy.default: 1}
#: What Inductor may let write to its first operand.
_WRITES = (
    *(_ATEN.index_put.default, _ATEN._unsafe_index_put.default, _ATEN.slice_scatter.default),
    *(_ATEN.select_scatter.default, _ATEN.diagonal_scatter.default, _ATEN.as_strided_scatter.default),
)


def copy_what_is_overwritten(graph: fx.Graph) -> None:
    """Give memory of its own to what a program has cloned, where Inductor (2.13) would overwrite it or hand out an input.

    Inductor drops clones, then decides which writes are made in place, and overlooks (pytorch/pytorch#198270)

    - values that lie in what they are written to: ``x[:, places] = x.clone()[:, :2]``;
    - what one input hands another when it was overwritten itself: two that change places;
    - results that are an overwritten input: ``x[places] = 1; return x.clone()``.

    To be called ahead of Inductor's own passes. Nothing is copied that the program did not clone, but values of writes.
    """
    overwritten: set[fx.Node] = set()
    for call in graph.find_nodes(op="call_function", target=_COPY):
        into, value = call.args[:2]
        if _memory(value)[0] in overwritten:
            _copy(value, call)
        overwritten.add(into)
    for call in [node for node in graph.nodes if node.target in _WRITES]:
        for value in [node for node in call.all_input_nodes if node is not call.args[0]]:
            if _memory(value)[0] is _memory(call)[0]:
                _copy(value, call)
    results = graph.output_node()
    for result in results.all_input_nodes:
        memory, passed = _memory(result)
        clone = next((each for each in passed if each.target in _CLONES), None)
        if memory in overwritten and clone is not None:
            _copy(clone, *clone.users)
        elif memory in overwritten and result.target in _WRITES:
            _copy(result, results)


def _memory(node: Any) -> tuple[fx.Node, list[fx.Node]]:
    """Whose memory a node may read or write when it runs, and the writes and clones that lead to it, the last one first."""
    passed: list[fx.Node] = []
    while (node := behind_views(node)[0]).target in (*_WRITES, *_CLONES):
        passed.append(node)
        node = node.args[_CLONES.get(node.target, 0)]
    return node, passed


def _copy(value: fx.Node, *users: fx.Node) -> None:
    """Hand these users the same numbers in memory of their own, by what Inductor takes for no copy."""
    graph = value.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first) if value.op == "placeholder" else graph.inserting_after(value):
        copy = graph.call_function(_ATEN.maximum.default, (value, value))
    copy.meta = {**value.meta, "val": value.meta["val"].clone()}
    for user in users:
        user.replace_input_with(value, copy)


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
            kept = graph.call_function(_ATEN.clone.default, (node,))
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
