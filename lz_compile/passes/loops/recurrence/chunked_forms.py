"""Recurrences that the source has already made parallel, chunk by chunk: there are no steps to read.

Their decays are exponentials of differences of cumulative sums, and their states come out of products over a chunk. They are
named, so that nobody wonders why they were left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.passes.graph.view import tensor_of, where_of

_EXPONENTIALS = frozenset({"exp", "exp2"})
_SOLVERS = frozenset({"solve_triangular", "inverse", "solve"})
_THROUGH = frozenset(
    {"cumsum", "getitem", "slice", "pad", "cat", "stack", "masked_fill", "where", "tril", "triu", "select"}
)
#: Calls that are followed from one cumulative sum.
_REACH = 200


def chunked_forms(graph: fx.Graph, effects: Effects, known: Collection[fx.Node]) -> Iterator[NearMiss]:
    """One near miss for each such recurrence; those that read what is ``known`` to be another op are none."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        call, tensor = effects.calls[node], tensor_of(node)
        if call is None or call.name != "cumsum" or tensor is None or not tensor.is_floating_point():
            continue
        follows = _followed(node, effects)
        names = {call.name for call in map(effects.calls.__getitem__, follows) if call is not None}
        is_product = bool(names & contraction.PRODUCTS or names & _SOLVERS)
        if names & _EXPONENTIALS and is_product and follows.isdisjoint(known):
            if seen.isdisjoint(follows):
                text = "it is computed in chunks already, with decays as exponentials of cumulative sums"
                edit = "write the recurrence as a loop over tokens to have it run by a kernel"
                yield NearMiss("scan", node, Reason("CHUNKED_ALREADY", text), edit, where_of(node))
            seen |= follows


def _followed(node: fx.Node, effects: Effects) -> set[fx.Node]:
    """What is made of a cumulative sum of logarithms: up to products after an exponential, and what these give."""
    found: dict[fx.Node, bool] = {node: False}
    queue = [node]
    while queue and len(found) < _REACH:
        current = queue.pop(0)
        for user in current.users:
            call = effects.calls[user]
            if user in found or call is None:
                continue
            is_decay = found[current] or call.name in _EXPONENTIALS
            is_product = call.name in contraction.PRODUCTS | _SOLVERS
            passes = is_pointwise(call) or layout.is_view(call) or layout.rearranges(call) or call.name in _THROUGH
            if passes or (is_product and found[current]):
                found[user] = is_decay
                queue.append(user)
    return set(found)
