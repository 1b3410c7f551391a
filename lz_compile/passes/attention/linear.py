"""Linear attention that normalises features: keys are a softmax over positions, and queries read a sum of values so weighed.

``q @ (k.softmax(-2).mT @ v)``: the axis of the softmax is summed, and what its rows leave, the features, is summed with the
queries after that. An attention sums over its rows no more, and nobody multiplies what a router weighs by tokens again.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.attention.scores import is_product, is_weight, path_to
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Axis, Dims, atoms, axes_of, fresh
from lz_compile.passes.formula.contraction import Contraction, Factor
from lz_compile.passes.graph.view import known_tensor


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
            rows = {*axes_of(weights.dims)} - {*atoms(found.summed)} - {*axes_of(values.dims)}
            return _sums(region, after, product, found.dims, rows)
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
