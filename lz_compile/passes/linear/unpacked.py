"""Whole numbers that a weight is computed from, after they were unpacked in some way: by shifts, by stores, by halves.

How that is spelled does not matter: it stays in the graph, and Inductor computes it. What is stored, as far as a kernel is
concerned, is the last tensor of integers, if they are surely few enough for eight bits. Packed numbers that kernels read
themselves are a matter of :mod:`bits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground.sizes import product, shape_of, symbolic_size
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.contraction import PRODUCTS
from lz_compile.passes.formula.expressions import CASTS, constant_value, plain_number
from lz_compile.passes.formula.layout import SPLITS
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, is_integer, reached, tensor_of

Bounds: TypeAlias = "tuple[int, int]"
Rule: TypeAlias = "Callable[[Effects, Call], Bounds | None]"

_EIGHT_BITS = (torch.uint8, torch.int8)
_MOVES = CASTS | SPLITS | {"int", "long", "short"}
#: So many calls are followed up from a weight, or from its numbers, which no unpacking has.
_MOST_CALLS = 256


@dataclass(frozen=True)
class Unpacked:
    """Integers that the graph computes, between ``bounds``, and the dtype of eight bits that holds them."""

    node: fx.Node
    dtype: torch.dtype
    bounds: Bounds


def numbers_of(effects: Effects, node: fx.Node) -> Unpacked | None:
    """The largest tensor of integers that a floating-point value is computed from; of several, the one of few bits.

    Zero points of unknown size are taken off it, or added to it. None where it is given as it is, is made of anything but
    integers that are given, or may be larger.
    """

    def above(each: fx.Node) -> list[fx.Node]:
        is_end = is_integer(tensor_of(each)) or effects.name(each) in PRODUCTS
        return [] if is_end else [effects.current(operand, each) for operand in each.all_input_nodes]

    seen = [*reached([node], above, _MOST_CALLS + 1)]
    found = [each for each in seen if is_integer(tensor_of(each))]
    most = max((_count(each) for each in found), default=0)
    largest = [_less_unknown(effects, each) for each in found if _count(each) == most]
    largest = [each for each in largest if bounds_of(effects, each) is not None] if len(largest) > 1 else largest
    is_cut = len(seen) > _MOST_CALLS or any(effects.name(each) in PRODUCTS for each in {*seen} - {*found})
    if is_cut or not most or len(largest) != 1 or effects.calls[largest[0]] is None or not _is_given(*largest):
        return None
    (numbers,) = largest
    bounds = bounds_of(effects, numbers)
    dtype = next((each for each in _EIGHT_BITS if bounds is not None and _holds(each, bounds)), None)
    return None if dtype is None or bounds is None else Unpacked(numbers, dtype, bounds)


def less_shifted(effects: Effects, found: Unpacked) -> Unpacked | None:
    """The numbers that zero points are taken off, or added to, where those are integers, too: they have fewer bits."""
    node = _unshifted(effects, found.node)
    bounds = None if node is None else bounds_of(effects, node)
    if node is None or bounds is None or bounds[1] - bounds[0] >= found.bounds[1] - found.bounds[0]:
        return None
    dtype = next((each for each in _EIGHT_BITS if _holds(each, bounds)), None)
    return None if dtype is None else Unpacked(node, dtype, bounds)


def _unshifted(effects: Effects, node: fx.Node) -> fx.Node | None:
    """The integers that others are taken off, or added to."""
    call = effects.calls[node]
    if (
        call is None
        or call.name not in ("sub", "add")
        or call.get("alpha", 1) != 1
        or not isinstance(call.input, fx.Node)
    ):
        return None
    source = effects.current(call.input, node)
    return source if _count(source) == _count(node) else None


def _less_unknown(effects: Effects, node: fx.Node) -> fx.Node:
    """The integers before others of unknown size are taken off them."""
    source: fx.Node | None = node
    while source is not None and bounds_of(effects, source) is None:
        source = _unshifted(effects, source)
    return node if source is None else source


def _count(node: fx.Node) -> int:
    """How many numbers a matrix has, as far as that is known: of symbolic sizes, those of the trace."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() < 2:
        return 0
    count = product(shape_of(tensor))
    return count if isinstance(count, int) else symbolic_size(count, [tensor]).hint or 0


def _is_given(node: fx.Node) -> bool:
    """Whether integers are made of what is given, itself integers, and of nothing that was computed of other numbers."""
    seen = [*reached([node], most=_MOST_CALLS + 1)]
    tensors = [tensor for tensor in map(tensor_of, seen) if tensor is not None]
    return len(seen) <= _MOST_CALLS and all(is_integer(each) or each.dtype == torch.bool for each in tensors)


def _holds(dtype: torch.dtype, bounds: Bounds) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= bounds[0] and bounds[1] <= limits.max


# ---- between what numbers --------------------------------------------------------------------------------------------


def bounds_of(effects: Effects, node: Any, reader: fx.Node | None = None) -> Bounds | None:
    """Between what numbers the elements of a tensor of integers surely are, or a number; None where that is not known.

    They are those that ``reader`` sees, or everybody.
    """
    number = plain_number(node)
    if number is not None:
        return (int(number), int(number)) if isinstance(number, int) or number.is_integer() else None
    tensor = tensor_of(node)
    if not isinstance(node, fx.Node) or tensor is None or not is_integer(tensor):
        return None
    node = node if reader is None else effects.current(node, reader)
    is_other = effects.is_overwritten(node) if reader is None else effects.is_opaque(node, reader)
    call, found = effects.calls[node], None
    if call is not None and not is_other:
        filled = constant_value(call)
        rule = _RULES.get(call.name, _same if layout.rearranges(call) or call.name in _MOVES else None)
        if rule is not None:
            found = rule(effects, call)
        elif filled is not None:
            found = (int(filled), int(filled))
    if found is not None and _holds(tensor.dtype, found):
        return found
    limits = torch.iinfo(tensor.dtype)  # whatever it is computed from, and however it wraps around
    return (limits.min, limits.max) if tensor.dtype in _EIGHT_BITS else None


def _same(effects: Effects, call: Call) -> Bounds | None:
    """Elements of the input, wherever they are."""
    source, result = tensor_of(call.input), tensor_of(call.node)
    is_reread = call.name == "view" and source is not None and result is not None and source.dtype != result.dtype
    inner = bounds_of(effects, call.input, call.node)
    if is_reread and (source.dtype.itemsize != result.dtype.itemsize or inner is None or inner[0] < 0):  # type: ignore[union-attr]
        return None
    return inner


def _joined(effects: Effects, call: Call) -> Bounds | None:
    """Elements of one of several tensors."""
    given = call.get("tensors", call.input)
    found = [bounds_of(effects, each, call.node) for each in given] if isinstance(given, (tuple, list)) else [None]
    return _hull(*found)


def _hull(*found: Bounds | None) -> Bounds | None:
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _chosen(effects: Effects, call: Call) -> Bounds | None:
    return _hull(*(bounds_of(effects, each, call.node) for each in (call.get("input"), call.get("other"))))


def _sum(sign: int) -> Rule:
    def rule(effects: Effects, call: Call) -> Bounds | None:
        one, other = (bounds_of(effects, each, call.node) for each in (call.input, call.get("other")))
        if one is None or other is None or call.get("alpha", 1) != 1:
            return None
        low, high = other if sign > 0 else (-other[1], -other[0])
        return one[0] + low, one[1] + high

    return rule


def _and(effects: Effects, call: Call) -> Bounds | None:
    """Bits of a number that is not negative: no more than that, whatever the other one is."""
    found = [bounds_of(effects, each, call.node) for each in (call.input, call.get("other"))]
    most = [high for low, high in filter(None, found) if low >= 0]
    return (0, min(most)) if most else None


def _either(effects: Effects, call: Call) -> Bounds | None:
    """Bits of two numbers, neither of which is negative."""
    hull = _hull(*(bounds_of(effects, each, call.node) for each in (call.input, call.get("other"))))
    return None if hull is None or hull[0] < 0 else (0, (1 << hull[1].bit_length()) - 1)


def _rest(effects: Effects, call: Call) -> Bounds | None:
    number = plain_number(call.get("other"))
    return (0, number - 1) if isinstance(number, int) and number >= 1 else None


def _shifted(effects: Effects, call: Call) -> Bounds | None:
    """Towards zero, or minus one."""
    found = bounds_of(effects, call.input, call.node)
    return None if found is None else (min(found[0], 0), max(found[1], 0))


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("and", "bitwise_and"), _and),
    **dict.fromkeys(("or", "xor", "bitwise_or", "bitwise_xor"), _either),
    **dict.fromkeys(("mod", "remainder"), _rest),
    **dict.fromkeys(("rshift", "bitwise_right_shift"), _shifted),
    **dict.fromkeys(("stack", "cat", "concat"), _joined),
    **dict.fromkeys(("view", "getitem", "select", "narrow", "index_select", "gather", "take", "flip", "roll"), _same),
    "add": _sum(1),
    "sub": _sum(-1),
    "where": _chosen,
}
