"""What a program reads back of a tensor that it fills piece by piece is what it put there.

``out[:, t] = f(out[:, t - 1])`` is a loop that hands a value from step to step by way of memory. Where a piece is read that
was written as a whole and not since, its reader takes the value itself. Where pieces are read that nobody has written yet,
as in ``x[:, t] += f(x[:, t - 1])``, they are read of a copy of what was there before.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula.layout import is_returned
from lz_compile.passes.formula.moves import STRIDED, order_of, strides_matter
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import origin_of
from lz_compile.passes.graph.gradients import differentiated, has_gradient, is_made_attached, left_behind
from lz_compile.passes.graph.modes import faking
from lz_compile.passes.graph.view import known_tensor, memory_of, needed, tensor_of
from lz_compile.passes.loops.roll.piece_writes import Piece, cut_of, overlap, piece_of, store_pieces
from lz_compile.passes.loops.roll.steps import kind_of
from lz_compile.passes.loops.roll.worthwhile import LEAST_STEPS
from lz_compile.passes.rewriting.core import wants_grad

#: A tensor with more readers of pieces keeps what is stored twice.
_MOST_READERS = 64
#: Calls whose gradient needs the first operand.
_KEEPING = frozenset({"mul", "div", "lerp", "clamp"})


def forward_stores(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Let readers of such pieces take what was written, in place, where they may be edited; how many did."""
    given = set(graph.nodes)
    count = _forward_stores(graph, may_edit)
    if count:
        _keep_for_gradients(graph, given)
    return count


def _forward_stores(graph: fx.Graph, may_edit: MayEdit) -> int:
    count = store_pieces(graph, may_edit)
    stores: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is operator.setitem and isinstance(node.args[0], fx.Node):
            stores.setdefault(node.args[0], []).append(node)
    loaded = [buffer for buffer in stores if any(map(cut_of, buffer.users))]
    if not loaded:
        return count
    effects = Effects(graph)
    live = differentiated(graph, effects)
    for buffer in loaded:
        if effects.ambient(stores[buffer][0]).is_transformed:
            continue
        if all(_is_a_store(node, target, buffer) for node, target in effects.writes_to(buffer)):
            found = _loads(buffer, effects)
            if _cuts_gradients(buffer, found, stores[buffer], effects):
                continue
            unread = _unread(found, stores[buffer], live)
            if _goes(buffer, found, stores[buffer]) and left_behind(unread, live) is None:
                # A reader of the tensor keeps the gradients that it passes on.
                found.unclear.append(found.written.pop()[0])
            left = [load for load, store in found.written if not _replaced(load, store, effects, may_edit)]
            count += len(found.written) - len(left)
            if not (left or found.unclear) and len(found.original) >= LEAST_STEPS and may_edit(buffer):
                _read_before(buffer, found, stores[buffer][0])
                count += len(found.original)
            count += _drop_overwritten(buffer, live, may_edit)
    return count


def _is_a_store(node: fx.Node, target: fx.Node, buffer: fx.Node) -> bool:
    """Whether a call fills a piece of the buffer itself, at places that are numbers."""
    return node.target is operator.setitem and target is buffer and _piece(node, buffer) is not None


@dataclass
class _Loads:
    """Readers of pieces: with the store that put there what they read, of what nobody had written yet, and others."""

    written: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    original: list[fx.Node] = field(default_factory=list)
    unclear: list[fx.Node] = field(default_factory=list)


def _loads(buffer: fx.Node, effects: Effects) -> _Loads:
    """The readers of pieces before the last store."""
    found = _Loads()
    users = sorted(buffer.users, key=effects.position.__getitem__)
    pieces = {user: _piece(user, buffer) for user in users}
    stored = [user for user in users if user.target is operator.setitem and pieces[user] is not None]
    when = _Intervals([(pieces[user], effects.position[user], user) for user in stored])
    last = max((effects.position[user] for user in stored), default=-1)
    for user in users:
        piece, position = pieces[user], effects.position[user]
        if user.target is operator.setitem or (position > last and (piece is None or not when.touches(piece))):
            continue
        if piece is None:
            if position < last:
                found.unclear.append(user)
            continue
        following = when.first_after(piece, position)
        if following is not None and _last_reader(user, effects) > following:
            found.unclear.append(user)  # who reads a view sees what is put there later
            continue
        latest = when.last_before(piece, position)
        if latest is None:
            if position < last:
                found.original.append(user)
        elif latest and isinstance(latest.args[2], fx.Node):
            found.written.append((user, latest))
        elif position < last:
            found.unclear.append(user)
    return found


def _cuts_gradients(buffer: fx.Node, found: _Loads, stores: Sequence[fx.Node], effects: Effects) -> bool:
    """Whether what is read would lose, all over, a gradient that it has of the tensor only: one of zeros, but there."""
    if is_made_attached(buffer, effects):
        return _goes(buffer, found, stores)
    first = min((effects.position[each] for each in stores if _is_attached(each, effects)), default=math.inf)
    late = [load for load in found.original if effects.position[load] > first]
    return any(not _is_attached(user, effects, late) for load in late for user in load.users)


def _goes(buffer: fx.Node, found: _Loads, stores: Sequence[fx.Node]) -> bool:
    """Whether nobody reads a tensor once its readers take what was written."""
    readers = {load for load, _ in found.written} | set(stores)
    return bool(found.written) and not found.original and readers.issuperset(buffer.users)


def _unread(found: _Loads, stores: Sequence[fx.Node], live: Collection[fx.Node]) -> set[fx.Node]:
    """The stores that nobody reads back who is differentiated."""
    return set(stores) - {store for load, store in found.written if any(user in live for user in load.users)}


def _is_attached(reader: fx.Node, effects: Effects, but: Collection[fx.Node] = ()) -> bool:
    """Whether a call reads something with a gradient, where they are recorded, besides the tensor that it writes to."""
    own = {*but} | ({reader.args[0]} if reader.target is operator.setitem else set())
    return wants_grad(effects.ambient(reader), (each for each in reader.all_input_nodes if each not in own))


class _Intervals:
    """The stores into one tensor; those that write a place that is read are found by their exact piece first."""

    def __init__(self, stores: Sequence[tuple[Piece | None, int, fx.Node]]) -> None:
        self._stores = [(piece, position, store) for piece, position, store in stores if piece is not None]
        self._moving = self._moving_dim()
        self._by_place: dict[int, list[tuple[Piece, int, fx.Node]]] = {}
        for store in self._stores:
            for place in self._places(store[0]):
                self._by_place.setdefault(place, []).append(store)

    def _moving_dim(self) -> int | None:
        """A dimension in which every store names a place."""
        rank = len(self._stores[0][0]) if self._stores else 0
        return next((dim for dim in range(rank) if all(piece[dim] is not None for piece, _, _ in self._stores)), None)

    def _places(self, piece: Piece) -> range:
        span = (0, 1) if self._moving is None else piece[self._moving]
        assert span is not None, "a store names its place in the moving dimension"
        return range(*span)

    def _near(self, piece: Piece) -> list[tuple[Piece, int, fx.Node]]:
        """The stores that have an element in common with a piece, in order."""
        if self._moving is not None and piece[self._moving] is not None:
            found = [store for place in self._places(piece) for store in self._by_place.get(place, ())]
        else:
            found = self._stores
        near = {store[1]: store for store in found if overlap(store[0], piece)}
        return [near[position] for position in sorted(near)]

    def touches(self, piece: Piece) -> bool:
        """Whether anything is stored there."""
        return bool(self._near(piece))

    def first_after(self, piece: Piece, position: int) -> int | None:
        """The position of the next store there."""
        return next((each[1] for each in self._near(piece) if each[1] > position), None)

    def last_before(self, piece: Piece, position: int) -> fx.Node | Literal[False] | None:
        """The last store there; False where that wrote only a part of it, or more."""
        before = [each for each in self._near(piece) if each[1] < position]
        if not before:
            return None
        return before[-1][2] if before[-1][0] == piece else False


def _last_reader(load: fx.Node, effects: Effects) -> int:
    """The last position at which a view of a piece, or a view of it, is read."""
    memory = memory_of(load)
    views = needed([load], (), lambda node: (user for user in node.users if memory_of(user) in (None, memory)))
    return max((effects.position[user] for view in views for user in view.users), default=0)


def _piece(node: fx.Node, buffer: fx.Node) -> Piece | None:
    """What of a tensor a call stores or reads, None where it does something else with it."""
    found = (node.args[0], node.args[1]) if node.target is operator.setitem else cut_of(node)
    return None if found is None or found[0] is not buffer else piece_of(found[1], tensor_of(buffer))


def _read_before(buffer: fx.Node, found: _Loads, first: fx.Node) -> None:
    """Let readers of what nobody had written yet read a copy that is made before the first store."""
    graph, tensor = buffer.graph, known_tensor(buffer)
    earliest = min([first, *found.original])
    with graph.inserting_before(earliest):
        copy = graph.call_method("clone", (buffer,))
    copy.meta.update(origin_of(first))
    copy.meta["example_value"] = _copied(tensor, torch.Tensor.clone)
    for load in found.original:
        cut = cut_of(load)
        assert cut is not None, "a piece is read"
        load.replace_input_with(buffer, copy)
        load.meta["example_value"] = _copied(copy.meta["example_value"], operator.itemgetter(cut[1]))


def _keep_for_gradients(graph: fx.Graph, given: Collection[fx.Node]) -> None:
    """Let new calls whose operand is overwritten behind read a copy, as autograd does where a call itself overwrites it."""
    effects = Effects(graph)
    last = next(iter(reversed(graph.nodes)))
    for node in [each for each in graph.nodes if each not in given]:
        call, view = effects.calls[node], next(iter(node.args), None)
        if call is None or call.name not in _KEEPING or not isinstance(view, fx.Node):
            continue
        if not _is_attached(node, effects) or effects.overwritten_after(view, node, last) is None:
            continue
        with graph.inserting_before(node):
            copy = graph.call_method("clone", (view,))
        tensor = known_tensor(view)
        copy.meta.update(node.meta, example_value=_copied(tensor, torch.Tensor.clone))
        node.replace_input_with(view, copy)


def _drop_overwritten(buffer: fx.Node, live: Collection[fx.Node], may_edit: MayEdit) -> int:
    """Erase stores of pieces that are stored again before anybody reads them; how many there were."""
    stores: dict[Piece, list[fx.Node]] = {}
    loads: list[tuple[fx.Node, Piece]] = []
    others: list[fx.Node] = []
    for user in buffer.users:
        piece = _piece(user, buffer)
        if piece is None or (user.target is operator.setitem and user.args[2] is buffer):
            others.append(user)
        elif user.target is operator.setitem:
            stores.setdefault(piece, []).append(user)
        else:
            loads.append((user, piece))
    if len(loads) > _MOST_READERS or _is_seen_otherwise(buffer):
        return 0
    memory, dropped, gone = memory_of(buffer), list[fx.Node](), set[fx.Node]()
    for piece, found in stores.items():
        readers = others + [load for load, own in loads if overlap(own, piece)]
        ordered = sorted(found)
        for store, following in itertools.pairwise(ordered):
            # A view that was taken before is read who knows when; a copy was not of what is stored here.
            is_read = any(each < following and (each > store or memory_of(each) == memory) for each in readers)
            behind = None if is_read or _attaches(store, following) else left_behind([store], live, gone)
            if behind is not None and may_edit(store):
                dropped.append(store)
                gone = behind
    for store in dropped:
        buffer.graph.erase_node(store)
    return len(dropped)


def _attaches(store: fx.Node, following: fx.Node) -> bool:
    """Whether a tensor may have its gradient of one store only, not of the one that follows."""
    return has_gradient(store.args[2]) and not has_gradient(following.args[2])


def _is_seen_otherwise(buffer: fx.Node) -> bool:
    """Whether anything but pieces of a tensor, and what is made of these, shows its memory."""
    own, memory = {buffer}, memory_of(buffer)
    for node in buffer.graph.nodes:
        if not own.isdisjoint(node.all_input_nodes):
            own.add(node)
        elif node not in own and memory is not None and memory_of(node) == memory:
            return True
    return memory is None


def _copied(tensor: torch.Tensor, function: Callable[[Any], Any]) -> Any:
    with faking(tensor.fake_mode):  # type: ignore[attr-defined]
        return function(tensor)


def _replaced(load: fx.Node, store: fx.Node, effects: Effects, may_edit: MayEdit) -> bool:
    """Whether a reader's value is now the one that was written: not where it has another form, changes, or is handed out."""
    value = store.args[2]
    old, new = tensor_of(load), tensor_of(value)
    if not isinstance(value, fx.Node) or old is None or new is None or kind_of(value) != kind_of(load):
        return False
    if any(effects.name(user) in STRIDED for user in load.users):
        return False
    if strides_matter(load) and _copied(old, order_of) != _copied(new, order_of):
        return False
    if effects.why_not_forwarded(value, store, load) or is_returned(load) or not may_edit(load):
        return False
    load.replace_all_uses_with(value)
    load.graph.erase_node(load)
    return True
