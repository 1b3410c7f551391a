"""What happens between two nodes of a graph: overwritten tensors and changed ambient modes.

Recognisers read a graph as if it were a set of equations. That is true only while nobody overwrites a tensor in place
and while autocast and gradient modes stay the same. This module says when.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.modes import Ambient, ambient_of, grad_enabled
from lz_compile.passes.graph.view import Call, memory_of, read, tensor_of
from lz_compile.passes.graph.writes import overwritten

_VIEWS = frozenset(
    "transpose permute t mT movedim view reshape flatten unflatten ravel view_as reshape_as expand expand_as unsqueeze "
    "squeeze contiguous alias getitem select narrow chunk split unbind tensor_split detach to type_as diagonal unfold "
    "as_strided getattr view_as_real view_as_complex real imag float half bfloat16 double type positive hsplit vsplit "
    "split_with_sizes broadcast_tensors swapaxes dropout pos adjoint conj resolve_conj resolve_neg cpu cuda atleast_1d "
    "atleast_2d atleast_3d slice einsum T mT H mH data _get_data_attr values ravel view_as_real".split()
)
#: What shows the memory of its input only where that has the dtype already.
_CASTS = frozenset({"to", "type_as", "type", "float", "half", "bfloat16", "double"})
_OVERLAPPING = frozenset({"expand", "expand_as", "unfold", "as_strided", "broadcast_to", "broadcast_tensors"})
_SPLITS = frozenset({"chunk", "split", "unbind", "tensor_split", "split_with_sizes", "hsplit", "vsplit"})
#: In-place calls whose result is not a pointwise function of what was there, or of which Dynamo notes no result.
_WRITERS = frozenset(
    {"setitem", "copy", "index_put", "index_copy", "index_add", "scatter", "index_fill", "requires_grad"}
)
#: In-place calls that change the shape or strides of a tensor. Dynamo knows only what it is after the last of them.
RESHAPERS = frozenset("transpose swapaxes swapdims t squeeze unsqueeze as_strided resize resize_as set".split())


@dataclass(frozen=True)
class _Mutation:
    position: int
    node: fx.Node
    target: fx.Node


@dataclass
class Look:
    """What a reader looked at: the nodes whose calls it read, and what it asked of :meth:`algebra.Region.reaches`.

    ``met`` are nodes whose value it met in the same formula under another node.
    """

    nodes: set[fx.Node] = field(default_factory=set)
    reached: set[tuple[fx.Node, frozenset[str]]] = field(default_factory=set)
    met: set[fx.Node] = field(default_factory=set)


class _Calls(dict[fx.Node, "Call | None"]):
    """Every node's call; notes who is asked for while somebody watches."""

    look: Look | None = None

    def __getitem__(self, node: fx.Node) -> Call | None:
        if self.look is not None:
            self.look.nodes.add(node)
        return super().__getitem__(node)

    def get(self, node: Any, default: Any = None) -> Any:
        if not isinstance(node, fx.Node):
            return default
        if self.look is not None:
            self.look.nodes.add(node)
        return super().get(node, default)


class Effects:
    """Mutations and ambient modes of one graph, indexed once.

    ``may_keep`` says whether what is computed of a module's tensors alone may be kept from call to call.
    """

    def __init__(self, graph: fx.Graph, *, may_keep: bool = True) -> None:
        self.may_keep = may_keep
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self._calls = _Calls((node, read(node)) for node in graph.nodes)
        self.calls: Mapping[fx.Node, Call | None] = self._calls
        self._mutations = [
            _Mutation(self.position[node], node, target)
            for node, call in self.calls.items()
            if call is not None
            for target in overwritten(call)
        ]
        #: By what may be seen of the memory that is overwritten (see :meth:`_names`).
        self._by_name: dict[object, list[_Mutation]] = {}
        for mutation in self._mutations:
            for name in self._names(self._path(mutation.target)):
                self._by_name.setdefault(name, []).append(mutation)
        #: Calls that change the shape of a tensor in place.
        reshapers = {node for node, call in self.calls.items() if call and call.is_inplace and call.name in RESHAPERS}
        self.reshapes = [each for each in self._mutations if each.node in reshapers]
        self._ambient = ambient_of(graph.nodes)
        self._reached: dict[tuple[fx.Node, frozenset[str]], bool] = {}
        #: Equal for nodes with equal values, where somebody told (see :mod:`formula.equal_values`).
        self.numbers: Mapping[fx.Node, int] = {}
        #: All nodes whose value a reader met in one formula under another node.
        self.met: set[fx.Node] = set()

    def name(self, node: fx.Node) -> str:
        """What a node calls, in one spelling; empty for what is no call."""
        call = self.calls.get(node)
        return "" if call is None else call.name

    @property
    def has_mutations(self) -> bool:
        """Whether anything in the graph is overwritten in place."""
        return bool(self._mutations)

    @property
    def writes_made(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """Every call that overwrites memory in place, with the node through which it does so."""
        return tuple((mutation.node, mutation.target) for mutation in self._mutations)

    @contextmanager
    def watched(self) -> Iterator[Look]:
        """Everything that is looked at inside; who watches outside sees it, too."""
        outer, self._calls.look = self._calls.look, Look()
        look = self._calls.look
        try:
            yield look
        finally:
            self._calls.look = outer
            self.note(look)

    def note(self, look: Look) -> None:
        """Something that was looked at before counts again."""
        if self._calls.look is not None:
            self._calls.look.nodes |= look.nodes
            self._calls.look.reached |= look.reached
            self._calls.look.met |= look.met

    def meet(self, node: fx.Node) -> None:
        """Note that the value of a node stands in one formula under another node, too."""
        self.met.add(node)
        if self._calls.look is not None:
            self._calls.look.met.add(node)

    def reaches(self, node: fx.Node, goal: frozenset[str], search: Callable[[], bool]) -> bool:
        """The answer of ``search``, which holds for the whole graph and is asked for once."""
        if self._calls.look is not None:
            self._calls.look.reached.add((node, goal))
        found = self._reached.get((node, goal))
        if found is None:
            found = self._reached[node, goal] = search()
        return found

    def ambient(self, node: fx.Node) -> Ambient:
        """The modes that ``node`` runs under."""
        return self._ambient[node]

    def current(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The node whose result ``reader`` sees when it reads ``node``: the last in-place result on exactly that tensor."""
        if not self._mutations:
            return node
        latest = node
        for mutation in self._between(node, self.position[node], self.position[reader]):
            if self._replaces(mutation, node):
                latest = mutation.node
        return latest

    def is_opaque(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether part of ``node`` was overwritten, or all of it through another alias, before ``reader`` reads it.

        Its value at that point is still the tensor ``node``, but no longer what the call that made it computes.
        """
        if not self._mutations:
            return False
        found = self._between(node, self.position[node], self.position[reader])
        return any(not self._replaces(mutation, node) for mutation in found)

    def _replaces(self, mutation: _Mutation, node: fx.Node) -> bool:
        call = self.calls[mutation.node]
        is_pointwise = call is not None and call.is_inplace and call.name not in _WRITERS
        return is_pointwise and self.whole(mutation.target) is self.whole(node)

    def overwritten_after(self, node: fx.Node, start: fx.Node, stop: fx.Node) -> fx.Node | None:
        """The first node after ``start`` and before ``stop`` that overwrites memory of ``node``."""
        after = max(self.position[start], self.position[node])
        return next((m.node for m in self._between(node, after, self.position[stop])), None)

    def stops_gradient(self, node: fx.Node, reader: fx.Node | None) -> bool:
        """Whether a value was made without gradients of what has one, and is read where they are recorded."""
        if reader is None or grad_enabled(self.ambient(node)) or not grad_enabled(self.ambient(reader)):
            return False
        return node in self._graded

    @cached_property
    def _graded(self) -> set[fx.Node]:
        """Nodes that have a gradient, and those that would have one if none were made where gradients are off."""
        found: set[fx.Node] = set()
        for node, ambient in self._ambient.items():
            tensor = tensor_of(node)
            is_made_of = not grad_enabled(ambient) and not found.isdisjoint(node.all_input_nodes)
            if is_made_of or (tensor is not None and tensor.requires_grad):
                found.add(node)
        return found

    def why_not_moved(self, node: fx.Node, place: fx.Node) -> str:
        """Why ``node`` would give something else if it were computed right before ``place``; empty where it would not.

        What is drawn at random, or writes memory, moves nowhere: that is for the caller to know.
        """
        first, last = sorted((node, place), key=self.position.__getitem__)
        if self.ambient(node) != self.ambient(place):
            return f"{node.name} and {place.name} run under other modes (gradients, autocast)"
        for operand in node.all_input_nodes:
            writer = self.overwritten_after(operand, first, last)
            if writer is not None:
                return f"{writer.name} overwrites {operand.name} between {first.name} and {last.name}"
        return ""

    def why_not_forwarded(self, value: fx.Node, store: fx.Node, load: fx.Node) -> str:
        """Why what ``load`` reads is not ``value``, which ``store`` put there; empty where it is.

        Whoever reads ``load`` later reads ``value`` instead: it must not be overwritten under any name until then.
        """
        if not self.ambient(value) == self.ambient(store) == self.ambient(load):
            return f"{value.name}, {store.name} and {load.name} run under other modes (gradients, autocast)"
        one, other = tensor_of(value), tensor_of(load)
        if one is not None and other is not None and one.requires_grad != other.requires_grad:
            return f"{value.name} and {load.name} differ in whether they have a gradient"
        if self.is_overwritten(value):
            return f"{value.name} is overwritten"
        return ""

    def why_not_kept(self, nodes: Iterable[fx.Node], last: fx.Node) -> str:
        """Which of ``nodes`` a backward pass must not keep, for it is overwritten after ``last``; empty if none is."""
        for node in nodes:
            for mutation in self._between(node, self.position[last], len(self.position)):
                # That two inputs may be one memory is no reason here: then the backward pass raises.
                if self.owner(mutation.target) is self.owner(node) or _share_storage(mutation.target, node):
                    return f"{mutation.node.name} overwrites {node.name}"
        return ""

    def writes(self, writer: fx.Node, node: fx.Node) -> bool:
        """Whether ``writer`` itself overwrites memory of ``node``."""
        own = (m.target for m in self._mutations if m.node is writer)
        return any(self._overlap(self._path(node), self._path(target)) for target in own)

    def writes_to(self, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Calls that overwrite memory of ``node`` (any part of what it was made in), with the node through which they do.

        That two inputs of different memory may be one in a later call is not asked: see ``ARCHITECTURE.md``.
        """
        names = {self.owner(node), memory_of(node)} - {None}
        found = {m.position: m for name in names for m in self._by_name.get(name, ())}
        return [(found[position].node, found[position].target) for position in sorted(found)]

    def is_overwritten(self, node: fx.Node) -> bool:
        """Whether anything in the graph overwrites memory of ``node`` after it was made."""
        return bool(self._between(node, self.position[node], len(self.position)))

    def first_user(self, node: fx.Node) -> fx.Node | None:
        """The first node that uses one that is overwritten, where all of that has happened by then."""
        users = [user for user in node.users if not self.writes(user, node)]
        first = min(users, key=self.position.__getitem__, default=None)
        if first is None:
            return None
        last = [*self.position][-1]
        return None if self.overwritten_after(node, first, last) is not None else first

    def reshaped_after_read(self, nodes: Collection[fx.Node], output: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """One of ``nodes`` and the call that changes its shape in place after another one read it (or, of ``output``, ever).

        The shape that Dynamo notes for such a node is the later one.
        """
        for mutation in self.reshapes:
            first = self.whole(mutation.target)
            for node in nodes:
                if self.whole(node) is first and self.position[node] < mutation.position:
                    readers = {user for user in node.users if user in nodes and user is not mutation.node}
                    if node is output or any(self.position[user] < mutation.position for user in readers):
                        return node, mutation.node
        return None

    def owner(self, node: fx.Node) -> fx.Node:
        """The node that allocated the memory which ``node`` shares (``node`` itself where it made its own)."""
        return self._path(node)[0]

    def whole(self, node: fx.Node) -> fx.Node:
        """The node that first produced this very tensor (in-place results are their input)."""
        call = self.calls.get(node)
        while call is not None and call.is_inplace and isinstance(call.input, fx.Node):
            node = call.input
            call = self.calls.get(node)
        return node

    def _path(self, node: fx.Node) -> list[fx.Node]:
        """From the storage's owner to ``node``, through views and in-place results."""
        path = [node]
        call = self.calls.get(node)
        while call is not None and (call.name in _VIEWS or call.is_inplace):
            source = self._aliased(call)
            if source is None:
                break
            path.append(source)
            call = self.calls.get(source)
        return path[::-1]

    def _aliased(self, call: Call) -> fx.Node | None:
        """The input whose memory a view shows; None where it is no view after all."""
        if call.name == "einsum" and len(call.node.all_input_nodes) > 1:  # of one tensor it may be a transpose
            return None
        source = call.input if isinstance(call.input, fx.Node) else next(iter(call.node.all_input_nodes), None)
        made, given = tensor_of(call.node), tensor_of(source)
        if call.name in _CASTS and made is not None and given is not None and made.dtype != given.dtype:
            return None
        indices = [tensor_of(each) for each in call.node.all_input_nodes if each is not source]
        if call.name == "getitem" and any(each is not None and each.dim() for each in indices):
            return None
        joined = self.calls.get(source) if source is not None and call.name == "getitem" else None
        if joined is not None and joined.name == "broadcast_tensors":
            index = call.arguments.get("#1")
            picked = joined.node.args[index] if isinstance(index, int) else None
            return picked if isinstance(picked, fx.Node) else source
        return source

    def _between(self, node: fx.Node, start: int, stop: int) -> list[_Mutation]:
        if not self._mutations:
            return []
        path = self._path(node)
        found = {m.position: m for name in self._names(path) for m in self._by_name.get(name, ())}
        inside = (found[position] for position in sorted(found) if start < position < stop)
        return [m for m in inside if self._overlap(path, self._path(m.target))]

    def _names(self, path: list[fx.Node]) -> set[object]:
        """What two tensors that may share memory have in common: an owner, a storage, or to be inputs of the graph."""
        names: set[object] = {path[0], memory_of(path[-1])}
        return names | ({"input"} if path[0].op == "placeholder" else set())

    def _overlap(self, first: list[fx.Node], second: list[fx.Node]) -> bool:
        if first[0] is not second[0]:
            return may_share(first[0], second[0]) or _share_storage(first[-1], second[-1])
        for depth, (one, other) in enumerate(zip(first, second, strict=False)):
            if one is not other:
                names = {call.name for call in map(self.calls.get, first[:depth]) if call is not None}
                return bool(names & _OVERLAPPING) or not self._are_disjoint_pieces(one, other)
        return True

    def _are_disjoint_pieces(self, one: fx.Node, other: fx.Node) -> bool:
        first, second = self.calls.get(one), self.calls.get(other)
        if first is None or second is None or first.name != "getitem" or second.name != "getitem":
            return False
        parent = self.calls.get(first.input)
        is_split = parent is not None and parent.name in _SPLITS and first.input is second.input
        return is_split and first.arguments.get("#1") != second.arguments.get("#1")


def may_share(one: fx.Node, other: fx.Node) -> bool:
    """Two inputs of a graph may be views of each other, which nothing in the graph tells; parameters are not."""
    inputs = [tensor_of(node) for node in (one, other) if node.op == "placeholder"]
    return len(inputs) == 2 and not any(isinstance(each, torch.nn.Parameter) for each in inputs)


def _share_storage(one: fx.Node, other: fx.Node) -> bool:
    """Whether Dynamo's own values of two nodes are the same memory, whatever made them so."""
    memory = memory_of(one)
    return memory is not None and memory == memory_of(other)
