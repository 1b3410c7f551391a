"""Recurrences that are affine in their state, in all of their spellings.

The anchor is a ``scan``: a loop that was one in the source, or that was rolled up again. Its step is read as algebra
(:mod:`step_form`), and what the state becomes as factors, rank-one updates and a summand (:mod:`transition`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.purity import refuse_transformed
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.loops.recurrence.chunked_forms import chunked_forms
from lz_compile.passes.loops.recurrence.dropped_states import with_drops
from lz_compile.passes.loops.recurrence.plan import Part, Plan
from lz_compile.passes.loops.recurrence.prefix_scan import PrefixScan, prefix_scans
from lz_compile.passes.loops.recurrence.prefix_scan_emitter import match_of
from lz_compile.passes.loops.recurrence.prefix_scan_logs import log_scans
from lz_compile.passes.loops.recurrence.prefix_scan_reads import read_of
from lz_compile.passes.loops.recurrence.reading import Readings
from lz_compile.passes.loops.recurrence.step_check import check
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.step_trace import SCAN, ScanCall, scan_call
from lz_compile.passes.loops.recurrence.transition import Transition
from lz_compile.passes.rewriting.driver import Driver, Outcome
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.scan.calls import scan_calls
from lz_compile.passes.scan.match import OP, finished


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every scan in ``graph`` whose step has a structure that the op knows; of the others, why it has none."""
    driver, readings = Driver(OP), Readings(follows_masks=False)
    checked: dict[int, Transition] = {}
    for call in (scan_call(node) for node in graph.nodes if node.target is SCAN and node.users):
        if call is not None:
            yield from driver.at(call.node, _match, call, effects, readings, checked)
    yield from scan_calls(graph, effects)
    known: set[fx.Node] = set()
    for found in (*prefix_scans(graph, effects), *log_scans(graph, effects)):
        if isinstance(found, PrefixScan):
            read = read_of(found.output, found.dims[found.output], found.time, effects)
            yield match_of(replace(found, read=read), effects)
            known.update(found.core)
        else:
            yield found
    yield from chunked_forms(graph, effects, known)


def _match(
    _anchor: fx.Node, call: ScanCall, effects: Effects, readings: Readings, checked: dict[int, Transition]
) -> Match:
    """The match of one scan; ``checked`` are the transitions that were compared with their steps already, by identity.

    Raises:
        RefusedError: its step has no structure that the op knows.
    """
    results = call.results()
    _check_surroundings(call, effects)
    plan = readings.plan(call, effects.ambient(call.node))
    transition = _only(plan)
    if id(transition) not in checked:
        check(plan.form, transition)
        checked[id(transition)] = with_drops(plan.form, transition)
    return finished(call, effects, plan.form, checked[id(transition)], results)


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


def _check_surroundings(call: ScanCall, effects: Effects) -> None:
    """Refuse inside of function transforms, and where an operand is overwritten before the last result is taken."""
    refuse_transformed(effects.ambient(call.node))
    last = max(call.node.users)
    for node in call.operands:
        writer = effects.overwritten_after(node, call.node, last)
        if writer is not None:
            text = f"{told(node)} is overwritten by {told(writer)} before the results are taken"
            raise RefusedError("OPERAND_MUTATED", text, "use the out-of-place form of that operation")
