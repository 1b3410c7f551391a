"""What a score expression is made of: ``keep ? cap(gain * (query . key)) + bias : masked``.

The expression is linear in the product of query and key once the soft cap is set aside. Its coefficient is a scale times
indicators (the mask), its remainder is the bias where the mask keeps and a large negative fill where it does not. The
order in which a model scales, masks, caps and biases does not matter here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.attention.sinks import without_shift
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, atoms, axes_of
from lz_compile.passes.formula.contraction import PRODUCTS, Factor, is_distance, is_product_sum
from lz_compile.passes.formula.expressions import (
    FLOORED,
    INFINITY,
    NAN_TO_NUM,
    indicators,
    is_constant,
    reduce_indicators,
    tidy,
)
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import known_tensor, reached, tensor_of

#: Fills at or below this are masking constants: no score of a trained model comes near them, and ``exp`` of the
#: difference is zero in every dtype. -1e4 (BERT, GPT-2) is the least negative one in common use; it
#: may be scaled together with the scores.
MASKING_FILL = -1e4

#: The most masks on one score that are told apart (every combination of them is looked at).
MOST_MASKS = 5

_PROBE = sympy.Symbol("probe", real=True)


@dataclass(frozen=True)
class Scores:
    """``keep ? softcap(gain * product) + bias : fill`` for the product of ``query`` and ``key`` over ``summed``.

    ``gain``, ``bias`` and ``keep`` (an indicator) are expressions over the region's leaves. ``fill`` is the bias as it is
    before the mask is known, so also where it does not keep; ``fills`` holds its value there, for every combination of
    masks. ``floor`` is a number that bounds scores from below, and that no finite score beside masks falls short of,
    ``shift`` is what was added to a row, less its maximum. With a ``distance``, scores are that times the squared distance
    of query and key: beside ``gain * product``, the squares of both are added.
    """

    leaf: Leaf
    query: Factor
    key: Factor
    summed: tuple[Axis, ...]
    gain: sympy.Expr
    bias: sympy.Expr
    keep: sympy.Expr
    fill: sympy.Expr | None
    fills: frozenset[sympy.Expr]
    softcap: float | None
    floor: float | None = None
    shift: sympy.Expr = sympy.S.Zero
    distance: sympy.Expr = sympy.S.Zero


def read(
    region: Region, expression: sympy.Expr, keys: tuple[Axis, ...], sinks: sympy.Expr | None = None
) -> Scores | None:
    """The scores behind ``expression``, None where no product of queries and keys is in it; ``sinks`` stand beside them.

    Raises:
        RefusedError: there is one, but the scores are no affine function of it.
    """
    products = products_in(region, expression, keys)
    if not products:
        return None
    product = products[0]
    contraction = region.leaves[product].contraction
    assert contraction is not None, "a product leaf has its contraction"
    if contraction.distance == "root":
        expression = expression.xreplace({product: sympy.sqrt(product)})
        if expression.has(sympy.sqrt(product)):  # told by what looks for softmaxes that were not read
            return None
    given, expression = expression, without_shift(region, expression, keys, sinks)
    shift = tidy(sympy.expand(given - expression))
    expression, floor = _without_floor(expression, product)
    expression, inner = _split_softcap(expression, product)
    gain, bias = _affine(reduce_indicators(expression), product if inner is None else _PROBE)
    bias = _as_values(region, bias)
    keep, gain, offset, fills = _split_mask(region, gain, bias)
    bias, fill = offset, (bias if keep != 1 else None)
    cap = None
    if inner is not None:
        gain, cap = _inner_scale(region, inner, gain, product)
    left, right = contraction.left, contraction.right
    if set(atoms(keys)) & _axes(left):
        left, right = right, left
    distance = sympy.S.Zero
    if contraction.distance:
        distance = _distance(gain * contraction.coefficient, cap)
        gain = -2 * distance
    leaf, summed = region.leaves[product], atoms(contraction.summed)
    return Scores(leaf, left, right, summed, gain, bias, keep, fill, fills, cap, floor, shift, distance)


def _as_values(region: Region, bias: sympy.Expr) -> sympy.Expr:
    """A bias in values of calls: of one that adds a tensor to a multiple of a product, the product is no value by itself."""
    found = {}
    for symbol, leaf in region.leaves_in(bias).items():
        inner = leaf.contraction
        if inner is None or inner.distance or (inner.coefficient == 1 and inner.addend is None):
            continue
        added = sympy.S.Zero
        if inner.addend is not None:
            node, dims, weight = inner.addend
            added = weight * region.express(node, dims, inner.call.node)
        found[symbol] = (symbol - added) / inner.coefficient
    return tidy(sympy.expand(bias.xreplace(found))) if found else bias


def _distance(weight: sympy.Expr, cap: float | None) -> sympy.Expr:
    """What squared distances are multiplied by."""
    if cap is not None:
        raise RefusedError("SOFTCAP_NOT_UNDERSTOOD", "distances are capped, no products", "leave the cap out")
    return tidy(sympy.expand(weight))


def _without_floor(expression: sympy.Expr, product: sympy.Symbol) -> tuple[sympy.Expr, float | None]:
    """The scores before they are clamped to about the smallest number, and that number where they are.

    A clamp of the bare product changes nothing that is finite. What is added after a clamp is not clamped.

    Raises:
        RefusedError: something is masked or added on both sides of a clamp.
    """
    floors = []
    while expression.func is FLOORED:
        expression, floor = expression.args
        floors.append(float(floor))
    for clamp in expression.atoms(FLOORED):
        if clamp.args[0].xreplace({product: sympy.S.Zero}) != 0:
            raise RefusedError("SCORES_NOT_AFFINE", "scores are clamped before a mask is added", "clamp them last")
    while expression.has(FLOORED):
        expression = expression.replace(FLOORED, lambda inner, _: inner)
    return expression, max(floors, default=None)


def _ordered(expression: sympy.Expr) -> list[sympy.Symbol]:
    return sorted(expression.free_symbols, key=lambda s: (len(s.name), s.name))


def products_in(region: Region, expression: sympy.Expr, keys: tuple[Axis, ...]) -> list[sympy.Symbol]:
    """The products of queries and keys that an expression is made of."""
    return [s for s in _ordered(expression) if _is_score_product(region.leaves.get(s), keys)]


def _axes(factor: Factor) -> set[Axis]:
    return {axis for dim in factor.dims for axis in atoms(dim)}


def _is_score_product(leaf: Leaf | None, keys: tuple[Axis, ...]) -> bool:
    if leaf is None or leaf.contraction is None:
        return False
    wanted = set(atoms(keys))
    left, right = _axes(leaf.contraction.left), _axes(leaf.contraction.right)
    return (wanted <= right and not wanted & left) or (wanted <= left and not wanted & right)


def _split_softcap(expression: sympy.Expr, product: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr | None]:
    """Replace ``tanh(... product ...)`` by a probe; its argument is the cap's."""
    capped = [term for term in expression.atoms(sympy.tanh) if term.has(product)]
    if not capped:
        return expression, None
    if len(capped) > 1:
        raise RefusedError("SCORES_NOT_AFFINE", "the scores are capped more than once", "cap the scores once")
    return expression.xreplace({capped[0]: _PROBE}), capped[0].args[0]


def _affine(expression: sympy.Expr, variable: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr]:
    gain = sympy.diff(expression, variable)
    if any(each.has(variable) for each in expression.atoms(NAN_TO_NUM)):
        edit = "leave nan_to_num out, or apply it to the probabilities"
        raise RefusedError("SCORES_NOT_AFFINE", "the scores pass through nan_to_num, which no kernel has", edit)
    if gain.has(variable):
        raise RefusedError(
            "SCORES_NOT_AFFINE",
            "the scores are not an affine function of query times key",
            "scale, mask, bias or tanh-cap the scores; other functions have no kernel",
        )
    return tidy(sympy.expand(gain)), tidy(sympy.expand(expression.xreplace({variable: sympy.S.Zero})))


def _split_mask(
    region: Region, gain: sympy.Expr, offset: sympy.Expr
) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr, frozenset[sympy.Expr]]:
    """Factor the indicators out of ``gain``; where one of them is off, the scores must be a large negative fill.

    Returns:
        the mask, the gain and the offset where it keeps, and the offsets where it does not.
    """
    kept: dict[sympy.Symbol, sympy.Expr] = {}
    for flag in indicators(gain):
        off, on = (tidy(sympy.expand(gain.xreplace({flag: value}))) for value in (sympy.S.Zero, sympy.S.One))
        if off == 0 or on == 0:
            kept[flag] = sympy.S.One if off == 0 else sympy.S.Zero
            gain = on if off == 0 else off
    if indicators(gain):
        text = f"a mask changes the scale of the scores ({region.told(gain)})"
        raise RefusedError("MASK_SCALES_SCORES", text, "mask with a fill")
    if len(kept) > MOST_MASKS:
        raise RefusedError("TOO_MANY_MASKS", f"{len(kept)} masks are combined on the scores", "combine the masks first")
    keep = sympy.Mul(*(flag if value == 1 else 1 - flag for flag, value in kept.items()))
    fills = set()
    for values in itertools.product((sympy.S.Zero, sympy.S.One), repeat=len(kept)):
        chosen = dict(zip(kept, values, strict=True))
        if chosen != kept:
            fills.add(reduce_indicators(offset.xreplace(chosen)))
    factor = min(1.0, abs(float(gain))) if gain.is_number else 1.0
    for fill in fills:
        _check_fill(region, fill, MASKING_FILL * factor)
    return keep, gain, reduce_indicators(offset.xreplace(kept)), frozenset(fills)


def _check_fill(region: Region, fill: sympy.Expr, limit: float) -> None:
    """Refuse a fill of masked scores that is not large and negative, whatever masks are left in it."""
    for flag in indicators(fill):
        _check_fill(region, reduce_indicators(fill.xreplace({flag: sympy.S.Zero})), limit)
        fill = reduce_indicators(fill.xreplace({flag: sympy.S.One}))
    infinite = fill.coeff(INFINITY)
    if not infinite.is_negative and (infinite != 0 or fill.as_coeff_Add()[0] > limit * (1 - 1e-9)):
        is_known = not region.leaves_in(fill)
        has = "still has weight" if is_known else "is not known to be negative enough to have no weight"
        raise RefusedError(
            "MASK_FILL_NOT_NEGLIGIBLE",
            f"masked scores are set to {region.told(fill)}, which {has} after the softmax",
            f"fill with -inf, torch.finfo(dtype).min or anything up to {limit:g}",
        )


def _inner_scale(
    region: Region, argument: sympy.Expr, outer: sympy.Expr, product: sympy.Symbol
) -> tuple[sympy.Expr, float]:
    """``outer * tanh(inner * product)`` as ``cap * tanh(scale * product / cap)``: ``(scale, cap)``.

    What the product is scaled by need be no number: where sizes are symbolic, it is made of one.
    """
    inner, rest = _affine(argument, product)
    if rest != 0 or not outer.is_number or indicators(inner):
        text = f"the cap is not c * tanh(scores / c) of scores alone ({region.told(outer)} * tanh({region.told(argument)}))"
        raise RefusedError("SOFTCAP_NOT_UNDERSTOOD", text, "cap plainly")
    return tidy(sympy.expand(inner * outer)), float(outer)


# ---- before anything is read ---------------------------------------------------------------------------------------


#: How far from a node something is looked for, in nodes.
FAR = 64
#: A weight is a matrix; what was made of parameters and has more dimensions may be learned queries.
_WEIGHT_RANK = 2


def is_weight(node: fx.Node) -> bool:
    """Whether a factor is a parameter, or a matrix that was made of parameters alone."""
    source = node
    while source.op != "placeholder" and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    if isinstance(tensor_of(source), torch.nn.Parameter):
        return True
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() > _WEIGHT_RANK:
        return False
    above = [*reached([node], most=FAR)]
    inputs = [tensor_of(each) for each in above if each.op == "placeholder"]
    return 0 < len(inputs) <= len(above) < FAR and all(isinstance(each, torch.nn.Parameter) for each in inputs)


def path_to(
    start: list[fx.Node],
    following: Callable[[fx.Node], Iterable[fx.Node]],
    is_goal: Callable[[fx.Node], bool],
    is_end: Callable[[fx.Node], bool],
) -> list[fx.Node] | None:
    """The shortest way from ``start`` to a goal, past floating-point values (and tuples) only, not far."""
    previous: dict[fx.Node, fx.Node | None] = dict.fromkeys(start)
    queue = list(start)
    while queue and len(previous) < FAR:
        node = queue.pop(0)
        if is_goal(node):
            path = [node]
            while (parent := previous[path[-1]]) is not None:
                path.append(parent)
            return path[::-1]
        if is_end(node):
            continue
        for each in following(node):
            tensor = tensor_of(each)
            if each not in previous and (tensor is None or tensor.is_floating_point()):
                previous[each] = node
                queue.append(each)
    return None


def is_product(region: Region, node: fx.Node, besides: fx.Node | None = None) -> bool:
    """Whether a call, another one than ``besides``, sums up products."""
    call = region.effects.calls.get(node)
    if call is None or node is besides:
        return False
    is_call = call.name in PRODUCTS or call.name == "scaled_dot_product_attention"
    return is_call or (call.name == "sum" and is_product_sum(region, call))


def _factors(effects: Effects, node: fx.Node) -> list[fx.Node]:
    call = effects.calls[node]
    given = [] if call is None else [call.get(name) for name in ("batch1", "batch2")]
    return [x for x in given if isinstance(x, fx.Node)] or list(node.all_input_nodes)


def has_scores(region: Region, node: fx.Node) -> bool:
    """Whether ``node`` was made, in any way, of a product of two computed tensors, no product with a weight between."""
    return scores_behind(region, node, lambda _: False) is not None


def scores_behind(region: Region, node: fx.Node, is_end: Callable[[fx.Node], bool]) -> list[fx.Node] | None:
    """The way to a product of two computed tensors that a node was made of, its end first; None where there is none."""
    position = region.effects.position
    last = max(map(position.__getitem__, node.users), default=position[node])

    def above(each: fx.Node) -> list[fx.Node]:  # what is written to memory, piece by piece, is what that holds
        written = [writer for writer, _ in region.effects.writes_to(each) if position[writer] < last]
        return written if _is_filled(region, each) else [*each.all_input_nodes, *written]

    return path_to(
        [node],
        above,
        lambda each: (
            (is_product(region, each) or is_distance(region.effects, each))
            and not any(map(is_weight, _factors(region.effects, each)))
        ),
        lambda each: (
            is_end(each) or is_product(region, each) or _is_pooled(region, each) or _is_normed(region, each, node)
        ),
    )


_NORMS = frozenset({"layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm"})


def _is_normed(region: Region, node: fx.Node, scores: fx.Node) -> bool:
    """Whether a call normalises something of another shape than scores: what is behind it are features of another layer."""
    is_norm = region.effects.name(node) in _NORMS
    return is_norm and shape_of(known_tensor(node)) != shape_of(known_tensor(scores))


def _is_pooled(region: Region, node: fx.Node) -> bool:
    """Whether a call averages over places: what is behind it are features, no scores of one place for another."""
    call = region.effects.calls.get(node)
    dims = None if call is None or call.name != "mean" else call.get("dim")
    return call is not None and ("avg_pool" in call.name or (isinstance(dims, (tuple, list)) and len(dims) > 1))


def _is_filled(region: Region, node: fx.Node) -> bool:
    """Whether a call asks what is behind it for its shape only: scores that are overwritten by a number are no scores."""
    call = region.effects.calls.get(node)
    return call is not None and is_constant(call)


def mixed_scores(region: Region, found: Scores, keys: tuple[Axis, ...]) -> bool:
    """Whether what looks like a product of queries and keys mixes the scores of heads, which are such a product."""
    if not is_weight(found.query.node):
        return False
    expression = region.express(found.key.node, found.key.dims, found.leaf.node)
    try:
        inner = read(region, expression, keys)
    except RefusedError:  # features by a function of their own, as of additive attention: no scores
        return False
    if inner is None or is_weight(inner.query.node) or is_weight(inner.key.node):
        return False
    return set(atoms(found.summed)) <= set(axes_of(inner.query.dims)) & set(axes_of(inner.key.dims))
