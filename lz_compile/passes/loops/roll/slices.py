"""Slices that move on with the loop: ``x[:, t]``, ``x.select(1, t)``, ``x.unbind(1)[t]``, ``x[:, 4 * t : 4 * t + 4]``.

Overwritten tensors are a chain of values: which call made what a reader sees when it reads a tensor. ``S *= a`` and
``S.mul_(a)`` overwrite ``S``; whoever reads ``S`` afterwards sees the result of that call. Told so, a loop that overwrites
its state is a loop that hands on a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.layout import elements_of
from lz_compile.passes.formula.pieces import SPLITS, named_dim
from lz_compile.passes.graph.effects import RESHAPERS, Effects
from lz_compile.passes.graph.gradients import differentiated
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import Call, memory_of, read, tensor_of, value_of
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


_UNTOUCHED = slice(None)

#: The node that a reader sees under a name: the last version, and one node for what is the same in every step.
Resolve = Callable[[fx.Node, Any], Any]


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
    calls = [read(node) for node in nodes]
    first = calls[0]
    if first is None or any(call is None or call.name != first.name for call in calls):
        return None
    found: Slices | None = None
    if first.name == "getitem":
        found = _indexed([call for call in calls if call is not None], resolve)
    elif first.name in ("select", "narrow"):
        found = _selected([call for call in calls if call is not None], resolve)
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


def _selected(calls: Sequence[Call], resolve: Resolve) -> Slices | None:
    source = resolve(calls[0].node, calls[0].input)
    tensor = tensor_of(source)
    dims = {call.get("dim") for call in calls}
    if tensor is None or len(dims) != 1 or any(resolve(call.node, call.input) is not source for call in calls):
        return None
    dim = dims.pop()
    name = "index" if calls[0].name == "select" else "start"
    starts, lengths = [call.get(name) for call in calls], {call.get("length") for call in calls}
    if not isinstance(dim, int) or len(lengths) != 1 or not all(isinstance(start, int) for start in starts):
        return None
    length = lengths.pop()
    size = _static_size(source, dim % tensor.dim())
    if not (length is None or isinstance(length, int)) or (size is None and min(starts) < 0):
        return None
    return Slices(
        source, dim % tensor.dim(), tuple(start + (size or 0) if start < 0 else start for start in starts), length
    )


def _indexed(calls: Sequence[Call], resolve: Resolve) -> Slices | None:
    source = resolve(calls[0].node, calls[0].input)
    if isinstance(source, fx.Node) and isinstance(value_of(source), (tuple, list)):
        return _picked(calls, resolve)
    tensor = tensor_of(source)
    if tensor is None or any(resolve(call.node, call.input) is not source for call in calls):
        return None
    indices = [elements_of(call.node.args[1], tensor) for call in calls]
    if any(index is None for index in indices):
        return None
    return cut(source, [index for index in indices if index is not None])


def cut(source: fx.Node, indices: Sequence[tuple[Any, ...]]) -> Slices | None:
    """What indices (as :func:`elements_of` gives them) cut out of a tensor, if they differ in one dimension only."""
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
    ranges = [range_of(index[place], size) for index in indices]
    known = [each for each in ranges if each is not None]
    if len(known) != len(ranges) or len({length for _, length in known}) != 1:
        return None
    length = known[0][1]
    kept: tuple[Any, ...] = () if length is None else (_UNTOUCHED,)
    rest = (*indices[0][:place], *kept, *indices[0][place + 1 :])
    is_whole = all(isinstance(each, slice) and each == _UNTOUCHED for each in rest)
    return Slices(source, dim, tuple(start for start, _ in known), length, () if is_whole else rest)


def _leaves(index: tuple[Any, ...]) -> list[Any]:
    return [
        part for each in index for part in ((each.start, each.stop, each.step) if isinstance(each, slice) else (each,))
    ]


def range_of(element: Any, size: int | None) -> tuple[int, int | None] | None:
    """Start and length (None for a single entry) of an element of an index; what ends nowhere needs a size."""
    if isinstance(element, int) and element >= 0:
        return element, None
    found = None if size is None else places_of(element, size)
    if found is None or found[0].step != 1:
        return None
    return found[0].start, None if found[1] else len(found[0])


def places_of(element: Any, size: int) -> tuple[range, bool] | None:
    """The places that an element of an index selects, and whether that drops the dimension; None where no numbers say so."""
    if isinstance(element, int) and not isinstance(element, bool):
        return range(element % size, element % size + 1), True
    ends = (element.start, element.stop, element.step) if isinstance(element, slice) else (element,)
    is_known = len(ends) > 1 and all(each is None or isinstance(each, int) for each in ends)
    return (range(*element.indices(size)), False) if is_known else None


def single_cut(index: Any, tensor: torch.Tensor) -> tuple[int, range, bool] | None:
    """The one dimension that an index cuts, the places that it selects there, and whether it drops it; None for others."""
    cuts = [(dim, each) for dim, each in enumerate(elements_of(index, tensor) or ()) if each != _UNTOUCHED]
    if len(cuts) != 1:
        return None
    ((dim, element),) = cuts
    size = shape_of(tensor)[dim]
    found = places_of(element, size) if isinstance(size, int) else None
    return None if found is None else (dim, *found)


def _picked(calls: Sequence[Call], resolve: Resolve) -> Slices | None:
    """Pieces that a call like ``unbind`` or ``split`` cut a tensor into."""
    pieces = [_piece(call, resolve) for call in calls]
    first = pieces[0]
    if first is None:
        return None
    source, dim, _, length = first
    known = [piece for piece in pieces if piece is not None and (piece[0], piece[1], piece[3]) == (source, dim, length)]
    return Slices(source, dim, tuple(start for _, _, start, _ in known), length) if len(known) == len(pieces) else None


def _piece(call: Call, resolve: Resolve) -> tuple[fx.Node, int, int, int | None] | None:
    parent, number = resolve(call.node, call.input), call.node.args[1]
    made = read(parent) if isinstance(parent, fx.Node) else None
    if made is None or not isinstance(number, int):
        return None
    parts, named = value_of(parent), named_dim(made, 0)
    if named is None or made.name not in SPLITS:
        return None
    source, dim, number = resolve(parent, made.input), named[0], number % len(parts)
    if made.name == "unbind":
        return source, dim, number, None
    sizes = [part.shape[dim] for part in parts]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return source, dim, sum(sizes[:number]), sizes[number]
