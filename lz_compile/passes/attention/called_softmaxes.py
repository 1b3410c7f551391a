"""Softmaxes in graphs that a call runs, as that of an autograd function does, between products that are outside of it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.passes.attention.scores import is_product, path_to, scores_behind
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.contraction import PRODUCTS
from lz_compile.passes.formula.pointwise import is_exponential
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, where_of
from lz_compile.passes.graph.view import is_floating, read
from lz_compile.passes.graph.writes import bodies_of

_EDIT = "call torch.softmax there instead: its own backward keeps no more than the probabilities"


def called_softmaxes(op: str, graph: fx.Graph, effects: Effects) -> Iterator[NearMiss]:
    """A near miss for every call whose graph normalises scores of this graph, and whose result weighs values here."""
    region = Region(effects)
    for node in graph.nodes:
        softmax = next(filter(None, map(_softmax_of, bodies_of(node))), None)
        if softmax is None:
            continue
        given = (scores_behind(region, each, _is_softmax) for each in node.all_input_nodes if is_floating(each))
        weighs = path_to([node], lambda each: each.users, lambda each: is_product(region, each), lambda _: False)
        if weighs is not None and any(map(bool, given)):
            name = getattr(node.target, "__name__", str(node.target))
            text = f"the softmax is in a graph of its own, which {name} runs, and both products are outside of it"
            yield NearMiss(op, node, Reason("SOFTMAX_APART", text), _EDIT, where_of(softmax))


def _softmax_of(body: fx.GraphModule) -> fx.Node | None:
    """The softmax, or the exponential, of a graph that has no products: those that have some are read by themselves."""
    calls = [call for node in body.graph.nodes if (call := read(node)) is not None]
    if any(call.name in PRODUCTS for call in calls):
        return None
    return next((call.node for call in calls if call.name == "softmax" or is_exponential(call)), None)


def _is_softmax(node: fx.Node) -> bool:
    call = read(node)
    return call is not None and call.name == "softmax"
