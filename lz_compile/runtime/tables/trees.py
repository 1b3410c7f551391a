"""The trees of dispatch tables: from solved points or decided regions to a tree over sizes, and from sizes to symbols."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lz_compile.runtime.problem.decision_tree import Leaf, Node, Range, Split, edges, from_intervals, restrict, simplify

if TYPE_CHECKING:
    from lz_compile.runtime.problem.context import Symbols

UNSAID = Leaf(None, "the table does not speak of these sizes")
#: The largest size that a symbol is expected to have.
MAX_SIZE = 1 << 40

Point = Mapping[str, int]


def only_within(ranges: Mapping[str, Range], node: Node, otherwise: Node = UNSAID) -> Node:
    """The tree within the ranges of sizes, and ``otherwise`` outside of them."""
    found = node
    for dim, (low, high) in reversed(list(ranges.items())):
        if high is not None:
            found = Split(dim, high + 1, found, otherwise)
        if low > 0:
            found = Split(dim, low, otherwise, found)
    return found


def of_points(points: Sequence[tuple[Point, str]], dims: Sequence[str]) -> Node:
    """The tree over buckets: each point stands for all sizes up to its own and above those of the point before it.

    It does not speak of sizes beyond the last point, nor of combinations of buckets in which there is no point.
    """
    sizes = {dim: sorted({point[dim] for point, _ in points}) for dim in dims}
    return simplify(_of_points(points, sizes))


def _of_points(points: Sequence[tuple[Point, str]], sizes: Mapping[str, Sequence[int]]) -> Node:
    if not points:
        return UNSAID
    if not sizes:
        return Leaf(points[0][1])
    (dim, own), *others = sizes.items()
    parts = [_of_points([each for each in points if each[0][dim] == size], dict(others)) for size in own]
    return from_intervals(dim, [size + 1 for size in own], [*parts, UNSAID])


def of_regions(regions: Iterable[tuple[Mapping[str, Range], str]]) -> Node:
    """The tree that gives every region its kernel, a later one where several overlap, and is silent elsewhere."""
    found: Node = UNSAID
    for ranges, kernel_id in regions:
        found = only_within(ranges, Leaf(kernel_id), found)
    return simplify(found)


def over_symbols(node: Node, sizes: Symbols) -> Node | None:
    """The tree with questions about symbols in place of those about sizes.

    None where that cannot be: a size depends on several symbols, on one that no guard can ask, or falls as it grows.
    """
    dims = edges(node)
    if any(len(names := sizes.names_in((dim,))) != 1 or names[0] not in sizes.symbols for dim in dims):
        return None
    symbol_of = {dim: sizes.names_in((dim,))[0] for dim in dims}
    hints = {name: symbol.hint for name, symbol in sizes.symbols.items()}
    moved = {dim: [_edge(sizes, hints, dim, symbol_of[dim], at) for at in ats] for dim, ats in dims.items()}
    if any(at is None for ats in moved.values() for at in ats):
        return None
    places = {(dim, at): there for dim, ats in dims.items() for at, there in zip(ats, moved[dim], strict=True)}

    def substituted(part: Node) -> Node:
        if isinstance(part, Leaf):
            return part
        at = places[part.dim, part.at]
        assert at is not None, "looked for above"
        return Split(symbol_of[part.dim], at, substituted(part.below), substituted(part.above))

    ranges = {name: (symbol.lower, symbol.upper) for name, symbol in sizes.symbols.items()}
    return simplify(restrict(substituted(node), ranges))


def _edge(sizes: Symbols, hints: Mapping[str, int], dim: str, symbol: str, at: int) -> int | None:
    """The smallest value of a symbol at which a size has reached ``at``; None if the size does not grow with it."""

    def size(value: int) -> int:
        return sizes.at({**hints, symbol: value})[dim]

    found = bisect.bisect_left(range(MAX_SIZE), at, key=size)
    around = sorted({1, 2, max(found - 1, 1), max(found, 1), 2 * found + 1, hints[symbol]})
    values = [size(value) for value in around]
    return found if values == sorted(values) and values[0] < values[-1] else None
