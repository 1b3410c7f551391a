"""What a mask means: causal, a window, padding, documents, a slope in the distance, or nothing of the kind.

A mask is read as a function of the indices of batch, head, query and key (:mod:`index_reading`). What remains of it is a
conjunction of conditions. Those on the distance of key and query are a band (:mod:`bands`), equal numbers of a query and
a key are documents (:mod:`parts`), what depends on keys alone is padding. An additive mask is a number by cases:
what it adds where it keeps, and where it drops. Nothing is said that does not hold at every size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import product, shape_of
from lz_compile.lowering.bands import Reach
from lz_compile.passes.formula.axes import Axis, Dims, axes_of, fresh, renamed, resolve
from lz_compile.passes.formula.expressions import Known
from lz_compile.passes.formula.piecewise import Number, Piecewise, Value, everywhere, plain
from lz_compile.passes.formula.polynomial import ONE, ZERO, Polynomial
from lz_compile.passes.formula.predicates import FALSE, TRUE, Predicate, both, conjuncts, negation, variables
from lz_compile.passes.formula.reader import Source
from lz_compile.passes.graph.effects import Effects, Look
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import known_tensor, tensor_of
from lz_compile.passes.masks import bands as mask_bands
from lz_compile.passes.masks import constant_patterns
from lz_compile.passes.masks.bands import Positions
from lz_compile.passes.masks.constants import Constants
from lz_compile.passes.masks.index_reading import Reader
from lz_compile.passes.masks.meaning import Axes, Documents, Ends, Meaning, Slopes, Terms
from lz_compile.passes.masks.parts import Parts, is_stable, of_conditions

#: Of what is understood in part, the values of larger masks are not looked at.
_LARGE = 2**24


class Masks:
    """The meanings of one graph's masks, each read once."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.constants = Constants(effects)
        self._known: dict[tuple[object, ...], tuple[Meaning | Reason, Look, tuple[Axis, ...]]] = {}

    def read(self, node: fx.Node, dims: Dims, axes: Axes, *, keeps: bool = True) -> Meaning | Reason:
        """What a mask means.

        Args:
            node: a boolean mask, or a float one that is added to scores, or of zeros and ones.
            dims: the axes of its dimensions.
            axes: those of the scores.
            keeps: whether True keeps, of a boolean mask, or 1, of one of zeros and ones.
        """
        axes, dims = axes.resolved(), resolve(dims)
        order = tuple(axis for group in axes.groups for axis in group)
        if any(axis not in order for dim in dims for axis in dim):
            return Reason("MASK_GENERAL", f"{told(node)} has axes that scores have not")
        numbers = {axis: number for number, axis in enumerate(order)}
        pattern = tuple(tuple(numbers[axis] for axis in dim) for dim in dims)
        shape = tuple(tuple(axis.size for axis in group) for group in axes.groups)
        key = (node, pattern, shape, keeps)
        if key not in self._known:
            with self.effects.watched() as look:
                reading, own = self._unshared(axes)
                found = reading.meaning(node, renamed(dims, own), keeps=keeps)
            self._known[key] = (found, look, tuple(own.values()))
        found, look, own_order = self._known[key]
        self.effects.note(look)
        return found if isinstance(found, Reason) else _renamed(found, dict(zip(own_order, order, strict=True)))

    def ends(self, masks: Sequence[tuple[fx.Node, Dims, bool]], axes: Axes) -> Ends | None:
        """Before which key every row of the batch sees keys, None where the masks mean anything else.

        Args:
            masks: boolean ones, their axes, and whether True keeps, or what is added, zero and minus infinity. Where there
                are none, one query sees all keys.
            axes: those of the scores.
        """
        reading, names = self._unshared(axes)
        if self.effects.reshapes or any(self.effects.is_overwritten(node) for node, _, _ in masks):
            return None
        if any(axis not in names for _, dims, _ in masks for axis in axes_of(dims)):
            return None
        parts: set[Predicate] = set()
        for node, dims, keeps in masks:
            value = reading.reader.read(node, renamed(dims, names))
            where = _added(value) if isinstance(value, Piecewise) else value if keeps else negation(value)
            if where is None:
                return None
            parts |= conjuncts(where)
        found = of_conditions(parts, reading.reader, reading.at, frozenset(reading.axes.batch))
        if found is None:
            return None
        given = {mine: axis for axis, mine in names.items()}
        firsts = tuple((_over(given, terms), shift) for terms, shift in found.firsts)
        return replace(found, terms=_over(given, found.terms), firsts=firsts)

    def equal(self, nodes: Sequence[fx.Node], dims: Dims, axes: Axes) -> tuple[fx.Node, ...] | None:
        """On which buffers' values it rests that tensors of integers hold the same numbers, all with these axes.

        None where the way that they are computed does not tell.
        """
        reading, names = self._unshared(axes)
        if self.effects.reshapes or any(map(self.effects.is_overwritten, nodes)):
            return None
        first, *others = (reading.reader.read(node, renamed(dims, names)) for node in nodes)
        return tuple(reading.reader.buffers) if all(each == first for each in others) else None

    def _unshared(self, axes: Axes) -> tuple[_Reading, dict[Axis, Axis]]:
        """A reading in axes of its own, which nobody else cuts, and these by the given ones."""
        axes = axes.resolved()
        own = {axis: Axis(axis.size) for group in axes.groups for axis in group}
        return _Reading(self.effects, self.constants, Axes(*renamed(axes.groups, own))), own

    def flag(self, node: fx.Node) -> tuple[fx.Node, ...] | None:
        """The buffers that say of a floating-point tensor that it holds 0 and 1, nothing else; None where nothing does."""
        tensor = tensor_of(node)
        if (
            tensor is None
            or not tensor.is_floating_point()
            or self.effects.reshapes
            or self.effects.is_overwritten(node)
        ):
            return None
        dims = fresh(shape_of(tensor))
        reader = Reader(self.effects, self.constants, axes_of(dims))
        reader.give(dims)
        value = reader.read(node, dims)
        if isinstance(value, Piecewise) and {each for _, each in value.cases} == {ZERO, ONE}:
            return tuple(reader.buffers)
        known = self.constants.value(node)
        if not isinstance(known, Known):
            return None
        ones = known.value.bool()  # no unique(), which sorts: seconds for the tables and caches that modules hold
        holds_both = bool(ones.any()) and not bool(ones.all())
        return known.buffers if holds_both and bool((known.value == ones).all()) else None

    def values(self, node: fx.Node) -> torch.Tensor | None:
        """What a mask holds where that depends on constants only, as those find it who use it."""
        user = None
        if self.effects.is_overwritten(node):
            user = self.effects.first_user(node)
            if user is None:
                return None
        found = self.constants.value(node, user)
        return None if isinstance(found, Reason) or found.buffers else found.value


def _added(value: Piecewise) -> Predicate | None:
    """Where a number is zero that is minus infinity elsewhere."""
    kept = [where for where, each in value.cases if each == ZERO]
    others = [each for _, each in value.cases if each != ZERO]
    return kept[0] if len(kept) == 1 and all(each == -math.inf for each in others) else None


def _over(names: Mapping[Axis, Axis], terms: Terms) -> Terms:
    return tuple((node, renamed(dims, names), factor) for node, dims, factor in terms)


def _renamed(meaning: Meaning, axes: Mapping[Axis, Axis]) -> Meaning:
    """The same of another mask that reads the same tensor alike."""
    documents, slopes = meaning.documents, meaning.slopes
    if documents is not None:
        documents = Documents(
            *(replace(each, dims=renamed(each.dims, axes)) for each in (documents.query, documents.key))
        )
    if slopes is not None:
        slopes = replace(slopes, dims=renamed(slopes.dims, axes))
    flags = tuple(replace(flag, dims=renamed(flag.dims, axes)) for flag in meaning.flags)
    return replace(meaning, flags=flags, documents=documents, slopes=slopes)


class _Reading:
    """One mask."""

    def __init__(self, effects: Effects, constants: Constants, axes: Axes) -> None:
        self.axes = axes
        self.effects = effects
        self.constants = constants
        self.reader = Reader(effects, constants, (*axes.queries, *axes.keys))
        for group in axes.groups:
            self.reader.give((group,))
        sizes = [self.reader.size(product(axis.size for axis in group)) for group in (axes.queries, axes.keys)]
        places = [self.reader.place(group) for group in (axes.queries, axes.keys)]
        self.at = Positions(places[0], places[1], sizes[0], sizes[1], axes.queries, axes.keys, self.reader.counted)

    def meaning(self, node: fx.Node, dims: Dims, *, keeps: bool) -> Meaning | Reason:
        """What a mask means."""
        user = None
        if self.effects.reshapes:
            return Reason("MASK_OVERWRITTEN", f"{self.effects.reshapes[0].node.name} changes a shape in place")
        if self.effects.is_overwritten(node):
            user = self.effects.first_user(node)
            if user is None:
                return Reason("MASK_OVERWRITTEN", f"{told(node)} is overwritten in place after it is used")
        found = self._of(node, self.reader.read(node, dims, user), keeps=keeps)
        if isinstance(found, Meaning) and found.is_exact:
            return found
        return self._by_values(node, dims, user, found, keeps=keeps)

    def _by_values(
        self, node: fx.Node, dims: Dims, user: fx.Node | None, read: Meaning | Reason, *, keeps: bool
    ) -> Meaning | Reason:
        """What the values of a constant tell beyond what was read of the graph."""
        elements = product(shape_of(known_tensor(node)))
        is_large = not isinstance(elements, int) or elements > _LARGE
        constant = read if is_large and isinstance(read, Meaning) else self.constants.value(node, user)
        if not isinstance(constant, Known):
            return read
        value = constant_patterns.read(constant.value, [self.reader.place(dim) for dim in dims])
        found = read if value is None else self._of(node, value, keeps=keeps)
        if isinstance(found, Meaning) and found.is_exact:
            return replace(found, buffers=constant.buffers)
        reach = self._reach_of(constant.value, dims, keeps=keeps)
        if reach is None:
            return read
        levels = (1.0, 0.0) if constant.value.dtype == torch.bool else (0.0, float(constant.value.min()))
        part = read if isinstance(read, Meaning) else Meaning(*levels, is_exact=False, label="mask")
        return replace(
            part, reach=part.reach or reach, buffers=tuple(dict.fromkeys((*part.buffers, *constant.buffers)))
        )

    def _reach_of(self, value: torch.Tensor, dims: Dims, *, keeps: bool) -> Reach | None:
        """The reach of a constant mask whose queries and keys are one dimension each."""
        places = [next((i for i, dim in enumerate(dims) if dim == group), None) for group in self.axes.groups[2:]]
        if places[1] is None or (places[0] is None and self.axes.queries):
            return None
        if value.dtype == torch.bool:
            kept = value == keeps
        else:
            kept = value > value.min()
            if bool(value.isnan().any()) or float(value.min()) > -1e4 or len(value.unique()) > 2:
                return None
        return mask_bands.reach_of_values(kept, places[0], places[1])

    # ---- from values to meanings ------------------------------------------------------------------------------

    def _of(self, node: fx.Node, value: Value, *, keeps: bool) -> Meaning | Reason:
        if not isinstance(value, Piecewise):
            return self._conditions(node, value if keeps else negation(value), 1.0, 0.0)
        tensor = tensor_of(node)
        if tensor is None or not tensor.is_floating_point():
            return Reason("MASK_GENERAL", f"{told(node)} is neither a condition nor a number that is added")
        value = value if keeps else everywhere(plain(1.0)) - value
        cases = [(where, _swallowed(each)) for where, each in value.cases]
        if any(isinstance(each, float) and math.isnan(each) for _, each in cases):
            return Reason("BIAS_GENERAL", f"{told(node)} holds NaN")
        return self._cases(node, cases)

    def _cases(self, node: fx.Node, cases: list[tuple[Predicate, Number]]) -> Meaning | Reason:
        """An additive mask: one case is kept, the others are dropped."""
        general = [(where, each) for where, each in cases if isinstance(each, Polynomial) and each.constant is None]
        constants = [(where, _float(each)) for where, each in cases if (where, each) not in general]
        if len(general) > 1:
            return Reason("BIAS_GENERAL", f"{told(node)} adds different numbers in different places")
        constants.sort(key=lambda case: -case[1])
        kept_where, kept = general[0] if general else constants.pop(0)
        levels = [value for _, value in constants]
        dropped = max(levels, default=None)
        slopes = self._slopes(kept) if isinstance(kept, Polynomial) else None
        level = 0.0 if isinstance(kept, Polynomial) else kept
        is_open = isinstance(kept, Polynomial) and (dropped is None if slopes is None else False)
        if level == -math.inf or is_open or (general and dropped is not None and dropped >= 0):
            return Reason("BIAS_GENERAL", f"{told(node)} is a bias that is no mask and not linear in the distance")
        found = self._conditions(node, kept_where, level, dropped)
        if isinstance(found, Reason):
            return found
        if isinstance(kept, Polynomial) and slopes is None:
            found = _partial(found)
        elif len(set(levels)) > 1 and (found.flags or found.documents is not None):
            found = _partial(found)  # what a row gives that sees no key depends on where it drops which value
        elif slopes is not None:
            labels = [each for each in (found.label, "alibi") if each != "none"]
            found = replace(found, slopes=slopes if found.is_exact else None, label=" and ".join(labels))
        if found.is_exact or found.band is not None or found.reach is not None:
            return found
        return Reason("BIAS_GENERAL", f"{told(node)} is a bias that is no mask alone")

    def _conditions(self, node: fx.Node, where: Predicate, kept: float, dropped: float | None) -> Meaning | Reason:
        """The meaning of a mask that keeps where a condition holds."""
        if where == FALSE:
            return Reason("MASK_GENERAL", f"{told(node)} drops everything")
        parts = Parts(self.reader, self.axes, self.at, where)
        band, is_whole = mask_bands.band(parts.bounds, self.at)
        is_exact = is_whole and not parts.rest and len(parts.documents) < 2
        positional = [each for each in conjuncts(parts.where) if mask_bands.bounds(each, self.at) is None]
        found = Meaning(
            kept,
            None if where == TRUE else dropped,
            band,
            parts.flags,
            next(iter(parts.documents), None),
            is_exact=is_exact,
            reach=mask_bands.reach_of(both(*positional), self.at) if positional else None,
            buffers=tuple(self.reader.buffers),
            label=parts.label(band),
        )
        found = found if is_exact else _partial(found)
        if is_exact or band is not None or found.reach is not None:
            return found
        return self._refusal(node, parts)

    def _slopes(self, value: Polynomial) -> Slopes | None:
        """The slopes of a bias that is linear in the key's position, up to what is the same for all keys."""
        keys = frozenset(self.axes.keys)
        steep = Polynomial({m: c for m, c in value.terms.items() if any(not each.axes.isdisjoint(keys) for each in m)})
        floats = [each for each in steep.variables if each.is_float]
        source = floats[0].source if len(floats) == 1 else None
        if not isinstance(source, Source) or not is_stable(self.reader, source):
            return None
        across = frozenset((*self.axes.batch, *self.axes.heads))
        unit = Polynomial({(floats[0],): 1}) * self.at.key
        if not floats[0].axes <= across or not unit.terms:
            return None
        first = next(iter(unit.terms))
        factor = Fraction(steep.terms.get(first, 0)) / unit.terms[first]
        if not factor or steep != unit.scaled(factor):
            return None
        return Slopes(source.node, source.dims, float(factor))

    def _refusal(self, node: fx.Node, parts: Parts) -> Reason:
        """Why a mask stays a general one."""
        data = sorted(
            {each.source.node for part in parts.rest for each in variables(part) if isinstance(each.source, Source)}
        )
        if parts.bounds and not parts.rest:
            return Reason("MASK_GENERAL", f"{told(node)} is a band under which a query may see no key")
        if data == [node] and self.effects.calls.get(node) is not None:
            return Reason("MASK_GENERAL", f"{told(node)} is no function of positions that is understood")
        if data:
            return Reason("MASK_GENERAL", f"{told(node)} depends on {', '.join(map(told, data))}, which only data tell")
        return Reason("MASK_GENERAL", f"{told(node)} is no conjunction of a band, padding and documents")


def _partial(meaning: Meaning) -> Meaning:
    """The same as conditions without which the mask drops."""
    return replace(meaning, is_exact=False, flags=(), documents=None, slopes=None)


def _swallowed(value: Number) -> Number:
    """A number of the size of a float's least, to which slopes are added, as that: they are lost in rounding."""
    if isinstance(value, Polynomial) and value.terms.get((), 0) <= _LOWEST:
        return Polynomial({(): value.terms[()]}) if any(each.is_float for each in value.variables) else value
    return value


_LOWEST = -1e30


def _float(value: Number) -> float:
    if isinstance(value, Polynomial):
        constant = value.constant
        assert constant is not None, "asked of constants only"
        return float(constant)
    return value
