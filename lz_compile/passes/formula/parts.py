"""Operations that cut features out of tensors and join them, read backwards: where a part of the result is in the input.

Complex numbers are pairs of features, so that ``view_as_complex(x) * table`` has the same reading as the products of its
parts: a complex tensor is ``real + I * imag``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.passes.formula import contraction, layout, turning
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms
from lz_compile.passes.formula.places import Fixed, affine, canonical, has_fixed_index, moved, reach
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.formula.turning import Known, may_turn, unknown
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.view import Call, tensor_of, value_of

#: Calls that return several tensors, parts of the input.
SPLITS = frozenset({"chunk", "split", "unbind", "tensor_split", "split_with_sizes"})


@dataclass
class Edge:
    """Where reading stops: at the source, and at what is not computed from it, unless that only rearranges."""

    effects: Effects
    source: fx.Node
    _depends: dict[fx.Node, bool] = field(default_factory=dict)

    def __contains__(self, node: object) -> bool:
        if not isinstance(node, fx.Node) or node is self.source:
            return True
        return not self.depends(node) and not _rearranges(self.effects.calls.get(node))

    def depends(self, node: fx.Node) -> bool:
        """Whether a value is computed from the source."""
        if node is self.source:
            return True
        if self.effects.position[node] <= self.effects.position[self.source]:
            return False
        known = self._depends.get(node)
        if known is None:
            known = self._depends[node] = any(self.depends(operand) for operand in node.all_input_nodes)
        return known


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
    ``known`` gives the values of constants; ``matrices`` are those that were read for where they are zero.
    """

    features: list[Axis] = field(default_factory=list)
    places: int = 1
    source_symbols: set[sympy.Symbol] = field(default_factory=set)
    known: Callable[[fx.Node], Known | None] = unknown
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
        self,
        node: fx.Node,
        dims: Dims,
        kind: str = "tensor",
        contraction_: contraction.Contraction | None = None,
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

    def depends(self, node: fx.Node) -> bool:
        """Whether a value is computed from the source."""
        assert isinstance(self.stops, Edge), "parts are of a source"
        return self.stops.depends(node)

    def _express_call(self, call: Call, dims: Dims) -> sympy.Expr:
        summed = None
        if self.depends(call.node):
            summed = _sum(self, call, dims) if call.name == "sum" else None
            summed = turning.product(self, call, dims) if summed is None else summed
        return super()._express_call(call, dims) if summed is None else summed

    def cut(self, dim: tuple[Axis, ...], size: Any, start: int, step: int = 1) -> tuple[Axis, ...]:
        """Where part of a dimension of features is in the whole.

        Raises:
            LayoutError: the dimension is none of features.
        """
        own = set(atoms(self.features))
        if any(axis not in own for axis, _ in affine(dim)[1]):
            raise LayoutError("part of a dimension of rows")
        return moved(dim, size, start, step)

    def at(self, call: Call, dims: Dims, dim: int, place: tuple[Axis, ...], *, has_dim: bool) -> sympy.Expr:
        """The input at a place of one dimension, which the result has or lacks."""
        return self.express(call.input, (*dims[:dim], place, *dims[dim + has_dim :]), call.node)


# ---- cutting -------------------------------------------------------------------------------------------------------


def _getitem(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    source, index = tensor_of(call.input), call.arguments.get("#1")
    if source is None:
        return _piece(region, call, dims)
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (fx.Node, bool)) for item in items):
        return None
    named = sum(1 for item in items if item is not None and item is not Ellipsis)
    whole = [slice(None)] * (source.dim() - named)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = whole
    shape, rest = shape_of(source), list(dims)
    found: list[tuple[Axis, ...]] = []
    for item in items:
        if item is None:
            rest.pop(0)
        elif isinstance(item, slice):
            found.append(_sliced(region, item, shape[len(found)], rest.pop(0)))
        elif isinstance(item, int) and isinstance(shape[len(found)], int):
            found.append(moved((), shape[len(found)], item % shape[len(found)]))
        else:
            return None
    return region.express(call.input, (*found, *rest), call.node)


def _sliced(region: Parts, item: slice, size: Any, dim: tuple[Axis, ...]) -> tuple[Axis, ...]:
    if item == slice(None):
        return dim
    bounds = [value_of(each) for each in (item.start, item.stop, item.step)]
    start, stop, step = (as_size(each) if each is not None else None for each in bounds)
    if start in (None, 0) and step in (None, 1) and stop == size:
        return dim
    if not all(each is None or isinstance(each, int) for each in (start, stop, step, size)):
        raise LayoutError("a slice of an extent that is not known")
    start, stop, step = slice(start, stop, step).indices(size)
    return dim if (start, stop, step) == (0, size, 1) else region.cut(dim, size, start, step)


def _piece(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    """One of the tensors that a call returns."""
    parent, which = region.effects.calls.get(call.input), call.arguments.get("#1")
    pieces = call.input.meta.get("example_value") if isinstance(call.input, fx.Node) else None
    if (
        parent is None
        or parent.name not in SPLITS
        or not isinstance(which, int)
        or not isinstance(pieces, (tuple, list))
    ):
        return None
    source = tensor_of(parent.input)
    given = parent.get("dim", parent.arguments.get("#1" if parent.name == "unbind" else "#2", 0))
    if source is None or not isinstance(given, int):
        return None
    dim, which = given % source.dim(), which % len(pieces)
    region.interior.setdefault(parent.node, dims)
    size = as_size(source.shape[dim])
    if parent.name == "unbind":
        return region.at(parent, dims, dim, moved((), size, which), has_dim=False)
    start = 0
    for piece in pieces[:which]:
        extent = as_size(piece.shape[dim])
        if not isinstance(extent, int):
            raise LayoutError("a piece behind one whose extent is not known")
        start += extent
    return region.at(parent, dims, dim, region.cut(dims[dim], size, start), has_dim=True)


def _dim(call: Call, position: str) -> tuple[int, Any] | None:
    """The dimension that a call names, and its extent in the input."""
    source, dim = tensor_of(call.input), call.get("dim", call.arguments.get(position))
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if source is None or not isinstance(dim, int):
        return None
    return dim % source.dim(), as_size(source.shape[dim])


def _select(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    named, index = _dim(call, "#1"), call.get("index")
    if named is None or not isinstance(index, int) or not isinstance(named[1], int):
        return None
    return region.at(call, dims, named[0], moved((), named[1], index % named[1]), has_dim=False)


def _narrow(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    named, start = _dim(call, "#1"), call.get("start")
    if named is None or not isinstance(start, int) or not isinstance(named[1], int):
        return None
    dim, size = named
    return region.at(call, dims, dim, region.cut(dims[dim], size, start % size), has_dim=True)


def _flip(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    source, flipped = tensor_of(call.input), call.get("dims") or call.positional()
    if source is None:
        return None
    turned = list(dims)
    for dim in flipped:
        offset, terms = affine(dims[dim])
        size = as_size(source.shape[dim])
        if terms or not isinstance(size, int):
            raise LayoutError("features in reverse order")
        turned[dim] = moved((), size, size - 1 - offset)
    return region.express(call.input, tuple(turned), call.node)


def _roll(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    source = tensor_of(call.input)
    shift, dim = (call.get(name, call.arguments.get(at)) for name, at in (("shifts", "#1"), ("dims", "#2")))
    shift, dim = (each[0] if isinstance(each, (tuple, list)) and len(each) == 1 else each for each in (shift, dim))
    if source is None or not isinstance(shift, int) or not isinstance(dim, int):
        return None
    size, (offset, terms) = as_size(source.shape[dim]), affine(dims[dim])
    if not isinstance(size, int):
        return None
    start = (offset - shift) % size
    if reach(start, terms) >= size:
        raise LayoutError("a part that is rolled over the end")
    dim %= source.dim()
    return region.at(call, dims, dim, region.cut(dims[dim], size, start - offset), has_dim=True)


def _sum(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    """A sum over a dimension of pairs, as of rotation matrices."""
    named = _dim(call, "#1")
    if named is None or named[1] != 2 or call.get("dtype") is not None:
        return None
    has_dim = call.get("keepdim") is True
    parts = (region.at(call, dims, named[0], (Fixed(2, i),), has_dim=has_dim) for i in (0, 1))
    region.interior.setdefault(call.node, dims)
    return sum(parts, start=sympy.S.Zero)


# ---- joining -------------------------------------------------------------------------------------------------------


def _cat(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    tensors, dim = call.get("tensors"), call.get("dim", 0)
    parts = [tensor_of(each) for each in tensors] if isinstance(tensors, (tuple, list)) else []
    if not isinstance(dim, int) or not parts or any(each is None or each.dim() != len(dims) for each in parts):
        return None
    dim %= len(dims)
    (offset, terms), start = affine(dims[dim]), 0
    for node, part in zip(tensors, parts, strict=True):
        size = as_size(part.shape[dim])  # type: ignore[union-attr]
        if not isinstance(size, int):
            break
        if start <= offset and reach(offset, terms) < start + size:
            place = region.cut(dims[dim], size, -start)
            return region.express(node, (*dims[:dim], place, *dims[dim + 1 :]), call.node)
        start += size
    raise LayoutError("a part of several tensors")


def _stack(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
    tensors, dim = call.get("tensors", call.input), call.get("dim", call.arguments.get("#1", 0))
    if not isinstance(tensors, (tuple, list)) or not isinstance(dim, int):
        return None
    dim %= len(dims)
    offset, terms = affine(dims[dim])
    if terms:
        raise LayoutError("a part of several tensors")
    return region.express(tensors[offset], (*dims[:dim], *dims[dim + 1 :]), call.node)


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
    "getitem": _getitem,
    "select": _select,
    "narrow": _narrow,
    "flip": _flip,
    "roll": _roll,
    "cat": _cat,
    "stack": _stack,
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

__all__ = ["FUNCTIONS", "SPLITS", "Edge", "Parts", "has_fixed_index", "is_read"]
