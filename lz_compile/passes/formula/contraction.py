"""Sums of products with named axes: ``matmul``, ``bmm``, ``linear``, ``einsum``, ``tensordot``, multiply-and-sum.

Given the axes of a result, :func:`factors` tells the axes of what is multiplied and the axes summed over, and :func:`read`
those of both sides of a product of two. Which spelling it was and how either was transposed does not show in the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import sympy
from torch import fx

from lz_compile.ground.sizes import Shape, product, shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Axis, Dims, broadcast_from
from lz_compile.passes.formula.expressions import constant_value
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.graph.view import read as read_call

if TYPE_CHECKING:
    from lz_compile.passes.formula.algebra import Region

#: Names of calls that are contractions by themselves (a ``sum`` is one when its input is a product).
PRODUCTS = frozenset("matmul bmm mm baddbmm addmm linear einsum inner mv dot vdot linalg_vecdot tensordot".split())


@dataclass(frozen=True)
class Factor:
    """One side of a contraction: the tensor as it enters, and the axes of its dimensions."""

    node: fx.Node
    dims: Dims


@dataclass(frozen=True)
class Contraction:
    """``coefficient * sum over summed (left * right) + weight * addend``.

    ``dims`` are the axes of the result; ``addend`` is ``(node, dims, weight)`` where the call adds a tensor. With a
    ``distance``, the call gives ``coefficient * sum((left - right) ** 2)`` instead, or the ``root`` of it.
    """

    call: Call
    dims: Dims
    left: Factor
    right: Factor
    summed: tuple[Axis, ...]
    coefficient: sympy.Expr = sympy.S.One
    addend: tuple[fx.Node, Dims, sympy.Expr] | None = None
    distance: Literal["", "square", "root"] = ""


@dataclass(frozen=True)
class Product:
    """The tensors that a call multiplies, the axes it sums over, and what it adds, each with the axes of its dimensions."""

    factors: tuple[tuple[fx.Node, Dims], ...]
    summed: tuple[Axis, ...]
    addend: tuple[fx.Node, Dims] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether no tensor has an axis twice, as on a diagonal."""
        axes = ([axis for dim in dims for axis in dim] for _, dims in self.factors)
        return all(len(set(each)) == len(each) for each in axes)


def factors(call: Call, dims: Dims) -> Product | None:
    """What a call multiplies, given the axes of its result; None where it is no product of tensors."""
    if call.name == "einsum":
        return _einsum(call, dims)
    names = {"baddbmm": ("batch1", "batch2"), "addmm": ("batch1", "batch2"), "linear": ("input", "weight")}
    left, right = (
        call.get(name, call.arguments.get("#1") if name == "other" else None)
        for name in names.get(call.name, ("input", "other"))
    )
    if tensor_of(left) is None or tensor_of(right) is None:
        return None
    if call.name in ("vdot", "linalg_vecdot") and known_tensor(left).is_complex():  # they conjugate it
        return None
    if call.name in ("linear", "inner"):
        return _of_rows(call, dims, left, right)
    if call.name == "linalg_vecdot":
        return _vecdot(call, dims, left, right)
    if call.name == "tensordot":
        return _tensordot(call, dims, left, right)
    added = call.input if call.name in ("baddbmm", "addmm") else None
    return _matmul(dims, left, right, added)


def _added(node: Any, dims: Dims) -> tuple[fx.Node, Dims] | None:
    tensor = tensor_of(node)
    return None if tensor is None else (node, broadcast_from(dims, shape_of(tensor)))


def _matmul(dims: Dims, left: fx.Node, right: fx.Node, added: Any) -> Product:
    """Matrices or vectors, the latter without the dimension that they lack."""
    first, second = shape_of(known_tensor(left)), shape_of(known_tensor(right))
    summed = () if first[-1] == 1 else (Axis(first[-1]),)
    rows, columns = int(len(first) > 1), int(len(second) > 1)
    batch, own = dims[: len(dims) - rows - columns], dims[len(dims) - rows - columns :]
    left_dims = (*broadcast_from(batch, first[:-2]), *own[:rows], summed)
    right_dims = (*broadcast_from(batch, second[:-2]), summed, *own[rows:])
    return Product(((left, left_dims), (right, right_dims)), summed, _added(added, dims))


def _of_rows(call: Call, dims: Dims, left: fx.Node, right: fx.Node) -> Product | None:
    """``linear`` and ``inner``: the last dimensions of both are summed over."""
    sizes = shape_of(known_tensor(left)), shape_of(known_tensor(right))
    if not all(sizes) or (call.name == "linear" and len(sizes[1]) != 2):
        return None
    summed, rank = () if sizes[0][-1] == 1 else (Axis(sizes[0][-1]),), len(sizes[0]) - 1
    found = (left, (*dims[:rank], summed)), (right, (*dims[rank:], summed))
    return Product(found, summed, _added(call.get("bias"), dims))


def _vecdot(call: Call, dims: Dims, left: fx.Node, right: fx.Node) -> Product | None:
    """Along one dimension of both, as they broadcast."""
    shapes, position = [shape_of(known_tensor(each)) for each in (left, right)], call.get("dim", -1) % (len(dims) + 1)
    sizes = {shape[position - len(dims) - 1] for shape in shapes if len(shape) >= len(dims) + 1 - position}
    if len(sizes) != 1:
        return None
    summed = tuple(Axis(size) for size in sizes if size != 1)
    whole = (*dims[:position], summed, *dims[position:])
    return Product(
        tuple((each, broadcast_from(whole, shape)) for each, shape in zip((left, right), shapes, strict=True)), summed
    )


def _tensordot(call: Call, dims: Dims, left: fx.Node, right: fx.Node) -> Product | None:
    given, shapes = call.get("dims", 2), [shape_of(known_tensor(each)) for each in (left, right)]
    if isinstance(given, int):
        given = [range(len(shapes[0]) - given, len(shapes[0])), range(given)]
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        return None
    pairs = [[dim % len(shape) for dim in each] for each, shape in zip(given, shapes, strict=True)]
    axes = [() if shapes[0][dim] == 1 else (Axis(shapes[0][dim]),) for dim in pairs[0]]
    kept, placed = iter(dims), []
    for positions, shape in zip(pairs, shapes, strict=True):
        own = dict(zip(positions, axes, strict=True))
        placed.append(tuple(own[dim] if dim in own else next(kept) for dim in range(len(shape))))
    summed = tuple(axis for dim in axes for axis in dim)
    return Product(((left, placed[0]), (right, placed[1])), summed)


def _einsum(call: Call, dims: Dims) -> Product | None:
    said = layout.notation(call)
    if said is None or len(said.result) != len(dims):
        return None
    operands, labels, result = said.operands, said.labels, said.result
    shapes = [shape_of(known_tensor(operand)) for operand in operands]
    axes: dict[str, tuple[Axis, ...]] = {label: dim for label, dim in zip(result, dims, strict=True) if dim}
    summed: list[Axis] = []
    for names, shape in zip(labels, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            if name not in axes and size != 1:
                if name in result:  # one, by a guard: the result says so, and this operand's symbolic size does not
                    return None
                axes[name] = (Axis(size),)
                summed.extend(axes[name])
    placed = [
        tuple(() if size == 1 else axes[name] for name, size in zip(names, shape, strict=True))
        for names, shape in zip(labels, shapes, strict=True)
    ]
    return Product(tuple(zip(operands, placed, strict=True)), tuple(summed))


# ---- products of two ----------------------------------------------------------------------------------------------


def read(region: Region, call: Call, dims: Dims) -> Contraction | None:
    """The contraction that ``call`` computes, given the axes of its result; None where it is none."""
    if call.name == "sum":
        return _multiply_sum(region, call, dims)
    product = factors(call, dims)
    if product is None or len(product.factors) != 2 or (call.name == "einsum" and not product.is_plain):
        return None
    left, right = (Factor(region.seen_by(call.node, node), own) for node, own in product.factors)
    found = Contraction(call, dims, left, right, product.summed)
    return found if product.addend is None else _with_addend(region, found, *product.addend)


def _with_addend(region: Region, found: Contraction, added: fx.Node, dims: Dims) -> Contraction:
    if found.call.name == "linear":
        return replace(found, addend=(region.seen_by(found.call.node, added), dims, sympy.S.One))
    weight, coefficient = (region.scalar(found.call.get(name, 1)) for name in ("beta", "alpha"))
    is_zero = (call := region.effects.calls.get(added)) is not None and constant_value(call) == 0
    if is_none := weight == 0 or (is_zero and not region.effects.is_opaque(added, found.call.node)):
        region.interior.setdefault(added, dims)
    return replace(found, coefficient=coefficient, addend=None if is_none else (added, dims, weight))


def is_product_sum(region: Region, call: Call) -> bool:
    """Whether a ``sum`` adds up products of two tensors (a quick look; :func:`read` decides)."""
    source = region.effects.calls.get(call.input)
    return source is not None and _is_product(source)


def _is_product(call: Call) -> bool:
    return call.name == "mul" and tensor_of(call.input) is not None and tensor_of(call.get("other")) is not None


def _multiply_sum(region: Region, call: Call, dims: Dims) -> Contraction | None:
    """``(a[..., None, :] * b[..., None, :, :]).sum(-1)``."""
    if call.get("dtype") is not None:
        return None
    inner = reduction_dims(call, dims)
    if inner is None:
        return None
    source, summed = inner
    product = region.effects.calls[region.seen_by(call.node, call.input)]
    if product is None or product.is_inplace or not _is_product(product):
        return None
    if region.effects.is_opaque(product.node, call.node):
        raise MutatedError(product.node)
    factors: list[Factor] = []
    for name in ("input", "other"):
        node = region.seen_by(product.node, product.get(name))
        factors.append(Factor(node, broadcast_from(source, shape_of(tensor_of(node)))))  # type: ignore[arg-type]
    region.interior.setdefault(product.node, source)
    return Contraction(call, dims, factors[0], factors[1], summed)


def reduction_dims(
    call: Call, dims: Dims, summed: tuple[Axis, ...] | None = None
) -> tuple[Dims, tuple[Axis, ...]] | None:
    """The dims of a reduction's input, with new axes (or the given ones) for the reduced dimensions, and those axes."""
    tensor = tensor_of(call.input)
    reduced = call.get("dim")
    if tensor is None or reduced is None:
        return None
    shape: Shape = shape_of(tensor)
    positions = {d % len(shape) for d in (reduced if isinstance(reduced, (tuple, list)) else (reduced,))}
    if summed is not None and len(positions) != 1:
        return None
    kept = iter(dims if not call.get("keepdim", False) else [d for i, d in enumerate(dims) if i not in positions])
    source: list[Any] = []
    new: list[Axis] = []
    for position, size in enumerate(shape):
        if position not in positions:
            source.append(next(kept))
            continue
        axes = summed if summed is not None else (() if size == 1 else (Axis(size),))
        source.append(axes)
        new.extend(axes)
    return tuple(source), tuple(new)


# ---- squared distances -----------------------------------------------------------------------------------------------
# Of all rows of two tensors: ``sum((a - b) ** 2)`` is ``|a|^2 + |b|^2 - 2 a . b``, a contraction with squares beside it.
# Which rows are compared is said by axes; whether the difference is squared by a power, a product or a norm is all the same.


_NORMS = frozenset({"norm", "linalg_norm", "linalg_vector_norm"})
_REDUCTIONS = frozenset({"sum", "mean"}) | _NORMS
_NAMES = _REDUCTIONS | {"einsum"}
_POWERS = frozenset({"pow", "square", "abs", "mul", "div", "neg"})


def is_distance(effects: Effects, node: fx.Node) -> bool:
    """Whether a call measures how far the rows of two tensors are apart, each from each."""
    call = effects.calls.get(node)
    if call is None or call.name == "cdist":
        return call is not None
    return call.name in _NAMES and bool(_differences(effects, call))


def _differences(effects: Effects, call: Call) -> list[Call]:
    """The differences of all rows that a call reduces, each behind powers and layouts."""
    found = []
    for operand in call.node.all_input_nodes:
        source = effects.calls.get(operand)
        while source is not None and (source.name in _POWERS or layout.rearranges(source)):
            source = effects.calls.get(source.input)
        if source is not None and source.name == "sub" and is_outer(source):
            found.append(source)
    return found


def is_outer(call: Call) -> bool:
    """Whether a difference is of all pairs of rows."""
    tensors = [tensor_of(call.get(name)) for name in ("input", "other")]
    if any(tensor is None for tensor in tensors):
        return False
    first, second = (shape_of(tensor)[::-1] for tensor in tensors if tensor is not None)
    pairs = list(zip_longest(first, second, fillvalue=1))
    return any(a == 1 != b for a, b in pairs) and any(b == 1 != a for a, b in pairs)


def read_distance(region: Region, call: Call, dims: Dims) -> Contraction | None:
    """The contraction in a squared distance, or in the root of one; None where the call measures none."""
    if call.name == "cdist":
        return _cdist(region, call, dims)
    differences = _differences(region.effects, call) if call.name in _NAMES else []
    return _reduced_difference(region, call, dims, differences[0]) if differences else None


def _cdist(region: Region, call: Call, dims: Dims) -> Contraction | None:
    nodes = [call.input, call.get("other")]
    tensors = [tensor_of(node) for node in nodes]
    if call.get("p", 2) != 2 or any(tensor is None for tensor in tensors):
        return None
    shapes = [shape_of(tensor) for tensor in tensors if tensor is not None]
    summed = () if shapes[0][-1] == 1 else (Axis(shapes[0][-1]),)
    rows = zip(nodes, shapes, dims[-2:], strict=True)
    left, right = (
        Factor(region.seen_by(call.node, node), (*broadcast_from(dims[:-2], shape[:-2]), own, summed))
        for node, shape, own in rows
    )
    return Contraction(call, dims, left, right, summed, distance="root")


def _reduced_difference(region: Region, call: Call, dims: Dims, difference: Call) -> Contraction | None:
    """A reduction of what is a multiple of a squared difference, down to the tensors that differ."""
    stops = {behind_layout(difference.get(name)) for name in ("input", "other")}
    inner = region.up_to(stops)
    given = _summand(inner, call, dims)
    if given is None or len(stops) != 2:
        return None
    expression, summed = sympy.expand(given[0]), given[1]
    symbols = sorted(expression.free_symbols, key=str)
    size = product(axis.size for axis in summed) if call.name == "mean" else 1
    if (
        not isinstance(size, int)
        or len(symbols) != 2
        or any(inner.leaves[symbol].node not in stops for symbol in symbols)
    ):
        return None
    a, b = symbols
    factor = expression.coeff(a, 2)
    if not factor.is_number or sympy.expand(expression - factor * (a - b) ** 2) != 0:
        return None
    for node, known in inner.interior.items():
        region.interior.setdefault(node, known)
    for node, reader in inner.readers.items():
        region.seen_by(reader, node)
    left, right = (Factor(inner.leaves[symbol].node, inner.leaves[symbol].dims) for symbol in symbols)
    kind: Literal["root", "square"] = "root" if call.name in _NORMS else "square"
    return Contraction(call, dims, left, right, summed, factor / sympy.Integer(size), distance=kind)


def _summand(inner: Region, call: Call, dims: Dims) -> tuple[sympy.Expr, tuple[Axis, ...]] | None:
    """What is summed, and over which axes."""
    if call.name == "einsum":
        found = read(inner, call, dims)
        if found is None:
            return None
        parts = [inner.express(each.node, each.dims, call.node) for each in (found.left, found.right)]
        return parts[0] * parts[1], found.summed
    if call.name in _NORMS and call.get("p", call.get("ord")) not in (None, 2, 2.0, "fro"):
        return None
    reduced: Any = reduction_dims(call, dims)
    if reduced is None or call.get("dtype") is not None:
        return None
    expression = inner.express(call.input, reduced[0], call.node)
    return (expression**2 if call.name in _NORMS else expression), reduced[1]


def behind_layout(node: fx.Node) -> fx.Node:
    """The tensor that a node shows in another layout."""
    while (call := read_call(node)) is not None and layout.is_view(call) and layout.is_in_axes(call):
        node = call.input
    return node
