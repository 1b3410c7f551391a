"""Loops that no kernel can run as they are, in other states.

Parts of a state that are updated apart become states of their own, states that depend on each other become one. What is
tried is kept only where a kernel can run more of the loop then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import known_tensor
from lz_compile.passes.loops.recurrence.batched import Around
from lz_compile.passes.loops.recurrence.coupled_states import coupled, stack_states
from lz_compile.passes.loops.recurrence.plan import Plan
from lz_compile.passes.loops.recurrence.reading import Readings
from lz_compile.passes.loops.recurrence.rebuilt_scan import Rebuilt, Rewritten, rebuild
from lz_compile.passes.loops.recurrence.state_parts import split_states
from lz_compile.passes.loops.recurrence.step_trace import ScanCall, trace_step

#: Changes of states that are tried one after the other.
_MOST_CHANGES = 4


@dataclass
class Restated:
    """A loop, how it comes apart (or why it does not), and what was tried out in the graph for that."""

    call: ScanCall
    plan: Plan | None
    refusal: RefusedError | None
    tried: list[Rebuilt] = field(default_factory=list)

    @property
    def left(self) -> int:
        """How many parts have no known structure; more than there can be where none was read."""
        if self.plan is None:
            return 1 << 30
        return sum(part.reason is not None for part in self.plan.parts) + (0 if self.plan.pays else 1 << 20)

    def keep(self) -> None:
        """The loop in its new states takes the place of the old one."""
        for rebuilt in self.tried:
            rebuilt.keep()

    def undo(self) -> None:
        """As if nothing had been tried."""
        for rebuilt in reversed(self.tried):
            rebuilt.undo()


def restated(call: ScanCall, ambient: Ambient, readings: Readings) -> Restated:
    """A loop in the states in which the most of it has a known structure; of equals, as it is."""
    first = _planned(call, ambient, readings)
    if first.left == 0 or not _is_plain(call):
        return first
    best, current = first, first
    for _ in range(_MOST_CHANGES):
        rebuilt = _changed(current, ambient)
        if rebuilt is None:
            break
        current = _planned(rebuilt.call, ambient, readings, [*current.tried, rebuilt])
        best = current if current.left < best.left else best
    for rebuilt in reversed(current.tried[len(best.tried) :]):
        rebuilt.undo()
    return best


def _planned(call: ScanCall, ambient: Ambient, readings: Readings, tried: list[Rebuilt] | None = None) -> Restated:
    try:
        return Restated(call, readings.plan(call, ambient), None, tried or [])
    except RefusedError as refusal:
        return Restated(call, None, refusal, tried or [])


def _is_plain(call: ScanCall) -> bool:
    """Whether every size is a number, as it has to be where states are cut."""
    values = [known_tensor(node) for node in (*call.init, *call.xs)]
    return all(isinstance(size, int) for value in values for size in value.shape)


def _changed(current: Restated, ambient: Ambient) -> Rebuilt | None:
    """The next change that can be made: states are cut before they are joined."""
    call = current.call
    around = Around(call, ambient)
    changes: list[Callable[[], Rewritten | None]] = []
    if not current.tried:
        changes.append(lambda: _split(call, ambient, around))
    changes.append(lambda: _joined(current, around))
    for change in changes:
        try:
            rebuilt = rebuild(call, around, change)
        except RefusedError:
            continue  # a step that cannot be traced is refused for that already
        if rebuilt is not None:
            return rebuilt
    return None


def _split(call: ScanCall, ambient: Ambient, around: Around) -> Rewritten | None:
    step = trace_step(call, ambient)
    return None if step.sizes.symbols else split_states(call, step, around)


def _joined(current: Restated, around: Around) -> Rewritten | None:
    plan = current.plan
    states = None if plan is None or plan.form.step.sizes.symbols else coupled(plan.form)
    return None if plan is None or states is None else stack_states(current.call, plan.form, states, around)
