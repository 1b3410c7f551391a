"""Overwritten tensors as a chain of values: which call made what a reader sees when it reads a tensor.

``S *= a`` and ``S.mul_(a)`` overwrite ``S``; whoever reads ``S`` afterwards sees the result of that call. Told so, a loop
that overwrites its state is a loop that hands on a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from lz_compile.passes.graph.effects import RESHAPERS, Effects
from lz_compile.passes.graph.gradients import differentiated
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import Call, memory_of, read, tensor_of
from lz_compile.passes.graph.writes import writes
from lz_compile.passes.loops.roll.search import Program


@dataclass
class _Memory:
    """One storage: the nodes that are the whole tensor, and the last call that overwrote it (None: nobody yet).

    Once a part was overwritten through a view, what the whole tensor holds is no call's result any more.
    """

    whole: set[fx.Node] = field(default_factory=set)
    last: fx.Node | None = None
    is_opaque: bool = False


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
        self._memories: dict[int, _Memory] = {}
        self._made_after: dict[fx.Node, fx.Node | None] = {}
        self._memory_ids: dict[fx.Node, int | None] = {}
        overwritten = {
            node: call
            for node, call in ((node, read(node)) for node in program.nodes)
            if call is not None and writes(call)
        }
        self.is_pure = not overwritten
        if not self.is_pure:
            for node in program.graph.nodes:
                self._follow(node, overwritten.get(node))

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
        memory = self._memory(node)
        return memory is not None and (memory.last is not None or memory.is_opaque)

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

    def _memory(self, node: fx.Node) -> _Memory | None:
        number = self._memory_id(node)
        return None if number is None else self._memories.get(number)

    def _follow(self, node: fx.Node, call: Call | None) -> None:
        for operand in node.all_input_nodes:
            self._read(node, operand)
        number = self._memory_id(node)
        if number is not None:
            memory = self._memories.setdefault(number, _Memory(whole={node}))
            self._made_after[node] = memory.last
        if call is None:
            return
        target = call.node.args[0] if call.node.args else None
        overwritten = self._memory(target) if isinstance(target, fx.Node) else None
        if overwritten is None or not isinstance(target, fx.Node) or call.name in RESHAPERS or not _is_plain(call):
            self._blur(node)
            return
        if target not in overwritten.whole:
            self.unclear[node] = f"{told(node)} overwrites part of a tensor through a view of it"
            overwritten.is_opaque = True
        overwritten.last = node
        self.writes[node] = target
        if self._memory_id(node) == self._memory_id(target):
            overwritten.whole.add(node)
            self._made_after[node] = node

    def _read(self, reader: fx.Node, operand: fx.Node) -> None:
        memory = self._memory(operand)
        if memory is None or memory.last is None or self._made_after.get(operand) is memory.last:
            return
        if memory.is_opaque or operand not in memory.whole:
            self.unclear[reader] = f"{operand.name} was overwritten through another view of its memory"
        else:
            self._seen_in.setdefault(self._memory_id(operand), []).append((len(self.seen), reader, operand))
            self.seen[reader, operand] = memory.last

    def _blur(self, node: fx.Node) -> None:
        """A call that overwrites what is not known to be a whole tensor: nothing it touches is a call's result any more."""
        self.unclear[node] = f"{told(node)} overwrites its operands in a way that is not understood"
        for operand in node.all_input_nodes:
            memory = self._memory(operand)
            if memory is not None:
                memory.is_opaque, memory.last = True, node


def _is_plain(call: Call) -> bool:
    return (call.is_inplace or call.name == "setitem") and "out" not in call.arguments
