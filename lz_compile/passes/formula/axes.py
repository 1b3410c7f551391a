"""Named axes: what each dimension of a tensor *is*, so that layout falls away.

A tensor dimension is an ordered product of axes (most significant first), as in ``[b, s, (h d)]``. Layout operations
are read backwards: given the axes of a result, they tell the axes of the input. Transposes permute them, reshapes
regroup them (splitting an axis where they must), and an expanded dimension simply has no axis in the input.

Dimensions of size one carry no axis at all: a broadcast over one element and an axis of one element are the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import sympy
from torch.utils._sympy.functions import FloorDiv

from lz_compile.ground.sizes import Size


@dataclass(eq=False)
class Axis:
    """One index variable and its extent. Identity is what counts: two axes of equal size are different axes.

    An axis that a reshape cuts in two keeps its identity and delegates to its ``parts``.
    """

    size: Size
    parts: tuple[Axis, ...] = field(default=())

    def __repr__(self) -> str:
        return f"Axis({self.size})"


Dims: TypeAlias = tuple[tuple[Axis, ...], ...]


class LayoutError(Exception):
    """A regrouping of axes that has no exact form, such as 6 into (4, ...)."""


def atoms(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes with every cut one replaced by its parts."""
    flat: list[Axis] = []
    for axis in axes:
        flat.extend(atoms(axis.parts) if axis.parts else (axis,))
    return tuple(flat)


def axes_of(dims: Dims) -> tuple[Axis, ...]:
    """Every atomic axis of a tensor, in the order of its dimensions."""
    return atoms(axis for dim in dims for axis in dim)


def resolve(dims: Dims) -> Dims:
    """The same dims in atomic axes."""
    return tuple(atoms(dim) for dim in dims)


def renamed(dims: Dims, names: Mapping[Axis, Axis]) -> Dims:
    """The same dims in atomic axes, with others in the place of some."""
    return tuple(tuple(names.get(axis, axis) for axis in dim) for dim in resolve(dims))


def fresh(shape: Sequence[Size]) -> Dims:
    """New axes for a tensor of this shape, none for dimensions of size one."""
    return tuple(() if size == 1 else (Axis(size),) for size in shape)


def quotient(large: Size, small: Size) -> Size | None:
    """``large / small`` where that is exact, else None."""
    if small == 0:
        return None
    if isinstance(large, int) and isinstance(small, int):
        return large // small if large % small == 0 else None
    for over, under in ((large, small), (_exact(large), _exact(small))):
        ratio = sympy.cancel(sympy.sympify(over) / under)
        if ratio.as_numer_denom()[1] == 1:
            return int(ratio) if ratio.is_Integer else ratio
    return None


def _exact(size: Size) -> sympy.Expr:
    """Floor divisions as fractions: torch infers an extent (``-1``) only where the division is exact."""
    expression = sympy.sympify(size)
    return expression.replace(FloorDiv, lambda over, under: over / under) if expression.has(FloorDiv) else expression


def take(queue: list[Axis], size: Size) -> tuple[Axis, ...]:
    """Pop axes whose product is ``size`` from the front of ``queue``, cutting the last one where it is too long."""
    taken: list[Axis] = []
    rest: Size = size
    while rest != 1:
        if not queue:
            raise LayoutError(f"no axes left for an extent of {rest}")
        axis = queue.pop(0)
        remaining = quotient(rest, axis.size)
        if remaining is not None:
            taken.append(axis)
            rest = remaining
            continue
        remainder = quotient(axis.size, rest)
        if remainder is None:
            raise LayoutError(f"an axis of {axis.size} does not split at {rest}")
        axis.parts = (Axis(rest), Axis(remainder))
        taken.append(axis.parts[0])
        queue.insert(0, axis.parts[1])
        rest = 1
    return tuple(taken)


def regroup(axes: Iterable[Axis], shape: Sequence[Size]) -> Dims:
    """Distribute a row-major run of axes over the dimensions of ``shape``, as a reshape does.

    Raises:
        LayoutError: the extents do not factor.
    """
    queue = list(atoms(axes))
    dims = tuple(take(queue, size) for size in shape)
    if queue:
        raise LayoutError(f"axes {queue} are left over for shape {tuple(shape)}")
    return dims


def broadcast_from(dims: Dims, shape: Sequence[Size]) -> Dims:
    """The dims of an operand of ``shape`` that was broadcast to a result with ``dims`` (aligned at the right).

    Raises:
        LayoutError: it has more dimensions, as one that got another in place since.
    """
    if len(shape) > len(dims):
        raise LayoutError(f"{len(shape)} dimensions are not broadcast to {len(dims)}")
    tail = dims[len(dims) - len(shape) :] if shape else ()
    return tuple(() if size == 1 else dim for dim, size in zip(tail, shape, strict=True))
