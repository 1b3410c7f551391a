"""Statistics of rows as polynomials in moments: what a mean, a sum of squares, a variance or a norm says of one tensor.

Over the axes that are reduced, with ``x`` the tensor, ``M1`` is the mean of ``x`` and ``M2`` the mean of its squares. Every
reduction of a polynomial in ``x`` is a polynomial in these: ``mean((x - mean(x)) ** 2)``, ``var(x)`` and
``mean(x * x) - mean(x) ** 2`` are all ``M2 - M1 ** 2``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import product
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, atoms, axes_of, regroup
from lz_compile.passes.formula.edge import Edge, behind_casts
from lz_compile.passes.formula.expressions import tidy
from lz_compile.passes.formula.pointwise import AT_LEAST, AT_MOST, BENDS, Rule
from lz_compile.passes.formula.statistics import as_mean, is_of_rows
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import Call, tensor_of, value_of

ROW = sympy.Symbol("row", real=True)
MEAN = sympy.Symbol("mean", real=True)
MEAN_SQUARE = sympy.Symbol("mean_square", positive=True)
#: Of absolute values: by them rows are divided that are no normalised ones.
MEAN_ABSOLUTE, LARGEST = sympy.symbols("mean_absolute largest", positive=True)

_BY_DEGREE = (sympy.S.One, MEAN, MEAN_SQUARE)
_HALF = sympy.Rational(1, 2)
#: How deep statistics may depend on statistics: a variance on a mean.
_NESTED = 2


class _OfAnotherError(RefusedError):
    """A statistic is one of another tensor, though what is reduced depends on statistics of the source."""


@dataclass
class Moments:
    """Reads expressions in one row, the tensor ``source``.

    ``region`` holds what is read, up to ``edge``; ``dims`` are the axes of ``source`` in the result that was read first,
    ``reduced`` those of them that all statistics reduce, ``squared`` the nodes that hold second moments or
    magnitudes.
    """

    effects: Effects
    source: fx.Node
    dims: Dims = ()
    reduced: tuple[Axis, ...] = ()
    squared: list[fx.Node] = field(default_factory=list)
    #: Axes of the source, each with one that a statistic reduces in its place.
    _met: list[tuple[Axis, Axis]] = field(default_factory=list)
    #: Axes over which numbers are summed: their sizes are in the result.
    counted: list[Axis] = field(default_factory=list)
    _depth: int = 0

    def __post_init__(self) -> None:
        self.edge = Edge(self.effects, self.source)
        self.region = Region(self.effects, expand_masks=True, stops=self.edge, functions=FUNCTIONS)

    def read(self, node: fx.Node, dims: Dims) -> sympy.Expr:
        """The value of ``node`` in :data:`ROW`, its moments and other leaves.

        Raises:
            RefusedError: a reduction of the source has no reading in moments.
            LayoutError: the layout has no exact form in axes.
        """
        expression = self.region.express(node, dims)
        leaves = self.region.leaves_in(expression)
        own = [symbol for symbol, leaf in leaves.items() if leaf.node is self.source]
        whole = [symbol for symbol, leaf in leaves.items() if self._is_whole(leaf)]
        if len(own) + len(whole) > 1:
            raise RefusedError("ROWS_DIFFER", "it is computed from several places of one tensor", "use one layout")
        if not own and not whole:
            return expression
        self.dims = self.region.leaves[(own or whole)[0]].dims
        return self._normal(expression.xreplace(dict.fromkeys(own, ROW)))

    def _is_whole(self, leaf: Leaf) -> bool:
        """Whether a leaf is a call that normalises the source by itself."""
        call = self.region.effects.calls.get(leaf.node)
        if call is None or call.name not in CALLS:
            return False
        return call.input is self.source or behind_casts(self.effects, call.input) is self.source

    def _normal(self, expression: sympy.Expr) -> sympy.Expr:
        """The expression with every statistic of the source in moments, and half powers as such."""
        found = {}
        for symbol, leaf in self.region.leaves_in(expression).items():
            for value in (self._statistic(leaf), self._size(leaf)):
                if value is not None:
                    found[symbol] = value
        expression = expression.xreplace(found) if found else expression
        return halves(expression.replace(_is_count, lambda each: _EXTREMA[each.func](*each.args)))

    def _size(self, leaf: Leaf) -> sympy.Expr | None:
        """What a symbolic size is by the symbols of torch, in which the extents of axes are, too."""
        size = value_of(leaf.node)
        return size.node.expr if isinstance(size, torch.SymInt) else None

    def by_leaves(self, expression: sympy.Expr) -> sympy.Expr:
        """The expression with every symbol of a size as the graph's own input of that size.

        Raises:
            RefusedError: the graph has no such input.
        """
        found = {}
        for symbol in sorted(expression.free_symbols - self.region.leaves.keys(), key=str):
            node = next((node for node in self.source.graph.nodes if _is_size(node, symbol)), None)
            if node is None:
                raise RefusedError("SIZE_UNKNOWN", f"the result depends on the size {symbol}", "give it as a number")
            found[symbol] = self.region.leaf(node, ())
        return expression.xreplace(found) if found else expression

    def _statistic(self, leaf: Leaf) -> sympy.Expr | None:
        """The moments that a leaf is, None where it is no statistic of the source."""
        call = self.region.effects.calls.get(leaf.node)
        if call is not None and call.name == "getitem":
            return self._of_pair(call, leaf)
        if call is not None and self._is_whole(leaf):
            return CALLS[call.name](self, call, leaf.dims)
        call = call and (as_mean(call) or call)
        reader = None if call is None else _REDUCTIONS.get(call.name)
        if call is not None and reader is None and is_of_rows(call):
            reader = _product
        if reader is None or call is None or not self.edge.depends(call.node):
            return None
        if self._depth == _NESTED:
            raise RefusedError("NO_NORM", "statistics of what was normalised already", "read each norm by itself")
        self._depth += 1
        try:
            return reader(self, call, leaf.dims)
        except _OfAnotherError:  # centred by a mean that is also of the source
            return None
        finally:
            self._depth -= 1

    def _of_pair(self, call: Call, leaf: Leaf) -> sympy.Expr | None:
        """``torch.var_mean(x)[0]`` and the like."""
        source = self.region.effects.calls.get(call.input)
        index = call.arguments.get("#1")
        if source is None or source.name not in ("var_mean", "std_mean") or index not in (0, 1):
            return None
        if not self.edge.depends(source.node):
            return None
        reader = _REDUCTIONS["mean" if index else source.name.partition("_")[0]]
        self.region.interior.setdefault(source.node, leaf.dims)
        return reader(self, source, leaf.dims)

    # ---- reductions ---------------------------------------------------------------------------------------------

    def inner(self, call: Call, dims: Dims, outer: tuple[Axis, ...] = ()) -> tuple[sympy.Expr, sympy.Expr]:
        """What a reduction reduces, in rows and moments, and how many elements that are.

        Sums of sums, or means of them, are over the axes of both. Those of the ``outer`` are not counted.
        """
        given = contraction.reduction_dims(call, dims)
        if given is None:
            raise RefusedError("REDUCTION_UNCLEAR", f"{call.name} reduces unnamed dimensions", "name the dimensions")
        source_dims, new = given
        expression = self.region.express(call.input, source_dims, call.node)
        own = sympy.sympify(product(axis.size for axis in new))
        leaf = self.region.leaves.get(expression)
        first = None if leaf is None else self.region.effects.calls.get(leaf.node)
        if leaf is None or first is None or not {call.name, first.name} <= _ADDING or not self.edge.depends(leaf.node):
            return self.reduced_by(call, expression, (*new, *outer))[0], own
        expression, count = self.inner(first, leaf.dims, (*new, *outer))
        self.region.interior.setdefault(leaf.node, leaf.dims)
        return expression * (count if first.name == "sum" else 1), own

    def reduced_by(self, call: Call, expression: sympy.Expr, new: tuple[Axis, ...]) -> tuple[sympy.Expr, sympy.Expr]:
        """The same of an expression that a call reduces over some axes."""
        leaves = self.region.leaves_in(expression)
        own = [symbol for symbol, leaf in leaves.items() if leaf.node is self.source]
        for symbol in own:
            self._unify(leaves[symbol].dims, new)
        self.counted += () if leaves else new
        expression = self._normal(expression.xreplace(dict.fromkeys(own, ROW)))
        if self.region.axes_in(expression) & set(atoms(new)):
            inside = (leaf.node for leaf in self.region.leaves_in(expression).values())
            is_another = not expression.has(ROW) and not any(map(self.edge.depends, inside))
            kind = _OfAnotherError if is_another else RefusedError
            raise kind(
                "ROW_WEIGHTED", f"{call.name} reduces a weighted row, or part of it", "weight it after it is normalised"
            )
        return expression, sympy.sympify(product(axis.size for axis in new))

    def _unify(self, dims: Dims, new: tuple[Axis, ...]) -> None:
        """Note which axes of the source the new axes of a reduction stand for."""
        pairs = [pair for own, other in zip(self.dims, dims, strict=True) for pair in _aligned(own, other)]
        own = set(atoms(new))
        if any(twin is not axis and (twin not in own or axis in own or axis.size != twin.size) for axis, twin in pairs):
            text = "statistics are of other rows than those they are used for"
            raise RefusedError("ROWS_DIFFER", text, "use those of the same")
        met = [pair for pair in pairs if pair[1] in own and pair[0] not in own]
        self._met += met
        self.reduce(tuple(axis for axis, _ in met), len(own))

    def reduce(self, reduced: tuple[Axis, ...], count: int) -> None:
        """Note the axes of the source that a statistic reduces; all of them must reduce the same."""
        if len(reduced) != count or (self.reduced and set(self.hidden) != set(atoms(reduced))):
            raise RefusedError("STATISTICS_DIFFER", "mean and variance are over different dimensions", "use the same")
        self.reduced = self.reduced or reduced

    @property
    def ties(self) -> dict[Axis, Axis]:
        """The axes that statistics reduce, each with the one of the source that it stands for: both have one size."""
        return {twin: axis for own, other in self._met for axis, twin in _aligned((own,), (other,))}

    @property
    def hidden(self) -> tuple[Axis, ...]:
        """What is reduced, in axes as they are cut by now."""
        return atoms(self.reduced)

    def mean_of(self, expression: sympy.Expr, node: fx.Node) -> sympy.Expr:
        """The mean of a polynomial in the row."""
        factor, rest = expression.as_independent(ROW, as_Add=False)
        if rest == sympy.Abs(ROW):
            self.squared.append(node)
            return sympy.Abs(factor) * MEAN_ABSOLUTE
        if not expression.is_polynomial(ROW):
            raise RefusedError("NOT_A_MOMENT", "what is reduced is no polynomial of the row", "reduce squares")
        polynomial = sympy.Poly(expression, ROW)
        if polynomial.degree() >= len(_BY_DEGREE):
            raise RefusedError("NOT_A_MOMENT", f"a moment of degree {polynomial.degree()} is reduced", "reduce squares")
        if polynomial.degree() == 2:
            self.squared.append(node)
        return tidy(sum((c * _BY_DEGREE[power[0]] for power, c in polynomial.terms()), start=sympy.S.Zero))

    def largest_of(self, expression: sympy.Expr, node: fx.Node) -> sympy.Expr:
        """The largest of absolute values of the row."""
        factor, rest = expression.as_independent(ROW, as_Add=False)
        if rest != sympy.Abs(ROW):
            raise RefusedError("NO_NORM", "the largest of other values than absolute ones", "reduce squares")
        self.squared.append(node)
        return factor * LARGEST


def _aligned(own: tuple[Axis, ...], other: tuple[Axis, ...]) -> Iterator[tuple[Axis, Axis]]:
    """The axes of one dimension, read in two places, in pairs; what is cut in one place is cut in the other."""
    mine, theirs = atoms(own), atoms(other)
    if len(mine) < len(theirs):
        mine = axes_of(regroup(mine, [axis.size for axis in theirs]))
    elif len(theirs) < len(mine):
        theirs = axes_of(regroup(theirs, [axis.size for axis in mine]))
    yield from zip(mine, theirs, strict=True)


#: Of numbers that are none of them NaN.
_EXTREMA = {AT_LEAST: sympy.Max, AT_MOST: sympy.Min}


def _is_count(expression: sympy.Expr) -> bool:
    """Whether an expression is an extremum of numbers and sizes only."""
    return expression.func in _EXTREMA and all(x.is_integer and x.is_positive for x in expression.free_symbols)


def _is_size(node: fx.Node, symbol: sympy.Symbol) -> bool:
    size = value_of(node) if node.op == "placeholder" else None
    return isinstance(size, torch.SymInt) and size.node.expr == symbol


def halves(expression: sympy.Expr) -> sympy.Expr:
    """Floating exponents of a half as fractions, so that all spellings of a root are one."""
    powers = {
        power: sympy.Pow(power.base, sympy.Rational(round(2 * float(power.exp)), 2))
        for power in expression.atoms(sympy.Pow)
        if power.exp.is_Float and 2 * float(power.exp) == round(2 * float(power.exp))
    }
    return tidy(expression.xreplace(powers) if powers else expression)


Reduction: TypeAlias = Callable[[Moments, Call, Dims], sympy.Expr]


def _sum(moments: Moments, call: Call, dims: Dims) -> sympy.Expr:
    expression, count = moments.inner(call, dims)
    return count * moments.mean_of(expression, call.node)


def _product(moments: Moments, call: Call, dims: Dims) -> sympy.Expr:
    """Of rows with themselves, or with numbers (see :func:`is_of_rows`)."""
    found = contraction.factors(call, dims)
    assert found is not None, "a product of rows with themselves"
    sides = [moments.region.express(node, own, call.node) for node, own in found.factors]
    expression, count = moments.reduced_by(call, sympy.expand(math.prod(sides)), found.summed)
    return count * moments.mean_of(expression, call.node)


def _var(moments: Moments, call: Call, dims: Dims) -> sympy.Expr:
    correction = call.get("correction", call.get("unbiased", 1))
    if isinstance(call.get("dim"), bool) or not isinstance(correction, (bool, int, float)):
        raise RefusedError("REDUCTION_UNCLEAR", f"{call.name} reduces unnamed dimensions", "name the dimensions")
    expression, count = moments.inner(call, dims)
    mean, square = (moments.mean_of(sympy.expand(each), call.node) for each in (expression, expression**2))
    return (square - mean**2) * (count / (count - correction) if correction else 1)


def _norm(moments: Moments, call: Call, dims: Dims) -> sympy.Expr:
    order = call.get("p", call.get("ord"))
    if order not in (None, 1, 2, math.inf, "fro"):
        raise RefusedError("NO_NORM", f"a norm of order {order}", "use the Euclidean norm")
    expression, count = moments.inner(call, dims)
    if order == 1:
        return count * moments.mean_of(sympy.Abs(expression), call.node)
    if order == math.inf:
        return moments.largest_of(sympy.Abs(expression), call.node)
    return sympy.sqrt(count * moments.mean_of(sympy.expand(expression**2), call.node))


def _skipping(moments: Moments, call: Call, dims: Dims) -> sympy.Expr:
    text = f"{call.name} leaves missing numbers out, which a kernel does not"
    raise RefusedError("NAN_SKIPPED", text, f"use {call.name.removeprefix('nan')} where none is missing")


#: Reductions that may follow each other.
_ADDING = frozenset({"mean", "sum"})
_REDUCTIONS: Mapping[str, Reduction] = {
    "mean": lambda moments, call, dims: moments.mean_of(moments.inner(call, dims)[0], call.node),
    "sum": _sum,
    "amax": lambda moments, call, dims: moments.largest_of(moments.inner(call, dims)[0], call.node),
    "var": _var,
    "std": lambda moments, call, dims: sympy.sqrt(_var(moments, call, dims)),
    **dict.fromkeys(("nanmean", "nansum"), _skipping),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm", "linalg_norm"), _norm),
}
#: Calls by which a reading may begin: statistics, and calls that normalise by themselves.
STATISTICS = frozenset(_REDUCTIONS) | {"var_mean", "std_mean"}


def is_statistic(call: Call) -> bool:
    """Whether a reading may begin at a call."""
    is_named = call.name in STATISTICS or call.name in CALLS or as_mean(call) is not None
    return is_named or is_of_rows(call)


# ---- calls that normalise by themselves ------------------------------------------------------------------------------


def _trailing(moments: Moments, call: Call, dims: Dims) -> Dims:
    """The dimensions that a call normalises over, the last ones."""
    shape = call.get("normalized_shape")
    count = len(shape) if isinstance(shape, (tuple, list)) else 1
    axes = axes_of(dims[-count:])
    moments.reduce(axes, len(axes))
    moments.squared.append(call.node)
    return dims[-count:]


def _affine(moments: Moments, call: Call, row: sympy.Expr, trailing: Dims) -> sympy.Expr:
    weight, bias = (call.get(name) for name in ("weight", "bias"))
    if weight is not None:
        row = row * moments.region.express(weight, trailing, call.node)
    return row if bias is None else row + moments.region.express(bias, trailing, call.node)


def _layer_norm(moments: Moments, call: Call, dims: Dims) -> sympy.Expr:
    trailing = _trailing(moments, call, dims)
    variance = MEAN_SQUARE - MEAN**2 + moments.region.scalar(call.get("eps", 1e-5))
    return _affine(moments, call, (ROW - MEAN) * variance**-_HALF, trailing)


def _rms_norm(moments: Moments, call: Call, dims: Dims) -> sympy.Expr:
    trailing, eps = _trailing(moments, call, dims), call.get("eps")
    if eps is None:  # that of what it is computed in
        eps = torch.finfo(torch.promote_types(tensor_of(call.input).dtype, torch.float32)).eps  # type: ignore[union-attr]
    return _affine(moments, call, ROW * (MEAN_SQUARE + moments.region.scalar(eps)) ** -_HALF, trailing)


def _normalize(moments: Moments, call: Call, dims: Dims) -> sympy.Expr:
    order, position = call.get("p", 2.0), call.get("dim", 1)
    if order not in (1, 2) or not isinstance(position, int):
        raise RefusedError("NO_NORM", f"a norm of order {order}", "use the Euclidean norm")
    axes = axes_of((dims[position],)) if dims else ()  # a number has none, and may be said to have one
    moments.reduce(axes, len(axes))
    moments.squared.append(call.node)
    count = sympy.sympify(product(axis.size for axis in axes))
    length = count * MEAN_ABSOLUTE if order == 1 else sympy.sqrt(count * MEAN_SQUARE)
    return ROW / AT_LEAST(length, moments.region.scalar(call.get("eps", 1e-12)))


CALLS: Mapping[str, Reduction] = {"layer_norm": _layer_norm, "rms_norm": _rms_norm, "normalize": _normalize}
#: Calls that are read here beside those of every region: what a root, or what is under it, is held to.
FUNCTIONS: Mapping[str, Rule] = {
    **{name: BENDS[name] for name in ("clamp", "clamp_min", "maximum", "abs")},
    "detach": lambda region, call, dims: region.operand(
        call, "input", dims
    ),  # whose gradient it stops, has to be asked
}
