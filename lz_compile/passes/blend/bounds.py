"""What bounds do to a value: nothing where it keeps within them, and ``clamp(1 - w, 0, 1)`` is ``1 - clamp(w, 0, 1)``.

Both hold for every number, and NaN stays NaN. So a weight and its complement may be held within their bounds one by one and
still add up to one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.blend.gate import is_zero
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Dims, LayoutError, broadcast_from, fresh
from lz_compile.passes.formula.expressions import constant_value, number
from lz_compile.passes.formula.pointwise import AT_LEAST, AT_MOST, BENDS, Rule
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, told
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of

Interval: TypeAlias = tuple[float, float]

#: Calls that may do nothing but hold a value within bounds.
BOUNDING = frozenset(
    {"clamp", "clamp_min", "clamp_max", "hardtanh", "relu", "relu6", "maximum", "minimum", "max", "min"}
)
EVERYWHERE: Interval = (-math.inf, math.inf)
#: Of calls that a region reads: whoever reads the bound then sees what it is needless for.
_REACHES = dict.fromkeys(("sigmoid", "hardsigmoid"), (0.0, 1.0)) | {"tanh": (-1.0, 1.0)}


@dataclass(frozen=True)
class Affine:
    """``offset + sign * x``."""

    sign: int = 1
    offset: float = 0.0

    def __call__(self, x: Any) -> Any:
        """The value at ``x``."""
        return self.offset + self.sign * x

    def after(self, first: Affine) -> Affine:
        """The function that applies ``first`` and then this one."""
        return Affine(self.sign * first.sign, self(first.offset))

    def inverse(self) -> Affine:
        """The function that undoes this one."""
        return Affine(self.sign, -self.sign * self.offset)


@dataclass(frozen=True)
class Limits:
    """The bounds that are all that a call does to a value."""

    held: fx.Node
    low: float
    high: float


@dataclass(frozen=True)
class Twin:
    """Another bounded value, of which one is the function ``outside``, and what they hold is the function ``inside``."""

    node: fx.Node
    held: fx.Node
    outside: Affine
    inside: Affine


@dataclass(frozen=True)
class Bound:
    """A bounded value as another one: as what it holds, where the bounds are needless, or by its twin."""

    held: fx.Node
    twin: Twin | None = None


@dataclass(frozen=True)
class _AllBut:
    """Reading stops everywhere but at one call, and the numbers that it is given."""

    effects: Effects
    node: fx.Node

    def __contains__(self, node: object) -> bool:
        call = self.effects.calls.get(node) if isinstance(node, fx.Node) else None
        return node is not self.node and (call is None or constant_value(call) is None)


def limits_of(effects: Effects, call: Call) -> Limits | None:
    """The bounds of a call that does nothing else; None for others."""
    tensor = tensor_of(call.node)
    if call.name not in BOUNDING or call.is_inplace or tensor is None or not tensor.is_floating_point():
        return None
    region = Region(effects, expand_masks=True, stops=_AllBut(effects, call.node), functions=BENDS)
    try:
        inner = region.express(call.node, fresh(shape_of(tensor)))
    except (LayoutError, MutatedError):
        return None
    low, high = EVERYWHERE
    while inner.func in (AT_LEAST, AT_MOST):
        values = [each for each in inner.args if not each.is_number]
        bounds = [float(each) for each in inner.args if each.is_number]
        if len(values) != 1 or len(bounds) != 1:
            return None
        within = min(max(bounds[0], low), high)  # what is applied later has the last word
        low, high = (within, high) if inner.func is AT_LEAST else (low, within)
        inner = values[0]
    return Limits(region.leaves[inner].node, low, high) if inner in region.leaves else None


def reach_of(effects: Effects, node: fx.Node, limits: Limits | None) -> Interval:
    """Between which numbers a value surely lies."""
    tensor, call = tensor_of(node), effects.calls.get(node)
    if limits is not None:
        return limits.low, limits.high
    if tensor is not None and tensor.dtype == torch.bool:
        return 0.0, 1.0
    return EVERYWHERE if call is None else _REACHES.get(call.name, EVERYWHERE)


def product(one: Interval, other: Interval) -> Interval:
    """Between which numbers a product lies."""
    ends = [0.0 if 0 in (first, second) else first * second for first in one for second in other]
    return min(ends), max(ends)


# ---- in axes ---------------------------------------------------------------------------------------------------------


@dataclass
class BoundReader:
    """Reads bounded values of a region as others; notes which, and what they are computed from, with their dims."""

    effects: Effects
    bounds: Mapping[fx.Node, Bound]
    read: dict[fx.Node, Dims] = field(default_factory=dict)
    sources: dict[fx.Node, Dims] = field(default_factory=dict)

    @property
    def functions(self) -> dict[str, Rule]:
        """What a region calls."""
        return dict.fromkeys(BOUNDING, self._rule)

    def _rule(self, region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        bound = self.bounds.get(call.node)
        if bound is None:
            return None
        whole = Region(self.effects, expand_masks=True, functions=BENDS)
        held = whole.express(bound.held, _dims_of(bound.held, dims))
        self.read[call.node] = dims
        twin = bound.twin
        if twin is None:
            found = region.express(bound.held, _dims_of(bound.held, dims), call.node)
        else:
            if not is_zero(held - twin.inside(whole.express(twin.held, _dims_of(twin.held, dims)))):
                raise LayoutError("a weight and its complement are bounded along different dimensions")
            self.read[twin.node] = dims
            found = twin.outside.sign * region.express(twin.node, dims, call.node) + number(twin.outside.offset)
        self._note(whole)
        return found

    def _note(self, whole: Region) -> None:
        """What a region is computed from: its leaves, and tensors that give their shape."""
        self.sources |= {leaf.node: leaf.dims for leaf in whole.leaves.values()}
        for node, own in whole.interior.items():
            for operand in node.all_input_nodes:
                if operand in whole.interior or operand in self.sources:
                    continue
                pair = [tensor_of(each) for each in (operand, node)]
                if pair[0] is None or pair[1] is None or shape_of(pair[0]) != shape_of(pair[1]):
                    raise LayoutError(f"{told(node)} spells out sizes, which differ in a proof")
                self.sources[operand] = own


def _dims_of(node: fx.Node, dims: Dims) -> Dims:
    tensor = known_tensor(node)
    if tensor.dim() > len(dims):
        raise LayoutError(f"{told(node)} has more dimensions than what is bounded")
    return broadcast_from(dims, shape_of(tensor))
