"""Squared distances between all rows of two tensors: ``sum((a - b) ** 2)``, a contraction with squares beside it.

``|a - b|^2`` is ``|a|^2 + |b|^2 - 2 a . b``. Which rows are compared is said by axes, as in every contraction; whether the
difference is squared by a power, a product or a norm makes no difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import sympy
from torch import fx

from lz_compile.ground.sizes import product, shape_of
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.axes import Axis, Dims, broadcast_from, fresh
from lz_compile.passes.formula.contraction import Contraction, Factor
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of

if TYPE_CHECKING:
    from lz_compile.passes.formula.algebra import Region

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
            source = effects.calls.get(source.input) if isinstance(source.input, fx.Node) else None
        if source is not None and source.name == "sub" and _is_outer(source):
            found.append(source)
    return found


def _is_outer(call: Call) -> bool:
    tensors = [tensor_of(call.get(name)) for name in ("input", "other")]
    if any(tensor is None for tensor in tensors):
        return False
    first, second = (shape_of(tensor)[::-1] for tensor in tensors if tensor is not None)
    pairs = list(zip(first, second, strict=False))
    return any(a == 1 != b for a, b in pairs) and any(b == 1 != a for a, b in pairs)


def read(region: Region, call: Call, dims: Dims) -> Contraction | None:
    """The contraction in a squared distance, or in the root of one; None where the call measures none."""
    if call.name == "cdist":
        return _cdist(region, call, dims)
    differences = _differences(region.effects, call) if call.name in _NAMES else []
    return _reduced(region, call, dims, differences[0]) if differences else None


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


def _reduced(region: Region, call: Call, dims: Dims, difference: Call) -> Contraction | None:
    """A reduction of what is a multiple of a squared difference, down to the tensors that differ."""
    stops = {_behind_layout(region.effects, difference.get(name)) for name in ("input", "other")}
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
        found = contraction.read(inner, call, dims)
        if found is None:
            return None
        parts = [inner.express(each.node, each.dims, call.node) for each in (found.left, found.right)]
        return parts[0] * parts[1], found.summed
    if call.name in _NORMS and call.get("p", call.get("ord")) not in (None, 2, 2.0, "fro"):
        return None
    reduced: Any = contraction.reduction_dims(call, dims)
    if reduced is None or call.get("dtype") is not None:
        return None
    expression = inner.express(call.input, reduced[0], call.node)
    return (expression**2 if call.name in _NORMS else expression), reduced[1]


def _behind_layout(effects: Effects, node: fx.Node) -> fx.Node:
    """The tensor that a node shows in another layout."""
    while (call := effects.calls.get(node)) is not None and layout.is_view(call) and tensor_of(call.input) is not None:
        if layout.read_input_dims(call, fresh(shape_of(known_tensor(node)))) is None:
            break
        node = call.input
    return node
