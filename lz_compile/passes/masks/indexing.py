"""Operations that select, join or spread, read at an index: which elements of which inputs they show there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lz_compile.ground.sizes import Size, as_size, shape_of
from lz_compile.passes.formula.axes import Axis, Dims, broadcast_from
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.masks.index_operands import boolean, merged, numeric, operand
from lz_compile.passes.masks.piecewise import Piecewise, Value
from lz_compile.passes.masks.polynomial import ONE, Polynomial, lower, number
from lz_compile.passes.masks.predicates import at_least, both

if TYPE_CHECKING:
    from lz_compile.passes.masks.index_reading import Reader

_SPLITS = frozenset({"chunk", "split", "unbind", "tensor_split", "split_with_sizes"})


# ---- subscripts ---------------------------------------------------------------------------------------------------


def _getitem(reader: Reader, call: Call, dims: Dims) -> Value | None:
    if tensor_of(call.input) is None:
        return _part(reader, call, dims)
    index = call.arguments.get("#1")
    shape = shape_of(known_tensor(call.input))
    items = _spelled_out(list(index) if isinstance(index, tuple) else [index], len(shape))
    if items is None:
        return None
    source = _Subscript(reader, call, shape, items).source(dims)
    return None if source is None else reader.read(call.input, source, call.node)


def _spelled_out(items: list[Any], rank: int) -> list[Any] | None:
    """The items with the ellipsis and the dimensions that are not named as whole slices."""
    plain = [item for item in items if not isinstance(item, fx.Node)]
    if any(isinstance(item, bool) for item in plain) or plain.count(Ellipsis) > 1:
        return None
    named = sum(1 for item in items if isinstance(item, fx.Node) or (item is not None and item is not Ellipsis))
    whole = [slice(None)] * (rank - named)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    return [*items, *whole] if at is None else [*items[:at], *whole, *items[at + 1 :]]


class _Subscript:
    """One subscript: where each dimension of the input is read, for an index of the result."""

    def __init__(self, reader: Reader, call: Call, shape: Sequence[Size], items: list[Any]) -> None:
        self.reader, self.call, self.shape, self.items = reader, call, shape, items
        self.tensors = [i for i, item in enumerate(items) if tensor_of(item) is not None]

    def source(self, dims: Dims) -> Dims | None:
        """The dims of the input, None where the subscript is not understood."""
        spread = self._spread_rank()
        if spread is None:
            return None
        start = self._spread_start()
        gathered, rest = dims[start : start + spread], [*dims[:start], *dims[start + spread :]]
        found: list[Any] = []
        for position, item in enumerate(self.items):
            if item is None:
                if not rest or rest.pop(0):
                    return None
                continue
            size = self.shape[len(found)]
            place: Polynomial | tuple[Axis, ...] | None
            if position in self.tensors:
                place = self._gathered(item, gathered)
            elif isinstance(item, slice):
                if not rest:
                    return None
                place = self._sliced(item, size, rest.pop(0))
            else:
                place = _wrapped(self.reader, self.reader.integer(item), size)
            if place is None:
                return None
            found.append(place if isinstance(place, tuple) else self.reader.dim_at(place, size))
        return None if rest or len(found) != len(self.shape) else tuple(found)

    def _spread_rank(self) -> int | None:
        """How many dimensions the index tensors give together."""
        tensors = [tensor_of(self.items[position]) for position in self.tensors]
        if any(each is None or each.is_floating_point() or each.dtype in _FLAGS for each in tensors):
            return None
        ranks = {each.dim() for each in tensors if each is not None}
        return None if 0 in ranks and len(ranks) > 1 else max(ranks, default=0)

    def _spread_start(self) -> int:
        """Where these dimensions are in the result: in place of index tensors that are neighbours, else first."""
        if not self.tensors:
            return 0
        kept = [i for i, item in enumerate(self.items) if not _is_number(item)]
        places = [kept.index(position) for position in self.tensors]
        return places[0] if places == list(range(places[0], places[0] + len(places))) else 0

    def _gathered(self, item: fx.Node, dims: Dims) -> Polynomial | None:
        tensor = known_tensor(item)
        value = self.reader.read(item, broadcast_from(dims, shape_of(tensor)), self.call.node)
        return _not_negative(numeric(value))

    def _sliced(self, item: slice, size: Size, dim: tuple[Axis, ...]) -> Polynomial | tuple[Axis, ...] | None:
        if item.start is None and item.step is None and item.stop is None:
            return dim
        step = 1 if item.step is None else item.step
        start = _start(self.reader, item.start, size)
        if start is None or not isinstance(step, int):
            return None
        return start + self.reader.place(dim).scaled(step)


_FLAGS = (torch.bool, torch.uint8)


def _is_number(item: Any) -> bool:
    return item is not None and not isinstance(item, slice) and tensor_of(item) is None


def _start(reader: Reader, start: Any, size: Size) -> Polynomial | None:
    """Where a slice begins. It is not past the end, for then it has no elements at all."""
    return number(0) if start is None else _wrapped(reader, reader.integer(start), size)


def _wrapped(reader: Reader, place: Polynomial | None, size: Size) -> Polynomial | None:
    """A position, counted from the end where it is negative; None where its sign is not known."""
    if place is None:
        return None
    least, below = lower(place), lower(-place)
    if least is not None and least >= 0:
        return place
    from_end = place + reader.size(size)
    least = lower(from_end)
    return from_end if below is not None and below > 0 and least is not None and least >= 0 else None


def _not_negative(value: Piecewise | None) -> Polynomial | None:
    """The one position that an index has, where it is none from the end."""
    single = None if value is None or not value.is_exact else value.single
    least = None if single is None else lower(single)
    return single if least is not None and least >= 0 else None


# ---- selections ---------------------------------------------------------------------------------------------------


def _at(reader: Reader, call: Call, dims: Dims, dim: int, place: Polynomial | None) -> Value | None:
    """The input at a position of one dimension, at the result's index elsewhere (which lacks or has that dimension)."""
    source = tensor_of(call.input)
    if source is None or place is None:
        return None
    after = dim + 1 + len(dims) - source.dim()
    return reader.read(
        call.input, (*dims[:dim], reader.dim_at(place, as_size(source.shape[dim])), *dims[after:]), call.node
    )


def _dim(call: Call, dim: Any) -> int | None:
    source = tensor_of(call.input)
    return dim % source.dim() if isinstance(dim, int) and source is not None and source.dim() else None


def _select(reader: Reader, call: Call, dims: Dims) -> Value | None:
    dim, source = _dim(call, call.get("dim")), tensor_of(call.input)
    if dim is None or source is None:
        return None
    place = _wrapped(reader, reader.integer(call.get("index")), as_size(source.shape[dim]))
    return _at(reader, call, dims, dim, place)


def _narrow(reader: Reader, call: Call, dims: Dims) -> Value | None:
    dim, source = _dim(call, call.get("dim")), tensor_of(call.input)
    if dim is None or source is None:
        return None
    start = _start(reader, call.get("start"), as_size(source.shape[dim]))
    return _at(reader, call, dims, dim, None if start is None else start + reader.place(dims[dim]))


def _index_select(reader: Reader, call: Call, dims: Dims) -> Value | None:
    dim, index = _dim(call, call.get("dim", call.arguments.get("#1"))), call.get("index", call.arguments.get("#2"))
    tensor = tensor_of(index)
    if dim is None or tensor is None:
        return None
    value = reader.read(index, (dims[dim],) if tensor.dim() else (), call.node)
    return _at(reader, call, dims, dim, _not_negative(numeric(value)))


def _flip(reader: Reader, call: Call, dims: Dims) -> Value | None:
    flipped = call.get("dims") or call.positional()
    source = tensor_of(call.input)
    if source is None or not isinstance(flipped, (tuple, list)) or not all(isinstance(dim, int) for dim in flipped):
        return None
    sizes = shape_of(source)
    turned = list(dims)
    for dim in flipped:
        last = reader.size(sizes[dim]) - ONE
        turned[dim] = reader.dim_at(last - reader.place(dims[dim]), sizes[dim])
    return reader.read(call.input, tuple(turned), call.node)


def _part(reader: Reader, call: Call, dims: Dims) -> Value | None:
    """One of the tensors that a call returns."""
    parent, which = reader.effects.calls.get(call.input), call.arguments.get("#1")
    if parent is None or not isinstance(which, int) or not isinstance(call.input, fx.Node):
        return None
    if parent.name == "meshgrid":
        return _mesh(reader, parent, dims, which)
    if parent.name == "broadcast_tensors":
        tensor = parent.node.args[which]
        return operand(reader, parent, tensor, dims) if isinstance(tensor, fx.Node) else None
    return _piece(reader, call, parent, dims, which) if parent.name in _SPLITS else None


def _piece(reader: Reader, call: Call, parent: Call, dims: Dims, which: int) -> Value | None:
    pieces = call.input.meta.get("example_value")
    if not isinstance(pieces, (tuple, list)):
        return None
    position = "#1" if parent.name == "unbind" else "#2"
    dim = _dim(parent, parent.get("dim", parent.arguments.get(position, 0)))
    if dim is None:
        return None
    which %= len(pieces)
    if parent.name == "unbind":
        return _at(reader, parent, dims, dim, number(which))
    start = number(0)
    for piece in pieces[:which]:
        start = start + reader.size(as_size(piece.shape[dim]))
    return _at(reader, parent, dims, dim, start + reader.place(dims[dim]))


def _mesh(reader: Reader, parent: Call, dims: Dims, which: int) -> Value | None:
    tensors = parent.node.args[0] if isinstance(parent.node.args[0], (tuple, list)) else parent.node.args
    order = [*range(len(tensors))]
    if parent.get("indexing", "ij") == "xy" and len(order) > 1:
        order[:2] = [1, 0]
    tensor = tensors[which]
    return reader.read(tensor, (dims[order[which]],), parent.node) if tensor_of(tensor) is not None else None  # type: ignore[arg-type]


# ---- joins --------------------------------------------------------------------------------------------------------


def _cat(reader: Reader, call: Call, dims: Dims) -> Value | None:
    tensors, dim = call.get("tensors"), call.get("dim", 0)
    parts = [(each, tensor_of(each)) for each in tensors] if isinstance(tensors, (tuple, list)) else []
    if not isinstance(dim, int) or not parts or any(each is None or each.dim() != len(dims) for _, each in parts):
        return None
    dim %= len(dims)
    start, here = number(0), reader.place(dims[dim])
    value: Value | None = None
    for node, tensor in parts:
        size = as_size(tensor.shape[dim])  # type: ignore[union-attr]
        source = (*dims[:dim], reader.dim_at(here - start, size), *dims[dim + 1 :])
        own = reader.read(node, source, call.node)
        value = own if value is None else merged(at_least(here - start), own, value)
        start = start + reader.size(size)
    return value


def _stack(reader: Reader, call: Call, dims: Dims) -> Value | None:
    tensors, dim = call.input, call.get("dim", call.arguments.get("#1", 0))
    if not isinstance(tensors, (tuple, list)) or not isinstance(dim, int) or tensor_of(call.node) is None:
        return None
    dim %= len(dims)
    here, source = reader.place(dims[dim]), (*dims[:dim], *dims[dim + 1 :])
    value: Value | None = None
    for position, node in enumerate(tensors):
        own = reader.read(node, source, call.node)
        value = own if value is None else merged(at_least(here - number(position)), own, value)
    return value


def _pad(reader: Reader, call: Call, dims: Dims) -> Value | None:
    pads, mode = call.get("pad", call.arguments.get("#1")), call.get("mode", call.arguments.get("#2", "constant"))
    source = tensor_of(call.input)
    if source is None or mode != "constant" or not isinstance(pads, (tuple, list)):
        return None
    value = call.get("value", call.arguments.get("#3"))
    outside = reader.scalar(0 if value is None else value)
    inside, shifted, sizes = [], list(dims), shape_of(source)
    for i in range(len(pads) // 2):
        dim, before = len(dims) - 1 - i, reader.integer(pads[2 * i])
        if before is None:
            return None
        place = reader.place(dims[dim]) - before
        inside += [at_least(place), at_least(reader.size(sizes[dim]) - ONE - place)]
        shifted[dim] = reader.dim_at(place, sizes[dim])
    own = reader.read(call.input, tuple(shifted), call.node)
    if not isinstance(own, Piecewise):
        return merged(both(*inside), own, boolean(outside))
    return merged(both(*inside), own, outside)


RULES: Mapping[str, Any] = {
    "getitem": _getitem,
    "select": _select,
    "narrow": _narrow,
    "index_select": _index_select,
    "flip": _flip,
    "cat": _cat,
    "stack": _stack,
    "pad": _pad,
}
