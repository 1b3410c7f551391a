"""Everything that there is to know of a loop before it is rolled."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from lz_compile.passes.formula.layout import is_returned
from lz_compile.passes.graph.emitter import Emitter
from lz_compile.passes.graph.gradients import has_gradient
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import RefusedError, mutated, told, where_of
from lz_compile.passes.graph.view import known_tensor, memory_of, tensor_of
from lz_compile.passes.graph.writes import refuse_impure, refuse_transformed
from lz_compile.passes.loops.roll.body import Body, Gathered, Numbers, Stream
from lz_compile.passes.loops.roll.outputs import Assignment, Buffer, Collector, Use, buffers_of, collector_of, uses_of
from lz_compile.passes.loops.roll.slices import Slices
from lz_compile.passes.loops.roll.step_graph import Result, StepGraph, step_graph
from lz_compile.passes.loops.roll.steps import Steps
from lz_compile.passes.loops.roll.worthwhile import LEAST_STEPS
from lz_compile.passes.rewriting.core import wants_grad

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


@dataclass
class Loop:
    """A loop and all that is read of it."""

    steps: Steps
    body: Body
    buffers: list[Buffer]
    collectors: list[Collector]
    uses: list[Use]
    ambient: Ambient
    step: StepGraph
    results: Mapping[Any, int]
    finals: Mapping[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its first call and size: the same in a graph of equal nodes."""
        return f"{self.steps.node(0, 0).name} x {self.steps.count}"

    @property
    def readers(self) -> set[fx.Node]:
        """Who reads it."""
        buffers = {user for buffer in self.buffers for user in buffer.node.users}
        return {use.reader for use in self.uses} | buffers - set(self.steps.nodes)

    @property
    def replaced(self) -> set[fx.Node]:
        """The nodes that are gone, or read something else, once it is rolled."""
        nodes = {collector.node for collector in self.collectors} | set(self.steps.nodes)
        return nodes | self.readers | {user for collector in self.collectors for user in collector.node.users}

    @property
    def has_streams(self) -> bool:
        """Whether steps read something that moves on."""
        return any(not isinstance(self.body.streams[number], Numbers) for number in self.step.streams)

    @property
    def has_gradient(self) -> bool:
        """Whether a backward will run through it."""
        return wants_grad(self.ambient, self.steps.nodes)


def read_loop(steps: Steps, ambient: Ambient) -> Loop:
    """Everything that is needed to roll a loop; changes nothing.

    Raises:
        RefusedError: it is no scan.
    """
    refuse_transformed(ambient)
    for index in range(steps.period):
        refuse_impure(steps.node(0, index))
    _refuse_unclear(steps)
    buffers = buffers_of(steps)
    written = frozenset(each.index for buffer in buffers for each in buffer.assignments)
    body = Body(steps, written)
    uses = [use for use in uses_of(steps, written) if _is_in_step(body, use.index)]
    _refuse_views(steps, uses)
    count = _steps_read(steps, uses)
    if count < steps.count:
        return read_loop(replace(steps, count=count), ambient)
    collectors = _collectors(uses)
    finals = {index: slot for slot, index in body.made_by.items()}
    differentiated = steps.versions.differentiated
    graded = [use for use in uses if use.reader in differentiated and _is_attached(steps, use)]
    results: dict[Any, Result] = {
        each.index: Result(body.assigned[each.index], _slot(steps, buffer, each), buffer.node in differentiated)
        for buffer in buffers
        for each in buffer.assignments
    }
    collected = {collector.node for collector in collectors}
    for index in sorted({index for collector in collectors for index in collector.indices}):
        results["value", index] = Result(body.refs[index], is_graded=any(use.index == index for use in graded))
    for use in uses:
        if use.reader not in collected and not (use.step == steps.count - 1 and use.index in finals):
            count = len({each.step for each in graded if each.index == use.index})
            result = Result(body.refs[use.index], is_graded=count > 0, is_read_always=count == steps.count)
            results.setdefault(("value", use.index), result)
    last = {use.index for use in uses if use.step == steps.count - 1 and use.index in finals}
    ends = {use.index for use in graded if use.step == steps.count - 1 and use.reader not in collected}
    emitter = Emitters(steps, ambient)
    step = step_graph(
        body,
        list(results.values()),
        {finals[index]: index in ends for index in last},
        lambda number: emitter.entry(body.streams[number]),
        emitter,
        is_graded=wants_grad(ambient, steps.nodes),
    )
    if not step.slots:
        raise RefusedError("NO_STATE", "no step reads what the one before it made", "run all steps at once, as a batch")
    numbers = {key: number for number, key in enumerate(results)}
    return Loop(steps, body, buffers, collectors, uses, ambient, step, numbers, finals)


def _steps_read(steps: Steps, uses: Sequence[Use]) -> int:
    """How many steps there are up to the last one of which something is read.

    A loop's backward pass would send zeros through the others, which are NaN where they meet infinities.

    Raises:
        RefusedError: so few that they are no loop.
    """
    if any(node in steps.versions.writes for node in steps.nodes):
        return steps.count
    count = 1 + max((use.step for use in uses if use.reader not in steps.program.dead), default=steps.count - 1)
    if count < min(LEAST_STEPS, steps.count):
        text = f"of {steps.count} steps, none is read after the first {count}"
        raise RefusedError("STEPS_UNREAD", text, "end the loop there")
    return count


def _refuse_unclear(steps: Steps) -> None:
    versions, inside = steps.versions, set(steps.nodes)
    for node in steps.nodes:
        if node in versions.unclear:
            raise mutated(f"{versions.unclear[node]} ({where_of(node)})")
    written = [versions.writes[node] for node in steps.nodes if node in versions.writes]
    for node, text in versions.unclear.items():
        if node not in inside and any(versions.shares(node_read, written) for node_read in node.all_input_nodes):
            raise RefusedError("OPERAND_MUTATED", f"{text} ({where_of(node)})", "copy it before the loop")


def _is_attached(steps: Steps, use: Use) -> bool:
    """Whether what is read has a gradient, as it is named or as it was made, for notes are those of the end."""
    return has_gradient(use.operand) or has_gradient(steps.node(use.step, use.index))


def _refuse_views(steps: Steps, uses: Sequence[Use]) -> None:
    """A view is a tensor of its own behind a loop: whoever writes to one that shares memory meant both."""
    versions = steps.versions
    written = {use.index: use for use in uses if versions.writes.get(use.reader) is use.operand}
    for use in uses:
        for index, other in written.items():
            if use.index != index and versions.shares(use.operand, [other.operand]):
                text = f"{other.reader.name} overwrites {other.operand.name}, memory of which {use.operand.name} shows"
                raise RefusedError("OVERWRITTEN_LATER", text, f"copy {use.operand.name}")
    for use in uses:
        if steps.place(use.operand) is None or use.operand in versions.writes or memory_of(use.operand) is None:
            continue
        owner = versions.effects.owner(use.operand)
        is_shown = steps.place(owner) is None and memory_of(owner) == memory_of(use.operand)
        if is_shown and (versions.is_overwritten(use.operand) or is_returned(use.operand)):
            text = (
                f"{use.reader.name} reads {use.operand.name}, a view of {told(owner)}, which is overwritten or returned"
            )
            raise RefusedError("OVERWRITTEN_LATER", text, f"copy {use.operand.name}")


def _is_in_step(body: Body, index: int) -> bool:
    """Whether the step computes a call; slices and what is the same in every step stay where they are."""
    return index not in body.hoisted and index not in body.cuts


def _collectors(uses: Sequence[Use]) -> list[Collector]:
    by_reader: dict[fx.Node, list[Use]] = {}
    for use in uses:
        by_reader.setdefault(use.reader, []).append(use)
    found = [collector_of(reader, mine) for reader, mine in by_reader.items() if len(mine) > 1]
    return [collector for collector in found if collector is not None]


def _slot(steps: Steps, buffer: Buffer, assignment: Assignment) -> torch.Tensor:
    """What one assignment writes to, as an example value."""
    tensor = known_tensor(buffer.node)
    width, pace = assignment.cut.length or 1, assignment.cut.pace
    if pace is None or width not in (1, abs(pace)):
        raise RefusedError("BUFFER_READ", f"what is assigned to {told(buffer.node)} leaves gaps", "assign to all of it")
    return Emitters(steps, Ambient()).plain(steps.node(0, 0)).compute(operator.getitem, tensor, assignment.elements)  # type: ignore[no-any-return]


class Emitters:
    """Makes emitters for the graphs of one loop."""

    def __init__(self, steps: Steps, ambient: Ambient) -> None:
        self._steps = steps
        self._ambient = ambient
        modes = (getattr(tensor_of(node), "fake_mode", None) for node in steps.nodes)
        self._fake_mode = next((mode for mode in modes if mode is not None), None)
        if self._fake_mode is None:
            raise RefusedError("NO_STATE", "no step computes a tensor", "store all of them at once, by torch.stack")

    def __call__(self, graph: fx.Graph, like: fx.Node) -> Emitter:
        """An emitter for a graph, beginning with calls that come from ``like``."""
        return Emitter(graph, self._fake_mode, self._ambient, like)

    def plain(self, like: fx.Node) -> Emitter:
        """For example values only."""
        return self(fx.Graph(), like)

    def entry(self, stream: Stream) -> torch.Tensor:
        """The example value of a stream in one step."""
        graph = fx.Graph()
        emit = self(graph, self._steps.node(0, 0))

        def placeholder(node: fx.Node) -> fx.Node:
            made = graph.placeholder(node.name)
            made.meta["example_value"] = node.meta["example_value"]
            return made

        whole = known_tensor(stacked(emit, stream, placeholder))
        return emit.compute(torch.select, whole, 0, 0)  # type: ignore[no-any-return]


def emitter_of(loop: Loop, graph: fx.Graph) -> Emitter:
    """Appends to a graph what belongs to a loop."""
    return Emitters(loop.steps, loop.ambient)(graph, loop.steps.node(0, 0))
