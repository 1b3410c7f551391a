"""A rotation of pairs of features, read at the two places of a pair.

A feature axis is cut into a pair axis ``p`` of two and an axis ``j`` of pairs, in either order. The result at ``p = 0`` and
at ``p = 1`` is an expression each (:mod:`parts`); with ``a`` and ``b`` the source at two places they are ``a * c - b * s``
and ``b * c + a * s``, whatever is sliced, stacked and joined on the way. ``c`` and ``s`` are expressions over the leaves
that are left, which do not depend on the source.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from lz_compile.ground.sizes import Shape, shape_of
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, fresh
from lz_compile.passes.formula.expressions import Values, is_cast
from lz_compile.passes.formula.parts import FUNCTIONS, Edge, Parts
from lz_compile.passes.formula.places import (
    Fixed,
    FixedIndex,
    affine,
    canonical,
    evenly,
    has_fixed_index,
    paired,
    placed,
)
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of

#: Of two products, a sum, and tables that are scaled: what has more is no rotation.
_MOST_PARTS = 64


@dataclass(frozen=True)
class Table:
    """What every feature is multiplied by: an expression over ``leaves``, which have the pair axis where halves differ.

    Where the second of a pair has another expression, that is ``second``, and no leaf has the pair axis.
    """

    expression: sympy.Expr
    leaves: dict[sympy.Symbol, Leaf]
    is_half: bool
    second: sympy.Expr | None = None


@dataclass(frozen=True)
class Rotation:
    """``source * cos + rotated(source) * sin``; the source has axes ``dims``, the result ``output_dims``.

    ``rows`` are the axes that stay by themselves, ``features`` those of the last dimension of input and result in their
    order, ``pair`` and ``pairs`` those of the features that are turned (the same where all of them are).
    """

    region: Parts
    source: fx.Node
    dims: Dims
    output: fx.Node
    output_dims: Dims
    rows: tuple[Axis, ...]
    features: tuple[Axis, ...]
    pair: Axis
    pairs: Axis
    cos: Table
    sin: Table
    is_interleaved: bool
    start: int

    @property
    def turned(self) -> tuple[Axis, ...]:
        """The axes of the features that are turned, in their order."""
        return (self.pairs, self.pair) if self.is_interleaved else (self.pair, self.pairs)


@dataclass(frozen=True)
class _Cut:
    """The result at both places of a pair, and as it is where all of its features are turned.

    Otherwise they are turned from ``start`` on; ``kept`` has the starts of those that are not, with an axis for each run.
    """

    rows: Dims
    pairs: Axis
    halves: tuple[Dims, Dims]
    pair: Axis
    is_interleaved: bool
    whole: Dims | None = None
    start: int = 0
    width: int = 0
    kept: Mapping[int, Axis] = field(default_factory=dict)

    @property
    def kept_places(self) -> Iterator[tuple[Axis, ...]]:
        """Where the features are that are not turned."""
        return (placed(start, ((axis, 1),), self.width) for start, axis in self.kept.items())


def read(effects: Effects, source: fx.Node, output: fx.Node, known: Values) -> Rotation | None:
    """The rotation of ``source`` that ``output`` is, None where it is none; ``known`` gives the values of constants."""
    shape = shape_of(tensor_of(output))  # type: ignore[arg-type]
    edge = Edge(effects, source)
    kept = _kept(effects, edge, output, shape)
    cuts = itertools.chain(_cuts(shape), _cuts_ahead(shape)) if not kept else _cuts_of_part(shape, kept)
    found = (_try(_parts(effects, edge, cut, known), source, output, cut) for cut in cuts)
    return next((each for each in found if each is not None), None)


def _parts(effects: Effects, edge: Edge, cut: _Cut, known: Values) -> Parts:
    """A region of its own for each way to cut, so that all of its axes belong together."""
    axes = [cut.pairs, *(axis for axis in cut.kept.values())]
    return Parts(
        effects,
        expand_masks=True,
        stops=edge,
        functions=FUNCTIONS,
        features=axes,
        places=2 + len(cut.kept),
        most_parts=_MOST_PARTS,
        known=known,
    )


def _try(region: Parts, source: fx.Node, output: fx.Node, cut: _Cut) -> Rotation | None:
    try:
        first = region.express(output, cut.halves[0])
        found = _source_pair(region, cut.pair)  # most are none by now, and the other half is not read
        second = first if found is None else region.express(output, cut.halves[1])
    except LayoutError:
        return None
    if found is None or len(region.source_symbols) != 2:
        return None
    (a, b, dims), first, second = found, sympy.expand(first), sympy.expand(second)
    of_first, of_second = _factors(first, a, b), _factors(second, b, a)
    if of_first is None or of_second is None:
        return None
    cos = _table(region, of_first[0], of_second[0], cut.pair)
    sin = _table(region, -of_first[1], of_second[1], cut.pair)
    if cos is None or sin is None or not _spans(cos, cut) or not _spans(sin, cut):
        return None
    rows, features = axes_of(cut.rows), tuple[Axis, ...]()
    if cut.whole is not None:
        if any(has_fixed_index(dim) for dim in dims) or set(axes_of(dims)) != {*rows, *atoms((cut.pairs,)), cut.pair}:
            return None
        features = (cut.pairs, cut.pair) if cut.is_interleaved else (cut.pair, cut.pairs)
        output_dims: Dims = cut.whole
    else:
        places = tuple(half[-1] for half in cut.halves)
        is_same = canonical(tuple(region.leaves[symbol].dims[-1] for symbol in (a, b))) == canonical(places)
        if not is_same or any(has_fixed_index(dim) for dim in dims[:-1]) or set(axes_of(dims[:-1])) != set(rows):
            return None
        if not all(_is_kept(region, source, output, (*cut.rows, place)) for place in cut.kept_places):
            return None
        features = (Axis(cut.width),)
        dims, output_dims = (*dims[:-1], features), (*cut.rows, features)
    return Rotation(
        region,
        source,
        dims,
        output,
        output_dims,
        rows,
        features,
        cut.pair,
        cut.pairs,
        cos,
        sin,
        cut.is_interleaved,
        cut.start,
    )


def _source_pair(region: Parts, pair: Axis) -> tuple[sympy.Symbol, sympy.Symbol, Dims] | None:
    """The source at the two places of a pair, if it is read there alone, and its dimensions with the axis of pairs."""
    if len(region.source_symbols) != 2:
        return None
    first, second = region.source_symbols
    for a, b in ((first, second), (second, first)):
        dims = paired(region.leaves[a].dims, region.leaves[b].dims, pair)
        if dims is not None:
            return a, b, dims
    return None


def _factors(expression: sympy.Expr, own: sympy.Symbol, other: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr] | None:
    """``(c, s)`` of ``own * c + other * s``."""
    factors = expression.coeff(own), expression.coeff(other)
    if sympy.expand(expression - own * factors[0] - other * factors[1]) != 0:
        return None
    if any(factor == 0 or factor.has(own, other, sympy.I) for factor in factors):
        return None
    return factors


def _table(region: Parts, first: sympy.Expr, second: sympy.Expr, pair: Axis) -> Table | None:
    """One table for both places of a pair."""
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    kinds = (sympy.Add, sympy.Mul, sympy.Symbol, sympy.Number)
    if not all(isinstance(each, kinds) for both in (first, second) for each in sympy.preorder_traversal(both)):
        return None
    leaves = {symbol: region.leaves[symbol] for symbol in symbols}
    if first == second:
        return Table(first, leaves, True)
    joined = region.joined(first, second, pair)
    if first.xreplace({symbol: other for symbol, (other, _) in joined.items()}) == second:
        return Table(first, {symbol: leaf for symbol, (_, leaf) in joined.items()}, False)
    axes = [{axis for s in each.free_symbols for axis in moving(leaves[s].dims)} for each in (first, second)]
    return Table(first, leaves, False, second) if axes[0] == axes[1] else None


def _spans(table: Table, cut: _Cut) -> bool:
    """Whether a table differs between pairs (it may repeat), and has no axes that the result lacks."""
    axes = {axis for leaf in table.leaves.values() for axis in moving(leaf.dims)}
    own = {*axes_of(cut.rows), *atoms((cut.pairs,)), cut.pair}
    return not axes.isdisjoint(atoms((cut.pairs,))) and axes <= own


def moving(dims: Dims) -> set[Axis]:
    """The axes of a place, without what stands still."""
    found = {axis for dim in dims for axis in atoms(dim) if not isinstance(axis, FixedIndex)}
    return found | {axis for dim in dims if has_fixed_index(dim) for axis, _ in affine(dim)[1]}


# ---- where a pair may be -------------------------------------------------------------------------------------------------


def _cuts(shape: Shape) -> Iterator[_Cut]:
    """The ways in which the last dimension, or the last two, may be pairs; those of one element do not count."""
    single = next((at for at in (len(shape) - 1, len(shape) - 2) if at > 0 and shape[at] == 1), None)
    if single is not None:
        yield from (_with_single(cut, single) for cut in _cuts((*shape[:single], *shape[single + 1 :])))
        return
    last = shape[-1]
    before = shape[-2] if len(shape) > 1 else 1
    if isinstance(last, int) and last >= 4 and last % 2 == 0:
        yield _cut(shape[:-1], last // 2, False, False)
        yield _cut(shape[:-1], last // 2, True, False)
    if last == 2 and isinstance(before, int) and before > 1:
        yield _cut(shape[:-2], before, True, True)
    if before == 2 and isinstance(last, int) and last > 1:
        yield _cut(shape[:-2], last, False, True)


def _with_single(cut: _Cut, at: int) -> _Cut:
    """The same with a dimension of one element more."""

    def more(dims: Dims) -> Dims:
        return (*dims[:at], (), *dims[at:])

    first, second = map(more, cut.halves)
    return replace(cut, halves=(first, second), whole=None if cut.whole is None else more(cut.whole))


def _cut(rows: Shape, count: int, is_interleaved: bool, is_apart: bool) -> _Cut:
    given, pairs, pair = fresh(rows), Axis(count), Axis(2)

    def dims(own: Axis) -> Dims:
        order = (pairs, own) if is_interleaved else (own, pairs)
        return (*given, (order[0],), (order[1],)) if is_apart else (*given, order)

    return _Cut(given, pairs, (dims(Fixed(2, 0)), dims(Fixed(2, 1))), pair, is_interleaved, dims(pair))


def _cuts_ahead(shape: Shape) -> Iterator[_Cut]:
    """A pair may also be ahead of all: where its halves are stacked, and moved to where they belong later."""
    if len(shape) > 2 and shape[0] == 2 and isinstance(shape[-1], int) and shape[-1] > 1:
        rows, pairs, pair = fresh(shape[1:-1]), Axis(shape[-1]), Axis(2)
        first, second, whole = (((own,), *rows, (pairs,)) for own in (Fixed(2, 0), Fixed(2, 1), pair))
        yield _Cut(rows, pairs, (first, second), pair, True, whole)


def _cuts_of_part(shape: Shape, kept: Sequence[range]) -> Iterator[_Cut]:
    """The ways in which the features that are not ``kept`` may be pairs, if these are one run."""
    width = shape[-1]
    assert isinstance(width, int), "features are counted"
    bounds = [0, *(bound for part in kept for bound in (part.start, part.stop)), width]
    runs = [range(*run) for run in zip(bounds[::2], bounds[1::2], strict=True) if run[0] != run[1]]
    if len(runs) != 1 or len(runs[0]) % 2 or len(runs[0]) < 4:
        return
    start, count = runs[0].start, len(runs[0]) // 2
    for is_interleaved in (False, True):
        rows, pairs = fresh(shape[:-1]), Axis(count)
        step, apart = (2, 1) if is_interleaved else (1, count)
        first, second = ((*rows, placed(start + apart * i, ((pairs, step),), width)) for i in (0, 1))
        axes = {part.start: Axis(len(part)) for part in kept}
        yield _Cut(rows, pairs, (first, second), Axis(2), is_interleaved, None, start, width, axes)


def _kept(effects: Effects, edge: Edge, output: fx.Node, shape: Shape) -> list[range]:
    """The features that are as in the source, where the result is joined from several."""
    node = output
    while (call := effects.calls.get(node)) is not None and is_cast(call):
        node = call.input
    tensors = call.get("tensors") if call is not None and call.name == "cat" else None
    own = shape_of(tensor_of(edge.source))[-1:]  # type: ignore[arg-type]
    is_last = call is not None and call.get("dim", 0) in (-1, len(shape) - 1)
    if not isinstance(tensors, (tuple, list)) or not is_last or own != shape[-1:] or not isinstance(shape[-1], int):
        return []
    start, found = 0, []
    for part in tensors:
        tensor = tensor_of(part)
        size = None if tensor is None else shape_of(tensor)[-1]
        if not isinstance(size, int):
            return []
        if size == 0:
            continue
        rows, axis = fresh(shape[:-1]), Axis(size)
        region = Parts(effects, expand_masks=True, stops=edge, functions=FUNCTIONS, features=[axis])
        if _is_kept(region, edge.source, output, (*rows, placed(start, ((axis, 1),), shape[-1]))):
            found.append(range(start, start + size))
        start += size
    return found


def _is_kept(region: Parts, source: fx.Node, output: fx.Node, dims: Dims) -> bool:
    """Whether the result at a place is the source there."""
    try:
        expression = region.express(output, dims)
    except LayoutError:
        return False
    leaf = region.leaves.get(expression) if isinstance(expression, sympy.Symbol) else None
    return leaf is not None and leaf.node is source and leaf.dims[-1] == dims[-1] and len(leaf.dims) == len(dims)


def check(rotation: Rotation) -> None:
    """That every table can be cut out of what holds it.

    Raises:
        LayoutError: one cannot.
    """
    for table in (rotation.cos, rotation.sin):
        for leaf in table.leaves.values():
            for dim in leaf.dims:
                evenly(affine(dim)[1] if has_fixed_index(dim) else ())
