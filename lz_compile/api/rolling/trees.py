"""Containers of tensors, flat and back, as PyTorch's trees have them.

Where Dynamo traces PyTorch's own, it asks in every call what is in its table of containers. Tuples, lists and
dictionaries need no table; others go by it.
"""

from __future__ import annotations

from builtins import dict, isinstance, list, str, tuple, type  # noqa: UP029
from types import FunctionType, NoneType
from typing import Any

from torch import Tensor, device, dtype
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten

_LEAVES = (Tensor, NoneType, int, float, str, Module, FunctionType, dtype, device)


def leaves(tree: Any) -> list[Any]:
    """What a tree holds, None too."""
    if isinstance(tree, _LEAVES):
        return [tree]
    kind = type(tree)
    if kind is tuple or kind is list:
        found: list[Any] = []
        for each in tree:  # most are leaves, and Dynamo takes 3 ms for each call
            found += [each] if isinstance(each, _LEAVES) else leaves(each)
        return found
    if kind is dict:
        return [leaf for each in tree.values() for leaf in leaves(each)]
    return list(tree_leaves(tree))


def structure(tree: Any) -> str:
    """What containers a tree is of."""
    if isinstance(tree, _LEAVES):
        return "*"
    kind = type(tree)
    if kind is tuple or kind is list:
        text = "(" if kind is tuple else "["
        for each in tree:
            text += "*," if isinstance(each, _LEAVES) else structure(each) + ","
        return text
    if kind is dict:
        text = "{"
        for name, each in tree.items():
            text += f"{name}:" + structure(each) + ","
        return text
    return str(tree_structure(tree))


def rebuilt(tree: Any, left: list[Any]) -> Any:
    """The same containers around other leaves, which are taken from the front of a list."""
    if isinstance(tree, _LEAVES):
        return left.pop(0)
    kind = type(tree)
    if kind is tuple:
        return tuple([rebuilt(each, left) for each in tree])
    if kind is list:
        return [rebuilt(each, left) for each in tree]
    if kind is dict:
        return {name: rebuilt(each, left) for name, each in tree.items()}
    flat, spec = tree_flatten(tree)
    return tree_unflatten([left.pop(0) for _ in flat], spec)
