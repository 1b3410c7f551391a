"""Masks that a model makes once and hands to layers that are computed again for gradients (``torch.utils.checkpoint``).

To such a layer, a graph of its own, a mask is an input that may hold anything: attention would read a bias of all pairs of
places. So the layer makes the mask itself, of what it is made of, and whoever still wants it as a whole is given the input.
"""

from __future__ import annotations

import torch
from torch import fx

from lz_compile.passes.formula import contraction, layout, moves, value_rules
from lz_compile.passes.formula.equal_values import only_computes
from lz_compile.passes.formula.expressions import is_constant
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.gradients import has_gradient
from lz_compile.passes.graph.view import Call, tensor_of

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
#: In the metadata of a mask that is made again: the name of the input that holds it. Of a call that it is made by: "".
_GIVEN_AS = "lz_given_as"
_MAKING = (value_rules.RULES.keys() | moves.RULES.keys() | value_rules.CASTS) - contraction.PRODUCTS
#: Of calls; masks of models take up to 60.
_MOST = 256


def make_again(module: fx.GraphModule) -> int:
    """Let layers that are computed again make the masks that they are given, in place; how many of these there are."""
    count, effects = 0, None
    for checkpoint in module.graph.find_nodes(op="call_function", target=CHECKPOINT):
        body = getattr(module, str(checkpoint.args[0].target), None)
        if not isinstance(body, fx.GraphModule) or len(checkpoint.args[0].users) != 1:
            continue
        effects = effects or Effects(module.graph)
        masks = {place: made for place, each in enumerate(checkpoint.args[1:]) if (made := _made(effects, each))}
        if masks and not effects.ambient(checkpoint).is_transformed:
            _make(checkpoint, body, masks)
            count += len(masks)
    if count:  # now, for layers take more inputs already
        module.recompile()
    return count


def give_back(graph: fx.Graph) -> int:
    """Read a mask off the input where somebody reads it as a whole still; how many there are."""
    again = [node for node in graph.nodes if _GIVEN_AS in node.meta]
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    read = [node for node in again if node.users and node.meta[_GIVEN_AS]]
    for node in read:
        node.replace_all_uses_with(inputs[node.meta[_GIVEN_AS]])
    for node in reversed(again):
        if not node.users:
            graph.erase_node(node)
    return len(read)


def _made(effects: Effects, mask: object) -> list[fx.Node]:
    """The calls that make a mask, in order; none where it is no mask, or may be another one by the time of the layer."""
    tensor = tensor_of(mask)
    if not isinstance(mask, fx.Node) or tensor is None or not _is_making(effects, mask):
        return []
    found, pending = set[fx.Node](), [mask]
    while pending and len(found) <= _MOST:
        node = pending.pop()
        found.add(node)
        pending += [each for each in node.all_input_nodes if each not in found and _is_making(effects, each)]
    read = found.union(each for node in found for each in node.all_input_nodes)
    compares = any(_is_truth(effects.calls[node]) for node in found)
    is_kept = not any(has_gradient(each) or effects.is_overwritten(each) for each in read)
    return sorted(found, key=effects.position.__getitem__) if compares and is_kept and not pending else []


def _is_making(effects: Effects, node: fx.Node) -> bool:
    call = effects.calls[node]
    if call is None or tensor_of(node) is None or effects.ambient(node).is_transformed or not only_computes(call):
        return False
    return call.name in _MAKING or layout.rearranges(call) or is_constant(call)


def _is_truth(call: Call | None) -> bool:
    """Whether a call compares, or joins what others did."""
    tensor = None if call is None else tensor_of(call.node)
    if call is None or tensor is None or is_constant(call) or layout.rearranges(call):
        return False
    return tensor.dtype == torch.bool


def _make(checkpoint: fx.Node, body: fx.GraphModule, masks: dict[int, list[fx.Node]]) -> None:
    placeholders = body.graph.find_nodes(op="placeholder")
    operands = list(checkpoint.args[1:])
    inside = {each: inner for each, inner in zip(operands, placeholders, strict=True) if isinstance(each, fx.Node)}
    calls = dict.fromkeys(node for made in masks.values() for node in made)
    for node in dict.fromkeys(each for call in calls for each in call.all_input_nodes):
        if node not in calls and node not in inside:
            operands.append(node)
            with body.graph.inserting_after(placeholders[-1]):
                inside[node] = body.graph.placeholder(node.name, type_expr=node.type)
            inside[node].target = inside[node].name  # another one may be called like that already
            inside[node].meta = dict(node.meta)
            placeholders.append(inside[node])
    checkpoint.args = (checkpoint.args[0], *operands)
    copies: dict[fx.Node, fx.Node] = {}
    with body.graph.inserting_before(next(node for node in body.graph.nodes if node.op != "placeholder")):
        for call in sorted(calls, key=list(checkpoint.graph.nodes).index):
            copies[call] = body.graph.node_copy(call, lambda each: copies.get(each) or inside[each])
            copies[call].meta = {**call.meta, _GIVEN_AS: ""}
    for place, made in masks.items():
        given, again = placeholders[place], copies[made[-1]]
        given.replace_all_uses_with(again)
        again.meta[_GIVEN_AS] = given.name
    body.recompile()
