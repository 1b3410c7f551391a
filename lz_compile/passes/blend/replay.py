"""Values that a source computes more than once: the edge of a match is then what they are computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Dims, LayoutError, broadcast_from, resolve
from lz_compile.passes.formula.calls import is_cast
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.view import Call, called, tensor_of
from lz_compile.passes.graph.walks import needed


def shared_inputs(effects: Effects, nodes: Sequence[fx.Node], dims: Dims) -> dict[fx.Node, Dims]:
    """The nodes from which several, that compute the same, are computed, with their dims.

    Raises:
        LayoutError: they spell out sizes, which differ in a proof.
    """
    if len(set(nodes)) == 1:
        return {nodes[0]: dims}
    calls = [effects.calls[node] for node in nodes]
    found: dict[fx.Node, Dims] = {}
    for operands in zip(*(node.all_input_nodes for node in nodes), strict=True):
        call = calls[0]
        assert call is not None, "what is computed twice is a call"
        for node, own in shared_inputs(effects, operands, _dims_of(call, operands[0], dims)).items():
            if resolve(found.setdefault(node, own)) != resolve(own):
                raise LayoutError(f"{told(node)} is read along different dimensions")
    return found


def _dims_of(call: Call, operand: fx.Node, dims: Dims) -> Dims:
    """The dims of an operand, given those of the result."""
    tensor = tensor_of(operand)
    if tensor is None:
        return ()
    if is_cast(call) or call.name == "detach":
        return dims
    if not layout.rearranges(call):
        return broadcast_from(dims, shape_of(tensor))
    read = None if call.name in layout.SIZED else layout.read_input_dims(call, dims)
    if read is None:
        raise LayoutError(f"{told(call.node)} spells out sizes, or picks")
    return read


def reached(node: fx.Node, edges: Mapping[fx.Node, Dims]) -> set[fx.Node]:
    """The edges from which a node is computed."""
    return {each for inner in needed([node], edges) for each in inner.all_input_nodes if each in edges}


def replay(node: fx.Node, value: Callable[[fx.Node], Any], edges: Mapping[fx.Node, Dims]) -> Any:
    """A node computed again from the values of the edges."""
    if node in edges:
        return value(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: replay(each, value, edges))
    assert node.op in ("call_function", "call_method"), f"{node.name} is no call"
    return called(node.target, args, kwargs)
