"""The ``torch.ops.higher_order.scan`` that a loop is: with initial state, streams and what all steps read as its operands."""

from __future__ import annotations

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.modules import hold
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import known_tensor, memory_of, origin_of, tensor_of, value_of
from lz_compile.passes.loops.roll.body import Around, Carried, Ref, Streamed
from lz_compile.passes.loops.roll.facts import Loop, Place, emitter_of, numbers, stacked
from lz_compile.passes.loops.roll.search import is_number
from lz_compile.passes.loops.roll.step_graph import Emitter, StepGraph, in_order
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
