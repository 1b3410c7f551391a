"""Softmax in all of its spellings, read from the expression of the probabilities.

``softmax(s)``, ``exp(log_softmax(s))``, ``exp(s - logsumexp(s))``, ``exp(s - max) / sum(exp(s - max))`` and
``m * exp(s) / sum(m * exp(s))`` are the same function of the scores ``s``, up to a mask ``m``. So are, with one more score
``t`` that has no value, ``softmax(cat(s, t))[:-1]``, ``exp(s) / (exp(t) + sum(exp(s)))`` and
``softmax(s) * sigmoid(logsumexp(s) - t)``. Probabilities that are divided by their sum once more are what ``exp(s)`` is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import fx

from lz_compile.passes.attention import sinks as extra
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, atoms
from lz_compile.passes.formula.expressions import DROPOUT, NAN_TO_NUM, is_indicator, reduce_indicators, tidy
from lz_compile.passes.formula.pointwise import POINTWISE, is_exponential
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import Call


@dataclass(frozen=True)
class Probabilities:
    """``gain * dropout(softmax(scores over keys))``; rows that have nothing to normalise give zero if ``zero_rows``.

    ``sinks`` is a score of each row that takes part in the normalisation only. ``unnormalised`` is the expression that
    still has to be divided by its sum over the keys, where that division comes after the values. ``is_exponential``:
    spelled with ``exp``, which may overflow or underflow where the maximum was not subtracted. ``rounds_masked_rows``:
    ``exp(s - logsumexp(s))`` is not normalised where ``s`` is so large that the sum's logarithm is rounded away. Not
    beside a sink, which is then all of the sum.
    ``is_masked_again``: the masks of the scores drop probabilities, too, as the recipes of speech models have it.
    """

    scores: sympy.Expr
    dims: Dims
    gain: sympy.Expr = sympy.S.One
    keep: sympy.Expr = sympy.S.One
    dropout_p: float = 0.0
    zero_rows: bool = False
    sinks: sympy.Expr | None = None
    unnormalised: sympy.Expr | None = None
    is_exponential: bool = False
    rounds_masked_rows: bool = False
    is_masked_again: bool = False


def read(region: Region, node: fx.Node, dims: Dims, reader: fx.Node, keys: tuple[Axis, ...]) -> Probabilities | None:
    """The softmax over the axes ``keys`` that ``node`` is, None where it holds neither a softmax nor an exponential.

    Raises:
        RefusedError: it holds one, but is something else.
    """
    expression = region.express(node, dims, reader)
    expression, dropout_p = _strip_dropout(expression)
    expression, zero_rows = _strip_nan_to_num(region, expression)
    normalised = _softmax_leaf(region, expression)
    is_divided = normalised is not None and any(
        region.functions or _is_of_softmax(region, each) for each in _sums(region, expression, keys)
    )
    if normalised is not None and not is_divided:
        found = _from_softmax(region, expression, normalised, keys)
    elif is_divided or _grows_exponentially(region, expression, keys):
        found = _from_exponential(region, expression, dims, keys)
    else:
        return None
    return replace(found, dropout_p=dropout_p, zero_rows=zero_rows or found.zero_rows)


def _grows_exponentially(region: Region, expression: sympy.Expr, keys: tuple[Axis, ...]) -> bool:
    """Whether there is an exponential of the keys above a fraction line, or in every summand below one: that is ``exp(s)``.

    ``1 + exp(-s)`` divides in a sigmoid, and ``(total + exp(t)) * exp(-s)``, multiplied out, in a softmax beside a sink.
    """

    def has_one(part: sympy.Expr) -> bool:
        return any(region.axes_in(each) & set(atoms(keys)) for each in part.atoms(sympy.exp))

    def only_divides(part: sympy.Expr) -> bool:
        is_divisor = part.is_Pow and part.exp.is_negative and has_one(part.base)
        return is_divisor and not all(map(has_one, sympy.Add.make_args(sympy.expand_mul(part.base))))

    return has_one(expression) and has_one(expression.replace(only_divides, lambda _: sympy.S.One))


def _strip_dropout(expression: sympy.Expr) -> tuple[sympy.Expr, float]:
    dropped = list(expression.atoms(DROPOUT))
    if not dropped:
        return expression, 0.0
    gain = sympy.diff(expression.xreplace({dropped[0]: _PROBE}), _PROBE)
    if len(dropped) != 1 or gain.has(_PROBE) or not _is_zero(expression.xreplace({dropped[0]: sympy.S.Zero})):
        raise RefusedError("DROPOUT_NOT_LAST", "dropout is not applied to the probabilities alone", "drop out once")
    inner, p = dropped[0].args
    return gain * inner, float(p)


def _strip_nan_to_num(region: Region, expression: sympy.Expr) -> tuple[sympy.Expr, bool]:
    found = list(expression.atoms(NAN_TO_NUM))
    if len(found) != 1:
        return expression, False
    inner = found[0].args[0]
    if not inner.has(sympy.exp) and _softmax_leaf(region, inner) is None:
        raise RefusedError(
            "PROBABILITIES_CHANGED", "nan_to_num stands in what weighs the probabilities", "weight the values instead"
        )
    return expression.xreplace({found[0]: found[0].args[0]}), True


_PROBE = sympy.Symbol("probe", positive=True)


def _is_zero(expression: sympy.Expr) -> bool:
    return bool(tidy(sympy.expand(expression)) == 0)


def _softmax_leaf(region: Region, expression: sympy.Expr) -> sympy.Symbol | None:
    leaves = region.leaves_in(expression)
    found = [
        x
        for x, leaf in leaves.items()
        if leaf.kind == "softmax" or extra.without_column(region.effects, leaf) is not None
    ]
    if len(found) > 1:
        if any(sympy.diff(expression, symbol).free_symbols & {*found} for symbol in found):
            raise RefusedError(
                "PROBABILITIES_CHANGED",
                "probabilities are multiplied with others before they meet the values",
                "no kernel weighs values by products of probabilities: leave it as it is",
            )
        raise RefusedError(
            "PROBABILITIES_COMBINED",
            "two softmaxes are combined before they meet the values",
            "apply each softmax to the values, then combine",
        )
    return found[0] if found else None


def _from_softmax(
    region: Region, expression: sympy.Expr, symbol: sympy.Symbol, keys: tuple[Axis, ...]
) -> Probabilities:
    leaf = region.leaves[symbol]
    gain = tidy(sympy.diff(expression, symbol))
    if gain.has(symbol) or not _is_zero(expression.xreplace({symbol: sympy.S.Zero})):
        raise RefusedError(
            "PROBABILITIES_CHANGED",
            "the probabilities are not used as they come from the softmax",
            "multiply the values by the softmax itself",
        )
    whole = extra.without_column(region.effects, leaf)
    call = _softmax_over(region, leaf, leaf.node if whole is None else whole, keys)
    if whole is not None:
        scores, sinks = extra.beside_column(region, leaf, call)
        return Probabilities(scores, leaf.dims, gain, sinks=sinks)
    return Probabilities(region.scores_of(call, leaf.dims), leaf.dims, gain)


def _softmax_over(region: Region, leaf: Leaf, node: fx.Node, keys: tuple[Axis, ...]) -> Call:
    """The softmax of a leaf.

    Raises:
        RefusedError: it is over another axis than the keys.
    """
    call = region.effects.calls[node]
    assert call is not None, "a softmax leaf is a call"
    dim = call.get("dim")
    if set(atoms(leaf.dims[-1 if dim is None else dim % len(leaf.dims)])) != set(atoms(keys)):
        raise RefusedError(
            "SOFTMAX_OTHER_AXIS",
            "the softmax runs over another axis than the one that meets the values",
            "take the softmax over the keys",
        )
    return call


def _from_exponential(region: Region, expression: sympy.Expr, dims: Dims, keys: tuple[Axis, ...]) -> Probabilities:
    sums = _sums(region, expression, keys)
    if not sums:
        scores, keep = _logarithm(region, expression)
        return Probabilities(scores, dims, keep=keep, unnormalised=expression, is_exponential=True)
    if len(sums) > 1:
        raise RefusedError("DENOMINATOR_UNCLEAR", "several sums divide the exponentials", "divide by one sum")
    total = sums[0]
    summand, column = _summand(region, total, dims, keys)
    is_logarithm = _is_logarithm(region, total)
    is_of_softmax = _is_of_softmax(region, total)
    share = None if is_of_softmax else summand / _whole(region, total)
    expression, summand = (_as_exponential(region, each, keys, share) for each in (expression, summand))
    gain, sinks = _ratio(region, expression, total, summand, keys)
    if sinks is not None and is_of_softmax:  # it is one beside probabilities, no exponentials
        raise RefusedError(
            "EPSILON_IN_DENOMINATOR", "a number is added to the sum of probabilities", "divide by the sum"
        )
    if column is not None and sinks is not None:
        raise RefusedError(
            "SINK_NOT_UNDERSTOOD", "a number is added to a sum that has a sink already", "add one of them"
        )
    sinks = sinks if column is None else column
    scores, keep = _logarithm(region, summand)
    told = {"is_exponential": not is_logarithm, "rounds_masked_rows": is_logarithm and sinks is None}
    return Probabilities(scores, dims, gain, keep, sinks=sinks, **told)


def _is_of_softmax(region: Region, total: sympy.Symbol) -> bool:
    node = region.leaves[total].node
    return any(region.reaches(each, frozenset({"softmax"}), node) for each in node.all_input_nodes)


def _as_exponential(
    region: Region, expression: sympy.Expr, keys: tuple[Axis, ...], share: sympy.Expr | None
) -> sympy.Expr:
    """The expression with exponentials in the place of a softmax: what makes the difference cancels out of a ratio.

    Or with the ``share`` of one in a sum, where those of a softmax are in proportion to it, and so are the same.
    """
    symbol = _softmax_leaf(region, expression)
    if symbol is None or (leaf := region.leaves[symbol]).kind != "softmax":
        return expression
    call = _softmax_over(region, leaf, leaf.node, keys)
    exponential = sympy.exp(region.scores_of(call, leaf.dims))
    if share is None:
        return expression.xreplace({symbol: exponential})
    if region.axes_in(sympy.powsimp(exponential / share)) & set(atoms(keys)):
        raise RefusedError(
            "DENOMINATOR_OF_ANOTHER_SUM", "a softmax is weighted by a sum of other exponentials", "sum the same ones"
        )
    return expression.xreplace({symbol: share})


def divided_by_sum(
    region: Region, expression: sympy.Expr, product: sympy.Symbol, found: Probabilities, keys: tuple[Axis, ...]
) -> tuple[sympy.Expr, sympy.Expr | None] | None:
    """Gain and sink of ``expression``, which is ``product`` divided by a sum, or the share of a sum in it and a sink.

    None where it is nothing of the kind: a sink is one score of each row, not of each feature.
    """
    sums = [symbol for symbol in _sums(region, expression, keys) if symbol != product]
    weights = found.unnormalised
    if len(sums) != 1 or found.sinks is not None:
        return None
    summand, column = _summand(region, sums[0], found.dims, keys)
    if weights is None:
        weights = found.keep * sympy.exp(found.scores) / _whole(region, sums[0])
    gain, added = _ratio(region, expression / product * weights, sums[0], summand, keys)
    sinks = added if column is None else column
    is_of_rows = sinks is None or region.axes_in(sinks) <= {axis for dim in found.dims for axis in atoms(dim)}
    is_known = is_of_rows and (added is None or column is None) and not gain.has(product)
    return (gain, sinks) if is_known else None


def _ratio(
    region: Region, expression: sympy.Expr, total: sympy.Symbol, summand: sympy.Expr, keys: tuple[Axis, ...]
) -> tuple[sympy.Expr, sympy.Expr | None]:
    """``(gain, sinks)`` with ``expression == gain * summand / (total + exp(sinks))``, no sinks where nothing is added.

    Raises:
        RefusedError: it is a quotient of something else.
    """
    whole = _whole(region, total)
    gain = sympy.powsimp(expression * whole / summand)
    if gain.free_symbols:
        gain = sympy.simplify(gain) if gain.has(sympy.exp) else sympy.cancel(gain)
    sinks = None
    if gain.has(total):
        gain, sinks = _beside_sink(region, expression, total, summand, keys)
    gain = tidy(gain)
    if region.axes_in(gain) & set(atoms(keys)) or gain.has(sympy.exp):
        raise RefusedError(
            "DENOMINATOR_OF_ANOTHER_SUM",
            "the exponentials are divided by the sum of something else",
            "normalise by the sum over the same, equally masked, exponentials",
        )
    return gain, sinks


def _beside_sink(
    region: Region, expression: sympy.Expr, total: sympy.Symbol, summand: sympy.Expr, keys: tuple[Axis, ...]
) -> tuple[sympy.Expr, sympy.Expr]:
    """What :func:`_ratio` gives where something is added to the sum."""
    given = {total: sympy.log(_WHOLE) if _is_logarithm(region, total) else _WHOLE}
    inverse = sympy.expand(sympy.cancel(sympy.expand_power_exp((summand / expression).xreplace(given))))
    slope = sympy.simplify(sympy.diff(inverse, _WHOLE))
    added = sympy.powsimp(sympy.expand(inverse.xreplace({_WHOLE: sympy.S.Zero}) / slope))
    try:
        sinks, keep = _logarithm(region, sympy.simplify(_with_exponentials(region, added)))
    except RefusedError:
        sinks, keep = sympy.S.Zero, sympy.S.Zero
    if slope.has(_WHOLE) or keep != 1 or region.axes_in(sinks) & set(atoms(keys)):
        beside = region.told(1 / slope if slope.has(_WHOLE) else added)
        raise RefusedError(
            "EPSILON_IN_DENOMINATOR",
            f"the sum of exponentials is not the denominator by itself ({beside})",
            "divide by the sum alone, or by its sum with a positive number or exponential",
        )
    return 1 / slope, tidy(sympy.expand(sinks))


def _with_exponentials(region: Region, added: sympy.Expr) -> sympy.Expr:
    """An expression in what its leaves are exponentials of, which a region that leaves masks as they are does not read."""
    found = {}
    for symbol, leaf in region.leaves_in(added).items():
        call = region.effects.calls.get(leaf.node)
        if call is not None and is_exponential(call) and not call.is_inplace:
            found[symbol] = POINTWISE[call.name](region, call, leaf.dims) or symbol
            region.interior.setdefault(leaf.node, leaf.dims)
    return added.xreplace(found)


#: A sum of exponentials, which is positive.
_WHOLE = sympy.Symbol("whole", positive=True)


def _is_logarithm(region: Region, total: sympy.Symbol) -> bool:
    return region.effects.name(region.leaves[total].node) == "logsumexp"


def _whole(region: Region, total: sympy.Symbol) -> sympy.Expr:
    return sympy.exp(total) if _is_logarithm(region, total) else total


def _sums(region: Region, expression: sympy.Expr, keys: tuple[Axis, ...]) -> list[sympy.Symbol]:
    """The leaves that are sums (or logarithms of sums of exponentials) over axes that include the keys.

    Of several ones, those of exponentials: a sink may be a sum of products. What stands in exponents only divides
    nothing, as the squares of a row in random features of a softmax.
    """
    own = set(atoms(keys))
    names = {symbol: region.effects.name(leaf.node) for symbol, leaf in region.leaves_in(expression).items()}
    outside = expression.replace(sympy.exp, lambda _: sympy.S.One).free_symbols
    found = [
        each
        for each, name in names.items()
        if (name == "logsumexp" or (name == "sum" and each in outside)) and not own & region.leaves[each].axes
    ]
    if len(found) <= 1:
        return found
    nodes = {each: region.leaves[each].node for each in found}
    summed = {each: node.all_input_nodes for each, node in nodes.items()}
    return [
        each
        for each in found
        if names[each] == "logsumexp" or any(region.reaches(x, frozenset({"exp"}), nodes[each]) for x in summed[each])
    ]


def _summand(
    region: Region, total: sympy.Symbol, dims: Dims, keys: tuple[Axis, ...]
) -> tuple[sympy.Expr, sympy.Expr | None]:
    """The expression under a sum (or under the sum of a logsumexp), over the same keys, and a sink that is summed, too."""
    leaf = region.leaves[total]
    call = region.effects.calls[leaf.node]
    assert call is not None, "a reduction is a call"
    order = next((dim for dim in dims if set(atoms(dim)) == set(atoms(keys))), None)
    inner = None if order is None else contraction.reduction_dims(call, leaf.dims, order)
    if inner is None:
        raise RefusedError(
            "DENOMINATOR_OTHER_AXIS", "the exponentials are summed over other axes than the keys", "sum over the keys"
        )
    joined = extra.beside_sum(region, call, inner[0])
    if joined is not None:
        return sympy.exp(joined[0]), joined[1]
    expression = region.express(call.input, inner[0], leaf.node)
    return sympy.exp(expression) if call.name == "logsumexp" else expression, None


def _logarithm(region: Region, summand: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """``(scores, keep)`` with ``summand == keep * exp(scores)``, ``keep`` an indicator."""
    summand = reduce_indicators(summand) if not isinstance(summand, (sympy.Mul, sympy.exp)) else summand
    summand = sympy.factor_terms(summand)
    scores: Any = sympy.S.Zero
    keep: Any = sympy.S.One
    for factor in sympy.Mul.make_args(summand):
        if isinstance(factor, sympy.exp):
            scores += factor.args[0]
        elif is_indicator(factor):
            keep *= factor.as_base_exp()[0]
        elif factor.is_number and factor.is_positive:
            scores += sympy.log(factor)
        else:
            text = f"the weights hold {region.told(factor)}, which is no exponential of scores"
            raise RefusedError("NOT_AN_EXPONENTIAL", text, "normalise exp(scores), and weight the values by the rest")
    return scores, keep
