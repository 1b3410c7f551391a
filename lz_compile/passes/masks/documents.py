"""Packed sequences: conditions that a query and a key are of the same document, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch

from lz_compile.ground.sizes import as_size
from lz_compile.passes.formula.axes import Axis, atoms
from lz_compile.passes.formula.piecewise import Piecewise
from lz_compile.passes.formula.polynomial import Coefficient, Polynomial, Variable
from lz_compile.passes.formula.predicates import (
    AtLeast,
    Every,
    Predicate,
    Some,
    Zero,
    at_least,
    both,
    either,
    negation,
    zero,
)
from lz_compile.passes.formula.reader import Source
from lz_compile.passes.graph.view import Call, tensor_of
from lz_compile.passes.masks.index_reading import Reader


@dataclass(frozen=True)
class Sides:
    """Integers, equal where a query and a key are of the same document."""

    query: Source
    key: Source


def sides(
    reader: Reader, predicate: Predicate, batch: Iterable[Axis], queries: Iterable[Axis], keys: Iterable[Axis]
) -> Sides | None:
    """The tensors that a condition compares, one of queries and one of keys; None where it is something else."""
    if not isinstance(predicate, Zero) or not predicate.holds:
        return None
    rows, columns = frozenset(queries), frozenset(keys)
    value = predicate.value
    query = Polynomial({each: factor for each, factor in value.terms.items() if not _axes(each).isdisjoint(rows)})
    for one, factor, offset in _sources(reader, query):
        other = reader.sources.get((query - value).scaled(factor) + offset)
        found = None if other is None else Sides(one, other)
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
    reader: Reader, found: Sides, batch: frozenset[Axis], queries: frozenset[Axis], keys: frozenset[Axis]
) -> bool:
    own = [frozenset(axis for dim in each.dims for axis in atoms(dim)) for each in (found.query, found.key)]
    is_stable = not any(reader.effects.is_overwritten(each.node) for each in (found.query, found.key))
    return is_stable and own[0] <= batch | queries and own[1] <= batch | keys


def in_one_document(reader: Reader, where: Predicate, *found: Sides) -> Predicate:
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


def _are_same_rows(found: Sides, dim: int) -> bool:
    one, two = found.query, found.key
    rest = [(*each.dims[:dim], *each.dims[dim + 1 :]) for each in (one, two)]
    return one.node is two.node and rest[0] == rest[1]


def _positions(reader: Reader, source: Source) -> tuple[Polynomial, Polynomial, int] | None:
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
    dims = [_dim(counted, "#1", None, rank), _dim(steps, "#2", -1, rank)]
    before = tensor_of(steps.get("prepend", steps.arguments.get("#3")))
    is_one = jumps.get("other", jumps.arguments.get("#1")) == 1 and steps.get("n", steps.arguments.get("#1", 1)) == 1
    is_whole = steps.get("append", steps.arguments.get("#4")) is None
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


def _dim(call: Call, position: str, default: int | None, rank: int) -> int | None:
    dim = call.get("dim", call.arguments.get(position, default))
    return dim % rank if isinstance(dim, int) else None


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
