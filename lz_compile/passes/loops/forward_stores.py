"""What a program reads back of a tensor that it fills piece by piece is what it put there.

``out[:, t] = f(out[:, t - 1])`` is a loop that hands a value from step to step by way of memory. Where a piece is read that
was written as a whole and not since, its reader takes the value itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TypeAlias

from torch import fx

from lz_compile.passes.axes import as_size
from lz_compile.passes.effects import Effects
from lz_compile.passes.view import tensor_of

#: For every dimension a position, or None for all of it.
Piece: TypeAlias = "tuple[int | None, ...]"

#: Readers to which it matters how a tensor lies in memory.
_STRIDED = frozenset({"view", "view_as", "as_strided", "stride", "data_ptr", "is_contiguous", "storage_offset"})


def forward_stores(graph: fx.Graph) -> int:
    """Let readers of such pieces take what was written, in place; how many did."""
    stores: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is operator.setitem and isinstance(node.args[0], fx.Node):
            stores.setdefault(node.args[0], []).append(node)
    loaded = [buffer for buffer in stores if any(user.target is operator.getitem for user in buffer.users)]
    if not loaded:
        return 0
    effects = Effects(graph)
    count = 0
    for buffer in loaded:
        if all(_is_a_store(node, target, buffer) for node, target in _writes_to(buffer, effects)):
            count += sum(_replaced(load, value, effects) for load, value in list(_loads(buffer, effects)))
    return count


def _writes_to(buffer: fx.Node, effects: Effects) -> list[tuple[fx.Node, fx.Node]]:
    """The calls that overwrite memory of a tensor, and through which view."""
    owner = effects.owner(buffer)
    return [(node, target) for node, target in effects.writes_made if effects.owner(target) is owner]


def _is_a_store(node: fx.Node, target: fx.Node, buffer: fx.Node) -> bool:
    """Whether a call fills a piece of the buffer itself, at places that are numbers."""
    return node.target is operator.setitem and target is buffer and _piece(node, buffer) is not None


def _loads(buffer: fx.Node, effects: Effects) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Readers of a piece, with the value that was put there last."""
    held: dict[Piece, fx.Node] = {}
    users = sorted(buffer.users, key=effects.position.__getitem__)
    pieces = {user: _piece(user, buffer) for user in users}
    last = {piece: user for user, piece in pieces.items() if user.target is operator.setitem and piece is not None}
    for user in users:
        piece = pieces[user]
        if user.target is operator.setitem and piece is not None:
            value = user.args[2]
            held = {other: node for other, node in held.items() if not _overlap(other, piece)}
            if isinstance(value, fx.Node):
                held[piece] = value
        elif user.target is operator.getitem and piece in held:
            position = effects.position[user]
            changes = (other for other, store in last.items() if effects.position[store] > position)
            if not any(_overlap(piece, other) for other in changes):  # who reads a view sees what is put there later
                yield user, held[piece]


def _piece(node: fx.Node, buffer: fx.Node) -> Piece | None:
    """What an index of plain numbers and whole dimensions selects; None for any other."""
    tensor = tensor_of(buffer)
    if tensor is None or len(node.args) < 2 or node.args[0] is not buffer:
        return None
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    rest = tensor.dim() - sum(each is not Ellipsis for each in index)
    if rest < 0 or sum(each is Ellipsis for each in index) > 1:
        return None
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    found: list[int | None] = []
    for each in index:
        if each is Ellipsis:
            found.extend([None] * rest)
        elif isinstance(each, slice) and (each.start, each.stop, each.step) == (None, None, None):
            found.append(None)
        elif isinstance(each, int) and not isinstance(each, bool) and isinstance(size := tensor.shape[len(found)], int):
            found.append(each % size)
        else:
            return None
    return tuple(found)


def _overlap(one: Piece, two: Piece) -> bool:
    return all(first is None or second is None or first == second for first, second in zip(one, two, strict=True))


def _replaced(load: fx.Node, value: fx.Node, effects: Effects) -> bool:
    """Whether a reader's value is now the one that was written: not where it has another form, or changes later."""
    old, new = tensor_of(load), tensor_of(value)
    if old is None or new is None or (old.dtype, old.device) != (new.dtype, new.device):
        return False
    if [as_size(size) for size in old.shape] != [as_size(size) for size in new.shape]:
        return False
    if any((call := effects.calls[user]) is not None and call.name in _STRIDED for user in load.users):
        return False
    start = effects.position[value]
    if any(effects.position[node] > start for node, _ in _writes_to(value, effects)):
        return False
    if effects.ambient(load) != effects.ambient(value):
        return False
    load.replace_all_uses_with(value)
    load.graph.erase_node(load)
    return True
