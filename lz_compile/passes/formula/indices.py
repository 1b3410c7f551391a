"""Positions in dimensions, as polynomials over axes and symbolic sizes.

As in :mod:`layout`, each dimension of a tensor is a product of axes. Where an operation selects, the index is no product of
the given axes any more: then the dimension gets an axis of its own, whose position is a polynomial in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from lz_compile.ground.sizes import Size, as_size, is_guarded_from_zero, product, symbolic_size
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms
from lz_compile.passes.formula.polynomial import ONE, ZERO, Polynomial, Quotients, Variable, number, quotient, variable
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of, value_of


class Indices:
    """What the axes of one reading are as positions; those that are given are variables."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.quotients: Quotients = {}
        self.counted: set[Polynomial] = set()
        self._places: dict[Axis, Polynomial] = {}
        self._given: set[Axis] = set()
        self._runs: dict[tuple[Polynomial, Size], tuple[Axis, ...]] = {}
        self._sizes: dict[sympy.Expr, Variable] = {}

    def give(self, dims: Dims) -> None:
        """Take the axes of ``dims`` as index variables."""
        for axis in atoms(axis for dim in dims for axis in dim):
            if axis not in self._given:
                most = self.size(axis.size) - ONE
                index = Variable(f"i{len(self._given)}", ZERO, most, 1, frozenset({axis}), axis)
                self._given.add(axis)
                self._places[axis] = variable(index)
                self._runs[variable(index), axis.size] = (axis,)

    def place(self, dim: Iterable[Axis]) -> Polynomial:
        """The position in a dimension that is a product of axes."""
        place, total = ZERO, 1
        axes = atoms(dim)
        for axis in axes:
            place = place * self.size(axis.size) + self._places[axis]
            total = total * axis.size
        if axes and all(axis in self._given for axis in axes):
            self._runs.setdefault((place, total), axes)
        return place

    def dim_at(self, place: Polynomial, size: Size) -> tuple[Axis, ...]:
        """A dimension of this size at a position: axes that are known, or one of its own."""
        if size == 1:
            return ()
        if (place, size) not in self._runs:
            axis = Axis(size)
            self._places[axis] = place
            self._runs[place, size] = (axis,)
        return self._runs[place, size]

    def is_plain(self, dims: Dims) -> bool:
        """Whether every dimension is a product of the given axes."""
        return all(axis in self._given for dim in dims for axis in dim)

    def axes_at(self, dims: Dims) -> frozenset[Axis]:
        """The given axes that a place depends on."""
        return frozenset(axis for dim in dims for each in dim for axis in self._places[each].axes)

    def through(self, dims: Dims, layout: Callable[[Dims], Dims | None]) -> Dims | None:
        """What a change of layout makes of dims, without a cut of the axes that are given.

        Raises:
            LayoutError: it has no exact form in axes.
        """
        try:
            return self._through(dims, layout)
        except LayoutError:  # as where 6 times 4 elements are taken 8 by 8: then each dimension is one axis, and cut
            return self._through(tuple((self._joined(dim),) if dim else () for dim in dims), layout)

    def _joined(self, dim: tuple[Axis, ...]) -> Axis:
        """A dimension as one axis."""
        axis = Axis(product(each.size for each in dim))
        self._places[axis] = self.place(dim)
        return axis

    def _through(self, dims: Dims, layout: Callable[[Dims], Dims | None]) -> Dims | None:
        placeholders = {axis: Axis(axis.size) for dim in dims for axis in dim}
        source = layout(tuple(tuple(placeholders[axis] for axis in dim) for dim in dims))
        if source is None:
            return None
        originals = {placeholder: axis for axis, placeholder in placeholders.items()}
        for placeholder, axis in list(originals.items()):
            self._cut(placeholder, self._places[axis], originals)
        return tuple(tuple(originals[each] for each in atoms(dim)) for dim in source)

    def _cut(self, placeholder: Axis, place: Polynomial, originals: dict[Axis, Axis]) -> None:
        """Give the parts of an axis that a reshape cut their positions."""
        if not placeholder.parts:
            return
        _, minor = placeholder.parts
        if not isinstance(minor.size, int):
            raise LayoutError(f"an axis of {placeholder.size} is cut at a symbolic size")
        above = quotient(place, minor.size, self.quotients)
        for part, position in zip(placeholder.parts, (above, place - above.scaled(minor.size)), strict=True):
            known = self._runs.get((position, part.size), ())
            axis = known[0] if len(known) == 1 else Axis(part.size)
            self._places[axis] = position
            originals[part] = axis
            self._cut(part, position, originals)

    def index_at(self, node: fx.Node | list[int], dims: Dims, by: fx.Node) -> Polynomial | None:
        """The one position that a tensor of indices holds: what only readers of values know."""
        return None

    # ---- numbers ----------------------------------------------------------------------------------------------

    def integer(self, value: Any) -> Polynomial | None:
        """A Python or symbolic integer."""
        known = value_of(value)
        if not isinstance(known, (int, torch.SymInt)):
            return None
        found = self.size(as_size(known))
        if isinstance(known, torch.SymInt) and is_guarded_from_zero(known):
            self.counted.add(found)
        return found

    def size(self, size: Size) -> Polynomial:
        """An extent, or any symbolic integer."""
        if isinstance(size, int):
            return number(size)
        if isinstance(size, sympy.Add):
            total = ZERO
            for term in size.args:
                total = total + self.size(term)
            return total
        if isinstance(size, sympy.Mul):
            factor = ONE
            for term in size.args:
                factor = factor * self.size(term)
            return factor
        if size.is_Integer:
            return number(int(size))
        if isinstance(size, FloorDiv) and size.args[1].is_Integer and size.args[1] > 0:
            return quotient(self.size(size.args[0]), int(size.args[1]), self.quotients)
        if size not in self._sizes:
            self._sizes[size] = self._size_variable(size)
        return variable(self._sizes[size])

    def _size_variable(self, size: sympy.Expr) -> Variable:
        tensors = (tensor for tensor in map(tensor_of, self.effects.position) if tensor is not None)
        known = symbolic_size(size, tensors)
        # a range that begins at 0 may have been cut there
        least = known.lower if known.lower > 0 or size.is_nonnegative else None
        return Variable(
            str(size),
            None if least is None else number(least),
            None if known.upper is None else number(known.upper),
            source=size,
            is_size=True,
        )
