"""Where a graph repeats itself: stretches of calls that are the same, but for their operands, again and again.

Dynamo unrolls a Python loop into one stretch of calls per iteration, in the order of the source. Whether the repeated
calls also are wired alike is for :mod:`steps` to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from lz_compile.passes.editing.dead import dead_calls
from lz_compile.passes.loops.roll.worthwhile import LEAST_STEPS

_GRAM = 4
_PERIODS = 24


class Program:
    """The calls of a graph in order. ``kinds`` are equal for calls that differ in nothing but nodes and numbers."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.leaves: list[list[Any]] = []
        self.kinds: list[int] = []
        numbers: dict[Hashable, int] = {}
        for node in self.nodes:
            leaves: list[Any] = []
            skeleton = _skeleton((node.args, node.kwargs), leaves)
            self.leaves.append(leaves)
            self.kinds.append(numbers.setdefault((node.op, node.target, skeleton), len(numbers)))

    @cached_property
    def dead(self) -> frozenset[fx.Node]:
        """The calls that nobody needs."""
        return frozenset(dead_calls(self.graph))


def is_number(value: Any) -> bool:
    """Whether a leaf is a plain number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _skeleton(value: Any, leaves: list[Any]) -> Hashable:
    """An argument with its nodes and numbers taken out, which are appended to ``leaves`` in order."""
    if isinstance(value, fx.Node) or is_number(value):
        leaves.append(value)
        return None
    if isinstance(value, (tuple, list)):
        return (type(value) is tuple, *[_skeleton(each, leaves) for each in value])
    if isinstance(value, dict):
        return ("dict", *[(key, _skeleton(each, leaves)) for key, each in value.items()])
    if isinstance(value, slice):
        return ("slice", *[_skeleton(each, leaves) for each in (value.start, value.stop, value.step)])
    return (type(value), repr(value))


def rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    """An argument with other nodes and numbers in the places of its own."""
    return map_aggregate(value, lambda leaf: next(leaves) if isinstance(leaf, fx.Node) or is_number(leaf) else leaf)


@dataclass(frozen=True)
class Run:
    """The calls ``start`` to ``stop`` are each of the same kind as the one ``period`` later (the last period aside)."""

    start: int
    stop: int
    period: int

    @property
    def steps(self) -> int:
        """How many whole periods there are."""
        return (self.stop - self.start) // self.period


def runs(kinds: Sequence[int]) -> list[Run]:
    """The stretches that repeat at least :data:`LEAST_STEPS` times, those that cover the most first."""
    found = {run for period in _periods(kinds) for run in _runs_of(kinds, period)}
    return sorted(found, key=lambda run: (-run.steps * run.period, run.period, run.start))


def _periods(kinds: Sequence[int]) -> set[int]:
    """The distances at which short sequences of calls recur most."""
    last: dict[tuple[int, ...], int] = {}
    gaps: Counter[int] = Counter()
    for i, gram in enumerate(zip(*(kinds[shift:] for shift in range(_GRAM)), strict=False)):
        if gram in last:
            gaps[i - last[gram]] += 1
        last[gram] = i
    often = [gap for gap, count in gaps.most_common(_PERIODS) if count >= LEAST_STEPS - 1]
    covering = sorted(
        (gap for gap, count in gaps.items() if count >= LEAST_STEPS - 1), key=lambda gap: -gap * gaps[gap]
    )
    return {*often, *covering[:_PERIODS]}


def _runs_of(kinds: Sequence[int], period: int) -> Iterator[Run]:
    start = 0
    for i, (one, later) in enumerate(zip(kinds, kinds[period:], strict=False)):
        if one != later:
            if i + period - start >= LEAST_STEPS * period:
                yield Run(start, i + period, period)
            start = i + 1
    stop = len(kinds)
    if stop - start >= LEAST_STEPS * period:
        yield Run(start, stop, period)


def phases(program: Program, run: Run) -> list[Run]:
    """The same stretch with its steps beginning elsewhere, the likeliest first.

    Where an iteration of the source begins shows in that few values are handed on there, and in source lines that go back.
    """
    carried = _carried(program, run)
    starts = range(run.start, min(run.start + run.period, run.stop - LEAST_STEPS * run.period + 1))
    ranked = sorted(
        starts,
        key=lambda start: (
            -((run.stop - start) // run.period),
            carried[start % run.period],
            not _goes_back(program, start),
            (run.stop - start) % run.period,
            start,
        ),
    )
    return [Run(start, run.stop, run.period) for start in ranked]


def _carried(program: Program, run: Run) -> list[int]:
    """For each position modulo the period, how many values are made before it and still read after it."""
    period = run.period
    begin = run.start + (run.steps // 2) * period
    total = 0
    steps = [0] * (period + 1)
    for i in range(begin, min(begin + period, run.stop)):
        readers = [program.position.get(user, -1) for user in program.nodes[i].users]
        last = max((reader for reader in readers if reader < min(run.stop, i + 3 * period)), default=-1)
        if last <= i:
            continue
        whole, rest = divmod(last - i, period)
        total += whole
        first, end = (i + 1) % period, (i + 1) % period + rest  # boundaries i + 1 .. i + rest, modulo the period
        steps[first] += 1
        if end <= period:
            steps[end] -= 1
        else:
            steps[0] += 1
            steps[end - period] -= 1
    counts, running = [], total
    for change in steps[:period]:
        running += change
        counts.append(running)
    return counts


def _goes_back(program: Program, start: int) -> bool:
    """Whether the source lines go back at a call: in the outermost frame in which it and the one before differ."""
    if start == 0:
        return False
    before, here = (_lines(program.nodes[i]) for i in (start - 1, start))
    for one, other in zip(before, here, strict=False):
        if one != other:
            return one[0] == other[0] and other[1] < one[1]
    return False


def _lines(node: fx.Node) -> list[tuple[str, int]]:
    frames = []
    for text in (node.meta.get("stack_trace") or "").splitlines():
        line = text.strip()
        if line.startswith('File "'):
            path, _, rest = line[6:].partition('", line ')
            frames.append((path, int(rest.split(",")[0])))
    return frames
