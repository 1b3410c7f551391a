"""Operations of a step done for all steps at once, as nodes of the graph around the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import Size, as_size, shape_of
from lz_compile.passes.graph.fakes import faking
from lz_compile.passes.graph.modes import Ambient, ambient_context
from lz_compile.passes.graph.provenance import EMITTED, provenance
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.loops.recurrence.plan import Traces
from lz_compile.passes.loops.recurrence.step_trace import traced
from lz_compile.passes.proof.subgraph import Subgraph


@dataclass
class Around:
    """The graph around a loop, at the place of the loop; new nodes get complete metadata."""

    graph: fx.Graph
    template: fx.Node
    ambient: Ambient
    mode: Any
    created: list[fx.Node] = field(default_factory=list)

    def call(self, target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """A new call, with its example value."""
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        given_args, given_kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["example_value"])
        with ExitStack() as stack:
            for manager in ambient_context(self.ambient):
                stack.enter_context(manager)
            stack.enter_context(faking(self.mode))
            value = target(*given_args, **given_kwargs)
        return self.note(node, value)

    def note(self, node: fx.Node, value: Any) -> fx.Node:
        """Keep the metadata of a node that is new."""
        node.meta.update(provenance(self.template))
        if node.op != "get_attr":
            node.meta["example_value"] = value
        del node.meta[EMITTED]  # this is the source's own computation, and may be recognised
        self.created.append(node)
        return node

    def empty(self, shape: Sequence[Any], like: torch.Tensor, *, wants_grad: bool) -> torch.Tensor:
        """An example value."""
        with self.mode:
            value = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        return value.requires_grad_(wants_grad and like.is_floating_point())

    def undo(self) -> None:
        """Erase everything that was made."""
        for node in reversed(self.created):
            self.graph.erase_node(node)
        self.created.clear()


@dataclass
class Batched:
    """Values of a step as tensors for all steps (``over_time``), or that are the same in every step."""

    around: Around
    traces: Traces
    over_time: dict[fx.Node, fx.Node] = field(default_factory=dict)
    always: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def compute(self, nodes: Iterable[fx.Node]) -> None:
        """Compute these for all steps, with whatever they need that is not there yet."""
        missing, needs_time = self._missing(nodes)
        self._emit([node for node in missing if node not in needs_time], self.always)
        sizes = [node for node in missing if not isinstance(node.meta["val"], torch.Tensor)]  # whoever needs them
        self._emit(sorted({*sizes, *(node for node in missing if node in needs_time)}), self.over_time)

    def _missing(self, nodes: Iterable[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
        found, stack = set[fx.Node](), [node for node in nodes if not self.has(node)]
        while stack:
            node = stack.pop()
            if node not in found:
                assert node.op == "call_function", f"{node.name} is needed before it is there"
                found.add(node)
                stack.extend(each for each in node.all_input_nodes if not self.has(each))
        order = sorted(found)
        needs_time = set(self.over_time)
        for node in order:
            if any(each in needs_time for each in node.all_input_nodes):
                needs_time.add(node)
        return order, needs_time

    def has(self, node: fx.Node) -> bool:
        """Whether a value is there."""
        return node in self.over_time or node in self.always

    def _emit(self, nodes: Sequence[fx.Node], where: dict[fx.Node, fx.Node]) -> None:
        if not nodes:
            return
        inside = set(nodes)
        edge = sorted({each for node in nodes for each in node.all_input_nodes if each not in inside})
        results = [node for node in nodes if isinstance(node.meta["val"], torch.Tensor)]
        places = [0 if node in self.over_time else None for node in edge]
        given = [self.over_time[node] if node in self.over_time else self.always[node] for node in edge]
        values = [_detached(node) for node in given]
        key = (tuple(nodes), tuple((value.dtype, shape_of(value), _strides(value)) for value in values))
        if key not in self.traces:
            if where is self.over_time:
                _check_sizes(nodes, values)
            segment, _ = Subgraph(inputs=dict.fromkeys(edge, ()), nodes=tuple(nodes), outputs=tuple(results)).module()
            function = torch.vmap(segment, in_dims=tuple(places)) if where is self.over_time else segment
            self.traces[key] = traced(function, values, self.around.ambient, self.around.mode)
        whole = self.traces[key]
        where.update(zip(results, self._inserted(whole, given), strict=True))

    def _inserted(self, whole: fx.GraphModule, given: Sequence[fx.Node]) -> list[fx.Node]:
        copies = dict(zip(whole.graph.find_nodes(op="placeholder"), given, strict=True))
        for node in whole.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = self.around.call(node.target, args, kwargs)
            elif node.op == "output":
                return [copies[each] for each in node.args[0]]
        raise LookupError("a graph without an output")


def _strides(value: torch.Tensor) -> tuple[Size, ...]:
    return tuple(as_size(stride) for stride in value.stride())


def _detached(node: fx.Node) -> torch.Tensor:
    value = tensor_of(node)
    assert value is not None, f"{node.name} is no tensor"
    return value.detach()


def _check_sizes(nodes: Sequence[fx.Node], values: Sequence[Any]) -> None:
    """Refuse linear algebra over symbolic sizes: to batch it, PyTorch makes numbers of them.

    Raises:
        RefusedError: there is such.
    """
    solver = next((node for node in nodes if "linalg" in str(node.target) and "norm" not in str(node.target)), None)
    is_symbolic = any(isinstance(size, torch.SymInt) for value in values for size in getattr(value, "shape", ()))
    if solver is not None and is_symbolic:
        text = f"{solver.name} of all steps at once would need sizes that are symbols"
        raise RefusedError("SIZE_UNKNOWN", text, "mark that dimension as static (torch._dynamo.mark_static)")
