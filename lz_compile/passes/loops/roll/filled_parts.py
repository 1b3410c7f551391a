"""New tensors that are filled part by part, as what these parts are joined to.

``out[..., :h] = a; out[..., h:] = b`` is ``cat([a, b], -1)``, and ``out[..., ::2] = a; out[..., 1::2] = b`` is the stack of
both, flattened, where ``out`` is new and nobody looks at it before. Joins are what recognisers read.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula.layout import WHOLE, index_of, single_cut, spelled_out
from lz_compile.passes.formula.moves import order_in_memory
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import Emitter
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.view import known_tensor, read, tensor_of
from lz_compile.passes.graph.writes import NEW
from lz_compile.passes.loops.roll.worthwhile import LEAST_STEPS

#: No model fills a tensor by more parts; a loop may.
_MOST_PARTS = 16


@dataclass(frozen=True)
class _Part:
    """A value that is put into places of a dimension; ``drops`` where the index takes that dimension away."""

    write: fx.Node
    value: Any
    dim: int
    places: range
    drops: bool


def join_parts(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Let what is filled part by part be joined, in place, where it may be edited; how many tensors were."""
    calls = [call for node in graph.nodes if (call := read(node)) is not None]
    if not any(call.name in ("setitem", "copy", "index_copy") for call in calls):
        return 0
    made = [call.node for call in calls if call.name in NEW and not call.is_inplace and call.node.users]
    effects = Effects(graph)
    return sum(_joined(node, effects, may_edit) for node in made)


def _joined(new: fx.Node, effects: Effects, may_edit: MayEdit) -> bool:
    tensor = tensor_of(new)
    order = None if tensor is None or tensor.layout is not torch.strided else order_in_memory(tensor)
    if tensor is None or order is None:
        return False
    parts = _parts(new, tensor, effects)
    if parts is None or not _are_all(parts, tensor) or not may_edit(new):
        return False
    last = max((part.write for part in parts), key=effects.position.__getitem__)
    emit = Emitter(new.graph, tensor.fake_mode, effects.ambient(last), last)  # type: ignore[attr-defined]
    with new.graph.inserting_before(last.next):
        value = _join(parts, order, tensor, emit)
    value.meta["example_value"] = tensor  # who shares memory with it does so still
    gone = {part.write for part in parts}
    gone |= {view for node in gone for view in _views(node.args[0], new)}
    for user in [user for user in new.users if user not in gone]:
        user.replace_input_with(new, value)
    for node in (*sorted(gone, key=effects.position.__getitem__, reverse=True), new):
        new.graph.erase_node(node)
    effects.position[value] = effects.position[last]
    return True


def _parts(new: fx.Node, tensor: torch.Tensor, effects: Effects) -> list[_Part] | None:
    """What is written into a new tensor before anybody looks at it; None where it is not only filled at first."""
    written = effects.writes_to(new)
    if not 1 < len(written) <= _MOST_PARTS:
        return None
    found = [*takewhile(bool, (_part(write, target, new, effects) for write, target in written))]
    if len(found) < 2:
        return None
    written = written[: len(found)]
    last = written[-1][0]
    own = {node for write, target in written for node in (write, *_views(target, new))}
    if any(user not in own and effects.position[user] < effects.position[last] for user in new.users):
        return None
    if any(user not in own for node in own - {new} for user in node.users):  # parts that others hold
        return None
    ambients: set[Ambient] = {effects.ambient(write) for write, _ in written}
    if len(ambients) > 1 or effects.ambient(last).is_transformed or effects.ambient(last).autocast:
        return None
    parts = [part for part in found if part is not None and _stays(part, last, effects)]
    if len(parts) >= LEAST_STEPS and any(len(part.places) == 1 for part in parts):
        return None  # steps of a loop, which is rolled
    return parts if len(parts) == len(found) else None


def _part(write: fx.Node, target: fx.Node, new: fx.Node, effects: Effects) -> _Part | None:
    """A store, or a copy into a view that nobody else looks at."""
    tensor = known_tensor(new)
    if write.target is operator.setitem and write.args[0] is new:
        index, value = write.args[1:]
    elif write.target == "copy_" and len(write.args) == 2:
        call = read(target)
        cut = None if call is None else index_of(call)
        if cut is None or cut[0] is not new or len(target.users) > 1 or write.users:
            return None
        index, value = cut[1], write.args[1]
    elif write.target == "index_copy_" and len(write.args) == 4 and target is new and tensor.dim() and not write.users:
        _, dim, row, value = write.args
        index = (*[WHOLE] * (int(dim) % tensor.dim()), row, ...)  # type: ignore[arg-type]
    else:
        return None
    found = single_cut(_by_slices(index, tensor.dim(), effects), tensor) if isinstance(value, fx.Node) else None
    part = None if found is None else _Part(write, value, *found)
    return part if part is not None and _fits(part, tensor) else None


def _by_slices(index: Any, rank: int, effects: Effects) -> Any:
    """The index with a slice for the row of places that is all that it names, where these are evenly spaced."""
    items = spelled_out(index, rank) or []
    named = [at for at, item in enumerate(items) if item is None or item != WHOLE]
    row = items[named[0]] if len(named) == 1 else None
    call = read(row) if isinstance(row, fx.Node) and not effects.is_overwritten(row) else None
    if call is not None and call.name == "arange" and not call.node.kwargs.keys() & {"start", "end", "step"}:
        ends = [each for each in call.node.args if isinstance(each, int)]
        row = [*range(*ends)] if 0 < len(ends) == len(call.node.args) else None
    if not isinstance(row, list) or not row or not all(type(each) is int and each >= 0 for each in row):
        return index
    places = range(row[0], row[-1] + 1, row[1] - row[0] if len(row) > 1 and row[1] > row[0] else 1)
    cut = slice(places.start, places.stop, places.step)
    return (*items[: named[0]], cut, *items[named[0] + 1 :]) if [*places] == row else index


def _views(target: Any, new: fx.Node) -> list[fx.Node]:
    """What stands between a new tensor and a view of a part: that view, and the call that gives it with others."""
    found = []
    while target is not new and isinstance(target, fx.Node):
        found.append(target)
        call = read(target)
        target = None if call is None else call.input
    return found


def _fits(part: _Part, tensor: torch.Tensor) -> bool:
    """Whether a value has the shape of its place, numbers of the same kind, and lies on the same device."""
    value = tensor_of(part.value)
    if value is None or value.device != tensor.device or value.is_complex() != tensor.is_complex():
        return False
    shape = [*shape_of(tensor)]
    shape[part.dim : part.dim + 1] = [] if part.drops else [len(part.places)]
    return value.layout is torch.strided and list(shape_of(value)) == shape


def _stays(part: _Part, last: fx.Node, effects: Effects) -> bool:
    """Whether a value is at the last write what it was when it was put in."""
    return part.value not in effects.calls or effects.overwritten_after(part.value, part.write, last) is None


def _are_all(parts: Sequence[_Part], tensor: torch.Tensor) -> bool:
    """Whether parts are the whole tensor, cut along one dimension: one behind the other, or in turn."""
    (dim, step), *others = {(part.dim, part.places.step) for part in parts}
    size = shape_of(tensor)[dim]
    if others or step < 1 or not isinstance(size, int):
        return False
    if step > 1:
        is_whole = size == step * len(parts[0].places) and {len(part.places) for part in parts} == {
            len(parts[0].places)
        }
        return is_whole and sorted(part.places.start for part in parts) == list(range(step))
    ordered = sorted((part.places for part in parts), key=lambda places: places.start)
    ends = [0, *(places.stop for places in ordered)]
    return ends[-1] == size and all(places.start == end for places, end in zip(ordered, ends, strict=False))


def _join(parts: Sequence[_Part], order: Sequence[int], tensor: torch.Tensor, emit: Emitter) -> fx.Node:
    """The parts in one tensor, which lies in memory as the one that they were put into."""
    ordered = sorted(parts, key=lambda part: part.places.start)
    kinds = {known_tensor(part.value).dtype for part in parts}
    kind = kinds.pop() if len(kinds) == 1 else tensor.dtype  # what is alike is cast as a whole
    values = [_value(part, order, kind, emit) for part in ordered]
    dim, step = order.index(parts[0].dim), parts[0].places.step
    if step == 1:
        value = emit.call(torch.cat, values, dim)
    else:
        value = emit.call("flatten", emit.call(torch.stack, values, dim + 1), dim, dim + 1)
    if kind != tensor.dtype:
        value = emit.call("to", value, tensor.dtype)
    if order == list(range(len(order))):
        return value
    return emit.call("permute", value, [order.index(dim) for dim in range(len(order))])


def _value(part: _Part, order: Sequence[int], kind: torch.dtype, emit: Emitter) -> fx.Node:
    """What is put into a place, with its dimensions in an order."""
    value: fx.Node = part.value
    if part.drops:
        value = emit.call("unsqueeze", value, part.dim)
    if known_tensor(value).dtype != kind:
        value = emit.call("to", value, kind)
    return value if order == list(range(len(order))) else emit.call("permute", value, list(order))
