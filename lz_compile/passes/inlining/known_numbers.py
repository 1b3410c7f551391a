"""Numbers that guards fix are written out: a dimension that differs from call to call is an input, and fixed in each graph.

Dynamo makes a symbol of an ``int`` that changed, and asks for its value where a tensor has to know its own shape. Every
reading of a call's dimensions finds a number then, as it does where the program says one. What comes from data has no guard:
assertions in the graph compare it with its number in each call.
"""

from __future__ import annotations

from torch import SymInt, fx
from torch._ops import HigherOrderOperator
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from lz_compile.ground.sizes import Size, as_size
from lz_compile.passes.graph.view import value_of


def write_out(graph: fx.Graph) -> int:
    """Give calls the numbers themselves, those of other graphs excepted: they take them as inputs; how many calls."""
    values = {node: value for node in graph.nodes if isinstance(value := value_of(node), SymInt)}
    found: dict[fx.Node, Size] = {
        node: as_size(value) for node, value in values.items() if not free_unbacked_symbols(value.node._expr)
    }
    known = {node: size for node, size in found.items() if isinstance(size, int)}
    users = [
        user
        for user in dict.fromkeys(user for node in known for user in node.users)
        if user.op in ("call_function", "call_method") and not isinstance(user.target, HigherOrderOperator)
    ]
    for user in users:
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda each: known.get(each, each))
    return len(users)
