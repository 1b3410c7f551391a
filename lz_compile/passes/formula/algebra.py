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
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import sympy.tensor.tensor  # sympy's first addition imports it: that is no part of a compile
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, broadcast_from, resolve
from lz_compile.passes.formula.expressions import (
    FLOORED,
    constant_value,
    is_cast,
    is_constant,
    is_indicator,
    narrows,
    number,
    overflowed,
    reduce_indicators,
    specialised,
)
from lz_compile.passes.formula.pointwise import POINTWISE, Rule, is_exponential
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, told
from lz_compile.passes.graph.view import Call, reached, tensor_of

#: Of an expression; what is larger is a leaf, so that no graph takes exponential time. A bound by judgement, not measured.
MOST_PARTS = 2000


@dataclass(frozen=True)
class Leaf:
    """A tensor (or symbolic number) at the edge of a region, with the axes of its dimensions.

    ``contraction`` is set where the leaf is a sum of products, ``kind`` names the reduction or normalisation that made
    it (``"softmax"``, ``"sum"``, ``"amax"``, ``"logsumexp"``), ``"large"`` what is read no further because its expression has
    more than :data:`MOST_PARTS` parts; ``"tensor"`` otherwise.
    """

    node: fx.Node
    dims: Dims
    kind: str = "tensor"
    contraction: contraction.Contraction | None = None

    @property
    def axes(self) -> frozenset[Axis]:
        """Everything that the leaf depends on."""
        return frozenset(axis for dim in self.dims for axis in atoms(dim))


@dataclass(frozen=True)
class Facts:
    """Of an expression: the leaves and numbers in it, and how many ``parts`` it has once it is multiplied out.

    Where it is larger as it is, those count; nothing is counted beyond :data:`MOST_PARTS`.
    """

    parts: int
    symbols: frozenset[sympy.Basic]
    numbers: frozenset[sympy.Basic]

    @classmethod
    def of(cls, expression: sympy.Basic, inner: Sequence[Facts]) -> Facts:
        """Those of an expression of whose arguments they are known."""
        parts = max(sum(each.parts for each in inner), 1)
        if isinstance(expression, sympy.Mul):
            parts = max(parts, math.prod(each.parts for each in inner))
        elif isinstance(expression, sympy.Pow) and expression.exp.is_Integer:
            power = min(abs(int(expression.exp)), MOST_PARTS)
            parts = max(parts, math.comb(inner[0].parts + power - 1, power))
        symbols = frozenset({expression} if isinstance(expression, sympy.Symbol) else ()).union(
            *(each.symbols for each in inner)
        )
        numbers = frozenset({expression} if isinstance(expression, sympy.Number) else ()).union(
            *(each.numbers for each in inner)
        )
        return cls(min(parts, MOST_PARTS + 1), symbols, numbers)


_NORMALISING = frozenset({"softmax", "log_softmax", "logsumexp"})
#: What makes a value worth reading rather than taking as a leaf.
ANCHORS = contraction.PRODUCTS | _NORMALISING


@dataclass
class Region:
    """Expressions over one graph, its leaves by symbol, and every node that was read through with its axes.

    ``readers`` holds the first node that reads each value. ``expand_masks`` reads values that hold no contraction, too,
    which are leaves otherwise, unless one of the ``anchors`` is in them. ``multiplies_masks`` is
    set where a mask is applied as a factor, so that an infinite value behind it would be NaN. ``selecting`` has the masks by
    which products are selected, so that what is dropped does not matter even where it is NaN, ``narrowed`` holds the leaves
    of what was cast to a dtype of smaller range. ``stops`` are leaves whatever they are, ``functions`` read further calls.
    ``flag`` gives for floating-point leaves that hold 0 and 1 alone, and so are indicators, too, the buffers that say so.
    """

    effects: Effects
    leaves: dict[sympy.Symbol, Leaf] = field(default_factory=dict)
    interior: dict[fx.Node, Dims] = field(default_factory=dict)
    readers: dict[fx.Node, fx.Node] = field(default_factory=dict)
    expand_masks: bool = False
    anchors: frozenset[str] = ANCHORS
    multiplies_masks: bool = False
    selecting: set[sympy.Symbol] = field(default_factory=set)
    narrowed: set[sympy.Symbol] = field(default_factory=set)
    stops: Container[fx.Node] = frozenset()
    most_parts: int = MOST_PARTS
    functions: Mapping[str, Rule] = field(default_factory=dict)
    flag: Callable[[fx.Node], tuple[fx.Node, ...] | None] = lambda _: None
    #: What the operands of the call that is being read are made of.
    _symbols_read: set[sympy.Symbol] = field(default_factory=set)
    _symbols: dict[fx.Node, list[sympy.Symbol]] = field(default_factory=dict)
    #: By node, and its axes as they were cut by then.
    _known: dict[tuple[fx.Node, Dims], sympy.Expr] = field(default_factory=dict)
    _facts: dict[sympy.Basic, Facts] = field(default_factory=dict)
    #: The first node of each number that was met.
    _met: dict[int, fx.Node] = field(default_factory=dict)

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
        self._meet(node)
        call = self.effects.calls[node]
        if call is None or node in self.stops or (reader is not None and self.effects.is_opaque(node, reader)):
            return self.leaf(node, dims)
        constant = constant_value(call)
        if constant is not None:
            self.interior.setdefault(node, dims)
            return number(constant)
        if call.is_inplace and self.effects.calls[self.effects.owner(node)] is None:
            return self.leaf(node, dims)  # it writes into an input of the graph
        if not self.reaches(node, self.anchors) and (
            self.effects.stops_gradient(node, reader) or not self._is_read(node)
        ):
            return self.leaf(node, dims)
        key = node, resolve(dims)
        if key not in self._known:  # what is read twice by each step would be read 2 ** steps times
            expression = self._express_call(call, dims)
            is_large = self.facts(expression).parts > self.most_parts
            self._known[key] = self.leaf(node, dims, kind="large") if is_large else expression
        return self._known[key]

    def facts(self, expression: sympy.Basic) -> Facts:
        """What is known of an expression: of parts that it shares with others, it is found out once."""
        if expression not in self._facts:
            self._facts[expression] = Facts.of(expression, [self.facts(each) for each in expression.args])
        return self._facts[expression]

    def leaves_in(self, *expressions: sympy.Expr) -> dict[sympy.Symbol, Leaf]:
        """The leaves that some expressions are made of, by symbol."""
        symbols = {symbol for each in expressions for symbol in each.free_symbols} & self.leaves.keys()
        return {symbol: self.leaves[symbol] for symbol in sorted(symbols, key=str)}

    def told(self, expression: sympy.Expr) -> str:
        """An expression as reasons call what it is made of."""
        leaves = self.leaves_in(expression).items()
        return str(expression.xreplace({symbol: sympy.Symbol(told(leaf.node)) for symbol, leaf in leaves}))

    def axes_in(self, *expressions: sympy.Expr) -> frozenset[Axis]:
        """Everything that some expressions depend on."""
        return frozenset(axis for leaf in self.leaves_in(*expressions).values() for axis in leaf.axes)

    def _is_read(self, node: fx.Node) -> bool:
        return self.expand_masks or self._is_constant(node)

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a scalar tensor is computed from numbers alone, as ``torch.sqrt(torch.tensor(64.0))`` is."""
        call, tensor = self.effects.calls[node], tensor_of(node)
        if call is None or tensor is None or tensor.dim() or call.is_inplace:
            return False
        inputs = node.all_input_nodes if call.name in POINTWISE or is_cast(call) else ()
        return is_constant(call) or (bool(inputs) and all(map(self._is_constant, inputs)))

    def seen_by(self, reader: fx.Node, node: fx.Node) -> fx.Node:
        """The value of ``node`` that ``reader`` sees; remembered, because nothing may overwrite it after that."""
        node = self.effects.current(node, reader)
        if self.effects.is_opaque(node, reader) and self.reaches(node, ANCHORS):
            raise MutatedError(node)
        earliest = self.readers.get(node)
        if earliest is None or self.effects.position[reader] < self.effects.position[earliest]:
            self.readers[node] = reader
        return node

    def reaches(self, node: fx.Node, goal: frozenset[str], reader: fx.Node | None = None) -> bool:
        """Whether a call named in ``goal`` is found behind pointwise and layout operations only, as ``reader`` sees it."""
        node = node if reader is None else self.effects.current(node, reader)
        return self.effects.reaches(node, goal, lambda: self._search(node, goal))

    def _search(self, node: fx.Node, goal: frozenset[str]) -> bool:
        call = self.effects.calls.get(node)
        if call is None or (tensor_of(node) is None and call.name not in goal):
            return False
        if call.name in goal or ("matmul" in goal and self._is_contracted(call)):
            return True
        if "exp" in goal and is_exponential(call):
            return True
        if call.name not in POINTWISE and call.name not in _THROUGH and not _is_transparent(call):
            return False
        return any(self.reaches(operand, goal, node) for operand in node.all_input_nodes)

    def _is_contracted(self, call: Call) -> bool:
        """Whether a call that is no product by its name sums up products."""
        is_sum = call.name == "sum" and contraction.is_product_sum(self, call)
        return is_sum or contraction.is_distance(self.effects, call.node)

    def up_to(self, stops: Container[fx.Node]) -> Region:
        """Another region of the same graph, that is read down to some values."""
        return Region(self.effects, expand_masks=True, stops=stops)

    def _express_call(self, call: Call, dims: Dims) -> sympy.Expr:
        distance = contraction.read_distance(self, call, dims)
        if distance is not None:
            return self.leaf(call.node, dims, contraction_=distance)
        if call.name in contraction.PRODUCTS or (call.name == "sum" and contraction.is_product_sum(self, call)):
            return self._product(call, dims)
        if call.name == "log_softmax":
            return sympy.log(self.leaf(call.node, dims, kind="softmax"))
        if call.name == "softmax" or call.name in _REDUCTIONS:
            return self.leaf(call.node, dims, kind=call.name)
        if call.name == "getitem" and _is_max_values(self.effects, call):
            return self.leaf(call.node, dims, kind="amax")
        inner = self._transparent(call, dims)
        if inner is not None:
            return inner
        rule = self.functions.get(call.name) or POINTWISE.get(call.name)
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
            lost = set() if expression is None else self._symbols_read - self.facts(expression).symbols
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
        return self._cast(call, expression, call.node, dims)

    def scores_of(self, call: Call, dims: Dims) -> sympy.Expr:
        """What a softmax normalises: giving it a ``dtype`` casts that first."""
        return self._cast(call, self.express(call.input, dims, call.node), call.input, dims)

    def _cast(self, call: Call, expression: sympy.Expr, node: fx.Node, dims: Dims) -> sympy.Expr:
        """The expression of a node in the dtype of a call's result, or its leaf: a floor itself may become an infinity."""
        if narrows(call):
            if expression.has(FLOORED):
                return self.leaf(node, dims)
            whole = dict.fromkeys(expression.atoms(sympy.exp), sympy.S.One)  # probabilities: nothing large is left
            self.narrowed |= expression.xreplace(whole).free_symbols
        return self._held(call, expression)

    def _held(self, call: Call, expression: sympy.Expr) -> sympy.Expr:
        """The expression as the result's dtype holds it: constants beyond its range are infinities."""
        dtype = tensor_of(call.node).dtype  # type: ignore[union-attr]
        if not dtype.is_floating_point or not any(
            abs(x) > torch.finfo(dtype).max for x in self.facts(expression).numbers
        ):
            return expression
        expanded = reduce_indicators(expression)
        values = [symbol for symbol in expanded.free_symbols if not symbol.is_integer]
        constant, rest = expanded.as_independent(*values, as_Add=True) if values else (expanded, sympy.S.Zero)
        apart = {term.as_coeff_Mul()[1] for term in sympy.Add.make_args(rest)}
        added = [leaf.node for symbol, leaf in self.leaves_in(rest).items() if symbol in apart]
        is_less = any(self.reaches(node, frozenset({"amax", "max", "amin", "min"})) for node in added)
        held = constant if is_less else overflowed(constant, dtype)  # a row's maximum is as large
        return expression if held == constant else rest + held

    def operand(self, call: Call, name: str, dims: Dims) -> sympy.Expr:
        """The expression of a (broadcast) argument of a pointwise call.

        Raises:
            LayoutError: it is not given, or its layout has no exact form in axes.
        """
        value = call.get(name)
        if value is None:
            raise LayoutError(f"{call.name} is given no '{name}'")
        tensor = tensor_of(value)
        if tensor is None:
            return self.scalar(value)
        expression = self.express(value, broadcast_from(dims, shape_of(tensor)), call.node)
        self._symbols_read |= self.facts(expression).symbols
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

    def leaf(
        self, node: fx.Node, dims: Dims, kind: str = "tensor", contraction_: contraction.Contraction | None = None
    ) -> sympy.Symbol:
        """The symbol of a tensor that is not read any further."""
        known = self._symbols.setdefault(node, [])
        for symbol in known:  # an axis may have been cut since, so dims are compared as they are now
            if resolve(self.leaves[symbol].dims) == resolve(dims):
                return symbol
        tensor = tensor_of(node)
        if not known and self.effects.name(node) in _REDUCING:  # what is reduced may be in the formula, too
            for each in reached([node], self._behind_reduction, _FAR):
                self._meet(each)
        is_plain = kind == "tensor" and contraction_ is None
        is_boolean = tensor is not None and (tensor.dtype == torch.bool or (is_plain and self.flag(node) is not None))
        name = f"{'m' if is_boolean else 'x'}{len(self.leaves)}"
        symbol = sympy.Symbol(name, real=True, integer=is_boolean or None)  # an integer leaf is an indicator
        known.append(symbol)
        self.leaves[symbol] = Leaf(node, dims, kind, contraction_)
        return symbol

    def _meet(self, node: fx.Node) -> None:
        """Note where another node of equal value was met before."""
        number = self.effects.numbers.get(node)
        if number is not None and tensor_of(node) is not None and self._met.setdefault(number, node) is not node:
            self.effects.meet(node)

    def _behind_reduction(self, node: fx.Node) -> Sequence[fx.Node]:
        call = self.effects.calls.get(node)
        is_passed = call is not None and (call.name in POINTWISE or call.name in _REDUCING or _is_transparent(call))
        return node.all_input_nodes if is_passed else ()


_REDUCTIONS = frozenset({"sum", "amax", "logsumexp"})
_REDUCING = _REDUCTIONS | frozenset("max mean var std var_mean std_mean norm linalg_norm linalg_vector_norm".split())
#: How many nodes behind a reduction are looked at.
_FAR = 16
_THROUGH = frozenset({"sum", "amax", "max", "cat", "getitem", "narrow", "detach"})


def _is_transparent(call: Call) -> bool:
    return is_cast(call) or layout.rearranges(call)


def _is_max_values(effects: Effects, call: Call) -> bool:
    """``x.max(dim)[0]``: the values of a maximum over a dimension."""
    source = effects.calls.get(call.input)
    return (
        source is not None and source.name == "max" and source.get("dim") is not None and call.arguments.get("#1") == 0
    )
