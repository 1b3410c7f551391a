"""Draws from probabilities that are still in the order of a sort: which token a generator draws depends on the order."""

from __future__ import annotations

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.sampling.stores import ORDERING

#: So many operations between a sort and the draw are looked through.
_MOST = 40


def sorted_draw(op: str, effects: Effects, draw: fx.Node) -> NearMiss | None:
    """The refusal of a ``multinomial`` over scores in the order of a sort, None where it is over tokens."""
    ordering = _ordering(effects, draw)
    if ordering is None:
        return None
    refusal = RefusedError(
        "DRAWN_IN_ORDER",
        f"{draw.name} draws among scores in the order of {ordering.name}: in another order it would draw other tokens",
        "scatter the scores back to the order of tokens, then draw, and gather nothing",
    )
    return NearMiss.of(op, draw, refusal)


def _ordering(effects: Effects, draw: fx.Node) -> fx.Node | None:
    """The sort whose places the draw looks up."""
    places = {node for node in _readers(draw) if effects.calls[node] is not None}
    stack, seen = list(draw.all_input_nodes), set[fx.Node]()
    while stack and len(seen) < _MOST:
        node = stack.pop()
        call = effects.calls.get(node)
        if node in seen or call is None or call.name in ("scatter", "gather", "take_along_dim"):
            continue
        seen.add(node)
        if call.name in ORDERING:
            indices = {user for user in node.users if effects.calls[user] is not None and tensor_of(user) is not None}
            is_looked_up = any(reader in places for index in indices for reader in index.users)
            if is_looked_up:
                return node
            continue
        stack.extend(node.all_input_nodes)
    return None


def _readers(draw: fx.Node) -> set[fx.Node]:
    """Everything that is computed from a draw, a few operations on."""
    found: set[fx.Node] = set()
    stack = list(draw.users)
    while stack and len(found) < _MOST:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.users)
    return found
