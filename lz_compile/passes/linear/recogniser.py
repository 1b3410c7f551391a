"""Products whose weight is computed from stored numbers of few bits, however it is spelled.

The anchor is the product. Its weight may be int8, uint8 or float8, or bytes that hold two numbers of four bits, with scales,
zero points or offsets of rows, columns and groups of columns. A weight that is only cast is one, too: what its result is
multiplied by afterwards stays there. In which form kernels get it is asked of what was found (:mod:`matching`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Dims, LayoutError, axes_of, fresh
from lz_compile.passes.formula.contraction import Contraction, Factor
from lz_compile.passes.formula.expressions import Values
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import Call, known_tensor
from lz_compile.passes.linear.reading import Weight, read_weight


@dataclass(frozen=True)
class Dequantised:
    """A product of ``given`` with a ``weight`` of stored numbers, to whose columns ``bias`` is added: ``output``."""

    given: Factor
    weight: Weight
    bias: Leaf | None
    output: fx.Node
    output_dims: Dims


def recognise(effects: Effects, call: Call, storage: Callable[[fx.Node], fx.Node | None], known: Values) -> Dequantised:
    """The product with a stored weight that a call is; ``storage`` says which tensor a factor is computed from.

    Raises:
        RefusedError: its weight means something else, with the reason.
        MutatedError: an alias of a value was overwritten before it is read.
        LayoutError: it is no product of a weight and rows.
    """
    region, dims = Region(effects), fresh(shape_of(known_tensor(call.node)))
    product, bias = _product(region, call, dims)
    given, factor = product.left, product.right  # of a weight on the left nobody could tell that it is none
    rows = set(axes_of(given.dims)) - set(product.summed)
    if rows & set(axes_of(factor.dims)):
        raise RefusedError("BATCHED_WEIGHT", "every row has a weight of its own", "multiply each by itself")
    weight = read_weight(effects, product, factor, storage(factor.node), known)
    return Dequantised(given, weight, bias, call.node, dims)


def _product(region: Region, call: Call, dims: Dims) -> tuple[Contraction, Leaf | None]:
    """The product, and what is added to each of its columns.

    Raises:
        LayoutError: it is none, or something else is added.
    """
    product = contraction.read(region, call, dims)
    if product is None or product.coefficient != 1:
        raise LayoutError("no product, or a multiple of one")
    if product.addend is None:
        return product, None
    node, added_dims, weight = product.addend
    leaf = Leaf(node, added_dims)
    if weight != 1 or not leaf.axes <= set(axes_of(dims[-1:])):
        raise LayoutError("what is added is no bias")
    return product, leaf
