"""Pieces of a tensor that are overwritten, as arithmetic on all of it.

``x[:, 1:] += y`` is ``x + pad(y, (1, 0))``, and ``x[:, 1:] = -inf`` is ``x.masked_fill(arange(n) >= 1, -inf)``. What is
stored may be any sums and products of what was there, in whatever shape: ``(x[:, 1:].view(...) + y + z).view(...)``. They
are made in the same order, and a zero that is added, or a one to multiply by, changes no number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from lz_compile.ground.sizes import Shape, Size, shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Dims, LayoutError, broadcast_from, fresh, resolve
from lz_compile.passes.formula.expressions import plain_number
from lz_compile.passes.formula.layout import places_of
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import Emitter
from lz_compile.passes.graph.view import Call, known_tensor, read, tensor_of

#: What changes no number; only a sum or a product has its operands in any order.
_NEUTRAL: Mapping[str, float] = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}
_ORDERED = frozenset({"sub", "div"})
#: So many calls lie between what is read of a piece and what is stored there, at most.
_MOST_CALLS = 32


@dataclass(frozen=True)
class _Cut:
    """How many places of a dimension lie before and behind a piece, which has none of it where the index ``drops`` it."""

    dim: int
    before: int
    behind: int
    drops: bool


@dataclass(frozen=True)
class _Change:
    """``call`` computes with ``other`` and what was there; its result is moved by ``moves`` to the shape of the piece."""

    call: Call
    other: fx.Node
    moves: tuple[Call, ...]


def piece_value(emit: Emitter, store: fx.Node, target: fx.Node, effects: Effects) -> fx.Node | None:
    """What a tensor is after a store into a piece of it, as a new value; None where it has no such form."""
    index, value = store.args[1:]
    tensor = tensor_of(target)
    cuts = None if tensor is None else _cuts(index, tensor)
    if tensor is None or cuts is None or not tensor.is_floating_point():
        return None
    fill = plain_number(value)
    if fill is not None:
        return _filled(emit, target, cuts, fill)
    changes = _changes(store, target, effects)
    if changes is None:
        return None
    found = target
    for change in changes:
        operand = _operand(emit, change, cuts, tensor)
        if operand is None:
            return None
        found = emit.call(change.call.name, found, operand)
    return found if changes else None


def _cuts(index: Any, tensor: torch.Tensor) -> list[_Cut] | None:
    """Where a piece lies, in every dimension that is cut; None for other indices, and for what is empty."""
    elements, shape = layout.elements_of(index, tensor), shape_of(tensor)
    if elements is None or None in elements or len(elements) != len(shape):
        return None
    found = []
    for dim, (element, size) in enumerate(zip(elements, shape, strict=True)):
        if element in (slice(None), slice(0, None)):
            continue
        cut = _cut(dim, element, size)
        if cut is None:
            return None
        found.append(cut)
    return found


def _cut(dim: int, element: Any, size: Size) -> _Cut | None:
    """What one element of an index leaves out; of a symbolic size, only what says so whatever it is."""
    if isinstance(size, int):
        places, drops = places_of(element, size) or (range(0), False)
        return _Cut(dim, places.start, size - places.stop, drops) if places and places.step == 1 else None
    if not isinstance(element, slice) or element.step not in (None, 1):
        return None
    start, stop = (0 if element.start is None else element.start), element.stop
    if not isinstance(start, int) or not isinstance(stop, int | None):
        return None
    is_told = start >= 0 and (stop is None or stop < 0)
    return _Cut(dim, start, -(stop or 0), drops=False) if is_told else None


def _filled(emit: Emitter, target: fx.Node, cuts: Sequence[_Cut], fill: float) -> fx.Node | None:
    """One number in a piece."""
    tensor = known_tensor(target)
    mask: fx.Node | None = None
    for cut in cuts:
        size = shape_of(tensor)[cut.dim]
        if not isinstance(size, int):
            return None
        places = emit.call(torch.arange, size, device=tensor.device)
        places = emit.call("view", places, (-1, *[1] * (tensor.dim() - cut.dim - 1)))
        sides = [emit.call(operator.ge, places, cut.before)] if cut.before else []
        sides += [emit.call(operator.lt, places, size - cut.behind)] if cut.behind else []
        for side in sides:
            mask = side if mask is None else emit.call(operator.and_, mask, side)
    return None if mask is None else emit.call("masked_fill", target, mask, fill)


# ---- sums and products of what was there -----------------------------------------------------------------------------


def _changes(store: fx.Node, target: fx.Node, effects: Effects) -> list[_Change] | None:
    """How a value is computed of what it takes the place of, first things first; None where it is something else."""
    value = store.args[2]
    tensor = tensor_of(value)
    if tensor is None or not isinstance(value, fx.Node):
        return None
    dims = fresh(shape_of(tensor))
    try:
        found = _way(value, dims, store, target, effects, set())
    except LayoutError:
        return None
    if found is None or resolve(found[1]) != resolve(dims):  # other places than its own
        return None
    piece, calls = found[0], found[2]
    if piece not in effects.calls or effects.overwritten_after(piece, piece, store) is not None:
        return None
    changes = []
    for place, (call, other) in enumerate(calls):
        if effects.ambient(call.node) != effects.ambient(store):
            return None
        if other is not None:
            if other not in effects.calls or effects.overwritten_after(other, call.node, store) is not None:
                return None
            moves = tuple(each for each, operand in calls[place + 1 :] if operand is None)
            changes.append(_Change(call, other, moves))
    return changes


def _way(
    node: fx.Node, dims: Dims, store: fx.Node, target: fx.Node, effects: Effects, seen: set[fx.Node]
) -> tuple[fx.Node, Dims, list[tuple[Call, fx.Node | None]]] | None:
    """What reads the piece, its dims, and the calls from there to a node, with the other operand of those that compute."""
    if node.target is operator.getitem and node.args[0] is target and str(node.args[1]) == str(store.args[1]):
        return node, dims, []
    call = read(node)
    if call is None or node in seen or len(seen) == _MOST_CALLS or node not in effects.calls or call.is_inplace:
        return None
    seen.add(node)
    for operand, inner, other in _operands(call, dims):
        found = _way(operand, inner, store, target, effects, seen)
        if found is not None:
            return *found[:2], [*found[2], (call, other)]
    return None


def _operands(call: Call, dims: Dims) -> Iterator[tuple[fx.Node, Dims, fx.Node | None]]:
    """The operands of which a call gives the elements, as they are or computed with the other one."""
    moved = layout.read_input_dims(call, dims)
    if moved is not None:
        yield call.input, moved, None
        return
    two = (call.input, call.get("other"))
    if call.name not in _NEUTRAL or len(call.arguments) != len(two) or any(tensor_of(each) is None for each in two):
        return
    whole = known_tensor(call.node)
    for operand, other in (two,) if call.name in _ORDERED else (two, two[::-1]):
        tensor = known_tensor(operand)
        if shape_of(tensor) == shape_of(whole) and known_tensor(other).dtype == tensor.dtype == whole.dtype:
            yield operand, broadcast_from(dims, shape_of(tensor)), other


def _operand(emit: Emitter, change: _Change, cuts: Sequence[_Cut], tensor: torch.Tensor) -> fx.Node | None:
    """The other operand of a call where the piece lies, and what changes no number elsewhere.

    It broadcasts as it did, unless it is moved, along dimensions that are not cut.
    """
    whole = shape_of(known_tensor(change.call.node))
    is_plain = not change.moves and not any(cut.drops for cut in cuts)
    sizes = _expanded(known_tensor(change.other), whole, [cut.dim for cut in cuts] if is_plain else range(len(whole)))
    if sizes is None:
        return None
    value = emit.call("expand", change.other, sizes)
    for move in change.moves:
        target = "reshape" if move.name == "view" else move.node.target
        value = emit.call(target, value, *move.node.args[1:], **move.node.kwargs)
    for cut in cuts:
        value = emit.call("unsqueeze", value, cut.dim) if cut.drops else value
    around = {cut.dim: (cut.before, cut.behind) for cut in cuts}
    dims = reversed(range(tensor.dim() - known_tensor(value).dim(), tensor.dim()))
    margins = [size for dim in dims for size in around.get(dim, (0, 0))]
    return emit.call(F.pad, value, margins, value=_NEUTRAL[change.call.name]) if any(margins) else value


def _expanded(operand: torch.Tensor, whole: Shape, dims: Sequence[int]) -> list[int] | None:
    """What ``expand`` is given to have some dimensions of a shape in full; None where that takes a symbolic size."""
    first = min([len(whole) - operand.dim(), *dims])
    own = (*[1] * (len(whole) - operand.dim()), *shape_of(operand))
    sizes = [size if dim in dims and size != own[dim] else -1 for dim, size in enumerate(whole)]
    sizes = [1 if dim < len(whole) - operand.dim() and size == -1 else size for dim, size in enumerate(sizes)]
    return [int(size) for size in sizes[first:]] if all(isinstance(each, int) for each in sizes[first:]) else None
