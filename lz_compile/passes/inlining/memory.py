"""Memory that a graph made, by the views that its nodes are of it: what each shows once a value took its place.

A tensor that is overwritten becomes another tensor. Whoever reads it later by a name that it had before reads a view of
that one: the same calls are made again. What others hold, or what no call tells, is memory that stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground.sizes import Size, shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.moves import order_in_memory
from lz_compile.passes.graph.effects import RESHAPERS, Effects
from lz_compile.passes.graph.emitter import Emitter
from lz_compile.passes.graph.view import called, known_tensor, memories_of, read, tensor_of, value_of

#: Views that hold all that they are views of, told by a shape; others that are undone by what they are.
_RESHAPES = frozenset("view reshape flatten unflatten ravel unsqueeze squeeze view_as reshape_as".split())
_TURNS = frozenset("transpose t mT T permute".split())
#: Writes after which a tensor is something else than numbers of the same place.
_ODD = RESHAPERS | {"requires_grad", "detach", "rename"}

#: The tensor of which another is a slice along one dimension, which dimension, where, and whether the other one lacks it.
Cut: TypeAlias = "tuple[View, int, slice, bool]"


@dataclass(eq=False)
class View:
    """A tensor of some memory: the nodes that are this very tensor, the first of which ``made`` it of its ``parent``.

    ``arguments`` are those of that call in the graph as it was.
    """

    memory: Memory
    made: fx.Node
    arguments: tuple[Any, Any]
    parent: View | None = None
    names: list[fx.Node] = field(default_factory=list)
    #: Where it is read last in the graph as it was.
    last: int = -1
    #: What shows it since so many writes were values.
    now: fx.Node | None = None
    version: int = 0

    def above(self) -> Iterator[View]:
        """This view, what it is a view of, and so on."""
        view: View | None = self
        while view is not None:
            yield view
            view = view.parent

    def tensors(self) -> list[View]:
        """The same without what holds several pieces, as ``chunk`` does."""
        return [each for each in self.above() if tensor_of(each.made) is not None]

    def cut(self) -> Cut | None:
        """Where this is a slice along one dimension."""
        whole = next((each for each in self.tensors() if each is not self), None)
        own, other = tensor_of(self.made), None if whole is None else tensor_of(whole.made)
        if whole is None or own is None or other is None or own.dtype != other.dtype:
            return None
        if any(_is_detached(each.made) for each in takewhile(lambda each: each is not whole, self.above())):
            return None  # what is written to it gives the tensor no gradient
        shape, strides = [*own.shape], [*own.stride()]
        offset = own.storage_offset() - other.storage_offset()
        if not all(isinstance(each, int) for each in (*shape, *strides, *other.shape, *other.stride(), offset)):
            return None
        drops = len(shape) == other.dim() - 1
        for dim in range(other.dim() if drops or len(shape) == other.dim() else 0):
            unit = other.stride(dim)
            size, stride = (1, unit) if drops else (shape[dim], strides[dim])
            behind = dim if drops else dim + 1
            around = [*shape[:dim], other.shape[dim], *shape[behind:]], [*strides[:dim], unit, *strides[behind:]]
            is_slice = unit and size and (stride or size == 1)  # and no expansion
            if is_slice and around == ([*other.shape], [*other.stride()]) and not (offset % unit or stride % unit):
                start, step = offset // unit, stride // unit if size > 1 else 1
                return whole, dim, slice(start, start + (size - 1) * step + 1, step), drops
        return None

    @property
    def is_whole(self) -> bool:
        """Whether it holds every element of its parent, by a call that can be undone, and so do views of that."""
        return (
            self.parent is not None and self.shows_all and order_in_memory(known_tensor(self.parent.made)) is not None
        )

    @property
    def shows_all(self) -> bool:
        """Whether it holds every element of its parent, by a call that can be undone."""
        if self.parent is None:
            return False
        own, whole = tensor_of(self.made), tensor_of(self.parent.made)
        call = read(self.made)
        if own is None or whole is None or call is None or own.is_complex() != whole.is_complex():
            return False
        is_undone = call.name in _RESHAPES or _turned(self.made) is not None
        return is_undone and own.dtype == whole.dtype


@dataclass(eq=False)
class Memory:
    """Its views in the order of the graph; ``anchor`` is the one of which the last value is known."""

    number: int
    views: list[View] = field(default_factory=list)
    stays: bool = False
    version: int = 0
    anchor: View | None = None


class Memories:
    """All memory of one graph.

    The calls of the graph are passed one by one: :meth:`enter`, and then :meth:`replace` or :meth:`keep`.
    """

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._views: dict[fx.Node, View] = {}
        self._memories: dict[int, Memory] = {}
        self._targets: dict[fx.Node, list[fx.Node]] = {}
        self._changed: set[fx.Node] = set()
        #: Nodes that show what they did, of memory that became a value so many times.
        self._kept: dict[fx.Node, int] = {}
        for writer, target in effects.writes_made:
            self._targets.setdefault(writer, []).append(target)
        for node in effects.calls:
            self._note(node)
        for node, place in effects.position.items():
            for view in (self._views[each] for each in node.all_input_nodes if each in self._views):
                # Of several tensors, those in this memory count.
                if tensor_of(view.made) is not None or view.memory.number in memories_of(node):
                    view.last = place

    def _note(self, node: fx.Node) -> None:
        own = dict.fromkeys(memories_of(node))
        operands = [each for each in node.all_input_nodes if each in self._views]
        if tensor_of(node) is not None and not own:  # nobody can tell where it lies: as if it were in all of them
            for each in operands:
                self._views[each].memory.stays = True
        written = self._targets.get(node, [])
        is_odd = _is_odd(node)
        for view in (self._views[each] for each in written if is_odd and each in self._views):
            view.memory.stays = True
        for number in own:
            memory = self._memories.setdefault(number, Memory(number))
            shown = [each for each in written if each in self._views and tensor_of(node) is not None] or operands
            made_of = list(dict.fromkeys(self._views[each] for each in shown if self._views[each].memory is memory))
            memory.stays |= node.op in ("placeholder", "get_attr") or len(made_of) > 1
            if len(own) > 1:  # several tensors: each is told apart where it is taken out
                memory.stays |= bool(memory.views)
                continue
            if not made_of:
                memory.stays |= bool(memory.views)
                view = View(memory, node, (node.args, node.kwargs))
            elif shown is not operands:  # what is written to is given back
                view = made_of[0]
            else:
                view = View(memory, node, (node.args, node.kwargs), made_of[0])
            if view not in memory.views[-1:] and not view.names:
                memory.views.append(view)
            view.names.append(node)
            self._views[node] = view

    def view(self, node: fx.Node) -> View | None:
        """The view that a node of the graph as it was is; None for what is no tensor, or lies nobody knows where."""
        return self._views.get(node)

    def home(self, view: View, place: int) -> View | None:
        """The view that all names hang on which are read after a place, if what ``view`` shows tells what that shows.

        None where others see the memory, or a name shows more of it than is told.
        """
        if view.memory.stays:
            return None
        whole = view
        while whole.is_whole and whole.parent is not None:
            whole = whole.parent
        for each in view.memory.views:
            if each.last > place and whole not in each.above() and not _are_apart(each, whole):
                return None
        return whole

    def readers(self, view: View, place: int) -> Iterator[fx.Node]:
        """Who reads a view by any of its names, or a view of it, after a place."""
        position = self._effects.position
        for each in view.memory.views:
            if any(above is view for above in each.above()):
                yield from (user for name in each.names for user in name.users if position.get(user, -1) > place)

    def enter(self, node: fx.Node, emit: Emitter) -> None:
        """Let a call read what became of its operands."""
        if any(each in self._views and self._views[each].memory.version for each in node.all_input_nodes):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda each: self.now(each, emit))
            self._changed.add(node)

    def keep(self, node: fx.Node, emit: Emitter) -> None:
        """A call stays: if it gives a view, it is one of what became of its operands."""
        if node not in self._changed:
            return
        own = self._views.get(node)
        is_shown = own is not None and own.memory.version > 0
        if is_shown or node in self._targets:  # it shows memory of the value, or that may have a gradient from here on
            args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
            node.meta["example_value"] = emit.compute(called, node.target, args, kwargs)
        if own is not None and is_shown:
            self._kept[node] = own.memory.version
            if own.version < own.memory.version:
                own.now, own.version = node, own.memory.version

    def replace(self, view: View, value: fx.Node) -> None:
        """A value takes the place of what a view showed; other views are views of it, or of what lies beside."""
        memory = view.memory
        for each in [each for each in memory.views if _are_apart(each, view)]:
            each.version += each.version == memory.version
            self._kept.update({name: memory.version + 1 for name in each.names if self._keeps(name)})
        memory.version += 1
        memory.anchor, view.now, view.version = view, value, memory.version

    def now(self, node: fx.Node, emit: Emitter) -> fx.Node:
        """What a name of the graph as it was shows by now."""
        view = self._views.get(node)
        return node if view is None or self._keeps(node) else self._shown(view, emit)

    def _keeps(self, node: fx.Node) -> bool:
        """Whether a node still shows what its view is."""
        return self._kept.get(node, 0) == self._views[node].memory.version

    def _shown(self, view: View, emit: Emitter) -> fx.Node:
        memory = view.memory
        if view.version < memory.version or view.now is None:
            assert memory.anchor is not None, "a value took its place"
            below = next((each for each in memory.anchor.above() if each.parent is view), None)
            view.now = self._again(view, emit) if below is None else undone(below, self._shown(below, emit), emit)
            view.version = memory.version
        return view.now

    def _again(self, view: View, emit: Emitter) -> fx.Node:
        assert view.parent is not None, "what has no parent is above the anchor"
        args, kwargs = fx.map_arg(view.arguments, lambda each: self.now(each, emit))
        return emit.call(view.made.target, *args, **kwargs)


def _is_detached(node: fx.Node) -> bool:
    call = read(node)
    return call is not None and (call.name in {"detach", "_get_data_attr"} or call.arguments.get("#1") == "data")


def _are_apart(one: View, other: View) -> bool:
    """Whether two views are of different slices of one tensor, along one dimension, and nobody sees that they are of one."""
    cuts = [[cut for each in view.above() if (cut := each.cut()) is not None] for view in (one, other)]
    are_apart = any(
        (whole, dim) == (of, along) and (first.stop <= second.start or second.stop <= first.start)
        for whole, dim, first, _ in cuts[0]
        for of, along, second, _ in cuts[1]
    )
    return are_apart and not (_is_returned(one) and _is_returned(other))


def _is_returned(view: View) -> bool:
    """Whether a view is a result of the graph, or a view of it is."""
    return any(layout.is_returned(name) for each in view.memory.views if view in each.above() for name in each.names)


def _is_odd(node: fx.Node) -> bool:
    call = read(node)
    is_another_graph = isinstance(node.target, torch._ops.HigherOrderOperator)
    return is_another_graph or call is None or (call.is_inplace and call.name in _ODD)


def undone(view: View, value: fx.Node, emit: Emitter) -> fx.Node:
    """The parent of a view that holds all of it, as a view of what it shows."""
    assert view.parent is not None, "it is a view"
    turn = _turned(view.made)
    if turn is not None:
        return emit.call("permute", value, turn)
    shape, own = shape_of(known_tensor(view.parent.made)), shape_of(known_tensor(value))
    before = split_dim(shape, own)
    if before is not None:
        return emit.call("flatten", value, before, before + len(own) - len(shape))
    if all(isinstance(size, int) for size in shape):
        return emit.call("view", value, tuple(shape))
    return emit.call("view_as", value, view.parent.made)


def split_dim(shape: Sequence[Size], parts: Sequence[Size]) -> int | None:
    """The one dimension that is several in another shape; None where shapes differ otherwise."""
    before = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(shape, parts, strict=False)))
    rest = [*parts][len(parts) - len(shape) + before + 1 :]
    return before if [*shape][before + 1 :] == rest and before < len(shape) < len(parts) else None


def _turned(node: fx.Node) -> list[int] | None:
    """The order of dimensions that undoes a transpose; None for another call."""
    call, own = read(node), tensor_of(node)
    name = "" if call is None else call.name
    if call is not None and name == "getattr":
        name = str(call.arguments.get("#1"))
    if call is None or own is None or name not in _TURNS:
        return None
    args = [each for key, each in call.arguments.items() if key != "input" and not isinstance(each, str)]
    order = list(range(own.dim()))
    if name == "permute":
        given = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        order = [each % own.dim() for each in given]
        return sorted(range(own.dim()), key=order.__getitem__)
    one, other = args if name == "transpose" and len(args) > 1 else (-2, -1)
    if name not in {"transpose", "mT"} and own.dim() != 2:
        return None
    order[one], order[other] = order[other], order[one]
    return order
