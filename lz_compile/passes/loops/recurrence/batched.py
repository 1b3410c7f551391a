"""Operations of a step done for all steps at once, as nodes of the graph around the loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of, strides_of
from lz_compile.passes.graph.emitter import Emitter, origin_of
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import known_tensor, needed
from lz_compile.passes.loops.recurrence.plan import Traces
from lz_compile.passes.loops.recurrence.step_trace import ScanCall, traced
from lz_compile.passes.proof.running import Subgraph


class Around(Emitter):
    """The graph around a loop, at the place of the loop; new nodes get complete metadata, and may be recognised."""

    def __init__(self, loop: ScanCall, ambient: Ambient) -> None:
        super().__init__(loop.node.graph, known_tensor(loop.init[0]).fake_mode, ambient, loop.node)  # type: ignore[attr-defined]
        self.created: list[fx.Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call, with its example value."""
        self.created.append(super().call(target, *args, **kwargs))
        return self.created[-1]

    def note(self, node: fx.Node, value: Any) -> fx.Node:
        """Keep the metadata of a node that is new."""
        node.meta.update(origin_of(self.like))
        if node.op != "get_attr":
            node.meta["example_value"] = value
        self.created.append(node)
        return node

    def empty(self, shape: Sequence[Any], like: torch.Tensor, *, wants_grad: bool) -> torch.Tensor:
        """An example value."""
        with self.mode:
            value = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        return value.requires_grad_(wants_grad and like.is_floating_point())

    @contextmanager
    def inserting(self) -> Iterator[None]:
        """New nodes stand where the loop does; none are left where anything is raised."""
        with self.graph.inserting_before(self.like):
            try:
                yield
            except BaseException:
                self.undo()
                raise

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
        order = needed(nodes, self.over_time.keys() | self.always.keys())
        needs_time = set(self.over_time)
        for node in order:
            assert node.op == "call_function", f"{node.name} is needed before it is there"
            if any(each in needs_time for each in node.all_input_nodes):
                needs_time.add(node)
        return order, needs_time

    def _emit(self, nodes: Sequence[fx.Node], where: dict[fx.Node, fx.Node]) -> None:
        if not nodes:
            return
        inside = set(nodes)
        edge = sorted({each for node in nodes for each in node.all_input_nodes if each not in inside})
        results = [node for node in nodes if isinstance(node.meta["val"], torch.Tensor)]
        places = [0 if node in self.over_time else None for node in edge]
        given = [self.over_time[node] if node in self.over_time else self.always[node] for node in edge]
        values = [known_tensor(node).detach() for node in given]
        key = (tuple(nodes), tuple((value.dtype, shape_of(value), strides_of(value)) for value in values))
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
                copies[node] = self.around.call(node.target, *args, **kwargs)
            elif node.op == "output":
                return [copies[each] for each in node.args[0]]
        raise LookupError("a graph without an output")


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
