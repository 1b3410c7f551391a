"""A loop that was found becomes one ``torch.ops.higher_order.scan`` in the place of its calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx

from lz_compile.passes.effects import Ambient, grad_enabled
from lz_compile.passes.loop_body import Body, Gathered, Numbers, Stream
from lz_compile.passes.loop_outputs import Assignment, Buffer, Collector, Use, buffers_of, collector_of, uses_of
from lz_compile.passes.loop_purity import is_pure, refuse_impure
from lz_compile.passes.loop_search import is_number
from lz_compile.passes.loop_slices import Slices
from lz_compile.passes.loop_step_graph import Emitter, Result, StepGraph, step_graph
from lz_compile.passes.loop_steps import Steps, kind_of
from lz_compile.passes.match import RefusedError
from lz_compile.passes.view import tensor_of, where_of

SCAN = torch.ops.higher_order.scan


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
    def has_streams(self) -> bool:
        """Whether steps read something that moves on."""
        return any(not isinstance(self.body.streams[number], Numbers) for number in self.step.streams)


def read_loop(steps: Steps, ambient: Ambient) -> Loop:
    """Everything that is needed to roll a loop; changes nothing.

    Raises:
        RefusedError: it is no scan.
    """
    for index in range(steps.period):
        refuse_impure(steps.node(0, index))
    _refuse_unclear(steps)
    buffers = buffers_of(steps)
    written = frozenset(each.index for buffer in buffers for each in buffer.assignments)
    body = Body(steps, written)
    uses = [use for use in uses_of(steps, written) if _is_in_step(body, use.index)]
    collectors = _collectors(steps, uses)
    finals = _finals(body)
    results: dict[Any, Result] = {
        each.index: Result(body.assigned[each.index], _slot(steps, buffer, each))
        for buffer in buffers
        for each in buffer.assignments
    }
    collected = {collector.node for collector in collectors}
    for index in sorted({index for collector in collectors for index in collector.indices}):
        results["value", index] = Result(body.refs[index])
    for use in uses:
        if use.reader not in collected and not (use.step == steps.count - 1 and use.index in finals):
            results.setdefault(("value", use.index), Result(body.refs[use.index]))
    last = {use.index for use in uses if use.step == steps.count - 1 and use.index in finals}
    emitter = _Emitters(steps, ambient)
    step = step_graph(
        body,
        list(results.values()),
        [finals[index] for index in last],
        lambda number: emitter.entry(body.streams[number]),
        emitter,
    )
    if not step.slots:
        raise RefusedError("NO_STATE", "no step reads what the one before it made", "run all steps at once, as a batch")
    numbers = {key: number for number, key in enumerate(results)}
    return Loop(steps, body, buffers, collectors, uses, ambient, step, numbers, finals)


def _refuse_unclear(steps: Steps) -> None:
    versions, inside = steps.versions, set(steps.nodes)
    for node in steps.nodes:
        if node in versions.unclear:
            text = f"{versions.unclear[node]} ({where_of(node)})"
            raise RefusedError("OPERAND_MUTATED", text, "use the out-of-place form of that operation")
    written = [versions.writes[node] for node in steps.nodes if node in versions.writes]
    for node, text in versions.unclear.items():
        if node not in inside and any(versions.shares(node_read, written) for node_read in node.all_input_nodes):
            raise RefusedError("OPERAND_MUTATED", f"{text} ({where_of(node)})", "copy it before the loop")


def _is_in_step(body: Body, index: int) -> bool:
    """Whether the step computes a call; slices and what is the same in every step stay where they are."""
    return index not in body.hoisted and index not in body.cuts


def _finals(body: Body) -> dict[int, int]:
    """By the index of a call, the slot that holds its value at the end."""
    return {index: slot for slot, index in body.made_by.items()}


def _collectors(steps: Steps, uses: Sequence[Use]) -> list[Collector]:
    by_reader: dict[fx.Node, list[Use]] = {}
    for use in uses:
        by_reader.setdefault(use.reader, []).append(use)
    found = [collector_of(steps, reader, mine) for reader, mine in by_reader.items() if len(mine) > 1]
    return [collector for collector in found if collector is not None]


def _slot(steps: Steps, buffer: Buffer, assignment: Assignment) -> torch.Tensor:
    """What one assignment writes to, as an example value."""
    tensor = tensor_of(buffer.node)
    assert tensor is not None, "what is assigned to is a tensor"
    width, pace = assignment.cut.length or 1, assignment.cut.pace
    if pace is None or width not in (1, abs(pace)):
        raise RefusedError("BUFFER_READ", f"what is assigned to {buffer.node.name} leaves gaps", "assign to all of it")
    return _Emitters(steps, Ambient()).plain(steps.node(0, 0)).compute(operator.getitem, tensor, assignment.elements)  # type: ignore[no-any-return]


class _Emitters:
    """Makes emitters for the graphs of one loop."""

    def __init__(self, steps: Steps, ambient: Ambient) -> None:
        self._steps = steps
        self._ambient = ambient
        modes = (getattr(tensor_of(node), "fake_mode", None) for node in steps.nodes)
        self._fake_mode = next(mode for mode in modes if mode is not None)

    def __call__(self, graph: fx.Graph, like: fx.Node) -> Emitter:
        return Emitter(graph, self._fake_mode, self._ambient, like)

    def plain(self, like: fx.Node) -> Emitter:
        """For example values only."""
        return self(fx.Graph(), like)

    def entry(self, stream: Stream) -> torch.Tensor:
        """The example value of a stream in one step."""
        graph = fx.Graph()
        emit = self(graph, self._steps.node(0, 0))

        def stand_in(node: fx.Node) -> fx.Node:
            placeholder = graph.placeholder(node.name)
            placeholder.meta["example_value"] = node.meta["example_value"]
            return placeholder

        whole = tensor_of(stacked(emit, stream, stand_in))
        assert whole is not None, "a stream is a tensor"
        return emit.compute(torch.select, whole, 0, 0)  # type: ignore[no-any-return]


# ---- emission ----------------------------------------------------------------------------------------------------------

Place = Callable[[fx.Node], fx.Node]


def stacked(emit: Emitter, stream: Stream, place: Place) -> fx.Node:
    """A stream as one tensor, steps first; slices at an even pace are a view."""
    if isinstance(stream, Numbers):
        return _numbers(emit, stream.values, stream.device)
    if isinstance(stream, Gathered):
        return emit.call(torch.stack, [place(node) for node in stream.nodes])
    source, pace, width = place(stream.source), stream.pace, stream.length or 1
    tensor = tensor_of(source)
    assert tensor is not None, "slices are cut out of a tensor"
    if not pace:
        return _picked(emit, source, stream)
    first = min(stream.starts[0], stream.starts[-1])
    span = abs(pace) * (len(stream.starts) - 1) + width
    if (first, span) != (0, tensor.shape[stream.dim]):
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
    width, tensor = stream.length or 1, tensor_of(source)
    assert tensor is not None, "slices are cut out of a tensor"
    numbers = tuple(start + shift for start in stream.starts for shift in range(width))
    found = emit.call("index_select", source, stream.dim, _numbers(emit, numbers, tensor.device))
    if stream.length is not None:
        found = emit.call("unflatten", found, stream.dim, (len(stream.starts), width))
    return emit.call("movedim", found, stream.dim, 0) if stream.dim else found


def _numbers(emit: Emitter, values: Sequence[int | float], device: torch.device) -> fx.Node:
    if all(isinstance(value, int) for value in values) and len(values) > 1:
        pace = int(values[1] - values[0])
        stop = int(values[0]) + pace * len(values)
        if pace and tuple(range(int(values[0]), stop, pace)) == tuple(values):
            return emit.call(torch.arange, int(values[0]), stop, pace, dtype=torch.int64, device=device)
    dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float64
    return emit.call(torch.tensor, list(values), dtype=dtype, device=device)


def emit_scan(loop: Loop, emit: Emitter, owner: torch.nn.Module, place: Place) -> fx.Node:
    """The scan, at the insertion point of a graph in which ``place`` is what nodes of the source are."""
    body, step, steps = loop.body, loop.step, loop.steps
    emit.like = steps.node(0, 0)
    streams = [stacked(emit, body.streams[number], place) for number in step.streams]
    if not streams:
        tensor = tensor_of(body.slots[step.slots[0]].like)
        assert tensor is not None, "what is carried is a tensor"
        streams = [_numbers(emit, range(steps.count), tensor.device)]
        _without_streams(step)
    taken: set[int] = set()
    initial = [_alone(emit, _initial(emit, loop, slot, place), taken) for slot in step.slots]
    around = [_alone(emit, place(body.around[number]), taken) for number in step.around]
    path = next(path for path in (f"loop_body_{i}" for i in count()) if not hasattr(owner, path))
    owner.add_module(path, step.module)
    callee = emit.graph.create_node("get_attr", path)
    scan = emit.graph.call_function(SCAN, (callee, initial, streams, around))
    for node in (callee, scan):
        node.meta.update(
            {key: emit.like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in emit.like.meta}
        )
    scan.meta["example_value"] = _example(loop, emit, scan)
    return scan


def _without_streams(step: StepGraph) -> None:
    """A scan counts its steps by a stream: give the step one that it does not read."""
    graph = step.module.graph
    if any(node.name.startswith("x_") for node in graph.nodes if node.op == "placeholder"):
        return
    last = [node for node in graph.nodes if node.op == "placeholder"][len(step.slots) - 1]
    with graph.inserting_after(last):
        counter = graph.placeholder("x_counter")
    counter.meta["example_value"] = last.meta["example_value"].new_empty((), dtype=torch.int64)
    step.module.recompile()


def _initial(emit: Emitter, loop: Loop, slot: int, place: Place) -> fx.Node:
    given, like = loop.body.slots[slot].initial, tensor_of(loop.body.slots[slot].like)
    assert like is not None, "what is carried is a tensor"
    if not is_number(given):
        return place(given)
    sizes = tuple(like.shape)
    if not all(isinstance(size, int) for size in sizes):
        text = f"the state begins as the number {given}, and its shape is symbolic"
        raise RefusedError("SHAPE_CHANGES", text, "begin with a tensor (torch.zeros) instead of a number")
    return emit.call(torch.full, sizes, given, dtype=like.dtype, device=like.device)


def _alone(emit: Emitter, node: fx.Node, taken: set[int]) -> fx.Node:
    """An operand that shares memory with no other one; carried ones are contiguous, and so are all copies."""
    tensor = tensor_of(node)
    if tensor is None:
        return node
    memory = tensor.untyped_storage()._cdata
    if memory in taken:
        return emit.call("clone", node, memory_format=torch.contiguous_format)
    taken.add(memory)
    return node if tensor.is_contiguous() else emit.call("contiguous", node)


def _example(loop: Loop, emit: Emitter, scan: fx.Node) -> tuple[torch.Tensor, ...]:
    operands = [tensor_of(node) for node in scan.all_input_nodes]
    wants_grad = grad_enabled(loop.ambient) and any(each is not None and each.requires_grad for each in operands)
    carried = [tensor_of(loop.body.slots[slot].like) for slot in loop.step.slots]
    shapes = [(each, tuple(each.shape)) for each in carried if each is not None]
    shapes += [(each, (loop.steps.count, *each.shape)) for each in loop.step.results]
    found = [emit.compute(torch.empty, shape, dtype=each.dtype, device=each.device) for each, shape in shapes]
    for value in found:
        if wants_grad and (value.is_floating_point() or value.is_complex()):
            value.requires_grad_()
    return tuple(found)


def emitter_of(loop: Loop, graph: fx.Graph) -> Emitter:
    """Appends to a graph what belongs to a loop."""
    return _Emitters(loop.steps, loop.ambient)(graph, loop.steps.node(0, 0))


def roll(loop: Loop, owner: fx.GraphModule) -> fx.Node:
    """Put the scan in the place of the loop; recompiling is the caller's.

    Raises:
        RefusedError: something of it cannot be spelled out. The graph is as it was, then.
    """
    graph, steps = owner.graph, loop.steps
    before = set(graph.nodes)
    emit = emitter_of(loop, graph)
    try:
        with graph.inserting_before(steps.nodes[-1].next):
            scan = emit_scan(loop, emit, owner, lambda node: node)
            replaced = _Readers(loop, emit, scan).replacements()
    except BaseException:
        for node in [node for node in reversed(graph.nodes) if node not in before]:
            graph.erase_node(node)
        raise
    for reader, operand, value in replaced:
        if reader is None:
            operand.replace_all_uses_with(value)
        else:
            reader.replace_input_with(operand, value)
    for collector in loop.collectors:
        graph.erase_node(collector.node)
    _erase(graph, steps)
    return scan


class _Readers:
    """What is read behind a loop, read from the scan."""

    def __init__(self, loop: Loop, emit: Emitter, scan: fx.Node) -> None:
        self._loop = loop
        self._emit = emit
        self._scan = scan
        self._items: dict[int, fx.Node] = {}
        self._entries: dict[tuple[int, int], fx.Node] = {}

    def replacements(self) -> list[tuple[fx.Node | None, fx.Node, fx.Node]]:
        """Pairs of old and new, with the reader concerned (None: all of them). Emits the new ones."""
        loop, found = self._loop, list[tuple[fx.Node | None, fx.Node, fx.Node]]()
        for buffer in loop.buffers:
            found.extend(self._filled(buffer))
        for collector in loop.collectors:
            self._emit.like = collector.node
            value = self._collected(collector)
            if kind_of(value) != kind_of(collector.node):
                raise RefusedError("SHAPE_CHANGES", f"{collector.node.name} joins something else", "stack tensors")
            found.append((None, collector.node, value))
        collected = {collector.node for collector in loop.collectors}
        for use in loop.uses:
            if use.reader not in collected:
                self._emit.like = use.operand
                found.append((use.reader, use.operand, self._entry(use.step, use.index)))
        return found

    def _item(self, number: int) -> fx.Node:
        if number not in self._items:
            self._items[number] = self._emit.call(operator.getitem, self._scan, number)
        return self._items[number]

    def _values(self, key: Any) -> fx.Node:
        return self._item(len(self._loop.step.slots) + self._loop.results[key])

    def _entry(self, step: int, index: int) -> fx.Node:
        loop = self._loop
        if step == loop.steps.count - 1 and index in loop.finals:
            return self._item(loop.step.slots.index(loop.finals[index]))
        if (step, index) not in self._entries:
            self._entries[step, index] = self._emit.call("select", self._values(("value", index)), 0, step)
        return self._entries[step, index]

    def _collected(self, collector: Collector) -> fx.Node:
        emit, dim = self._emit, collector.dim
        found = [self._values(("value", index)) for index in collector.indices]
        value = found[0]
        if len(found) > 1:
            value = emit.call("flatten", emit.call(torch.stack, found, 1), 0, 1)
        value = self._ordered(value, collector)
        value = emit.call("movedim", value, 0, dim) if dim else value
        if collector.joins == "cat":
            value = emit.call("flatten", value, dim, dim + 1)
        if not (collector.before or collector.after):
            tensor = tensor_of(value)
            return value if tensor is None or tensor.is_contiguous() else emit.call("contiguous", value)
        parts = [self._joined(collector, nodes) for nodes in (collector.before, collector.after)]
        return emit.call(torch.cat, [*parts[0], value, *parts[1]], dim)

    def _ordered(self, value: fx.Node, collector: Collector) -> fx.Node:
        width, count = len(collector.indices), self._loop.steps.count
        first, last = collector.first, collector.last
        low, high = min(first, last), max(first, last)
        if (low, high) != (0, count - 1):
            value = self._emit.call("narrow", value, 0, low * width, (high + 1 - low) * width)
        if first <= last:
            return value
        if width == 1:
            return self._emit.call("flip", value, 0)
        split = self._emit.call("unflatten", value, 0, (high + 1 - low, width))
        return self._emit.call("flatten", self._emit.call("flip", split, 0), 0, 1)

    def _joined(self, collector: Collector, nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
        if not nodes or collector.joins == "cat":
            return list(nodes)
        return [self._emit.call(torch.stack, list(nodes), collector.dim)]

    def _filled(self, buffer: Buffer) -> list[tuple[fx.Node | None, fx.Node, fx.Node]]:
        """Assign all steps at once; a buffer that is new and filled completely is what is assigned."""
        values = [(each, self._arranged(each)) for each in buffer.assignments]
        tensor = tensor_of(buffer.node)
        if buffer.is_filled() and tensor is not None and tensor.is_contiguous():
            value = values[0][1]
            example = tensor_of(value)
            if example is not None and not example.is_contiguous():
                value = self._emit.call("contiguous", value)
            position, stop = self._loop.steps.program.position, self._loop.steps.stop
            readers = [user for user in buffer.node.users if position.get(user, stop) >= stop]
            return [(reader, buffer.node, value) for reader in readers]
        for assignment, value in values:
            low, width = min(assignment.cut.starts), assignment.cut.length or 1
            pace = abs(assignment.cut.pace or 1) if width == 1 else 1
            span = slice(low, max(assignment.cut.starts) + width, None if pace == 1 else pace)
            index = list(assignment.elements)
            index[assignment.place] = span
            self._emit.like = self._loop.steps.node(0, assignment.index)
            node = self._emit.graph.call_function(operator.setitem, (buffer.node, tuple(index), value))
            node.meta.update(self._emit.origin())
            node.meta["example_value"] = None
        return []

    def _arranged(self, assignment: Assignment) -> fx.Node:
        """All that is assigned, as one tensor in the place of the moving slice."""
        emit = self._emit
        emit.like = self._loop.steps.node(0, assignment.index)
        value = self._values(assignment.index)
        if (assignment.cut.pace or 1) < 0:
            value = emit.call("flip", value, 0)
        dim = sum(isinstance(element, slice) for element in assignment.elements[: assignment.place])
        value = emit.call("movedim", value, 0, dim) if dim else value
        return value if assignment.cut.length is None else emit.call("flatten", value, dim, dim + 1)


def _erase(graph: fx.Graph, steps: Steps) -> None:
    """Erase the calls of a loop, and what was made for nothing but it."""
    pending = list(reversed(steps.nodes))
    operands = {operand for node in pending for operand in node.all_input_nodes}
    for node in pending:
        if not node.users:
            graph.erase_node(node)
    gone = set(steps.nodes)
    unread = [node for node in operands if node not in gone]
    while unread:
        node = unread.pop()
        if node.op in ("call_function", "call_method") and not node.users and node not in gone and is_pure(node):
            gone.add(node)
            unread.extend(node.all_input_nodes)
            graph.erase_node(node)
