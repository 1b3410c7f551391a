"""Values as sums of products in index notation: which tensors are multiplied, along which axes, and what is summed over.

``U((Vh x) * delta)`` is the product of four tensors, summed over the axes that the result lacks. Association and order of
the factors, layouts and the calls that multiply do not show; a detached tensor is another symbol than the tensor.

Of sums in which two adapters may meet, the summands are read, too: one walk over the graph counts, for every value, how many
products of tensors lie behind it without anything that bends in between. A low-rank adapter has two; a sum of two such is
worth reading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Dims, LayoutError, axes_of
from lz_compile.passes.formula.expressions import DROPOUT, is_cast, reduce_indicators
from lz_compile.passes.formula.pointwise import Rule
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import EMITTED, Call, reached, tensor_of, tensor_operands

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
            self.dropped |= {leaf.node for leaf in self.leaves_in(expression).values()}
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
    return expression.xreplace({symbol: region.detached(symbol) for symbol in region.leaves_in(expression)})


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
_SUMS = frozenset({"add", "sub", "rsub"})
#: Products that add a further tensor.
_ADDING = frozenset({"addmm", "baddbmm", "addcmul"})
_LINEAR = _SUMS | {"neg", "mul", "div", "addcmul", "where", "masked_fill", "detach", "dropout", "diag", "diag_embed"}
_MULTIPLYING = contraction.PRODUCTS | {"mul", "div", "addcmul", "diag", "diag_embed"}
#: An adapter has this many products one after the other.
DEEP = 2
_DEEPEST, _NODES, _SUMMANDS, _INPUTS = 3, 64, 12, 16


@dataclass
class Summands:
    """Sums of one graph; ``depth`` is the number of products behind a value, ``size`` that of the operations."""

    effects: Effects
    depth: dict[fx.Node, int] = field(default_factory=dict)
    size: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        region = Region(self.effects)
        for node, call in self.effects.calls.items():
            if call is None or tensor_of(node) is None or EMITTED in node.meta:
                continue
            factors = _factors(region, call)
            if not factors and not self.is_linear(call):
                continue
            inner = [self.effects.current(each, node) for each in tensor_operands(node)]
            below = max((self.depth.get(each, 0) for each in inner), default=0)
            self.depth[node] = min(below + max(factors - 1, 0), _DEEPEST)
            self.size[node] = min(1 + sum(self.size.get(each, 0) for each in inner), _NODES)

    def is_linear(self, call: Call) -> bool:
        """Whether a call adds, multiplies, casts or rearranges."""
        return call.name in _LINEAR or is_cast(call) or layout.rearranges(call)

    def is_sum(self, node: fx.Node) -> bool:
        """Whether a value is a sum of tensors."""
        call, tensor = self.effects.calls.get(node), tensor_of(node)
        if call is None or tensor is None or EMITTED in node.meta or not tensor.is_floating_point():
            return False
        return call.name in _ADDING or (call.name in _SUMS and len(tensor_operands(node)) > 1)

    def deep(self, anchor: fx.Node) -> list[fx.Node]:
        """The summands that may be adapters; what is a sum itself, and read by others, is a residual stream."""
        return [
            node
            for node in self.of(anchor)[0]
            if self.depth.get(node, 0) >= DEEP and not (self.effects.name(node) in _SUMS and self.is_sum(node))
        ]

    def of(self, anchor: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """The summands of a sum, and the sums that it is made of, itself first; what others read too is a summand."""
        sums, found, queue = [anchor], list[fx.Node](), [anchor]
        while queue and len(found) < _SUMMANDS:
            node = queue.pop(0)
            for operand in self._added(node, found):
                inner = self.effects.current(operand, node)
                if self._goes_on(inner):
                    queue.append(inner)
                    sums.append(inner)
                elif inner not in found:
                    found.append(inner)
        return found, sums

    def addend(self, node: fx.Node) -> fx.Node | None:
        """What a product is added to by the same call."""
        call = self.effects.calls[node]
        if call is None or call.name not in _ADDING or not isinstance(call.input, fx.Node):
            return None
        return self.effects.current(call.input, node)

    def _added(self, node: fx.Node, found: list[fx.Node]) -> list[fx.Node]:
        call = self.effects.calls[node]
        assert call is not None, "a sum is a call"
        if call.name in _ADDING:
            found.append(node)  # its product is one of the summands
            return [call.input] if isinstance(call.input, fx.Node) else []
        return tensor_operands(node)

    def _goes_on(self, node: fx.Node) -> bool:
        """Whether a summand is a sum itself, or one that is scaled, cast or rearranged, for this sum alone."""
        call = self.effects.calls.get(node)
        if call is None or EMITTED in node.meta or len(node.users) != 1:
            return False
        operands = tensor_operands(node)
        if call.name in _SUMS:
            return bool(operands)
        is_scaled = call.name in ("mul", "div") and len(operands) == 1
        is_moved = call.name == "neg" or is_cast(call) or layout.rearranges(call)
        is_above = len(operands) == 1 and (self.is_sum(operands[0]) or self._goes_on(operands[0]))
        return call.name in _ADDING or ((is_scaled or is_moved) and is_above)

    def inputs(self, summands: list[fx.Node]) -> Iterator[fx.Node]:
        """What at least two of the deep summands are computed from: that of most of them first, and of it the last."""
        counts: Counter[fx.Node] = Counter()
        for summand in summands:
            counts.update(self.behind(summand))
        shared = [node for node, count in counts.items() if count > 1 and self._may_be_input(node)]
        shared.sort(key=lambda node: (counts[node], self.effects.position[node]), reverse=True)
        yield from dict.fromkeys(map(self._source, shared[:_INPUTS]))

    def behind(self, node: fx.Node) -> set[fx.Node]:
        """What a value is computed from without bending, as far as it is near."""

        def inner(reader: fx.Node) -> Iterator[fx.Node]:
            return (self.effects.current(each, reader) for each in tensor_operands(reader) if reader in self.depth)

        return {*reached(inner(node), inner, _NODES)}

    def is_scaled(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether a vector is multiplied in on the way from ``source``, as far as that is near."""

        def inner(reader: fx.Node) -> list[fx.Node]:
            call = self.effects.calls[reader]
            given = [] if call is None or reader is source or reader not in self.depth else _multiplied(call)
            return [self.effects.current(each, reader) for each in given]

        products = (each for each in reached([node], inner, _NODES) if self.effects.name(each) in _MULTIPLYING)
        return any(_is_vector(each) for product in products for each in inner(product))

    def _may_be_input(self, node: fx.Node) -> bool:
        tensor = tensor_of(node)
        return tensor is not None and tensor.is_floating_point() and tensor.dim() > 1

    def _source(self, node: fx.Node) -> fx.Node:
        """What a value is a rearrangement or a cast of."""
        call = self.effects.calls.get(node)
        while call is not None and isinstance(call.input, fx.Node) and not call.is_inplace:
            is_moved = is_cast(call) or layout.rearranges(call) or call.name == "detach"
            if not is_moved or tensor_of(call.input) is None or node not in self.depth:
                break
            node = call.input
            call = self.effects.calls.get(node)
        return node


def _multiplied(call: Call) -> list[fx.Node]:
    """The tensors that a call reads, without those that a product adds."""
    added = call.get("bias") if call.name == "linear" else call.input if call.name in _ADDING else None
    return [each for each in tensor_operands(call.node) if each is not added]


def _is_vector(node: fx.Node) -> bool:
    """Whether a value has one dimension only, apart from those of size one."""
    tensor = tensor_of(node)
    return tensor is not None and sum(size != 1 for size in shape_of(tensor)) == 1


def _factors(region: Region, call: Call) -> int:
    """How many tensors a call multiplies and sums over; none where it is no product."""
    if call.name == "einsum":
        return len(tensor_operands(call.node))
    if call.name in contraction.PRODUCTS or (call.name == "sum" and contraction.is_product_sum(region, call)):
        return 2
    return 0
