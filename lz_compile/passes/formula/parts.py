"""Operations that cut features out of tensors and join them, read backwards: where a part of the result is in the input.

Complex numbers are pairs of features, so that ``view_as_complex(x) * table`` has the same reading as the products of its
parts: a complex tensor is ``real + I * imag``.

Products with matrices that turn pairs of features (2 x 2 for each pair) are sums of two products. Of larger matrices, the
values have to be known: what is zero in a constant matrix, or in a buffer under a guard, is no term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import Size, shape_of
from lz_compile.passes.formula import contraction, edge, layout, moves
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms
from lz_compile.passes.formula.contraction import Factor
from lz_compile.passes.formula.expressions import Known, Values, unknown
from lz_compile.passes.formula.layout import SPLITS, named_dim
from lz_compile.passes.formula.places import Fixed, affine, canonical, has_fixed_index, ordered, paired, placed
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.formula.polynomial import ZERO, Polynomial, Variable, number, variable
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import Call, tensor_of

#: Of a column: a pair has two.
_MOST_TERMS = 2


def may_turn(call: Call | None) -> bool:
    """Whether a call may be a product with a matrix that turns pairs, or with one for each pair."""
    if call is None or call.name not in contraction.PRODUCTS:
        return False
    tensors = [tensor_of(each) for each in call.node.all_input_nodes]
    is_small = all(tensor is None or 2 in shape_of(tensor)[-3:] for tensor in tensors)
    return is_small or any(map(_is_square, tensors))


def _is_square(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor may be matrices that turn pairs of features; what is trained is none."""
    if tensor is None or tensor.dim() < 2 or isinstance(tensor, torch.nn.Parameter):
        return False
    rows, columns = tensor.shape[-2:]
    return isinstance(rows, int) and isinstance(columns, int) and rows == columns and rows > 2 and rows % 2 == 0


def _turned(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    """The terms of a product with matrices that turn pairs, None where it is none.

    Raises:
        LayoutError: a layout has no exact form in places.
    """
    is_product = may_turn(call) or (call.name == "sum" and contraction.is_product_sum(region, call))
    found = contraction.read(region, call, dims) if is_product else None
    if found is None or len(found.summed) != 1 or found.addend is not None:
        return None
    (summed,), terms = found.summed, list[sympy.Expr]()
    if summed.size == 2:
        for place in (Fixed(2, 0), Fixed(2, 1)):
            factors = (_at(region, call, each, summed, (place,)) for each in (found.left, found.right))
            terms.append(sympy.Mul(*factors))
    else:
        pairs = ((found.left, found.right), (found.right, found.left))
        matrix, other = next((pair for pair in pairs if not region.depends(pair[0].node)), (None, None))
        parts = None if matrix is None else _sparse(region, matrix, summed)
        if parts is None or other is None:
            return None
        terms += [factor * _at(region, call, other, summed, place) for factor, place in parts]
    region.interior.setdefault(call.node, dims)
    return found.coefficient * sympy.Add(*terms)


def _at(region: Parts, call: Call, factor: Factor, axis: Axis, place: tuple[Axis, ...]) -> sympy.Expr:
    return region.express(factor.node, _placed(factor.dims, axis, place), call.node)


def _placed(dims: Dims, axis: Axis, place: tuple[Axis, ...]) -> Dims:
    return tuple(place if dim == (axis,) else dim for dim in dims)


def _sparse(region: Parts, matrix: Factor, summed: Axis) -> list[tuple[sympy.Expr, tuple[Axis, ...]]] | None:
    """What is not zero in a constant matrix, and the place that it is multiplied with: a term for each of them."""
    known, features = region.known(matrix.node), set(atoms(region.features))
    rows = [at for at, dim in enumerate(matrix.dims) if dim == (summed,)]
    columns = [at for at, dim in enumerate(matrix.dims) if features & {axis for axis, _ in affine(dim)[1]}]
    if isinstance(known, Reason) or len(rows) != 1 or len(columns) != 1:
        return None
    offset, terms = affine(matrix.dims[columns[0]])
    if len(terms) != 1:
        return None
    (axis, step), whole = terms[0], known.value.movedim((rows[0], columns[0]), (-2, -1))
    assert isinstance(axis.size, int), "extents of places are known"
    entries = whole[..., offset : offset + step * axis.size : step]
    at = [each.nonzero().flatten() for each in (entries != 0).reshape(-1, *entries.shape[-2:]).any(0).unbind(-1)]
    if len({len(each) for each in at}) != 1 or not 0 < len(at[0]) <= _MOST_TERMS:
        return None
    found = []
    for places in torch.stack(at, -1):
        start, stride = int(places[0]), int(places[1] - places[0]) if len(places) > 1 else 1
        counted = torch.arange(len(places))
        if stride < 1 or not torch.equal(places, start + stride * counted):
            return None
        place, own = placed(start, ((axis, stride),), entries.shape[-2]), entries[..., places, counted]
        is_number = bool((own == own.flatten()[0]).all())
        leaf = None if is_number else region.leaf(matrix.node, _placed(matrix.dims, summed, place))
        found.append((sympy.sympify(own.flatten()[0].item()) if leaf is None else leaf, place))
    region.matrices[matrix.node] = matrix.dims, known
    return found


@dataclass
class Edge(edge.Edge):
    """Where reading stops: at the source, and at what is not computed from it, unless that only rearranges."""

    def __contains__(self, node: object) -> bool:
        if not isinstance(node, fx.Node) or node is self.source:
            return True
        return not self.depends(node) and not _rearranges(self.effects.calls.get(node))


def _rearranges(call: Call | None) -> bool:
    return call is not None and (layout.rearranges(call) or call.name in FUNCTIONS or call.name == "neg")


def is_read(call: Call | None) -> bool:
    """Whether a call has a reading in parts."""
    is_named = call is not None and (is_pointwise(call) or _rearranges(call) or call.name in (*SPLITS, "sum"))
    return is_named or may_turn(call)


@dataclass
class Parts(Region):
    """A region that is read at parts of its tensors; only dimensions of ``features`` are cut.

    What is computed from the source is read through, which takes no more numbers of it than ``places``: ``source_symbols``.
    ``known`` gives the values of constants; ``matrices`` are those that were read for where they are zero, and indices.
    """

    features: list[Axis] = field(default_factory=list)
    places: int = 1
    counted: set[Polynomial] = field(default_factory=set)
    source_symbols: set[sympy.Symbol] = field(default_factory=set)
    _indices: dict[Axis, Polynomial] = field(default_factory=dict)
    known: Values = unknown
    matrices: dict[fx.Node, tuple[Dims, Known]] = field(default_factory=dict)

    def express(self, node: Any, dims: Dims, reader: fx.Node | None = None) -> sympy.Expr:
        """As of every region; what is not computed from the source is a leaf where it has no other reading."""
        assert isinstance(self.stops, Edge), "parts are of a source"
        if not isinstance(node, fx.Node) or self.stops.depends(node):
            return super().express(node, dims, reader)
        try:
            return super().express(node, dims, reader)
        except LayoutError:
            return self.leaf(node, dims)

    def leaf(  # a complex leaf is two symbols
        self, node: fx.Node, dims: Dims, kind: str = "tensor", contraction_: contraction.Contraction | None = None
    ) -> sympy.Expr:
        """The symbol of a tensor, those of real and imaginary part where it is complex.

        Raises:
            LayoutError: no more is read of the source; nothing cancels out, so that all else would be read in vain.
        """
        assert isinstance(self.stops, Edge), "parts are of a source"
        if node is not self.stops.source and self.stops.depends(node):
            raise LayoutError(f"{told(node)} is computed from the source, and has no reading")
        tensor = tensor_of(node)
        if tensor is None or not tensor.is_complex():
            found = super().leaf(node, canonical(dims), kind, contraction_)
        else:
            real, imaginary = (super(Parts, self).leaf(node, (*canonical(dims), (Fixed(2, i),))) for i in (0, 1))
            found = real + sympy.I * imaginary
        if node is self.stops.source:
            self.source_symbols |= found.free_symbols
        if len(self.source_symbols) > self.places:
            raise LayoutError(f"{told(node)} is read at more than {self.places} places")
        return found

    def scalar(self, value: Any) -> sympy.Expr:
        """A number, which may be complex."""
        if not isinstance(value, complex):
            return super().scalar(value)
        return super().scalar(value.real) + sympy.I * super().scalar(value.imag)

    def depends(self, node: fx.Node) -> bool:
        """Whether a value is computed from the source."""
        assert isinstance(self.stops, Edge), "parts are of a source"
        return self.stops.depends(node)

    def _express_call(self, call: Call, dims: Dims) -> sympy.Expr:
        summed = None
        if self.depends(call.node):
            summed = _sum(self, call, dims) if call.name == "sum" else None
            summed = _turned(self, call, dims) if summed is None else summed
        return super()._express_call(call, dims) if summed is None else summed

    def joined(
        self, first: sympy.Expr, second: sympy.Expr, pair: Axis
    ) -> dict[sympy.Symbol, tuple[sympy.Symbol, Leaf]]:
        """Leaves of one expression, each with that of another that is the other of a pair, and what both are together."""
        found: dict[sympy.Symbol, tuple[sympy.Symbol, Leaf]] = {}
        for symbol, leaf in self.leaves_in(first).items():
            for other, its in self.leaves_in(second).items():
                dims = paired(leaf.dims, its.dims, pair) if its.node is leaf.node else None
                if dims is not None:
                    found.setdefault(symbol, (other, Leaf(leaf.node, dims)))
        return found

    # ---- positions (:class:`pieces.Space`) ----------------------------------------------------------------------------

    def place(self, dim: tuple[Axis, ...]) -> Polynomial:
        """The position in a dimension, whose axes are variables."""
        offset, terms = affine(dim)
        found = number(offset)
        for axis, stride in terms:
            if axis not in self._indices:
                self._indices[axis] = variable(
                    Variable(f"i{len(self._indices)}", ZERO, number(axis.size - 1), 1, source=axis)
                )
            found = found + self._indices[axis].scaled(stride)
        return found

    def dim_at(self, place: Polynomial, size: Size) -> tuple[Axis, ...]:
        """Where part of a dimension of features is in the whole.

        Raises:
            LayoutError: the dimension is none of features, or they are in reverse order.
        """
        own, offset, terms = set(atoms(self.features)), 0, []
        for monomial, factor in place.terms.items():
            if not monomial:
                offset = int(factor)
                continue
            axis = monomial[0].source
            if axis not in own or factor < 0 or len(monomial) > 1:
                raise LayoutError("part of a dimension of rows, or of features in reverse order")
            terms.append((axis, int(factor)))
        if not isinstance(size, int):
            raise LayoutError("part of a dimension whose extent is not known")
        return placed(offset, ordered(terms), size)

    def size(self, size: Size) -> Polynomial:
        """An extent.

        Raises:
            LayoutError: it is not known.
        """
        if not isinstance(size, int):
            raise LayoutError("a part beside one whose extent is not known")
        return number(size)

    def integer(self, value: Any) -> Polynomial | None:
        """A Python integer."""
        return number(value) if isinstance(value, int) else None

    def index_at(self, node: fx.Node | list[int], dims: Dims, by: fx.Node) -> Polynomial | None:
        """The position that a list or a constant tensor of indices holds, if those at the place are evenly spaced."""
        # A row of indices may be spread over all rows, as gather wants it.
        while isinstance(node, fx.Node) and (call := self.effects.calls[node]) is not None:
            source = layout.read_input_dims(call, dims)
            if source is None or not isinstance(call.input, fx.Node):
                break
            self.interior.setdefault(node, dims)
            node, dims, by = call.input, source, node
        known = Known(torch.tensor(node, device="cpu"), ()) if isinstance(node, list) else self.known(node, by)
        if isinstance(known, Reason) or known.value.dim() != 1:
            return None
        values, (offset, terms) = known.value, affine(dims[0])
        found, at, even = number(int(values[offset])), torch.tensor(offset, device="cpu"), values[offset]
        for axis, stride in terms:
            assert isinstance(axis.size, int), "extents of places are known"
            step = int(values[offset + stride] - values[offset]) if axis.size > 1 else 0
            counted = torch.arange(axis.size, device="cpu")
            at, even = at[..., None] + stride * counted, even[..., None] + step * counted
            found = found + self.place((axis,)).scaled(step)
        if not torch.equal(values[at], even):
            return None
        if isinstance(node, fx.Node):
            self.matrices[node] = dims, known
        return found

    def through(self, dims: Dims, layout: Callable[[Dims], Dims | None]) -> Dims | None:
        """What a change of layout makes of dims."""
        return layout(dims)


def _shown(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    """What an operation that moves elements shows, where that is one tensor."""
    found = moves.shown(region, call, dims)
    if found is None:
        return None
    if found.by is not call.node:
        region.interior.setdefault(found.by, dims)
    return region.express(found.value, found.dims, found.by)


def _sum(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    """A sum over a dimension of pairs, as of rotation matrices."""
    named = named_dim(call)
    if named is None or named[1] != 2 or call.get("dtype") is not None:
        return None
    has_dim = call.get("keepdim") is True
    before, after = dims[: named[0]], dims[named[0] + has_dim :]
    parts = (region.express(call.input, (*before, (Fixed(2, i),), *after), call.node) for i in (0, 1))
    region.interior.setdefault(call.node, dims)
    return sum(parts, start=sympy.S.Zero)


# ---- complex numbers -------------------------------------------------------------------------------------------------


def _component(expression: sympy.Expr, index: int) -> sympy.Expr:
    """Real or imaginary part; every symbol is real."""
    expanded = sympy.expand(expression)
    imaginary = expanded.coeff(sympy.I)
    return imaginary if index else sympy.expand(expanded - sympy.I * imaginary)


def _view_as_complex(region: Parts, call: Call, dims: Dims) -> sympy.Expr:
    real, imaginary = (region.express(call.input, (*dims, (Fixed(2, i),)), call.node) for i in (0, 1))
    return real + sympy.I * imaginary


def _view_as_real(region: Parts, call: Call, dims: Dims) -> sympy.Expr:
    offset, terms = affine(dims[-1])
    if terms:
        raise LayoutError("real and imaginary part together")
    return _component(region.express(call.input, dims[:-1], call.node), offset)


def _of_complex(index: int) -> Any:
    def rule(region: Parts, call: Call, dims: Dims) -> sympy.Expr:
        return _component(region.express(call.input, dims, call.node), index)

    return rule


def _attribute(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    name = call.arguments.get("#1")
    return _of_complex(("real", "imag").index(name))(region, call, dims) if name in ("real", "imag") else None


def _complex(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    real, imaginary = call.get("real", call.input), call.get("imag", call.arguments.get("#1"))
    if tensor_of(real) is None or tensor_of(imaginary) is None:
        return None
    parts = [region.operand(Call(call.name, call.node, {"input": each}), "input", dims) for each in (real, imaginary)]
    return parts[0] + sympy.I * parts[1]


def _conj(region: Parts, call: Call, dims: Dims) -> sympy.Expr:
    inner = region.express(call.input, dims, call.node)
    return _component(inner, 0) - sympy.I * _component(inner, 1)


FUNCTIONS: Mapping[str, Any] = {
    **dict.fromkeys(moves.RULES, _shown),
    "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real,
    "real": _of_complex(0),
    "imag": _of_complex(1),
    "getattr": _attribute,
    "complex": _complex,
    "conj": _conj,
    "conj_physical": _conj,
    "resolve_conj": lambda region, call, dims: region.express(call.input, dims, call.node),
}

__all__ = ["FUNCTIONS", "Edge", "Parts", "has_fixed_index", "is_read"]
