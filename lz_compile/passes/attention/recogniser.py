"""Attention: a softmax of a contraction, contracted again over the same axis.

The anchor is the *second* contraction. Read upwards from it, one factor is a softmax over the axis that is summed
(:mod:`probabilities`), whose scores are affine in a first contraction (:mod:`scores`). No layout or operand order is listed
anywhere. What that is to a kernel, and which axis is a query, a key, a head or a batch, is asked of what was found
(:mod:`matching`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import sympy
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import shape_of
from lz_compile.passes.attention import probabilities, scores
from lz_compile.passes.attention.probabilities import Probabilities
from lz_compile.passes.attention.scores import Scores, has_scores, is_product, is_weight, mixed_scores, path_to
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.algebra import ANCHORS, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, fresh
from lz_compile.passes.formula.contraction import Contraction, Factor
from lz_compile.passes.formula.expressions import INFINITY, tidy
from lz_compile.passes.formula.pointwise import BENDS, applied, is_exponential, is_moved, is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import OUT_OF_PLACE, MutatedError, NearMiss, RefusedError, refusal_of, where_of
from lz_compile.passes.graph.view import Call, known_tensor, reached, tensor_of

OP = "attention"
SCORES = contraction.PRODUCTS - {"linear", "addmm"}
SOFTMAX = frozenset({"softmax", "log_softmax", "exp"})
#: Calls that a share beside a sink may be computed with.
_SHARES = {name: BENDS[name] for name in ("sigmoid", "log1p")} | {
    "logsigmoid": applied(lambda x: -sympy.log(1 + sympy.exp(-x)))
}
#: What such a share is read down to: values that these are in are no masks.
_ANCHORS = ANCHORS | {"sum", *_SHARES}

#: What is made of an attention that was found.
Made = TypeVar("Made")


@dataclass(frozen=True)
class Weighing:
    """Values that are summed up over ``keys`` with the probabilities of scores as weights, times a ``gain``.

    Weights of the keys, after the softmax, are a ``value_gain``. Expressions are over the leaves of ``region``, ``output``
    is the node with the result.
    """

    region: Region
    scores: Scores
    probabilities: Probabilities
    keys: tuple[Axis, ...]
    value: Factor
    output: fx.Node
    output_dims: Dims
    gain: sympy.Expr = sympy.S.One
    value_gain: sympy.Expr = sympy.S.One


def recognise(
    effects: Effects,
    call: Call,
    made: Callable[[Weighing], Made],
    flag: Callable[[fx.Node], tuple[fx.Node, ...] | None],
) -> Made | NearMiss | None:
    """What is ``made`` of the attention that ends at a call, which may refuse it, or why there is none.

    None where nothing speaks for one. Masks are read as tensors first, and where that is refused, with all that they consist
    of; floating-point tensors that ``flag`` tells (see :class:`Region`) are masks then.
    """
    refused: NearMiss | None = None
    for expand_masks in (False, True):
        region = Region(effects, expand_masks=True, flag=flag) if expand_masks else Region(effects)
        try:
            found = Reader(region, call, made).read()
        except RefusedError as refusal:
            refused = refused or NearMiss.of(OP, call.node, refusal)
        except MutatedError as error:
            return NearMiss.of(OP, call.node, refusal_of(error, OUT_OF_PLACE)) if _is_meant(region, call) else None
        except LayoutError as error:
            return refused or _unclear(region, call, error)
        else:
            return found or refused
    return refused


@dataclass
class Reader(Generic[Made]):
    """Reads one contraction as the one of probabilities and values."""

    region: Region
    call: Call
    made: Callable[[Weighing], Made]

    def read(self) -> Made | None:
        """What is made of the attention that ends here; None where it is none.

        Raises:
            RefusedError: it is clearly meant to be one, with what stands in the way.
            MutatedError: an alias of a value was overwritten before it is read.
            LayoutError: a layout has no exact form in axes.
        """
        if not any(
            self.region.reaches(node, SOFTMAX, self.call.node)
            for node in self.call.node.all_input_nodes
            if tensor_of(node) is not None
        ):
            return None
        dims = fresh(shape_of(known_tensor(self.call.node)))
        outer = contraction.read(self.region, self.call, dims)
        return None if outer is None else self._match_product(outer, self.call.node, dims)

    def _match_product(self, outer: Contraction, output: fx.Node, output_dims: Dims) -> Made | None:
        """Whichever factor of ``outer`` is the probabilities; the result is ``output``."""
        if any(axis.size == 0 for axis in outer.summed):  # no keys: nothing is computed
            return None
        for weights, value in ((outer.left, outer.right), (outer.right, outer.left)):
            if outer.summed and self.region.reaches(weights.node, SOFTMAX, outer.call.node):
                found = self._match(outer, weights, value, output, output_dims)
                if found is not None:
                    return found
        return None

    def _match(
        self, outer: Contraction, weights: Factor, value: Factor, output: fx.Node, output_dims: Dims
    ) -> Made | None:
        keys = atoms(outer.summed)
        try:
            found = probabilities.read(self.region, weights.node, weights.dims, outer.call.node, keys)
        except RefusedError as refusal:
            is_mix = refusal.reason.code == "SOFTMAX_OTHER_AXIS" and is_weight(value.node)
            if not is_mix and has_scores(self.region, weights.node):
                raise
            return None  # the softmax of a router or a classifier, or a product that mixes heads
        if found is None:
            return None
        inner = scores.read(self.region, found.scores, keys, found.sinks)
        if inner is None:
            _refuse_unread_function(self.region, found.scores)
            return None
        if mixed_scores(self.region, inner, keys):  # told by what looks for softmaxes that were not read
            return None
        try:
            return self._weighed(outer, Weighing(self.region, inner, found, keys, value, output, output_dims))
        except RefusedError as refusal:
            is_measured = refusal.reason.code != "INTERIOR_USED" or inner.leaf.node in reached([value.node])
            if _is_layer(inner) and is_measured:  # a router or a classifier, or its entropy
                return None
            raise

    def _weighed(self, outer: Contraction, read: Weighing) -> Made | None:
        """The attention of scores and values, ``outer``."""
        inner, found, keys, output = read.scores, read.probabilities, read.keys, read.output
        if outer.addend is not None:
            raise RefusedError("OUTPUT_ACCUMULATES", "the product with the values is added to a tensor", "add it after")
        gain = tidy(sympy.expand(found.gain * outer.coefficient))
        if output is outer.call.node:
            weights = [leaf.node for leaf in self.region.leaves_in(found.gain).values()]
            own = [output] if not self.region.functions and _is_share(self.region, weights) else []
            later = self._match_quotient(output, own, is_needed=found.unnormalised is not None)
            if later is not None:
                return later
        else:
            product = self.region.leaf(outer.call.node, outer.dims)
            quotient = self.region.express(output, read.output_dims)
            divided = probabilities.divided_by_sum(self.region, quotient, product, found, keys)
            if divided is None:
                return None
            gain, sinks = divided
            found = replace(found, sinks=sinks)
            if sinks is not None:  # which the maximum that was subtracted may be of, too
                inner = scores.read(self.region, found.scores, keys, sinks) or inner
        found = self._from_shift(found, inner)
        kept = sympy.factor(inner.keep * found.keep)
        if kept != 1 and not self.region.axes_in(rest := sympy.cancel(gain / kept)) & set(atoms(keys)):
            gain, found = rest, replace(found, is_masked_again=True)
        gain, value_gain = self._split_gain(gain, read)
        return self._checked(replace(read, scores=inner, probabilities=found, gain=gain, value_gain=value_gain))

    def _match_quotient(self, product: fx.Node, own: list[fx.Node], *, is_needed: bool) -> Made | None:
        """The division by the sum of the exponentials that comes after the values: read again from there.

        Where it is not needed, the share that is left beside a sink, told by a sum of the exponentials or its logarithm:
        it may be the product's ``own``, too.
        """
        given = self.region
        for candidate in own + _quotients(given.effects, product):
            beside = [node for node in candidate.all_input_nodes if node is not product]
            if not (is_needed or candidate in own or _is_share(given, beside)):
                continue
            self.region = Region(
                given.effects, expand_masks=given.expand_masks, functions=_SHARES, flag=given.flag, anchors=_ANCHORS
            )
            dims = fresh(shape_of(known_tensor(candidate)))
            self.region.express(candidate, dims)
            outer = next(
                (x.contraction for x in self.region.leaves.values() if x.node is product and x.contraction), None
            )
            try:
                found = None if outer is None else self._match_product(outer, candidate, dims)
            except RefusedError:
                if is_needed:
                    raise
                found = None  # no share: the attention before it is told by itself
            if found is not None:
                return found
        self.region = given
        if not is_needed:
            return None
        raise RefusedError(
            "NOT_NORMALISED",
            "nothing that could be read divides the exponentials by their own sum",
            "divide by the sum of the same exponentials over the keys",
        )

    def _from_shift(self, found: Probabilities, inner: Scores) -> Probabilities:
        """The sinks beside the scores as they were before their maximum was subtracted."""
        if found.sinks is None or inner.shift == 0:
            return found
        sinks = tidy(sympy.expand(found.sinks - inner.shift))
        if sinks.free_symbols & inner.shift.free_symbols:
            raise RefusedError(
                "EPSILON_IN_DENOMINATOR",
                "what is added to the sum of exponentials does not fall with the maximum of the scores, as they do",
                "divide by the sum alone, or add exp(-maximum) times a positive number",
            )
        return replace(found, sinks=sinks)

    def _split_gain(self, gain: sympy.Expr, read: Weighing) -> tuple[sympy.Expr, sympy.Expr]:
        """A gain of rows, and one of keys that values can be weighted with."""
        keys, factors = set(atoms(read.keys)), sympy.Mul.make_args(sympy.factor(gain))
        own = sympy.Mul(*(each for each in factors if self.region.axes_in(each) & keys))
        if gain.has(INFINITY) or self.region.axes_in(own) - {*keys, *axes_of(read.value.dims)}:
            raise RefusedError(
                "PROBABILITIES_CHANGED",
                "the probabilities are weighted after the softmax, along the keys and by query or head",
                "weight the values, or mask before the softmax",
            )
        return (gain, own) if own == 1 else (tidy(sympy.expand(sympy.cancel(gain / own))), own)

    def _checked(self, read: Weighing) -> Made:
        bias = read.scores.bias
        if bias.has(INFINITY):
            text = f"the mask arithmetic stays unresolved ({read.region.told(bias)})"
            raise RefusedError("MASK_NOT_UNDERSTOOD", text, "use where")
        return self.made(read)


def _is_layer(found: Scores) -> bool:
    """Whether scores are made of features by a weight of the model."""
    product = found.leaf.contraction
    return product is not None and product.call.name not in SCORES and is_weight(product.right.node)


def _quotients(effects: Effects, product: fx.Node) -> list[fx.Node]:
    """Divisions (or products with a reciprocal) of ``product``, behind layout changes and casts."""

    def calls(node: fx.Node) -> Iterator[Call]:
        return (call for call in map(effects.calls.__getitem__, node.users) if call is not None)

    def moved(node: fx.Node) -> Iterator[fx.Node]:
        return (x.node for x in calls(node) if layout.rearranges(x) or x.name in ("to", "type_as", "float"))

    return [x.node for node in reached([product], moved) for x in calls(node) if x.name in ("div", "mul")]


def _is_share(region: Region, weights: list[fx.Node]) -> bool:
    """Whether some of what probabilities, or what they give, are multiplied with or divided by was made of a sum.

    No product follows that.
    """

    def is_sum(node: fx.Node) -> bool:
        return region.effects.name(node) in ("sum", "logsumexp")

    return path_to(weights, lambda node: node.all_input_nodes, is_sum, partial(is_product, region)) is not None


def _refuse_unread_function(region: Region, expression: sympy.Expr) -> None:
    """Refuse where the scores are a product of two computed tensors behind a function that has no reading here."""
    for leaf in region.leaves_in(expression).values():
        node, tensor = leaf.node, tensor_of(leaf.node)
        shape = None if tensor is None else shape_of(tensor)
        call, passed = region.effects.calls[node], dict[str, bool]()
        while call is not None and call.name not in contraction.PRODUCTS and len(node.all_input_nodes) == 1:
            name = str(call.arguments["#1"]) if call.name == "getattr" else call.name
            passed[name] = is_moved(call) or is_pointwise(call)
            node = node.all_input_nodes[0]
            if tensor_of(node) is None or shape_of(known_tensor(node)) != shape:
                break
            inner = region.effects.calls[node]
            if inner is not None and inner.name in SCORES:
                raise RefusedError(
                    "SCORES_NOT_AFFINE",
                    f"the scores pass through {', '.join([x for x, is_read in passed.items() if not is_read] or passed)}",
                    "scale, mask, bias or tanh-cap the scores; other functions have no kernel",
                )
            call = inner


def softmaxes_behind(effects: Effects, node: fx.Node) -> set[fx.Node]:
    """Softmaxes, and exponentials, that a contraction weighs with, up to the product before it."""

    def above(each: fx.Node) -> list[fx.Node]:
        return [] if effects.name(each) in contraction.PRODUCTS else each.all_input_nodes

    behind = reached(node.all_input_nodes, above, 64)
    return {each for each in behind if effects.name(each) in SOFTMAX or is_exponential(effects.calls.get(each))}


def _is_meant(region: Region, call: Call) -> bool:
    """Whether exponentials of scores are behind a product: those of decays, as in a delta rule, make no attention."""
    found = softmaxes_behind(region.effects, call.node)
    return any(region.reaches(node, SCORES, each) for each in found for node in each.all_input_nodes)


def _unclear(region: Region, call: Call, error: LayoutError) -> NearMiss | None:
    """A near miss where a softmax over a product could not be read for its layout."""
    if not _is_meant(region, call):
        return None
    reason = Reason("LAYOUT_UNCLEAR", f"the dimensions do not come apart into axes: {error}")
    return NearMiss(OP, call.node, reason, "reshape along whole heads and positions", where_of(call.node))
