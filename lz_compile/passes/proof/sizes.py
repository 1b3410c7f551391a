"""At which sizes a match is tried: small ones that tell its axes apart, or those that it was traced with."""

from __future__ import annotations

import math
from itertools import count

import torch

from lz_compile.errors import TrialError
from lz_compile.ground import memory
from lz_compile.ground.sizes import Size, symbolic_size
from lz_compile.passes.formula.axes import Axis, atoms, axes_of
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.proof.resize import shape
from lz_compile.passes.proof.running import Sizes
from lz_compile.passes.rewriting.match import Match

_SMALL = 8
_STEP = 8
#: Of how many elements a tensor over all axes that are resized may be, and an operand, before sizes lie closer together.
_MOST, _MOST_OF_ONE = 1 << 28, 1 << 25
#: What a size counts as that nobody knows before the data are there.
_UNKNOWN = 512
#: One part of this many of the free memory is what a proof at real sizes may take.
_SHARE = 4


def representative_sizes(match: Match, *, ones: frozenset[Axis] = frozenset()) -> Sizes:
    """A small size for every axis: up to 8, limited and fixed ones unchanged, equal sizes stay equal, others different.

    Args:
        match: the match to resize.
        ones: axes that get size one, to try broadcasts.
    """
    axes = all_axes(match)
    unchanged = match.trial.limited | match.trial.pinned
    large = {axis.size for axis in axes if not isinstance(axis.size, int) or axis.size > _SMALL}
    kept = {axis.size for axis in unchanged}
    resized_axes = [axis.size for axis in axes if axis not in unchanged and axis not in ones]
    for first, step in ((2 * _SMALL, _STEP), (_SMALL + 1, 1)):  # of many axes products grow to what no memory holds
        fresh = (size for size in count(first, step) if size not in kept)
        ordered = sorted(large, key=lambda size: (size, "") if isinstance(size, int) else (0, str(size)))
        assigned = dict(zip(ordered, fresh, strict=False))
        one = max(
            math.prod(assigned.get(axis.size, axis.size) for axis in axes_of(dims)) for dims in match.inputs.values()
        )
        if math.prod(assigned.get(size, 1) for size in resized_axes) <= _MOST and one <= _MOST_OF_ONE:
            break
    small = {axis: 1 if axis in ones else assigned.get(axis.size, axis.size) for axis in axes}
    hints = _hints(match) if any(not isinstance(axis.size, int) for axis in match.trial.pinned) else {}
    symbolic = {axis: hints[axis] for axis in match.trial.pinned if axis in hints}
    least = {axis.size: size for axis, size in match.trial.least.items()}
    grown = {axis: max(size, least.get(axis.size, 1)) for axis, size in small.items()}
    sizes = {**grown, **symbolic, **{axis: axis.size for axis in unchanged if isinstance(axis.size, int)}}
    return {**sizes, **{axis: sizes[other] for axis, other in match.trial.ties.items()}}


def real_sizes(match: Match) -> Sizes:
    """The sizes that the match was traced with, rows cut down where its source, in float64, would not fit into memory.

    A size that data decide counts as :data:`_UNKNOWN`.

    Raises:
        TrialError: it does not fit with few rows either.
    """
    tensors = [tensor for tensor in map(tensor_of, (*match.inputs, *match.outputs)) if tensor is not None]
    free = min(memory.free_bytes(device) for device in {tensor.device for tensor in tensors})

    def hint(size: Size) -> int:
        known = size if isinstance(size, int) else symbolic_size(size, tensors).hint
        return _UNKNOWN if known is None else known

    small = representative_sizes(match)
    sizes = {axis: small[axis] if axis in match.trial.pinned else hint(axis.size) for axis in all_axes(match)}
    for axis in (*axes_of(match.site.output_dims), None):
        tied = {**sizes, **{axis: sizes[other] for axis, other in match.trial.ties.items()}}
        needed = sum(math.prod(shape(dims, tied)) for dims in {**match.inputs, **match.read}.values()) * 8 * 2
        if needed <= free / _SHARE:
            return tied
        if axis is not None and axis not in match.trial.ties:
            sizes[axis] = min(sizes[axis], small[axis])
    text = f"cannot be tried at its real sizes, of {needed >> 20} MiB with {free >> 20} MiB free"
    raise TrialError(f"a kernel for {match.op} at {match.site.where}", text, is_fatal=False)


def _hints(match: Match) -> Sizes:
    """The sizes that symbolic axes were traced with, of those that are a dimension of a node by themselves."""
    found: dict[Axis, int] = {}
    for node, dims in (*match.inputs.items(), *match.read.items()):
        tensor = tensor_of(node)
        for own, extent in zip(dims, () if tensor is None else tensor.shape, strict=False):
            if len(atoms(own)) == 1 and isinstance(extent, torch.SymInt) and extent.node.has_hint():
                found[atoms(own)[0]] = int(extent.node.hint)
    return found


def all_axes(match: Match) -> list[Axis]:
    """Those of all tensors that are read, and of the result; and those that have these by another name."""
    found: dict[Axis, None] = dict.fromkeys(match.trial.ties.values())
    for dims in (*match.inputs.values(), *match.read.values(), match.site.output_dims):
        found.update(dict.fromkeys(axes_of(dims)))
    return list(found)
