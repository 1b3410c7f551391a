"""A recognised recurrence: operands for all steps at once in the op's canonical layout, and results in the source's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from lz_compile.lowering.ops.scan import DecayKind, ScanAttrs, ScanFacts, ScanStructure
from lz_compile.passes.axes import Axis, Size
from lz_compile.passes.builder import Builder
from lz_compile.passes.loops.index_sum import IndexSum, mapped
from lz_compile.passes.loops.index_terms import Atom, Factor, Term
from lz_compile.passes.loops.index_values import TIME, Source, Values
from lz_compile.passes.loops.transition import Read, Transition
from lz_compile.passes.view import tensor_of

_ONE = {Term(): 1.0}


@dataclass(frozen=True)
class Given:
    """The node behind an atom, with time as its first dimension or without."""

    node: fx.Node
    over_time: bool


@dataclass(frozen=True)
class ScanEmitter:
    """The operands and results of one transition.

    ``first`` is the state before the first step (None: zeros), ``final`` and ``reads`` the nodes of the results, as ``(node,
    place)`` with the place of a read among those of the transition.
    """

    transition: Transition
    given: Mapping[Atom, Given]
    first: fx.Node | None
    final: tuple[fx.Node, ...]
    reads: tuple[tuple[fx.Node, int], ...]
    attrs: ScanAttrs

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes whose values :meth:`result` gives."""
        return (*self.final, *(node for node, _ in self.reads))

    # ---- operands -------------------------------------------------------------------------------------------------

    def operands(self, builder: Builder) -> dict[str, Any]:
        """Decay, updates, summand, queries and first state, each as small as broadcasting lets it be."""
        move, values = self.transition, self._values(builder)
        batch, heads, keys, columns = self._groups()
        found: dict[str, Any] = {}
        if move.decay.terms != _ONE:
            found["decay"] = values.of(move.decay, (batch, heads, (TIME,), keys, columns))
        if move.updates:
            found["left"] = self._stacked([u.left for u in move.updates], values, keys)
            found["right"] = self._stacked([_masked(u.right, u.left) for u in move.updates], values, columns)
        if any(update.erase is not None for update in move.updates):
            found["erase"] = self._stacked([_masked(u.erase, u.left) for u in move.updates], values, keys)
        if move.drive is not None:
            found["drive"] = values.of(move.drive, (batch, heads, (TIME,), keys, columns))
        query = self._query(values)
        if query is not None:
            found["query"] = query
        if self.first is not None:
            state = builder.value(self.first).reshape(move.space).permute([*batch, *heads, *keys, *columns])
            found["state"] = state.reshape([self._size(group) for group in (batch, heads, keys, columns)])
        return found

    def _values(self, builder: Builder, read: Read | None = None) -> Values:
        def source(atom: Atom) -> Source:
            given = self.given[atom]
            return Source(builder.value(given.node), given.over_time)

        sizes = dict(enumerate(self.transition.space))
        if read is not None:
            sizes |= {len(sizes) + i: size for i, size in enumerate(read.extras)}
        like = builder.value(next(iter(self.given.values())).node)
        return Values(source, sizes, self.attrs.compute_dtype, like)

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """The indices of batch, heads, keys and values."""
        move = self.transition
        return move.batch[:1], move.batch[1:], move.keys, move.values

    def _size(self, group: Sequence[int]) -> int:
        size = 1
        for index in group:
            size *= self.transition.space[index]
        return size

    def _length(self, builder: Builder) -> Any:
        given = next(each for each in self.given.values() if each.over_time)
        return builder.value(given.node).shape[0]

    def _stacked(self, parts: Sequence[IndexSum | None], values: Values, last: tuple[int, ...]) -> Any:
        """One row for every update; absent ones are zero."""
        batch, heads, *_ = self._groups()
        zero = IndexSum(tuple((size,) for size in self.transition.space), {})
        rows = [values.of(part or zero, (batch, heads, (TIME,), (), last)) for part in parts]
        return _joined(rows, 3)

    def _query(self, values: Values) -> Any:
        """The rows of all reads; where nothing is read, a row of zeros for a state that has keys."""
        move = self.transition
        batch, heads, keys, _ = self._groups()
        if all(read.query is None for read in move.reads):
            return values.like.new_zeros([1] * 5, dtype=self.attrs.compute_dtype) if keys else None
        rows = []
        for read in move.reads:
            own = Values(values.source, self._with_extras(read), values.dtype, values.like)
            query = read.query or IndexSum(tuple((size,) for size in move.space), dict(_ONE))
            rows.append(self._spread(own.of(query, (batch, heads, (TIME,), self._extras(read), keys)), read))
        return _joined(rows, 3)

    def _spread(self, rows: Any, read: Read) -> Any:
        """All rows of a read, also where they are equal."""
        wanted = 1
        for size in read.extras:
            wanted *= size
        shape = list(rows.shape)
        return rows if shape[3] == wanted else rows.expand([*shape[:3], wanted, shape[4]])

    def _extras(self, read: Read) -> tuple[int, ...]:
        rank = len(self.transition.space)
        return tuple(range(rank, rank + len(read.extras)))

    def _with_extras(self, read: Read) -> dict[int, int]:
        sizes = (*self.transition.space, *read.extras)
        return dict(enumerate(sizes))

    # ---- results --------------------------------------------------------------------------------------------------

    def result(self, builder: Builder, value: Any) -> Any:
        """Final state and reads as the source has them; a tuple where there are several."""
        looked, state = value
        found = [self._final(node, state) for node in self.final]
        offsets = [0]
        for read in self.transition.reads:
            size = 1
            for extra in read.extras:
                size *= extra
            offsets.append(offsets[-1] + size)
        for node, place in self.reads:
            read = self.transition.reads[place]
            rows = looked if len(self.transition.reads) == 1 else looked[:, :, :, offsets[place] : offsets[place + 1]]
            found.append(self._read(builder, node, read, rows))
        return tuple(found) if len(found) > 1 else found[0]

    def _final(self, node: fx.Node, state: Any) -> Any:
        order = [index for group in self._groups() for index in group]
        value = state.reshape([self.transition.space[index] for index in order])
        value = value.permute([order.index(index) for index in range(len(order))])
        return value.reshape(_shape(node)).to(_dtype(node))

    def _read(self, builder: Builder, node: fx.Node, read: Read, rows: Any) -> Any:
        batch, heads, _, columns = self._groups()
        sizes = self._with_extras(read)
        order = [*batch, *heads, TIME, *self._extras(read), *columns]
        length = self._length(builder)
        value = rows.reshape([length if index == TIME else sizes[index] for index in order])
        value = value.permute([order.index(index) for index in (TIME, *read.places)])
        if read.rest.terms:
            values = Values(
                self._values(builder).source, dict(enumerate(read.rest.sizes)), self.attrs.compute_dtype, rows
            )
            value = value + values.of(read.rest, ((TIME,), *((i,) for i in range(len(read.rest.sizes)))))
        return value.reshape([length, *_shape(node)[1:]]).to(_dtype(node))

    # ---- attributes -----------------------------------------------------------------------------------------------

    def attributes_at(self, _sizes: Mapping[Axis, int]) -> ScanAttrs:
        """The attributes for a proof at other sizes: the same."""
        return self.attrs

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """Nothing is implied here.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"{node.name} is implied by no attribute of a scan")

    def facts(self, length: Size, needs_grad: bool) -> ScanFacts:
        """Sizes and structure, for kernel selection."""
        move = self.transition
        batch, heads, keys, columns = (self._size(group) for group in self._groups())
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
            max(sum(_product(read.extras) for read in move.reads), 1),
            ScanStructure(
                decay=self._decay_kind(),
                has_state=self.first is not None,
                has_updates=bool(move.updates),
                has_erase=self.attrs.erases,
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
        if own & set(move.keys):
            return "full" if own & set(move.values) else "key"
        return "value" if own & set(move.values) else "scalar"


def _masked(part: IndexSum | None, left: IndexSum) -> IndexSum | None:
    """Zero wherever a mask alone makes ``left`` zero: what is left out there may be NaN, and zero times NaN is not zero."""
    if part is None:
        return None
    for mask in sorted({factor for term in left.terms for factor in term.of("mask")}):
        whole = IndexSum(part.dims, {Term((mask,)): 1.0})
        if all(mask in term.factors for term in left.terms):
            part = part.times(whole)
        elif not mapped(left, partial(_where, mask)).terms:
            part = part.plus(part.times(whole), -1)
    return part


def _where(mask: Factor, term: Term) -> Term:
    return term.without([mask]) if mask in term.factors else term


def _joined(rows: Sequence[Any], dim: int) -> Any:
    """Rows below each other, all of the largest of their sizes in other dimensions."""
    if len(rows) == 1:
        return rows[0]
    sizes = [list(row.shape) for row in rows]
    common = [max(size[place] for size in sizes) for place in range(len(sizes[0]))]
    spread = []
    for row, size in zip(rows, sizes, strict=True):
        wanted = [size[place] if place == dim else common[place] for place in range(len(size))]
        spread.append(row.expand(wanted) if wanted != size else row)
    dtype = spread[0].dtype
    for row in spread:
        dtype = torch.promote_types(dtype, row.dtype)
    return torch.cat([row.to(dtype) for row in spread], dim)


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(tensor_of(node).shape)  # type: ignore[union-attr]


def _dtype(node: fx.Node) -> torch.dtype:
    return tensor_of(node).dtype  # type: ignore[union-attr]
