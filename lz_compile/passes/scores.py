"""What a score expression is made of: ``keep ? cap(gain * (query . key)) + bias : masked``.

The expression is linear in the product of query and key once the soft cap is set aside. Its coefficient is a scale times
indicators (the mask), its remainder is the bias where the mask keeps and a large negative fill where it does not. The
order in which a model scales, masks, caps and biases does not matter here.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from lz_compile.passes.algebra import FLOORED, INFINITY, Leaf, Region, indicators, is_indicator, reduce_indicators
from lz_compile.passes.axes import Axis, atoms
from lz_compile.passes.contraction import Factor
from lz_compile.passes.match import RefusedError

#: Fills at or below this are masking constants: no score of a trained model comes near them, and ``exp`` of the
#: difference is zero in every dtype. -1e4 is the least negative one in common use (BERT, GPT-2).
MASKING_FILL = -1e4

#: exp(x) is 0 in float64 below this, so a row's kept scores may differ from the fill by this much at least.
_PROBE = sympy.Symbol("probe", real=True)


@dataclass(frozen=True)
class Scores:
    """``keep ? softcap(gain * product) + bias : fill`` for the product of ``query`` and ``key`` over ``summed``.

    ``gain``, ``bias`` and ``keep`` (an indicator) are expressions over the region's leaves; ``fill_is_infinite`` tells
    whether a row that keeps nothing gives NaN or the mean of its values; so does ``is_floored``, for biases.
    """

    leaf: Leaf
    query: Factor
    key: Factor
    summed: tuple[Axis, ...]
    gain: sympy.Expr
    bias: sympy.Expr
    keep: sympy.Expr
    fill_is_infinite: bool
    softcap: float | None
    is_floored: bool = False


def read(region: Region, expression: sympy.Expr, keys: tuple[Axis, ...]) -> Scores | None:
    """The scores behind ``expression``, None where no product of queries and keys is in it.

    Raises:
        RefusedError: there is one, but the scores are no affine function of it.
    """
    products = [s for s in _ordered(expression) if _is_score_product(region.leaves.get(s), keys)]
    if not products:
        return None
    product = products[0]
    expression = _without_shift(region, expression, keys)
    floors = list(expression.atoms(FLOORED))
    while expression.has(FLOORED):
        expression = expression.replace(FLOORED, lambda inner: inner)
    expression, cap, capped = _split_softcap(expression, product)
    gain, bias = _affine(reduce_indicators(expression), capped if cap is not None else product)
    keep, gain, bias, infinite = _split_mask(gain, bias)
    if cap is not None:
        gain, cap = _inner_scale(cap, capped, gain, product)
    leaf = region.leaves[product]
    assert leaf.contraction is not None, "a product leaf has its contraction"
    left, right = leaf.contraction.left, leaf.contraction.right
    if set(atoms(keys)) & _axes(left):
        left, right = right, left
    summed = atoms(leaf.contraction.summed)
    return Scores(leaf, left, right, summed, gain, bias, keep, infinite, cap, is_floored=bool(floors))


def _ordered(expression: sympy.Expr) -> list[sympy.Symbol]:
    return sorted(expression.free_symbols, key=lambda s: (len(s.name), s.name))


def _axes(factor: Factor) -> set[Axis]:
    return {axis for dim in factor.dims for axis in atoms(dim)}


def _is_score_product(leaf: Leaf | None, keys: tuple[Axis, ...]) -> bool:
    if leaf is None or leaf.contraction is None:
        return False
    wanted = set(atoms(keys))
    left, right = _axes(leaf.contraction.left), _axes(leaf.contraction.right)
    return (wanted <= right and not wanted & left) or (wanted <= left and not wanted & right)


def _without_shift(region: Region, expression: sympy.Expr, keys: tuple[Axis, ...]) -> sympy.Expr:
    """Drop a subtracted row maximum: softmax does not change when a row is shifted."""
    shifts = {}
    for symbol in expression.free_symbols:
        leaf = region.leaves.get(symbol)
        if leaf is not None and not leaf.axes & set(atoms(keys)) and _is_maximum(region, leaf):
            if sympy.diff(expression, symbol) == -1:
                shifts[symbol] = sympy.S.Zero
    return expression.xreplace(shifts) if shifts else expression


def _is_maximum(region: Region, leaf: Leaf) -> bool:
    call = region.effects.calls.get(leaf.node)
    while call is not None and call.name in ("detach", "getitem", "getattr", "unsqueeze", "contiguous", "clone"):
        call = region.effects.calls.get(call.input)
    return call is not None and call.name in ("amax", "max")


def _split_softcap(
    expression: sympy.Expr, product: sympy.Symbol
) -> tuple[sympy.Expr, sympy.Expr | None, sympy.Symbol]:
    """Replace ``tanh(... product ...)`` by a probe; its argument is the cap's."""
    capped = [term for term in expression.atoms(sympy.tanh) if term.has(product)]
    if not capped:
        return expression, None, _PROBE
    if len(capped) > 1:
        raise RefusedError("SCORES_NOT_AFFINE", "the scores are capped more than once", "cap the scores once")
    return expression.xreplace({capped[0]: _PROBE}), capped[0].args[0], _PROBE


def _affine(expression: sympy.Expr, variable: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr]:
    gain = sympy.diff(expression, variable)
    if gain.has(variable):
        raise RefusedError(
            "SCORES_NOT_AFFINE",
            "the scores are not an affine function of query times key",
            "scale, mask, bias or tanh-cap the scores; other functions have no kernel",
        )
    return sympy.expand(gain), sympy.expand(expression.xreplace({variable: sympy.S.Zero}))


def _split_mask(gain: sympy.Expr, bias: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr, bool]:
    """Factor the indicators out of ``gain``; where one of them is off, the scores must be a large negative fill."""
    keep: sympy.Expr = sympy.S.One
    infinite = False
    for flag in indicators(gain):
        off, on = gain.xreplace({flag: sympy.S.Zero}), gain.xreplace({flag: sympy.S.One})
        if off != 0 and on != 0:
            continue
        kept, dropped = (sympy.S.One, sympy.S.Zero) if off == 0 else (sympy.S.Zero, sympy.S.One)
        infinite |= _check_fill(reduce_indicators(bias.xreplace({flag: dropped})))
        keep *= flag if off == 0 else 1 - flag
        gain = sympy.expand(gain.xreplace({flag: kept}))
        bias = reduce_indicators(bias.xreplace({flag: kept}))
    if indicators(gain):
        raise RefusedError("MASK_SCALES_SCORES", f"a mask changes the scale of the scores ({gain})", "mask with a fill")
    return keep, gain, bias, infinite


def _check_fill(fill: sympy.Expr) -> bool:
    """Whether the fill of masked scores is infinite; refuses one that is not large and negative."""
    for flag in indicators(fill):  # nested masks: every combination must be a fill
        _check_fill(reduce_indicators(fill.xreplace({flag: sympy.S.Zero})))
        fill = reduce_indicators(fill.xreplace({flag: sympy.S.One}))
    infinite = fill.coeff(INFINITY)
    constant = fill.as_coeff_Add()[0]
    if infinite.is_negative or (infinite == 0 and constant <= MASKING_FILL):
        return bool(infinite.is_negative)
    raise RefusedError(
        "MASK_FILL_NOT_NEGLIGIBLE",
        f"masked scores are set to {fill}, which still has weight after the softmax",
        f"fill with -inf, torch.finfo(dtype).min or anything up to {MASKING_FILL:g}",
    )


def _inner_scale(
    argument: sympy.Expr, capped: sympy.Symbol, outer: sympy.Expr, product: sympy.Symbol
) -> tuple[sympy.Expr, float]:
    """``outer * tanh(inner * product)`` as ``cap * tanh(scale * product / cap)``: ``(scale, cap)``."""
    inner, rest = _affine(argument, product)
    if rest != 0 or not outer.is_number or not inner.is_number:
        raise RefusedError(
            "SOFTCAP_NOT_UNDERSTOOD", f"the cap is not c * tanh(scores / c) ({outer} * tanh({argument}))", "cap plainly"
        )
    del capped
    return sympy.expand(inner * outer), float(outer)


def is_plain_mask(expression: sympy.Expr) -> bool:
    """Whether an expression is an indicator that some leaf decides."""
    return bool(expression.free_symbols) and is_indicator(expression)
