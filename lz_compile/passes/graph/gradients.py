"""Through which nodes of a graph a backward pass goes: what nobody differentiates gets no gradient, rather than zeros."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import faking, grad_enabled
from lz_compile.passes.graph.view import called, memories_of, read, tensor_of, tensors_in, value_of
from lz_compile.passes.graph.writes import overwritten

#: In-place calls after which a tensor's note says whether it has a gradient by then, not whether it had one.
_CHANGING = frozenset({"detach", "requires_grad"})

#: Calls that go backward inside of a graph.
_DIFFERENTIATING = frozenset({"grad", "backward", "_autograd_grad"})


def has_gradient(node: Any) -> bool:
    """Whether what Dynamo noted for a node has a gradient, or any of several tensors."""
    return any(each.requires_grad for each in tensors_in(value_of(node)))


def _may_have(node: fx.Node) -> bool:
    """Whether a node may have a gradient: of tensors inside of a transform nothing is noted."""
    return has_gradient(node) or not memories_of(node)


def differentiated(graph: fx.Graph, effects: Effects) -> frozenset[fx.Node]:
    """The output, and the nodes to which gradients may come back from it.

    A view counts as what it is a view of, unless it is detached; inputs that are overwritten are results.
    """
    bases = _bases(graph, effects)
    touched = {node: {bases[node]} for node in graph.nodes}
    live, changed = {graph.output_node()}, set[fx.Node]()
    for node, call in effects.calls.items():
        written = {bases[target] for target in (() if call is None else overwritten(call))}
        touched[node] |= written
        live |= {base for base in written if base.op in ("placeholder", "get_attr")}
        read_here = {bases[each] for each in node.all_input_nodes}
        if call is not None and call.name in _DIFFERENTIATING:
            live |= read_here
        if call is not None and call.is_inplace and call.name in _CHANGING:
            changed |= read_here
    for node in reversed(graph.nodes):
        is_recorded = node.op == "output" or grad_enabled(effects.ambient(node))
        if is_recorded and not live.isdisjoint(touched[node]):
            live |= {bases[each] for each in node.all_input_nodes if _may_have(each) or bases[each] in changed}
    return frozenset(node for node in graph.nodes if not live.isdisjoint(touched[node]))


def left_behind(
    calls: Collection[fx.Node], live: Collection[fx.Node], gone: Collection[fx.Node] = ()
) -> set[fx.Node] | None:
    """What no gradient reaches any more once calls go, after others that are ``gone``; ``live`` nodes are differentiated.

    None where that is an input, too, which has its gradient, one of zeros perhaps, only because of them.
    """
    found = {*gone, *calls}
    waiting = [each for node in calls for each in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node in found or not has_gradient(node) or any(user in live and user not in found for user in node.users):
            continue
        if node.op in ("placeholder", "get_attr"):
            return None
        found.add(node)
        waiting += node.all_input_nodes
    return found


def _bases(graph: fx.Graph, effects: Effects) -> dict[fx.Node, fx.Node]:
    """By node, what it is a view or a part of, as autograd sees it."""
    bases: dict[fx.Node, fx.Node] = {}
    memories: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        call, memories[node] = read(node), set(memories_of(node))
        is_stopped = call is not None and (call.name == "detach" or call.arguments.get("#1") == "data")
        shown = [] if is_stopped else [each for each in node.all_input_nodes if memories[node] & memories[each]]
        if not memories[node]:  # of memory that cannot be told, names say what may be a view
            shown = [effects.owner(node)]
        bases[node] = bases.get(shown[0], node) if shown else node
    return bases


# ---- attachment ------------------------------------------------------------------------------------------------------
# Whether a tensor required a gradient before anything was written to it.
# What Dynamo notes for a tensor is the tensor itself: once something with a gradient is written to it, its note has one, too.


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
