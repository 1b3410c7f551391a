"""Values that are overwritten in place as values of their own.

``logits[logits < least] = -inf`` is ``masked_fill``, and ``x.div_(t)`` is ``x / t``, for everyone who reads the tensor
afterwards, if nobody sees the memory by another name.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from lz_compile.passes import layout
from lz_compile.passes.axes import shape_of
from lz_compile.passes.effects import Effects, grad_enabled
from lz_compile.passes.view import Call, hint_of, memory_of, read, tensor_of

#: Calls that order the scores of a row, or select among them.
ORDERING = frozenset({"topk", "sort", "argsort", "msort", "kthvalue"})
#: In-place methods of which every element of the result is a function of that element (and of other tensors).
_ELEMENTWISE = frozenset({"masked_fill", "add", "sub", "mul", "div", "clamp", "exp", "log", "neg"})

_UNKNOWN = -1


def with_values(graph: fx.Graph) -> int:
    """Let what is written in place be a value of its own, where nobody else looks at the memory; how many were.

    Graphs in which nothing is ordered are left as they are.
    """
    if not any(node.op.startswith("call") and is_ordering(node) for node in graph.nodes):
        return 0
    effects = Effects(graph)
    memory = _Memory(effects) if effects.has_mutations else None
    count = 0
    for node, _ in effects.writes_made:
        call = read(node)
        target = node.args[0] if node.args else None
        if memory is None or call is None or not isinstance(target, fx.Node) or not memory.is_unseen(node, target):
            continue
        if not _may_differ(call, target, grad_enabled(effects.ambient(node))):
            continue
        with graph.inserting_before(node):
            value = _value(graph, call, target)
        value.meta = {**node.meta, "example_value": _copied(target)}
        memory.add(value, target, node)
        target.replace_all_uses_with(value, delete_user_cb=memory.readers(target, node).__contains__)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        count += 1
    return count


def is_ordering(node: fx.Node) -> bool:
    """Whether a call orders the scores of a row, or selects among them."""
    return getattr(node.target, "__name__", node.target) in ORDERING


def _may_differ(call: Call, target: fx.Node, is_graded: bool) -> bool:
    """Whether it is a write that has a form without one: of the whole tensor, in its dtype, with its gradient."""
    tensor = tensor_of(target)
    if tensor is None or call.node.meta.get("example_value", tensor) is None:
        return False
    if tensor.requires_grad and not is_graded:  # the tensor keeps its gradient, which a new one would not have
        return False
    if not _is_dense(tensor) and layout.is_returned(target):  # a new one would have other strides
        return False
    if call.node.target is operator.setitem:
        mask, value = call.node.args[1:]
        chosen = tensor_of(mask)
        is_whole = chosen is not None and chosen.dtype == torch.bool and shape_of(chosen) == shape_of(tensor)
        return is_whole and _holds(tensor.dtype, value)
    if call.node.op != "call_method" or not call.is_inplace or call.node.args[0] is not target:
        return False
    if call.name == "scatter":
        return True
    if call.name not in _ELEMENTWISE or call.node.kwargs or not tensor.dim():
        return False
    others = [each for each in map(tensor_of, call.node.args[1:]) if each is not None]
    kinds = {each.dtype for each in others if each.dim()} - {torch.bool}
    return tensor.is_floating_point() and kinds <= {tensor.dtype}


def _holds(kind: torch.dtype, value: object) -> bool:
    """Whether a number is one of a dtype, so that filling with it is assigning it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return isinstance(value, bool)
    if kind.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(kind).max
    return isinstance(value, int) and abs(value) <= (1 if kind == torch.bool else torch.iinfo(kind).max)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether elements lie side by side, in whichever order."""
    expected = 1.0
    sides = [(_known(stride), _known(extent)) for stride, extent in zip(tensor.stride(), shape_of(tensor), strict=True)]
    for stride, extent in sorted(side for side in sides if side[1] != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def _known(size: Any) -> float:
    """A size, or what a symbolic one was traced with: asking it would guard it."""
    return size if isinstance(size, int) else hint_of(size)


def _copied(target: fx.Node) -> torch.Tensor:
    """What Dynamo would say of a new tensor with the values of ``target``."""
    tensor: torch.Tensor = target.meta["example_value"]
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _value(graph: fx.Graph, call: Call, target: fx.Node) -> fx.Node:
    if call.node.target is operator.setitem:
        return graph.call_method("masked_fill", (target, *call.node.args[1:]))
    arguments: tuple[Any, ...] = (target, *call.node.args[1:])
    return graph.call_method(str(call.node.target).removesuffix("_"), arguments, call.node.kwargs)


class _Memory:
    """Who shares memory with whom: by what made a tensor, and by what Dynamo says of it (``out=``, ``.data``)."""

    def __init__(self, effects: Effects) -> None:
        self._position = dict(effects.position)
        self._names = {node: _names(effects, node) for node in effects.calls}
        self._sharing: dict[Any, list[fx.Node]] = {}
        for node, names in self._names.items():
            for name in names:
                self._sharing.setdefault(name, []).append(node)

    def add(self, value: fx.Node, target: fx.Node, writer: fx.Node) -> None:
        """A value instead of what was written into ``target``; later views of that are views of it."""
        self._position[value] = self._position[writer]
        self._names[value] = self._names[target]
        for name in self._names[value]:
            self._sharing[name].append(value)

    def readers(self, node: fx.Node, writer: fx.Node) -> set[fx.Node]:
        """Who reads a tensor after a write."""
        at = self._position[writer]
        return {user for user in node.users if self._position[user] > at}

    def is_unseen(self, writer: fx.Node, target: fx.Node) -> bool:
        """Whether nobody reads the memory after a write but by the name of what was written."""
        at = self._position[writer]
        if _UNKNOWN in self._names[target]:
            return False
        for name in self._names[target]:
            for node in self._sharing[name]:
                if node.op in ("placeholder", "get_attr"):  # others hold it
                    return False
                is_other = node is not target and self._position[node] < at
                if is_other and any(self._position[user] > at for user in node.users):
                    return False
        return True


def _names(effects: Effects, node: fx.Node) -> set[Any]:
    """What memory may be told by: the node that made it, and the storages of the tensors in it."""
    example = node.meta.get("example_value")
    several = example if isinstance(example, (tuple, list)) else (example,)
    tensors = [each for each in several if isinstance(each, torch.Tensor)]
    return {_storage(each) for each in tensors} | ({effects.owner(node)} if tensors else set())


def _storage(tensor: torch.Tensor) -> int:
    memory = memory_of(tensor)
    return _UNKNOWN if memory is None else memory
