"""The weight of a blend as ``alpha * sigmoid(gain * margin - offset)`` between bounds, whatever its spelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import moves
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, fresh, resolve
from lz_compile.passes.formula.expressions import constant_value, tidy
from lz_compile.passes.formula.indices import Indices
from lz_compile.passes.formula.pieces import Piece
from lz_compile.passes.formula.pointwise import AT_LEAST, AT_MOST, BENDS, Rule, is_moved, is_read
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of

_MARGIN, _EXP, _SECOND = sympy.Symbol("margin", real=True), sympy.Symbol("t", positive=True), sympy.Symbol("second")
_NEAR = 1e-9


@dataclass(frozen=True)
class Rank:
    """``largest * first + second * second largest`` of ``source`` along ``dim``, at ``node``; ``nodes`` are all between.

    With ``is_distinct`` the second largest is the largest of those that differ from the largest. ``is_spelled`` says that
    the source names the number of elements.
    """

    node: fx.Node
    source: fx.Node
    dim: int
    first: int
    second: int
    nodes: frozenset[fx.Node]
    is_distinct: bool = False
    is_sorted: bool = False
    is_spelled: bool = False

    def of_source(self, dims: Dims, classes: Dims) -> Dims:
        """The dims of the source, given those of this value, and those of the class dimension."""
        rows = iter([dim for dim, size in zip(dims, shape_of(known_tensor(self.node)), strict=True) if size != 1])
        whole = [
            () if size == 1 or place == self.dim else next(rows)
            for place, size in enumerate(shape_of(known_tensor(self.source)))
        ]
        return (*whole[: self.dim], *classes, *whole[self.dim + 1 :])


class Ranks(Protocol):
    """The order statistics of a graph, however they are found; it contains their nodes."""

    def __contains__(self, node: object) -> bool: ...

    def of(self, node: fx.Node) -> Rank | None:
        """Which statistic a value is; None for others."""


@dataclass(frozen=True)
class Logits:
    """The tensor whose margin it is: ``dims`` with those of its classes, ``classes``; and how the source finds it.

    ``is_detached`` says that no gradient flows through the margin.
    """

    node: fx.Node
    dims: Dims
    classes: tuple[Axis, ...]
    ranks: tuple[Rank, ...]
    is_detached: bool = False

    @property
    def nodes(self) -> frozenset[fx.Node]:
        """Everything between the logits and the two largest."""
        return frozenset[fx.Node]().union(*(rank.nodes for rank in self.ranks))

    @property
    def is_distinct(self) -> bool:
        """Whether equal logits count once."""
        return any(rank.is_distinct for rank in self.ranks)

    @property
    def is_sorted(self) -> bool:
        """Whether the source sorts."""
        return any(rank.is_sorted for rank in self.ranks)

    @property
    def is_spelled(self) -> bool:
        """Whether the source names how many classes there are."""
        return any(rank.is_spelled for rank in self.ranks)


@dataclass(frozen=True)
class Gate:
    """A weight's parts, as expressions over the leaves of ``region``; bounds are None where there are none."""

    region: Region
    logits: Logits
    alpha: sympy.Expr
    gain: sympy.Expr
    offset: sympy.Expr
    low: sympy.Expr | None
    high: sympy.Expr | None


@dataclass
class Gates:
    """What depends on order statistics, in one graph."""

    effects: Effects
    ranks: Ranks
    _depends: dict[fx.Node, bool] = field(default_factory=dict)

    def depends(self, node: fx.Node) -> bool:
        """Whether a value is a pointwise function of order statistics, and perhaps of others."""
        if node not in self._depends:
            self._depends[node] = False
            self._depends[node] = node in self.ranks or self._passes_on(node)
        return self._depends[node]

    def _passes_on(self, node: fx.Node) -> bool:
        call = self.effects.calls.get(node)
        if call is None or call.is_inplace or tensor_of(node) is None:
            return False
        moves = is_moved(call) or call.name == "detach" or _only(self.effects, call) is not None
        if not is_read(call) and not moves:
            return False
        return any(self.depends(each) for each in node.all_input_nodes)

    def __contains__(self, node: object) -> bool:
        """Where reading stops: at order statistics, and at what is computed without any."""
        if not isinstance(node, fx.Node) or node in self.ranks:
            return True
        call = self.effects.calls.get(node)
        return not self.depends(node) and (call is None or constant_value(call) is None)

    def read(
        self,
        weight: sympy.Expr,
        leaves: Mapping[sympy.Symbol, Sequence[Leaf]],
        others: tuple[Leaf, ...],
        *,
        records: bool,
    ) -> Gate | None:
        """The gate in a weight, of which each symbol may be computed several times.

        Args:
            weight: over the symbols of ``leaves``.
            leaves: the values of a symbol, all the same.
            others: tensors whose axes are known, and that may be the logits.
            records: whether gradients are recorded where the weight is read: what was made without them is detached.
        """
        detached: list[fx.Node] = []
        functions = {**BENDS, "detach": _through(detached), "getitem": _only_one, "select": _only_one}
        region = Region(self.effects, expand_masks=True, stops=self, functions=functions)
        values = {
            symbol: [region.express(leaf.node, leaf.dims) for leaf in leaves[symbol]]
            for symbol in weight.free_symbols & leaves.keys()
        }
        logits = logits_of(region, self.ranks, others)
        nodes, of_values = (
            [leaf.node for leaf in region.leaves.values()],
            [leaf.node for symbol in values for leaf in leaves[symbol]],
        )
        wants = [tensor_of(node) for node in (*(node for node in nodes if node not in self.ranks), *of_values)]
        made = (*of_values, *region.interior, *(node for node in nodes if node in self.ranks)) if records else ()
        detached += [node for node in made if not grad_enabled(self.effects.ambient(node))]
        if logits is None or (detached and any(each is not None and each.requires_grad for each in wants)):
            return None
        read = {symbol: [margin_in(each, region, self.ranks) for each in same] for symbol, same in values.items()}
        if any(each is None or each != same[0] for same in read.values() for each in same):
            return None
        whole = _expanded(weight.xreplace({symbol: same[0] for symbol, same in read.items()}))
        return _gate(whole, region, replace(logits, is_detached=bool(detached)))


def _through(detached: list[fx.Node]) -> Rule:
    """Reads through ``detach``, and notes it."""

    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr:
        detached.append(call.node)
        return region.operand(call, "input", dims)

    return rule


def _only_one(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    """The only element of a dimension."""
    found = _only(region.effects, call, dims)
    return None if found is None else region.express(found.value, found.dims, found.by)


def _only(effects: Effects, call: Call, dims: Dims | None = None) -> Piece | None:
    """What a call shows that takes the only element of dimensions, or all."""
    tensor = tensor_of(call.node)
    if tensor is None or call.name not in moves.RULES:
        return None
    indices = Indices(effects)
    dims = resolve(fresh(shape_of(tensor)) if dims is None else dims)
    indices.give(dims)
    found = moves.shown(indices, call, dims)
    return found if found is not None and indices.is_plain(found.dims) else None


def logits_of(region: Region, ranks: Ranks, others: tuple[Leaf, ...] = ()) -> Logits | None:
    """The one tensor of which all order statistics in a region are, with its dims."""
    found: list[tuple[Rank, Dims]] = []
    for leaf in region.leaves.values():
        rank = ranks.of(leaf.node)
        if rank is not None:
            found.append((rank, leaf.dims))
    if not found:
        return None
    first = found[0][0]
    if any((rank.source, rank.dim) != (first.source, first.dim) for rank, _ in found):
        return None
    if len({rank.is_distinct for rank, _ in found if rank.second}) > 1:
        return None
    tensor = known_tensor(first.source)
    known = next((leaf.dims for leaf in others if leaf.node is first.source), None)
    classes = (Axis(shape_of(tensor)[first.dim]),) if known is None else known[first.dim]
    dims = first.of_source(found[0][1], (classes,))
    same = [rank.of_source(own, (classes,)) for rank, own in found]
    if any(resolve(each) != resolve(known or dims) for each in same):
        return None
    return Logits(first.source, dims, classes, tuple(rank for rank, _ in found))


def margin_in(expression: sympy.Expr, region: Region, ranks: Ranks) -> sympy.Expr | None:
    """The expression over the margin, in place of the two largest; None where it depends on more of them."""
    values = {}
    for symbol, leaf in region.leaves.items():
        rank = ranks.of(leaf.node)
        if rank is not None:
            values[symbol] = rank.first * (_MARGIN + _SECOND) + rank.second * _SECOND
    found = _expanded(expression.xreplace(values))
    return None if found.has(_SECOND) else found


def _expanded(expression: sympy.Expr) -> sympy.Expr:
    """Multiplied out, but for powers of sums."""
    return tidy(sympy.expand(expression, power_exp=False, power_base=False, log=False))


def is_margin(expression: sympy.Expr | None) -> bool:
    """Whether an expression is the margin itself."""
    return expression is not None and sympy.expand(expression - _MARGIN) == 0


def _gate(found: sympy.Expr, region: Region, logits: Logits) -> Gate | None:
    low, high, inner = _bounds(_without_needless_bounds(found))
    parts = _sigmoid(inner)
    if parts is None:
        return None
    alpha, argument = parts
    argument = sympy.expand(argument)
    gain = argument.coeff(_MARGIN, 1)
    offset = sympy.expand(gain * _MARGIN - argument)
    if gain == 0 or any(each.has(_MARGIN) for each in (alpha, gain, offset)):
        return None
    scalars = [each for each in (gain, offset, low, high) if each is not None]
    symbols = {symbol for each in scalars for symbol in each.free_symbols}
    if any(region.leaves[symbol].axes for symbol in symbols if symbol in region.leaves):
        return None
    return Gate(region, logits, alpha, tidy(gain), tidy(offset), low, high)


def _without_needless_bounds(expression: sympy.Expr) -> sympy.Expr:
    """Without the bounds of a sigmoid that it never reaches."""
    for bound in expression.atoms(AT_LEAST, AT_MOST):
        inner, limit = _of_margin(bound)
        if inner is None or limit is None or not limit.is_number:
            continue
        parts = _sigmoid(inner)
        is_needless = limit <= 0 if bound.func is AT_LEAST else limit >= 1
        if parts is not None and parts[0] == 1 and is_needless:
            return _without_needless_bounds(expression.xreplace({bound: inner}))
    return expression


def _of_margin(bound: sympy.Expr) -> tuple[sympy.Expr | None, sympy.Expr | None]:
    """What is bounded, and by what."""
    inner = [argument for argument in bound.args if argument.has(_MARGIN)]
    limits = [argument for argument in bound.args if not argument.has(_MARGIN)]
    return (inner[0], limits[0]) if len(inner) == len(limits) == 1 else (None, None)


def _bounds(expression: sympy.Expr) -> tuple[sympy.Expr | None, sympy.Expr | None, sympy.Expr]:
    """The bounds around an expression, the lower of which is applied first, and what they are around."""
    low: sympy.Expr | None = None
    high: sympy.Expr | None = None
    while expression.func in (AT_LEAST, AT_MOST):
        inner, limit = _of_margin(expression)
        if inner is None or limit is None:
            break
        is_low = expression.func is AT_LEAST
        if (low if is_low else high) is not None:
            break
        if is_low:
            low = limit
        elif low is not None and not (
            low.is_number and limit.is_number and low <= limit
        ):  # the upper one is applied first
            low = None
            break
        else:
            high = limit
        expression = inner
    return low, high, expression


def _sigmoid(expression: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """``factor * sigmoid(argument)`` as the two, where the argument depends on the margin and the factor does not."""
    plain = expression.replace(sympy.tanh, lambda x: 2 / (1 + sympy.exp(-2 * x)) - 1)
    exponents = {each.args[0] for each in plain.atoms(sympy.exp) if each.has(_MARGIN)}
    if not exponents:
        return None
    exponent = min(exponents, key=str)
    values = {}
    for other in exponents:
        if is_zero(other - exponent):
            values[sympy.exp(other)] = _EXP
        elif is_zero(other + exponent):
            values[sympy.exp(other)] = 1 / _EXP
        else:
            return None
    above, below = sympy.fraction(sympy.together(as_fractions(plain.xreplace(values))))
    (p0, p1), (q0, q1) = ([sympy.expand(each).coeff(_EXP, power) for power in (0, 1)] for each in (above, below))
    if any(each.has(_EXP) for each in (p0, p1, q0, q1)):
        return None
    if not is_zero(above - p0 - p1 * _EXP) or not is_zero(below - q0 - q1 * _EXP) or q0 == 0 or q1 == 0:
        return None
    if p1 == 0:  # factor / (1 + ratio * exp(exponent))
        factor, ratio, argument = p0 / q0, q1 / q0, -exponent
    elif p0 == 0:
        factor, ratio, argument = p1 / q1, q0 / q1, exponent
    else:
        return None
    factor, ratio = sympy.cancel(factor), sympy.cancel(ratio)
    if not ratio.is_number or ratio <= 0 or factor.has(_MARGIN):
        return None
    return _as_floats(factor), argument - _as_floats(sympy.log(ratio))


def as_fractions(expression: sympy.Expr) -> sympy.Expr:
    """Floats as the decimal fractions that they are printed as, without a guess at simpler ones."""
    return expression.xreplace({each: sympy.Rational(repr(float(each))) for each in expression.atoms(sympy.Float)})


def _as_floats(expression: sympy.Expr) -> sympy.Expr:
    """The fractions that floats were taken for as floats again."""
    if expression.is_number:
        return tidy(expression.evalf(17))
    return expression.xreplace({each: tidy(each.evalf(17)) for each in expression.atoms(sympy.Rational)})


def is_zero(expression: sympy.Expr) -> bool:
    """Whether an expression is zero but for rounding."""
    terms = sympy.Add.make_args(sympy.expand(expression))
    return all(abs(term.as_coeff_Mul()[0]) < _NEAR for term in terms)
