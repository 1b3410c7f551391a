"""Where a graph was edited: the stretch of calls that differs, and which values those behind it read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from lz_compile.passes.graph.snapshot import Was, same
from lz_compile.passes.graph.view import memories_of

#: Calls that open and close something: what opens in a stretch closes in it.
_PAIRS = {
    "_enter_autocast": 1,
    "_exit_autocast": -1,
    "_enter_inference_mode": 1,
    "_exit_inference_mode": -1,
    "_vmap_increment_nesting": 1,
    "_vmap_decrement_nesting": -1,
    "_grad_increment_nesting": 1,
    "_grad_decrement_nesting": -1,
    "_jvp_increment_nesting": 1,
    "_jvp_decrement_nesting": -1,
}


@dataclass(frozen=True)
class Stretch:
    """Calls before and after an edit; ``read`` pairs what is read of them behind: a value then, and the one in its place.

    ``ahead`` and ``behind`` are the calls around it, which are the same but for the values that they read: those behind
    read ``kept`` after the edit.
    """

    ahead: tuple[Was, ...]
    before: tuple[Was, ...]
    after: tuple[Was, ...]
    behind: tuple[Was, ...]
    read: tuple[tuple[fx.Node, fx.Node], ...]
    kept: frozenset[fx.Node]

    @cached_property
    def held(self) -> frozenset[int]:
        """The memory of the caller's tensors, and of what was made ahead and is read behind."""
        nodes = (was.node for was in self.ahead if was.op in ("placeholder", "get_attr") or was.node in self.kept)
        return frozenset(memory for node in nodes for memory in memories_of(node))


def edited_stretch(before: Sequence[Was], after: Sequence[Was], ahead: int, behind: int) -> Stretch | None:
    """The shortest stretch that holds every edit, with at most so many calls ahead and behind; None without any edit."""
    start = 0
    shorter = min(len(before), len(after))
    while start < shorter and _same_call(before[start], after[start]):
        start += 1
    if start == len(before) == len(after):
        return None
    behind = min(_equal_behind(before, after, shorter - start), behind)
    start = min(start, ahead)
    while True:
        start, behind = _balanced(before, start, behind)
        first = len(before) - behind
        late = {was.node for was in before[first:]}
        unclear = [
            index
            for index in range(first, len(before))
            if any(old is not new and old in late for old, new in _pairs(before[index], after[index - len(before)]))
        ]
        if not unclear:
            break
        behind = len(before) - unclear[-1] - 1
    inside = {was.node for was in (*before[start : len(before) - behind], *after[start : len(after) - behind])}
    pairs = dict.fromkeys(
        pair
        for index in range(1, behind + 1)
        for pair in _pairs(before[-index], after[-index])
        if pair[0] is not pair[1] or pair[0] in inside
    )
    return Stretch(
        tuple(before[:start]),
        tuple(before[start : len(before) - behind]),
        tuple(after[start : len(after) - behind]),
        tuple(before[len(before) - behind :]),
        tuple(pairs),
        frozenset(operand for was in after[len(after) - behind :] for operand in operands_of(was)),
    )


def _same_call(one: Was, other: Was) -> bool:
    is_same = one.node is other.node and one.op == other.op and one.target == other.target
    return is_same and same((one.args, one.kwargs), (other.args, other.kwargs))


def _equal_behind(before: Sequence[Was], after: Sequence[Was], most: int) -> int:
    """How many calls at the end are the same but for which values they read."""
    count = 0
    while count < most:
        if not same_but_operands(before[-count - 1], after[-count - 1]):
            break
        count += 1
    return count


def same_but_operands(one: Was, other: Was) -> bool:
    """Whether two calls are the same but for which values they read."""
    if one.node is not other.node or one.op != other.op or one.target != other.target:
        return False
    return same(*(fx.map_arg((each.args, each.kwargs), lambda _: None) for each in (one, other)))


def operands_of(was: Was) -> list[fx.Node]:
    """What a call reads, as often as it does."""
    found: list[fx.Node] = []
    fx.map_arg((was.args, was.kwargs), found.append)
    return found


def _pairs(one: Was, other: Was) -> list[tuple[fx.Node, fx.Node]]:
    return list(zip(operands_of(one), operands_of(other), strict=True))


def _balanced(before: Sequence[Was], start: int, behind: int) -> tuple[int, int]:
    """The stretch, made longer until whatever opens in it closes in it."""
    opened: list[int] = []
    for index, was in enumerate(before):
        step = _PAIRS.get(getattr(was.target, "__name__", ""), 0) if was.op == "call_function" else 0
        if step > 0:
            opened.append(index)
        elif step < 0 and opened:
            first = opened.pop()
            is_cut = (first < start) != (index < start) or (first < len(before) - behind) != (
                index < len(before) - behind
            )
            touches = index >= start and first < len(before) - behind
            if is_cut and touches:
                start, behind = min(start, first), min(behind, len(before) - index - 1)
    return start, behind
