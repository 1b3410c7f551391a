"""A tensor read as a function of its index: upwards through the graph, one polynomial per dimension.

``x[:, None, None, :]`` at batch ``b``, head ``h``, query ``q`` and key ``k`` is ``x`` at ``(b, k)``;
``torch.arange(n)`` at ``(k,)`` is ``k``; ``a <= b`` at an index is the comparison of ``a`` and ``b`` there. What has no rule
is a leaf: an unknown number, or condition, that depends on the axes of its own index. Its node says where reading gave up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.passes.formula import layout, value_rules
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, axes_of, regroup, resolve
from lz_compile.passes.formula.expressions import constant_value, specialised
from lz_compile.passes.formula.indices import Indices
from lz_compile.passes.formula.piecewise import Piecewise, Value, everywhere, held, plain, weight_of
from lz_compile.passes.formula.polynomial import ONE, Polynomial, Variable, lower, variable
from lz_compile.passes.formula.position_rules import boolean, numeric
from lz_compile.passes.formula.predicates import Given
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of, value_of

#: A value is not computed in more steps than this, one after the other.
_DEPTH = 60
#: Nor does it depend on more conditions.
_HEAVY = 16


@dataclass(frozen=True)
class Source:
    """A tensor at an index."""

    node: fx.Node
    dims: Dims


@dataclass(frozen=True)
class Sum:
    """A sum of numbers over axes: what a variable stands for that is one."""

    body: Piecewise
    over: tuple[Axis, ...]


class Reader(Indices):
    """Values of one graph's tensors at an index, each read once."""

    def __init__(self, effects: Effects) -> None:
        super().__init__(effects)
        self._leaves: dict[tuple[fx.Node, Dims, fx.Node | None], Value] = {}
        self._values: dict[tuple[fx.Node, Dims], Value] = {}
        self._rounded: dict[fx.Node, bool] = {}
        self._depth = 0
        self._unknowns = 0

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

    def value(self, value: Any, dims: Dims, by: fx.Node) -> Value | None:
        """A tensor at ``dims``, or a number; None for anything else."""
        return self.read(value, dims, by) if tensor_of(value) is not None else self.scalar(value)

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
            value = self._rearranged(call, dims) or value_rules.read(self, call, dims)
            return self.leaf(node, dims) if value is None or weight_of(value) > _HEAVY else value
        except LayoutError:
            return self.leaf(node, dims)
        finally:
            self._depth -= 1

    def _rearranged(self, call: Call, dims: Dims) -> Value | None:
        """The input's value where the call is a layout operation."""
        if not layout.rearranges(call) or not isinstance(call.input, fx.Node):
            return None
        try:
            source = self.through(dims, lambda each: layout.read_input_dims(call, each))
        except LayoutError:
            source = self._counted(call, dims)
        return None if source is None else self.read(call.input, source, call.node)

    def _counted(self, call: Call, dims: Dims) -> Dims:
        """Where a reshape reads that regroups no axes: elements are counted in the result, and again in the input.

        Raises:
            LayoutError: it is no reshape, or sizes are not known.
        """
        if call.name not in layout.REGROUPING:
            raise LayoutError(f"{call.name} has no exact form in axes")
        shape = shape_of(known_tensor(call.input))
        source = self.through((axes_of(dims),), lambda each: regroup(each[0], shape))
        assert source is not None, "a run of elements has a place in every shape"
        return source

    def _named(self, node: fx.Node, dims: Dims, value: Value) -> Value:
        """The value, for a reading of its own to name or to replace by a leaf."""
        return value

    def leaf(self, node: fx.Node, dims: Dims, reader: fx.Node | None = None) -> Value:
        """An unknown at an index."""
        key = (node, dims, reader)
        if key not in self._leaves:
            self._leaves[key] = self._leaf(node, dims, reader)
        return self._leaves[key]

    def _leaf(self, node: fx.Node, dims: Dims, reader: fx.Node | None) -> Value:
        tensor = tensor_of(node)
        unknown = self._unknown(
            "x",
            rank=1,
            axes=self.axes_at(dims),
            source=Source(node, dims),
            is_data=True,
            is_float=tensor is not None and tensor.is_floating_point(),
        )
        is_boolean = tensor is not None and tensor.dtype == torch.bool
        return Given(unknown) if is_boolean else everywhere(variable(unknown))

    def _unknown(self, letter: str, **facts: Any) -> Variable:
        self._unknowns += 1
        return Variable(f"{letter}{self._unknowns - 1}", **facts)

    def scalar(self, value: Any) -> Piecewise | None:
        """A Python number, or a symbolic one."""
        value = specialised(value)
        known = value_of(value)
        if isinstance(known, torch.SymInt):
            return everywhere(self.size(as_size(known)))
        if isinstance(known, (bool, int, float)):
            return everywhere(plain(known))
        return None

    def index_at(self, node: fx.Node | list[int], dims: Dims, by: fx.Node) -> Polynomial | None:
        """The one position that a tensor of indices holds, where it is none from the end; None where it is not known."""
        if isinstance(node, list) or self._is_rounded(node):
            return None
        value = numeric(self.read(node, dims, by))
        single = None if value is None or not value.is_exact else value.single
        least = None if single is None else lower(single)
        return single if least is not None and least >= 0 else None

    def _is_rounded(self, node: fx.Node) -> bool:
        """Whether an index is computed from floats: buckets of distances are, and no polynomial tells them."""
        if node not in self._rounded:
            tensor = tensor_of(node)
            self._rounded[node] = tensor is not None and (
                tensor.is_floating_point() or any(map(self._is_rounded, node.all_input_nodes))
            )
        return self._rounded[node]

    # ---- sums -------------------------------------------------------------------------------------------------

    def count(self, over: tuple[Axis, ...]) -> Polynomial:
        """How many indices axes have."""
        count = ONE
        for axis in over:
            count = count * self.size(axis.size)
        return count

    def total(self, summand: Piecewise, over: tuple[Axis, ...]) -> Piecewise | None:
        """The sum of a number over axes that were given; None where it stays a tensor of its own."""
        if summand.axes.isdisjoint(over):
            return summand * everywhere(self.count(over))
        return self._sum(summand, over)

    def _sum(self, summand: Piecewise, over: tuple[Axis, ...]) -> Piecewise | None:
        unknown = self._unknown(
            "s",
            rank=1,
            axes=summand.axes - set(over),
            source=Sum(summand, over),
            is_data=any(each.is_data for each in summand.variables),
            is_float=any(each.is_float for each in summand.variables),
        )
        return everywhere(variable(unknown), is_exact=summand.is_exact)
