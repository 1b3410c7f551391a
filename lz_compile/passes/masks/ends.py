"""Masks under which a query sees the keys before a number of its own: ``arange(keys) < lengths[:, None]`` and the like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from lz_compile.passes.formula.axes import Axis
from lz_compile.passes.formula.polynomial import ONE, Polynomial
from lz_compile.passes.formula.predicates import AtLeast, Predicate
from lz_compile.passes.formula.reader import Source
from lz_compile.passes.masks.bands import Positions
from lz_compile.passes.masks.index_reading import Reader
from lz_compile.passes.masks.meaning import Ends, Terms
from lz_compile.passes.masks.parts import is_stable


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
