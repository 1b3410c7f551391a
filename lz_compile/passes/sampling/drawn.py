"""What becomes of scores: tokens are drawn by them, or values are weighed by them, as attention weighs them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, is_floating, reached, tensor_of
from lz_compile.passes.sampling.ordering import ORDERING

_DRAWS = frozenset({"multinomial", "argmax", "cumsum"})
#: Calls after which scores, or what is left of them, are scores still, or their weights.
_BETWEEN = ORDERING | {"softmax", "log_softmax", "scatter", "gather", "sum", "dropout", "min", "amin", "amax", "select"}
#: How many values are looked at.
_FAR = 128


def draws(effects: Effects, node: fx.Node) -> bool:
    """Whether probabilities are drawn from, as they are or after they were rearranged, given back, or compared."""
    call = effects.calls.get(node)
    if call is None:
        return node.op == "output"
    if call.name in _DRAWS or call.name == "div":
        return True
    if call.name in contraction.PRODUCTS or not (layout.rearranges(call) or is_cast(call)):
        return False
    return any(draws(effects, user) for user in node.users)


def weighs(effects: Effects, scores: fx.Node) -> bool:
    """Whether scores end up in a product with other values, and in no draw: top-k attention is none of tokens."""

    def calls(node: fx.Node) -> Iterator[Call]:
        return (call for call in map(effects.calls.get, node.users) if call is not None)

    def goes_on(call: Call) -> bool:
        if call.name in _DRAWS or call.name in contraction.PRODUCTS:
            return False
        is_number = tensor_of(call.node) is None or is_floating(call.node) or is_pointwise(call)  # or a mask of them
        return is_number and (call.name in _BETWEEN or is_pointwise(call) or layout.rearranges(call))

    near = reached([scores], lambda node: (call.node for call in calls(node) if goes_on(call)), _FAR)
    names = {call.name for node in near for call in calls(node)}
    return names.isdisjoint(_DRAWS) and not names.isdisjoint(contraction.PRODUCTS)
