"""The conditions of a mask by what they are: bounds of a band, documents, padding, and others."""

from __future__ import annotations

from collections.abc import Iterator

from lz_compile.lowering.bands import Band
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.formula.polynomial import Polynomial
from lz_compile.passes.formula.predicates import (
    AtLeast,
    Given,
    Predicate,
    Some,
    conjuncts,
    implies,
    negation,
    variables,
)
from lz_compile.passes.formula.reader import Source
from lz_compile.passes.masks import bands as mask_bands
from lz_compile.passes.masks import documents as mask_documents
from lz_compile.passes.masks.bands import Bound, Positions
from lz_compile.passes.masks.documents import Sides
from lz_compile.passes.masks.index_reading import Reader
from lz_compile.passes.masks.meaning import Axes, Flag


class Parts:
    """The conditions of a conjunction.

    ``where`` is the conjunction, ``bounds`` are those on the distance of key and query, ``documents`` equalities of what
    belongs to a query and to a key, ``flags`` what a tensor says of keys or queries alone, and ``rest`` all others.
    """

    def __init__(self, reader: Reader, axes: Axes, at: Positions, where: Predicate) -> None:
        self._reader, self._axes, self._at = reader, axes, at
        given = (self._sides(part) for part in _ordered(where))
        self.where = mask_documents.in_one_document(reader, where, *(each for each in given if each is not None))
        self.bounds: list[Bound] = []
        self.documents: list[Sides] = []
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

    def _sides(self, predicate: Predicate) -> Sides | None:
        return mask_documents.sides(self._reader, predicate, self._axes.batch, self._axes.queries, self._axes.keys)

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
