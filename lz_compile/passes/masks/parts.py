"""The conditions of a mask by what they are: bounds of a band, documents, padding, and others.

Masks under which a query sees the keys before a number of its own are ``arange(keys) < lengths[:, None]`` and the like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TypeAlias

import torch

from lz_compile.ground.sizes import as_size
from lz_compile.lowering.bands import Band
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.formula.piecewise import Piecewise
from lz_compile.passes.formula.polynomial import ONE, Coefficient, Polynomial, Variable
from lz_compile.passes.formula.predicates import (
    AtLeast,
    Every,
    Given,
    Predicate,
    Some,
    Zero,
    at_least,
    both,
    conjuncts,
    either,
    implies,
    negation,
    variables,
    zero,
)
from lz_compile.passes.formula.reader import Source
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.masks import bands as mask_bands
from lz_compile.passes.masks.bands import Bound, Positions
from lz_compile.passes.masks.index_reading import Reader
from lz_compile.passes.masks.meaning import Axes, Documents, Ends, Flag, Terms


def of_conditions(parts: Iterable[Predicate], reader: Reader, at: Positions, batch: frozenset[Axis]) -> Ends | None:
    """What conditions say together, None where that is anything else."""
    keys = frozenset(at.key_axes)
    lasts: list[Polynomial] = []  # the position of the last key that a query sees, and of the first
    firsts: list[Polynomial] = []
    for part in parts:
        if not isinstance(part, AtLeast):
            return None
        for rest, found in ((part.value + at.key, lasts), (at.key - part.value, firsts)):
            if rest.axes.isdisjoint(keys):
                found.append(rest)
                break
        else:
            return None
    if len(lasts) > 1:
        return None
    if not lasts:  # all keys, of which a window or several queries would see some
        return None if at.query_axes or firsts else Ends(buffers=tuple(reader.buffers))
    last, begin = lasts[0], _begin(lasts[0], firsts, reader, batch)
    if begin is None:
        return None
    end = last - at.query + at.queries
    sum_ = _tensors(end, reader, batch) or _tensor(end, reader, batch)
    if sum_ is None:  # overwritten later, or no sum; how many keys there are can still be counted
        is_fixed = bool(at.query_axes) or bool(firsts) or not end.axes <= batch
        return None if is_fixed else Ends(is_counted=True, buffers=tuple(reader.buffers))
    return Ends(*sum_, begin[0], buffers=tuple(reader.buffers), firsts=begin[1])


_Sum: TypeAlias = "tuple[Terms, int]"


def _begin(
    last: Polynomial, firsts: list[Polynomial], reader: Reader, batch: frozenset[Axis]
) -> tuple[int | None, tuple[_Sum, ...]] | None:
    """How many keys a query sees at most, and before which keys its request sees none; None where that is anything else."""
    window, found = None, list[_Sum]()
    for each in firsts:
        count = (last - each + ONE).constant
        sum_ = None if isinstance(count, int) else _tensors(each, reader, batch) or _tensor(each, reader, batch)
        if sum_ is not None:
            found.append(sum_)
        elif isinstance(count, int) and count > 0:
            window = count if window is None else min(window, count)
        else:
            return None
    return window, tuple(found)


def _tensors(end: Polynomial, reader: Reader, batch: frozenset[Axis]) -> _Sum | None:
    """A sum of tensors of integers that belong to rows of the batch, and of a number; None where it is anything else."""
    found, shift = [], 0
    for monomial, factor in end.terms.items():
        if len(monomial) > 1 or not isinstance(factor, int):
            return None
        if not monomial:
            shift = factor
            continue
        (each,) = monomial
        if each.is_float or not isinstance(each.source, Source) or not each.axes <= batch:
            return None
        if not is_stable(reader, each.source):
            return None
        found.append((each.source.node, each.source.dims, factor))
    return (tuple(found), shift) if found else None


def _tensor(end: Polynomial, reader: Reader, batch: frozenset[Axis]) -> _Sum | None:
    """The same of a tensor that is computed in the graph, whatever it is made of."""
    for known, source in reader.sources.items():
        if not isinstance(known, Polynomial) or not known.axes <= batch or not is_stable(reader, source):
            continue
        rest = (end - known).constant
        if known.axes and isinstance(rest, int):
            return ((source.node, source.dims, 1),), rest
    return None


class Parts:
    """The conditions of a conjunction.

    ``where`` is the conjunction, ``bounds`` are those on the distance of key and query, ``documents`` equalities of what
    belongs to a query and to a key, ``flags`` what a tensor says of keys or queries alone, and ``rest`` all others.
    """

    def __init__(self, reader: Reader, axes: Axes, at: Positions, where: Predicate) -> None:
        self._reader, self._axes, self._at = reader, axes, at
        given = (self._sides(part) for part in _ordered(where))
        self.where = in_one_document(reader, where, *(each for each in given if each is not None))
        self.bounds: list[Bound] = []
        self.documents: list[Documents] = []
        self.rest: list[Predicate] = []
        self._same: list[Predicate] = []
        flags: dict[Predicate, Flag] = {}
        for part in _ordered(self.where):
            bounds, sides, flag = mask_bands.bounds(part, at), self._sides(part), self._flag(part)
            if bounds is not None:
                self.bounds.extend(bounds)
            elif sides is not None:
                self.documents.append(sides)
                self._same.append(part)
            elif flag is not None:
                flags[part] = flag
            else:
                self.rest.append(part)
        self._cover(flags)
        kept = [flag for part, flag in flags.items() if not any(o != part and implies(o, part) for o in flags)]
        self.flags = tuple(sorted(kept, key=lambda each: reader.effects.position[each.node]))

    def _cover(self, flags: dict[Predicate, Flag]) -> None:
        """Conditions that no tensor holds by themselves, as those that one holds together with others."""
        for part in list(self.rest):
            for known in list(self._reader.sources):
                if isinstance(known, Polynomial) or not implies(known, part) or not implies(self.where, known):
                    continue
                flag = self._flag(known)
                if flag is not None:
                    flags[known] = flag
                    self.rest.remove(part)
                    break

    def _sides(self, predicate: Predicate) -> Documents | None:
        return sides(self._reader, predicate, self._axes.batch, self._axes.queries, self._axes.keys)

    def _flag(self, predicate: Predicate) -> Flag | None:
        """The tensor that holds a condition on keys (or queries) alone."""
        if isinstance(predicate, Given):
            source, holds = predicate.flag.source, predicate.holds
        else:
            direct, opposite = (self._reader.sources.get(each) for each in (predicate, negation(predicate)))
            source, holds = (direct, True) if direct is not None else (opposite, False)
        if not isinstance(source, Source) or not is_stable(self._reader, source):
            return None
        is_mixed = _has(source.dims, self._axes.queries) and _has(source.dims, self._axes.keys)
        return None if is_mixed else Flag(source.node, source.dims, holds)

    @property
    def names(self) -> Iterator[str]:
        """The kinds of everything but the bounds."""
        for part in self._same:
            yield "document" if any(each.is_data for each in variables(part)) else "block"
        for flag in self.flags:
            yield "query padding" if _has(flag.dims, self._axes.queries) else "key padding"
        for part in self.rest:
            alternatives = part.parts if isinstance(part, Some) else frozenset({part})
            is_prefix = any(isinstance(each, AtLeast) and self._is_of_keys(each.value) for each in alternatives)
            yield "prefix" if is_prefix else "mask"

    def _is_of_keys(self, value: Polynomial) -> bool:
        is_known = not any(each.is_data for each in value.variables)
        return is_known and bool(value.axes) and value.axes <= frozenset(self._axes.keys)

    def label(self, band: Band | None) -> str:
        """What the mask is called."""
        bands = [] if band is None else ["causal" if (band.lower, band.upper) == (None, 0) else "sliding window"]
        return " and ".join(dict.fromkeys((*bands, *self.names))) or "none"


def is_stable(reader: Reader, source: Source) -> bool:
    """Whether a tensor can be read in place of the mask: in axes of the scores, and never overwritten."""
    return reader.is_plain(source.dims) and not reader.effects.is_overwritten(source.node)


def _ordered(where: Predicate) -> list[Predicate]:
    return sorted(conjuncts(where), key=repr)


def _has(dims: Dims, axes: tuple[Axis, ...]) -> bool:
    return any(axis in axes for dim in dims for axis in dim)


# ---- documents -------------------------------------------------------------------------------------------------------


def sides(
    reader: Reader, predicate: Predicate, batch: Iterable[Axis], queries: Iterable[Axis], keys: Iterable[Axis]
) -> Documents | None:
    """The tensors that a condition compares, one of queries and one of keys; None where it is something else."""
    if not isinstance(predicate, Zero) or not predicate.holds:
        return None
    rows, columns = frozenset(queries), frozenset(keys)
    value = predicate.value
    query = Polynomial({each: factor for each, factor in value.terms.items() if not _axes(each).isdisjoint(rows)})
    for one, factor, offset in _sources(reader, query):
        other = reader.sources.get((query - value).scaled(factor) + offset)
        found = None if other is None else Documents(*(Leaf(each.node, each.dims) for each in (one, other)))
        if found is not None and _are_apart(reader, found, frozenset(batch), rows, columns):
            return found
    return None


def _axes(monomial: tuple[Variable, ...]) -> frozenset[Axis]:
    return frozenset(axis for each in monomial for axis in each.axes)


def _sources(reader: Reader, value: Polynomial) -> list[tuple[Source, Coefficient, Polynomial]]:
    """Tensors that hold a multiple of ``value`` and a constant, with these two."""
    found: list[tuple[Source, Coefficient, Polynomial]] = []
    first = next(iter(value.terms), None)
    for each, source in reader.sources.items():
        if first is None or not isinstance(each, Polynomial) or first not in each.terms:
            continue
        factor = Fraction(each.terms[first]) / value.terms[first]
        offset = each - value.scaled(factor)
        if offset.constant is not None:
            found.append((source, factor, offset))
    return found


def _are_apart(
    reader: Reader, found: Documents, batch: frozenset[Axis], queries: frozenset[Axis], keys: frozenset[Axis]
) -> bool:
    own = [each.axes for each in (found.query, found.key)]
    is_stable = not any(reader.effects.is_overwritten(each.node) for each in (found.query, found.key))
    return is_stable and own[0] <= batch | queries and own[1] <= batch | keys


def in_one_document(reader: Reader, where: Predicate, *found: Documents) -> Predicate:
    """A conjunction that says that a query and a key are of one document, with what that says of their positions.

    Where documents are runs of positions that grow by one, a distance of positions is one of indices:
    ``cumsum(diff(positions) != 1)`` counts where positions jump. Where it is equal for two indices, nothing jumps between
    them, and the positions differ as the indices do.
    """
    for each in found:
        one, two = _positions(reader, each.query), _positions(reader, each.key)
        if one is None or two is None or not _are_same_rows(each, one[2]):
            continue
        key = next(iter(two[0].variables), None)
        if key is not None and two[0].terms == {(key,): 1}:
            value = one[0] + two[1] - one[1]
            where = _replaced(where, key, value)
    return where


def _are_same_rows(found: Documents, dim: int) -> bool:
    one, two = found.query, found.key
    rest = [(*each.dims[:dim], *each.dims[dim + 1 :]) for each in (one, two)]
    return one.node is two.node and rest[0] == rest[1]


def _positions(reader: Reader, source: Leaf) -> tuple[Polynomial, Polynomial, int] | None:
    """The position whose jumps a tensor counts, the index along which it does so, and the dimension."""
    calls = reader.effects.calls
    counted = calls.get(source.node)
    if counted is None or counted.name != "cumsum" or reader.effects.is_overwritten(source.node):
        return None
    jumps = calls.get(counted.input)
    steps = None if jumps is None or jumps.name != "ne" else calls.get(jumps.input)
    if jumps is None or steps is None or steps.name != "diff":
        return None
    positions, rank = tensor_of(steps.input), len(source.dims)
    dims = [each % rank if isinstance(each, int) else None for each in (counted.get("dim"), steps.get("dim", -1))]
    before, is_whole = tensor_of(steps.get("prepend")), steps.get("append") is None
    is_one = jumps.get("other") == 1 and steps.get("n", 1) == 1
    if positions is None or before is None or not (is_one and is_whole) or dims[0] is None or dims[0] != dims[1]:
        return None
    nodes = (jumps.node, steps.node, steps.input)
    kinds = [tensor_of(node) for node in (counted.node, steps.node, steps.input)]
    if not all(each is not None and each.dtype in (torch.int64, torch.int32) for each in kinds):  # others wrap
        return None
    if as_size(before.shape[dims[0]]) != 1 or any(reader.effects.is_overwritten(node) for node in nodes):
        return None
    value = reader.read(steps.input, source.dims, steps.node)
    single = value.single if isinstance(value, Piecewise) else None
    return None if single is None else (single, reader.place(source.dims[dims[0]]), dims[0])


def _replaced(predicate: Predicate, variable: Variable, value: Polynomial) -> Predicate:
    """The condition with a polynomial for a variable, where that comes out."""
    match predicate:
        case AtLeast(inner):
            found = inner.replaced(variable, value)
            return predicate if found is None else at_least(found)
        case Zero(inner, holds):
            found = inner.replaced(variable, value)
            if found is None:
                return predicate
            return zero(found) if holds else negation(zero(found))
        case Every(parts):
            return both(*(_replaced(part, variable, value) for part in parts))
        case Some(parts):
            return either(*(_replaced(part, variable, value) for part in parts))
    return predicate
