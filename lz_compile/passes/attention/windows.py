"""Attention of each query over keys that were gathered around it: a band of the keys that they were gathered from.

Nothing is gathered then, and a kernel goes over blocks of keys. A mask that drops the padding at both ends says that those
keys are not there; any other one is moved from places in the window to keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from lz_compile.ground.sizes import Size
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band
from lz_compile.passes.attention.emitter import AttentionEmitter, Roles
from lz_compile.passes.attention.operand import Operand
from lz_compile.passes.formula.axes import Axis, Dims, atoms, axes_of, renamed
from lz_compile.passes.masks.index_reading import read_window, seen_in_window
from lz_compile.passes.masks.meaning import Window
from lz_compile.passes.masks.reading import Masks
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Input, Match

#: Keys of a proof: more than the queries and places of a window together, which it takes few of.
_KEYS = 128


@dataclass(frozen=True)
class WindowEmitter(AttentionEmitter):
    """The same over all keys: of the tensor's, ``first`` and ``last`` are left out at its ends.

    ``places`` is the axis of the window, ``start`` the first key of the first query, ``slack`` how many keys are behind
    the last one of the last query. ``gathered`` are the tensors with windows of keys and values, by what they are windows
    of, ``told`` the masks that leave keys out and whether True keeps.
    """

    places: tuple[Axis, ...] = ()
    start: int = 0
    slack: int = 0
    first: int = 0
    last: int = 0
    gathered: Mapping[fx.Node, tuple[Dims, Operand]] = field(default_factory=dict)
    told: Mapping[fx.Node, tuple[Dims, bool]] = field(default_factory=dict)

    def at(self, sizes: Mapping[Axis, int] | None) -> tuple[int, int, int]:
        """The first key of the first query, and how many keys are left out at both ends; for a proof, with fewer places."""
        if sizes is None:
            return self.start, self.first, self.last
        queries, places, keys = self._lengths_at(sizes)
        start = min(self.start, keys - queries - places + 1)
        before = min(self.first - self.start, places - 1)
        behind = min(self.last - self.slack, places - 1, queries + places - 2 - max(before, 0))  # one is left
        slack = keys - (start + queries + places - 1)
        return start, max(start + before, 0), max(slack + behind, 0)

    def _lengths_at(self, sizes: Mapping[Axis, int]) -> list[int]:
        builder = Builder(lambda node: node, sizes=sizes)
        return [builder.size(axes) for axes in (self.roles.queries, self.places, self.roles.keys)]

    def lengths(self) -> tuple[Size, Size]:
        """How many queries and keys there are."""
        queries, keys = super().lengths()
        return queries, keys - self.first - self.last

    def attributes_at(self, sizes: Mapping[Axis, int]) -> AttentionAttrs:
        """The attributes for a proof at other sizes."""
        (start, first, _), places = self.at(sizes), self._lengths_at(sizes)[1]
        return replace(self.attrs, band=Band(start - first, start - first + places - 1))

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """The windows of a tensor, or the mask that leaves keys at the ends out."""
        start, first, last = self.at(sizes)
        queries, places, keys = self._lengths_at(sizes)
        seen = torch.arange(queries)[:, None] + torch.arange(places) + start
        groups = (self.roles.queries, self.places)
        if node in self.told:
            dims, keeps = self.told[node]
            keep = ((seen >= first) & (seen < keys - last)).to(given.device)
            return builder.restore(keep if keeps else ~keep, groups, dims)
        dims, operand = self.gathered[node]
        rest = tuple((axis,) for axis in axes_of(operand.dims) if axis not in self.roles.keys)
        value = builder.arrange(builder.value(operand.node), operand.dims, (*rest, self.roles.keys))
        return builder.restore(value[..., seen.to(value.device)], (*rest, *groups), dims)

    def _tensor(self, builder: Builder, name: str) -> Any:
        value = super()._tensor(builder, name)
        _, first, last = self.at(builder.sizes)
        return value if name == "query" else value[:, :, first : -last or None]

    def _mask(self, builder: Builder, groups: tuple[tuple[Axis, ...], ...]) -> Any:
        return self._by_keys(builder, super()._mask(builder, (*groups[:-1], self.places)))

    def _bias(self, builder: Builder, groups: tuple[tuple[Axis, ...], ...], query: Any) -> Any:
        return self._by_keys(builder, super()._bias(builder, (*groups[:-1], self.places), query))

    def _by_keys(self, builder: Builder, value: Any) -> Any:
        """What is given for places in the window, for keys: each row is moved by one more, which is a row of one more."""
        queries, places, keys = (builder.size(axes) for axes in (self.roles.queries, self.places, self.roles.keys))
        start, first, last = self.at(builder.sizes)
        value = value.expand(*value.shape[:-2], queries, places)
        moved = F.pad(value, (start, keys + 1 - places - start)).flatten(-2)[..., : queries * keys]
        return moved.unflatten(-1, (queries, keys))[..., first : -last or None]

    def _inputs(self, biases: Collection[fx.Node]) -> dict[fx.Node, Input]:
        windows = {
            node: Input(dims, implied=f"windows of {each.node.name}") for node, (dims, each) in self.gathered.items()
        }
        told = {node: Input(dims, implied="what lies inside") for node, (dims, _) in self.told.items()}
        return {**super()._inputs(biases), **windows, **told}

    def match(self, op: str, core: Core, source_kernel: str | None = None) -> Match:
        """The finished match."""
        found = super().match(op, core, source_kernel)
        return replace(found, trial=replace(found.trial, least=dict.fromkeys(self.roles.keys, _KEYS)))


def windowed(emitter: AttentionEmitter, masks: Masks) -> WindowEmitter | None:
    """The same attention over the tensors that its keys and values are windows of; None where they are none."""
    attrs, (key, value) = emitter.attrs, (emitter.key, emitter.value)
    is_special = (
        not emitter.key_gain == emitter.value_gain == 1 or attrs.masked_rows == "fill" or emitter.floor is not None
    )
    if emitter.roles.queries or is_special:
        return None
    places = atoms(emitter.roles.keys)
    for query in (*emitter.roles.batch, *emitter.roles.kv_heads):
        if len(places) == 1 and query in axes_of(key.dims) and query in axes_of(value.dims):
            found = [
                read_window(masks.effects, masks.constants, each.node, each.dims, query, places[0])
                for each in (key, value)
            ]
            if found[0] is not None and found[1] is not None:
                return _joined(emitter, masks, query, found[0], found[1])
    return None


def _joined(emitter: AttentionEmitter, masks: Masks, query: Axis, keys: Window, values: Window) -> WindowEmitter | None:
    """The attention over all keys, where keys and values are windows alike."""
    (places,), start = atoms(emitter.roles.keys), keys.start
    slack = sympy.sympify(keys.along.size - start - query.size - places.size + 1)
    is_alike = (start, keys.along.size) == (values.start, values.along.size)
    if not is_alike or not slack.is_Integer or not isinstance(places.size, int):
        return None
    told = emitter.flags
    flags = [(node, *each) for node, each in told.items()]
    ends = seen_in_window(masks.effects, masks.constants, flags, query, places, keys)
    if ends is None or not _leave_a_key(ends, start, int(slack), query.size, places.size):
        ends, told = (0, 0), {}
        if emitter.keep != 1 and _reaches_out(emitter):
            return None
    band = Band(start - ends[0], start - ends[0] + places.size - 1)
    attrs = replace(emitter.attrs, band=band)
    if told:  # then every query sees a key
        attrs = replace(attrs, masked_rows="nan", selects_masked=False, has_mask=False)
    key, value = (
        replace(given, node=window.node, dims=renamed(window.dims, {window.along: keys.along}))
        for given, window in ((emitter.key, keys), (emitter.value, values))
    )
    position = emitter.region.effects.position
    for operand in (key, value):  # read where windows are taken
        emitter.region.readers[operand.node] = min(operand.node.users, key=position.__getitem__)
    own = {each.name: getattr(emitter, each.name) for each in fields(AttentionEmitter)}
    own |= {"roles": _roles(emitter.roles, query, keys.along), "key": key, "value": value, "attrs": attrs}
    own |= {"keep": sympy.S.One if told else emitter.keep, "mask_label": "window"}
    own |= {"buffers": tuple(dict.fromkeys((*emitter.buffers, *keys.buffers, *values.buffers)))}
    pairs = ((emitter.key, key), (emitter.value, value))
    gathered = {given.node: (given.dims, whole) for given, whole in pairs}
    return WindowEmitter(**own, places=(places,), start=start, slack=int(slack), first=ends[0], last=ends[1],
                         gathered=gathered, told=told)  # fmt: skip


def _reaches_out(emitter: AttentionEmitter) -> bool:
    """Whether a query that sees nothing of its window has to do with keys outside of it: with their mean, or by gradients."""
    return emitter.attrs.masked_rows == "mean" or (emitter.attrs.masked_rows == "nan" and emitter.needs_grad())


def _leave_a_key(ends: tuple[int, int], start: int, slack: int, queries: Size, places: int) -> bool:
    """Whether every query sees a key where so many are left out at both ends."""
    before, behind = ends[0] - start, ends[1] - slack
    is_any = not isinstance(queries, int) or max(before, 0) + max(behind, 0) < queries + places - 1
    return before < places and behind < places and is_any


def _roles(given: Roles, query: Axis, keys: Axis) -> Roles:
    """The roles where one axis of the batch, or of heads, is that of queries."""
    shared = [axis for axis in (*given.batch, *given.kv_heads) if axis is not query]
    return replace(given, batch=tuple(shared[:-1]), kv_heads=tuple(shared[-1:]), queries=(query,), keys=(keys,))
