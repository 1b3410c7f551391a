"""Inputs that a graph overwrites, as states in buffers: what reads them sees what was there before; results lie apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from lz_compile.lowering.regions import behind_views

_ATEN = torch.ops.aten
_COPY = _ATEN.copy_.default
_OVERWRITES = torch.ops.higher_order.auto_functionalized_v2
#: What Inductor drops where the result lies as the operand of that number does, and has its shape and dtype.
_CLONES = {
    **dict.fromkeys((_ATEN.clone.default, _ATEN.repeat.default, _ATEN.constant_pad_nd.default), 0),
    _ATEN.pow.Tensor_Scalar: 0,
    torch.ops.prims.convert_element_type.default: 0,
    _ATEN.copy.default: 1,
}
#: Where a graph notes what its results lie in.
_ORIGINS = "layerzero_origins"
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
    - what an input becomes as a view of numbers that are computed of it: ``x.copy_(x.roll(1))``;
    - results that are an overwritten input: ``x[places] = 1; return x.clone()``; and what a backward pass reads later.
    - what an operator of the program reads beside what it overwrites: ``overwrite(x, x.clone())``.

    To be called ahead of Inductor's own passes. Nothing is copied that the program did not clone, but values of writes.
    """
    memory: dict[fx.Node, fx.Node] = {}  # which a node may read or write when it runs
    for node in graph.nodes:
        before = _before(node)
        memory[node] = node if before is node else memory[before]
    overwritten: set[fx.Node] = set()
    for call in graph.find_nodes(op="call_function", target=_COPY):
        into, value = call.args[:2]
        if memory[value] in overwritten or _is_computed_view(value):
            _copy(value, call)
        overwritten.add(into)
    for call in [node for node in memory if node.target in (*_WRITES, _OVERWRITES)]:
        bases = cast("Any", call.kwargs["_all_bases"] if call.target is _OVERWRITES else call.args[:1])
        for value in [node for node in call.all_input_nodes if node not in bases]:
            if any(memory[value] is memory[into] and _is_cloned(value, into) for into in bases):
                _copy(value, call)
    results = graph.output_node()
    for result in results.all_input_nodes:
        if memory.get(result) in overwritten:
            clone = next((each for each in _history(result) if _is_clone(each)), None)
            if clone is not None:
                _copy(clone, *clone.users)
            elif result.target in _WRITES:
                _copy(result, results)
    results.meta[_ORIGINS] = _origins(results)


def _is_computed_view(value: Any) -> bool:
    """Whether it may be computed where it is written: Inductor takes a view for memory that was written before."""
    while _is_clone(value):
        value = value.args[_CLONES[value.target]]
    made, views = behind_views(value)
    return bool(views) and made.op == "call_function" and made.target not in _WRITES


def _before(node: Any) -> fx.Node:
    """What a node is a view of, writes to, or has the numbers of; itself, where it makes numbers."""
    node, _ = behind_views(node)
    return cast(
        "fx.Node", node.args[_CLONES.get(node.target, 0)] if node.target in _WRITES or _is_clone(node) else node
    )


def _is_clone(node: fx.Node) -> bool:
    if node.target not in _CLONES or (node.target is _ATEN.pow.Tensor_Scalar and node.args[1] != 1):
        return False
    values = [each.meta.get("val") for each in (node, cast("fx.Node", node.args[_CLONES[node.target]]))]
    return len({repr((each.shape, each.dtype)) for each in values if isinstance(each, torch.Tensor)}) < 2


def _is_cloned(value: fx.Node, into: fx.Node) -> bool:
    """Whether a program has copied a value of what it is written to; else eager PyTorch reads what it overwrites, too."""
    apart = {*_history(value)} - {*_history(into)}
    return any(_is_clone(each) and each.target is not _ATEN.copy.default for each in apart)


def _history(node: fx.Node) -> Iterator[fx.Node]:
    """The writes and clones that lead to a node, the last one first."""
    while (made := behind_views(node)[0]).target in _WRITES or _is_clone(made):
        yield made
        node = _before(made)


def _copy(value: fx.Node, *users: fx.Node) -> None:
    """Hand these users the same numbers in memory of their own, by what Inductor takes for no copy."""
    graph = value.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    held = value.meta["val"]
    has_order = not held.is_complex() and (held.itemsize > 1 or not held.is_floating_point())
    with graph.inserting_before(first) if value.op == "placeholder" else graph.inserting_after(value):
        if has_order:
            copy = graph.call_function(_ATEN.maximum.default, (value, value))
        else:
            copy = graph.call_function(torch.ops.prims.clone.default, (value,))
    copy.meta = {**value.meta, "val": held.clone(), "recompute": CheckpointPolicy.MUST_SAVE}
    for user in users:
        user.replace_input_with(value, copy)


def hand_over_copies(graph: fx.Graph) -> None:
    """Let a forward pass hand its backward copies of what it wrote to parts of its inputs.

    Inductor (2.13) makes such a write in place, and AOTAutograd, to which it is a tensor of its own, lets the backward pass
    use that memory for something else: the input changes. To be called on what becomes a forward pass, ahead of Inductor's
    own passes.
    """
    if not any(str(each.target).startswith("primals") for each in graph.find_nodes(op="placeholder")):
        return
    overwritten = {call.args[0] for call in graph.find_nodes(op="call_function", target=_COPY)}
    results = graph.output_node()
    for result in results.all_input_nodes:
        origin = result
        while (before := _before(origin)) is not origin:
            origin = before
        if origin in overwritten and any(each.target in _WRITES for each in _history(result)):
            _copy(result, results)


def keep_what_was(graph: fx.Graph) -> None:
    """Let a forward pass and its backward read a copy of inputs that are overwritten at last, in place.

    PyTorch (2.13) saves such an input, or computes again what was read of it, when the new values are there already:
    gradients come out wrong (pytorch/pytorch#197039). What only makes the new values reads the input itself.
    """
    if not any(str(each.target).startswith("tangents") for each in graph.find_nodes(op="placeholder")):
        return
    inputs = graph.find_nodes(op="placeholder")
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


def keep_results_apart(graph: fx.Graph) -> None:
    """Give results memory of their own again that Inductor (2.13) has made an input or another result of.

    It adds no zeros and multiplies by no ones, but what is written to ``x + torch.zeros_like(x)`` is not written to ``x``. To
    be called behind its passes, on a graph of which :func:`copy_what_is_overwritten` has noted where results lie.
    """
    results = graph.output_node()
    origins, before, first = _origins(results), results.meta.pop(_ORIGINS, []), dict[Any, Any]()
    if not origins or len(origins) != len(before):  # a subgraph may give one value, in no list
        return
    kept: list[Any] = list(cast("Any", results.args[0]))
    for place, (was, now) in enumerate(zip(before, origins, strict=True)):
        is_given = now is not None and now.op == "placeholder" and not now.name.startswith("tangents")
        is_other = now is not None and first.setdefault(now, was) is not was  # of new tensors on "meta" nothing is told
        if is_other or (is_given and now is not was):
            with graph.inserting_before(results):
                copy = graph.call_function(_ATEN.clone.default, (kept[place],))
            copy.meta = {**kept[place].meta, "val": kept[place].meta["val"].clone()}
            kept[place] = copy
    results.args = (kept, *results.args[1:])


def _origins(results: fx.Node) -> list[fx.Node | None]:
    """What each result is or is a view of; None for what is no tensor."""
    listed = results.args[0] if isinstance(results.args[0], (list, tuple)) else ()
    tensors = [isinstance(each, fx.Node) and isinstance(each.meta.get("val"), torch.Tensor) for each in listed]
    return [behind_views(each)[0] if is_tensor else None for each, is_tensor in zip(listed, tensors, strict=True)]


def _leading_to(calls: Iterable[fx.Node]) -> set[fx.Node]:
    """These calls, and what nobody else reads."""
    found, queue = set(calls), [operand for call in calls for operand in call.all_input_nodes]
    while queue:
        node = queue.pop()
        if node.op == "call_function" and node not in found and found.issuperset(node.users):
            found.add(node)
            queue.extend(node.all_input_nodes)
    return found
