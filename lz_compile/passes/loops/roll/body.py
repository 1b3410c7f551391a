"""One step of a loop as a program of its own: what it is handed, what it reads from around, what it computes.

What is the same in every step is taken out of the loop; slices that move on become streams; what is computed before the
loop for each of its steps is computed in the step, where only slices are needed for that.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import read, tensor_of, value_of
from lz_compile.passes.graph.writes import is_arithmetic, is_pure
from lz_compile.passes.loops.roll.search import is_number, rebuilt
from lz_compile.passes.loops.roll.slices import Slices, slices_of
from lz_compile.passes.loops.roll.steps import Made, Steps, kind_of

#: Tensors that are computed one by one are copied together up to this many elements.
_MOST_COPIED = 1 << 24
_DEEPEST = 16


@dataclass(frozen=True)
class Ref:
    """What a step reads in the place of a node."""

    number: int


class Part(Ref):
    """The result of an entry of the body."""


class Carried(Ref):
    """What the step before handed on, in a slot."""


class Streamed(Ref):
    """This step's entry of a stream."""


class Around(Ref):
    """A value from around the loop."""


@dataclass(frozen=True)
class Entry:
    """A call of the step: ``args`` and ``kwargs`` hold refs in the places of nodes. ``like`` is the call in the source."""

    like: fx.Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    overwrites: bool = False


@dataclass(frozen=True)
class Numbers:
    """A number that is another one in each step; as a tensor of ``dtype`` (None: of 64 bits)."""

    values: tuple[int | float, ...]
    device: torch.device
    dtype: torch.dtype | None = None

    def key(self) -> Hashable:
        """Equal for equal numbers; 1 and 1.0 are not."""
        return tuple(map(repr, self.values)), self.device, self.dtype


@dataclass(frozen=True)
class Gathered:
    """Values that are computed one by one for each step."""

    nodes: tuple[fx.Node, ...]

    def key(self) -> Hashable:
        """Equal for equal nodes."""
        return self.nodes


Stream = Slices | Numbers | Gathered


@dataclass
class Slot:
    """A carried tensor: ``source`` is what it is replaced by after a step, ``initial`` a node or a number."""

    initial: Any
    source: Ref
    like: fx.Node


class Body:
    """The step of a loop.

    Raises:
        RefusedError: a step is not a function of the state, of slices and of what stays the same.
    """

    def __init__(self, steps: Steps, written: frozenset[int]) -> None:
        self.steps = steps
        self.entries: list[Entry] = []
        self.streams: list[Stream] = []
        self.around: list[fx.Node] = []
        self.slots: list[Slot] = []
        #: What a call of the source is in the step, by its index; hoisted ones are :class:`Around`.
        self.refs: dict[int, Ref] = {}
        self.hoisted: set[int] = set()
        #: The values that assignments of the step write into buffers that nobody reads before the end.
        self.assigned: dict[int, Any] = {}
        #: Calls that are slices which move on.
        self.cuts: set[int] = set()
        #: The call that a slot holds the last value of, by its index.
        self.made_by: dict[int, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._slots: dict[Hashable, int] = {}
        for index in range(steps.period):
            self._add(index, index in written)
        for slot, index in self.made_by.items():
            self.slots[slot].source = self.refs[index]

    # ---- calls ------------------------------------------------------------------------------------------------

    def _add(self, index: int, is_output: bool) -> None:
        node = self.steps.node(0, index)
        if not is_output and self._is_same_in_all(index):
            self.hoisted.add(index)
            self.refs[index] = self._surrounding(node)
            return
        moving = [
            leaf for leaf, made in enumerate(self.steps.wiring[index]) if made is float and self._moves(index, leaf)
        ]
        if moving and not is_output:
            stream = self._cut([self.steps.node(step, index) for step in range(self.steps.count)])
            if stream is not None:
                self.cuts.add(index)
                self.refs[index] = stream
                return
        leaves = [
            self._number(index, leaf) if leaf in moving and not is_output else self._leaf(index, leaf)
            for leaf in range(len(self.steps.wiring[index]))
            if not (is_output and leaf == 0)  # the buffer
        ]
        if is_output:
            self.assigned[index] = rebuilt((node.args, node.kwargs), iter([None, *leaves]))[0][2]
            return
        self.refs[index] = self._append(node, leaves, counts=bool(moving))

    def _append(self, node: fx.Node, leaves: Sequence[Any], *, counts: bool = False) -> Part:
        args, kwargs = rebuilt((node.args, node.kwargs), iter(leaves))
        scaled = with_tensor_of_alpha(node, args, kwargs) if counts else None
        if scaled is not None:
            self.entries.append(Entry(node, "call_function", *scaled))
            return Part(len(self.entries) - 1)
        self.entries.append(Entry(node, node.op, node.target, args, kwargs, node in self.steps.versions.writes))
        return Part(len(self.entries) - 1)

    def _is_same_in_all(self, index: int) -> bool:
        node = self.steps.node(0, index)
        if node in self.steps.versions.writes or not is_pure(node):
            return False
        for leaf, made in enumerate(self.steps.wiring[index]):
            if isinstance(made, Made):
                if made.lag or made.index not in self.hoisted:
                    return False
            elif self._moves(index, leaf):
                return False
        return True

    def _moves(self, index: int, leaf: int) -> bool:
        column = self.steps.column(index, leaf)
        return any(not _is_same(value, column[0]) for value in column)

    # ---- operands ---------------------------------------------------------------------------------------------

    def _leaf(self, index: int, leaf: int) -> Any:
        made = self.steps.wiring[index][leaf]
        if isinstance(made, Made):
            return self._handed(index, leaf, made) if made.lag else self.refs[made.index]
        column = self.steps.column(index, leaf)
        if made is float:
            return column[0]
        return self._surrounding_of(column)

    def _handed(self, index: int, leaf: int, made: Made) -> Carried:
        first = tuple(self.steps.column(index, leaf)[: made.lag])
        reader = self.steps.node(0, index)
        if any(is_number(value) for value in first) and not is_arithmetic(reader):
            text = f"{told(reader)} takes a number in the first step and a tensor later"
            raise RefusedError("SHAPE_CHANGES", text, "begin with a tensor (torch.zeros) instead of a number")
        slots = [self._slot(made.index, lag, first) for lag in range(1, made.lag + 1)]
        return Carried(slots[-1])

    def _slot(self, index: int, lag: int, first: tuple[Any, ...]) -> int:
        """The slot for what was made ``lag`` steps ago; ``first`` is what the first steps read instead, in order."""
        initial = first[len(first) - lag]
        key = (index, lag, tuple(map(_identity, first[len(first) - lag :])))
        if key not in self._slots:
            source = Carried(self._slot(index, lag - 1, first)) if lag > 1 else Carried(-1)
            versions = self.steps.versions
            value = initial if is_number(initial) else versions.tensor(initial)
            self._slots[key] = len(self.slots)
            self.slots.append(Slot(value, source, versions.tensor(self.steps.node(0, index))))
            if lag == 1:
                self.made_by[self._slots[key]] = index
        return self._slots[key]

    def _number(self, index: int, leaf: int) -> Any:
        node = self.steps.node(0, index)
        column = self.steps.column(index, leaf)
        tensor = tensor_of(node)
        takes = may_be_tensor(node, self.steps.program.leaves[self.steps.start + index][leaf])
        if tensor is None or not takes or len({type(each) for each in column}) != 1:
            text = f"{told(node)} takes {column[0]!r}, {column[1]!r}, ... step by step"
            raise RefusedError(
                "COUNTER_USED", text, "use the loop's counter to index tensors only, or as a factor or term"
            )
        if tensor.dtype in (torch.float16, torch.bfloat16) and not all(_fits(each, tensor.dtype) for each in column):
            text = f"{told(node)} takes numbers that {tensor.dtype} cannot hold"
            raise RefusedError("COUNTER_USED", text, "make a tensor of them before the loop and index it")
        return self._stream(Numbers(tuple(column), tensor.device, tensor.dtype if takes == "own dtype" else None))

    # ---- from around the loop ---------------------------------------------------------------------------------

    def _surrounding_of(self, column: Sequence[fx.Node]) -> Ref:
        found = [self._canonical(None, node) for node in column]
        if all(node is found[0] for node in found):
            return self._surrounding(found[0])
        cut = self._cut(found)
        if cut is not None:
            return cut
        if self._can_move_in(found, 0):
            return self._moved_in(found)
        return self._gathered(found)

    def _surrounding(self, node: fx.Node) -> Around:
        node = self.steps.versions.tensor(node)
        key = ("around", node)
        if key not in self._numbers:
            self._numbers[key] = len(self.around)
            self.around.append(node)
        return Around(self._numbers[key])

    def _cut(self, nodes: Sequence[fx.Node]) -> Ref | None:
        """The nodes as slices of one tensor from around the loop."""
        found = slices_of(nodes, self._canonical)
        if found is None or not self._is_outside(found.source) or not self._have_same_modes(nodes, found.source):
            return None
        ref: Ref = self._stream(Slices(self.steps.versions.tensor(found.source), found.dim, found.starts, found.length))
        if found.rest:
            self.entries.append(Entry(nodes[0], "call_function", operator.getitem, (ref, found.rest), {}))
            ref = Part(len(self.entries) - 1)
        return ref

    def _stream(self, stream: Stream) -> Streamed:
        key = (type(stream), stream.key())
        if key not in self._numbers:
            self._numbers[key] = len(self.streams)
            self.streams.append(stream)
        return Streamed(self._numbers[key])

    def _canonical(self, reader: fx.Node | None, value: Any) -> Any:
        """The node that a reader sees; of what is the same in every step, the one in the first step."""
        if not isinstance(value, fx.Node):
            return value
        seen = value if reader is None else self.steps.versions.resolve(reader, value)
        place = self.steps.place(seen)
        return self.steps.node(0, place[1]) if place is not None and place[1] in self.hoisted else seen

    def _is_outside(self, node: fx.Node) -> bool:
        place = self.steps.place(node)
        return place is None or place[1] in self.hoisted

    def _columns(self, nodes: Sequence[fx.Node]) -> Iterator[list[Any]]:
        """The leaves of calls of one kind, step by step."""
        program = self.steps.program
        rows = [program.leaves[program.position[node]] for node in nodes]
        for column in zip(*rows, strict=True):
            yield [self._canonical(node, value) for node, value in zip(nodes, column, strict=True)]

    def _have_same_modes(self, nodes: Sequence[fx.Node], source: fx.Node) -> bool:
        """Whether slices, and what they are picked from, are taken under the loop's own modes."""
        effects, first = self.steps.versions.effects, self.steps.node(0, 0)
        chain = {node for node in nodes if self.steps.place(node) is None}
        chain |= {each for node in chain for each in node.all_input_nodes if each is not source}
        return all(effects.ambient(node) == effects.ambient(first) for node in chain)

    def _can_move_in(self, nodes: Sequence[fx.Node], depth: int) -> bool:
        """Whether calls before the loop, one for each step, need nothing that has to be copied together."""
        program, versions = self.steps.program, self.steps.versions
        kinds = {program.kinds[program.position[node]] if node in program.position else -1 for node in nodes}
        if len(kinds) != 1 or -1 in kinds or depth > _DEEPEST or not all(self._is_outside(node) for node in nodes):
            return False
        if any(versions.is_overwritten(node) or not is_pure(node) for node in nodes):
            return False
        if any(versions.effects.why_not_moved(node, self.steps.nodes[-1]) for node in nodes):
            return False
        for column in self._columns(nodes):
            if all(_is_same(value, column[0]) for value in column):
                if isinstance(column[0], fx.Node) and versions.is_overwritten(column[0]):
                    return False
            elif not self._can_be_had(column, depth):
                return False
        return True

    def _can_be_had(self, column: Sequence[Any], depth: int) -> bool:
        if not all(isinstance(value, fx.Node) for value in column):
            return False
        return slices_of(column, self._canonical) is not None or self._can_move_in(column, depth + 1)

    def _moved_in(self, nodes: Sequence[fx.Node]) -> Ref:
        key = ("moved", tuple(nodes))
        if key not in self._numbers:
            leaves = [
                column[0] if is_number(column[0]) else self._surrounding_of(column) for column in self._columns(nodes)
            ]
            self._numbers[key] = self._append(nodes[0], leaves).number
        return Part(self._numbers[key])

    def _gathered(self, nodes: Sequence[fx.Node]) -> Ref:
        first = nodes[0]
        tensor = tensor_of(first)
        if tensor is None or len({kind_of(node) for node in nodes}) != 1:
            text = f"{told(first)} is another one in each step, and no tensor of one shape"
            raise RefusedError("STEP_DIFFERS", text, "let every step read slices of the same tensors")
        if any(isinstance(value_of(node), torch.nn.Parameter) for node in nodes):
            raise RefusedError("LAYERS", f"every step has parameters of its own ({first.name})", "share them")
        size = tensor.numel()
        if not isinstance(size, int) or size * len(nodes) > _MOST_COPIED:
            text = f"{len(nodes)} separate tensors like {told(first)} would have to be copied together"
            raise RefusedError("TOO_LARGE_TO_GATHER", text, "keep them in one tensor and take slices of it")
        return self._stream(Gathered(tuple(self.steps.versions.tensor(node) for node in nodes)))


def _is_same(one: Any, other: Any) -> bool:
    return one is other if isinstance(one, fx.Node) else type(one) is type(other) and repr(one) == repr(other)


def _identity(value: Any) -> Hashable:
    return value if isinstance(value, fx.Node) else repr(value)


def _fits(number: float, dtype: torch.dtype) -> bool:
    return float(torch.tensor(number, dtype=dtype)) == number


# ---- counters --------------------------------------------------------------------------------------------------------


_WIDE = (torch.float32, torch.float64)


def may_be_tensor(node: fx.Node, number: Any) -> Literal["any dtype", "own dtype", ""]:
    """Whether a call's number may be a tensor, and whether that has to be of the call's dtype.

    An operand of arithmetic may; so may the weight of ``lerp``, and ``alpha`` where two tensors are added.
    """
    call = read(node)
    if call is None or not is_arithmetic(node):
        return ""
    if call.name == "lerp":
        return "own dtype" if number is call.get("weight") else ""
    if any(given is number for given in node.args[:2]):
        return "any dtype"
    tensor, are_tensors = tensor_of(node), all(tensor_of(each) is not None for each in node.args[:2])
    is_alpha = call.name in ("add", "sub") and number is call.get("alpha") and len(node.args) >= 2
    return "own dtype" if is_alpha and are_tensors and tensor is not None and tensor.dtype in _WIDE else ""


def with_tensor_of_alpha(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """``add(x, y, alpha=number)`` as a call that takes a tensor for the number: target and arguments; None for others."""
    call = read(node)
    alpha = args[2] if len(args) > 2 else kwargs.get("alpha")
    if call is None or call.name not in ("add", "sub") or alpha is None or isinstance(alpha, (int, float)):
        return None
    return torch.addcmul, (*args[:2], alpha), {"value": -1 if call.name == "sub" else 1}
