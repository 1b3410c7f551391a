"""Products with matrices that turn pairs of features: 2 x 2 for each pair, or of all features and mostly zero.

The first are sums of two products. Of the others, the values have to be known: what is zero in a constant matrix, or in a
buffer under a guard, is no term.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.axes import Axis, Dims, atoms
from lz_compile.passes.formula.contraction import Factor
from lz_compile.passes.formula.places import Fixed, affine, placed
from lz_compile.passes.graph.view import Call, tensor_of

if TYPE_CHECKING:
    from lz_compile.passes.formula.parts import Parts

#: Of a column: a pair has two.
_MOST_TERMS = 2


@dataclass(frozen=True)
class Known:
    """The value of a constant, and the buffers that are in it."""

    value: torch.Tensor
    buffers: tuple[fx.Node, ...] = ()


def unknown(_node: fx.Node) -> Known | None:
    """Nothing is known of any value."""
    return None


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


def product(region: Parts, call: Call, dims: Dims) -> sympy.Expr | None:
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
    if known is None or len(rows) != 1 or len(columns) != 1:
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
