"""A graph module as it was: its nodes, their metadata and what its modules hold, to be compared with and put back.

Dynamo keeps what it knows of parameters on the module and on nodes, so the module object must stay; only its graphs are
exchanged.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from lz_compile.passes.graph.refusal import held_by
from lz_compile.passes.graph.view import is_subclass, memory_of, target_name, tensors_in

_HELD = ("_modules", "_parameters", "_buffers")


class Was(NamedTuple):
    """A node as it was: its arguments are those of then, whatever became of the node."""

    node: fx.Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> Was:
        """A node as it is now. Arguments never change in place, metadata does."""
        return cls(node, node.op, node.target, node.args, node.kwargs, dict(node.meta))

    def is_as_before(self) -> bool:
        """Whether the node still makes the same call with the same metadata."""
        now = self.node
        is_same_call = self.op == now.op and self.target == now.target
        return (
            is_same_call and _holds_same(self.meta, now.meta) and same((self.args, self.kwargs), (now.args, now.kwargs))
        )


def _holds_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(other[name] is value for name, value in one.items())


def same(one: Any, other: Any) -> bool:
    """Whether two arguments are equal, NaN to itself included."""
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, slice) and isinstance(other, slice):
        return all(same(*pair) for pair in ((one.start, other.start), (one.stop, other.stop), (one.step, other.step)))
    return one is other or (type(one) is type(other) and not isinstance(one, (fx.Node, torch.Tensor)) and one == other)


class _Graph:
    """One graph module of several."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = module.graph
        self.nodes = [Was.of(node) for node in module.graph.nodes]
        self.held = {name: dict(getattr(module, name)) for name in _HELD}

    def attribute(self, path: str) -> Any:
        first, _, rest = path.partition(".")
        held = next((found[first] for found in self.held.values() if first in found), None)
        found = getattr(self.module, first) if held is None else held
        return operator.attrgetter(rest)(found) if rest else found

    def holds_others(self) -> bool:
        return not all(_holds_same(held, getattr(self.module, name)) for name, held in self.held.items())

    def has_other_nodes(self) -> bool:
        now = list(self.module.graph.nodes)
        if len(now) != len(self.nodes):
            return True
        return any(was.node is not node or not was.is_as_before() for was, node in zip(self.nodes, now, strict=True))

    def restore(self) -> None:
        if self.holds_others():
            for name, held in self.held.items():
                getattr(self.module, name).clear()
                getattr(self.module, name).update(held)
        if not self.has_other_nodes():
            return
        fresh = fx.Graph(tracer_cls=self.graph._tracer_cls)
        twins: dict[fx.Node, fx.Node] = {}
        for was in self.nodes:
            args, kwargs = fx.map_arg((was.args, was.kwargs), twins.__getitem__)
            twin = fresh.create_node(was.op, was.target, args, kwargs, was.node.name, was.node.type)
            twin.meta = dict(was.meta)  # a graph may be put back again
            for name, value in vars(was.node).items():
                if name.startswith("_dynamo"):
                    setattr(twin, name, value)
            twins[was.node] = twin
        self.module.graph = fresh


def kind_of(value: Any, memories: dict[int | None, int]) -> str:
    """All of a value but its numbers; ``memories`` numbers those that tensors lie in."""
    if isinstance(value, (tuple, list)):
        return str([kind_of(each, memories) for each in value])
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{value} {value.node.hint}"
    if isinstance(value, (int, float, complex, str)):
        return repr(value)
    if is_subclass(value):
        inner = [kind_of(each, memories) for each in tensors_in(value)]
        return f"{type(value).__qualname__} {value.__tensor_flatten__()[1]} {tuple(value.shape)} {inner}"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    memory = memories.setdefault(memory_of(value), len(memories))
    is_plain = value.layout is torch.strided and not value.is_nested
    lies = (value.stride(), value.storage_offset(), memory) if is_plain else value.layout
    shape: tuple[Any, ...] = tuple(value.shape)
    hints = [size.node.hint for size in shape if isinstance(size, torch.SymInt)]
    return f"{value.dtype} {value.device} {shape} {hints} {lies} {value.requires_grad}"


class Snapshot:
    """A graph module, and every graph module inside of it, as they were when this was made."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._graphs = [_Graph(child) for child in module.modules() if isinstance(child, fx.GraphModule)]

    @property
    def nodes(self) -> list[Was]:
        """Of the outermost graph."""
        return self._graphs[0].nodes

    def attribute(self, path: str) -> Any:
        """What a ``get_attr`` node of the outermost graph stood for."""
        return self._graphs[0].attribute(path)

    def lines(self) -> Iterator[str]:
        """Everything that decides about what is computed, whatever nodes are called."""
        for graph in self._graphs:
            names = {was.node: f"n{index}" for index, was in enumerate(graph.nodes)}
            memories: dict[int | None, int] = {}
            for was in graph.nodes:
                arguments = fx.map_arg((was.args, was.kwargs), names.__getitem__)
                kind = kind_of(was.meta.get("example_value"), memories)
                held = self._told(graph.attribute(str(was.target))) if was.op == "get_attr" else ""
                yield f"{names[was.node]} {was.op} {target_name(was.op, was.target)} {arguments} {kind} {held}"

    def _told(self, held: Any) -> str:
        """Which of the graphs this is (they are told in this order), or the values of a tensor."""
        if isinstance(held, torch.Tensor):
            return _digest(held)
        return next(
            (str(index) for index, graph in enumerate(self._graphs) if graph.module is held), type(held).__name__
        )

    def differs(self) -> bool:
        """Whether any of the graphs, or of the modules that they hold, has been changed since."""
        return any(graph.holds_others() or graph.has_other_nodes() for graph in self._graphs)

    def restore(self) -> None:
        """Put back what has been changed: graphs of equal nodes (with names and metadata), and the modules beside them.

        Nodes of a graph that has not been changed stay the same ones.
        """
        for graph in self._graphs:
            graph.restore()


def described(nodes: Iterable[fx.Node], held: Mapping[str, Any], given: Iterable[fx.Node] = ()) -> Iterator[str]:
    """What calls compute of what is given, whatever they are called; what else they read is named."""
    names = {node: f"i{index}" for index, node in enumerate(given)}
    for index, node in enumerate(nodes):
        names[node] = f"n{index}"
        arguments = fx.map_arg((node.args, node.kwargs), lambda each: names.get(each, each.name))
        yield f"n{index} {node.op} {target_name(node.op, node.target)} {arguments}"
        if node.op == "get_attr":
            yield from _held_value(held[str(node.target)])


def _held_value(value: Any) -> Iterator[str]:
    """What the body of a loop computes; of a tensor, its values."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {_digest(value)}"
    elif isinstance(value, fx.GraphModule):
        yield from described(value.graph.nodes, held_by(value.graph.nodes))
    else:
        yield repr(value)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(repr(tensor.tolist()).encode()).hexdigest()
