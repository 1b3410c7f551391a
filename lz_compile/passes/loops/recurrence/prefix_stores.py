"""Recurrences that the source computes in logarithmic depth and in place: sweeps over strided pieces of a tensor.

``X[:, 1::2] += A[:, 1::2] * X[:, ::2]`` and the like overwrite the summands of ``h = a h + b`` with its states, forward or
backward in time. What happens to the memory is evaluated on random numbers in float64, at few elements in other dimensions
than time, and held against the recurrence, as in :mod:`prefix_scan`. The writes become one call of the op ``scan``.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from lz_compile.ground import events, fingerprint
from lz_compile.lowering.ops.scan import Operands
from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula.layout import stride_order
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import known_tensor, memory_of, reached, read, tensor_of
from lz_compile.passes.loops.recurrence.sweep_proof import Region, Sweep, proven
from lz_compile.passes.loops.roll.step_graph import Emitter
from lz_compile.passes.rewriting.core import wants_grad

_VIEWS = frozenset(
    "view reshape transpose permute movedim swapaxes slice getitem narrow select unsqueeze squeeze flatten unflatten expand "
    "flip t contiguous clone".split()
)
_WRITES = frozenset({"setitem", "copy", "copy_"})
#: A sweep up and down over 16 steps is a dozen writes; fewer are other business.
_LEAST_WRITES = 4


def prefix_stores(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Put a call of the op where memory (of a node that may be edited) is overwritten by a recurrence; how many there are."""
    found, failed = 0, dict[str, Exception]()
    while (sweep := next((each for each in _sweeps(graph, failed) if may_edit(each.root)), None)) is not None:
        _replace(graph, sweep)
        found += 1
    for name, error in failed.items():
        text = f"what is written to {name} may be a recurrence; it stays as it is, for it does not run at other sizes"
        events.record("PROBE_FAILED", text, error, level=logging.INFO)
    return found


def _sweeps(graph: fx.Graph, failed: dict[str, Exception]) -> Iterator[Sweep]:
    """The recurrences that memory is overwritten by; notes by name what ``failed`` to run."""
    if sum(_target(node) is not None for node in graph.nodes) < _LEAST_WRITES:
        return
    memory = _Memory(graph)
    seen: set[fx.Node] = set()
    for root in memory.written:
        if root in seen or len(memory.written[root]) < _LEAST_WRITES:
            continue
        region = memory.region(root)
        if region is None:
            continue
        seen |= region.roots
        read_later = [each for each in region.roots if any(memory.readers(each, region))]
        operands = region.roots | region.given
        if len(read_later) != 1 or len(operands) > 2 or any(tensor_of(each) is None for each in operands):
            continue
        if memory.is_closed(region):
            found = proven(region, memory.calls(region), read_later[0], failed)
            if found is not None:
                yield found


class _Memory:
    """Who writes to which memory, by the call that made it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.effects = Effects(graph)
        self.position = {node: place for place, node in enumerate(graph.nodes)}
        self.members: dict[fx.Node, list[fx.Node]] = {}
        self.root: dict[fx.Node, fx.Node] = {}
        first: dict[int, fx.Node] = {}
        for node in graph.nodes:
            memory = memory_of(node)
            if memory is not None:
                self.root[node] = first.setdefault(memory, node)
                self.members.setdefault(self.root[node], []).append(node)
        self.written: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            target = _target(node)
            if target is not None and target in self.root:
                self.written.setdefault(self.root[target], []).append(node)

    def region(self, root: fx.Node) -> Region | None:
        """Everything that takes part in what is written to a root's memory; None where a part is of another kind."""
        found, queue = Region(), [root]
        while queue:
            current = queue.pop()
            if current in found.roots:
                continue
            if current.op not in ("call_function", "call_method") or not self._is_plain(current):
                return None
            found.roots.add(current)
            found.writes += self.written[current]
            for write in self.written[current]:
                others = self._behind(write, found)
                if others is None:
                    return None
                queue += others
        return found

    def _is_plain(self, root: fx.Node) -> bool:
        """Whether all names of some memory are views."""
        return all(each is root or _target(each) is not None or _name(each) in _VIEWS for each in self.members[root])

    def _behind(self, write: fx.Node, found: Region) -> list[fx.Node] | None:
        """The roots that a write reads; None where it computes something else than sums and products."""
        stack, roots = [write], list[fx.Node]()
        while stack:
            node = stack.pop()
            if node in found.nodes:
                continue
            if node in found.roots or (node in self.root and self.root[node] is node and node in self.written):
                roots.append(node)
                continue
            is_inside = node in self.root and self.root[node] in self.written
            call = read(node)
            is_read = call is not None and (
                is_pointwise(call) or call.name in _VIEWS | _WRITES or _target(node) is not None
            )
            if not is_inside and not (is_read and any(self._is_sweep(each) for each in reached([node], most=32))):
                found.given.add(node)
                continue
            if not is_read:
                return None
            found.nodes.add(node)
            stack += node.all_input_nodes
        return roots

    def _is_sweep(self, node: fx.Node) -> bool:
        return node in self.root and self.root[node] in self.written

    def readers(self, root: fx.Node, region: Region) -> Iterator[fx.Node]:
        """Who reads some memory after the last write, and through which of its names."""
        last = max(map(self.position.__getitem__, region.writes))
        for member in self.members[root]:
            for user in member.users:
                if self.position[user] > last and user not in self.members[root]:
                    yield member

    def calls(self, region: Region) -> list[fx.Node]:
        """The calls up to the last write, and all names of the memory until then, in graph order."""
        names = {each for root in region.roots for each in self.members[root]}
        last = max(map(self.position.__getitem__, region.writes))
        inside = [node for node in region.nodes | names if self.position[node] <= last]
        return sorted(inside, key=self.position.__getitem__)

    def is_closed(self, region: Region) -> bool:
        """Whether nobody sees anything between the first write and the last, in one mode, without gradients."""
        places = sorted(map(self.position.__getitem__, region.writes))
        inside = region.nodes | region.roots | {each for root in region.roots for each in self.members[root]}
        ambients = {self.effects.ambient(node) for node in region.writes}
        for node in inside:
            for user in node.users:
                if places[0] <= self.position[user] <= places[-1] and user not in inside:
                    return False
        operands = (*region.roots, *region.given)
        if len(ambients) != 1 or any(self.position[each] >= places[0] for each in operands):
            return False
        (ambient,) = ambients
        is_mapped = ambient.is_transformed
        return (
            not wants_grad(ambient, operands)
            and not is_mapped
            and not any(self.root.get(each) in self.written for each in region.given)
        )


def _target(node: fx.Node) -> fx.Node | None:
    """What a call writes to."""
    call = read(node)
    if node.target is operator.setitem or (call is not None and call.is_inplace):
        first = node.args[0] if node.args else None
        return first if isinstance(first, fx.Node) else None
    return None


def _name(node: fx.Node) -> str:
    call = read(node)
    return "" if call is None else call.name


# ---- rewriting -------------------------------------------------------------------------------------------------------


def _replace(graph: fx.Graph, sweep: Sweep) -> None:
    """The call before the first write, and everybody who reads the memory later reads its result."""
    memory, region = _Memory(graph), sweep.region
    last = max(map(memory.position.__getitem__, region.writes))
    names = sorted(set(memory.readers(sweep.root, region)), key=memory.position.__getitem__)
    members = set(memory.members[sweep.root])
    later = {
        name: [user for user in name.users if memory.position[user] > last and user not in members] for name in names
    }
    example = tensor_of(sweep.root)
    emit = Emitter(graph, example.fake_mode, memory.effects.ambient(region.writes[0]), region.writes[-1])  # type: ignore[union-attr]
    first = min(region.writes, key=memory.position.__getitem__)
    with graph.inserting_before(first):
        states = {sweep.root: _states(emit, sweep)}
        for name, users in later.items():
            value = _again(emit, name, states, memory)
            for user in users:
                user.replace_input_with(name, value)
    for node in sorted(region.writes, key=memory.position.__getitem__, reverse=True):
        for user in list(node.users):
            user.replace_input_with(node, node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
    unread = [*region.nodes, *(each for root in region.roots for each in memory.members[root])]
    for node in sorted(set(unread) - set(region.writes), key=memory.position.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _again(emit: Emitter, name: fx.Node, states: dict[fx.Node, fx.Node], memory: _Memory) -> fx.Node:
    """A view of the memory as a view of what takes its place."""
    if name not in states:
        if _target(name) is not None:
            return _again(emit, name.args[0], states, memory)  # type: ignore[arg-type]
        (source,) = name.all_input_nodes
        base = _again(emit, source, states, memory)
        arguments = [base if each is source else each for each in name.args]
        states[name] = emit.call(name.target, *arguments, **name.kwargs)
    return states[name]


def _states(emit: Emitter, sweep: Sweep) -> fx.Node:
    """The states, laid out in memory as what they take the place of."""
    example = known_tensor(sweep.root)
    order, back = stride_order(example.stride())
    dim = order.index(sweep.dim)

    def canonical(node: fx.Node | None, own: Sequence[int]) -> fx.Node | None:
        """``[1, before, T, 1, after]`` in the order of memory; ``own`` are a tensor's dimensions in that of the root."""
        if node is None:
            return None
        places = [own[place] for place in order]
        value = node if places == sorted(places) else emit.call("permute", node, places)
        value = emit.call("flip", value, dim) if sweep.is_reversed else value
        shape = list(known_tensor(value).shape)
        whole = [example.shape[place] for place in order]
        value = value if shape == whole else emit.call("expand", value, whole)
        before, after = whole[:dim], whole[dim + 1 :]
        return emit.call("reshape", value, (1, math.prod(before), whole[dim], 1, math.prod(after)))

    operands: dict[str, Any] = {"decay": canonical(sweep.decay, sweep.order)}
    operands["drive"] = canonical(sweep.root, range(example.dim()))
    given = Operands(**operands).flat()
    both = emit.call(
        torch.ops.layerzero.scan.default, *given, example.dtype, example.dtype, fingerprint.traced_source()
    )
    value = emit.call(operator.getitem, both, 0)
    value = emit.call("reshape", value, tuple(example.shape[place] for place in order))
    value = emit.call("flip", value, dim) if sweep.is_reversed else value
    value = emit.copied(value)
    return value if order == sorted(order) else emit.call("permute", value, back)
