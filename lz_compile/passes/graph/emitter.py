"""Calls appended to a graph one by one, each with what Dynamo would know of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.passes.graph.modes import Ambient, faking
from lz_compile.passes.graph.view import EMITTED, value_of

_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


def origin_of(node: fx.Node) -> dict[str, Any]:
    """The metadata that says where in the source a node comes from, and what the source has annotated it with."""
    return {key: node.meta[key] for key in _ORIGIN if key in node.meta}


def provenance(template: fx.Node) -> dict[str, Any]:
    """The metadata that says where a node comes from, and that it is ours, for what replaces ``template``."""
    return {**origin_of(template), EMITTED: True}


class Emitter:
    """Appends calls to a graph at its insertion point, with metadata. ``like`` is where they come from in the source.

    Example values are computed ``within`` a mode of its user's.
    """

    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(self, graph: fx.Graph, mode: Any, ambient: Ambient, like: fx.Node) -> None:
        self.graph = graph
        self.like = like
        self.mode = mode
        self.ambient = ambient

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A function, or a method by its name."""
        op = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta.update(origin_of(self.like))
        given, named = fx.map_arg((node.args, node.kwargs), value_of)
        node.meta["example_value"] = self.compute(_function(target), *given, **named)
        return node

    def copied(self, value: fx.Node) -> fx.Node:
        """A tensor in order, and in memory of its own even where the value is in order already."""
        return self.call("clone", value, memory_format=torch.contiguous_format)

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The example value of a call."""
        with faking(self.mode, self.ambient), self.within():
            return function(*pytree.tree_map(readable, args), **pytree.tree_map(readable, kwargs))


def replaced(node: fx.Node, value: fx.Node | None, before: fx.Node, *, is_wanted: bool) -> bool:
    """Let ``value``, made ahead of a node, take its place; or erase all that was made after ``before``. Whether it did."""
    if value is None or not is_wanted:
        while node.prev is not before:
            node.graph.erase_node(node.prev)
        return False
    value.meta = {**node.meta, **value.meta}
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
    return True


def readable(value: Any) -> Any:
    """A tensor, or one in other memory for a view that PyTorch does not read again, for its base was written to since."""
    if isinstance(value, torch.Tensor) and value._is_view():
        try:
            value.grad_fn  # noqa: B018  what is asked of a view before it is read
        except RuntimeError:
            empty = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
            return empty.requires_grad_(value.requires_grad)
    return value


def _function(target: Any) -> Callable[..., Any]:
    if not isinstance(target, str):
        return target  # type: ignore[no-any-return]
    return lambda self, *args, **kwargs: getattr(self, target)(*args, **kwargs)
