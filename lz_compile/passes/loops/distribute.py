"""Loops taken apart: what does not depend on the state is computed for all steps at once, and states one after the other.

A loop that carries several tensors becomes a scan for each of those that depend on themselves, or on each other; what
they read of one another, and everything that is made of reads, is computed in between.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.passes.effects import Ambient, Effects, grad_enabled
from lz_compile.passes.loops.batched import Around, Batched
from lz_compile.passes.loops.loop_plan import Part, Plan
from lz_compile.passes.loops.scan_reading import Readings
from lz_compile.passes.loops.step_trace import SCAN, ScanCall, scan_call
from lz_compile.passes.match import NearMiss, RefusedError
from lz_compile.passes.view import tensor_of, where_of

aten = torch.ops.aten
#: Results of these may share memory with what they are given.
_VIEWS = frozenset(
    {aten.reshape, aten.expand, aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze, aten.select}
    | {aten.slice, aten.diagonal, aten.alias, aten.detach, aten.contiguous, aten._to_copy}
)


@dataclass(frozen=True)
class Distributed:
    """A loop that was taken apart, ``where`` in the source: into how many scans, and states that are one step late."""

    where: str
    scans: int
    delays: int


def distribute(graph: fx.Graph) -> Iterator[Distributed | NearMiss]:
    """Take apart every scan of a graph of which a part has a structure that kernels know; others stay as they are.

    Either a whole loop is rewritten or, on any exception, it is as it was.
    """
    scans = [node for node in graph.nodes if node.target is SCAN and node.users]
    effects = Effects(graph) if scans else None
    readings = Readings(follows_masks=True)
    for node in scans:
        call = scan_call(node)
        if call is None or effects is None:
            continue
        try:
            plan = readings.plan(call, effects.ambient(node))
        except RefusedError:
            continue  # the recogniser says why
        if not plan.pays or not plan.is_apart:
            continue
        try:
            yield _distributed(call, plan, effects.ambient(node))
        except RefusedError as refusal:
            yield NearMiss("scan", node, refusal.reason, refusal.edit, where_of(node))


def why_unknown(node: fx.Node, ambient: Ambient) -> NearMiss | None:
    """Why no part of a scan has a structure that kernels know; None where one has."""
    call = scan_call(node)
    try:
        if call is None:
            raise RefusedError("STEP_OPAQUE", "a loop reads or carries something that is no tensor", "carry tensors")
        plan = Readings(follows_masks=True).plan(call, ambient)
        if plan.pays:
            return None
        raise plan.refusal
    except RefusedError as refusal:
        return NearMiss("scan", node, refusal.reason, refusal.edit, where_of(node))


def _distributed(call: ScanCall, plan: Plan, ambient: Ambient) -> Distributed:
    results = call.results()
    if not isinstance(call.length, int) or not all(_value(node).is_contiguous() for node in call.init):
        text = "the number of steps is symbolic, or a first state is not contiguous"
        raise RefusedError("LOOP_KEPT_WHOLE", text, "compile with dynamic=False, and make the first state contiguous")
    graph = call.node.graph
    around = Around(graph, call.node, ambient, _value(call.init[0]).fake_mode)  # type: ignore[attr-defined]
    with graph.inserting_before(call.node):
        try:
            values = _Loop(call, plan, around).values()
            replaced = [
                (node, _with_strides(around, values[place], _value(node)))
                for place, nodes in results.items()
                for node in nodes
            ]
        except BaseException:
            around.undo()
            raise
    for node, value in replaced:
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    _erase(call)
    delays = sum(part.is_delay for part in plan.parts)
    return Distributed(where_of(call.node), len(plan.parts) - delays, delays)


def _erase(call: ScanCall) -> None:
    """Erase a loop that nobody reads any more, and its body."""
    graph, (body,) = call.node.graph, [each for each in call.node.all_input_nodes if each.op == "get_attr"][:1]
    graph.erase_node(call.node)
    if not body.users:
        graph.erase_node(body)
    owner = graph.owning_module
    if owner is not None and not any(each.target == body.target for each in graph.find_nodes(op="get_attr")):
        owner.delete_submodule(str(body.target))


def _with_strides(around: Around, node: fx.Node, old: torch.Tensor) -> fx.Node:
    """The value with the strides of the one that it replaces."""
    if _value(node).stride() == old.stride():
        return node
    if old.is_contiguous():
        return around.call(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    strides = old.stride()
    order = sorted(range(old.dim()), key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(old.dim())]
    dense = around.call(aten.clone.default, (around.call(aten.permute.default, (node, order)),), _CONTIGUOUS)
    return around.call(aten.permute.default, (dense, back))


_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}


class _Loop:
    """Emits the parts of one loop."""

    def __init__(self, call: ScanCall, plan: Plan, around: Around) -> None:
        self.call = call
        self.plan = plan
        self.around = around
        step = plan.form.step
        self.step = step
        self.batched = Batched(around, plan.traces, dict(zip(step.slices, call.xs, strict=True)))
        self.batched.always.update(zip(step.given, call.given, strict=True))
        self.final: dict[int, fx.Node] = {}
        self.masks = {node: around.call(aten.ne.Scalar, (self._given(node), 0)) for node in plan.form.indicators}
        changing = {state for part in plan.parts for state in part.states}
        for index, state in enumerate(step.states):
            if index not in changing:
                self.final[index] = self.batched.always[state] = call.init[index]

    def _given(self, node: fx.Node) -> fx.Node:
        return self.batched.over_time.get(node) or self.batched.always[node]

    def values(self) -> list[fx.Node]:
        """What takes the place of every result of the loop."""
        for part in self.plan.parts:
            self.batched.compute(part.outside)
            if part.is_delay:
                self._delay(part)
            else:
                self._scan(part)
        self.batched.compute(self.step.results)
        given = [self._over_time(node) for node in self.step.results]
        return [*(self.final[index] for index in range(len(self.step.states))), *given]

    def _over_time(self, node: fx.Node) -> fx.Node:
        """A value for all steps, repeated where it is the same in each."""
        if node in self.batched.over_time:
            return self.batched.over_time[node]
        always = self.batched.always[node]
        shape = [self.call.length, *_value(always).shape]
        whole = self.around.call(aten.expand.default, (always, shape))
        return self.around.call(aten.clone.default, (whole,), _CONTIGUOUS)

    def _delay(self, part: Part) -> None:
        for state in part.states:
            source = self._over_time(self.step.carried[state])
            length = self.call.length
            self.final[state] = self.around.call(aten.select.int, (source, 0, length - 1))
            if self.step.states[state] in part.wanted:
                first = self.around.call(aten.unsqueeze.default, (self.call.init[state], 0))
                earlier = self.around.call(aten.slice.Tensor, (source, 0, 0, length - 1))
                shifted = self.around.call(aten.cat.default, ([first, earlier], 0))
                self.batched.over_time[self.step.states[state]] = shifted

    def _scan(self, part: Part) -> None:
        slices = [node for node in part.outside if node in self.batched.over_time] or [self.step.slices[0]]
        given = [node for node in part.outside if node in self.batched.always]
        body = self._body(part, slices, given)
        operands = (
            [self.call.init[state] for state in part.states],
            [self.masks.get(node) or self.batched.over_time[node] for node in slices],
            [self.masks.get(node) or self.batched.always[node] for node in given],
        )
        whole = self.around.graph.call_function(SCAN, (body, *operands))
        wants_grad = grad_enabled(self.around.ambient) and any(
            _value(node).requires_grad for group in operands for node in group
        )
        values = [_value(node) for node in operands[0]]
        examples = [self.around.empty(value.shape, value, wants_grad=wants_grad) for value in values]
        values = [node.meta["val"] for node in part.wanted]
        length = self.call.length
        examples += [self.around.empty((length, *v.shape), v, wants_grad=wants_grad) for v in values]
        self.around.note(whole, tuple(examples))
        picked = []
        for index, example in enumerate(examples):
            node = self.around.graph.call_function(operator.getitem, (whole, index))
            picked.append(self.around.note(node, example))
        self.final.update(zip(part.states, picked, strict=False))
        self.batched.over_time.update(zip(part.wanted, picked[len(part.states) :], strict=True))

    def _body(self, part: Part, slices: Sequence[fx.Node], given: Sequence[fx.Node]) -> fx.Node:
        """The step of one part beside the graph, and the node that names it."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in (*(self.step.states[state] for state in part.states), *slices, *given):
            copies[node] = graph.placeholder(node.name)
        for node in self.masks.keys() & copies.keys():
            kind = {"dtype": node.meta["val"].dtype}
            mask = copies[node]
            with self.around.mode:
                mask.meta = _example(node.meta["val"].bool())
            copies[node] = graph.call_function(aten._to_copy.default, (mask,), kind)
        for node in part.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for node, copy in copies.items():
            copy.meta = _example(node.meta["val"])
        taken: set[fx.Node] = set()
        outputs = []
        for node in (*(self.step.carried[state] for state in part.states), *part.wanted):
            outputs.append(_own(graph, copies[node], taken))
        graph.output(outputs)
        owner = self.around.graph.owning_module
        assert owner is not None, "a graph with a loop belongs to a module"
        name = next(name for i in itertools.count() if not hasattr(owner, name := f"scan_part_{i}"))
        owner.add_module(name, fx.GraphModule(torch.nn.Module(), graph))
        return self.around.note(self.around.graph.get_attr(name), None)


def _example(value: torch.Tensor) -> dict[str, Any]:
    return {"val": value, "example_value": value}


def _own(graph: fx.Graph, node: fx.Node, taken: set[fx.Node]) -> fx.Node:
    """The value in contiguous memory of its own: a scan takes nothing else."""
    packet = getattr(node.target, "overloadpacket", None)
    value: Any = node.meta["val"]
    if node.op == "call_function" and packet not in _VIEWS and node not in taken and value.is_contiguous():
        taken.add(node)
        return node
    copy = graph.call_function(aten.clone.default, (node,), _CONTIGUOUS)
    copy.meta = _example(value)
    return copy


def _value(node: fx.Node) -> torch.Tensor:
    value = tensor_of(node)
    assert value is not None, f"{node.name} is no tensor"
    return value
