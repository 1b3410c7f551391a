"""Draws from probabilities that are still in the order of a sort: which token a generator draws depends on the order."""

from __future__ import annotations

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.graph.walks import reached
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
    places = {node for node in reached(draw.users, lambda node: node.users, _MOST) if effects.calls[node] is not None}

    def above(node: fx.Node) -> list[fx.Node]:
        call = effects.calls.get(node)
        is_end = call is None or call.name in ("scatter", "gather", "take_along_dim") or call.name in ORDERING
        return [] if is_end else node.all_input_nodes

    for node in reached(draw.all_input_nodes, above, _MOST):
        call = effects.calls.get(node)
        if call is None or call.name not in ORDERING:
            continue
        indices = {user for user in node.users if effects.calls[user] is not None and tensor_of(user) is not None}
        if any(reader in places for index in indices for reader in index.users):
            return node
    return None
