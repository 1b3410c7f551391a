"""Whether repeated calls are a loop: every step is wired alike, to itself, to the steps before it and to what is around.

Steps are compared call by call and operand by operand with one in the middle. Where some at the ends differ they are left
out of the loop; a loop with one in its middle that differs is two loops.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.passes.graph.refusal import RefusedError, mutated, told, where_of
from lz_compile.passes.graph.view import value_of
from lz_compile.passes.loops.roll.search import Program, Run, is_number
from lz_compile.passes.loops.roll.slices import Versions
from lz_compile.passes.loops.roll.worthwhile import LEAST_STEPS

#: How many steps ago a value may have been made that a step reads.
_FARTHEST = 4
#: Steps to be left out at the beginning of a loop because what they read from before is not a value of their own kind.
_MOST_PEELED = 8


@dataclass(frozen=True)
class Made:
    """An operand that the loop makes: by the call at ``index`` of the step ``lag`` steps ago."""

    lag: int
    index: int


@dataclass(frozen=True)
class Steps:
    """A loop: ``count`` steps of ``period`` calls each, from the call ``start`` of ``program`` on.

    ``wiring[index]`` tells of each leaf of a step's call at ``index`` (nodes and numbers, in order) where it comes from: a
    :class:`Made`, None for a node from around the loop, or ``float`` for a number.
    """

    program: Program
    versions: Versions
    start: int
    period: int
    count: int
    wiring: tuple[tuple[Any, ...], ...]

    @property
    def stop(self) -> int:
        """The position behind the last call."""
        return self.start + self.count * self.period

    @property
    def nodes(self) -> list[fx.Node]:
        """Every call of the loop."""
        return self.program.nodes[self.start : self.stop]

    @property
    def where(self) -> str:
        """The user's line at which a step begins."""
        return where_of(self.node(0, 0))

    def node(self, step: int, index: int) -> fx.Node:
        """The call at ``index`` of a step."""
        found: fx.Node = self.program.nodes[self.start + step * self.period + index]
        return found

    def place(self, node: fx.Node) -> tuple[int, int] | None:
        """Step and index of a call, None for nodes outside of the loop."""
        position = self.program.position.get(node, -1)
        return divmod(position - self.start, self.period) if self.start <= position < self.stop else None

    def column(self, index: int, leaf: int) -> list[Any]:
        """A leaf in every step, overwritten tensors as the call that made what is seen."""
        return [
            self.versions.resolve(self.node(step, index), self._leaves(step, index)[leaf]) for step in range(self.count)
        ]

    def _leaves(self, step: int, index: int) -> list[Any]:
        return self.program.leaves[self.start + step * self.period + index]


def kind_of(node: Any) -> Hashable:
    """What a value is, without what it holds: dtype, device and shape."""
    return kind_of_value(value_of(node))


def kind_of_value(value: Any) -> Hashable:
    """The same of an example value."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, shape_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(kind_of_value(each) for each in value)
    return as_size(value) if isinstance(value, torch.SymInt) else type(value).__name__


class Grid:
    """The calls of a run as rows of steps; ``program`` may hold more of them than are alike."""

    def __init__(self, program: Program, versions: Versions, run: Run) -> None:
        self._program = program
        self._versions = versions
        self._run = run
        self._rows = [self._wiring(step) for step in range(run.steps)]
        self._kinds = [self._kinds_of(step) for step in range(run.steps)]
        self._middle = self._middle_step()

    def steps(self) -> Steps:
        """The longest loop in the run.

        Raises:
            RefusedError: too few steps are alike, and how they differ.
        """
        middle = self._middle
        if not any(isinstance(made, Made) and made.lag for row in self._rows[middle] for made in row):
            raise self._unclear() or RefusedError(
                "NO_STATE", "no step reads what the one before it made", "run all steps as a batch"
            )
        first = last = middle
        while last + 1 < self._run.steps and self._differs(last + 1) is None:
            last += 1
        while first > 0 and self._differs(first - 1) is None:
            first -= 1
        first = self._extended(first)
        count = last + 1 - first
        if count < LEAST_STEPS:
            raise self._refusal(first, last)
        start = self._run.start + first * self._run.period
        return Steps(self._program, self._versions, start, self._run.period, count, self._rows[middle])

    def _unclear(self) -> RefusedError | None:
        """What goes from step to step by way of memory that is overwritten, in ways that are not understood."""
        begin = self._run.start + self._middle * self._run.period
        for node in self._program.nodes[begin : begin + self._run.period]:
            if node in self._versions.unclear:
                return mutated(f"{self._versions.unclear[node]} ({where_of(node)})")
        return None

    def _middle_step(self) -> int:
        """A step that most of the others are like."""
        wired: dict[Any, list[int]] = {}
        for step, row in enumerate(self._rows):
            wired.setdefault(row, []).append(step)
        alike: dict[Any, list[int]] = {}
        for step in max(wired.values(), key=len):
            alike.setdefault(self._kinds[step], []).append(step)
        longest = max(alike.values(), key=len)
        return longest[len(longest) // 2]

    def _leaf(self, step: int, index: int, leaf: int) -> Any:
        position = self._run.start + step * self._run.period + index
        return self._versions.resolve(self._program.nodes[position], self._program.leaves[position][leaf])

    def _kinds_of(self, step: int) -> tuple[Hashable, ...]:
        start = self._run.start + step * self._run.period
        return tuple(kind_of(node) for node in self._program.nodes[start : start + self._run.period])

    def _wiring(self, step: int) -> tuple[tuple[Any, ...], ...]:
        begin = self._run.start + step * self._run.period
        return tuple(
            tuple(
                self._made(step, index, leaf, value) for leaf, value in enumerate(self._program.leaves[begin + index])
            )
            for index in range(self._run.period)
        )

    def _made(self, step: int, index: int, leaf: int, value: Any) -> Any:
        if is_number(value):
            return float
        node = self._leaf(step, index, leaf)
        position = self._program.position.get(node, -1)
        if not self._run.start <= position < self._run.start + self._run.steps * self._run.period:
            return None
        row, column = divmod(position - self._run.start, self._run.period)
        lag = step - row
        if not 0 <= lag <= _FARTHEST:
            return None
        if lag and any(
            other != step and 0 <= other < self._run.steps and self._leaf(other, index, leaf) is node
            for other in (step + 1, step - 1)
        ):
            return None  # made once, read by several steps
        return Made(lag, column)

    def _differs(self, step: int) -> int | None:
        """The first call in which a step is not like the middle one."""
        if self._rows[step] == self._rows[self._middle] and self._kinds[step] == self._kinds[self._middle]:
            return None
        pairs = zip(
            self._rows[step], self._rows[self._middle], self._kinds[step], self._kinds[self._middle], strict=True
        )
        return next(i for i, (row, like, kind, alike) in enumerate(pairs) if row != like or kind != alike)

    def _extended(self, first: int) -> int:
        """The earliest step that the loop may begin with: what it reads of the steps before need not be theirs."""
        reached = first
        for earlier in range(first - 1, max(first - 1 - _FARTHEST, -1), -1):
            if all(self._may_begin(step, earlier) for step in range(earlier, first)):
                reached = earlier
        first = reached
        while first < min(self._run.steps, reached + _MOST_PEELED) and not self._has_proper_start(first):
            first += 1
        return first

    def _may_begin(self, step: int, first: int) -> bool:
        """Whether a step is like the middle one, in a loop whose first step is ``first``."""
        if self._kinds[step] != self._kinds[self._middle]:
            return False
        for index, (row, like) in enumerate(zip(self._rows[step], self._rows[self._middle], strict=True)):
            for leaf, (own, wanted) in enumerate(zip(row, like, strict=True)):
                if own != wanted and not (
                    isinstance(wanted, Made) and wanted.lag > step - first and self._is_around(step, index, leaf, first)
                ):
                    return False
        return True

    def _is_around(self, step: int, index: int, leaf: int, first: int) -> bool:
        value = self._leaf(step, index, leaf)
        if is_number(value):
            return True
        position = self._program.position.get(value, -1)
        return position < self._run.start + first * self._run.period

    def _has_proper_start(self, first: int) -> bool:
        """Whether all that the first steps read from before the loop is like what the loop hands on."""
        for index, row in enumerate(self._rows[self._middle]):
            for leaf, made in enumerate(row):
                if not isinstance(made, Made):
                    continue
                for step in range(first, min(first + made.lag, self._run.steps)):
                    value = self._leaf(step, index, leaf)
                    if isinstance(value, fx.Node) and kind_of(self._versions.tensor(value)) != self._handed(made.index):
                        return False
        return True

    def _handed(self, index: int) -> Hashable:
        begin = self._run.start + self._middle * self._run.period
        return kind_of(self._versions.tensor(self._program.nodes[begin + index]))

    def _refusal(self, first: int, last: int) -> RefusedError:
        other = last + 1 if last + 1 < self._run.steps else max(first - 1, 0)
        index = self._differs(other) or 0
        node = self._program.nodes[self._run.start + other * self._run.period + index]
        kind, alike = self._kinds[other][index], self._kinds[self._middle][index]
        if kind != alike:
            text = f"{told(node)} is {_told(kind)} in one step and {_told(alike)} in another"
            return RefusedError("SHAPE_CHANGES", text, "keep shapes and dtypes the same in every step")
        text = f"{told(node)} reads something else than in other steps"
        return RefusedError("STEP_DIFFERS", text, "let every step read the same of what the one before it made")


def _told(kind: Hashable) -> str:
    if isinstance(kind, tuple) and len(kind) == 3 and isinstance(kind[0], torch.dtype):
        return f"{str(kind[0]).removeprefix('torch.')}{list(kind[2])}"
    return str(kind)


def parameters_of(columns: Sequence[Sequence[Any]]) -> list[fx.Node]:
    """The parameters among the nodes that differ from step to step: layers of a network have those, steps have not."""
    return [
        node
        for column in columns
        for node in column
        if isinstance(node, fx.Node) and isinstance(value_of(node), torch.nn.Parameter)
    ]
