"""Calls on tensors of a class of their own (torchao's weights, say), spelled out as what they do with the tensors inside.

Such a tensor is one opaque operand of a call until AOTAutograd takes it apart, behind what is read here. A call whose result
is a plain tensor is traced with the tensors inside as inputs; these are the attributes by which the class itself gives them
(``__tensor_flatten__``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from lz_compile.passes.editing.edit import MayEdit
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import inner_tensors, is_subclass, rebuilt, tensor_of, tensor_operands
from lz_compile.passes.rewriting.core import wants_grad


def spell_out_subclasses(graph: fx.Graph, may_edit: MayEdit) -> int:
    """Spell out every such call that nothing is differentiated or cast around; how many there were."""
    functions = (node for node in graph.nodes if node.op == "call_function")
    calls = [node for node in functions if any(is_subclass(tensor_of(each)) for each in node.all_input_nodes)]
    if not calls:
        return 0
    effects, count = Effects(graph), 0
    overwritten = {effects.owner(target) for _, target in effects.writes_made}
    for node in calls:
        ambient = effects.ambient(node)
        result = tensor_of(node)
        is_moded = ambient.is_transformed or bool(ambient.autocast) or wants_grad(ambient, node.all_input_nodes)
        is_plain = result is not None and not is_subclass(result) and not is_moded
        is_kept = overwritten.isdisjoint(map(effects.owner, node.all_input_nodes))
        if is_plain and is_kept and may_edit(node):
            count += _replace(graph, node)
    return count


def _replace(graph: fx.Graph, node: fx.Node) -> int:
    """One call by the operations that it consists of; 0 where it is traced to others than these."""
    given = tensor_operands(node)
    inside = {each: list(inner_tensors(tensor_of(each))) for each in given}
    paths = [(each, path) for each in given for path, _ in inside[each]]
    values = [value for each in given for _, value in inside[each]]

    def run(*tensors: torch.Tensor) -> Any:
        left = iter(tensors)
        whole = {each: rebuilt(tensor_of(each), left) for each in given}
        arguments = fx.map_arg((node.args, dict(node.kwargs)), whole.__getitem__)
        return node.target(*arguments[0], **arguments[1])  # type: ignore[operator]  # it is a function

    with torch.no_grad():
        traced = make_fx(run)(*values)
    if any(each.op == "get_attr" for each in traced.graph.nodes):
        return 0
    with graph.inserting_before(node):
        tensors = [_attribute(graph, each, path) for each, path in paths]
        output = _copied(graph, traced.graph, tensors, node)
    node.replace_all_uses_with(output)
    graph.erase_node(node)
    return 1


def _attribute(graph: fx.Graph, node: fx.Node, path: Sequence[str]) -> fx.Node:
    """The tensor inside that attributes lead to."""
    for name in path:
        value = getattr(tensor_of(node), name)
        node = graph.call_function(getattr, (node, name))
        node.meta["example_value"] = value
    return node


def _copied(graph: fx.Graph, traced: fx.Graph, tensors: Sequence[fx.Node], place: fx.Node) -> fx.Node:
    """The nodes of a trace, over ``tensors``; the one that it gives."""
    found: dict[fx.Node, Any] = dict(
        zip((each for each in traced.nodes if each.op == "placeholder"), tensors, strict=True)
    )
    for node in traced.nodes:
        if node.op == "call_function":
            made = graph.node_copy(node, found.__getitem__)
            made.meta = {"example_value": node.meta["val"]}
            made.meta |= {name: place.meta[name] for name in ("stack_trace", "nn_module_stack") if name in place.meta}
            found[node] = made
    (result,) = (node.args[0] for node in traced.nodes if node.op == "output")
    output: fx.Node = found[result]
    return output
