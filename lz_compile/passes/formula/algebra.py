"""A region of pointwise operations as one sympy expression over its leaves.

``x * rsqrt(v + eps)``, ``x / sqrt(v + eps)`` and ``x * (v + eps) ** -0.5`` become the same expression; so do all
orders of scaling, masking and biasing a score. A leaf is a tensor *together with its axes*, so transposes, reshapes and
broadcasts between the pointwise operations disappear as well.

Booleans are indicator symbols with values 0 and 1 (``m**2 == m``): ``where(m, a, b)`` is ``m*a + (1 - m)*b``, which is
also what arithmetic masking spells. Infinity is the symbol :data:`INFINITY`, so that products with indicators stay finite.
Casts between floating dtypes are transparent here; what they mean for precision is the recogniser's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import sympy.tensor.tensor  # sympy's first addition imports it: that is no part of a compile
import torch
from torch import fx
from torch.utils._sympy.symbol import SymT, symbol_is_type

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, broadcast_from, resolve
from lz_compile.passes.graph.effects import Effects, MutatedError
from lz_compile.passes.graph.view import Call, tensor_of, value_of

INFINITY = sympy.Symbol("INFINITY", positive=True)

#: Stay unevaluated functions in expressions: ``dropout(x, p)`` and ``nan_to_num(x)``.
DROPOUT = sympy.Function("dropout")
NAN_TO_NUM = sympy.Function("nan_to_num")
#: ``max(x, floor)`` with a floor that no finite score reaches; it turns ``-inf`` into the floor.
FLOORED = sympy.Function("floored")
#: Constants up to this are no bound on scores.
_BOTTOM = -1e30
_EXACT = 2**53


@dataclass(frozen=True)
class Leaf:
    """A tensor (or symbolic number) at the edge of a region, with the axes of its dimensions.

    ``contraction`` is set where the leaf is a sum of products, ``kind`` names the reduction or normalisation that made
    it (``"softmax"``, ``"sum"``, ``"amax"``, ``"logsumexp"``), ``"tensor"`` otherwise.
    """

    node: fx.Node
    dims: Dims
    kind: str = "tensor"
    contraction: contraction.Contraction | None = None

    @property
    def axes(self) -> frozenset[Axis]:
        """Everything that the leaf depends on."""
        return frozenset(axis for dim in self.dims for axis in atoms(dim))


@dataclass
class Region:
    """Expressions over one graph, its leaves by symbol, and every node that was read through with its axes.

    ``readers`` holds the first node that reads each value. ``expand_masks`` reads values that hold no contraction, too,
    which are leaves otherwise; without ``expand_inplace``, what was computed in place is a leaf. ``multiplies_masks`` is
    set where a mask is applied as a factor, so that an infinite value behind it would be NaN. ``selecting`` has the masks by
    which products are selected, so that what is dropped does not matter even where it is NaN, ``narrowed`` holds the leaves
    of what was cast to a dtype of smaller range. ``stops`` are leaves whatever they are, ``functions`` read further calls.
    """

    effects: Effects
    leaves: dict[sympy.Symbol, Leaf] = field(default_factory=dict)
    interior: dict[fx.Node, Dims] = field(default_factory=dict)
    readers: dict[fx.Node, fx.Node] = field(default_factory=dict)
    expand_masks: bool = False
    expand_inplace: bool = True
    multiplies_masks: bool = False
    selecting: set[sympy.Symbol] = field(default_factory=set)
    narrowed: set[sympy.Symbol] = field(default_factory=set)
    stops: Container[fx.Node] = frozenset()
    functions: Mapping[str, Rule] = field(default_factory=dict)
    #: What the operands of the call that is being read are made of.
    _symbols_read: set[sympy.Symbol] = field(default_factory=set)
    _symbols: dict[fx.Node, list[sympy.Symbol]] = field(default_factory=dict)

    def express(self, node: Any, dims: Dims, reader: fx.Node | None = None) -> sympy.Expr:
        """The value of ``node`` at the index given by ``dims``.

        Args:
            node: a node, or a constant.
            dims: the axes of each of its dimensions.
            reader: the node that reads it (in-place operations before the reader have happened).

        Raises:
            MutatedError: an alias was overwritten before it is read.
            LayoutError: the layout has no exact form in axes.
        """
        if not isinstance(node, fx.Node):
            return number(node)
        if reader is not None:
            node = self.seen_by(reader, node)
        call = self.effects.calls[node]
        if call is None or node in self.stops or (reader is not None and self.effects.is_opaque(node, reader)):
            return self.leaf(node, dims)
        constant = constant_value(call)
        if constant is not None:
            self.interior.setdefault(node, dims)
            return number(constant)
        if call.is_inplace and (not self.expand_inplace or self.effects.calls[self.effects.owner(node)] is None):
            return self.leaf(node, dims)  # for the second: it writes into an input of the graph
        if not self.reaches(node, ANCHORS) and (self.effects.stops_gradient(node, reader) or not self._is_read(node)):
            return self.leaf(node, dims)
        return self._express_call(call, dims)

    def _is_read(self, node: fx.Node) -> bool:
        return self.expand_masks or self._is_constant(node)

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a scalar tensor is computed from numbers alone, as ``torch.sqrt(torch.tensor(64.0))`` is."""
        call, tensor = self.effects.calls[node], tensor_of(node)
        if call is None or tensor is None or tensor.dim() or call.is_inplace:
            return False
        inputs = node.all_input_nodes
        is_plain = call.name in _POINTWISE or is_cast(call)
        return is_constant(call) or (
            is_plain and bool(inputs) and all(self._is_constant(operand) for operand in inputs)
        )

    def seen_by(self, reader: fx.Node, node: fx.Node) -> fx.Node:
        """The value of ``node`` that ``reader`` sees; remembered, because nothing may overwrite it after that."""
        node = self.effects.current(node, reader)
        if self.effects.is_opaque(node, reader) and self.reaches(node, ANCHORS):
            raise MutatedError(node)
        earliest = self.readers.get(node)
        if earliest is None or self.effects.position[reader] < self.effects.position[earliest]:
            self.readers[node] = reader
        return node

    def reaches(self, node: fx.Node, goal: frozenset[str]) -> bool:
        """Whether a call named in ``goal`` is found behind pointwise and layout operations only."""
        return self.effects.reaches(node, goal, lambda: self._search(node, goal))

    def _search(self, node: fx.Node, goal: frozenset[str]) -> bool:
        call = self.effects.calls.get(node)
        if call is None or tensor_of(node) is None:
            return False
        if call.name in goal or (call.name == "sum" and "matmul" in goal and contraction.is_product_sum(self, call)):
            return True
        if call.name not in _POINTWISE and call.name not in _THROUGH and not _is_transparent(call):
            return False
        return any(self.reaches(operand, goal) for operand in node.all_input_nodes)

    def _express_call(self, call: Call, dims: Dims) -> sympy.Expr:
        if call.name == "softmax" or (call.name == "sum" and contraction.is_product_sum(self, call)):
            return self._special_leaf(call, dims)
        if call.name in contraction.PRODUCTS:
            return self._product(call, dims)
        if call.name == "log_softmax":
            return sympy.log(self.leaf(call.node, dims, kind="softmax"))
        if call.name in _REDUCTIONS:
            return self.leaf(call.node, dims, kind=_REDUCTIONS[call.name])
        if call.name == "getitem" and _is_max_values(self.effects, call):
            return self.leaf(call.node, dims, kind="amax")
        inner = self._transparent(call, dims)
        if inner is not None:
            return inner
        rule = self.functions.get(call.name) or _POINTWISE.get(call.name)
        if rule is None:
            return self.leaf(call.node, dims)
        expression = self._ruled(rule, call, dims)
        if expression is None:
            return self.leaf(call.node, dims)
        self.interior.setdefault(call.node, dims)
        return self._held(call, expression)

    def _ruled(self, rule: Rule, call: Call, dims: Dims) -> sympy.Expr | None:
        """What a rule gives; None where a tensor cancels out of it, for NaN in it would not, nor does its gradient."""
        outer, self._symbols_read = self._symbols_read, set()
        try:
            expression = rule(self, call, dims)
            lost = set() if expression is None else self._symbols_read - expression.free_symbols
        finally:
            self._symbols_read = outer
        is_tensor = (symbol in self.leaves and tensor_of(self.leaves[symbol].node) is not None for symbol in lost)
        return None if any(is_tensor) else expression

    def _transparent(self, call: Call, dims: Dims) -> sympy.Expr | None:
        """The input's expression where the call rearranges or casts only."""
        if not isinstance(call.input, fx.Node) or tensor_of(call.input) is None:
            return None
        source = dims if is_cast(call) else layout.read_input_dims(call, dims)
        if source is None:
            return None
        expression = self.express(call.input, source, call.node)
        self.interior.setdefault(call.node, dims)
        if not is_cast(call):
            return expression
        if tensor_of(call.node).dtype == torch.bool and not is_indicator(expression):  # type: ignore[union-attr]
            return self.leaf(call.node, dims)
        if _narrows(call):
            if expression.has(FLOORED):  # the floor itself may become an infinity
                return self.leaf(call.node, dims)
            whole = dict.fromkeys(expression.atoms(sympy.exp), sympy.S.One)  # probabilities: nothing large is left
            self.narrowed |= expression.xreplace(whole).free_symbols
        return self._held(call, expression)

    def _held(self, call: Call, expression: sympy.Expr) -> sympy.Expr:
        """The expression as the result's dtype holds it: constants beyond its range are infinities."""
        dtype = tensor_of(call.node).dtype  # type: ignore[union-attr]
        if not dtype.is_floating_point or not any(
            abs(x) > torch.finfo(dtype).max for x in expression.atoms(sympy.Number)
        ):
            return expression
        expanded = reduce_indicators(expression)
        values = [symbol for symbol in expanded.free_symbols if not symbol.is_integer]
        constant, rest = expanded.as_independent(*values, as_Add=True) if values else (expanded, sympy.S.Zero)
        held = _overflowed(constant, dtype)
        return expression if held == constant else rest + held

    def operand(self, call: Call, name: str, dims: Dims) -> sympy.Expr:
        """The expression of a (broadcast) argument of a pointwise call."""
        value = call.get(name)
        tensor = tensor_of(value)
        if tensor is None:
            return self.scalar(value)
        expression = self.express(value, broadcast_from(dims, shape_of(tensor)), call.node)
        self._symbols_read |= expression.free_symbols
        return expression

    def scalar(self, value: Any) -> sympy.Expr:
        """A number; a symbolic one (``SymInt``, ``SymFloat``) is a leaf without axes."""
        value = specialised(value)
        return self.leaf(value, ()) if isinstance(value, fx.Node) else number(value)

    def _product(self, call: Call, dims: Dims) -> sympy.Expr:
        product = contraction.read(self, call, dims)
        if product is None:
            return self.leaf(call.node, dims)
        symbol = self.leaf(call.node, dims, contraction_=product)
        expression = product.coefficient * symbol
        if product.addend is not None:
            added, added_dims, weight = product.addend
            expression = expression + weight * self.express(added, added_dims, call.node)
        return expression

    def _special_leaf(self, call: Call, dims: Dims) -> sympy.Expr:
        if call.name == "softmax":
            return self.leaf(call.node, dims, kind="softmax")
        return self._product(call, dims)

    def leaf(
        self,
        node: fx.Node,
        dims: Dims,
        kind: str = "tensor",
        contraction_: contraction.Contraction | None = None,
    ) -> sympy.Symbol:
        """The symbol of a tensor that is not read any further."""
        known = self._symbols.setdefault(node, [])
        for symbol in known:  # an axis may have been cut since, so dims are compared as they are now
            if resolve(self.leaves[symbol].dims) == resolve(dims):
                return symbol
        tensor = tensor_of(node)
        is_boolean = tensor is not None and tensor.dtype == torch.bool
        name = f"{'m' if is_boolean else 'x'}{len(self.leaves)}"
        symbol = sympy.Symbol(name, real=True, integer=is_boolean or None)  # an integer leaf is an indicator
        known.append(symbol)
        self.leaves[symbol] = Leaf(node, dims, kind, contraction_)
        return symbol


def number(value: Any) -> sympy.Expr:
    """A Python number as a sympy one, infinities as :data:`INFINITY`.

    Raises:
        LayoutError: it is no number.
    """
    plain = _number(value)
    if plain is None:
        raise LayoutError(f"no reading for the constant {value!r}")
    if isinstance(plain, float) and math.isinf(plain):
        return INFINITY if plain > 0 else -INFINITY
    return tidy(sympy.sympify(plain))


def _overflowed(constant: sympy.Expr, dtype: torch.dtype) -> sympy.Expr:
    """A number, chosen by indicators, as ``dtype`` holds it."""
    flags = indicators(constant)
    if flags:
        on, off = (_overflowed(constant.xreplace({flags[0]: value}), dtype) for value in (sympy.S.One, sympy.S.Zero))
        return reduce_indicators(flags[0] * on + (1 - flags[0]) * off)
    if constant.has(INFINITY) or not constant.is_number:
        return constant
    return number(_rounded(float(constant), dtype))


def specialised(value: Any) -> Any:
    """A Python float of the model (symbolic under ``dynamic=True``) as a number, under a guard of Dynamo's.

    Numbers computed from symbolic sizes stay symbolic.
    """
    known = value_of(value)
    if not isinstance(known, torch.SymFloat):
        return value
    is_plain = all(symbol_is_type(symbol, SymT.FLOAT) for symbol in known.node.expr.free_symbols)
    return float(known) if is_plain else value


def tidy(expression: sympy.Expr) -> sympy.Expr:
    """The expression with every float that is a whole number as an integer (sympy holds ``1.0 != 1``)."""
    whole = {
        x: sympy.Integer(int(x)) for x in expression.atoms(sympy.Float) if abs(x) < _EXACT and x == sympy.Float(int(x))
    }
    return expression.xreplace(whole) if whole else expression


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (int, float)) and not (isinstance(value, float) and math.isnan(value)) else None


def is_indicator(expression: sympy.Expr) -> bool:
    """Whether an expression takes only the values 0 and 1."""
    if expression in (sympy.S.Zero, sympy.S.One):
        return True
    if isinstance(expression, sympy.Symbol):
        return bool(expression.is_integer)
    symbols = expression.free_symbols
    if not symbols or not all(symbol.is_integer for symbol in symbols) or len(symbols) > 6:
        return False
    return all(value in (0, 1) for value in _truth_values(expression, sorted(symbols, key=str)))


def _truth_values(expression: sympy.Expr, symbols: list[sympy.Symbol]) -> list[sympy.Expr]:
    if not symbols:
        return [expression]
    head, *tail = symbols
    return _truth_values(expression.subs(head, 0), tail) + _truth_values(expression.subs(head, 1), tail)


def indicators(expression: sympy.Expr) -> list[sympy.Symbol]:
    """The boolean leaves of an expression, in the order in which they were found."""
    return sorted((s for s in expression.free_symbols if s.is_integer and s.is_Symbol), key=lambda s: int(s.name[1:]))


def reduce_indicators(expression: sympy.Expr) -> sympy.Expr:
    """Expand, with ``m**n`` as ``m`` for every boolean leaf."""
    expanded = tidy(sympy.expand(expression))
    powers = {
        power: power.base for power in expanded.atoms(sympy.Pow) if power.base.is_Symbol and power.base.is_integer
    }
    powers = {power: base for power, base in powers.items() if power.exp.is_positive}
    return tidy(sympy.expand(expanded.xreplace(powers))) if powers else expanded


# ---- the meaning of pointwise operations: one line each ------------------------------------------------------------

Rule = Callable[[Region, Call, Dims], "sympy.Expr | None"]


def _unary(function: Callable[[sympy.Expr], sympy.Expr]) -> Rule:
    return lambda region, call, dims: function(region.operand(call, "input", dims))


def _binary(function: Callable[[sympy.Expr, sympy.Expr], sympy.Expr], *names: str) -> Rule:
    first, second = names or ("input", "other")
    return lambda region, call, dims: function(region.operand(call, first, dims), region.operand(call, second, dims))


def _add(sign: int) -> Rule:
    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        if _is_boolean(call):
            first, second = (region.operand(call, name, dims) for name in ("input", "other"))
            return (
                first + second - first * second if sign > 0 and is_indicator(first) and is_indicator(second) else None
            )
        alpha = region.scalar(call.get("alpha", 1))
        return region.operand(call, "input", dims) + sign * alpha * region.operand(call, "other", dims)

    return rule


def _rsub(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    return region.operand(call, "other", dims) - region.scalar(call.get("alpha", 1)) * region.operand(
        call, "input", dims
    )


def _mul(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    first, second = region.operand(call, "input", dims), region.operand(call, "other", dims)
    region.multiplies_masks |= any(bool(factor.free_symbols) and is_indicator(factor) for factor in (first, second))
    return first * second


def _div(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    if call.get("rounding_mode") is not None or not _is_floating(call):
        return None
    return region.operand(call, "input", dims) / region.operand(call, "other", dims)


def _select(region: Region, condition: sympy.Expr, chosen: sympy.Expr, otherwise: sympy.Expr) -> sympy.Expr | None:
    if not is_indicator(condition):
        return None
    leaves = [region.leaves.get(symbol) for part in (chosen, otherwise) for symbol in part.free_symbols]
    if any(leaf is not None and leaf.contraction is not None for leaf in leaves):
        region.selecting |= condition.free_symbols
    return condition * chosen + (1 - condition) * otherwise


def _where(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    if call.get("input") is None or call.get("other") is None:
        return None
    parts = (region.operand(call, name, dims) for name in ("condition", "input", "other"))
    return _select(region, *parts)


def _masked_fill(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    mask, value, kept = (region.operand(call, name, dims) for name in ("mask", "value", "input"))
    return _select(region, mask, value, kept)


def _dropout(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    inner = region.operand(call, "input", dims)
    p = specialised(call.get("p", 0.5))
    return inner if not call.get("training", True) or p == 0 else DROPOUT(inner, sympy.Float(p))


def _addcmul(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    product = region.operand(call, "tensor1", dims) * region.operand(call, "tensor2", dims)
    return region.operand(call, "input", dims) + region.scalar(call.get("value", 1)) * product


def _lerp(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    start, end, weight = (region.operand(call, name, dims) for name in ("input", "end", "weight"))
    return start + weight * (end - start)


def _nan_to_num(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    if call.get("nan") not in (None, 0, 0.0):
        return None
    return NAN_TO_NUM(region.operand(call, "input", dims))


def _floored(parameter: str) -> Rule:
    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        bound = call.get(parameter)
        constant = _number(bound)
        if isinstance(bound, fx.Node):
            source = region.effects.calls.get(bound)
            constant = None if source is None else constant_value(source)
        if constant is None or constant > _BOTTOM or call.get("max") is not None:
            return None
        return FLOORED(region.operand(call, "input", dims))

    return rule


def _logic(function: Callable[..., sympy.Expr], arity: int) -> Rule:
    """Boolean algebra over indicators; anything else (integers) has no reading."""
    names = ("input", "#1")[:arity]

    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        if not _is_boolean(call):
            return None
        arguments = (
            call
            if "other" not in call.arguments
            else Call(call.name, call.node, {**call.arguments, "#1": call.get("other")})
        )
        operands = [region.operand(arguments, name, dims) for name in names]
        return function(*operands) if all(is_indicator(operand) for operand in operands) else None

    return rule


def _compare(is_equal: bool) -> Rule:
    """``mask == 0`` and ``mask != 0`` for a mask of zeros and ones; other comparisons are leaves."""

    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        value = _number(call.get("other", call.arguments.get("#1")))
        if value not in (0, 1):
            return None
        mask = region.operand(call, "input", dims)
        if not is_indicator(mask):
            return None
        return mask if (value == 1) == is_equal else 1 - mask

    return rule


def _is_floating(call: Call) -> bool:
    tensor = tensor_of(call.node)
    return tensor is not None and tensor.is_floating_point()


def _is_boolean(call: Call) -> bool:
    tensor = tensor_of(call.node)
    return tensor is not None and tensor.dtype == torch.bool


_POINTWISE: Mapping[str, Rule] = {
    "add": _add(1),
    "sub": _add(-1),
    "rsub": _rsub,
    "mul": _mul,
    "div": _div,
    "neg": _unary(lambda a: -a),
    "pow": _binary(lambda a, b: a**b, "input", "exponent"),
    "square": _unary(lambda a: a**2),
    "sqrt": _unary(sympy.sqrt),
    "rsqrt": _unary(lambda a: a ** sympy.Rational(-1, 2)),
    "reciprocal": _unary(lambda a: 1 / a),
    "exp": _unary(sympy.exp),
    "exp2": _unary(lambda a: sympy.exp(a * math.log(2.0))),
    "log": _unary(sympy.log),
    "tanh": _unary(sympy.tanh),
    "addcmul": _addcmul,
    "lerp": _lerp,
    "where": _where,
    "masked_fill": _masked_fill,
    "nan_to_num": _nan_to_num,
    "dropout": _dropout,
    "max": _floored("dim"),
    "maximum": _floored("other"),
    "clamp": _floored("min"),
    "clamp_min": _floored("min"),
    "not": _logic(lambda a: 1 - a, 1),
    "and": _logic(lambda a, b: a * b, 2),
    "or": _logic(lambda a, b: a + b - a * b, 2),
    "eq": _compare(is_equal=True),
    "ne": _compare(is_equal=False),
}

_REDUCTIONS: Mapping[str, str] = {"sum": "sum", "amax": "amax", "logsumexp": "logsumexp"}
_NORMALISING = frozenset({"softmax", "log_softmax", "logsumexp"})
_THROUGH = frozenset({"sum", "amax", "max", "cat", "getitem", "narrow", "detach"})

#: What makes a value worth reading rather than taking as a leaf.
ANCHORS = contraction.PRODUCTS | _NORMALISING
_CASTS = frozenset(
    {"to", "float", "half", "bfloat16", "double", "type_as", "type", "bool", "_to_copy", "convert_element_type"}
)
_CONSTANTS: Mapping[str, float | None] = {
    "tensor": None,
    "scalar_tensor": None,
    "full": None,
    "full_like": None,
    "new_full": None,
    "new_tensor": None,
    "zeros": 0.0,
    "zeros_like": 0.0,
    "new_zeros": 0.0,
    "ones": 1.0,
    "ones_like": 1.0,
    "new_ones": 1.0,
}


def is_cast(call: Call) -> bool:
    """Whether the call changes the dtype only (or nothing)."""
    if call.name not in _CASTS:
        return False
    source, result = tensor_of(call.input), tensor_of(call.node)
    if source is None or result is None or source.device != result.device:
        return False
    return result.is_floating_point() or result.dtype == torch.bool


def _narrows(call: Call) -> bool:
    """Whether a cast goes to a dtype of smaller range."""
    kinds = [tensor_of(node).dtype for node in (call.input, call.node)]  # type: ignore[union-attr]
    return all(kind.is_floating_point for kind in kinds) and torch.finfo(kinds[1]).max < torch.finfo(kinds[0]).max


def is_pointwise(call: Call) -> bool:
    """Whether the call has a reading as a pointwise operation, or is a cast."""
    return call.name in _POINTWISE or call.name in _CASTS


def _is_transparent(call: Call) -> bool:
    return is_cast(call) or layout.rearranges(call)


def is_constant(call: Call) -> bool:
    """Whether the call makes a tensor that is filled with one number (or with nothing in particular)."""
    return call.name in ("empty", "empty_like", "new_empty") or constant_value(call) is not None


def constant_value(call: Call) -> int | float | None:
    """The value of a tensor that is filled with one number, None for others."""
    if call.name not in _CONSTANTS or tensor_of(call.node) is None:
        return None
    filled = _CONSTANTS[call.name]
    value = filled if filled is not None else _fill_value(call)
    return None if value is None else _rounded(value, tensor_of(call.node).dtype)  # type: ignore[union-attr]


def _rounded(value: float, dtype: torch.dtype) -> int | float:
    """The number as ``dtype`` holds it, where that is another value and not just fewer digits."""
    if dtype.is_floating_point and abs(value) <= torch.finfo(dtype).max:
        return value
    held: int | float = torch.tensor(value, dtype=torch.float64).to(dtype).item()
    return held


def _fill_value(call: Call) -> int | float | None:
    if "fill_value" in call.arguments:
        return _number(call.get("fill_value"))
    position = {"full": "#1", "full_like": "#1", "new_full": "#2", "new_tensor": "#1"}.get(call.name, "input")
    value = call.arguments.get(position, call.get("data") if call.name == "tensor" else None)
    return _number(value)


def _is_max_values(effects: Effects, call: Call) -> bool:
    """``x.max(dim)[0]``: the values of a maximum over a dimension."""
    source = effects.calls.get(call.input) if isinstance(call.input, fx.Node) else None
    return (
        source is not None and source.name == "max" and source.get("dim") is not None and call.arguments.get("#1") == 0
    )


__all__ = [
    "DROPOUT",
    "FLOORED",
    "INFINITY",
    "NAN_TO_NUM",
    "Leaf",
    "MutatedError",
    "Region",
    "constant_value",
    "indicators",
    "is_cast",
    "is_constant",
    "is_indicator",
    "is_pointwise",
    "number",
    "reduce_indicators",
    "tidy",
]
