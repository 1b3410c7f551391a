"""Part of a graph: the calls that give some values, back to what they read. It is copied, resized and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.proof.running import run

Sizes: TypeAlias = Mapping[Axis, int]
#: Puts a node into a graph, given the copies of what it reads.
Copier: TypeAlias = Callable[[fx.Graph, fx.Node, Mapping[fx.Node, fx.Node]], fx.Node]


@dataclass(frozen=True, kw_only=True)
class Subgraph:
    """The calls ``nodes``, in graph order, that give ``outputs``; all else that they read is in ``inputs``.

    ``inputs`` have their axes where anybody asked for them, so have the nodes in ``read``, which spell out sizes;
    ``literal_sizes`` are further numbers that are sizes. ``held`` are the loops and tensors that ``get_attr`` nodes name.
    """

    inputs: Mapping[fx.Node, Dims]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    read: Mapping[fx.Node, Dims] = field(default_factory=dict)
    literal_sizes: Mapping[int, Axis] = field(default_factory=dict)
    held: Mapping[str, Any] = field(default_factory=dict)

    def run(self, *values: Any) -> tuple[Any, ...]:
        """The outputs for values of the inputs; see :func:`~lz_compile.passes.proof.running.run`.

        Raises:
            Exception: what the calls raise.
        """
        given = dict(zip(self.inputs, values, strict=True))
        found = run(self.nodes, given, attribute=self.held.__getitem__)
        return tuple(found[node] for node in self.outputs)

    def copied(
        self, copier: Copier | None = None, given: Mapping[fx.Node, fx.Node] | None = None
    ) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """A graph of its own, which gives a tuple, and the copy of every node, inputs first.

        Args:
            copier: puts something else in the place of a node.
            given: nodes that are read, and are inputs under another name.
        """
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in self.inputs}
        copies.update({older: copies[newer] for older, newer in (given or {}).items()})
        for node in self.nodes:
            copies[node] = copier(graph, node, copies) if copier else graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.outputs))
        return graph, copies

    def module(self) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
        """A copy as a function of the inputs, and the copy of every node."""
        graph, copies = self.copied()
        module = fx.GraphModule(dict(self.held), graph)
        return module, dict(zip(copies, module.graph.nodes, strict=False))
