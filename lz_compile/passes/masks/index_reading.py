"""A tensor read as a function of its index: upwards through the graph, one polynomial per dimension.

``mask[:, None, None, :]`` at batch ``b``, head ``h``, query ``q`` and key ``k`` is ``mask`` at ``(b, k)``;
``torch.arange(n)`` at ``(k,)`` is ``k``; ``a <= b`` at an index is the comparison of ``a`` and ``b`` there. What cannot be
read is a leaf: an unknown number, or condition, that depends on the axes of its own index. A leaf made of constants is
evaluated and read from its values.

As in :mod:`layout`, each dimension of a tensor is a product of axes. Where an operation selects, the index is no product of
the given axes any more: then the dimension gets an axis of its own, whose position is a polynomial in theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from lz_compile.ground.reasons import Reason
from lz_compile.ground.sizes import Size, as_size
from lz_compile.lowering import inductor
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, resolve
from lz_compile.passes.formula.calls import constant_value
from lz_compile.passes.formula.expressions import specialised
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, tensor_of, value_of
from lz_compile.passes.masks import constant_patterns, index_rules
from lz_compile.passes.masks.constants import Constants
from lz_compile.passes.masks.index_operands import boolean
from lz_compile.passes.masks.piecewise import Piecewise, Value, everywhere, held, plain, weight_of
from lz_compile.passes.masks.polynomial import (
    ONE,
    ZERO,
    Polynomial,
    Quotients,
    Variable,
    number,
    quotient,
    variable,
)
from lz_compile.passes.masks.predicates import Given, Predicate, negation

#: A mask is not computed in more steps than this, one after the other.
_DEPTH = 60
#: Nor does it depend on more conditions.
_HEAVY = 16


@dataclass(frozen=True)
class Source:
    """A tensor at an index. For conditions: ``holds`` says that the tensor is True where the condition holds."""

    node: fx.Node
    dims: Dims
    holds: bool = True


class Reader:
    """Values of one graph's tensors at an index.

    ``positions`` are the axes of queries and keys. ``sources`` has a tensor for conditions and integers that one holds as
    it is; ``buffers`` are those whose values were looked at.
    """

    def __init__(self, effects: Effects, constants: Constants, positions: Iterable[Axis]) -> None:
        self.effects = effects
        self.constants = constants
        self.positions = frozenset(positions)
        self.quotients: Quotients = {}
        self.sources: dict[Predicate | Polynomial, Source] = {}
        self.buffers: dict[fx.Node, None] = {}
        self._places: dict[Axis, Polynomial] = {}
        self._given: set[Axis] = set()
        self._runs: dict[tuple[Polynomial, Size], tuple[Axis, ...]] = {}
        self._sizes: dict[sympy.Expr, Variable] = {}
        self._leaves: dict[tuple[fx.Node, Dims, fx.Node | None], Value] = {}
        self._values: dict[tuple[fx.Node, Dims], Value] = {}
        self._depth = 0

    # ---- indices ----------------------------------------------------------------------------------------------

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
        known = inductor.symbolic_size(size, tensors)
        # a range that begins at 0 may have been cut there
        least = known.lower if known.lower > 0 or size.is_nonnegative else None
        return Variable(
            str(size),
            None if least is None else number(least),
            None if known.upper is None else number(known.upper),
            source=size,
            is_size=True,
        )

    # ---- values -----------------------------------------------------------------------------------------------

    def read(self, node: fx.Node, dims: Dims, reader: fx.Node | None = None) -> Value:
        """The value of ``node`` at the index that ``dims`` say, as ``reader`` sees it."""
        dims = resolve(dims)
        call = self.effects.calls[node]
        if reader is not None:
            node = self.effects.current(node, reader)
            call = self.effects.calls[node]
            if self.effects.is_opaque(node, reader):
                return self.leaf(node, dims, reader)
        key = (node, dims)
        if key not in self._values:
            self._values[key] = self._named(node, dims, self._uncached(node, call, dims))
        return self._values[key]

    def _uncached(self, node: fx.Node, call: Call | None, dims: Dims) -> Value:
        tensor = tensor_of(node)
        if call is None or tensor is None or tensor.dtype.is_complex or self._depth > _DEPTH:
            return self.leaf(node, dims)
        filled = constant_value(call)
        if filled is not None:
            number_ = everywhere(plain(filled))
            value = boolean(number_) if tensor.dtype == torch.bool else held(number_, tensor.dtype)
            return self.leaf(node, dims) if value is None else value
        self._depth += 1
        try:
            value = self._rearranged(call, dims) or index_rules.read(self, call, dims)
            return self.leaf(node, dims) if value is None or weight_of(value) > _HEAVY else value
        except LayoutError:
            return self.leaf(node, dims)
        finally:
            self._depth -= 1

    def _rearranged(self, call: Call, dims: Dims) -> Value | None:
        """The input's value where the call is a layout operation."""
        if not layout.rearranges(call) or not isinstance(call.input, fx.Node):
            return None
        placeholders = {axis: Axis(axis.size) for dim in dims for axis in dim}
        source = layout.read_input_dims(call, tuple(tuple(placeholders[axis] for axis in dim) for dim in dims))
        if source is None:
            return None
        originals = {placeholder: axis for axis, placeholder in placeholders.items()}
        for placeholder, axis in list(originals.items()):
            self._cut(placeholder, self._places[axis], originals)
        known = tuple(tuple(originals[each] for each in atoms(dim)) for dim in source)
        return self.read(call.input, known, call.node)

    def _cut(self, placeholder: Axis, place: Polynomial, originals: dict[Axis, Axis]) -> None:
        """Give the parts of an axis that a reshape cut their positions."""
        if not placeholder.parts:
            return
        _, minor = placeholder.parts
        if not isinstance(minor.size, int):
            raise LayoutError(f"an axis of {placeholder.size} is cut at a symbolic size")
        above = quotient(place, minor.size, self.quotients)
        for part, position in zip(placeholder.parts, (above, place - above.scaled(minor.size)), strict=True):
            axis = Axis(part.size)
            self._places[axis] = position
            originals[part] = axis
            self._cut(part, position, originals)

    def _named(self, node: fx.Node, dims: Dims, value: Value) -> Value:
        """The value, as a leaf at this node where that says as much, and this node noted as its source."""
        if not self.is_plain(dims) or self.effects.is_overwritten(node):
            return value
        leaf = _leaf_of(value)
        is_deep = leaf is not None and self.is_plain(leaf.source.dims)
        if (leaf is not None and not is_deep) or (not is_deep and self._is_coefficient(node, dims, value)):
            value = self.leaf(node, dims)
        if isinstance(value, Piecewise):
            single = value.single
            if single is not None and single.constant is None and not _is_floating(node):
                self.sources.setdefault(single, Source(node, dims))
        elif negation(value) not in self.sources:
            self.sources.setdefault(value, Source(node, dims))
        return value

    def _is_coefficient(self, node: fx.Node, dims: Dims, value: Value) -> bool:
        """Whether a float depends on something, but not on positions: it may be a slope."""
        if not isinstance(value, Piecewise) or not _is_floating(node) or self._has_positions(dims):
            return False
        numbers = [each for _, each in value.cases if isinstance(each, Polynomial)]
        return any(variable.is_float or variable.axes for each in numbers for variable in each.variables)

    def _has_positions(self, dims: Dims) -> bool:
        return any(not self._places[axis].axes.isdisjoint(self.positions) for dim in dims for axis in dim)

    def leaf(self, node: fx.Node, dims: Dims, reader: fx.Node | None = None) -> Value:
        """An unknown at an index, or what its values tell where it is constant."""
        key = (node, dims, reader)
        if key not in self._leaves:
            self._leaves[key] = self._constant(node, dims, reader) or self._unknown(node, dims)
        return self._leaves[key]

    def _constant(self, node: fx.Node, dims: Dims, reader: fx.Node | None) -> Value | None:
        constant = self.constants.value(node, reader)
        if isinstance(constant, Reason):
            return None
        found = constant_patterns.read(constant.value, [self.place(dim) for dim in dims])
        is_number = isinstance(found, Piecewise) and found.single is not None and found.single.constant is not None
        if found is None or (_is_floating(node) and not is_number and not self._has_positions(dims)):
            return None  # for the second: factors that differ between heads are read as they are
        self.buffers.update(dict.fromkeys(constant.buffers))
        return found

    def _unknown(self, node: fx.Node, dims: Dims) -> Value:
        tensor = tensor_of(node)
        is_boolean = tensor is not None and tensor.dtype == torch.bool
        axes = frozenset(axis for dim in dims for each in dim for axis in self._places[each].axes)
        unknown = Variable(
            f"x{len(self._leaves)}",
            rank=1,
            axes=axes,
            source=Source(node, dims),
            is_data=True,
            is_float=tensor is not None and tensor.is_floating_point(),
        )
        return Given(unknown) if is_boolean else everywhere(variable(unknown))

    def scalar(self, value: Any) -> Piecewise | None:
        """A Python number, or a symbolic one."""
        value = specialised(value)
        known = value_of(value)
        if isinstance(known, torch.SymInt):
            return everywhere(self.size(as_size(known)))
        if isinstance(known, (bool, int, float)):
            return everywhere(plain(known))
        return None

    def integer(self, value: Any) -> Polynomial | None:
        """A Python or symbolic integer."""
        known = value_of(value)
        return self.size(as_size(known)) if isinstance(known, (int, torch.SymInt)) else None


def _leaf_of(value: Value) -> Variable | None:
    """The leaf that a value is, or a multiple of."""
    if isinstance(value, Given):
        return value.flag
    single = value.single if isinstance(value, Piecewise) else None
    if single is None or len(single.terms) != 1:
        return None
    (monomial,) = single.terms
    return monomial[0] if len(monomial) == 1 and isinstance(monomial[0].source, Source) else None


def _is_floating(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is None or tensor.is_floating_point()
