"""Heads that are mixed between the product of queries and keys and the one with the values: none is an attention by itself.

Talking heads mix scores before the softmax, probabilities after it, or both, by a matrix of weights over the heads. The
axis of the keys stays what it is, which tells them from a router, whose weights *make* the axis that its softmax runs over.
"""

from __future__ import annotations

from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.ground.sizes import shape_of
from lz_compile.passes.attention import scores
from lz_compile.passes.attention.operand import is_weight
from lz_compile.passes.attention.scores import Scores
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Axis, atoms, axes_of, fresh
from lz_compile.passes.graph.view import Call, tensor_of

_EDIT = "mix the heads of the output instead; as it is, no kernel can do better than Inductor's own code"
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})


def refusal(what: str) -> tuple[Reason, str]:
    """Why ``what`` ("scores" or "probabilities") of an attention is none of a kernel's, and what to do about it."""
    place = "before the softmax" if what == "scores" else "before they meet the values"
    return Reason("HEADS_MIXED", f"the {what} of different heads are mixed by weights {place}"), _EDIT


def is_pointwise_convolution(call: Call) -> bool:
    """Whether a call is a convolution over single elements, which mixes channels: of scores, those are the heads."""
    weight = tensor_of(call.arguments.get("weight", call.arguments.get("#1")))
    return call.name in _CONVOLUTIONS and weight is not None and all(size == 1 for size in shape_of(weight)[2:])


def mixed_scores(region: Region, found: Scores, keys: tuple[Axis, ...]) -> bool:
    """Whether what looks like a product of queries and keys mixes the scores of heads, which are such a product."""
    if not is_weight(found.query.node):
        return False
    expression = region.express(found.key.node, found.key.dims, found.leaf.node)
    inner = scores.read(region, expression, keys)
    if inner is None or is_weight(inner.query.node) or is_weight(inner.key.node):
        return False
    return set(atoms(found.summed)) <= set(axes_of(inner.query.dims)) & set(axes_of(inner.key.dims))


def mixes_probabilities(region: Region, product: fx.Node, softmax: fx.Node) -> bool:
    """Whether a product of weights and what came from ``softmax`` leaves the axis that the softmax runs over as it is."""
    call, tensor = region.effects.calls[product], tensor_of(product)
    outer = None if call is None or tensor is None else contraction.read(region, call, fresh(shape_of(tensor)))
    normalised = region.effects.calls[softmax]
    dim = None if normalised is None else normalised.get("dim")
    if outer is None or dim is None:
        return False
    for weight, other in ((outer.left, outer.right), (outer.right, outer.left)):
        if not is_weight(weight.node):
            continue
        symbols = region.express(other.node, other.dims, product).free_symbols
        for leaf in (region.leaves[symbol] for symbol in symbols if symbol in region.leaves):
            if leaf.node is softmax:
                return not set(atoms(leaf.dims[dim])) & set(atoms(outer.summed))
    return False
