"""Through which nodes of a graph a backward pass goes: what nobody differentiates gets no gradient, rather than zeros."""

from __future__ import annotations

from typing import Any

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.view import memories_of, read, tensors_in, value_of
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
