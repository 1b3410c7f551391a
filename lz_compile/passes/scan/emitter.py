"""A recognised recurrence: operands for all steps at once in the op's canonical layout, and results in the source's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import Size, is_one, product, shape_of
from lz_compile.lowering.ops.scan import DROPPED, DecayKind, Operands, ScanAttrs, ScanFacts, ScanStructure, kind_of
from lz_compile.passes.graph.view import known_tensor, tensor_of
from lz_compile.passes.loops.recurrence.index_sum import IndexSum
from lz_compile.passes.loops.recurrence.index_terms import Atom, Term
from lz_compile.passes.loops.recurrence.index_values import TIME, Source, Values
from lz_compile.passes.loops.recurrence.step_check import masked
from lz_compile.passes.loops.recurrence.step_sizes import Place, StepSizes
from lz_compile.passes.loops.recurrence.transition import Read, Transition
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import TableEmitter

_ONE = {Term(): 1.0}


@dataclass(frozen=True)
class Given:
    """The node behind an atom, with time as its first dimension or without; ``shape`` is that of the atom in the step."""

    node: fx.Node
    over_time: bool
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ScanEmitter(TableEmitter):
    """The operands and results of one transition.

    ``first`` is the state before the first step (None: zeros), ``final`` and ``reads`` the nodes of the results, as ``(node,
    place)`` with the place of a read among those of the transition. ``sizes`` say where symbolic ones can be read;
    ``places`` are the operands of the step as ``(node, first dimension)``, None if nobody reads it.
    """

    transition: Transition
    given: Mapping[Atom, Given]
    first: fx.Node | None
    final: tuple[fx.Node, ...]
    reads: tuple[tuple[fx.Node, int], ...]
    attrs: ScanAttrs
    sizes: StepSizes = field(default_factory=StepSizes)
    places: tuple[tuple[fx.Node | None, int], ...] = ()

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes whose values :meth:`result` gives."""
        return (*self.final, *(node for node, _ in self.reads))

    # ---- operands -------------------------------------------------------------------------------------------------

    def operands(self, builder: Builder) -> Operands:
        """Decay, updates, summand, queries and first state, each as small as broadcasting lets it be."""
        move, values = self.transition, self._values(builder)
        extent = self._extents(builder)
        batch, heads, keys, columns = self._groups()
        found: dict[str, Any] = {}
        if move.decay.terms != _ONE:
            found["decay"] = values.of(move.decay, (batch, heads, (TIME,), keys, columns), move.leaks.get(("decay", 0)))
        if move.drops is not None:
            dropped = values.of(move.drops, (batch, heads, (TIME,), keys, columns))
            is_dropped = (dropped != 0) & ~found["decay"].isnan() if ("decay", 0) in move.leaks else dropped != 0
            found["decay"] = torch.where(is_dropped, DROPPED, found["decay"])
        if move.updates:
            found["left"] = self._stacked("left", [u.left for u in move.updates], values, keys)
            found["right"] = self._stacked(
                "right", [masked(u.right, u.left, keys) for u in move.updates], values, columns
            )
        if any(update.erase is not None for update in move.updates):
            found["erase"] = self._stacked("erase", [masked(u.erase, u.left, keys) for u in move.updates], values, keys)
        if move.drive is not None:
            found["drive"] = values.of(move.drive, (batch, heads, (TIME,), keys, columns), move.leaks.get(("drive", 0)))
        query = self._query(values)
        if query is not None:
            found["query"] = query
        if self.first is not None:
            state = builder.value(self.first).reshape([extent(size) for size in move.space])
            state = state.permute([*batch, *heads, *keys, *columns])
            found["state"] = state.reshape([extent(self._number(group)) for group in (batch, heads, keys, columns)])
        return Operands(**found)

    def _extents(self, builder: Builder) -> Callable[[Size], Any]:
        """What the sizes of the transition are in a graph."""

        def read(place: Place) -> Any:
            node, first = self.places[place.operand]
            return None if node is None or place.dim is None else builder.value(node).size(first + place.dim)

        return cache(lambda size: self.sizes.extent(size, read))

    def _values(self, builder: Builder) -> Values:
        def source(atom: Atom) -> Source:
            given = self.given[atom]
            return Source(builder.value(given.node), given.over_time, given.shape)

        sizes = dict(enumerate(self.transition.space))
        like = builder.value(next(iter(self.given.values())).node)
        return Values(source, sizes, self.attrs.compute_dtype, like, self._extents(builder))

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """The indices of batch, heads, keys and values."""
        move = self.transition
        return move.batch[:1], move.batch[1:], move.keys, move.values

    def _number(self, group: Sequence[int]) -> Size:
        return product(self.transition.space[index] for index in group)

    def _length(self, builder: Builder) -> Any:
        given = next(each for each in self.given.values() if each.over_time)
        return builder.value(given.node).shape[0]

    def _stacked(self, name: str, parts: Sequence[IndexSum | None], values: Values, last: tuple[int, ...]) -> Any:
        """One row for every update; absent ones are zero."""
        batch, heads, *_ = self._groups()
        zero = IndexSum(tuple((size,) for size in self.transition.space), {})
        groups, leaks = (batch, heads, (TIME,), (), last), self.transition.leaks
        rows = [values.of(part or zero, groups, leaks.get((name, place))) for place, part in enumerate(parts)]
        return _joined(rows, 3)

    def _query(self, values: Values) -> Any:
        """The rows of all reads; where nothing is read, a row of zeros for a state that has keys."""
        move = self.transition
        batch, heads, keys, _ = self._groups()
        if all(read.query is None for read in move.reads):
            return values.like.new_zeros([1] * 5, dtype=self.attrs.compute_dtype) if keys else None
        rows = []
        for place, read in enumerate(move.reads):
            own = replace(values, sizes=self._with_extras(read))
            query = read.query or IndexSum(tuple((size,) for size in move.space), dict(_ONE))
            groups = (batch, heads, (TIME,), self._extras(read), keys)
            row = own.of(query, groups, move.leaks.get(("query", place)))
            if read.drops is not None:  # of what is not looked at, gradients look at nothing either
                row = torch.where(own.of(read.drops, groups) != 0, 0.0, row)
            rows.append(self._spread(row, read, values.extent))
        return _joined(rows, 3)

    def _spread(self, rows: Any, read: Read, extent: Callable[[Size], Any]) -> Any:
        """All rows of a read, also where they are equal."""
        wanted = product(read.extras)
        shape = list(rows.shape)
        if wanted == 1 or not is_one(shape[3]):
            return rows
        return rows.expand([*shape[:3], extent(wanted), shape[4]])

    def _extras(self, read: Read) -> tuple[int, ...]:
        rank = len(self.transition.space)
        return tuple(range(rank, rank + len(read.extras)))

    def _with_extras(self, read: Read) -> dict[int, Size]:
        sizes = (*self.transition.space, *read.extras)
        return dict(enumerate(sizes))

    # ---- results --------------------------------------------------------------------------------------------------

    def result(self, builder: Builder, value: Any) -> Any:
        """Final state and reads as the source has them; a tuple where there are several."""
        looked, state = value
        extent = self._extents(builder)
        found = [self._final(node, state, extent) for node in self.final]
        offsets: list[Any] = [0]
        for read in self.transition.reads:
            offsets.append(offsets[-1] + extent(product(read.extras)))
        for node, place in self.reads:
            read = self.transition.reads[place]
            rows = looked if self._looks_once() else looked[:, :, :, offsets[place] : offsets[place + 1]]
            found.append(self._read(builder, node, place, rows))
        return tuple(found) if len(found) > 1 else found[0]

    def _looks_once(self) -> bool:
        """Whether all reads are the same row: there is one, or all are the state itself."""
        move = self.transition
        return len(move.reads) == 1 or (not move.keys and all(read.query is None for read in move.reads))

    def _final(self, node: fx.Node, state: Any, extent: Callable[[Size], Any]) -> Any:
        order = [index for group in self._groups() for index in group]
        value = state.reshape([extent(self.transition.space[index]) for index in order])
        value = value.permute([order.index(index) for index in range(len(order))])
        return value.reshape([extent(size) for size in self.transition.shape]).to(_dtype(node))

    def _read(self, builder: Builder, node: fx.Node, number: int, rows: Any) -> Any:
        read, leaks = self.transition.reads[number], self.transition.leaks
        batch, heads, _, columns = self._groups()
        values = self._values(builder)
        extent, sizes = values.extent, self._with_extras(read)
        order = [*batch, *heads, TIME, *self._extras(read), *columns]
        length = self._length(builder)
        value = rows.reshape([length if index == TIME else extent(sizes[index]) for index in order])
        value = value.permute([order.index(index) for index in (TIME, *read.places)])
        if read.drops is not None:
            own, groups = replace(values, sizes=sizes, like=rows), ((TIME,), *((place,) for place in read.places))
            is_dropped = own.of(read.drops, groups) != 0
            leak = leaks.get(("query", number))
            instead: Any = 0.0
            if leak is not None:  # what the dropped state is multiplied by
                summed = [(key,) for key in self.transition.keys if key not in read.places]
                is_finite = own.of(leak, (*groups, *summed)).isfinite()
                instead = torch.where(is_finite.flatten(len(groups)).all(-1) if summed else is_finite, 0.0, torch.nan)
                instead = instead.to(value.dtype)
            value = torch.where(is_dropped, instead, value)
        if read.rest.terms:
            own = replace(values, sizes=dict(enumerate(read.rest.sizes)), like=rows)
            groups = ((TIME,), *((i,) for i in range(len(read.rest.sizes))))
            value = value + own.of(read.rest, groups, leaks.get(("rest", number)))
        return value.reshape([length, *map(extent, shape_of(read.node.meta["val"]))]).to(_dtype(node))

    # ---- facts ----------------------------------------------------------------------------------------------------

    def facts(self, length: Size, needs_grad: bool) -> ScanFacts:
        """Sizes and structure, for kernel selection."""
        move = self.transition
        batch, heads, keys, columns = map(self._number, self._groups())
        tensors = [tensor_of(each.node) for each in self.given.values()]
        dtype = self.attrs.state_dtype
        for tensor in tensors:
            if tensor is not None and tensor.is_floating_point():
                dtype = torch.promote_types(dtype, tensor.dtype)
        return ScanFacts(
            batch,
            heads,
            length,
            keys,
            columns,
            len(move.updates),
            sum(product(read.extras) for read in move.reads) or 1,
            ScanStructure(
                decay=self._decay_kind(),
                has_state=self.first is not None,
                has_updates=bool(move.updates),
                has_drive=move.drive is not None,
                has_query=bool(move.keys) or any(read.query is not None for read in move.reads),
            ),
            dtype,
            next(tensor.device.type for tensor in tensors if tensor is not None),
            needs_grad,
        )

    def _decay_kind(self) -> DecayKind:
        move = self.transition
        if move.decay.terms == _ONE:
            return "none"
        own = {index for term in move.decay.terms for index in term.indices}
        return kind_of(not own.isdisjoint(move.keys), not own.isdisjoint(move.values))


def _joined(rows: Sequence[Any], dim: int) -> Any:
    """Rows below each other, all of the largest of their sizes in other dimensions."""
    if len(rows) == 1:
        return rows[0]
    sizes = [list(row.shape) for row in rows]
    common = [next((size for size in own if not is_one(size)), 1) for own in zip(*sizes, strict=True)]
    spread = []
    for row, size in zip(rows, sizes, strict=True):
        is_smaller = [place != dim and is_one(own) != is_one(common[place]) for place, own in enumerate(size)]
        wanted = [common[place] if smaller else size[place] for place, smaller in enumerate(is_smaller)]
        spread.append(row.expand(wanted) if any(is_smaller) else row)
    dtype = spread[0].dtype
    for row in spread:
        dtype = torch.promote_types(dtype, row.dtype)
    return torch.cat([row.to(dtype) for row in spread], dim)


def _dtype(node: fx.Node) -> torch.dtype:
    return known_tensor(node).dtype
