"""A recurrence that the source computes in logarithmic depth, as a match of the op ``scan``: a state without keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from lz_compile.ground.sizes import as_size, product
from lz_compile.lowering.ops.scan import Operands, ScanAttrs, ScanFacts, ScanStructure, kind_of
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims, axes_of
from lz_compile.passes.formula.expressions import is_constant
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import known_tensor
from lz_compile.passes.loops.recurrence.prefix_scan import PrefixScan
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core, wants_grad
from lz_compile.passes.rewriting.match import Cell, Found, Input, Match, Site, TableEmitter, Trial

_Groups = tuple[tuple[Axis, ...], ...]

#: Of logarithms of decays in a proof: sums of many larger ones leave the source no digits.
_GENTLE = 0.1


@dataclass(frozen=True)
class PrefixScanEmitter(TableEmitter):
    """Every dimension but time is one of columns, where the states are not read by a product that says what is a row."""

    kind: ClassVar = Operands

    scan: PrefixScan
    attrs: ScanAttrs

    def table(self) -> dict[str, Cell]:
        """``decay`` and ``drive`` ``[B, H, T, K, V]``, or what these are made of, and what reads them ``[B, H, T, 1, K]``."""
        scan, read, (batch, heads, time, rows, columns) = self.scan, self.scan.read, self._groups
        given = {} if scan.decay is None else {"decay": scan.decay}
        given |= {"drive": scan.drive} if scan.updates is None else {}
        found = {
            name: Cell(Leaf(node, scan.dims[node]), self._groups, is_whole=read is None or name == "drive")
            for name, node in given.items()
        }
        sides = {} if scan.updates is None else {"left": (scan.updates, rows), "right": (scan.updates, columns)}
        parts = [(name, getattr(of, name), of.region, last) for name, (of, last) in sides.items()]
        parts += [] if read is None else [("query", read.query, read.region, rows)]
        dtype = self.attrs.compute_dtype
        return found | {
            name: Cell(what, (batch, heads, time, (), last), region=region, dtype=dtype)
            for name, what, region, last in parts
        }

    def operands(self, builder: Builder) -> Any:
        """Those of the table, from what the source accumulates of decays where it has that."""
        x = super().operands(builder)
        scan = self.scan
        if scan.is_reversed:
            decay: Any = x.decay
            drive: Any = x.drive
            x = replace(x, decay=None if decay is None else decay.flip(2), drive=drive.flip(2))
        return x if scan.logs == "none" else _accumulated(x, scan)

    @property
    def _groups(self) -> _Groups:
        """Batch, heads, time, rows and columns of the states."""
        read, time, updates = self.scan.read, self.scan.time, self.scan.updates
        others = [axis for dim in self.scan.dims[self.scan.output] for axis in dim if axis is not time]
        if read is None:
            return ((), (), (time,), (), tuple(others))
        own = read.query_axes | (frozenset() if updates is None else updates.region.axes_in(updates.left))
        batch = tuple(axis for axis in others if axis in own and axis not in read.rows)
        columns = tuple(axis for axis in others if axis not in (*batch, *read.rows))
        return (batch[:1], batch[1:], (time,), read.rows, columns)

    def facts(self, *, needs_grad: bool) -> ScanFacts:
        """For selection."""
        scan, groups = self.scan, self._groups
        batch, heads, length, rows, columns = (product(axis.size for axis in group) for group in groups)
        own = set(axes_of(scan.dims[scan.decay])) if scan.decay is not None else set()
        kind = kind_of(*(not own.isdisjoint(group) for group in groups[3:]))
        if scan.decay is None or scan.read is None:
            kind = "none" if scan.decay is None else "value"
        has_updates = scan.updates is not None
        structure = ScanStructure(
            decay=kind, has_updates=has_updates, has_drive=not has_updates, has_query=scan.read is not None
        )
        result = known_tensor(scan.output)
        sizes = (batch, heads, length, rows, columns, int(has_updates), 1)
        return ScanFacts(
            *sizes, structure=structure, dtype=result.dtype, device=result.device.type, needs_grad=needs_grad
        )

    def result(self, builder: Builder, value: Any) -> Any:
        """The states of all steps, where the source has them, or what is read of these, and the last ones."""
        states, last = value
        states = states.flip(2) if self.scan.is_reversed else states
        read, (batch, heads, time, rows, columns) = self.scan.read, self._groups
        if read is not None:
            groups = (batch, heads, time, (), columns)
            lasts = [builder.restore(last, (batch, heads, rows, columns), dims) for dims in read.lasts.values()]
            return (
                (builder.restore(states, groups, read.dims), *lasts)
                if lasts
                else builder.restore(states, groups, read.dims)
            )
        found = builder.restore(states.reshape([builder.extent(self.scan.time), -1]), self._groups[2::2], self._flat)
        shape = [builder.size(dim) for dim in self.scan.dims[self.scan.output]]
        return found.reshape(shape).to(known_tensor(self.scan.output).dtype)

    @property
    def _flat(self) -> Dims:
        return tuple(dim for dim in self.scan.dims[self.scan.output] if dim)


def _accumulated(x: Operands, scan: PrefixScan) -> Operands:
    """The operands ``[1, 1, T, 1, V]`` from decays that the source multiplies up, or their logarithms, and from what drives.

    From a decay of zero on, whose logarithm is infinite, the source has no number, and neither has this.
    """
    decay: Any = x.decay
    drive: Any = x.drive
    lost = torch.where(decay == (0 if scan.logs == "products" else -torch.inf), torch.nan, 0.0)
    if scan.logs == "sums":
        first = torch.zeros_like(decay[:, :, :1])
        decay = torch.cat((first, decay[:, :, 1:] - decay[:, :, :-1]), 2)
    decay = decay if scan.logs == "products" else torch.exp(decay)
    if drive is None:  # updates do: nothing times NaN is NaN
        return replace(x, decay=decay + lost)
    return replace(x, decay=decay, drive=(torch.exp(drive) if scan.has_log_drive else drive) + lost)


def match_of(scan: PrefixScan, effects: Effects) -> Match:
    """The match of such a recurrence; proofs keep the number of steps, which the source has spelled out."""
    leaves = [] if scan.decay is None else [scan.decay]
    leaves += [scan.drive] if scan.updates is None else []
    read, dtype = scan.read, known_tensor(scan.output).dtype
    wide = torch.promote_types(dtype, torch.float32)
    ambient = effects.ambient(scan.output)
    attrs = ScanAttrs(compute_dtype=wide, out_dtype=dtype, state_dtype=dtype)
    emitter = PrefixScanEmitter(scan, attrs)
    own = set(axes_of(scan.dims[scan.output]))
    calls = {node: effects.calls[node] for node in scan.core}
    constants = {node: _constant_dims(node, scan) for node, call in calls.items() if call and is_constant(call)}
    gentle = scan.decay if scan.logs == "steps" else None
    inputs = {node: Input(scan.dims[node], scale=_GENTLE if node is gentle else 1.0) for node in leaves}
    before = "h[t+1]" if scan.is_reversed else "h[t-1]"
    formula = f"h[t] = {before} + b[t]" if scan.decay is None else f"h[t] = a[t] * {before} + b[t]"
    ties: dict[Axis, Axis] = {}
    if scan.updates is not None:
        _add(inputs, ties, scan.updates.region.leaves_in(scan.updates.left, scan.updates.right).values())
        formula = formula.replace("b[t]", "k[t] v[t]")
    if read is not None:
        _add(inputs, ties, read.region.leaves_in(read.query).values())
        formula += "; y[t] = sum of c[t] * h[t]"
    facts = emitter.facts(needs_grad=wants_grad(ambient, inputs))
    spelled = {axis for dims in constants.values() for axis in axes_of(dims) if axis not in own}
    return Match(
        "scan",
        _site(scan, Core(scan.core, ambient), constants, effects),
        Found(attrs, facts, inputs, {}, emitter, formula),
        Trial(pinned=frozenset({scan.time, *spelled}), ties=ties),
    )


def _add(inputs: dict[fx.Node, Input], ties: dict[Axis, Axis], leaves: Iterable[Leaf]) -> None:
    """Further inputs; of one that is there already, its axes are those that it has by now."""
    for leaf in leaves:
        known = inputs.setdefault(leaf.node, Input(leaf.dims)).dims
        pairs = zip(axes_of(leaf.dims), axes_of(known), strict=True)
        ties.update((one, other) for one, other in pairs if one is not other)


def _site(scan: PrefixScan, core: Core, constants: Mapping[fx.Node, Dims], effects: Effects) -> Site:
    """What is replaced: the states, or what is read of them."""
    read = scan.read
    if read is None:
        return Site.of(core, scan.dims[scan.output], constants)
    own: tuple[fx.Node, ...] = ()
    spelled = dict(constants)
    if scan.updates is not None:
        own, spelled = scan.updates.inner, {**constants, **scan.updates.region.interior}
    nodes = {*core.nodes, *own, *read.inner, *read.lasts} - {read.output}
    ordered = (*sorted(nodes, key=effects.position.__getitem__), read.output)
    site = Site.of(replace(core, nodes=ordered), read.dims, spelled)
    return replace(site, extra_outputs=tuple(read.lasts))


def _constant_dims(node: fx.Node, scan: PrefixScan) -> Dims:
    """The axes of a constant inside: those of the result, but along time, where it has a size of its own."""
    result = scan.dims[scan.output]
    found = []
    for place, size in enumerate(map(as_size, known_tensor(node).shape)):
        own = result[place] if place < len(result) and place != scan.dim else ()
        is_own = len(own) == 1 and own[0].size == size
        found.append(() if size == 1 else own if is_own else (Axis(size),))
    return tuple(found)
