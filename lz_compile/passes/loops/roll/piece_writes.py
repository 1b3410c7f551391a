"""Pieces of a tensor that are overwritten through a view of them, as stores into that tensor.

``x[:, t] += y`` reads a piece, computes, and stores; ``x[:, t].add_(y)`` does the same through a view, and so does
``x.select(1, t).add_(y)``. Told as a value that is stored, all are what :mod:`forward_stores` follows.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.passes.editing.edit import MayEdit
from lz_compile.passes.formula.layout import elements_of, index_of, is_returned, places_of
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import Emitter, origin_of
from lz_compile.passes.graph.view import known_tensor, memory_of, reached, read, tensor_of
from lz_compile.passes.graph.writes import ELEMENTWISE, without_writing, writes
from lz_compile.passes.loops.roll.steps import kind_of
from lz_compile.passes.loops.roll.worthwhile import LEAST_STEPS

#: For every dimension from where to where, or None for all of it.
Piece: TypeAlias = "tuple[tuple[int, int] | None, ...]"


def piece_of(index: Any, tensor: torch.Tensor | None) -> Piece | None:
    """What an index of plain numbers, plain slices and whole dimensions selects; None for any other."""
    elements = None if tensor is None else elements_of(index, tensor)
    if tensor is None or elements is None or None in elements or len(elements) != tensor.dim():
        return None
    found: list[tuple[int, int] | None] = []
    for each, size in zip(elements, tensor.shape, strict=True):
        if each == slice(None):
            found.append(None)
            continue
        places, _ = (places_of(each, size) if isinstance(size, int) and size else None) or (range(0), False)
        if not places or places.step != 1:
            return None
        found.append((places.start, places.stop))
    return tuple(found)


def _is_plain(index: Any, tensor: torch.Tensor | None) -> bool:
    """Whether an index is of plain numbers, plain slices and whole dimensions, whatever the sizes are."""
    elements = None if tensor is None else elements_of(index, tensor)
    return elements is not None and all(places_of(each, 1) for each in elements)


def overlap(one: Piece, two: Piece) -> bool:
    """Whether two pieces of one tensor have an element in common."""
    pairs = zip(one, two, strict=True)
    return all(a is None or b is None or (a[0] < b[1] and b[0] < a[1]) for a, b in pairs)


def store_pieces(
    graph: fx.Graph, may_edit: MayEdit, wanted: Callable[[fx.Node, int], bool] = lambda _, count: count >= LEAST_STEPS
) -> int:
    """Spell such calls as stores, in place; how many there were.

    ``wanted`` is asked with a tensor and how many of them it has: where nothing else is said, as many as a loop has steps.
    """
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _writes_piece(node, found):
            found[node] = None
    buffers = Counter(_buffer(node, found) for node in found)
    candidates = [node for node in found if wanted(buffer := _buffer(node, found), buffers[buffer])]
    if not candidates:
        return 0
    for node in candidates:
        node.replace_all_uses_with(node.all_input_nodes[0])  # what overwrites a tensor gives that tensor
    effects = Effects(graph)
    return sum(
        _stored(node, effects, may_edit) for node in reversed(candidates)
    )  # of several calls on one view the last is first


def _buffer(node: fx.Node, chained: Collection[fx.Node]) -> fx.Node:
    """The tensor of which a call overwrites a piece."""
    view = node.all_input_nodes[0]
    while view in chained:
        view = view.all_input_nodes[0]
    found = cut_of(view)
    assert found is not None, "a piece is cut out of a tensor"
    return found[0]


def cut_of(view: fx.Node) -> tuple[fx.Node, Any] | None:
    """The tensor that a view cuts a piece out of, and the index that does so; None for any other view."""
    call = read(view)
    if view.target is operator.getitem and tensor_of(view.args[0]) is not None:
        return view.all_input_nodes[0], view.args[1]
    return None if call is None or tensor_of(view) is None else index_of(call)


def _writes_piece(node: fx.Node, chained: Collection[fx.Node] = ()) -> bool:
    """Whether a call overwrites a piece of a tensor, or what another such call gave, element by element."""
    call, view = read(node), node.args[0] if node.args else None
    if call is None or not call.is_inplace or not isinstance(view, fx.Node) or "out" in node.kwargs:
        return False
    return call.name in ELEMENTWISE | {"copy"} and (view in chained or cut_of(view) is not None)


def is_overwritten(view: fx.Node) -> bool:
    """Whether a piece of a tensor is overwritten by its own name."""
    return any(_writes_piece(user) for user in view.users if user.args and user.args[0] is view)


def _stored(node: fx.Node, effects: Effects, may_edit: MayEdit) -> bool:
    """Rewrite one call, unless somebody looks at the piece through another view afterwards."""
    view, call = node.args[0], read(node)
    if call is None or not _writes_piece(node) or not isinstance(view, fx.Node) or effects.ambient(node).is_transformed:
        return False
    found = cut_of(view)
    if found is None:
        return False
    buffer, index = found
    if not _is_plain(index, tensor_of(buffer)) or _is_seen_later(view, node, effects) or is_returned(view):
        return False
    if _is_written_later(view, buffer, node, effects) or _changes_later(view, node, effects) or not may_edit(node):
        return False
    graph, ambient = node.graph, effects.ambient(node)
    with graph.inserting_before(node):
        emit = Emitter(graph, known_tensor(view).fake_mode, ambient, node)  # type: ignore[attr-defined]
        twin = without_writing(node, node.args, node.kwargs)
        value: Any = None if twin is None else emit.call(twin[0], *twin[1], **twin[2])
        value = node.args[1] if call.name == "copy" else value
        if not isinstance(value, fx.Node) or kind_of(value) != kind_of(view):
            if isinstance(value, fx.Node) and value not in effects.position:
                graph.erase_node(value)
            return False
        followers = [user for user in view.users if user not in (node, value) and _is_after(user, node, effects)]
        is_stored = any(_stores(user, buffer, index, view) for user in followers)
        if not is_stored:
            store = graph.call_function(operator.setitem, (buffer, index, value))
            store.meta.update(origin_of(node), example_value=None)
            effects.position[store] = effects.position[node]
    for user in followers:
        user.replace_input_with(view, value)
    effects.position.setdefault(value, effects.position[node])
    graph.erase_node(node)
    if not view.users:  # a loop that fills the tensor would seem to read it
        graph.erase_node(view)
    return True


def _stores(user: fx.Node, buffer: fx.Node, index: Any, value: fx.Node) -> bool:
    if user.target is not operator.setitem or user.args[0] is not buffer or user.args[2] is not value:
        return False
    return str(user.args[1]) == str(index)


def _is_seen_later(view: fx.Node, node: fx.Node, effects: Effects) -> bool:
    """Whether a view of the piece is read after the call that overwrites it."""
    memory = memory_of(view)

    def is_view(user: fx.Node) -> bool:
        return memory_of(user) == memory

    inner = (user for user in view.users if user is not node and not _writes_piece(user))
    shown = reached(filter(is_view, inner), lambda each: filter(is_view, each.users))
    return any(_is_after(user, node, effects) for each in shown for user in each.users)


def _is_written_later(view: fx.Node, buffer: fx.Node, node: fx.Node, effects: Effects) -> bool:
    """Whether a later call overwrites the piece through the same view, and was not spelled as a store."""
    memory = memory_of(view)
    later = (user for user in view.users if user is not node and _is_after(user, node, effects))
    followed = reached(later, lambda user: user.users if memory_of(user) == memory else ())
    calls = [call for call in map(read, followed) if call is not None and writes(call)]
    # the piece is put where it is
    return not all(each.name == "setitem" and each.input is buffer and each.node.args[2] is view for each in calls)


def _changes_later(view: fx.Node, node: fx.Node, effects: Effects) -> bool:
    """Whether the piece, or what is copied into it, is overwritten by another name before the last that reads the view."""
    readers = [user for user in view.users if user is not node]
    last = max(readers, key=effects.position.__getitem__, default=node)
    if not _is_after(last, node, effects):
        return False
    copied = [each for each in node.args[1:2] if isinstance(each, fx.Node)]
    return any(effects.overwritten_after(each, node, last) is not None for each in (view, *copied))


def _is_after(user: fx.Node, node: fx.Node, effects: Effects) -> bool:
    """Whether a node comes after one; new ones have the place of what they replace."""
    return effects.position[user] > effects.position[node]
