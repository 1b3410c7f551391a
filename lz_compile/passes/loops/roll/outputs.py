"""What is read of a loop's values behind it: all steps of one, stacked or assigned into a buffer, or single ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from lz_compile.passes.formula.layout import WHOLE, elements_of
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import read, tensor_of
from lz_compile.passes.graph.writes import NEW
from lz_compile.passes.loops.roll.slices import Slices, cut
from lz_compile.passes.loops.roll.steps import Made, Steps

#: What is filled gives way to what is stacked, which lies as it does, not as strides say.
_FRESH = NEW - {"empty_strided"}


# ---- buffers that are filled step by step ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """``buffer[..., t, ...] = value``: the call at ``index`` of a step, where, and its index at first."""

    index: int
    cut: Slices
    elements: tuple[Any, ...]

    @property
    def place(self) -> int:
        """Where in the elements the moving one is."""
        dims = [i for i, element in enumerate(self.elements) if element is not None]
        return dims[self.cut.dim]


@dataclass(frozen=True)
class Buffer:
    """A tensor that every step writes another part of, and that nobody reads before the end."""

    node: fx.Node
    assignments: tuple[Assignment, ...]
    is_fresh: bool

    def is_filled(self) -> bool:
        """Whether nothing is left of what the buffer was made with."""
        if len(self.assignments) != 1 or not self.is_fresh:
            return False
        found = self.assignments[0]
        tensor, width = tensor_of(self.node), found.cut.length or 1
        is_rest_whole = all(
            isinstance(element, slice) and element == WHOLE
            for i, element in enumerate(found.elements)
            if i != found.place
        )
        size = None if tensor is None else tensor.shape[found.cut.dim]
        return is_rest_whole and len(found.cut.starts) * width == size


def buffers_of(steps: Steps) -> list[Buffer]:
    """The buffers that a loop fills.

    Raises:
        RefusedError: it overwrites the whole of an input of the graph, or parts of a tensor in a way that is not understood.
    """
    owners: dict[fx.Node, list[int]] = {}
    for index in range(steps.period):
        node = steps.node(0, index)
        if node in steps.versions.writes:
            owner = steps.versions.owner(node)
            if steps.place(owner) is None:
                owners.setdefault(owner, []).append(index)
    found: list[Buffer] = []
    for owner, indices in owners.items():
        buffer = _buffer(steps, owner, indices)
        if buffer is not None:
            found.append(buffer)
        elif owner.op in ("placeholder", "get_attr"):
            node = steps.node(0, indices[0])
            text = f"{told(node)} overwrites all of {told(owner)}, an input of the graph, in every step"
            raise RefusedError("INPUT_OVERWRITTEN", text, "overwrite a copy of it, and copy the last state back")
    return found


def _buffer(steps: Steps, owner: fx.Node, indices: Sequence[int]) -> Buffer | None:
    """The buffer, None for a state that is overwritten in each step."""
    assignments = []
    for index in indices:
        assignment = _assignment(steps, owner, index)
        if assignment is None:
            return None
        assignments.append(assignment)
    for index, row in enumerate(steps.wiring):
        for leaf, made in enumerate(row):
            if isinstance(made, Made) and made.index in indices and not (index in indices and leaf == 0):
                node = steps.node(1, index)
                text = f"{told(node)} reads {told(owner)} while it is being filled"
                raise RefusedError("BUFFER_READ", text, "keep what the next step needs in a variable of its own")
    regions = [set(_covered(assignment.cut)) for assignment in assignments]
    is_apart = len({assignment.cut.dim for assignment in assignments}) == 1
    if any(len(region) != len(_covered(each.cut)) for region, each in zip(regions, assignments, strict=True)):
        raise RefusedError("BUFFER_READ", f"{told(owner)} is written to twice at one place", "write each place once")
    if len(regions) > 1 and not (is_apart and len(set.union(*regions)) == sum(map(len, regions))):
        raise RefusedError("BUFFER_READ", f"several assignments write to one place of {told(owner)}", "write it once")
    call = read(owner)
    first = steps.versions.resolve(steps.node(0, indices[0]), steps.node(0, indices[0]).args[0])
    return Buffer(owner, tuple(assignments), call is not None and call.name in _FRESH and first is owner)


def _covered(found: Slices) -> list[int]:
    return [start + shift for start in found.starts for shift in range(found.length or 1)]


def _assignment(steps: Steps, owner: fx.Node, index: int) -> Assignment | None:
    nodes = [steps.node(step, index) for step in range(steps.count)]
    tensor = tensor_of(owner)
    call = read(nodes[0])
    if call is None or call.name != "setitem" or tensor is None:
        return None
    indices = [elements_of(node.args[1], tensor) for node in nodes]
    known = [elements for elements in indices if elements is not None and None not in elements]
    found = cut(owner, known) if len(known) == len(indices) else None
    if found is None:
        moving = {str(node.args[1]) for node in nodes}
        if len(moving) > 1:
            text = f"{told(nodes[0])} assigns to a place that does not simply move on"
            raise RefusedError("BUFFER_READ", text, "assign to out[:, t], or append to a list and stack it")
        return None
    if found.pace is None:
        raise RefusedError("BUFFER_READ", f"{told(owner)} is written to in no regular order", "append to a list")
    return Assignment(index, found, known[0])


# ---- readers behind the loop -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """A ``reader`` behind the loop of what the call at ``index`` of ``step`` gave, under the name ``operand``.

    ``is_later`` says that somebody behind the loop has overwritten it by then.
    """

    reader: fx.Node
    operand: fx.Node
    step: int
    index: int
    is_later: bool = False


@dataclass(frozen=True)
class Collector:
    """A ``stack`` or ``cat`` along ``dim`` of the values of the calls at ``indices`` in the steps ``first`` to ``last``.

    ``before`` and ``after`` are further nodes in its list.
    """

    node: fx.Node
    joins: str
    dim: int
    indices: tuple[int, ...]
    first: int
    last: int
    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]


def uses_of(steps: Steps, written: frozenset[int]) -> list[Use]:
    """Every reader behind the loop of what it computes; those of buffers that it fills aside.

    Raises:
        RefusedError: somebody behind the loop overwrites what it computed, or reads what it overwrote in an unclear way.
    """
    inside = set(steps.nodes)
    found: list[Use] = []
    last: LastInside = {}
    for node in steps.nodes:
        for reader in node.users:
            if reader not in inside:
                found.append(_use(steps, reader, node, last))
    for reader, operand, version in steps.versions.seen_of(steps.nodes):
        if reader not in inside and operand not in inside and _last_inside(steps, version, last) is not None:
            found.append(_use(steps, reader, operand, last))
    for use in found:
        if steps.versions.writes.get(use.reader) is use.operand and use.step != steps.count - 1:
            text = f"{told(use.reader)} overwrites what a step computed"
            raise RefusedError("OVERWRITTEN_LATER", text, "use the out-of-place form of that operation")
        if use.is_later and use.step != steps.count - 1:
            raise RefusedError("OVERWRITTEN_LATER", f"{use.reader.name} reads what is overwritten by then", "copy it")
    return [use for use in found if use.index not in written]


#: For versions of tensors that were asked for: the last call of a loop among those that they come from.
LastInside: TypeAlias = dict[fx.Node, "fx.Node | None"]


def _use(steps: Steps, reader: fx.Node, operand: fx.Node, last: LastInside) -> Use:
    seen = steps.versions.resolve(reader, operand)
    version = _last_inside(steps, seen, last)
    place = None if version is None else steps.place(version)
    if place is None:
        raise RefusedError("OVERWRITTEN_LATER", f"{told(reader)} reads what is overwritten behind the loop", "copy it")
    return Use(reader, operand, *place, is_later=version is not seen)


def _last_inside(steps: Steps, version: fx.Node, known: LastInside) -> fx.Node | None:
    """The last call of the loop in a chain of calls that overwrite a tensor; None where there is none."""
    versions = steps.versions
    seen: fx.Node | None = version
    passed: list[fx.Node] = []
    while seen is not None and seen not in known and steps.place(seen) is None:
        passed.append(seen)
        target = versions.writes.get(seen)
        before = None if target is None else versions.resolve(seen, target)
        seen = None if before is seen else before
    found = seen if seen is None else known.get(seen, seen)
    known.update(dict.fromkeys(passed, found))
    return found


def collector_of(node: fx.Node, uses: Sequence[Use]) -> Collector | None:
    """A reader as a collector of values in order of steps, None if it is none.

    Raises:
        RefusedError: somebody behind the loop has overwritten one of the values.
    """
    call = read(node)
    if call is None or call.name not in ("stack", "cat"):
        return None
    items, dim = call.get("tensors"), call.get("dim", 0)
    if not isinstance(items, (tuple, list)) or not isinstance(dim, int) or "out" in call.arguments:
        return None
    places = {use.operand: (use.step, use.index) for use in uses}
    mine = [i for i, item in enumerate(items) if item in places]
    first, last = mine[0], mine[-1]
    found = [places.get(item) for item in items[first : last + 1]]
    if any(place is None for place in found):
        return None
    if any(use.is_later for use in uses):
        text = f"{told(node)} joins what is overwritten behind the loop"
        raise RefusedError("OVERWRITTEN_LATER", text, "use the out-of-place form of that operation")
    known = [place for place in found if place is not None]
    width = next((i for i, place in enumerate(known) if place[0] != known[0][0]), len(known))
    count, rest = divmod(len(known), width)
    pace = known[width][0] - known[0][0] if count > 1 else 0
    indices = tuple(index for _, index in known[:width])
    wanted = [(known[0][0] + pace * row, index) for row in range(count) for index in indices]
    if rest or abs(pace) != 1 or known != wanted:
        return None
    tensor = tensor_of(node)
    if tensor is None:
        return None
    before, after = tuple(items[:first]), tuple(items[last + 1 :])
    return Collector(node, call.name, dim % tensor.dim(), indices, known[0][0], known[-1][0], before, after)
