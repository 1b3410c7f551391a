"""A loop as a scan in a graph of its own, to look at before the graph that it is part of is changed."""

from __future__ import annotations

import torch
from torch import fx

from lz_compile.passes.loops.roll.facts import Loop, emitter_of
from lz_compile.passes.loops.roll.scan import emit_scan
from lz_compile.passes.loops.roll.step_graph import Emitter


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
