"""Recurrences that are affine in their state, in all of their spellings.

A loop is a ``scan``: one that was a loop in the source, or that was rolled up again. Its step is read as algebra
(:mod:`step_form`), and what the state becomes as factors, rank-one updates and a summand (:mod:`transition`). Recurrences
that are computed without steps are read from running sums, or from how pieces over time are put together.

What this makes of a graph, and which operands a kernel gets, says :mod:`matching`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, mutated, told
from lz_compile.passes.graph.writes import refuse_transformed
from lz_compile.passes.loops.recurrence.plan import Part, Plan, Readings
from lz_compile.passes.loops.recurrence.prefix_scan import PrefixScan, prefix_scans
from lz_compile.passes.loops.recurrence.prefix_scan_reads import with_reads
from lz_compile.passes.loops.recurrence.prefix_sums import log_scans, running_sums
from lz_compile.passes.loops.recurrence.step_check import check, with_drops
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.step_trace import SCAN, ScanCall, results_of, scan_call
from lz_compile.passes.loops.recurrence.transition import Transition

OP = "scan"


@dataclass
class Loops:
    """Reads the loops of a graph, equal ones once; transitions that were compared with their steps are known by identity."""

    effects: Effects
    _readings: Readings = field(default_factory=Readings)
    _checked: dict[int, Transition] = field(default_factory=dict)

    def calls(self, graph: fx.Graph) -> Iterator[ScanCall]:
        """The loops whose results are used."""
        calls = (scan_call(node) for node in graph.nodes if node.target is SCAN and node.users)
        return (call for call in calls if call is not None)

    def read(self, call: ScanCall) -> tuple[StepForm, Transition, dict[int, list[fx.Node]]]:
        """A loop's step, what the state becomes in it, and the nodes that pick results.

        Raises:
            RefusedError: its step has no structure that the op knows.
        """
        results, ambient = results_of(call.node), self.effects.ambient(call.node)
        refuse_transformed(ambient)
        check_written(call.node, call.operands, max(call.node.users), self.effects)
        plan = self._readings.plan(call, ambient)
        transition = _only(plan)
        if id(transition) not in self._checked:
            check(plan.form, transition)
            self._checked[id(transition)] = with_drops(plan.form, transition)
        return plan.form, self._checked[id(transition)], results


def _only(plan: Plan) -> Transition:
    """The transition of a loop that is nothing else."""
    for part in plan.parts:
        if part.reason is not None:
            raise part.reason
    transitions = [part.transition for part in plan.parts if part.transition is not None]
    if plan.is_apart or len(transitions) != 1:
        text = f"the loop does more than one recurrence: {_described(plan.parts, plan.form)}"
        raise RefusedError("LOOP_NOT_APART", text, "compute what needs no state before or after the loop")
    return transitions[0]


def _described(parts: list[Part], form: StepForm) -> str:
    names = [form.step.names[form.step.states[state]] for part in parts for state in part.states]
    return f"its states are {', '.join(names)}" if names else "it has no state"


def check_written(scan: fx.Node, operands: Iterable[fx.Node], last: fx.Node, effects: Effects) -> None:
    """Refuse a recurrence of which an operand is overwritten before all results are there."""
    for node in operands:
        writer = effects.overwritten_after(node, scan, last)
        if writer is not None:
            raise mutated(f"{told(node)} is overwritten by {told(writer)} before the results are taken")


def without_steps(graph: fx.Graph, effects: Effects) -> Iterator[PrefixScan | NearMiss]:
    """Every recurrence that is computed in logarithmic depth or by running sums; of those used otherwise, how."""
    known: set[fx.Node] = set()
    for found in (*prefix_scans(graph, effects), *log_scans(graph, effects)):
        known.update(found.core if isinstance(found, PrefixScan) else ())
        yield with_reads(found, effects) if isinstance(found, PrefixScan) else found
    yield from running_sums(graph, effects, known)
