"""Products whose weight is computed from stored numbers of few bits, however it is spelled.

The anchor is the product. Its weight may be int8, uint8 or float8, or bytes that hold two numbers of four bits, with scales,
zero points or offsets of rows, columns and groups of columns. A weight that is only cast is one, too: what its result is
multiplied by afterwards stays there. In which form kernels get it is asked of what was found (:mod:`matching`).

The weight is read as an expression over its leaves, at every element alike. It is affine in what is stored, and neither
factor nor summand changes within a group of neighbouring columns. Of bytes that hold two numbers the weight is read at two
places, the columns that come from lower and from upper bits: their factors and summands must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, fresh
from lz_compile.passes.formula.contraction import PRODUCTS, Contraction, Factor
from lz_compile.passes.formula.expressions import CASTS, Values
from lz_compile.passes.formula.parts import FUNCTIONS, Edge, Parts
from lz_compile.passes.formula.places import Fixed, has_fixed_index
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import Call, is_floating, is_subclass, known_tensor, reached, tensor_of
from lz_compile.passes.linear.bits import BITS, CODE, HIGH, LOW, Indexed, has_bits
from lz_compile.passes.linear.unpacked import Unpacked, less_shifted, numbers_of

#: One number in each element, or two in a byte, by the words of the op: mypy holds the two alike.
Packing: TypeAlias = Literal["none", "low_first", "high_first", "low_half", "high_half"]
#: Dtypes of what is stored.
STORED = frozenset({torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2})
#: So many calls are followed up from a weight, which no unpacking has.
_MOST_CALLS = 64


@dataclass(frozen=True)
class Weight:
    """A weight in stored numbers, ``scale * stored + summand`` over ``out`` and ``columns``, the axes of its rows.

    ``groups`` are the first of the columns' axes: scale and summand do not depend on others. The stored tensor has the
    dims of ``leaf``; of bytes that hold two numbers these lack the axis of the two. ``unpacked`` says what it is where the
    graph computes it. ``order`` is an index of groups whose columns are no neighbours; columns are those that are, in order.

    Where it ``is_kept`` it is made once for all calls, of numbers less ``low`` where these are two in a byte; ``unkept`` is
    why it is unpacked in every call. The source calls a product of PyTorch's own where it ``is_native``.
    """

    leaf: Leaf
    packing: Packing
    scale: sympy.Expr
    summand: sympy.Expr
    region: Region
    out: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    groups: tuple[Axis, ...]
    stored_columns: tuple[Axis, ...]
    codebook: Leaf | None = None
    read: Mapping[fx.Node, Dims] = field(default_factory=dict)
    unpacked: Unpacked | None = None
    order: fx.Node | None = None
    is_kept: bool = False
    low: int | None = None
    unkept: str = ""
    is_native: bool = False


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
        if storage(factor.node) is None:  # its integers may say which rows of it are taken
            raise LayoutError("every row has a factor of its own, and nothing of few bits is stored")
        raise RefusedError("BATCHED_WEIGHT", "every row has a weight of its own", "multiply each by itself")
    weight = _read_weight(effects, product, factor, storage(factor.node), known)
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


def storage_of(effects: Effects, node: fx.Node) -> fx.Node | None:
    """The largest tensor of few bits that a value is computed from; None where there is none, or a product on the way."""

    def is_given(each: fx.Node) -> bool:
        call = effects.calls[each]
        return call is None or (call.name == "getattr" and is_subclass(tensor_of(call.input)))  # or inside of that

    def above(each: fx.Node) -> list[fx.Node]:
        return [] if is_given(each) or effects.name(each) in PRODUCTS else each.all_input_nodes

    seen = [*reached([node], above, _MOST_CALLS + 1)]
    if len(seen) > _MOST_CALLS or any(effects.name(each) in PRODUCTS for each in seen):  # what comes out of a layer
        return None
    tensors = {each: tensor for each in seen if is_given(each) and (tensor := tensor_of(each)) is not None}
    found = [each for each, tensor in tensors.items() if tensor.dtype in STORED and _may_hold(tensor, tensor_of(node))]
    return max(found, key=lambda each: tensors[each].numel(), default=None)


def _may_hold(stored: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether stored numbers may be those of a weight: a single row of them has one for every two at least."""
    sizes = (stored.numel(), 0 if weight is None else weight.numel())
    is_row = stored.dim() == 1 and all(isinstance(size, int) for size in sizes) and 0 < sizes[1] <= 2 * sizes[0]
    return stored.dim() >= 2 or is_row


def _read_weight(
    effects: Effects, product: Contraction, factor: Factor, storage: fx.Node | None, known: Values
) -> Weight:
    """What ``factor`` of a product is made of: of what is stored, or of whole numbers that were unpacked from that.

    Raises:
        RefusedError: it is not affine in what is stored, with the reason.
        MutatedError: an alias of a value was overwritten before it is read.
        LayoutError: a layout has no exact form in axes.
    """
    unpacked = numbers_of(effects, factor.node)
    refusal: RefusedError | LayoutError = LayoutError("nothing of few bits is stored")
    if storage is not None:
        try:
            return _read_stored(effects, product, factor, storage, known)
        except (RefusedError, LayoutError) as error:
            refusal = error
    if unpacked is None:
        raise refusal
    shifted = less_shifted(effects, unpacked)
    numbers = unpacked if shifted is None else shifted
    try:
        return _read_plain(effects, product, factor, numbers.node, known, numbers)
    except RefusedError as error:
        raise (refusal if storage is not None else error) from error
    except LayoutError as error:
        if isinstance(refusal, RefusedError):
            raise refusal from error
        text = f"{told(numbers.node)} is unpacked into a shape that has no exact form: {error}"
        raise RefusedError("NOT_DEQUANTISED", text, "give the weight a fixed size, or unpack it row by row") from error


def _read_stored(effects: Effects, product: Contraction, factor: Factor, storage: fx.Node, known: Values) -> Weight:
    stored = tensor_of(storage)
    assert stored is not None, "what is stored is a tensor"
    if stored.dtype == torch.uint8 and _is_even(product.summed):
        for is_first in (True, False):
            found = _read_packed(effects, product, factor, storage, _out(product, factor), is_first=is_first)
            if found is not None:
                return found
    return _read_plain(effects, product, factor, storage, known)


def _read_plain(
    effects: Effects,
    product: Contraction,
    factor: Factor,
    storage: fx.Node,
    known: Values,
    unpacked: Unpacked | None = None,
) -> Weight:
    """The weight of a number in each element."""
    region = Indexed(effects, expand_masks=True, stops={storage}, functions=BITS, known=known)
    expression = region.express(factor.node, factor.dims, product.call.node)
    out = _out(product, factor)
    found = _weight(region, expression, storage, "none", out, product.summed, product.summed)
    return replace(found, unpacked=unpacked)


def _out(product: Contraction, factor: Factor) -> tuple[Axis, ...]:
    """The axes of a weight's rows."""
    columns = axes_of((product.summed,))
    out = tuple(axis for axis in axes_of(factor.dims) if axis not in set(columns))
    if not columns or not out:
        raise LayoutError("a product without columns")
    return out


def _is_even(columns: tuple[Axis, ...]) -> bool:
    """Whether columns may be pairs."""
    return len(columns) == 1 and isinstance(columns[0].size, int) and columns[0].size % 2 == 0 and columns[0].size > 2


def _read_packed(
    effects: Effects, product: Contraction, factor: Factor, storage: fx.Node, out: tuple[Axis, ...], *, is_first: bool
) -> Weight | None:
    """The weight of bytes that hold two numbers each, neighbours or from both halves; None where it is none."""
    (axis,) = product.summed
    own, pair = Axis(axis.size // 2), Axis(2)
    edge = Edge(effects, storage)
    region = Parts(effects, expand_masks=True, stops=edge, functions={**FUNCTIONS, **BITS}, features=[own])
    halves = []
    for place in (Fixed(2, 0), Fixed(2, 1)):
        columns = (own, place) if is_first else (place, own)
        dims = tuple(columns if dim == (axis,) else dim for dim in factor.dims)
        try:
            halves.append(region.express(factor.node, dims, product.call.node))
        except LayoutError:
            return None
    numbers = [each.atoms(LOW, HIGH) for each in halves]
    if any(len(each) != 1 for each in numbers) or len(region.source_symbols) != 1:
        return None
    ((one,), (other,)), (symbol,) = numbers, region.source_symbols
    if type(one) is type(other) or one.args != (symbol,) or other.args != (symbol,):
        return None
    first, second = halves[0].xreplace({one: symbol}), halves[1].xreplace({other: symbol})
    if not _join(region, first, second, pair):
        raise RefusedError("NOT_DEQUANTISED", "the two numbers of a byte mean different things", "scale both alike")
    axis.parts = (own, pair) if is_first else (pair, own)
    order: Packing = ("low_first" if is_first else "low_half") if isinstance(one, LOW) else _HIGH_PACKING[is_first]
    return _weight(region, first, storage, order, out, (own,), (axis,))


_HIGH_PACKING: Mapping[bool, Packing] = {True: "high_first", False: "high_half"}


def _join(region: Parts, first: sympy.Expr, second: sympy.Expr, pair: Axis) -> bool:
    """Whether two expressions are one, of leaves that get an axis of pairs where they are read at two places."""
    leaves, joined = region.leaves, region.joined(first, second, pair)
    if sympy.expand(first.xreplace({a: b for a, (b, _) in joined.items()}) - second) != 0:
        return False
    leaves.update({a: leaf for a, (_, leaf) in joined.items()})
    return not any(has_fixed_index(dim) for a in joined for dim in leaves[a].dims)


def _weight(
    region: Region,
    expression: sympy.Expr,
    storage: fx.Node,
    packing: Packing,
    out: tuple[Axis, ...],
    stored_columns: tuple[Axis, ...],
    columns: tuple[Axis, ...],
) -> Weight:
    """The parts of an expression.

    Raises:
        RefusedError: it is not affine in what is stored, or reads that in two ways.
    """
    own = [symbol for symbol, leaf in region.leaves_in(expression).items() if leaf.node is storage]
    if not own:
        raise RefusedError("NOT_DEQUANTISED", *_unread(region, storage))
    if len(own) > 1:
        raise RefusedError("NOT_DEQUANTISED", "the weight reads what is stored in two ways", "read it once")
    (symbol,) = own
    codes = expression.atoms(CODE)
    if len(codes) > 1 or any(
        code.args[1] != symbol or expression.xreplace({code: sympy.S.Zero}).has(symbol) for code in codes
    ):
        raise RefusedError("NOT_DEQUANTISED", "numbers of a table are read in two ways", "read them once")
    codebook = next((region.leaves[code.args[0]] for code in codes), None)
    expanded = sympy.expand(expression.xreplace(dict.fromkeys(codes, symbol)))
    scale = expanded.coeff(symbol, 1)
    summand = expanded.coeff(symbol, 0)
    if sympy.expand(scale * symbol + summand - expanded) != 0 or scale == 0 or scale.has(symbol):
        text = f"the weight is no multiple of what is stored, but {expression}"
        raise RefusedError("NOT_AFFINE", text, "write it as (stored - zero) * scale")
    if has_bits(scale) or has_bits(summand):
        raise RefusedError("NOT_DEQUANTISED", "scales or zero points are bits of something", "unpack them before")
    rounded = next((node for node in region.interior if _is_rounded(region.effects, node)), None)
    if rounded is not None:
        text = f"the weight is rounded to {known_tensor(rounded).dtype} on its way"
        raise RefusedError("NOT_DEQUANTISED", text, "round it before it is stored")
    leaf, out = region.leaves[symbol], atoms(out)
    span = {*out, *atoms(stored_columns)}
    if leaf.axes != span or {*axes_of(leaf.dims)} != span:
        raise RefusedError(
            "NOT_DEQUANTISED", "what is stored is repeated, or has other axes than the weight", "store it once"
        )
    order = _ordered(region, scale, summand, columns)
    groups = _groups(region, scale, summand, {*out}, columns)
    read = region.interior
    return Weight(
        leaf, packing, scale, summand, region, out, columns, groups, stored_columns, codebook, read, order=order
    )


def _unread(region: Region, storage: fx.Node) -> tuple[str, str]:
    """What hides the stored numbers from being read, and what helps."""
    for leaf in region.leaves.values():
        call = region.effects.calls[leaf.node]
        if call is not None and leaf.node is not storage and storage in reached([leaf.node], most=_MOST_CALLS):
            text = f"{told(leaf.node)} has no reading here: {call.name} may wrap around, round, or take other bits"
            return text, "convert what is stored to floating point first, as by .to(x.dtype)"
    return "what is stored does not reach the weight", "multiply by what is computed from it"


def _is_rounded(effects: Effects, node: fx.Node) -> bool:
    """Whether a call casts to floats of eight bits."""
    return effects.name(node) in CASTS and is_floating(node) and known_tensor(node).dtype in STORED


def _ordered(region: Region, scale: sympy.Expr, summand: sympy.Expr, columns: tuple[Axis, ...]) -> fx.Node | None:
    """The index of groups that scales were gathered by, where columns of a group are no neighbours; then they become some.

    Whatever else depends on columns would have to be put in order, too.
    """
    used = region.axes_in(scale, summand)
    shuffled = region.shuffled if isinstance(region, Indexed) else {}
    found = {columns_: each for columns_, each in shuffled.items() if each[0] in used}
    if not found:
        return None
    if {*found} != {*atoms(columns)} or not used.isdisjoint(found):
        text = "scales of groups in another order, and of columns or their neighbours"
        raise RefusedError("NOT_DEQUANTISED", text, "gather all of them by one index of groups")
    ((axis, (groups, index, _)),) = found.items()
    axis.parts = (groups, Axis(axis.size // groups.size))
    return index


def _groups(
    region: Region, scale: sympy.Expr, summand: sympy.Expr, out: set[Axis], columns: tuple[Axis, ...]
) -> tuple[Axis, ...]:
    """The first axes of the columns, such that factor and summand depend on no others of them."""
    used, parts = region.axes_in(scale, summand), atoms(columns)
    if not used <= out | {*parts}:
        raise RefusedError(
            "NOT_DEQUANTISED", "what is multiplied depends on more than rows and columns", "scale it afterwards"
        )
    last = max((place for place, axis in enumerate(parts) if axis in used), default=-1)
    if last + 1 == len(parts) and len(parts) == 1:
        unread = region.unread if isinstance(region, Indexed) else None
        text, edit = unread or ("what is multiplied changes from column to column", "scale the input by it")
        raise RefusedError("NOT_DEQUANTISED", text, edit)
    return tuple(parts[: last + 1])
