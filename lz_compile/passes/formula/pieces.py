"""What an operation that moves elements shows at an index: pieces, of which the first whose condition holds is the value.

A rule asks a :class:`Space` what positions are. What becomes of its pieces is the reader's business: a choice by conditions,
or the only piece that can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import fx

from lz_compile.ground.sizes import Size, as_size
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.formula.polynomial import ZERO, Polynomial, lower
from lz_compile.passes.formula.predicates import TRUE, Predicate
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, tensor_of


class Space(Protocol):
    """What rules ask of a reader: positions of dims, dims at positions, and indices that tensors hold."""

    effects: Effects

    def place(self, dim: tuple[Axis, ...]) -> Polynomial:
        """The position in a dimension."""

    def dim_at(self, place: Polynomial, size: Size) -> tuple[Axis, ...]:
        """A dimension of this size at a position."""

    def size(self, size: Size) -> Polynomial:
        """An extent."""

    def integer(self, value: Any) -> Polynomial | None:
        """A Python or symbolic integer; None for anything else."""

    def index_at(self, node: fx.Node, dims: Dims, by: fx.Node) -> Polynomial | None:
        """The one position, none from the end, that a tensor of indices holds; None where it is not known."""

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
    if least is not None and least >= 0:
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


def named_dim(call: Call, position: str, default: Any = None) -> tuple[int, Size] | None:
    """The dimension of the input that a call names, and its extent."""
    source, dim = tensor_of(call.input), call.get("dim", call.arguments.get(position, default))
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or source is None or not source.dim():
        return None
    return dim % source.dim(), as_size(source.shape[dim])
