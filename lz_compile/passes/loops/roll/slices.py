"""Slices that move on with the loop: ``x[:, t]``, ``x.select(1, t)``, ``x.unbind(1)[t]``, ``x[:, 4 * t : 4 * t + 4]``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.view import Call, read, tensor_of, value_of

_SPLITS = frozenset({"split", "chunk", "tensor_split", "split_with_sizes"})
_UNTOUCHED = slice(None)
_PARTS_OF_A_PIECE = 2

#: The node that a reader sees under a name: the last version, and one node for what is the same in every step.
Resolve = Callable[[fx.Node, Any], Any]


@dataclass(frozen=True)
class Slices:
    """``source`` cut along ``dim`` at ``starts``, in order of steps.

    A cut of ``length`` None is one entry, without the dimension; others keep it. ``rest`` is the index to apply to what was
    cut out, empty if there is none.
    """

    source: fx.Node
    dim: int
    starts: tuple[int, ...]
    length: int | None = None
    rest: tuple[Any, ...] = ()

    @property
    def pace(self) -> int | None:
        """From one start to the next, None where that differs."""
        steps = {later - one for one, later in zip(self.starts, self.starts[1:], strict=False)}
        return steps.pop() if len(steps) == 1 else None

    def key(self) -> Hashable:
        """Equal for equal cuts, whatever is done with them afterwards."""
        return self.source, self.dim, self.starts, self.length


def slices_of(nodes: Sequence[fx.Node], resolve: Resolve) -> Slices | None:
    """What the nodes cut out, one a step, None where that is no moving slice of one tensor."""
    calls = [read(node) for node in nodes]
    first = calls[0]
    if first is None or any(call is None or call.name != first.name for call in calls):
        return None
    found: Slices | None = None
    if first.name == "getitem":
        found = _indexed([call for call in calls if call is not None], resolve)
    elif first.name in ("select", "narrow"):
        found = _selected([call for call in calls if call is not None], resolve)
    return found if found is not None and _is_within(found) else None


def _is_within(found: Slices) -> bool:
    size = _static_size(found.source, found.dim)
    width = 1 if found.length is None else found.length
    if size is None:  # a single entry is there, for it was taken
        return found.length is None and min(found.starts) >= 0
    return min(found.starts) >= 0 and max(found.starts) + width <= size and width > 0


def _static_size(source: fx.Node, dim: int) -> int | None:
    tensor = tensor_of(source)
    size = None if tensor is None else tensor.shape[dim]
    return size if isinstance(size, int) else None


def _selected(calls: Sequence[Call], resolve: Resolve) -> Slices | None:
    source = resolve(calls[0].node, calls[0].input)
    tensor = tensor_of(source)
    dims = {call.get("dim") for call in calls}
    if tensor is None or len(dims) != 1 or any(resolve(call.node, call.input) is not source for call in calls):
        return None
    dim = dims.pop()
    name = "index" if calls[0].name == "select" else "start"
    starts, lengths = [call.get(name) for call in calls], {call.get("length") for call in calls}
    if not isinstance(dim, int) or len(lengths) != 1 or not all(isinstance(start, int) for start in starts):
        return None
    length = lengths.pop()
    size = _static_size(source, dim % tensor.dim())
    if not (length is None or isinstance(length, int)) or (size is None and min(starts) < 0):
        return None
    return Slices(
        source, dim % tensor.dim(), tuple(start + (size or 0) if start < 0 else start for start in starts), length
    )


def _indexed(calls: Sequence[Call], resolve: Resolve) -> Slices | None:
    source = resolve(calls[0].node, calls[0].input)
    if isinstance(source, fx.Node) and isinstance(value_of(source), (tuple, list)):
        return _picked(calls, resolve)
    tensor = tensor_of(source)
    if tensor is None or any(resolve(call.node, call.input) is not source for call in calls):
        return None
    indices = [elements_of(call.node.args[1], tensor) for call in calls]
    if any(index is None for index in indices):
        return None
    return cut(source, tensor, [index for index in indices if index is not None])


def cut(source: fx.Node, tensor: torch.Tensor, indices: Sequence[tuple[Any, ...]]) -> Slices | None:
    """What indices (as :func:`elements_of` gives them) cut out of a tensor, if they differ in one dimension only."""
    if len({len(index) for index in indices}) != 1:
        return None
    moving = [i for i, column in enumerate(zip(*indices, strict=True)) if any(each != column[0] for each in column)]
    if len(moving) != 1:
        return None
    place = moving[0]
    if any(isinstance(each, fx.Node) for each in _leaves(indices[0])):
        return None
    dim = sum(element is not None for element in indices[0][:place])
    size = _static_size(source, dim)
    ranges = [range_of(index[place], size) for index in indices]
    known = [each for each in ranges if each is not None]
    if len(known) != len(ranges) or len({length for _, length in known}) != 1:
        return None
    length = known[0][1]
    kept: tuple[Any, ...] = () if length is None else (_UNTOUCHED,)
    rest = (*indices[0][:place], *kept, *indices[0][place + 1 :])
    is_whole = all(isinstance(each, slice) and each == _UNTOUCHED for each in rest)
    return Slices(source, dim, tuple(start for start, _ in known), length, () if is_whole else rest)


def elements_of(index: Any, tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """An index with an element for each dimension (None: a new one), no ellipsis; None where it is not that simple."""
    given = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, (list, bool, torch.Tensor, fx.Node)) for each in given):
        return None
    whole = [_UNTOUCHED] * (tensor.dim() - sum(each is not None and each is not Ellipsis for each in given))
    elements = list(given) if Ellipsis in given else [*given, Ellipsis]
    if elements.count(Ellipsis) > 1:
        return None
    at = elements.index(Ellipsis)
    return (*elements[:at], *whole, *elements[at + 1 :])


def _leaves(index: tuple[Any, ...]) -> list[Any]:
    return [
        part for each in index for part in ((each.start, each.stop, each.step) if isinstance(each, slice) else (each,))
    ]


def range_of(element: Any, size: int | None) -> tuple[int, int | None] | None:
    """Start and length (None for a single entry) of an element of an index; what ends nowhere needs a size."""
    if isinstance(element, int) and element >= 0:
        return element, None
    if size is None:
        return None
    if isinstance(element, int):
        return element + size, None
    if not isinstance(element, slice) or element.step not in (None, 1):
        return None
    if not all(part is None or isinstance(part, int) for part in (element.start, element.stop)):
        return None
    start, stop, _ = element.indices(size)
    return start, stop - start


def _picked(calls: Sequence[Call], resolve: Resolve) -> Slices | None:
    """Pieces that a call like ``unbind`` or ``split`` cut a tensor into."""
    pieces = [_piece(call, resolve) for call in calls]
    first = pieces[0]
    if first is None:
        return None
    source, dim, _, length = first
    known = [piece for piece in pieces if piece is not None and (piece[0], piece[1], piece[3]) == (source, dim, length)]
    return Slices(source, dim, tuple(start for _, _, start, _ in known), length) if len(known) == len(pieces) else None


def _piece(call: Call, resolve: Resolve) -> tuple[fx.Node, int, int, int | None] | None:
    parent, number = resolve(call.node, call.input), call.node.args[1]
    made = read(parent) if isinstance(parent, fx.Node) else None
    if made is None or not isinstance(number, int):
        return None
    source = resolve(parent, made.input)
    tensor, parts = tensor_of(source), value_of(parent)
    position = 1 if made.name == "unbind" else _PARTS_OF_A_PIECE
    given = made.node.args[position] if len(made.node.args) > position else made.get("dim", 0)
    if tensor is None or not isinstance(given, int):
        return None
    dim = given % tensor.dim()
    number = number % len(parts)
    if made.name == "unbind":
        return source, dim, number, None
    if made.name not in _SPLITS:
        return None
    sizes = [part.shape[dim] for part in parts]
    if not all(isinstance(size, int) for size in sizes):
        return None
    starts = [0, *accumulate(sizes, operator.add)]
    return source, dim, starts[number], sizes[number]
