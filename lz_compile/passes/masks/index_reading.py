"""A mask read as a function of its index (:mod:`formula.reader`), with what it takes to find its tensors again.

A leaf made of constants is evaluated and read from its values. What a tensor of the graph holds as it is, is noted with that
tensor: kernels take conditions, documents and slopes from there.

Windows are read so, too: a tensor that shows, for each query, the part of another one that lies around it.
``keys.unfold(2, 5, 1)``, strides that overlap, slices that are shifted one by one and stacked, and indices of ``query + key``
all show the element at ``query + key``. A tensor of floats is read only through what moves and selects elements: what
computes them is where a reading ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.passes.formula import layout, moves
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError
from lz_compile.passes.formula.piecewise import Piecewise, Value
from lz_compile.passes.formula.polynomial import ONE, ZERO, Polynomial, Variable, number, quotient
from lz_compile.passes.formula.predicates import AtLeast, Given, Predicate, conjuncts, negation
from lz_compile.passes.formula.reader import Reader as FormulaReader
from lz_compile.passes.formula.reader import Source
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, is_floating, known_tensor, tensor_of
from lz_compile.passes.masks import constant_patterns
from lz_compile.passes.masks.constants import Constants
from lz_compile.passes.masks.meaning import Window


class Reader(FormulaReader):
    """Values of one graph's masks at an index.

    ``positions`` are the axes of queries and keys. ``sources`` has a tensor for conditions and integers that one holds as
    it is; ``buffers`` are those whose values were looked at.
    """

    def __init__(self, effects: Effects, constants: Constants, positions: Iterable[Axis]) -> None:
        super().__init__(effects)
        self.constants = constants
        self.positions = frozenset(positions)
        self.sources: dict[Predicate | Polynomial, Source] = {}
        self.buffers: dict[fx.Node, None] = {}

    def _named(self, node: fx.Node, dims: Dims, value: Value) -> Value:
        """The value, as a leaf at this node where that says as much, and this node noted as its source."""
        if not self.is_plain(dims) or self.effects.is_overwritten(node):
            return value
        leaf = _leaf_of(value)
        is_deep = leaf is not None and self.is_plain(leaf.source.dims)
        if (leaf is not None and not is_deep) or (not is_deep and self._is_coefficient(node, dims, value)):
            value = self.leaf(node, dims)
        if isinstance(value, Piecewise):
            single = value.single
            if single is not None and single.constant is None and not _is_floating(node):
                self.sources.setdefault(single, Source(node, dims))
        elif negation(value) not in self.sources:
            self.sources.setdefault(value, Source(node, dims))
        return value

    def _is_coefficient(self, node: fx.Node, dims: Dims, value: Value) -> bool:
        """Whether a float depends on something, but not on positions: it may be a slope."""
        if not isinstance(value, Piecewise) or not _is_floating(node) or self._has_positions(dims):
            return False
        numbers = [each for _, each in value.cases if isinstance(each, Polynomial)]
        return any(variable.is_float or variable.axes for each in numbers for variable in each.variables)

    def _has_positions(self, dims: Dims) -> bool:
        return not self.axes_at(dims).isdisjoint(self.positions)

    def _leaf(self, node: fx.Node, dims: Dims, reader: fx.Node | None) -> Value:
        """An unknown, or what its values tell where it is constant."""
        return self._constant(node, dims, reader) or super()._leaf(node, dims, reader)

    def _constant(self, node: fx.Node, dims: Dims, reader: fx.Node | None) -> Value | None:
        constant = self.constants.value(node, reader)
        if isinstance(constant, Reason):
            return None
        found = constant_patterns.read(constant.value, [self.place(dim) for dim in dims])
        is_number = isinstance(found, Piecewise) and found.single is not None and found.single.constant is not None
        if found is None or (_is_floating(node) and not is_number and not self._has_positions(dims)):
            return None  # for the second: factors that differ between heads are read as they are
        self.buffers.update(dict.fromkeys(constant.buffers))
        return found

    def _sum(self, summand: Piecewise, over: tuple[Axis, ...]) -> Piecewise | None:
        """None: sums over data are tensors that kernels may take as they are."""
        return None


def _leaf_of(value: Value) -> Variable | None:
    """The leaf that a value is, or a multiple of."""
    if isinstance(value, Given):
        return value.flag
    single = value.single if isinstance(value, Piecewise) else None
    if single is None or len(single.terms) != 1:
        return None
    (monomial,) = single.terms
    return monomial[0] if len(monomial) == 1 and isinstance(monomial[0].source, Source) else None


def _is_floating(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is None or tensor.is_floating_point()


#: What selects elements, beside layouts. Padding makes new ones, and what is stored takes the place of others.
SELECTING = frozenset(moves.RULES) - {"pad", *moves.STORES}


def read_window(
    effects: Effects, constants: Constants, node: fx.Node, dims: Dims, query: Axis, key: Axis
) -> Window | None:
    """The window that ``node``, keys or values, is along the axes of queries and of places; None where it is none."""
    call = effects.calls.get(node)
    if call is None or call.name not in SELECTING:
        return None
    reader = _Elements(effects, constants, (query, key))
    reader.give(dims)
    shown = _shown(reader.read(node, dims))
    if shown is None:
        return None
    shift = reader.place((query,)) + reader.place((key,))
    found: list[tuple[Axis, ...]] = []
    windows: list[tuple[Axis, int]] = []
    for dim, size in zip(shown.dims, shape_of(known_tensor(shown.node)), strict=True):
        start = (reader.place(dim) - shift).constant
        if isinstance(start, int) and start >= 0:
            windows.append((Axis(size), start))
            found.append((windows[-1][0],))
        elif reader.is_plain((dim,)) and not {query, key} & set(dim):
            found.append(dim)
        else:
            return None
    return Window(shown.node, tuple(found), *windows[0], tuple(reader.buffers)) if len(windows) == 1 else None


def _shown(value: Value) -> Source | None:
    """The element that a value is."""
    single = value.single if isinstance(value, Piecewise) else None
    if single is None or list(single.terms.values()) != [1]:
        return None
    (monomial,) = single.terms
    source = monomial[0].source if len(monomial) == 1 else None
    return source if isinstance(source, Source) else None


class _Elements(Reader):
    """Says which element of which tensor another one shows."""

    def _uncached(self, node: fx.Node, call: Call | None, dims: Dims) -> Value:
        if not is_floating(node):
            return super()._uncached(node, call, dims)
        if call is None or call.is_inplace:
            return self.leaf(node, dims)
        try:
            if call.name in _RULES:
                found = _RULES[call.name](self, call, dims)
                return self.leaf(node, dims) if found is None else found
        except LayoutError:
            return self.leaf(node, dims)
        is_read = layout.rearranges(call) or call.name in SELECTING
        return super()._uncached(node, call, dims) if is_read else self.leaf(node, dims)

    def _named(self, node: fx.Node, dims: Dims, value: Value) -> Value:
        return value if is_floating(node) else super()._named(node, dims, value)

    def _constant(self, node: fx.Node, dims: Dims, reader: fx.Node | None) -> Value | None:
        return None if is_floating(node) else super()._constant(node, dims, reader)

    def at_places(self, node: fx.Node, places: Sequence[Polynomial], reader: fx.Node) -> Value:
        """The element of ``node`` at a place in each of its dimensions."""
        shape = shape_of(known_tensor(node))
        return self.read(node, tuple(map(self.dim_at, places, shape)), reader)


def _joined(reader: _Elements, call: Call, dims: Dims) -> Value | None:
    """Pieces of one tensor that are evenly spaced, side by side: the piece by its number."""
    tensors, dim = call.get("tensors"), call.get("dim", 0)
    if not isinstance(tensors, (tuple, list)) or not isinstance(dim, int):
        return None
    # An empty piece has as many dimensions as it likes, for cat.
    tensors = [each for each in tensors if 0 not in shape_of(known_tensor(each))]
    if len(tensors) < 2:
        return None
    dim %= len(dims)
    here, within = reader.place(dims[dim]), ZERO
    sizes = {as_size(known_tensor(each).shape[dim]) for each in tensors} if call.name == "cat" else {1}
    if len(sizes) != 1 or not isinstance(size := sizes.pop(), int):
        return None
    which = quotient(here, size, reader.quotients)
    within = here - which.scaled(size)
    inner = (reader.dim_at(within, size),) if call.name == "cat" else ()
    shown = [_shown(reader.read(each, (*dims[:dim], *inner, *dims[dim + 1 :]), call.node)) for each in tensors]
    sources = [each for each in shown if each is not None]
    if len(sources) < len(shown) or len({each.node for each in sources}) > 1:
        return None
    places = [[reader.place(each) for each in source.dims] for source in sources]
    steps = [[after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(places)]
    if any(each != steps[0] for each in steps) or any(step.constant is None for step in steps[0]):
        return None
    spread = [first + which.scaled(step.constant or 0) for first, step in zip(places[0], steps[0], strict=True)]
    return reader.at_places(sources[0].node, spread, call.node)


_RULES = {"cat": _joined, "stack": _joined}


def seen_in_window(
    effects: Effects,
    constants: Constants,
    masks: Sequence[tuple[fx.Node, Dims, bool]],
    query: Axis,
    key: Axis,
    window: Window,
) -> tuple[int, int] | None:
    """How many elements of what a window shows masks drop for all queries, the first and the last ones.

    None where they say more than that. Each mask is given with its axes, and whether True keeps.
    """
    reader = Reader(effects, constants, (query, key))
    first, last = 0, 0
    for node, dims, keeps in masks:
        reader.give(((query,), (key,)))
        if any(axis not in (query, key) for dim in dims for axis in dim):
            return None
        user = effects.first_user(node) if effects.is_overwritten(node) else None
        if effects.reshapes or (user is None and effects.is_overwritten(node)):
            return None
        shift = reader.place((query,)) + reader.place((key,)) + number(window.start)
        value = reader.read(node, dims, user)
        if isinstance(value, Piecewise):
            return None
        for part in conjuncts(value if keeps else negation(value)):
            if not isinstance(part, AtLeast):
                return None
            before = (shift - part.value).constant
            behind = (reader.size(window.along.size) - ONE - part.value - shift).constant
            if isinstance(before, int) and before >= 0:
                first = max(first, before)
            elif isinstance(behind, int) and behind >= 0:
                last = max(last, behind)
            else:
                return None
    return None if reader.buffers else (first, last)
