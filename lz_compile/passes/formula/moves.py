"""Operations that select, join or spread: which elements of which inputs they show at an index. One table for all."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import Size, as_size, product, shape_of, strides_of
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.axes import Axis, Dims, broadcast_from, regroup
from lz_compile.passes.formula.pieces import Piece, Rule, Space, first_of, getitem, only, placed_at, wrapped
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.formula.polynomial import ONE, Polynomial, lower, number
from lz_compile.passes.formula.predicates import FALSE, TRUE, Predicate, at_least, both
from lz_compile.passes.graph.view import Call, known_tensor, reached, read, tensor_of

#: Calls to which strides matter exactly; to pointwise ones, only their order does.
STRIDED = frozenset({"view", "view_as", "as_strided", "stride", "data_ptr", "is_contiguous", "storage_offset"})
#: Readers to which the strides of what they read make no difference that anyone can see.
_AGNOSTIC = contraction.PRODUCTS | {"contiguous", "layer_norm", "rms_norm", "sum", "mean", "softmax", "log_softmax"}


def strides_matter(node: fx.Node) -> bool:
    """Whether strides of ``node`` matter to someone: a ``view`` that needs them, an output, or who knows what."""

    def readers(user: fx.Node) -> Iterable[fx.Node]:
        call = read(user)
        return () if call is not None and call.name in _AGNOSTIC else user.users

    users = [*reached(node.users, readers)]
    shown = {node, *users}
    return any(_are_seen_by(user) for user in users if not _only_stores(user, shown))


def _only_stores(user: fx.Node, values: Collection[fx.Node]) -> bool:
    """Whether a call writes ``values`` into a piece of another tensor, which keeps its own strides."""
    return user.target is operator.setitem and user.args[0] not in values


def _are_seen_by(user: fx.Node) -> bool:
    """Whether strides matter to a call itself, rather than to who reads its result."""
    call = read(user)
    if call is None or call.name in _AGNOSTIC:
        return call is None
    is_layout = layout.is_view(call) or call.name in ("chunk", "split", "unbind", "getitem")
    return call.is_inplace or call.name in ("view", "view_as") or not (is_layout or is_pointwise(call))


def order_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    """What pointwise operations take over of a tensor's strides.

    They pack the dimensions in the order that they have in memory. Where elements repeat (a stride of zero) there is none:
    which order they take then depends on that of the dimensions themselves, after a transpose for one.
    """
    strides, packed = map(strides_of, (tensor, torch.empty_like(tensor)))
    return tuple(0 if stride == 0 else dense for stride, dense in zip(strides, packed, strict=True))


def that_count(strides: Sequence[Any], tensor: torch.Tensor) -> tuple[Any, ...]:
    """Those of dimensions with more than one element: the others lead nowhere, and PyTorch makes them up."""
    return tuple(stride for stride, extent in zip(strides, tensor.shape, strict=False) if as_size(extent) not in (0, 1))


def order_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """Dimensions in the order that they have in memory; None where that is none, or has gaps."""
    strides, sizes = strides_of(tensor), shape_of(tensor)
    order, _ = layout.stride_order(tensor)
    width: Size = 1
    for dim in reversed(order):
        if strides[dim] != width and sizes[dim] != 1:
            return None
        width = product((width, sizes[dim]))
    return order


# ---- selections ---------------------------------------------------------------------------------------------------


def _select(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    named = layout.named_dim(call)
    if named is None:
        return None
    place = wrapped(space, space.integer(call.get("index")), named[1])
    return only(call, placed_at(space, call, dims, named[0], place))


def _narrow(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    named = layout.named_dim(call)
    start = None if named is None else first_of(space, call.get("start"), named[1])
    if named is None or start is None:
        return None
    return only(call, placed_at(space, call, dims, named[0], start + space.place(dims[named[0]])))


def _index_select(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    named, index = layout.named_dim(call), call.get("index")
    tensor = tensor_of(index)
    if named is None or tensor is None:
        return None
    place = space.index_at(index, (dims[named[0]],) if tensor.dim() else (), call.node)
    return only(call, placed_at(space, call, dims, named[0], place))


def _gather(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    named, index = layout.named_dim(call), call.get("index")
    if named is None or tensor_of(index) is None:
        return None
    own, shape = broadcast_from(dims, shape_of(known_tensor(index))), shape_of(known_tensor(call.input))
    place = space.index_at(index, own, call.node)
    if place is None or len(shape) != len(dims):
        return None
    source = [_in(space, dim, size) for dim, size in zip(dims, shape, strict=True)]
    source[named[0]] = space.dim_at(place, named[1])
    return only(call, tuple(source))


def _in(space: Space, dim: tuple[Axis, ...], size: Size) -> tuple[Axis, ...]:
    """The first positions of a dimension that may be larger, or of one element for all."""
    is_whole = size == 1 or product(axis.size for axis in dim) == size
    return (() if size == 1 else dim) if is_whole else space.dim_at(space.place(dim), size)


def _embedding(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    index, table = call.input, call.get("weight")
    held = tensor_of(table)
    if held is None or tensor_of(index) is None or call.get("max_norm") is not None:
        return None
    if not held.is_floating_point():  # PyTorch has it both ways round
        index, table, held = table, index, known_tensor(index)
    place = space.index_at(index, dims[:-1], call.node)
    if place is None:
        return None
    return [Piece(table, (space.dim_at(place, as_size(held.shape[0])), dims[-1]), call.node)]


def _flip(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    flipped, source = call.get("dims") or call.positional(), tensor_of(call.input)
    if source is None or not isinstance(flipped, (tuple, list)) or not all(isinstance(dim, int) for dim in flipped):
        return None
    sizes, turned = shape_of(source), list(dims)
    for dim in flipped:
        turned[dim] = space.dim_at(space.size(sizes[dim]) - ONE - space.place(dims[dim]), sizes[dim])
    return only(call, tuple(turned))


def _roll(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    source = tensor_of(call.input)
    given = map(call.get, ("shifts", "dims"))
    shifts, turned = (each if isinstance(each, (tuple, list)) else [each] for each in given)
    is_known = all(isinstance(each, int) for each in (*shifts, *turned)) and len(shifts) == len(turned)
    if source is None or not is_known or len({dim % source.dim() for dim in turned}) < len(turned):
        return None
    ways = [_rolled(space, dims[dim], as_size(source.shape[dim]), by) for dim, by in zip(turned, shifts, strict=True)]
    if any(way is None for way in ways):
        return None
    pieces = []
    for way in itertools.product(*(each for each in ways if each is not None)):
        when, moved = both(*(each for each, _ in way)), list(dims)
        if when == FALSE:
            continue
        for dim, (_, place) in zip(turned, way, strict=True):
            moved[dim] = space.dim_at(place, as_size(source.shape[dim]))
        pieces.append(Piece(call.input, tuple(moved), call.node, when))
    return _complete(pieces)


def _rolled(space: Space, dim: tuple[Axis, ...], size: Size, shift: int) -> list[tuple[Predicate, Polynomial]] | None:
    """Where elements come from that were not rolled over the end, and those that were."""
    if isinstance(size, int):
        shift %= size
    extent, here = space.size(size), space.place(dim)
    least = lower(extent - number(abs(shift)))
    if least is None or least < 0:
        return None
    first = number(shift) if shift >= 0 else extent + number(shift)
    return [(at_least(here - first), here - first), (at_least(first - here - ONE), here - first + extent)]


def _unfold(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    source, dim, step = tensor_of(call.input), call.get("dimension"), call.get("step")
    if source is None or len(dims) != source.dim() + 1 or not isinstance(dim, int) or not isinstance(step, int):
        return None  # the first also where it is the unfold of images
    place = space.place(dims[dim % source.dim()]).scaled(step) + space.place(dims[-1])
    return only(call, placed_at(space, call, dims[:-1], dim % source.dim(), place))


def _diagonal(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    source = tensor_of(call.input)
    offset, one, two = (call.get(name, default) for name, default in (("offset", 0), ("dim1", 0), ("dim2", 1)))
    if source is None or not all(isinstance(each, int) for each in (offset, one, two)):
        return None
    rows, columns = one % source.dim(), two % source.dim()
    here, rest, shape = space.place(dims[-1]), iter(dims[:-1]), shape_of(source)
    own = {rows: here + number(max(-offset, 0)), columns: here + number(max(offset, 0))}
    found = (space.dim_at(own[d], size) if d in own else next(rest) for d, size in enumerate(shape))
    return only(call, tuple(found))


def _as_strided(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    """Elements of the memory of a tensor that fills it, in whatever order of its dimensions; none beside it."""
    source, strides, offset = tensor_of(call.input), call.get("stride"), call.get("storage_offset")
    order = None if source is None else order_in_memory(source)
    if source is None or order is None or not isinstance(strides, (tuple, list)):
        return None
    begin = as_size(source.storage_offset())
    start, given = (
        space.size(begin) if offset is None else space.integer(offset),
        [space.integer(each) for each in strides],
    )
    if start is None or any(each is None for each in given):
        return None
    start = start - space.size(begin)
    for stride, dim in zip(given, dims, strict=True):
        start = start + stride * space.place(dim)  # type: ignore[operator]  # none is None
    shape = [shape_of(source)[dim] for dim in order]
    if any(least is None or least < 0 for least in (lower(start), lower(space.size(product(shape)) - ONE - start))):
        return None

    def laid(flat: Dims) -> Dims:
        inner = regroup(flat[0], shape)
        return tuple(inner[order.index(dim)] for dim in range(len(order)))

    return only(call, space.through((space.dim_at(start, product(shape)),), laid))


# ---- joins --------------------------------------------------------------------------------------------------------


def _cat(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    tensors, dim = call.get("tensors"), call.get("dim", 0)
    parts = [(each, tensor_of(each)) for each in tensors] if isinstance(tensors, (tuple, list)) else []
    if not isinstance(dim, int) or not parts or any(each is None or each.dim() != len(dims) for _, each in parts):
        return None
    dim %= len(dims)
    here, found = space.place(dims[dim]), list[Piece]()
    for node, tensor in parts:
        size = as_size(tensor.shape[dim])  # type: ignore[union-attr]
        end = here - space.size(size)
        when = at_least(-end - ONE)
        if when != FALSE:
            found.append(Piece(node, (*dims[:dim], space.dim_at(here, size), *dims[dim + 1 :]), call.node, when))
        if when == TRUE:
            break
        here = end
    return _complete(found)


def _stack(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    tensors, dim = call.get("tensors"), call.get("dim", 0)
    if not isinstance(tensors, (tuple, list)) or not isinstance(dim, int):
        return None
    dim %= len(dims)
    here, source = space.place(dims[dim]), (*dims[:dim], *dims[dim + 1 :])
    return _complete([Piece(each, source, call.node, at_least(number(i) - here)) for i, each in enumerate(tensors)])


def _complete(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Pieces that cover every index: the last one holds where no other one does."""
    return [*pieces[:-1], replace(pieces[-1], when=TRUE)]


def _pad(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    source, pads, value = tensor_of(call.input), call.get("pad"), call.get("value")
    if source is None or call.get("mode", "constant") != "constant" or not isinstance(pads, (tuple, list)):
        return None
    inside, shifted, sizes = [], list(dims), shape_of(source)
    for i in range(len(pads) // 2):
        dim, before = len(dims) - 1 - i, space.integer(pads[2 * i])
        if before is None:
            return None
        place = space.place(dims[dim]) - before
        inside += [at_least(place), at_least(space.size(sizes[dim]) - ONE - place)]
        shifted[dim] = space.dim_at(place, sizes[dim])
    own = Piece(call.input, tuple(shifted), call.node, both(*inside))
    return [own, Piece(0 if value is None else value, (), call.node)]


def _scattered(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    """A tensor with another one in the place of a slice, or of one position, of a dimension."""
    named, value, step = layout.named_dim(call, 0), call.get("src"), call.get("step", 1)
    if call.name == "index_copy":
        start, step = _evenly(space, call)
    else:
        start = None if named is None else first_of(space, call.get("start", call.get("index")), named[1])
    if named is None or start is None or tensor_of(value) is None or not isinstance(step, int):
        return None
    dim, offset = named[0], space.place(dims[named[0]]) - start
    drops = call.name == "select_scatter"
    if any(monomial and factor % step for monomial, factor in offset.terms.items()):
        return None  # now within the slice, now beside it
    size, place = as_size(known_tensor(value).shape[dim]) if not drops else 1, offset.scaled(Fraction(1, step))
    inside = both(at_least(place), at_least(space.size(size) - ONE - place))
    pieces = [Piece(call.input, dims, call.node)]
    if inside != FALSE and not offset.terms.get((), 0) % step:
        own = () if drops else (space.dim_at(place, size),)
        pieces.insert(0, Piece(value, (*dims[:dim], *own, *dims[dim + 1 :]), call.node, inside))
    return pieces


def _evenly(space: Space, call: Call) -> tuple[Polynomial | None, int]:
    """The first of the positions that a row of indices names (None: they are not in order), and how far apart they are."""
    index = tensor_of(call.get("index"))
    count = None if index is None or index.dim() != 1 else as_size(index.shape[0])
    if not isinstance(count, int) or not 0 < count <= _MOST_PLACES:
        return None, 1
    places = [space.index_at(call.get("index"), (space.dim_at(number(i), count),), call.node) for i in range(count)]
    known = [int(each.terms.get((), 0)) for each in places if each is not None and not each.terms.keys() - {()}]
    step = known[1] - known[0] if len(known) > 1 else 1
    is_even = step > 0 and len(known) == count and known == [*range(known[0], known[0] + step * count, step)]
    return (number(known[0]), step) if is_even and known[0] >= 0 else (None, 1)


#: Of longer rows of indices nobody asks where each stores to.
_MOST_PLACES = 512
#: Calls that give a tensor with another one in the place of a part.
STORES = frozenset({"slice_scatter", "select_scatter", "index_copy"})
RULES: Mapping[str, Rule] = {
    "getitem": getitem,
    "select": _select,
    "narrow": _narrow,
    "index_select": _index_select,
    "gather": _gather,
    "take_along_dim": _gather,
    "embedding": _embedding,
    "flip": _flip,
    "roll": _roll,
    "unfold": _unfold,
    "diagonal": _diagonal,
    "as_strided": _as_strided,
    "cat": _cat,
    "stack": _stack,
    "pad": _pad,
    **dict.fromkeys(STORES, _scattered),
}


def shown(space: Space, call: Call, dims: Dims) -> Piece | None:
    """The one tensor that a call shows, whatever the index; None where it is no call of :data:`RULES`, or shows several."""
    rule = RULES.get(call.name)
    found = [piece for piece in (() if rule is None else rule(space, call, dims) or ()) if piece.when != FALSE]
    return found[0] if found and found[0].when == TRUE else None
