"""Linear attention that normalises features: keys are a softmax over positions, and queries read a sum of values so weighed.

``q @ (k.softmax(-2).mT @ v)``: the axis of the softmax is summed, and what its rows leave, the features, is summed with the
queries after that. An attention sums over its rows no more, and nobody multiplies what a router weighs by tokens again.

Other features are not normalised, their products are: ``f(q) @ (f(k).mT @ v) / (f(q) @ f(k).sum(-2))``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from functools import partial

from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import shape_of
from lz_compile.passes.attention.scores import is_product, is_weight, path_to
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, fresh
from lz_compile.passes.formula.contraction import Contraction, Factor
from lz_compile.passes.formula.pointwise import is_exponential, is_moved, is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, NearMiss, RefusedError, where_of
from lz_compile.passes.graph.view import Call, known_tensor, reached, tensor_of

_SUMS = frozenset({"sum", "cumsum", "mean", "pad", "getitem"})
#: How many nodes a denominator is looked through for features.
_FAR = 64


def normalises_features(region: Region, softmax: fx.Node, product: fx.Node) -> bool:
    """Whether a softmax is of keys whose sum of values is ``product``, or of queries that read such a sum in it."""
    found = _read(region, product)
    if found is None or _is_context(region, softmax, found):
        return found is not None
    sums = [_read(region, leaf) for leaf, _ in _behind(region, found) if is_product(region, leaf)]
    contexts = [each for each in sums if each is not None]
    return any(_is_context(region, leaf, each) for each in contexts for leaf, _ in _behind(region, each))


def _is_context(region: Region, softmax: fx.Node, found: Contraction) -> bool:
    """Whether values are summed over the axis of a softmax, and what is left of its rows over them again."""
    product = found.call.node
    path = path_to([product], lambda node: node.users, lambda node: is_product(region, node, product), lambda _: False)
    after = _read(region, path[-1]) if path else None
    for weights, values in ((found.left, found.right), (found.right, found.left)):
        dims = next((dims for leaf, dims in _leaves(region, found, weights) if leaf is softmax), None)
        keys = None if dims is None else _keys(region, softmax, dims)
        if keys and keys <= {*atoms(found.summed)} and after is not None:
            rows, columns = ({*axes_of(each.dims)} - {*atoms(found.summed)} for each in (weights, values))
            return bool(columns - rows) and _sums(region, after, product, found.dims, rows - columns)
    return False


def _sums(region: Region, after: Contraction, product: fx.Node, dims: Dims, rows: set[Axis]) -> bool:
    """Whether the contraction ``after`` sums over ``rows``, which are axes of ``product`` at ``dims``."""
    for context, other in ((after.left, after.right), (after.right, after.left)):
        for there in (there for leaf, there in _leaves(region, after, context) if leaf is product):
            met = [each for own, each in zip(dims, there, strict=True) if rows & {*atoms(own)}]
            if any({*atoms(each)} & {*atoms(after.summed)} for each in met):
                return not is_weight(other.node)
    return False


def _read(region: Region, product: fx.Node) -> Contraction | None:
    call = region.effects.calls[product]
    return None if call is None else contraction.read(region, call, fresh(shape_of(known_tensor(product))))


def _behind(region: Region, found: Contraction) -> list[tuple[fx.Node, Dims]]:
    return [leaf for factor in (found.left, found.right) for leaf in _leaves(region, found, factor)]


def _leaves(region: Region, found: Contraction, factor: Factor) -> Iterator[tuple[fx.Node, Dims]]:
    """What a factor of a contraction is made of, pointwise, with the axes of each."""
    leaves = region.leaves_in(region.express(factor.node, factor.dims, found.call.node))
    return ((leaf.node, leaf.dims) for leaf in leaves.values())


def _keys(region: Region, node: fx.Node, dims: Dims) -> set[Axis]:
    """The axes that a softmax runs over; none where the node is no softmax."""
    call = region.effects.calls.get(node)
    dim = call.get("dim") if call is not None and call.name == "softmax" else None
    return set() if dim is None else {*atoms(dims[dim])}


def products_normalised(op: str, graph: fx.Graph, effects: Effects, told: Collection[fx.Node]) -> Iterator[NearMiss]:
    """A near miss for values weighed by products of features that a sum of the same divides, with no exponential."""
    denominators = [each for call in effects.calls.values() if call is not None for each in _denominator(call)]
    behind = [{*reached([each], lambda node: _summands(effects, node), _FAR)} for each in denominators]
    for node in graph.nodes if behind and not effects.reshapes else ():
        is_read = effects.name(node) in contraction.PRODUCTS - {"linear", "addmm"}
        if node in told or not is_read or tensor_of(node) is None:
            continue
        try:
            chains = [*_chains(Region(effects), node, told)]
        except (RefusedError, MutatedError, LayoutError):
            continue
        if any(len(chain & each) > 1 for chain in chains for each in behind):
            text = "the values are weighed by products of features, divided by a sum of these: no softmax is taken"
            edit = "weigh the values by softmax(query @ key^T) where attention is meant; linear attention stays with Inductor"
            yield NearMiss(op, node, Reason("LINEAR_ATTENTION", text), edit, where_of(node))


def _denominator(call: Call) -> list[fx.Node]:
    name = {"div": "other", "reciprocal": "input"}.get(call.name)
    node = None if name is None else call.get(name)
    return [node] if isinstance(node, fx.Node) and tensor_of(node) is not None else []


def _summands(effects: Effects, node: fx.Node) -> list[fx.Node]:
    """What a value is made of, but for products with weights, and what is an exponential, of scores maybe."""
    call = effects.calls.get(node)
    if call is None or is_exponential(call) or any(map(is_weight, node.all_input_nodes)):
        return []
    is_passed = call.name in _SUMS | contraction.PRODUCTS or is_pointwise(call) or layout.rearranges(call)
    return list(node.all_input_nodes) if is_passed else []


def _chains(region: Region, node: fx.Node, told: Collection[fx.Node]) -> Iterator[set[fx.Node]]:
    """The three computed tensors of every product with a product, both of which sum, with nothing ``told`` between them."""
    call = region.effects.calls[node]
    outer = None if call is None else contraction.factors(call, fresh(shape_of(known_tensor(node))))
    factors = () if outer is None or not outer.summed else outer.factors
    if any(is_weight(each) for each, _ in factors):
        return
    for factor, dims in factors:
        others = [each for each, _ in factors if each is not factor]
        for leaf in region.leaves_in(region.express(factor, dims, node)).values():
            inner = _read(region, leaf.node) if is_product(region, leaf.node) else None
            given = [] if inner is None or not inner.summed else [inner.left.node, inner.right.node]
            way = path_to(
                [factor], lambda each: each.all_input_nodes, partial(operator.is_, leaf.node), lambda _: False
            )
            if given and not any(map(is_weight, given)) and not any(each in told for each in way or ()):
                yield {_behind_layout(region, each) for each in (*given, *others)}


def _behind_layout(region: Region, node: fx.Node) -> fx.Node:
    while is_moved(call := region.effects.calls.get(node)) and call is not None:
        node = call.input
    return node
