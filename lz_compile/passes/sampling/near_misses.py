"""Draws that no filter of the op can be taken from: in the order of a sort, or of tokens that another rule drops."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.expressions import constant_value, is_constant
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, told
from lz_compile.passes.graph.view import is_boolean, is_floating, known_tensor, reached, tensor_of
from lz_compile.passes.graph.writes import RANDOM
from lz_compile.passes.sampling.ordering import ORDERING
from lz_compile.passes.sampling.recogniser import OP, SOFTMAXES

#: So many operations between a sort and the draw are looked through.
_MOST = 40


def sorted_draw(effects: Effects, draw: fx.Node) -> NearMiss | None:
    """The refusal of a ``multinomial`` over scores in the order of a sort, None where it is over tokens."""
    ordering = _ordering(effects, draw)
    if ordering is None:
        return None
    refusal = RefusedError(
        "DRAWN_IN_ORDER",
        f"{draw.name} draws among scores in the order of {ordering.name}: in another order it would draw other tokens",
        "scatter the scores back to the order of tokens, then draw, and gather nothing",
    )
    return NearMiss.of(OP, draw, refusal)


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


# ---- draws of what another rule keeps --------------------------------------------------------------------------------


#: So many values are looked at behind a draw.
_FAR = 96
#: At most this, as what a token that is dropped scores.
_DROPPED = -1e4


def unknown_filter(effects: Effects, draw: fx.Node, known: Container[fx.Node]) -> NearMiss | None:
    """The refusal of a draw among tokens that are dropped by their scores, by none of the filters that are ``known``."""
    behind = _behind(effects, *draw.all_input_nodes)
    made = {*behind, *(writer for writer, target in effects.writes_made if effects.owner(target) in behind)}
    is_draw = effects.name(draw) == "multinomial" or any(effects.name(each) in RANDOM for each in made)
    if not is_draw or any(node in known for node in behind):
        return None
    for node in behind:
        for mask, value in _drops(effects, node):
            before = {*_behind(effects, value)}
            if any(each in before and _is_alike(each, value) for each in _behind(effects, mask)):
                text = f"which tokens {told(node)} drops hangs on their scores, but is no top-k, top-p or min-p that was read"
                edit = "compare these scores with a limit made of them; other rules have no kernel"
                return NearMiss.of(OP, node, RefusedError("FILTER_UNKNOWN", text, edit))
    return None


def _behind(effects: Effects, *nodes: fx.Node) -> list[fx.Node]:
    """These nodes and what they are computed from, up to products."""

    def above(node: fx.Node) -> list[fx.Node]:
        return [] if effects.name(node) in contraction.PRODUCTS else node.all_input_nodes

    return [*reached(nodes, above, _FAR)]


def _is_alike(node: fx.Node, value: fx.Node) -> bool:
    """Whether a tensor holds a number for each token, as a value does."""
    return is_floating(node) and shape_of(known_tensor(node)) == shape_of(known_tensor(value))


def _drops(effects: Effects, node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What says which tokens a call drops, and what they are dropped from."""
    call = effects.calls.get(node)
    if call is None or not is_floating(node):
        return
    if call.name == "masked_fill":
        pairs = [(call.get("mask"), call.input, call.get("value"))]
    elif call.name == "where":
        sides = call.get("input"), call.get("other")
        pairs = [(call.get("condition"), *sides), (call.get("condition"), *sides[::-1])]
    elif call.name == "mul":
        sides = call.input, call.get("other")
        pairs = [(mask, value, 0.0) for mask, value in (sides, sides[::-1]) if is_boolean(mask)]
    else:
        return
    for mask, value, fill in pairs:
        if is_boolean(mask) and is_floating(value) and _is_dropped(effects, value, fill):
            yield mask, value


def _is_dropped(effects: Effects, value: fx.Node, fill: Any) -> bool:
    """Whether ``fill`` in the place of a score, or of a probability, keeps its token from being drawn."""
    call = effects.calls.get(fill) if isinstance(fill, fx.Node) else None
    number = constant_value(call) if call is not None and is_constant(call) else fill
    if not isinstance(number, int | float):
        return False
    is_made = number == 0 and any(effects.name(each) in SOFTMAXES for each in _behind(effects, value))
    return is_made or number <= _DROPPED
