"""The step of a loop as a graph module that ``torch.ops.higher_order.scan`` can call, every node with its example value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from lz_compile.ground.sizes import Size, as_size, shape_of
from lz_compile.passes.graph.emitter import Emitter
from lz_compile.passes.graph.gradients import has_gradient
from lz_compile.passes.graph.refusal import RefusedError, told, where_of
from lz_compile.passes.graph.view import known_tensor, memory_of, needed, read, tensor_of, value_of
from lz_compile.passes.graph.writes import WithoutEffects, without_writing
from lz_compile.passes.loops.roll.body import Around, Body, Carried, Entry, Part, Ref, Streamed
from lz_compile.passes.loops.roll.search import is_number
from lz_compile.passes.loops.roll.steps import Steps, kind_of, kind_of_value


@dataclass(frozen=True)
class Result:
    """What a step gives besides the state; with ``slot`` (a tensor), in its shape and dtype."""

    ref: Any
    slot: torch.Tensor | None = None
    #: Whether gradients come back from it, and from every step's.
    is_graded: bool = True
    is_read_always: bool = True


@dataclass(frozen=True)
class StepGraph:
    """A step: ``module(*carried, *streamed, *around) -> [*carried, *results]``; the numbers are those of the body."""

    module: fx.GraphModule
    slots: tuple[int, ...]
    streams: tuple[int, ...]
    around: tuple[int, ...]
    results: tuple[torch.Tensor, ...]
    #: What gradients flow to from results and states.
    reached: frozenset[Ref]

    @property
    def calls(self) -> int:
        """How many calls a step makes."""
        return sum(node.op in ("call_function", "call_method") for node in self.module.graph.nodes)


def step_graph(
    body: Body,
    results: Sequence[Result],
    finals: Mapping[int, bool],
    streamed: Callable[[int], torch.Tensor],
    emitter: Callable[[fx.Graph, fx.Node], Emitter],
    *,
    is_graded: bool,
) -> StepGraph:
    """Build the graph of a step.

    Args:
        body: the step.
        results: what is read of each step.
        finals: the slots whose last value is read, and whether gradients come back from that.
        streamed: the example value of a step's entry of a stream.
        emitter: makes an emitter for a graph.
        is_graded: whether the loop is differentiated; what is saved for that must not be what is handed on.

    Raises:
        RefusedError: what a call gives in the loop is something else than without.
    """
    used = _used(body, [result.ref for result in results], finals)
    slots, streams, around = (sorted(ref.number for ref in used if isinstance(ref, kind)) for kind in _HANDED)
    emit = emitter(graph := fx.Graph(), body.steps.node(0, 0))
    emit.within = WithoutEffects
    values: dict[Ref, fx.Node] = {}
    stopped: set[fx.Node] = set()
    for slot in slots:
        like = tensor_of(body.slots[slot].like)
        if like is None:
            raise RefusedError(
                "STEP_DIFFERS", f"{body.slots[slot].like.name} is no tensor", "let steps carry tensors only"
            )
        blank = emit.compute(torch.empty, tuple(like.shape), dtype=like.dtype, device=like.device)
        values[Carried(slot)] = _placeholder(graph, f"carry_{slot}", blank)
    for number in streams:
        values[Streamed(number)] = _placeholder(graph, f"x_{number}", streamed(number))
    for number in around:
        value = _handed_in(emit, body.around[number], values[Carried(slots[0])] if slots else None)
        values[Around(number)] = _placeholder(graph, f"around_{number}", value)
    for number, entry in enumerate(body.entries):
        if Part(number) in used:
            emit.like = entry.like
            values[Part(number)] = _emit(emit, entry, values)
            if not _is_graded(entry.like, body.steps):
                stopped.add(values[Part(number)])
    outputs = [values[body.slots[slot].source] for slot in slots]
    outputs += [_shaped(emit, result, values) for result in results]
    given = [pair for pair in zip(results, outputs[len(slots) :], strict=True) if pair[0].is_graded]
    states = dict(zip(slots, outputs, strict=False))
    ends = [output for slot, output in states.items() if finals.get(slot)]
    flowing = _flowing_through(states, [*ends, *(output for _, output in given)], values, stopped)
    if is_graded:
        states = {slot: output for slot, output in states.items() if output in flowing}
        _refuse_zeros(body, states, given, values, stopped)
    taken = values.values() if is_graded else [values[ref] for ref in values if not isinstance(ref, Part)]
    outputs = [emit.call("detach", each) if has_gradient(each) and each not in flowing else each for each in outputs]
    outputs = _apart(emit, outputs, len(slots), taken)
    _refuse_without_gradient(outputs, is_graded)
    graph.output(outputs)
    examples = tuple(tensor for tensor in map(tensor_of, outputs[len(slots) :]) if tensor is not None)
    reached = frozenset(ref for ref in values if not isinstance(ref, Part) and values[ref] in flowing)
    module = fx.GraphModule(torch.nn.Module(), graph)
    return StepGraph(module, tuple(slots), tuple(streams), tuple(around), examples, reached)


def _handed_in(emit: Emitter, node: fx.Node, state: fx.Node | None) -> Any:
    """The example value of what all steps read."""
    value = value_of(node)
    if isinstance(value, torch.SymFloat) and state is not None:  # a scan takes no such number, but a tensor of it
        value = emit.compute(torch.empty, (), dtype=torch.float64, device=known_tensor(state).device)
    if not isinstance(value, (torch.Tensor, torch.SymInt, int)):
        raise RefusedError("STEP_DIFFERS", f"{told(node)} is no tensor", "let steps read tensors only")
    return value


def _is_graded(like: fx.Node, steps: Steps) -> bool:
    """Whether a call has a gradient in any step, by what Dynamo says: in the first one a state may have none yet."""
    place = steps.place(like)
    nodes = [like] if place is None else [like, steps.node(steps.count - 1, place[1])]
    return any(has_gradient(node.args[0] if node.target is operator.setitem else node) for node in nodes)


def _flowing(outputs: Sequence[fx.Node], stopped: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes of a step that gradients of its outputs flow to."""

    def sources(node: fx.Node) -> Iterable[fx.Node]:
        writers = [user for user in node.users if user.args[:1] == (node,) and _overwrites(user)]
        return (each for maker in (node, *writers) for each in maker.all_input_nodes)

    return set(needed(outputs, stopped, sources))


def _overwrites(node: fx.Node) -> bool:
    call = read(node)
    return call is not None and (call.is_inplace or call.name == "setitem")


def _flowing_through(
    states: Mapping[int, fx.Node],
    wanted: Sequence[fx.Node],
    values: Mapping[Ref, fx.Node],
    stopped: Collection[fx.Node],
) -> set[fx.Node]:
    """The nodes of a step that gradients of some outputs flow to, be it from the outputs of later steps."""
    while True:
        flowing = _flowing(wanted, stopped)
        more = [out for slot, out in states.items() if values[Carried(slot)] in flowing and out not in wanted]
        if not more:
            return flowing
        wanted = [*wanted, *more]


_HANDED = (Carried, Streamed, Around)


def _used(body: Body, roots: Sequence[Any], finals: Iterable[int]) -> set[Ref]:
    """Everything that results, and the state that they depend on, are made of."""
    used: set[Ref] = set()
    pending: list[Ref] = [ref for root in roots for ref in refs_in(root)] + [Carried(slot) for slot in finals]
    while pending:
        ref = pending.pop()
        if ref in used:
            continue
        used.add(ref)
        if isinstance(ref, Carried):
            pending.append(body.slots[ref.number].source)
        elif isinstance(ref, Part):
            entry = body.entries[ref.number]
            pending.extend(refs_in((entry.args, entry.kwargs)))
    return used


def refs_in(value: Any) -> list[Ref]:
    """The refs in an argument."""
    found: list[Ref] = []
    map_aggregate(value, lambda leaf: found.append(leaf) if isinstance(leaf, Ref) else None)
    return found


def _mapped(value: Any, values: dict[Ref, fx.Node]) -> Any:
    return map_aggregate(value, lambda leaf: values[leaf] if isinstance(leaf, Ref) else leaf)


def _placeholder(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["example_value"] = value
    return node


def _emit(emit: Emitter, entry: Entry, values: dict[Ref, fx.Node]) -> fx.Node:
    args, kwargs = _mapped(entry.args, values), _mapped(entry.kwargs, values)
    try:
        node = _overwriting(emit, entry, args, kwargs) if entry.overwrites else emit.call(entry.target, *args, **kwargs)
    except (RuntimeError, TypeError, IndexError) as error:
        text = f"{told(entry.like)} fails on the loop's own operands: {error}"
        raise RefusedError("STEP_DIFFERS", text, "let every step be the same") from error
    wanted = tensor_of(entry.like)
    if wanted is not None and kind_of(node) != kind_of(entry.like):
        text = f"{told(entry.like)} gives another dtype or shape in a loop"
        raise RefusedError("SHAPE_CHANGES", text, "keep shapes and dtypes the same in every step")
    return node


def _overwriting(emit: Emitter, entry: Entry, args: Any, kwargs: Any) -> fx.Node:
    """A call that overwrites its first operand, on a copy of that, or spelled so that it need not."""
    twin = without_writing(entry.like, args, kwargs)
    if twin is not None:
        node = emit.call(twin[0], *twin[1], **twin[2])
        if kind_of(node) == kind_of(args[0]):
            return node
        emit.graph.erase_node(node)
    copied = emit.call("clone", args[0])
    emit.call(entry.target, copied, *args[1:], **kwargs)
    return copied


def _shaped(emit: Emitter, result: Result, values: dict[Ref, fx.Node]) -> fx.Node:
    node = _mapped(result.ref, values)
    tensor = tensor_of(node)
    if result.slot is None:
        if tensor is None:
            raise RefusedError("NO_TENSOR", "what is read of each step is no tensor", "read parts of it in each step")
        return node  # type: ignore[no-any-return]
    if is_number(node) or tensor is None:
        raise RefusedError("BUFFER_READ", "a number is assigned in each step", "assign tensors")
    if tensor.dtype != result.slot.dtype:
        node = emit.call("to", node, result.slot.dtype)
    if kind_of(node) != kind_of_value(result.slot):
        sizes = tuple(result.slot.shape)
        if not all(isinstance(size, int) for size in sizes):
            raise RefusedError("SHAPE_CHANGES", "what is assigned in each step is broadcast", "expand it before")
        node = emit.call("expand", node, sizes)
    return node  # type: ignore[no-any-return]


def in_order(emit: Emitter, node: fx.Node) -> fx.Node:
    """A tensor with the strides of a new one: the operator compares even those of dimensions of size one."""
    tensor = known_tensor(node)
    if not tensor.is_contiguous():
        return emit.copied(node)
    step: Size = 1
    for size, stride in zip(reversed(shape_of(tensor)), reversed(tensor.stride()), strict=True):
        if size == 1 and as_size(stride) != step:
            return emit.copied(node)
        step = step * size
    return node


def _apart(emit: Emitter, outputs: list[fx.Node], carried: int, others: Iterable[fx.Node]) -> list[fx.Node]:
    """The outputs, none of which shares memory with another or with others; what is carried is contiguous."""
    taken = {memory_of(node) for node in others}
    found = []
    for number, output in enumerate(outputs):
        node = output
        if memory_of(node) in taken:
            node = emit.copied(node)
        elif number < carried:
            node = in_order(emit, node)
        taken.add(memory_of(node))
        found.append(node)
    return found


def _refuse_zeros(
    body: Body,
    states: Mapping[int, fx.Node],
    given: Sequence[tuple[Result, fx.Node]],
    values: Mapping[Ref, fx.Node],
    stopped: set[fx.Node],
) -> None:
    """A loop's backward hands zeros to what eager code gives no gradient, and what meets an infinity there is NaN.

    That is a state from which no gradient comes, and a result that is read of some steps only. Where the value has a
    gradient anyhow, or adds up what has, zeros change nothing.
    """
    always = [output for result, output in given if result.is_read_always]
    live = states
    while True:
        flowing = _flowing([*always, *live.values()], stopped)
        still = {slot: output for slot, output in live.items() if values[Carried(slot)] in flowing}
        if len(still) == len(live):
            break
        live = still
    sources = [body.slots[slot].source for slot in states if slot not in live]
    sources += [result.ref for result, _ in given if not result.is_read_always]
    for source in sources:
        made = body.entries[source.number].like if isinstance(source, Part) else None
        if made is None or not _is_graded(made, body.steps) or _adds_up(values[source], flowing | stopped):
            continue
        text = f"{made.name} has no gradient in some steps, or hands none on, and a loop would send zeros"
        raise RefusedError("GRADIENT_STOPS", text, f"carry {made.name}.detach(), read it of every step")


def _adds_up(node: fx.Node, flowing: Collection[fx.Node]) -> bool:
    """Whether a value is one of these or of what is handed in, or a sum of such with numbers for weights."""
    if node in flowing or node.op == "placeholder":
        return True
    call = read(node)
    is_scaled = call is not None and call.name == "mul" and len(node.all_input_nodes) == 1 < len(node.args)
    is_sum = call is not None and call.name in ("add", "sub", "neg", "clone")
    return (is_scaled or is_sum) and all(_adds_up(each, flowing) for each in node.all_input_nodes)


def _refuse_without_gradient(outputs: Sequence[fx.Node], has_gradient: bool) -> None:
    """PyTorch's scan has no gradient where any of what a step gives has none (2.13)."""
    for node in outputs:
        tensor = tensor_of(node)
        if has_gradient and tensor is not None and tensor.is_complex():
            text = f"each step gives complex numbers ({where_of(node)}), and the loop is differentiated"
            raise RefusedError("NO_GRADIENT", text, "carry real and imaginary parts as real tensors")
        if has_gradient and tensor is not None and not tensor.is_floating_point():
            text = f"each step gives {tensor.dtype} ({where_of(node)}), and the loop is differentiated"
            raise RefusedError("NO_GRADIENT", text, "compute what has no gradient in a loop of its own, under no_grad")
