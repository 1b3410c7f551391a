"""A scan with another step in the place of one that computes the same: tried out in the graph, then kept or undone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.passes.formula.layout import stride_order
from lz_compile.passes.graph.refusal import hold
from lz_compile.passes.graph.view import known_tensor
from lz_compile.passes.loops.recurrence.batched import Around
from lz_compile.passes.loops.recurrence.step_trace import PART, SCAN, ScanCall, results_of
from lz_compile.passes.rewriting.core import wants_grad

aten = torch.ops.aten
CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
#: Results of these may share memory with what they are given.
_VIEWS = frozenset(
    getattr(aten, name)
    for name in "reshape view _unsafe_view expand permute transpose t unsqueeze squeeze select slice diagonal alias detach "
    "contiguous _to_copy".split()
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
    picked: tuple[fx.Node, ...]
    final: Callable[[Sequence[fx.Node]], list[fx.Node]]

    def keep(self) -> None:
        """Let everybody who reads the old scan read the new one."""
        before, after = len(self.old.init), len(self.call.init)
        graph = self.old.node.graph
        with graph.inserting_before(self.old.node):
            values = [*self.final(self.picked[:after]), *self.picked[after:]]
            assert len(values) == before + len(self.picked) - after, "a step gives what it gave"
            replace_results(self.old, values, self.around)
        for node in self.picked:
            if not node.users:
                graph.erase_node(node)
        erase_scan(self.old)

    def undo(self) -> None:
        """As if nothing had been tried."""
        owner, name = self.old.node.graph.owning_module, str(self.call.node.all_input_nodes[0].target)
        self.around.undo()
        if owner is not None and hasattr(owner, name):
            owner.delete_submodule(name)


def rebuild(old: ScanCall, around: Around, rewrite: Callable[[], Rewritten | None]) -> Rebuilt | None:
    """The scan with the step that ``rewrite`` gives, before the old one; None where it gives none."""
    with around.inserting():
        found = rewrite()
        if found is None:
            around.undo()
            return None
        given = (*old.given, *found.added)
        call, picked = insert_scan(around, found.graph, found.init, old.xs, given, old.length)
    return Rebuilt(old, call, around, tuple(picked), found.final)


def _module(graph: fx.Graph, is_graded: bool) -> fx.GraphModule:
    output = graph.output_node()
    with graph.inserting_before(output):
        given: Any = output.args[0]
        output.args = (_apart(graph, given, is_graded),)
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    return fx.GraphModule(torch.nn.Module(), graph)


def insert_scan(
    around: Around,
    step: fx.Graph,
    init: Sequence[fx.Node],
    xs: Sequence[fx.Node],
    given: Sequence[fx.Node],
    length: Any,
) -> tuple[ScanCall, list[fx.Node]]:
    """A scan of ``length`` steps at the insertion point, and its results: last states, then what the steps give."""
    graph = around.graph
    is_graded = wants_grad(around.ambient, (*init, *xs, *given))
    body = _module(step, is_graded)
    callee = around.note(graph.get_attr(hold(graph.owning_module, PART, body)), None)
    whole = graph.call_function(SCAN, (callee, list(init), list(xs), list(given)))
    outputs: Any = body.graph.output_node().args[0]
    shapes = [(value, tuple(value.shape)) for value in map(known_tensor, init)]
    shapes += [(value, (length, *value.shape)) for value in (node.meta["val"] for node in outputs[len(init) :])]
    examples = [around.empty(shape, value, wants_grad=is_graded) for value, shape in shapes]
    around.note(whole, tuple(examples))
    picked = [around.note(graph.call_function(operator.getitem, (whole, i)), e) for i, e in enumerate(examples)]
    return ScanCall(whole, body, tuple(init), tuple(xs), tuple(given)), picked


def replace_results(call: ScanCall, values: Sequence[fx.Node], around: Around) -> None:
    """Let everybody who reads a scan read these values: each result has memory of its own, as before, and its strides."""
    taken: set[fx.Node] = set()
    replaced: list[tuple[fx.Node, fx.Node]] = []
    for place, nodes in results_of(call.node).items():
        value = values[place]
        if value in taken:
            value = around.call(aten.clone.default, value, **CONTIGUOUS)
        taken.add(value)
        replaced += [(node, _with_strides(around, value, known_tensor(node))) for node in nodes]
    for node, value in replaced:
        node.replace_all_uses_with(value)
        node.graph.erase_node(node)


def _apart(graph: fx.Graph, results: Iterable[fx.Node], is_graded: bool) -> list[fx.Node]:
    """The results of a step, each in contiguous memory of its own: a scan takes nothing else.

    With gradients it gives what its backward keeps besides, which may be any value of the step.
    """
    found: list[fx.Node] = []
    for node in results:
        packet = getattr(node.target, "overloadpacket", None)
        value: Any = node.meta["val"]
        is_made = node.op == "call_function" and packet not in _VIEWS and value.is_contiguous()
        if is_made and not is_graded and node not in found:
            found.append(node)
            continue
        found.append(graph.call_function(aten.clone.default, (node,), CONTIGUOUS))
        found[-1].meta = {"val": value, "example_value": value}
    return found


def erase_scan(call: ScanCall) -> None:
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
    if known_tensor(node).stride() == old.stride():
        return node
    if old.is_contiguous():
        return around.call(aten.clone.default, node, **CONTIGUOUS)
    order, back = stride_order(old)
    dense = around.call(aten.clone.default, around.call(aten.permute.default, node, order), **CONTIGUOUS)
    return around.call(aten.permute.default, dense, back)
