"""Where in a graph several matches can be computed at once: what the kernel reads may have to be computed earlier."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.moments import CALLS, STATISTICS
from lz_compile.passes.formula.parts import SPLITS
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.fusion.emitter import in_order
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.view import is_symbolic

_MOVABLE = contraction.PRODUCTS | STATISTICS | SPLITS | CALLS.keys() | {"getitem", "cat", "stack", "narrow", "select"}
_MANY = 64


def brought(
    what: str, inputs: Collection[fx.Node], outputs: Collection[fx.Node], effects: Effects
) -> tuple[fx.Node, ...] | Reason:
    """The nodes to be computed before the first of ``outputs``, so that all of ``inputs`` are there; or why they cannot be.

    Args:
        what: is to be computed at that place, in words.
        inputs: what the kernel reads.
        outputs: what it gives.
        effects: of the graph.
    """
    place = min(outputs, key=effects.position.__getitem__)
    start = effects.position[place]
    stack = [node for node in inputs if effects.position[node] > start]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if node in outputs:
            return Reason("NOT_FUSED", f"{what} is needed for the rest of what the kernel reads")
        if not _is_movable(node, effects) or effects.ambient(node) != effects.ambient(place):
            return Reason("NOT_FUSED", f"{what} comes before {told(node)}, which is not computed earlier")
        found.add(node)
        stack.extend(operand for operand in node.all_input_nodes if effects.position[operand] >= start)
        writer = next(filter(None, (effects.overwritten_after(x, place, node) for x in node.all_input_nodes)), None)
        if writer is not None or len(found) > _MANY:
            return Reason("NOT_FUSED", f"{what} comes too early for what else the kernel reads ({told(node)})")
    return in_order([*found]) if found else ()


def _is_movable(node: fx.Node, effects: Effects) -> bool:
    """Whether a node gives the same wherever it stands: it draws no random numbers and overwrites nothing."""
    call = effects.calls[node]
    if node.op == "get_attr" or (is_symbolic(node) and node.op != "placeholder"):
        return True
    if call is None or call.is_inplace or "out" in call.arguments:
        return False
    if call.name == "dropout":
        return not call.get("training", True) or call.get("p", 0.5) == 0
    return is_pointwise(call) or layout.rearranges(call) or call.name in _MOVABLE
