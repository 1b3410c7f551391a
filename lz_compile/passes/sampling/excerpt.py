"""What lies between a value and another one of the same shape that is computed from it, to be run at other sizes.

What a filter keeps is found by looking at what it does to a few rows: that does not depend on how it is spelled.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from lz_compile.ground.sizes import product, shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, axes_of, regroup, resolve
from lz_compile.passes.formula.expressions import is_constant
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, is_symbolic, known_tensor, needed, tensor_of, value_of
from lz_compile.passes.sampling.ordering import is_ordering

#: More operations than a filter of scores is spelled with.
_MOST = 120


@dataclass(frozen=True)
class Scores:
    """A tensor with a score (or a probability) for every token, ``vocab`` the axis of the tokens."""

    node: fx.Node
    dims: Dims
    vocab: Axis

    @property
    def rows(self) -> tuple[Axis, ...]:
        """All other axes."""
        return tuple(axis for axis in axes_of(self.dims) if axis is not self.vocab)

    def at(self, node: fx.Node) -> Scores:
        """Another tensor with the same axes."""
        return Scores(node, self.dims, self.vocab)


class Affected:
    """Everything that is computed from a value, in graph order; what is overwritten with it counts, too."""

    def __init__(self, effects: Effects, entry: fx.Node) -> None:
        self.order: list[fx.Node] = []
        position = effects.position
        targets: dict[fx.Node, list[fx.Node]] = {}
        for writer, target in effects.writes_made:
            targets.setdefault(writer, []).append(target)
        queue = [(position[user], user) for user in entry.users]
        seen = {user for _, user in queue}
        heapq.heapify(queue)
        while queue and len(self.order) < _MOST:
            at, node = heapq.heappop(queue)
            self.order.append(node)
            readers = set(node.users)
            for target in targets.get(node, ()):
                names = {target, effects.owner(target)}
                readers |= {user for name in names for user in name.users if position[user] > at}
            for reader in readers - seen:
                seen.add(reader)
                heapq.heappush(queue, (position[reader], reader))
        self.nodes = frozenset(self.order)


@dataclass(frozen=True)
class Excerpt:
    """What lies between ``entry`` and ``exit``; see :class:`~lz_compile.passes.proof.resize.Found`.

    ``leaves`` are further tensors that are read, ``read`` the axes of the nodes between that spell out sizes.
    """

    entry: Scores
    exit: fx.Node
    core: tuple[fx.Node, ...]
    leaves: Mapping[fx.Node, Dims]
    read: Mapping[fx.Node, Dims]

    @property
    def inputs(self) -> Mapping[fx.Node, Dims]:
        """Scores first."""
        return {self.entry.node: self.entry.dims, **self.leaves}

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The exit."""
        return (self.exit,)

    @cached_property
    def literal_sizes(self) -> Mapping[int, Axis]:
        """The size of the vocabulary, where it is a number that means nothing else."""
        size = self.entry.vocab.size
        return {size: self.entry.vocab} if isinstance(size, int) and size > 2 else {}

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """Every number among the arguments, each once."""
        return _numbers_of((*self.core, *self.read))

    @cached_property
    def row_numbers(self) -> tuple[float, ...]:
        """Whole numbers that may count rows: all but those that say how many tokens are wanted, and sizes."""
        nodes = [node for node in (*self.core, *self.read) if not is_ordering(node)]
        return tuple(x for x in _numbers_of(nodes) if x == x // 1 and x not in self.literal_sizes)


def _numbers_of(nodes: Iterable[fx.Node]) -> tuple[float, ...]:
    found: dict[float, None] = {}

    def note(value: Any) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found.setdefault(value)

    for node in nodes:
        map_aggregate((node.args, node.kwargs), note)
    return tuple(found)


def excerpt(
    effects: Effects, entry: Scores, affected: Affected, exit_: fx.Node, stops: Container[fx.Node] = frozenset()
) -> Excerpt | None:
    """What computes ``exit_`` from ``entry``, None where it reads what has no place in a filter; ``stops`` are leaves."""
    needed = _needed(effects, entry.node, exit_)
    written = {writer for writer, _ in effects.writes_made}
    core = [node for node in needed if node in affected.nodes or node in written]
    if exit_ not in affected.nodes or len(core) > _MOST or any(_drops_out(effects.calls[node]) for node in core):
        return None
    found = _Edge(effects, entry, stops)
    for node in core:
        for operand in node.all_input_nodes:
            if operand is not entry.node and operand not in core and not found.add(operand):
                return None
        found.note(node)
    ordered = (*(node for node in core if node is not exit_), exit_)
    return Excerpt(entry, exit_, ordered, found.leaves, found.read)


def _drops_out(call: Call | None) -> bool:
    """Whether a call is a dropout, which is left out where things are run at other sizes."""
    if call is None or call.name != "dropout":
        return False
    return call.get("training") is not False and call.get("p") != 0


def _needed(effects: Effects, entry: fx.Node, exit_: fx.Node) -> list[fx.Node]:
    """Every node from ``entry`` to ``exit_``, and what was written before into memory that these read, in graph order."""
    position = effects.position

    def sources(node: fx.Node) -> list[fx.Node]:
        owners = {effects.owner(node)} if tensor_of(node) is not None and node is not entry else set()
        writers = [
            writer
            for writer, target in effects.writes_made
            if position[writer] < position[exit_] and effects.owner(target) in owners
        ]
        return [each for each in (*node.all_input_nodes, *writers) if position[each] > position[entry]]

    return needed([exit_], (), sources)


@dataclass
class _Edge:
    """What a filter reads besides its scores: constants are made again, tensors are leaves."""

    effects: Effects
    entry: Scores
    stops: Container[fx.Node]
    leaves: dict[fx.Node, Dims] = field(default_factory=dict)
    read: dict[fx.Node, Dims] = field(default_factory=dict)

    def add(self, node: fx.Node) -> bool:
        """Look at one operand; whether it may be read."""
        if node in self.leaves or node in self.read:
            return True
        call, tensor = self.effects.calls[node], tensor_of(node)
        if tensor is None:
            return self._number(node)
        dims = dims_of(tensor, self.entry)
        if dims is None:
            return False
        if node in self.stops:
            self.leaves[node] = dims
            return True
        if call is not None and (is_constant(call) or call.name == "arange"):
            self.read[node] = dims
            return True
        is_wide = self.entry.vocab in axes_of(dims)
        is_made = call is not None and (is_pointwise(call) or layout.rearranges(call))
        if (
            is_made
            and (is_wide or (not axes_of(dims) and _is_made_of_numbers(self.effects, node)))
            and all(map(self.add, node.all_input_nodes))
        ):
            self.read[node] = dims
            return True
        self.leaves[node] = dims
        return True

    def _number(self, node: fx.Node) -> bool:
        """A symbolic number is a size, or something that is given."""
        if not is_symbolic(node):
            return value_of(node) is not None
        sizes = {str(axis.size) for axis in axes_of(self.entry.dims)}
        if str(value_of(node).node.expr) not in sizes:
            self.leaves[node] = ()
        return True

    def note(self, node: fx.Node) -> None:
        """Remember the axes of a node between, if they are known."""
        tensor = tensor_of(node)
        dims = None if tensor is None else dims_of(tensor, self.entry)
        if dims is not None:
            self.read[node] = dims


def _is_made_of_numbers(effects: Effects, node: fx.Node) -> bool:
    call = effects.calls[node]
    if call is None:
        return False
    if is_constant(call) or call.name == "arange":
        return True
    is_plain = is_pointwise(call) or layout.rearranges(call)
    inputs = node.all_input_nodes
    return is_plain and bool(inputs) and all(_is_made_of_numbers(effects, each) for each in inputs)


def dims_of(tensor: torch.Tensor, entry: Scores) -> Dims | None:
    """The axes of a tensor that has those of the scores, of their rows, of the tokens, or none; None for another one."""
    extents = shape_of(tensor)
    whole = resolve(entry.dims)
    total = product(extents)
    if len(extents) == len(whole):
        aligned = [_alike(dim, extent) for dim, extent in zip(whole, extents, strict=True)]
        if all(each is not None for each in aligned):
            return tuple(aligned)  # type: ignore[arg-type]  # none of them is None
    for axes in (axes_of(entry.dims), entry.rows, (entry.vocab,), ()):
        if product(axis.size for axis in axes) == total:
            try:
                found = _grouped(axes, extents)
            except LayoutError:
                continue
            return found
    return None


def _alike(dim: tuple[Axis, ...], extent: Any) -> tuple[Axis, ...] | None:
    """The axes of one dimension: those of the scores' own, or none if it has one element."""
    if product(axis.size for axis in dim) == extent:
        return dim
    return () if extent == 1 else None


def _grouped(axes: tuple[Axis, ...], extents: tuple[Any, ...]) -> Dims:
    """The axes distributed over dimensions, none of them cut; LayoutError where they do not fit without."""
    copies = {Axis(axis.size): axis for axis in axes}
    dims = regroup(copies, extents)
    if any(copy.parts for copy in copies):
        raise LayoutError("an axis would have to be cut")
    return tuple(tuple(copies[axis] for axis in dim) for dim in dims)


def exits(effects: Effects, entry: Scores, affected: Affected, since: fx.Node) -> Iterator[fx.Node]:
    """The values that look like the scores, and are computed from what ``since`` found out about them, in graph order."""
    first = effects.position[since]
    after = {since}
    wanted = shape_of(known_tensor(entry.node))
    for node in affected.order:
        if effects.position[node] > first and any(each in after for each in _sources(effects, node)):
            after.add(node)
        tensor = tensor_of(node)
        if node not in after or node is since or tensor is None or not tensor.is_floating_point():
            continue
        call = effects.calls[node]
        if call is not None and not call.is_inplace and shape_of(tensor) == wanted:
            yield node


def _sources(effects: Effects, node: fx.Node) -> list[fx.Node]:
    """What a node reads, and what was written into that before."""
    found = list(node.all_input_nodes)
    owners = {effects.owner(each) for each in found if tensor_of(each) is not None}
    at = effects.position[node]
    found += [
        writer
        for writer, target in effects.writes_made
        if effects.position[writer] < at and effects.owner(target) in owners
    ]
    return found
