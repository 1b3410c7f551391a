"""Values as sums of products in index notation: which tensors are multiplied, along which axes, and what is summed over.

``U((Vh x) * delta)`` is the product of four tensors, summed over the axes that the result lacks. Association and order of
the factors, layouts and the calls that multiply do not show; a detached tensor is another symbol than the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
from torch import fx

from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Dims, LayoutError, axes_of
from lz_compile.passes.formula.expressions import DROPOUT, reduce_indicators
from lz_compile.passes.formula.pointwise import Rule
from lz_compile.passes.graph.view import Call, tensor_of

#: The kind of a leaf through which no gradient flows.
DETACHED = "detached"
_MOST_READ, _MOST_TERMS, _MOST_FACTORS = 400, 16, 10


@dataclass(frozen=True)
class Term:
    """A number times a product of leaves."""

    coefficient: float
    symbols: tuple[sympy.Symbol, ...]


@dataclass
class Products(Region):
    """A region that reads through products of tensors. ``records`` says whether gradients are wanted at all."""

    records: bool = True
    products: list[fx.Node] = field(default_factory=list)
    dropped: set[fx.Node] = field(default_factory=set)
    _read: int = 0

    def express(self, node: object, dims: Dims, reader: fx.Node | None = None) -> sympy.Expr:
        """As of every region, within limits."""
        self._read += 1
        if self._read > _MOST_READ:
            raise LayoutError("too large to be a few products")
        return super().express(node, dims, reader)

    def _express_call(self, call: Call, dims: Dims) -> sympy.Expr:
        expression = super()._express_call(call, dims)
        if call.name == "dropout" and expression.has(DROPOUT):
            self.dropped |= {self.leaves[symbol].node for symbol in expression.free_symbols & self.leaves.keys()}
        return expression

    def _product(self, call: Call, dims: Dims) -> sympy.Expr:
        if call.name == "einsum":
            return self._einsum(call, dims)
        found = contraction.read(self, call, dims)
        if found is None:
            return self.leaf(call.node, dims)
        left, right = (self.express(each.node, each.dims, call.node) for each in (found.left, found.right))
        expression = found.coefficient * left * right
        if found.addend is not None:
            added, added_dims, weight = found.addend
            expression += weight * self.express(added, added_dims, call.node)
        return self._made(call, dims, expression)

    def _einsum(self, call: Call, dims: Dims) -> sympy.Expr:
        """A sum of products of any number of tensors."""
        found = contraction.factors(call, dims)
        if found is None or not found.is_plain:
            return self.leaf(call.node, dims)
        factors = (self.express(node, own, call.node) for node, own in found.factors)
        return self._made(call, dims, sympy.Mul(*factors))

    def _made(self, call: Call, dims: Dims, expression: sympy.Expr) -> sympy.Expr:
        self.interior.setdefault(call.node, dims)
        self.products.append(call.node)
        return expression

    def detached(self, symbol: sympy.Symbol) -> sympy.Symbol:
        """The symbol of a leaf's value without its gradient; the same where it has none."""
        leaf = self.leaves[symbol]
        tensor = tensor_of(leaf.node)
        if not self.records or leaf.kind == DETACHED or tensor is None or not tensor.requires_grad:
            return symbol
        other = sympy.Symbol(f"{symbol.name}_detached", real=True)
        self.leaves.setdefault(other, Leaf(leaf.node, leaf.dims, DETACHED))
        return other

    def wants_grad(self, symbol: sympy.Symbol) -> bool:
        """Whether a gradient flows to a leaf, or would if it were not detached."""
        tensor = tensor_of(self.leaves[symbol].node)
        return self.records and tensor is not None and tensor.requires_grad

    def drops(self, source: fx.Node) -> bool:
        """Whether the source was read after dropout."""
        return source in self.dropped

    def terms(self, expression: sympy.Expr) -> list[Term] | None:
        """An expression as a sum of products of leaves; None where it is no short one."""
        found = []
        for summand in sympy.Add.make_args(reduce_indicators(expression)):
            number, rest = summand.as_coeff_Mul()
            factors = [] if rest == 1 else [each for part in sympy.Mul.make_args(rest) for each in _repeated(part)]
            if len(factors) > _MOST_FACTORS or not all(each in self.leaves for each in factors):
                return None
            found.append(Term(float(number), tuple(factors)))
        return found if len(found) <= _MOST_TERMS else None


def _repeated(factor: sympy.Expr) -> list[sympy.Expr]:
    """A power as so many factors."""
    base, exponent = factor.as_base_exp()
    return [base] * int(exponent) if exponent.is_Integer and exponent > 0 else [factor]


def _detach(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    assert isinstance(region, Products), "only products know detached leaves"
    expression = region.express(call.input, dims, call.node)
    named: Mapping[sympy.Symbol, sympy.Symbol] = {
        symbol: region.detached(symbol) for symbol in expression.free_symbols & region.leaves.keys()
    }
    return expression.xreplace(dict(named))


def _diagonal(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    """A vector as a matrix: both of its dimensions are the same axis."""
    tensor, row, column = tensor_of(call.input), axes_of(dims[-2:-1]), axes_of(dims[-1:])
    is_plain = tensor is not None and tensor.dim() == 1 and set(call.arguments) == {"input"}
    if not is_plain or len(row) != 1 or len(column) != 1:
        return None
    if row[0] is not column[0]:
        column[0].parts = row
    return region.express(call.input, (row,), call.node)


#: What is read besides arithmetic.
FUNCTIONS: Mapping[str, Rule] = {"detach": _detach, "diag": _diagonal, "diag_embed": _diagonal}
