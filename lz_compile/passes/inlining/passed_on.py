"""Dropout that drops nothing is its input, and what is written to one is written to the other.

Eager PyTorch gives the tensor itself back (without training, or at a probability of zero). AOTAutograd makes a copy of it,
and so does what Dynamo notes: a write in place to either name would be lost to the other. So such calls go, and what was
noted behind them is noted again, of the memory that it lies in.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._subclasses import FakeTensor

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import Emitter
from lz_compile.passes.graph.gradients import has_gradient
from lz_compile.passes.graph.view import called, memories_of, tensor_of, value_of
from lz_compile.passes.graph.writes import DROPOUTS, drops, overwritten


def pass_on(graph: fx.Graph) -> int:
    """Take out every dropout that gives its input back as it is; how many there were."""
    effects = Effects(graph)
    gone = [node for node, call in effects.calls.items() if call and call.name in DROPOUTS and not drops(call)]
    memories = {node: set(memories_of(node)) for node in graph.nodes} if gone else {}
    had = {node: has_gradient(node) for node in memories}
    # inside of a transform, tensors are noted in what it wraps them in
    mode = next((tensor.fake_mode for node in graph.nodes if isinstance(tensor := tensor_of(node), FakeTensor)), None)
    moved = {memory for node in gone for memory in memories[node] - memories[node.all_input_nodes[0]]}
    for node, own in memories.items():
        call = effects.calls[node]
        if node in gone:
            node.replace_all_uses_with(node.all_input_nodes[0])
            continue
        shown = own.union(*(memories[each] for each in ([] if call is None else overwritten(call))))
        is_other = any(has_gradient(each) != had[each] for each in node.all_input_nodes)
        if call is not None and node.op != "output" and (shown & moved or is_other):
            node.meta["example_value"] = _noted(node, effects, mode)
    for node in gone:
        graph.erase_node(node)
    return len(gone)


def _noted(node: fx.Node, effects: Effects, mode: Any) -> Any:
    """What a call gives of what is noted of its operands by now."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    return Emitter(node.graph, mode, effects.ambient(node), node).compute(called, node.target, args, kwargs)
