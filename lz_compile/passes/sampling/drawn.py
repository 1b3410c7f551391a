"""What becomes of scores: tokens are drawn by them, or values are weighed by them, as attention weighs them."""

from __future__ import annotations

from torch import fx

from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.calls import is_cast
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.sampling.stores import ORDERING

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
    seen, queue, has_product = {scores}, [scores], False
    while queue and len(seen) < _FAR:
        for user in queue.pop(0).users:
            call = effects.calls.get(user)
            if call is None or user in seen:
                continue
            if call.name in _DRAWS:
                return False
            if call.name in contraction.PRODUCTS:
                has_product = True
                continue
            tensor = tensor_of(user)
            is_number = tensor is None or tensor.is_floating_point() or is_pointwise(call)  # or a mask of them
            if is_number and (call.name in _BETWEEN or is_pointwise(call) or layout.rearranges(call)):
                seen.add(user)
                queue.append(user)
    return has_product
