"""Stretches of calls that compute the same, again and again, of other tensors: what the layers of a model look like.

``search`` finds calls of the same kinds at a distance. Here they are held against each other argument by argument: within
a layer they have to be wired alike, and what comes from outside of it has to be of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of, strides_of
from lz_compile.passes.formula import contraction
from lz_compile.passes.graph.snapshot import same
from lz_compile.passes.graph.view import memories_of, read, value_of
from lz_compile.passes.graph.writes import DROPOUTS
from lz_compile.passes.loops.roll.search import Program, Run, runs
from lz_compile.passes.loops.roll.worthwhile import LEAST_STEPS

#: A region of fewer calls costs more than it saves.
LEAST_CALLS = 8
#: How many beginnings of a layer are looked at, the best first.
_PHASES = 8
#: Operations that Inductor fuses nothing into, besides products and our kernels.
_APART = frozenset({"scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "embedding", "sort", "topk"})


@dataclass(frozen=True)
class Inside:
    """What a call reads of its own layer."""

    place: int


@dataclass(frozen=True)
class Layers:
    """``count`` layers of ``calls`` calls each, one behind the other from the call ``start`` on.

    ``operands`` are the tensors (and symbolic sizes) that each layer reads from outside, one for each layer in turn, and
    ``slots`` says which of them is read, in the order in which a layer reads; ``outputs`` are the places within a layer of
    what is read outside of it. ``lost`` are fusions of Inductor's that end where a layer begins.
    """

    program: Program
    start: int
    calls: int
    count: int
    operands: tuple[tuple[fx.Node, ...], ...]
    slots: tuple[int, ...]
    outputs: tuple[int, ...]
    lost: int

    def node(self, layer: int, place: int) -> fx.Node:
        """A call of a layer."""
        found: fx.Node = self.program.nodes[self.start + layer * self.calls + place]
        return found

    def leaves(self, layer: int) -> Iterator[Any]:
        """What the calls of a layer read, in order: :class:`Inside` it, other nodes, and numbers."""
        return _leaves(self.program, self.start + layer * self.calls, self.calls)

    @property
    def nodes(self) -> list[fx.Node]:
        """The calls of all layers, in order."""
        return self.program.nodes[self.start : self.start + self.count * self.calls]


def repeats(program: Program) -> Iterator[Iterator[Layers]]:
    """For each stretch that repeats, those that cover the most first: its layers, by where they may begin, the best first."""
    taken: list[Run] = []
    cost = _Cuts(program)
    for run in runs(program.kinds):
        if run.period < LEAST_CALLS or any(run.start < other.stop and other.start < run.stop for other in taken):
            continue
        starts = range(run.start, min(run.start + run.period, run.stop - LEAST_STEPS * run.period + 1))
        ranked = sorted((*cost(start, run), start) for start in starts)[:_PHASES]
        found = (each for lost, *_, start in ranked if (each := _alike(program, start, run, lost)) is not None)
        first = next(found, None)
        if first is not None:
            taken.append(run)
            yield chain([first], found)


class _Cuts:
    """What it costs to begin a layer at a call: fusions that are cut, then values that are handed on."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._depth: dict[fx.Node, int] = {}
        self._apart = {node for node in program.nodes if _is_apart(node)}
        self._written: set[fx.Node] = set()
        for node in program.nodes:
            depth = max((self._depth.get(each, 0) for each in node.all_input_nodes), default=0)
            self._depth[node] = depth + (node in self._apart)
            written = self._written.intersection(node.all_input_nodes)
            if node in self._apart or any(_is_as_written(node, each) for each in written):
                self._written.add(node)

    def __call__(self, start: int, run: Run) -> tuple[int, int, int]:
        """Fusions, values, and minus the layers that there are then; looked at where a layer in the middle begins."""
        count = (run.stop - start) // run.period
        cut = start + (count // 2) * run.period
        lost = crossing = 0
        for node in self._program.nodes[max(cut - run.period, run.start) : cut]:
            behind = [user for user in node.users if self._program.position.get(user, len(self._program.nodes)) >= cut]
            crossing += bool(behind)
            lost += any(self._are_fused(node, user) for user in behind)
        return lost, crossing, -count

    def _are_fused(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether Inductor may compute both in one pass: no product lies between them, neither is one nor a view of one."""
        is_apart = node in self._written or user in self._apart or user.op == "output"
        return not is_apart and self._depth[node] == self._depth.get(user)


def _is_as_written(node: fx.Node, source: fx.Node) -> bool:
    """Whether a call computes nothing: a view, or a dropout, which drops nothing inside of what becomes a region."""
    call = read(node)
    is_dropout = call is not None and call.name in DROPOUTS
    return is_dropout or not set(memories_of(source)).isdisjoint(memories_of(node))


def _is_apart(node: fx.Node) -> bool:
    call = read(node)
    if call is None or call.name in contraction.PRODUCTS | _APART:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten"


def _alike(program: Program, start: int, run: Run, lost: int) -> Layers | None:
    """The layers that equal the one in the middle, without others between them; None if they are too few."""
    count, calls = (run.stop - start) // run.period, run.period
    middle = count // 2
    first, last = middle, middle + 1
    while first and _is_like(program, start, calls, middle, first - 1):
        first -= 1
    while last < count and _is_like(program, start, calls, middle, last):
        last += 1
    start, count = start + first * calls, last - first
    if count < LEAST_STEPS:
        return None
    outside = [
        [leaf for leaf in _leaves(program, begin, calls) if isinstance(leaf, fx.Node)]
        for begin in range(start, start + count * calls, calls)
    ]
    read_by_all = list(zip(*outside, strict=True))
    numbers = {operand: number for number, operand in enumerate(dict.fromkeys(read_by_all))}
    outputs = [place for place in range(calls) if any(_is_read_behind(program, start, calls, place, count))]
    slots = tuple(map(numbers.__getitem__, read_by_all))
    return Layers(program, start, calls, count, tuple(numbers), slots, tuple(outputs), lost)


def _is_like(program: Program, start: int, calls: int, one: int, other: int) -> bool:
    pairs = zip(*(_leaves(program, start + layer * calls, calls) for layer in (one, other)), strict=True)
    kinds = zip(*(program.nodes[start + layer * calls :][:calls] for layer in (one, other)), strict=True)
    return all(map(_same, *zip(*pairs, strict=True))) and all(kind_of(a) == kind_of(b) for a, b in kinds)


def _leaves(program: Program, begin: int, calls: int) -> Iterator[Any]:
    """What the calls of a layer read, in order: their own layer's by its place, others' nodes, and numbers."""
    for leaves in program.leaves[begin : begin + calls]:
        for leaf in leaves:
            place = program.position.get(leaf, -1) if isinstance(leaf, fx.Node) else -1
            yield Inside(place - begin) if begin <= place < begin + calls else leaf


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        kind = kind_of(one)
        return kind is not None and bool(kind == kind_of(other))
    return same(one, other)


def kind_of(node: fx.Node) -> Any:
    """What is known of a value when it is traced; None for what no region can be handed."""
    value = value_of(node)
    if isinstance(value, torch.SymInt):
        return str(value.node.expr)
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return _kind(value)


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return (shape_of(value), strides_of(value), value.dtype, value.device, value.requires_grad, type(value))


def _is_read_behind(program: Program, start: int, calls: int, place: int, count: int) -> Iterator[bool]:
    """For each layer, whether a value of it is read outside of it."""
    for begin in range(start, start + count * calls, calls):
        users = program.nodes[begin + place].users
        yield any(not begin <= program.position.get(user, -1) < begin + calls for user in users)
