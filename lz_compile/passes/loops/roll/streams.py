"""What moves on with a loop as tensors, steps first: slices, numbers and values that are computed one by one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from lz_compile.passes.graph.view import known_tensor
from lz_compile.passes.loops.roll.body import Gathered, Numbers, Stream
from lz_compile.passes.loops.roll.slices import Slices
from lz_compile.passes.loops.roll.step_graph import Emitter

#: What a node of the source is in the graph that is emitted to.
Place = Callable[[fx.Node], fx.Node]


def stacked(emit: Emitter, stream: Stream, place: Place) -> fx.Node:
    """A stream as one tensor, steps first; slices at an even pace are a view."""
    if isinstance(stream, Numbers):
        found = numbers(emit, stream.values, stream.device)
        return found if stream.dtype is None else emit.call("to", found, stream.dtype)
    if isinstance(stream, Gathered):
        return emit.call(torch.stack, [place(node) for node in stream.nodes])
    source, pace, width = place(stream.source), stream.pace, stream.length or 1
    tensor = known_tensor(source)
    if not pace:
        return _picked(emit, source, stream)
    first = min(stream.starts[0], stream.starts[-1])
    span = abs(pace) * (len(stream.starts) - 1) + width
    size = tensor.shape[stream.dim]
    if not isinstance(size, int) or (first, span) != (0, size):
        source = emit.call("narrow", source, stream.dim, first, span)
    if width == 1:
        if abs(pace) > 1:
            index = (*[slice(None)] * stream.dim, slice(None, None, abs(pace)))
            source = emit.call(operator.getitem, source, index)
        found = emit.call("movedim", source, stream.dim, 0) if stream.dim else source
        if stream.length is not None:
            found = emit.call("unsqueeze", found, stream.dim + 1)
    else:
        found = emit.call("movedim", emit.call("unfold", source, stream.dim, width, abs(pace)), stream.dim, 0)
        found = emit.call("movedim", found, -1, stream.dim + 1)
    return emit.call("flip", found, 0) if pace < 0 else found


def _picked(emit: Emitter, source: fx.Node, stream: Slices) -> fx.Node:
    """Slices at no even pace, copied together."""
    width, tensor = stream.length or 1, known_tensor(source)
    entries = tuple(start + shift for start in stream.starts for shift in range(width))
    found = emit.call("index_select", source, stream.dim, numbers(emit, entries, tensor.device))
    if stream.length is not None:
        found = emit.call("unflatten", found, stream.dim, (len(stream.starts), width))
    return emit.call("movedim", found, stream.dim, 0) if stream.dim else found


def numbers(emit: Emitter, values: Sequence[int | float], device: torch.device) -> fx.Node:
    """Numbers as a tensor, in 64 bits."""
    if all(isinstance(value, int) for value in values) and len(values) > 1:
        pace = int(values[1] - values[0])
        stop = int(values[0]) + pace * len(values)
        if pace and tuple(range(int(values[0]), stop, pace)) == tuple(values):
            return emit.call(torch.arange, int(values[0]), stop, pace, dtype=torch.int64, device=device)
    dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float64
    return emit.call(torch.tensor, list(values), dtype=dtype, device=device)
