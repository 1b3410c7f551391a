"""Slices that move on with the loop: ``x[:, t]``, ``x.select(1, t)``, ``x.unbind(1)[t]``, ``x[:, 4 * t : 4 * t + 4]``.

Overwritten tensors are a chain of values: which call made what a reader sees when it reads a tensor. ``S *= a`` and
``S.mul_(a)`` overwrite ``S``; whoever reads ``S`` afterwards sees the result of that call. Told so, a loop that overwrites
its state is a loop that hands on a new one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from lz_compile.passes.formula.expressions import CASTS
from lz_compile.passes.formula.layout import WHOLE, Resolve, index_of, places_of
from lz_compile.passes.graph.effects import RESHAPERS, Effects
from lz_compile.passes.graph.gradients import differentiated
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import Call, memory_of, read, tensor_of
from lz_compile.passes.loops.roll.search import Program

#: Calls that give their input itself, or a copy of it, whose memory is another one.
_RETURNS_ITSELF = CASTS | {"contiguous"}


class Versions:
    """Who reads which value of the overwritten tensors of one graph."""

    def __init__(self, program: Program) -> None:
        self.effects = Effects(program.graph)
        self._graph = program.graph
        #: Calls that overwrite a whole tensor or, as assignments, part of it, with the tensor's node.
        self.writes: dict[fx.Node, fx.Node] = {}
        #: Calls that overwrite what they are not understood to, and readers of what was overwritten through an alias.
        self.unclear: dict[fx.Node, str] = {}
        #: For readers that see another value than the node that they name: the call that made it.
        self.seen: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        #: The same by memory, in order.
        self._seen_in: dict[int | None, list[tuple[int, fx.Node, fx.Node]]] = {}
        self._memory_ids: dict[fx.Node, int | None] = {}
        #: By memory: the node that made it, and the last call that overwrote any of it.
        self._made: dict[int | None, fx.Node] = {}
        self._last: dict[int | None, fx.Node] = {}
        #: Of which a part was overwritten through a view: what all of it holds is no call's result any more.
        self._opaque: set[int | None] = set()
        targets: dict[fx.Node, list[fx.Node]] = {}
        for writer, target in self.effects.writes_made:
            targets.setdefault(writer, []).append(target)
        for node in program.graph.nodes if targets else ():
            for operand in node.all_input_nodes:
                self._read(node, operand)
            self._made.setdefault(self._memory_id(node), node)
            for target in targets.get(node, ()):
                self._write(node, target)

    @cached_property
    def differentiated(self) -> frozenset[fx.Node]:
        """The nodes that gradients of results may come back to."""
        return differentiated(self._graph, self.effects)

    def resolve(self, reader: fx.Node, value: Any) -> Any:
        """The call whose result ``reader`` sees where it names ``value``."""
        return self.seen.get((reader, value), value) if isinstance(value, fx.Node) else value

    def seen_of(self, nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
        """Readers of memory that ``nodes`` made or overwrite, what they name and the calls that made what they see."""
        memories = {self._memory_id(self.writes.get(node, node)) for node in nodes}
        for _, reader, operand in sorted(each for memory in memories for each in self._seen_in.get(memory, ())):
            yield reader, operand, self.seen[reader, operand]

    def tensor(self, version: fx.Node) -> fx.Node:
        """The node that holds a version's tensor: an assignment's result is the tensor that it assigns to."""
        while version in self.writes and tensor_of(version) is None:
            version = self.writes[version]
        return version

    def is_overwritten(self, node: fx.Node) -> bool:
        """Whether anything overwrites memory of ``node``, ever."""
        return self._memory_id(node) in self._last

    def owner(self, node: fx.Node) -> fx.Node:
        """The first node that is the whole tensor which ``node`` overwrites or shows."""
        while node in self.writes:
            node = self.writes[node]
        return node

    def shares(self, node: fx.Node, others: Iterable[fx.Node]) -> bool:
        """Whether a node shows memory of one of ``others``."""
        number = self._memory_id(node)
        return number is not None and any(self._memory_id(other) == number for other in others)

    def _memory_id(self, node: fx.Node) -> int | None:
        if node not in self._memory_ids:
            self._memory_ids[node] = memory_of(node)
        return self._memory_ids[node]

    def _is_whole(self, node: fx.Node) -> bool:
        """Whether a node is the very tensor that its memory was made as."""
        whole, made = self.effects.whole(node), self._made.get(self._memory_id(node))
        while whole is not made and (call := read(whole)) is not None and call.name in _RETURNS_ITSELF:
            whole = self.effects.whole(call.input)  # of the same memory: nothing was cast or copied
        return whole is made

    def _read(self, reader: fx.Node, operand: fx.Node) -> None:
        number, position = self._memory_id(operand), self.effects.position
        last = None if number is None else self._last.get(number)
        if last is None or position[last] <= position[operand]:
            return
        if number in self._opaque or not self._is_whole(operand):
            self.unclear[reader] = f"{operand.name} was overwritten through another view of its memory"
        else:
            self._seen_in.setdefault(number, []).append((len(self.seen), reader, operand))
            self.seen[reader, operand] = last

    def _write(self, node: fx.Node, target: fx.Node) -> None:
        call, changed = read(node), [target]
        is_first = node.args[:1] == (target,) and self._memory_id(target) is not None
        if call is not None and is_first and call.name not in RESHAPERS and _is_plain(call):
            self.writes[node] = target
            if not self._is_whole(target):
                self.unclear[node] = f"{told(node)} overwrites part of a tensor through a view of it"
                self._opaque.add(self._memory_id(target))
        else:  # nothing that it touches is a call's result any more
            self.unclear[node] = f"{told(node)} overwrites its operands in a way that is not understood"
            changed = node.all_input_nodes
            self._opaque.update(map(self._memory_id, changed))
        self._last.update((number, node) for each in changed if (number := self._memory_id(each)) is not None)


def _is_plain(call: Call) -> bool:
    return (call.is_inplace or call.name == "setitem") and "out" not in call.arguments


@dataclass(frozen=True)
class Slices:
    """``source`` cut along ``dim`` at ``starts``, in order of steps.

    A cut of ``length`` None is one entry, without the dimension; others keep it. ``rest`` is the index to apply to what was
    cut out, empty if there is none.
    """

    source: fx.Node
    dim: int
    starts: tuple[int, ...]
    length: int | None = None
    rest: tuple[Any, ...] = ()

    @property
    def pace(self) -> int | None:
        """From one start to the next, None where that differs."""
        steps = {later - one for one, later in zip(self.starts, self.starts[1:], strict=False)}
        return steps.pop() if len(steps) == 1 else None

    def key(self) -> Hashable:
        """Equal for equal cuts, whatever is done with them afterwards."""
        return self.source, self.dim, self.starts, self.length


def slices_of(nodes: Sequence[fx.Node], resolve: Resolve) -> Slices | None:
    """What the nodes cut out, one a step, None where that is no moving slice of one tensor."""
    cuts = [index_of(call, resolve) for call in map(read, nodes) if call is not None]
    known = [each for each in cuts if each is not None]
    if len(known) < len(nodes) or any(source is not known[0][0] for source, _ in known):
        return None
    found = cut(known[0][0], [index for _, index in known])
    return found if found is not None and _is_within(found) else None


def _is_within(found: Slices) -> bool:
    size = _static_size(found.source, found.dim)
    width = 1 if found.length is None else found.length
    if size is None:  # a single entry is there, for it was taken
        return found.length is None and min(found.starts) >= 0
    return min(found.starts) >= 0 and max(found.starts) + width <= size and width > 0


def _static_size(source: fx.Node, dim: int) -> int | None:
    tensor = tensor_of(source)
    size = None if tensor is None else tensor.shape[dim]
    return size if isinstance(size, int) else None


def cut(source: fx.Node, indices: Sequence[tuple[Any, ...]]) -> Slices | None:
    """What indices (as :func:`layout.elements_of` gives them) cut out of a tensor, if they differ in one dimension only."""
    if len({len(index) for index in indices}) != 1:
        return None
    moving = [i for i, column in enumerate(zip(*indices, strict=True)) if any(each != column[0] for each in column)]
    if len(moving) != 1:
        return None
    place = moving[0]
    if any(isinstance(each, fx.Node) for each in _leaves(indices[0])):
        return None
    dim = sum(element is not None for element in indices[0][:place])
    size = _static_size(source, dim)
    places = [places_of(index[place], size) for index in indices]
    known = [each for each in places if each is not None and each[0].step == 1]
    if len(known) != len(places) or len({(len(each), drops) for each, drops in known}) != 1:
        return None
    length = None if known[0][1] else len(known[0][0])
    kept: tuple[Any, ...] = () if length is None else (WHOLE,)
    rest = (*indices[0][:place], *kept, *indices[0][place + 1 :])
    is_whole = all(isinstance(each, slice) and each == WHOLE for each in rest)
    return Slices(source, dim, tuple(each.start for each, _ in known), length, () if is_whole else rest)


def _leaves(index: tuple[Any, ...]) -> list[Any]:
    return [
        part for each in index for part in ((each.start, each.stop, each.step) if isinstance(each, slice) else (each,))
    ]
