"""Values that are overwritten in place as values of their own.

``logits[logits < least] = -inf`` is ``masked_fill``, and ``x.div_(t)`` is ``x / t``, for everyone who reads the tensor
afterwards, if nobody sees the memory by another name.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lz_compile.passes.axes import shape_of
from lz_compile.passes.effects import Effects
from lz_compile.passes.view import Call, tensor_of

#: Calls that order the scores of a row, or select among them.
ORDERING = frozenset({"topk", "sort", "argsort", "msort", "kthvalue"})
#: In-place methods of which every element of the result is a function of that element (and of other tensors).
_ELEMENTWISE = frozenset({"masked_fill", "add", "sub", "mul", "div", "clamp", "exp", "log", "neg", "and", "or", "not"})


def with_values(graph: fx.Graph) -> int:
    """Let what is written in place be a value of its own, where nobody else looks at the memory; how many were.

    Graphs in which nothing is ordered are left as they are.
    """
    if not any(node.op.startswith("call") and is_ordering(node) for node in graph.nodes):
        return 0
    effects = Effects(graph)
    count = 0
    for node, target in effects.writes_made:
        call = effects.calls[node]
        if call is None or not _may_differ(call, target) or not _is_unseen(effects, node, target):
            continue
        with graph.inserting_before(node):
            value = _value(graph, call, target)
        value.meta = dict(node.meta)
        value.meta["example_value"] = target.meta["example_value"]
        later = {user for user in target.users if effects.position.get(user, -1) > effects.position[node]}
        target.replace_all_uses_with(value, delete_user_cb=later.__contains__)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        return count + 1 + with_values(graph)  # what is an effect of what has changed
    return count


def is_ordering(node: fx.Node) -> bool:
    """Whether a call orders the scores of a row, or selects among them."""
    return getattr(node.target, "__name__", node.target) in ORDERING


def _may_differ(call: Call, target: fx.Node) -> bool:
    """Whether it is a write that has a form without one: of the whole tensor, in its dtype."""
    tensor = tensor_of(target)
    if tensor is None or call.node.meta.get("example_value", tensor) is None:
        return False
    if call.node.target is operator.setitem:
        mask, value = call.node.args[1:]
        chosen = tensor_of(mask)
        is_whole = chosen is not None and chosen.dtype == torch.bool and shape_of(chosen) == shape_of(tensor)
        return is_whole and isinstance(value, (int, float))
    if call.node.op != "call_method" or not call.is_inplace or call.node.args[0] is not target:
        return False
    if call.name == "scatter":
        return True
    if call.name not in _ELEMENTWISE or call.node.kwargs:
        return False
    others = [each for each in map(tensor_of, call.node.args[1:]) if each is not None]
    kinds = {each.dtype for each in others if each.dim()} - {torch.bool}
    return tensor.is_floating_point() and kinds <= {tensor.dtype}


def _value(graph: fx.Graph, call: Call, target: fx.Node) -> fx.Node:
    if call.node.target is operator.setitem:
        return graph.call_method("masked_fill", (target, *call.node.args[1:]))
    arguments: tuple[Any, ...] = (target, *call.node.args[1:])
    return graph.call_method(str(call.node.target).removesuffix("_"), arguments, call.node.kwargs)


def _is_unseen(effects: Effects, writer: fx.Node, target: fx.Node) -> bool:
    """Whether nobody reads the memory after a write but by the name of what was written."""
    owner = effects.owner(target)
    if effects.calls.get(owner) is None:  # an input of the graph: others hold it
        return False
    at = effects.position[writer]
    older = [node for node in effects.calls if effects.position[node] < at and node is not target]
    return not any(
        effects.position[user] > at
        for node in older
        if tensor_of(node) is not None and effects.owner(node) is owner
        for user in node.users
    )
