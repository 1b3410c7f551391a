"""What is done to the scores of the next token before it is drawn: masks, temperature, top-k, top-p, min-p and the softmax.

Filters (:mod:`~lz_compile.passes.sampling.filters`) are found by what they do. Those that follow each other become one, with
what was done to the scores before (``logit_processors.py``) and the softmax that follows. The draw itself
stays: PyTorch's generator would give other tokens to another kernel. Matches are made of that by :mod:`matching`.
"""

from __future__ import annotations

import math

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import fresh
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import reached, tensor_of
from lz_compile.passes.sampling.excerpt import Scores
from lz_compile.passes.sampling.filters import Filter, draws
from lz_compile.passes.sampling.logit_processors import logit_processors_of
from lz_compile.passes.sampling.ordering import ORDERING
from lz_compile.passes.sampling.probes import Limits

# ---- masks without a filter ------------------------------------------------------------------------------------------


def masked_softmax(effects: Effects, node: fx.Node) -> Filter | None:
    """The masks, temperature and additions before a softmax that is no weight of a sum, as attention's is; else None."""
    call, tensor = effects.calls[node], tensor_of(node)
    if call is None or call.name != "softmax" or tensor is None or not isinstance(call.get("dim"), int):
        return None
    is_computed = isinstance(call.input, fx.Node) and effects.calls.get(call.input) is not None
    is_drawn = any(draws(effects, user) for user in node.users)
    if not is_computed or not is_drawn or shape_of(tensor)[call.get("dim")] == 1:
        return None
    dims = fresh(shape_of(tensor))
    entry = Scores(call.input, dims, dims[call.get("dim") % len(dims)][0])
    processors = logit_processors_of(effects, entry, {node})
    if not processors.masks and not any(_is_additive_mask(effects, part.node) for part in processors.bias):
        return None
    return Filter(entry, "scores", node, Limits("probs"), frozenset({node}))


def _is_additive_mask(effects: Effects, node: fx.Node) -> bool:
    """Whether what is added to scores is minus infinity somewhere, by what made it."""
    call = effects.calls.get(node)
    if call is None or call.name not in ("where", "masked_fill", "mul"):
        return False
    return any(abs(each) == math.inf for each in call.arguments.values() if isinstance(each, float))


# ---- draws in the order of a sort ------------------------------------------------------------------------------------


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
