"""A family that the package does not have, ``rms_norm((x W) * (x V))``: what a recogniser takes besides the formula core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import Dims, LayoutError, fresh
from lz_compile.passes.formula.moments import MEAN_SQUARE, ROW, Moments
from lz_compile.passes.formula.piecewise import Piecewise, Value
from lz_compile.passes.formula.reader import Reader, Source, Sum
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import tensor_of


@dataclass(frozen=True)
class BilinearGate:
    """The input, both weights, and the epsilon of the norm of their product."""

    input: fx.Node
    weights: frozenset[fx.Node]
    eps: float


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[BilinearGate]:
    """Every norm of a product of two projections of one input."""
    tensors = {node: tensor for node in graph.nodes if (tensor := tensor_of(node)) is not None and tensor.dim()}
    for node, tensor in tensors.items():
        reader, dims = Reader(effects), fresh(shape_of(tensor))
        reader.give(dims)
        read = [_projection(each) for each in _factors(reader.read(node, dims))]
        shared = frozenset.intersection(*read) if len(read) == 2 else frozenset()
        for norm in tensors if len(shared) == 1 and all(read) else ():
            eps = _eps(effects, node, norm)
            if eps is not None:
                ((given, _),) = shared
                yield BilinearGate(given, frozenset(each for each, _ in read[0] | read[1]) - {given}, eps)


def _factors(value: Value) -> tuple[object, ...]:
    """What a value is a product of, without a number before it."""
    single = value.single if isinstance(value, Piecewise) else None
    return tuple(each.source for each in next(iter(single.terms))) if single and [*single.terms.values()] == [1] else ()


def _projection(factor: object) -> frozenset[tuple[fx.Node, Dims]]:
    """The two tensors of which a factor is a sum of products, and where each is read but for what is summed over."""
    sources = _factors(factor.body) if isinstance(factor, Sum) and len(factor.over) == 1 else ()
    if not isinstance(factor, Sum) or len(sources) != 2:
        return frozenset()
    reads = [each for each in sources if isinstance(each, Source)]
    return frozenset(
        (each.node, tuple(tuple(a for a in dim if a not in factor.over) for dim in each.dims)) for each in reads
    )


def _eps(effects: Effects, row: fx.Node, norm: fx.Node) -> float | None:
    """The epsilon, where a value is a row over the root of its mean square."""
    try:
        found = Moments(effects, row).read(norm, fresh(shape_of(tensor_of(norm))))  # type: ignore[arg-type]
    except (LayoutError, RefusedError):
        return None
    rest = sympy.simplify((ROW / found) ** 2 - MEAN_SQUARE) if found.has(MEAN_SQUARE) else None
    return float(rest) if rest is not None and rest.is_number else None
