"""What is read in a graph, before anything is chosen: calls spelled out, loops rolled and taken apart, ops recognised."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import fx

from lz_compile.compile.stages import State
from lz_compile.ground import events
from lz_compile.ground.records import Reason
from lz_compile.lowering import frames
from lz_compile.passes.editing.edit import Edit, RefutedError, Rewrite, apply_places
from lz_compile.passes.editing.merge import merge_met
from lz_compile.passes.formula.equal_values import numbers
from lz_compile.passes.graph.effects import RESHAPERS, Effects
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import Failure, NearMiss, reshaped
from lz_compile.passes.inlining.checkpointed_masks import make_again
from lz_compile.passes.inlining.inline import Inlined, inline
from lz_compile.passes.inlining.known_numbers import write_out
from lz_compile.passes.inlining.passed_on import pass_on
from lz_compile.passes.loops.recurrence.distribute import Distributed, distribute, why_unknown
from lz_compile.passes.loops.roll.reroll import RolledLoop, never, reroll, scans_of
from lz_compile.passes.proof.resize import input_left_out
from lz_compile.passes.recognisers import Recogniser, recognisers
from lz_compile.passes.rewriting.match import Match
from lz_compile.report.findings import LoopReport, MissReport

#: Of Python calls, while a graph is read.
_RECURSION = 50_000


def write_out_numbers(state: State) -> None:
    """Dimensions that are inputs, and other numbers that a guard fixes, are these numbers."""
    numbers = partial(write_out, state.module.graph)
    state.change(Rewrite("writing out numbers", numbers, shown="a guard says each", undoes_itself=True))


def pass_on_inputs(state: State) -> None:
    """Dropout that drops nothing is its input, and lies in its memory; it stays where a shape changes in place."""
    if _tells_shapes(state):
        state.change(
            Rewrite(
                "taking out dropout that drops nothing", partial(pass_on, state.module.graph), shown="it is its input"
            )
        )


def make_masks_again(state: State) -> None:
    """Layers that are computed again make their masks by themselves, as far as nothing else is read of them."""
    masks = partial(make_again, state.module)
    state.change(Rewrite("making masks in checkpoints", masks, shown="the same calls of the same values"))


def spell_out(state: State) -> None:
    """Calls that hide an attention."""
    calls = partial(inline, state.module.graph, strict=state.options.strict)
    rewrite = Rewrite("spelling out calls", calls, shown="each call runs itself, or was proven by itself")
    found = state.change(rewrite, lambda made: any(isinstance(each, Inlined) for each in made))
    state.misses += [miss for miss in found if isinstance(miss, NearMiss)]


def drop(unread: Callable[[fx.Graph], int], state: State) -> None:
    """What nobody reads is no use of what it reads. Loops come first, for their steps are equal whoever reads them."""
    what = "dropping what nobody reads"
    state.change(Rewrite(what, partial(unread, state.module.graph), shown="nobody reads what goes"))


def edit_all(does: str, code: str, edit: Edit, state: State) -> None:
    """Make the changes of an edit all over a graph, proven.

    Where a shape changes in place, who read it before is noted to have read another one: such a graph stays as it is.
    """
    if not _tells_shapes(state):
        return
    before, state.before = state.snapshot(), None
    count, faults = apply_places(state.module, does, edit, state.report.unproven, before)
    state.is_changed |= count > 0
    if not count and not faults:  # what was put back has other nodes
        state.before = before
    for places, error in faults:
        at = f"{does} at {places}" if places else does
        state.fail("EDIT_REFUTED" if isinstance(error, RefutedError) else code, at, error)


def _tells_shapes(state: State) -> bool:
    """Whether every tensor has the shape that it had when it was read; a reason of the report where one has not."""
    graph = state.module.graph
    if not any(graph.find_nodes(op="call_method", target=f"{name}_") for name in RESHAPERS):
        return True
    effects = Effects(graph)
    found = effects.reshaped_after_read(effects.position, max(graph.nodes))
    reason = None if found is None else reshaped(*found).reason
    state.report.unproven += [] if reason is None or reason in state.report.unproven else [reason]
    return reason is None


def roll(state: State) -> None:
    """Roll the loops that Dynamo unrolled. Steps are graphs of their own, and looked at next."""
    kept: list[NearMiss] = []

    def is_known(scan: fx.Node, ambient: Ambient) -> bool:
        try:
            miss = why_unknown(scan, ambient)
        except Exception as error:  # noqa: BLE001 one loop must not cost the others
            state.fail("LOOPS_FAILED", "looking at the step of a loop", error)
            return False
        kept.extend([] if miss is None else [miss])
        return miss is None

    policy = state.options.loops if state.scans == "any" else "keep"
    special = never if state.scans == "none" else is_known
    state.before = None
    state.report.loops.extend(LoopReport.of(loop, state.path) for loop in scans_of(state.module))
    found = reroll(state.module, policy, special, state.report.unproven, state.kept)
    _fail_each("rolling the loop", found, state)
    loops = [each for each in found if isinstance(each, RolledLoop)]
    state.report.loops.extend(LoopReport.of(loop, state.path) for loop in loops)
    state.report.near_misses.extend(_unrolled(loops))
    places = {loop.where for loop in loops if loop.scan is None}
    state.misses += [miss for miss in found if isinstance(miss, NearMiss)]
    state.misses += [miss for miss in kept if miss.where in places]
    state.is_changed |= any(loop.scan is not None for loop in loops)


#: From how many steps on it is told what tracing them costs, and what a call costs Dynamo: 1 to 3 ms (EPYC, torch 2.13).
_MANY_STEPS, _TRACED_S = 100, 2e-3


def _unrolled(loops: Sequence[RolledLoop]) -> Iterator[MissReport]:
    """What Dynamo has unrolled, step by step, before anybody could see a loop."""
    counts = [(loop, loop.steps) for loop in loops if isinstance(loop.steps, int) and loop.steps > _MANY_STEPS]
    for where in dict.fromkeys(loop.where for loop, _ in counts):
        here = [(steps, steps * loop.calls) for loop, steps in counts if loop.where == where]
        seconds = sum(calls for _, calls in here) * _TRACED_S
        text = f"Dynamo traced {here[0][0]} steps one by one: about {seconds:.0f} s of this compile, again for other lengths"
        edit = "lz_compile.roll_loops(model) has one step traced, for all lengths"
        yield MissReport("scan", where, Reason("LOOP_UNROLLED", text), edit)


def take_apart(state: State) -> None:
    """Compute for all steps at once what needs no state, and states one after the other."""
    found: list[Distributed | NearMiss | Failure] = []
    state.before = None
    try:
        found.extend(distribute(state.module, state.report.unproven, state.options.loops))
    finally:  # what was taken apart before a fault is
        state.is_changed |= any(isinstance(each, Distributed) for each in found)
        state.misses += [miss for miss in found if isinstance(miss, NearMiss)]
        _fail_each("taking the loop apart", found, state)


def recognise(state: State) -> None:
    """Find ops and near misses, again where values that are written twice met in a formula and are one now."""
    matches: list[Match] = []
    left_out: dict[int, fx.Node | None] = {}
    graph, is_read = state.module.graph, False
    with _deep_recursion():
        while not is_read:
            effects = Effects(graph, may_keep=state.options.keep_weights)
            effects.numbers = numbers(effects)
            results = [(op, found) for op, read in recognisers().items() for found in _all_of(op, read, graph, effects)]
            is_read = not effects.met or not state.change(_merged(graph, effects))
        for op, found in results:
            if isinstance(found, Failure):
                at = f" at {found.where}" if found.where else ""
                state.fail("RECOGNISER_FAILED", f"recognising {op}{at}", found.error)
                continue
            if isinstance(found, Match):
                result: Match | NearMiss = _cancelled(found, left_out) or _reshaped(found, effects) or found
            else:
                result = found
            state.misses += [result] if isinstance(result, NearMiss) else []
            if isinstance(result, NearMiss) and result.cause is not None:
                events.record("PROBE_FAILED", f"{result.node.name} is left as it is", result.cause, level=logging.INFO)
            matches += [result] if isinstance(result, Match) else []
    state.effects, state.matches = effects, sorted(matches, key=lambda match: effects.position[match.site.output])


def _merged(graph: fx.Graph, effects: Effects) -> Rewrite[int]:
    """Equal values that met in a formula as one."""
    shown = "equal calls of equal operands under equal modes, of whose memory nobody can tell"
    return Rewrite("making equal values one", partial(merge_met, graph, effects), shown=shown)


def _reshaped(match: Match, effects: Effects) -> NearMiss | None:
    """Why a match is not as it was read: it holds a tensor whose shape, as far as Dynamo tells, is a later one."""
    found = effects.reshaped_after_read({*match.core, *match.inputs, *match.outputs}, match.site.output)
    return None if found is None else NearMiss.of(match.op, match.site.output, reshaped(*found))


def _cancelled(match: Match, left_out: dict[int, fx.Node | None]) -> NearMiss | None:
    """Why nothing can be proven of a match: what it leaves out has a gradient, and may be NaN."""
    kind = id(match.kind)
    if kind not in left_out:
        left_out[kind] = input_left_out(match.kind)
    missing = left_out[kind]
    if missing is None:
        return None
    node = match.renamed.get(missing, missing)
    reason = Reason("CANCELS_OUT", f"{node.name} cancels out of the result, but NaN in it and its gradient do not")
    return NearMiss(match.op, match.site.output, reason, f"leave {node.name} out of it", match.site.where)


def tell_misses(state: State) -> None:
    """Report the near misses, but for pieces of what was recognised, or missed as a whole: those look like loops, too."""
    known = {node for match in state.matches for node in match.core}
    scans = [set(match.core) for match in state.matches if match.op == "scan"]
    wholes = [miss for miss in state.misses if miss.is_whole]
    for miss in state.misses:
        most = max((len(core & miss.pieces) for core in scans), default=0)
        own = miss.pieces | {miss.node}
        is_part = any(miss is not whole and whole.pieces & own for whole in wholes)
        if miss.node not in known and not is_part and 2 * most <= len(miss.pieces):
            state.report.near_misses.append(_with_break(MissReport.of(miss), state.module))


def _fail_each(what: str, found: Iterable[object], state: State) -> None:
    """Make an event of every fault among what a stage found."""
    for each in found:
        if isinstance(each, Failure):
            code = "EDIT_REFUTED" if isinstance(each.error, RefutedError) else "LOOPS_FAILED"
            state.fail(code, f"{what} at {each.where}", each.error)


def _with_break(miss: MissReport, module: fx.GraphModule) -> MissReport:
    """A near miss; where the rest of an attention is in the next graph, with the break before that."""
    cause = frames.break_reason(module) if miss.reason.code == "NO_VALUES" else None
    if cause is None:
        return miss
    return replace(
        miss, reason=Reason(miss.reason.code, f"{miss.reason.message}, which ends at the graph break {cause}")
    )


def _all_of(op: str, recognise: Recogniser, graph: fx.Graph, effects: Effects) -> Iterator[Match | NearMiss | Failure]:
    """What a recogniser yields; what it raises between two anchors is its last word."""
    try:
        yield from recognise(graph, effects)
    except Exception as error:  # noqa: BLE001 one recogniser must not cost the others; the caller makes an event of it
        yield Failure(op, "", error)


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Readers follow a graph recursively, which may be longer than Python's stack usually gets."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _RECURSION))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
