"""Equal nodes that kernels emitted for several layers become one, as a mask that all of them need.

Inductor does not do that for what it calls (a mask for SDPA would be made again for each layer), and a mask in the source
is made once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lz_compile.passes.builder import EMITTED
from lz_compile.passes.view import read, tensor_of

#: Calls that take no more of their first argument than its device.
_MADE_BESIDE = frozenset({"new_ones", "new_zeros", "new_full"})
_RANDOM = frozenset(
    {"dropout", "rand", "randn", "bernoulli", "rand_like", "randn_like", "empty", "new_empty", "empty_like"}
)


def share_equal(graph: fx.Graph) -> None:
    """Merge emitted nodes that compute the same and that only emitted nodes read."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        key = _key(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node and all(EMITTED in user.meta for user in (*node.users, *first.users)):
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _key(node: fx.Node) -> Any:
    """What a node computes, None where it may not be merged; tensors that lend their device only do not count."""
    call = read(node)
    if EMITTED not in node.meta or call is None or call.is_inplace or call.name in _RANDOM:
        return None
    if isinstance(node.target, torch._ops.HigherOrderOperator) or tensor_of(node) is None:
        return None
    arguments: Any = (node.args, node.kwargs)
    if call.name in _MADE_BESIDE and "dtype" in node.kwargs:
        lender = tensor_of(node.args[0])
        arguments = (lender.device if lender is not None else None, *node.args[1:], node.kwargs)
    return call.name, node.op, str(node.target), repr(_plain(arguments)), _kind(node)


def _kind(node: fx.Node) -> Any:
    """What else makes a difference: modes show in the dtype and in whether there is a gradient."""
    tensor = tensor_of(node)
    return None if tensor is None else (tensor.dtype, tensor.device, tensor.requires_grad)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((name, _plain(item)) for name, item in value.items()))
    return tuple(_plain(item) for item in value) if isinstance(value, (tuple, list)) else value
