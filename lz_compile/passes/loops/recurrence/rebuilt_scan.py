"""A scan with another step in the place of one that computes the same: tried out in the graph, then kept or undone."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size
from lz_compile.passes.formula.layout import stride_order
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.loops.recurrence.batched import Around
from lz_compile.passes.loops.recurrence.step_trace import SCAN, ScanCall

aten = torch.ops.aten
CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
#: Results of these may share memory with what they are given.
_VIEWS = frozenset(
    {aten.reshape, aten.expand, aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze, aten.select}
    | {aten.slice, aten.diagonal, aten.alias, aten.detach, aten.contiguous, aten._to_copy}
)


@dataclass(frozen=True)
class Rewritten:
    """A step in other states: its ``graph`` takes states, slices, given tensors, and those that are ``added``.

    ``final`` gives, around the loop, the last values of the old states from those of the new ones.
    """

    graph: fx.Graph
    init: tuple[fx.Node, ...]
    added: tuple[fx.Node, ...]
    final: Callable[[Sequence[fx.Node]], list[fx.Node]]


@dataclass
class Rebuilt:
    """A scan, ``call``, that may take the place of ``old``."""

    old: ScanCall
    call: ScanCall
    around: Around
    name: str
    picked: tuple[fx.Node, ...]
    final: Callable[[Sequence[fx.Node]], list[fx.Node]]

    def keep(self) -> None:
        """Let everybody who reads the old scan read the new one."""
        before, after = len(self.old.init), len(self.call.init)
        graph = self.old.node.graph
        with graph.inserting_before(self.old.node):
            states = self.final(self.picked[:after])
            values = [*states, *self.picked[after:]]
            replaced = in_place_of(self.around, self.old, values)
        assert len(values) == before + len(self.picked) - after, "a step gives what it gave"
        for node, value in replaced:
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        for node in self.picked:
            if not node.users:
                graph.erase_node(node)
        erase_scan(self.old)

    def undo(self) -> None:
        """As if nothing had been tried."""
        self.around.undo()
        owner = self.old.node.graph.owning_module
        if owner is not None and hasattr(owner, self.name):
            owner.delete_submodule(self.name)


def rebuild(old: ScanCall, around: Around, rewrite: Callable[[], Rewritten | None]) -> Rebuilt | None:
    """The scan with the step that ``rewrite`` gives, before the old one; None where it gives none."""
    graph = old.node.graph
    with graph.inserting_before(old.node):
        try:
            found = rewrite()
            if found is None:
                around.undo()
                return None
            name, body = _module(old, found.graph)
            callee = around.note(graph.get_attr(name), None)
            given = [*old.given, *found.added]
            whole = graph.call_function(SCAN, (callee, list(found.init), list(old.xs), given))
            examples = _examples(old, found, body, around)
            around.note(whole, tuple(examples))
            picked = [around.note(graph.call_function(operator.getitem, (whole, i)), e) for i, e in enumerate(examples)]
        except BaseException:
            around.undo()
            raise
    call = ScanCall(whole, body, tuple(found.init), old.xs, tuple(given))
    return Rebuilt(old, call, around, name, tuple(picked), found.final)


def _module(old: ScanCall, graph: fx.Graph) -> tuple[str, fx.GraphModule]:
    owner = old.node.graph.owning_module
    assert owner is not None, "a graph with a loop belongs to a module"
    taken: set[fx.Node] = set()
    output = graph.output_node()
    with graph.inserting_before(output):
        given: Any = output.args[0]
        output.args = ([own_memory(graph, node, taken) for node in given],)
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    body = fx.GraphModule(torch.nn.Module(), graph)
    name = next(name for i in itertools.count() if not hasattr(owner, name := f"scan_part_{i}"))
    owner.add_module(name, body)
    return name, body


def _examples(old: ScanCall, found: Rewritten, body: fx.GraphModule, around: Around) -> list[torch.Tensor]:
    operands = [value_of(node) for node in (*found.init, *old.xs, *found.added) if tensor_of(node) is not None]
    operands += [value for value in map(tensor_of, old.given) if value is not None]
    wants_grad = grad_enabled(around.ambient) and any(value.requires_grad for value in operands)
    outputs: Any = body.graph.output_node().args[0]
    values = [node.meta["val"] for node in outputs]
    shapes = [tuple(v.shape) if i < len(found.init) else (old.length, *v.shape) for i, v in enumerate(values)]
    return [around.empty(shape, v, wants_grad=wants_grad) for shape, v in zip(shapes, values, strict=True)]


def own_memory(graph: fx.Graph, node: fx.Node, taken: set[fx.Node]) -> fx.Node:
    """The value in contiguous memory of its own: a scan takes nothing else."""
    packet = getattr(node.target, "overloadpacket", None)
    value: Any = node.meta["val"]
    if node.op == "call_function" and packet not in _VIEWS and node not in taken and value.is_contiguous():
        taken.add(node)
        return node
    copy = graph.call_function(aten.clone.default, (node,), CONTIGUOUS)
    copy.meta = {"val": value, "example_value": value}
    return copy


def erase_scan(call: ScanCall) -> None:
    """Erase a loop that nobody reads any more, and its body."""
    graph, (body,) = call.node.graph, [each for each in call.node.all_input_nodes if each.op == "get_attr"][:1]
    graph.erase_node(call.node)
    if not body.users:
        graph.erase_node(body)
    owner = graph.owning_module
    if owner is not None and not any(each.target == body.target for each in graph.find_nodes(op="get_attr")):
        owner.delete_submodule(str(body.target))


def in_place_of(around: Around, call: ScanCall, values: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Every node that picks a result of a scan, with what takes its place: each result has memory of its own, as before."""
    taken: set[fx.Node] = set()
    found: list[tuple[fx.Node, fx.Node]] = []
    for place, nodes in call.results().items():
        value = values[place]
        if value in taken:
            value = around.call(aten.clone.default, (value,), CONTIGUOUS)
        taken.add(value)
        found += [(node, _with_strides(around, value, value_of(node))) for node in nodes]
    return found


def _with_strides(around: Around, node: fx.Node, old: torch.Tensor) -> fx.Node:
    """The value with the strides of the one that it replaces."""
    if value_of(node).stride() == old.stride():
        return node
    if old.is_contiguous():
        return around.call(aten.clone.default, (node,), CONTIGUOUS)
    order, back = stride_order([as_size(stride) for stride in old.stride()])
    dense = around.call(aten.clone.default, (around.call(aten.permute.default, (node, order)),), CONTIGUOUS)
    return around.call(aten.permute.default, (dense, back))


def value_of(node: fx.Node) -> torch.Tensor:
    """The example value of a node that holds a tensor."""
    value = tensor_of(node)
    assert value is not None, f"{node.name} is no tensor"
    return value
