"""A mask read as a function of its index (:mod:`formula.reader`), with what it takes to find its tensors again.

A leaf made of constants is evaluated and read from its values. What a tensor of the graph holds as it is, is noted with that
tensor: kernels take conditions, documents and slopes from there.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.formula.piecewise import Piecewise, Value
from lz_compile.passes.formula.polynomial import Polynomial, Variable
from lz_compile.passes.formula.predicates import Given, Predicate, negation
from lz_compile.passes.formula.reader import Reader as FormulaReader
from lz_compile.passes.formula.reader import Source
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.masks import constant_patterns
from lz_compile.passes.masks.constants import Constants


class Reader(FormulaReader):
    """Values of one graph's masks at an index.

    ``positions`` are the axes of queries and keys. ``sources`` has a tensor for conditions and integers that one holds as
    it is; ``buffers`` are those whose values were looked at.
    """

    def __init__(self, effects: Effects, constants: Constants, positions: Iterable[Axis]) -> None:
        super().__init__(effects)
        self.constants = constants
        self.positions = frozenset(positions)
        self.sources: dict[Predicate | Polynomial, Source] = {}
        self.buffers: dict[fx.Node, None] = {}

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
        return not self.axes_at(dims).isdisjoint(self.positions)

    def _leaf(self, node: fx.Node, dims: Dims, reader: fx.Node | None) -> Value:
        """An unknown, or what its values tell where it is constant."""
        return self._constant(node, dims, reader) or super()._leaf(node, dims, reader)

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

    def _sum(self, summand: Piecewise, over: tuple[Axis, ...]) -> Piecewise | None:
        """None: sums over data are tensors that kernels may take as they are."""
        return None


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
