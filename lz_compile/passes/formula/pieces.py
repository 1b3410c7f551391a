"""What an operation that moves elements shows at an index: pieces, of which the first whose condition holds is the value.

A rule asks a :class:`Space` what positions are. What becomes of its pieces is the reader's business: a choice by conditions,
or the only piece that can be. Subscripts, and parts of calls that return several tensors, have their rules here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from lz_compile.ground.sizes import Size, as_size, product, shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Axis, Dims, broadcast_from
from lz_compile.passes.formula.polynomial import ZERO, Polynomial, lower, number
from lz_compile.passes.formula.predicates import TRUE, Predicate
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of


class Space(Protocol):
    """What rules ask of a reader: positions of dims, dims at positions, and indices that tensors hold."""

    effects: Effects
    #: Integers that a guard says not to be negative.
    counted: set[Polynomial]

    def place(self, dim: tuple[Axis, ...]) -> Polynomial:
        """The position in a dimension."""

    def dim_at(self, place: Polynomial, size: Size) -> tuple[Axis, ...]:
        """A dimension of this size at a position."""

    def size(self, size: Size) -> Polynomial:
        """An extent."""

    def integer(self, value: Any) -> Polynomial | None:
        """A Python or symbolic integer; None for anything else."""

    def index_at(self, node: fx.Node | list[int], dims: Dims, by: fx.Node) -> Polynomial | None:
        """The one position that a tensor or list of indices holds, below zero if from the end; None where it is not known."""

    def through(self, dims: Dims, layout: Callable[[Dims], Dims | None]) -> Dims | None:
        """What a change of layout makes of dims."""


@dataclass(frozen=True)
class Piece:
    """A tensor at ``dims``, as ``by`` reads it, or a number, where ``when`` and the condition of no earlier piece holds."""

    value: Any
    dims: Dims
    by: fx.Node
    when: Predicate = TRUE


Rule: TypeAlias = "Callable[[Space, Call, Dims], Sequence[Piece] | None]"


def only(call: Call, dims: Dims | None) -> Sequence[Piece] | None:
    """The input at one place."""
    return None if dims is None else [Piece(call.input, dims, call.node)]


def first_of(space: Space, start: Any, size: Size) -> Polynomial | None:
    """Where a slice begins. It is not past the end, for then it has no elements at all."""
    return ZERO if start is None else wrapped(space, space.integer(start), size)


def wrapped(space: Space, place: Polynomial | None, size: Size) -> Polynomial | None:
    """A position, counted from the end where it is negative; None where its sign is not known."""
    if place is None:
        return None
    least, below = lower(place), lower(-place)
    if (least is not None and least >= 0) or place in space.counted:
        return place
    from_end = place + space.size(size)
    least = lower(from_end)
    return from_end if below is not None and below > 0 and least is not None and least >= 0 else None


def placed_at(space: Space, call: Call, dims: Dims, dim: int, place: Polynomial | None) -> Dims | None:
    """The input's dims, at a position of one of them, at the result's index elsewhere (which lacks or has that one)."""
    source = tensor_of(call.input)
    if source is None or place is None:
        return None
    after = dim + 1 + len(dims) - source.dim()
    return (*dims[:dim], space.dim_at(place, as_size(source.shape[dim])), *dims[after:])


_FLAGS = (torch.bool, torch.uint8)


# ---- subscripts ---------------------------------------------------------------------------------------------------


def getitem(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    """``x[...]`` of a tensor, or one of several tensors."""
    if tensor_of(call.input) is None:
        return _part(space, call, dims)
    shape = shape_of(known_tensor(call.input))
    items = layout.spelled_out(call.arguments.get("#1"), len(shape))
    return None if items is None else only(call, _Subscript(space, call, shape, items).source(dims))


class _Subscript:
    """One subscript: where each dimension of the input is read, for an index of the result."""

    def __init__(self, space: Space, call: Call, shape: Sequence[Size], items: list[Any]) -> None:
        self.space, self.call, self.shape, self.items = space, call, shape, items
        self.tensors = [i for i, item in enumerate(items) if _held(item) is not None]

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
                own = broadcast_from(gathered, shape_of(_held(item)))  # type: ignore[arg-type]  # it is held
                place = wrapped(self.space, self.space.index_at(item, own, self.call.node), size)
            elif isinstance(item, slice):
                if not rest:
                    return None
                place = _sliced(self.space, item, size, rest.pop(0))
            else:
                place = wrapped(self.space, self.space.integer(item), size)
            if place is None:
                return None
            found.append(place if isinstance(place, tuple) else self.space.dim_at(place, size))
        return None if rest or len(found) != len(self.shape) else tuple(found)

    def _spread_rank(self) -> int | None:
        """How many dimensions the index tensors give together."""
        tensors = [_held(self.items[position]) for position in self.tensors]
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


def _held(item: Any) -> torch.Tensor | None:
    """A tensor of indices, or a list as one."""
    return torch.tensor(item, device="cpu") if isinstance(item, list) else tensor_of(item)


def _is_number(item: Any) -> bool:
    return item is not None and not isinstance(item, slice) and _held(item) is None


def _sliced(space: Space, item: slice, size: Size, dim: tuple[Axis, ...]) -> Polynomial | tuple[Axis, ...] | None:
    step = 1 if item.step is None else item.step
    start = first_of(space, item.start, size)
    if start is None or not isinstance(step, int):
        return None
    is_whole = start == ZERO and step == 1 and product(axis.size for axis in dim) == size
    return dim if is_whole else start + space.place(dim).scaled(step)


# ---- one of several tensors ---------------------------------------------------------------------------------------


def _part(space: Space, call: Call, dims: Dims) -> Sequence[Piece] | None:
    """One of the tensors that a call returns."""
    parent, which = space.effects.calls.get(call.input), call.arguments.get("#1")
    if parent is None or not isinstance(which, int):
        return None
    if parent.name == "meshgrid":
        return _mesh(parent, dims, which)
    if parent.name == "broadcast_tensors":
        tensor = parent.node.args[which]
        known = tensor_of(tensor)
        return None if known is None else [Piece(tensor, broadcast_from(dims, shape_of(known)), parent.node)]
    return _piece(space, call, parent, dims, which) if parent.name in layout.SPLITS else None


def _piece(space: Space, call: Call, parent: Call, dims: Dims, which: int) -> Sequence[Piece] | None:
    pieces = call.input.meta.get("example_value")
    named = layout.named_dim(parent, 0)
    if not isinstance(pieces, (tuple, list)) or named is None:
        return None
    dim, which = named[0], which % len(pieces)
    if parent.name == "unbind":
        return only(parent, placed_at(space, parent, dims, dim, number(which)))
    start = ZERO
    for piece in pieces[:which]:
        start = start + space.size(as_size(piece.shape[dim]))
    return only(parent, placed_at(space, parent, dims, dim, start + space.place(dims[dim])))


def _mesh(parent: Call, dims: Dims, which: int) -> Sequence[Piece] | None:
    tensors = parent.node.args[0] if isinstance(parent.node.args[0], (tuple, list)) else parent.node.args
    order = [*range(len(tensors))]
    if parent.get("indexing", "ij") == "xy" and len(order) > 1:
        order[:2] = [1, 0]
    tensor = tensors[which]
    return None if tensor_of(tensor) is None else [Piece(tensor, (dims[order[which]],), parent.node)]
