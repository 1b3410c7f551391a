"""Equal nodes that kernels emitted for several layers, under equal modes, become one, as a mask that all of them need.

Inductor does not do that for what it calls (a mask for SDPA would be made again for each layer), and a mask in the source
is made once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.effects import may_share
from lz_compile.passes.graph.modes import Ambient, ambient_of, grad_enabled
from lz_compile.passes.graph.view import EMITTED, memory_of, read, tensor_of
from lz_compile.passes.graph.writes import overwritten

#: Calls that take no more of their first argument than its device.
_MADE_BESIDE = frozenset({"new_ones", "new_zeros", "new_full"})
_RANDOM = frozenset(
    {"dropout", "rand", "randn", "bernoulli", "rand_like", "randn_like", "empty", "new_empty", "empty_like"}
)


def share_equal(graph: fx.Graph) -> None:
    """Merge emitted nodes that compute the same, and of whose memory nobody can tell: only emitted nodes read it.

    What anybody else reads stays a tensor of its own, under whatever name (it may be written to, here or by who calls the
    graph), and what is computed of memory that is overwritten is another thing the next time.
    """
    seen: dict[Any, fx.Node] = {}
    seen_by_others, overwritten_ones = _read_by_others(graph), _overwritten(graph)
    ambient = ambient_of(graph.nodes)
    for node in list(graph.nodes):
        key = _key(node, ambient[node])
        if key is None:
            continue
        first = seen.setdefault(key, node)
        own = {memory_of(node), memory_of(first)}
        used = own | {memory_of(each) for each in node.all_input_nodes}
        if first is not node and own.isdisjoint(seen_by_others) and used.isdisjoint(overwritten_ones):
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _read_by_others(graph: fx.Graph) -> set[int | None]:
    """The memory of which somebody reads anything whom no kernel emitted; what has no memory to be told counts."""
    readers = (node for node in graph.nodes if EMITTED not in node.meta)
    return {None} | {memory_of(each) for node in readers for each in node.all_input_nodes if EMITTED in each.meta}


def _overwritten(graph: fx.Graph) -> set[int | None]:
    """The memory that is written to; of an input, that of all inputs that may be the same."""
    calls = (call for call in map(read, graph.nodes) if call is not None)
    targets = {memory_of(target) for call in calls for target in overwritten(call)}
    inputs = [node for node in graph.find_nodes(op="placeholder") if tensor_of(node) is not None]
    written = [node for node in inputs if memory_of(node) in targets]
    return targets | {memory_of(node) for node in inputs if any(may_share(node, each) for each in written)}


def _key(node: fx.Node, ambient: Ambient) -> Any:
    """What a node computes, and under which modes; None where it may not be merged.

    Modes do not show in the result: a view that is taken without gradients says that it has one. Tensors that lend their
    device only do not count.
    """
    call = read(node)
    if EMITTED not in node.meta or call is None or call.is_inplace or call.name in _RANDOM:
        return None
    if isinstance(node.target, torch._ops.HigherOrderOperator) or tensor_of(node) is None:
        return None
    arguments: Any = (node.args, node.kwargs)
    if call.name in _MADE_BESIDE and "dtype" in node.kwargs:
        lender = tensor_of(node.args[0])
        arguments = (lender.device if lender is not None else None, *node.args[1:], node.kwargs)
    modes = ambient.autocast, grad_enabled(ambient), ambient.other
    return call.name, node.op, str(node.target), repr(_plain(arguments)), _kind(node), modes


def _kind(node: fx.Node) -> Any:
    """What else makes a difference."""
    tensor = tensor_of(node)
    return None if tensor is None else (tensor.dtype, tensor.device, tensor.requires_grad)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((name, _plain(item)) for name, item in value.items()))
    return tuple(_plain(item) for item in value) if isinstance(value, (tuple, list)) else value
