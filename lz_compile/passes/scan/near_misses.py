"""Recurrences that were written without steps in a form that no kernel takes: in chunks, or for all pairs of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import as_size
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.algebra import ANCHORS
from lz_compile.passes.formula.axes import Axis
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.pointwise import is_exponential, is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, where_of
from lz_compile.passes.graph.view import Call, reached, tensor_of
from lz_compile.passes.masks.meaning import Axes, Meaning
from lz_compile.passes.masks.reading import Masks

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
        calls = [call for call in map(effects.calls.__getitem__, follows) if call is not None]
        names = {call.name for call in calls}
        is_product = bool(names & contraction.PRODUCTS or names & _SOLVERS)
        if is_product and any(map(is_exponential, calls)) and follows.isdisjoint(known):
            if seen.isdisjoint(follows):
                text = "it is computed in chunks already, with decays as exponentials of cumulative sums"
                edit = "write the recurrence as a loop over tokens to have it run by a kernel"
                yield NearMiss("scan", node, Reason("CHUNKED_ALREADY", text), edit, where_of(node))
            seen |= follows
    yield from _parallel_forms(graph, effects, seen)


#: What products of queries and keys pass through where they are masked and weighted, but for no softmax.
_WEIGHS = frozenset({"mul", "div", "masked_fill", "where", "tril", "triu", "nan_to_num"})
_MASKS = frozenset({"tril", "triu"})


def _parallel_forms(graph: fx.Graph, effects: Effects, told_already: Collection[fx.Node]) -> Iterator[NearMiss]:
    """Recurrences as products of all queries with all earlier keys, weighted by decays and multiplied by values."""
    for node in graph.nodes:
        call, tensor = effects.calls[node], tensor_of(node)
        if call is None or call.name not in contraction.PRODUCTS or tensor is None or node in told_already:
            continue
        if tensor.dim() > 2 and any(_is_masked_product(each, effects) for each in node.all_input_nodes):
            text = "products with all earlier keys are masked, weighted, and meet values without a softmax"
            edit = "write it as a loop over tokens, state = decay * state + key * value, to have it run by a kernel"
            yield NearMiss("scan", node, Reason("PARALLEL_FORM", text), edit, where_of(node))


def _is_masked_product(node: fx.Node, effects: Effects) -> bool:
    """Whether a value is one product of two computed tensors that is masked by what lies above or below a diagonal."""
    products, is_masked, weights, seen, queue = set[fx.Node](), False, set[fx.Node](), {node}, [node]
    while queue and len(seen) < _REACH:
        call = effects.calls.get(queue.pop())
        if call is None:
            continue
        if call.name in contraction.PRODUCTS:
            products.add(call.node)
            continue
        is_moved = is_cast(call) or _is_moved(call)
        if not is_moved and call.name not in _WEIGHS:
            continue
        weights |= set(call.node.all_input_nodes) - {call.input} if call.name in _WEIGHS else set()
        is_masked |= call.name in _MASKS
        behind = {call.input} if is_moved or call.name == "div" else set(call.node.all_input_nodes)
        queue += [each for each in behind - seen if isinstance(each, fx.Node)]
        seen |= behind
    (product, *rest) = products or (None,)
    operands = [] if product is None or rest else product.all_input_nodes
    if len(operands) < 2 or any(effects.calls.get(each) is None for each in operands):
        return False
    weights |= set(operands) if len(operands) > 2 else set()  # an einsum weighs by its third tensor
    return is_masked or any(_has_diagonal(each, effects) for each in weights)


def _has_diagonal(node: fx.Node, effects: Effects) -> bool:
    """Whether a mask is made of what lies above or below a diagonal; not before a product or a softmax."""

    def above(each: fx.Node) -> list[fx.Node]:
        return [] if effects.name(each) in ANCHORS else each.all_input_nodes

    return any(effects.name(each) in _MASKS or _is_one_sided(each, effects) for each in reached([node], above, 40))


def _is_one_sided(node: fx.Node, effects: Effects) -> bool:
    """Whether truth values, or their opposites, keep what lies on one side of a diagonal of the last two dimensions."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dtype != torch.bool or tensor.dim() < 2:
        return False
    *batch, query, key = (Axis(as_size(size)) for size in tensor.shape)
    dims, axes = tuple((axis,) for axis in (*batch, query, key)), Axes(tuple(batch), (), (query,), (key,))
    meanings = (Masks(effects).read(node, dims, axes, keeps=keeps) for keeps in (True, False))
    bands = [each.band for each in meanings if isinstance(each, Meaning) and each.band is not None]
    return any((band.lower is None) != (band.upper is None) for band in bands)


def _followed(node: fx.Node, effects: Effects) -> set[fx.Node]:
    """What is made of a cumulative sum of logarithms: up to products after an exponential, and what these give."""

    def users(of: fx.Node, names: frozenset[str]) -> Iterator[fx.Node]:
        calls = (effects.calls[user] for user in of.users)
        return (call.node for call in calls if call and (call.name in names or is_pointwise(call) or _is_moved(call)))

    before = [*reached([node], lambda each: users(each, _THROUGH), _REACH)]
    decays = [each for each in before if is_exponential(effects.calls[each])]
    return {*before, *reached(decays, lambda each: users(each, _THROUGH | contraction.PRODUCTS | _SOLVERS), _REACH)}


def _is_moved(call: Call) -> bool:
    return layout.is_view(call) or layout.rearranges(call)
