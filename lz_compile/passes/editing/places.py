"""The graphs between two: an edit of places that have nothing to do with each other, as one small edit after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import fx

from lz_compile.passes.editing.stretch import operands_of, same_but_operands
from lz_compile.passes.graph.modes import changes_mode
from lz_compile.passes.graph.snapshot import Was
from lz_compile.passes.graph.view import read
from lz_compile.passes.graph.writes import RANDOM, drops, is_seeded
from lz_compile.passes.proof.running import NotRunnableError


@dataclass
class Chain:
    """What several edits have in common: how many calls may still be run, and what was proven, told without names."""

    left: int
    proven: set[str] = field(default_factory=set)

    def runs(self, count: int) -> None:
        """So many calls are about to be run.

        Raises:
            NotRunnableError: these are so many that the whole would not have taken longer.
        """
        self.left -= count
        if self.left < 0:
            raise NotRunnableError("its parts are as long as the whole")


def between(before: Sequence[Was], after: Sequence[Was], most: int) -> list[Sequence[Was]]:
    """At most so many graphs behind the first, up to the last, of which each differs from the next in few calls.

    What stands for what is proposed by who reads it: whether they compute the same is not asked here. These are the two
    themselves where places cannot be told apart.
    """
    places = _Places(before, after)
    if not places.are_told_apart:
        return [before, after]
    edits = places.edits()
    size = max(math.ceil(len(edits) / most), 1)
    graphs: list[Sequence[Was]] = [before]
    for count in range(size, len(edits), size):
        graph, known = [*places.graph({*edits[:count]})], set[fx.Node]()
        for was in graph:
            if not known.issuperset(operands_of(was)):
                return [before, after]
            known.add(was.node)
        graphs.append(graph)
    return [*graphs, after]


class _Places:
    """Two graphs as runs of calls that differ, with a call behind each that is the same but for what it reads."""

    def __init__(self, before: Sequence[Was], after: Sequence[Was]) -> None:
        now = {was.node: was for was in after}
        stays = {was.node for was in before if was.node in now and same_but_operands(was, now[was.node])}
        self._same = [was for was in before if was.node in stays]
        self._runs = [*zip(_runs(before, stays), _runs(after, stays), strict=True)]
        self._parents = [*range(len(self._runs))]
        self._gone, self._new = (
            {was.node: place for place, run in enumerate(self._runs) for was in run[side]} for side in (0, 1)
        )
        #: Of calls that were there before, what is read instead of their operands.
        self._instead: dict[fx.Node, list[fx.Node]] = {}
        self._pair(now)
        self._join()
        pairs = [pair for was in before for pair in self._pairs(was)]
        is_owned = all(old is new or self._owner(old, new) is not None for old, new in pairs)
        self.are_told_apart = is_owned and [was.node for was in self._same] == [
            was.node for was in after if was.node in stays
        ]

    def edits(self) -> list[int]:
        """The first runs of edits, each of which can be made without those behind it."""
        return [place for place, run in enumerate(self._runs) if any(run) and self._edit_of(place) == place]

    def graph(self, made: set[int]) -> Iterator[Was]:
        """The calls where some edits are made, and the others are not."""
        for place, (old, new) in enumerate(self._runs):
            yield from new if self._edit_of(place) in made else (self._now(was, made) for was in old)
            if place < len(self._same):
                yield self._now(self._same[place], made)

    def _now(self, was: Was, made: set[int]) -> Was:
        """A call that was there before, with what it reads by now."""
        read = [new if self._owner(old, new) in made else old for old, new in self._pairs(was)]
        if read == operands_of(was):
            return was
        given = iter(read)
        args, kwargs = fx.map_arg((was.args, was.kwargs), lambda _: next(given))
        return was._replace(args=args, kwargs=kwargs)

    def _pairs(self, was: Was) -> list[tuple[fx.Node, fx.Node]]:
        operands = operands_of(was)
        return [*zip(operands, self._instead.get(was.node, operands), strict=True)]

    def _owner(self, old: fx.Node, new: fx.Node) -> int | None:
        """The edit that puts a value in the place of another."""
        place = self._gone.get(old, self._new.get(new))
        return None if place is None else self._edit_of(place)

    def _edit_of(self, place: int) -> int:
        while self._parents[place] != place:
            place = self._parents[place]
        return place

    def _pair(self, now: dict[fx.Node, Was]) -> None:
        """What is read instead, of calls that are the same, and of runs of as many calls; others read what those do."""
        beside = [(was, now[was.node]) for was in self._same]
        beside += [pair for run in self._runs if len(run[0]) == len(run[1]) for pair in zip(*run, strict=True)]
        twins: dict[fx.Node, fx.Node] = {}
        for one, other in beside:
            read = operands_of(other)
            if len(read) == len(operands_of(one)):
                self._instead[one.node] = read
                twins.update(pair for pair in self._pairs(one) if pair[0] in self._gone)
        for was in (was for run in self._runs for was in run[0] if was.node not in self._instead):
            self._instead[was.node] = [twins.get(each, each) for each in operands_of(was)]

    def _join(self) -> None:
        """One edit of those that cannot be made one without the other."""
        for node, place in self._gone.items():
            self._unite(place, self._new.get(node))
        for was in self._same:
            for old, new in self._pairs(was):
                self._unite(self._gone.get(old), self._new.get(new))
        for place, (calls, _) in enumerate(self._runs):
            for old, new in (pair for was in calls for pair in self._pairs(was)):
                self._unite(self._gone.get(old), place if old is new else self._new.get(new))
        acting = (place for place, run in enumerate(self._runs) if any(_acts(was) for side in run for was in side))
        first = next(acting, len(self._runs))
        for place in range(first, len(self._runs)):
            self._unite(first, place)

    def _unite(self, one: int | None, other: int | None) -> None:
        if one is not None and other is not None:
            first, second = sorted((self._edit_of(one), self._edit_of(other)))
            self._parents[second] = first


def _acts(was: Was) -> bool:
    """Whether calls behind compute something else without one, though they read nothing of it."""
    call = read(cast("fx.Node", was))
    if call is None:
        return False
    return changes_mode(call.node) or call.name in RANDOM or drops(call) or is_seeded(was.target)


def _runs(calls: Sequence[Was], stays: set[fx.Node]) -> list[list[Was]]:
    """Calls ahead of the first that stays, between those, and behind the last."""
    found: list[list[Was]] = [[]]
    for was in calls:
        if was.node in stays:
            found.append([])
        else:
            found[-1].append(was)
    return found
