"""Integers in a weight: which of the two numbers in a byte an operation takes, and arithmetic that holds its results.

Integers wrap around where a dtype does not hold a result, which no formula says. So an operation on them is read only if all
that its operands may be keeps the result within the dtype; others are tensors that are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Axis, Dims, atoms, fresh
from lz_compile.passes.formula.expressions import CASTS, Values, plain_number, unknown
from lz_compile.passes.formula.parts import FUNCTIONS, Parts
from lz_compile.passes.formula.pointwise import POINTWISE, Rule
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import Call, is_integer, known_tensor, tensor_of
from lz_compile.passes.linear.unpacked import bounds_of


class LOW(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """The lower four bits."""


class HIGH(sympy.Function):  # type: ignore[misc]
    """The upper four bits of eight."""


class _UPPER(sympy.Function):  # type: ignore[misc]
    """The upper four bits in their place: sixteen times as much."""


class CODE(sympy.Function):  # type: ignore[misc]
    """What a table of sixteen says of four bits."""


#: Between what numbers those are.
_RANGES: Mapping[Any, tuple[float, float]] = {LOW: (0, 15), HIGH: (0, 15), _UPPER: (0, 240)}
_NOTHING_KNOWN = -math.inf, math.inf


def has_bits(expression: sympy.Expr) -> bool:
    """Whether an expression takes bits of something."""
    return bool(expression.atoms(LOW, HIGH, _UPPER))


def _bounds(region: Region, x: sympy.Expr) -> tuple[float, float]:
    """Between what numbers an expression of integers is."""
    if x.is_Number:
        return float(x), float(x)
    if type(x) in _RANGES:
        return _RANGES[type(x)]
    if x in region.leaves:
        tensor = tensor_of(region.leaves[x].node)
        if tensor is None or not is_integer(tensor):
            return _NOTHING_KNOWN
        limits = torch.iinfo(tensor.dtype)
        known = bounds_of(region.effects, region.leaves[x].node)
        return (float(limits.min), float(limits.max)) if known is None else known
    if not isinstance(x, (sympy.Add, sympy.Mul)):
        return _NOTHING_KNOWN
    low, high = _bounds(region, x.args[0])
    for other in (_bounds(region, each) for each in x.args[1:]):
        if isinstance(x, sympy.Add):
            low, high = low + other[0], high + other[1]
        else:
            products = [one * two for one in (low, high) for two in other]
            low, high = min(products), max(products)
    return low, high


def _held(region: Region, call: Call, found: sympy.Expr | None) -> sympy.Expr | None:
    """What was found, if the result's dtype holds it whatever the operands are."""
    result = tensor_of(call.node)
    if found is None or result is None or not is_integer(result):
        return found
    limits, (low, high) = torch.iinfo(result.dtype), _bounds(region, found)
    return found if limits.min <= low and high <= limits.max else None


def _whole(name: str) -> Rule:
    """Arithmetic as elsewhere, where nothing wraps around."""
    return lambda region, call, dims: _held(region, call, POINTWISE[name](region, call, dims))


def _of_number(take: Callable[[sympy.Expr, float], sympy.Expr | None], name: str = "") -> Rule:
    """What an operation by a constant takes of eight bits; others, and those of floats, are read as elsewhere."""

    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        number, source = plain_number(call.get("other")), tensor_of(call.input)
        if number is not None and source is not None and is_integer(source):
            x = region.operand(call, "input", dims)
            low, high = _bounds(region, x)
            return take(x, number) if low >= 0 and high <= 255 else None
        known = POINTWISE.get(name)
        return None if known is None else _held(region, call, known(region, call, dims))

    return rule


def _and(x: sympy.Expr, number: float) -> sympy.Expr | None:
    if number == 15:
        return x if isinstance(x, (LOW, HIGH)) else LOW(x)
    if number == 240:
        return _UPPER(x)
    return x if number == 255 else None


def _shifted(x: sympy.Expr, number: float) -> sympy.Expr | None:
    if number == 0:
        return x
    return HIGH(x.args[0] if isinstance(x, _UPPER) else x) if number == 4 else None


def _divided(x: sympy.Expr, number: float) -> sympy.Expr | None:
    return HIGH(x.args[0] if isinstance(x, _UPPER) else x) if number == 16 else None


def _division(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    floors = call.get("rounding_mode") in ("floor", "trunc")
    return _of_number(_divided)(region, call, dims) if floors else POINTWISE["div"](region, call, dims)


@dataclass
class Indexed(Region):
    """A region that reads what is gathered by an index of groups of equal size.

    ``counts`` has such indices with their axes and the one that they count, ``buffers`` those whose values were looked at.
    Where groups are no neighbours, ``shuffled`` says so of the axis of columns, which is no product of groups and others
    then: it has the axis of groups, what was gathered by and its values. ``unread`` says why an index was not read, and what
    helps. ``known`` gives the values of constants.
    """

    counts: dict[fx.Node, tuple[Dims, Axis]] = field(default_factory=dict)
    buffers: dict[fx.Node, None] = field(default_factory=dict)
    shuffled: dict[Axis, tuple[Axis, fx.Node, torch.Tensor]] = field(default_factory=dict)
    unread: tuple[str, str] | None = None
    known: Values = unknown

    def gathered(self, call: Call, dims: Dims, dim: int, index: fx.Node) -> sympy.Expr | None:
        """``scale[index]``, where ``index`` is ``column // size``, or that in another order."""
        source, given = tensor_of(call.input), tensor_of(index)
        if source is None or given is None or given.dim() != 1 or given.dtype not in _PLACES:
            return None
        count, columns = source.shape[dim], given.shape[0]
        if not isinstance(count, int) or count < 2 or columns % count:
            return None
        constant = self.known(index, call.node)
        if isinstance(constant, Reason):
            text = f"groups are by {told(index)}, whose values are not known: {constant.message}"
            self.unread = text, "hold the index in a buffer that does not change"
            return None
        groups, own = constant.value.long(), atoms(dims[dim])
        node = self._uncast(self.seen_by(call.node, index), groups, dims[dim])
        axis: Axis | None = own[0]
        if not torch.equal(groups, torch.arange(columns) // (columns // count)):
            axis = None if len(own) > 1 else self._shuffled(own[0], groups, node, count)
        elif len(own) == 1 and own[0].size == columns > count:
            own[0].parts = (Axis(count), Axis(columns // count))
            axis = own[0].parts[0]
        if axis is None or axis.size != count:
            return None
        self.counts[node] = (dims[dim],), axis
        self.buffers.update(dict.fromkeys(constant.buffers))
        return self.express(call.input, (*dims[:dim], (axis,), *dims[dim + 1 :]), call.node)

    def _uncast(self, node: fx.Node, values: torch.Tensor, dim: tuple[Axis, ...]) -> fx.Node:
        """An index as it is before it is cast, as it may be for each that is gathered by it."""
        call = self.effects.calls[node]
        while call is not None and call.name in INTEGER_CASTS and is_integer(tensor_of(call.input)):
            inner = self.seen_by(node, call.input)
            known = self.known(inner, node)
            if isinstance(known, Reason) or not torch.equal(known.value.long(), values):  # it wraps around
                break
            self.interior.setdefault(node, (dim,))
            node, call = inner, self.effects.calls[inner]
        return node

    def _shuffled(self, columns: Axis, groups: torch.Tensor, node: fx.Node, count: int) -> Axis | None:
        """The axis of groups of equal size whose columns may be anywhere; None where they are others."""
        sizes = torch.bincount(groups.clamp(0, count)) if bool((groups >= 0).all()) else groups.new_empty(0)
        if sizes.numel() != count or columns.size != groups.numel() or int(sizes.min()) != int(sizes.max()):
            is_known = sizes.numel() == count
            are = f"of {int(sizes.min())} to {int(sizes.max())} columns" if is_known else "that there are not"
            self.unread = f"the index of groups names groups {are}", "give all groups as many columns"
            return None
        axis, _, known = self.shuffled.setdefault(columns, (Axis(count), node, groups))
        return axis if torch.equal(known, groups) else None


#: Casts, those that are calls of a tensor's own among them.
INTEGER_CASTS = frozenset({*CASTS, "int", "long", "short"})
_PLACES = (torch.int32, torch.int64)
#: Where operations have their table, and what chooses from it.
_TABLES: Mapping[str, tuple[str, str]] = {
    "getitem": ("input", "#1"),
    "index_select": ("input", "index"),
    "take": ("input", "index"),
    "embedding": ("weight", "input"),
}
#: What gives the same elements another shape.
_SAME = frozenset({"unsqueeze", "squeeze", "view", "reshape", "flatten", "getitem"})


def _source(region: Region, node: fx.Node) -> fx.Node:
    """The tensor that has the elements of a table: the halves of bytes may spell its shape each for themselves."""
    call = region.effects.calls[node]
    while call is not None and call.name in _SAME and len(node.all_input_nodes) == 1:
        source = tensor_of(call.input)
        if source is None or source.numel() != known_tensor(node).numel():
            break
        region.interior.setdefault(node, fresh(shape_of(known_tensor(node))))
        node = region.seen_by(node, call.input)
        call = region.effects.calls[node]
    return node


def _looked_up(name: str) -> Rule:
    """Four bits that choose from a table of sixteen; what reads a tensor otherwise is read as elsewhere."""

    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        book, chosen = map(call.get, _TABLES[name])
        (chosen,) = chosen if isinstance(chosen, tuple) and len(chosen) == 1 else (chosen,)
        held, numbers = tensor_of(book), tensor_of(chosen)
        shape = () if held is None or not held.is_floating_point() else shape_of(held)
        if not isinstance(book, fx.Node) or numbers is None or shape not in ((16,), (16, 1)):
            dim = call.get("dim", 0) if name == "index_select" else 0 if name == "getitem" else None
            if isinstance(region, Indexed) and isinstance(chosen, fx.Node) and isinstance(dim, int):
                return region.gathered(call, dims, dim, chosen)
            other = FUNCTIONS.get(name) if isinstance(region, Parts) else POINTWISE.get(name)
            return None if other is None else other(region, call, dims)
        own = dims if len(shape) == 1 else dims[:-1]
        is_read = numbers.dtype in _PLACES and len(own) == numbers.dim()  # bytes would be a mask
        x = region.express(chosen, own, call.node) if is_read else None
        if not isinstance(x, (LOW, HIGH)):
            return None
        node = _source(region, region.seen_by(call.node, book))
        known = (symbol for symbol, leaf in region.leaves.items() if leaf.node is node and leaf.kind == "codebook")
        return CODE(next(known, None) or region.leaf(node, fresh(shape_of(known_tensor(node))), kind="codebook"), x)

    return rule


def _cast(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    """A cast between integers that holds all that there was."""
    source, result = tensor_of(call.input), tensor_of(call.node)
    if source is None or result is None or not (is_integer(source) and is_integer(result)):
        return None
    return _held(region, call, region.operand(call, "input", dims))


_ARITHMETIC = ("add", "sub", "rsub", "mul", "neg", "square", "pow", "addcmul", "lerp", "where", "masked_fill")
BITS: Mapping[str, Rule] = {
    **{name: _whole(name) for name in _ARITHMETIC},
    **dict.fromkeys(INTEGER_CASTS, _cast),
    "and": _of_number(_and, "and"),
    **dict.fromkeys(("rshift", "bitwise_right_shift"), _of_number(_shifted)),
    **dict.fromkeys(("floordiv", "floor_divide"), _of_number(_divided)),
    **dict.fromkeys(("mod", "remainder", "fmod"), _of_number(lambda x, number: LOW(x) if number == 16 else None)),
    "div": _division,
    **{name: _looked_up(name) for name in _TABLES},
}
