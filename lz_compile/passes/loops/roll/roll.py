"""A loop that was found becomes one ``torch.ops.higher_order.scan`` in the place of its calls."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of, strides_of
from lz_compile.passes.formula.layout import is_returned, stride_order
from lz_compile.passes.formula.moves import strides_matter
from lz_compile.passes.graph.emitter import Emitter, origin_of
from lz_compile.passes.graph.gradients import has_gradient
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.refusal import RefusedError, hold, told
from lz_compile.passes.graph.view import known_tensor, memory_of, tensor_of, value_of
from lz_compile.passes.graph.writes import is_pure
from lz_compile.passes.loops.roll.body import Around, Carried, Ref, Streamed
from lz_compile.passes.loops.roll.facts import Loop, Place, emitter_of, numbers, stacked
from lz_compile.passes.loops.roll.outputs import Assignment, Buffer, Collector, Use
from lz_compile.passes.loops.roll.search import is_number
from lz_compile.passes.loops.roll.step_graph import StepGraph, in_order
from lz_compile.passes.loops.roll.steps import Steps, kind_of
from lz_compile.passes.rewriting.core import wants_grad

SCAN = torch.ops.higher_order.scan


def emit_scan(loop: Loop, emit: Emitter, owner: fx.GraphModule, place: Place) -> fx.Node:
    """The scan, at the insertion point of a graph in which ``place`` is what nodes of the source are."""
    body, step, steps = loop.body, loop.step, loop.steps
    emit.like = steps.node(0, 0)
    streams = [_flowing(emit, loop, stacked(emit, body.streams[n], place), Streamed(n)) for n in step.streams]
    if not streams:
        tensor = known_tensor(body.slots[step.slots[0]].like)
        streams = [numbers(emit, range(steps.count), tensor.device)]
        _without_streams(step)
    taken: set[int | None] = set()
    initial = [_flowing(emit, loop, _initial(emit, loop, slot, place), Carried(slot)) for slot in step.slots]
    initial = [_alone(emit, _with_known_strides(emit, node), taken) for node in initial]
    around = [_as_tensor(emit, loop, place(body.around[number])) for number in step.around]
    around = [_flowing(emit, loop, node, Around(n)) for n, node in zip(step.around, around, strict=True)]
    around = [_alone(emit, node, taken) for node in around]
    callee = emit.graph.create_node("get_attr", hold(owner, "loop_body", step.module))
    scan = emit.graph.call_function(SCAN, (callee, initial, streams, around))
    for node in (callee, scan):
        node.meta.update(origin_of(emit.like))
    scan.meta["example_value"] = _example(loop, emit, scan)
    return scan


def _flowing(emit: Emitter, loop: Loop, node: fx.Node, ref: Ref) -> fx.Node:
    """An operand as it is where gradients flow to it, detached where none do: the operator would give it zeros."""
    tensor = tensor_of(node)
    is_stopped = tensor is not None and tensor.requires_grad and ref not in loop.step.reached
    return emit.call("detach", node) if is_stopped and grad_enabled(loop.ambient) else node


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
    given, like = loop.body.slots[slot].initial, known_tensor(loop.body.slots[slot].like)
    if not is_number(given):
        return place(given)
    sizes = tuple(like.shape)
    if not all(isinstance(size, int) for size in sizes):
        text = f"the state begins as the number {given}, and its shape is symbolic"
        raise RefusedError("SHAPE_CHANGES", text, "begin with a tensor (torch.zeros) instead of a number")
    return emit.call(torch.full, sizes, given, dtype=like.dtype, device=like.device)


def _as_tensor(emit: Emitter, loop: Loop, node: fx.Node) -> fx.Node:
    """A symbolic fraction as a tensor without dimensions, which takes part in arithmetic alike; others as they are."""
    like = tensor_of(loop.body.slots[loop.step.slots[0]].like)
    if not isinstance(value_of(node), torch.SymFloat) or like is None:
        return node
    return emit.call(torch.full, (), node, dtype=torch.float64, device=like.device)


def _with_known_strides(emit: Emitter, node: fx.Node) -> fx.Node:
    """A state, copied where AOTAutograd may know other strides of it than its example value has.

    It does (2.13) where sizes of one leave them open, and a view of the state was written to.
    """
    is_open = tensor_of(node) is not None and any(size == 1 for size in shape_of(known_tensor(node)))
    return emit.copied(node) if is_open else node


def _alone(emit: Emitter, node: fx.Node, taken: set[int | None]) -> fx.Node:
    """An operand that shares memory with no other one; carried ones are contiguous, and so are all copies."""
    tensor = tensor_of(node)
    if tensor is None:
        return node
    memory = memory_of(node)
    if memory in taken:
        return emit.copied(node)
    taken.add(memory)
    return in_order(emit, node)


def _example(loop: Loop, emit: Emitter, scan: fx.Node) -> tuple[torch.Tensor, ...]:
    is_graded = wants_grad(loop.ambient, scan.all_input_nodes)
    carried = [tensor_of(loop.body.slots[slot].like) for slot in loop.step.slots]
    shapes = [(each, tuple(each.shape)) for each in carried if each is not None]
    shapes += [(each, (loop.steps.count, *each.shape)) for each in loop.step.results]
    found = [emit.compute(torch.empty, shape, dtype=each.dtype, device=each.device) for each, shape in shapes]
    for value in found:
        if is_graded and (value.is_floating_point() or value.is_complex()):
            value.requires_grad_()
    return tuple(found)


# ---- a scan to look at -----------------------------------------------------------------------------------------------


def trial_scan(loop: Loop) -> fx.Node:
    """The scan that a loop would become; placeholders stand for everything that it reads.

    Raises:
        RefusedError: it cannot be spelled out.
    """
    graph = fx.Graph()
    owner = fx.GraphModule(torch.nn.Module(), graph)
    graph = owner.graph
    handed: dict[fx.Node, fx.Node] = {}
    emit: Emitter = emitter_of(loop, graph)

    def place(node: fx.Node) -> fx.Node:
        if node not in handed:
            with graph.inserting_before(next(iter(graph.nodes), None)):
                handed[node] = graph.placeholder(node.name)
            handed[node].meta = dict(node.meta)
        return handed[node]

    scan = emit_scan(loop, emit, owner, place)
    graph.output(scan)
    return scan


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
        self._handed: set[int] = set()

    def replacements(self) -> list[tuple[fx.Node | None, fx.Node, fx.Node]]:
        """Pairs of old and new, with the reader concerned (None: all of them). Emits the new ones."""
        loop, found = self._loop, list[tuple[fx.Node | None, fx.Node, fx.Node]]()
        for buffer in loop.buffers:
            found.extend(self._filled(buffer))
        for collector in loop.collectors:
            self._emit.like = collector.node
            values = [self._values(("value", index)) for index in collector.indices]
            with self._emit.graph.inserting_before(collector.node):  # behind what else it joins
                value = self._as_it_lay(self._collected(collector, values), collector.node)
                if not self._handed.isdisjoint(
                    collector.indices
                ):  # whoever joins the same again has a tensor of their own
                    value = self._emit.call("clone", value)
                self._handed.update(collector.indices)
            if kind_of(value) != kind_of(collector.node):
                raise RefusedError("SHAPE_CHANGES", f"{told(collector.node)} joins something else", "stack tensors")
            found.append((None, collector.node, value))
        collected = {collector.node for collector in loop.collectors}
        names: dict[tuple[fx.Node, str], list[Use]] = {}  # whoever reads one tensor, by whatever name, reads one tensor
        for use in loop.uses:
            if use.reader not in collected:
                self._emit.like, tensor = use.operand, tensor_of(use.operand)
                lies = "" if tensor is None else f"{tensor.stride()} {tensor.requires_grad}"
                names.setdefault((self._entry(use.step, use.index), lies), []).append(use)
        for (entry, _), uses in names.items():
            strictest = max(uses, key=lambda use: (strides_matter(use.operand), is_returned(use.operand)))
            self._emit.like = strictest.operand
            value = self._as_it_lay(entry, strictest.operand)
            found.extend((use.reader, use.operand, value) for use in uses)
        return found

    def _as_it_lay(self, value: fx.Node, operand: fx.Node) -> fx.Node:
        """A value with the strides of what it replaces, where they matter to someone, and no gradient if that has none."""
        one, other = tensor_of(operand), tensor_of(value)
        if one is not None and other is not None and other.requires_grad and not one.requires_grad:
            value = self._emit.call("detach", value)
        if one is None or other is None or strides_of(one) == strides_of(other) or not strides_matter(operand):
            return value
        is_static = all(isinstance(size, int) for size in (*one.shape, *one.stride()))
        if is_static and is_returned(operand):  # AOTAutograd replays views of what is returned
            repeated = [dim for dim, stride in enumerate(one.stride()) if stride == 0 and one.shape[dim] > 1]
            for dim in repeated:  # nothing can be written to elements that share memory
                value = self._emit.call("narrow", value, dim, 0, 1)
            shape = [1 if dim in repeated else size for dim, size in enumerate(one.shape)]
            blank = self._emit.call(torch.empty_strided, shape, one.stride(), dtype=one.dtype, device=one.device)
            value = self._emit.call("copy_", blank, value)
            return self._emit.call("expand", value, one.shape) if repeated else value
        order, back = stride_order(one)
        return self._emit.call("permute", self._emit.copied(self._emit.call("permute", value, order)), back)

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
            entry = self._emit.call("select", self._values(("value", index)), 0, step)
            self._entries[step, index] = self._emit.call("clone", entry)  # a tensor of its own, as it was
        return self._entries[step, index]

    def _collected(self, collector: Collector, found: list[fx.Node]) -> fx.Node:
        emit, dim = self._emit, collector.dim
        value = found[0]
        if len(found) > 1:
            value = emit.call("flatten", emit.call(torch.stack, found, 1), 0, 1)
        value = self._ordered(value, collector)
        value = emit.call("movedim", value, 0, dim) if dim else value
        if collector.joins == "cat":
            value = emit.call("flatten", value, dim, dim + 1)
        if not (collector.before or collector.after):
            tensor = tensor_of(value)
            return value if tensor is None or tensor.is_contiguous() else emit.copied(value)
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
                value = self._emit.copied(value)
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
            node.meta.update(origin_of(self._emit.like))
            node.meta["example_value"] = None
        return []

    def _arranged(self, assignment: Assignment) -> fx.Node:
        """All that is assigned, as one tensor in the place of the moving slice."""
        emit = self._emit
        emit.like = self._loop.steps.node(0, assignment.index)
        value = self._values(assignment.index)
        assigned = [self._loop.steps.node(step, assignment.index).args[2] for step in range(self._loop.steps.count)]
        if has_gradient(value) and not any(has_gradient(each) for each in assigned):
            value = emit.call("detach", value)
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
