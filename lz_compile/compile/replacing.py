"""Kernels in the place of what was recognised: measured, chosen, proven and spliced in."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from torch import fx

from lz_compile.compile.choices import Choices
from lz_compile.compile.match_proofs import is_loaded, proven, why_aside, why_not
from lz_compile.compile.own_calls import selects_itself, with_own_kernel
from lz_compile.compile.stages import State, timed
from lz_compile.errors import RewriteFailedError
from lz_compile.ground import events
from lz_compile.ground.records import Reason
from lz_compile.lowering import configured, frames
from lz_compile.passes.editing.edit import Rewrite, apply
from lz_compile.passes.editing.edit_proof import unlike_loop
from lz_compile.passes.fusion.emitter import FusedEmitter
from lz_compile.passes.fusion.fusion import fusions
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.share import share_equal
from lz_compile.passes.graph.view import EMITTED, needed, tensor_of
from lz_compile.passes.inlining.checkpointed_masks import give_back
from lz_compile.passes.layers.fold import fold_layers
from lz_compile.passes.linear.kept import keep
from lz_compile.passes.linear.matching import LinearEmitter
from lz_compile.passes.loops.roll.roll import SCAN
from lz_compile.passes.loops.roll.scan_outputs import (
    attach_states,
    checkpoints,
    drop_steps,
    gather_slices,
    give_results,
    give_symbols,
    is_graded,
    keep_operands,
    order_gradients,
    scans_of_ours,
)
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.rewrite import erase_unread, splice
from lz_compile.report.findings import LayersReport
from lz_compile.report.graph_text import statements
from lz_compile.report.report import MatchReport
from lz_compile.runtime.choose.problem import Decision
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.estimate import INDUCTOR
from lz_compile.runtime.policy import policy
from lz_compile.runtime.ranks import agree
from lz_compile.runtime.tables import loaded as loaded_tables

#: Reasons that do not say why a match is left to Inductor.
_BESIDE = ("LOCK_NOT_POSSIBLE", "TABLE_KERNEL_NOT_POSSIBLE", "NOT_FUSED")


def enter(state: State) -> None:
    """Give every match an entry in the report, and the kernel that its source names."""
    choices = Choices(state.options.policy(policy.current()), state.tables)
    matches = _assuming_finite(state.matches) if state.options.assume_finite else state.matches
    state.matches = []  # those that cannot be entered are left alone
    matches = [with_own_kernel(match) for match in matches]
    entries = [MatchReport.of(match, state.path) for match in matches]
    state.matches, state.entries, state.choices = matches, entries, choices
    state.report.matches.extend(entries)


def find_fusions(state: State) -> None:
    """What could be computed together, where there are kernels that do such a thing."""

    def wanted(match: Match) -> set[str]:
        platforms = {"cuda", "rocm", "*"} if match.found.facts.device == "cuda" else {match.found.facts.device, "*"}
        able = (each for each in kernels(match.op).values() if each.fuses_ops and platforms & each.platforms)
        return {name for each in able for name in each.fuses_ops}

    if state.effects is not None and any(map(wanted, state.matches)):
        state.choices.fusions = fusions(state.matches, state.effects, wanted)


def tune(state: State) -> None:
    """Measure what was not, or what no estimate tells, each kind of match with its surroundings, while the budget lasts."""
    choices, options = state.choices, state.options
    how = options.tuning(choices.policy)
    if how == "off" or not state.matches or state.effects is None:
        return
    from lz_compile.compile import match_tuning, measuring

    is_asked, times = how == "on-miss", Counter(map(choices.key, state.matches))
    usual_s = match_tuning.BUDGET_S if is_asked else match_tuning.little(state.module.graph)
    left_s = usual_s if options.tune_budget_s is None else options.tune_budget_s
    if not is_asked and left_s < match_tuning.LEAST_S:
        return
    failing = state if is_asked else replace(state, options=replace(options, strict=False))
    with timed(state.report, "tune"):
        pairs = [*zip(state.matches, state.entries, strict=True)]
        for match, entry in {choices.key(match): (match, entry) for match, entry in reversed(pairs)}.values():
            fusion = choices.fusions.get(match.site.output)
            fusion = fusion if fusion is not None and fusion.ops else None
            try:
                problem = choices.problem(match)
                is_decided = loaded_tables.covers(problem.context, problem.source_kernel, choices.tables)
                if is_decided or not measuring.may_differ(problem.context):
                    continue
                only = None
                if not is_asked:  # what a choice takes by itself is no part of the budget
                    only = match_tuning.open_question(choices.choice(match), problem, times[choices.key(match)], left_s)
                    if not only:
                        continue
                subject, start = match.kind if fusion is None else match, time.perf_counter()
                deadline = start + left_s
                try:
                    with agree.turn(problem, choices.policy, left_s) as whose:
                        if whose in ("decided", "theirs"):
                            continue
                        tuned = match_tuning.tune_match(
                            subject, state.effects, problem, choices.policy, deadline, fusion, only
                        )
                        choices.problems[choices.key(match)] = tuned
                        if whose == "mine":  # others wait for this
                            choices.decide(match, partial(why_not, match, entry, state))
                finally:
                    left_s -= time.perf_counter() - start
            except Exception as error:  # noqa: BLE001 what cannot be measured is decided without, as ever
                failing.fail("MEASUREMENT_FAILED", f"measuring {match.op} at {match.site.where}", error)


def choose(state: State) -> None:
    """What would be chosen, for a dry run."""
    state.choices.is_dry = True
    for match, entry in zip(state.matches, state.entries, strict=True):
        decision = _decide(match, entry, state)
        entry.kernel = next(kernel.kernel_id for kernel in decision.ranking if is_loaded(match, kernel, entry, state))
        entry.kernel = _left(match) if entry.kernel == INDUCTOR else entry.kernel
        if entry.kernel not in (INDUCTOR, match.found.source_kernel):
            entry.reasons.append(Reason("NOT_PROVEN", "a dry run proves and rewrites nothing"))


def replace_all(state: State) -> None:
    """Splice in the best kernel for each match that proves to be right."""
    state.before = None
    if state.effects is not None:
        state.choices.copied.update(_returned_again(state.matches, state.effects))
    # Last to first: a match may read what an earlier one computes, and names the node that is still there.
    for match, entry in reversed(list(zip(state.matches, state.entries, strict=True))):
        try:
            kept = "" if state.effects is None else _overwritten(match, state.effects, match.inputs)
            if state.effects is not None:
                effects = state.effects
                written = (node for node in match.outputs if _is_written(match, effects, node))
                state.choices.copied.update(written)
            if kept:
                entry.kernel = _left(match)
                text = f"a kernel's backward pass may need what changes: {kept}"
                entry.reasons.append(Reason("OVERWRITTEN_LATER", text))
                continue
            _replace(match, entry, state)
        except Exception as error:  # noqa: BLE001 one match must not cost the others; it is an event
            state.fail("REWRITE_FAILED", f"{match.op} at {match.site.where} is left to Inductor", error)
            entry.kernel, entry.rewritten = INDUCTOR, False
            entry.reasons.append(Reason("REWRITE_FAILED", f"{type(error).__name__}: {error}"))
    state.is_changed |= any(entry.rewritten for entry in state.entries)


def tidy(state: State) -> None:
    """Drop what nobody reads any more, and let scans that stay compile."""
    module = state.module

    def tidied() -> bool:
        share_equal(module.graph)
        given = [each for match in state.matches for each in match.found.inputs.items()]
        erase_unread(module.graph, (node for node, known in given if known.implied is not None))
        made = (
            give_results(module),
            gather_slices(module),
            keep_operands(module),
            order_gradients(module),
            attach_states(module),
            give_symbols(module),
            give_back(module.graph),
        )
        drop_steps(module)
        return any(made)

    state.change(Rewrite("tidying a rewritten graph", tidied, shown="nothing of it changes a value that anybody reads"))
    state.before = None  # what nobody reads may be gone


def try_scans(state: State) -> None:
    """Say why a loop that stays cannot be left to PyTorch's operator, where its gradients are wanted."""
    for scan in scans_of_ours(state.module):
        if is_graded(scan) and scan.target is SCAN:
            verdict = unlike_loop(state.snapshot(), scan)
            state.misfit = state.misfit or verdict.differs
            if verdict.unproven:
                text = f"PyTorch's operator for the loop {scan.name}: {verdict.unproven}"
                state.report.unproven.append(Reason("EDIT_UNPROVEN", text))


def checkpoint(state: State) -> None:
    """Compute steps of loops that stay again where their gradients need what they made; not inside of a checkpoint."""
    if state.path or state.scans != "any" or state.kept is not None:
        return
    for rewrite in checkpoints(state.module, state.report.unproven):
        apply(state.module, rewrite)
        state.is_changed = True


def _decide(match: Match, entry: MatchReport, state: State) -> Decision:
    with timed(state.report, "select"):
        decision = state.choices.decide(match, partial(why_not, match, entry, state))
    entry.decide(decision, state.choices.problem(match), match.found.attributes)
    for refused in (decision.refused_lock, decision.refused_table, decision.refused_agreed):
        if refused is not None:
            events.record(refused.code, f"{match.op} at {match.site.where}: {refused.message}")
            entry.reasons.append(refused)
    return decision


def _left(match: Match) -> str:
    """What computes a match that is left alone: a call of an op of ours selects a kernel by itself."""
    return INDUCTOR if match.found.source_kernel is None or not selects_itself(match) else match.found.source_kernel


def _replace(match: Match, entry: MatchReport, state: State) -> None:
    """Rewrite with the best kernel that proves to be right; each that does not is quarantined."""
    if (aside := why_aside(match)) is not None:
        entry.kernel = INDUCTOR
        entry.reasons.append(aside)
        return
    decision = _decide(match, entry, state)
    if match.site.output in state.choices.fusions:
        entry.reasons.extend(state.choices.fusions[match.site.output].refused)
    if decision.refused_lock is not None and state.options.strict:
        raise RewriteFailedError(str(decision.refused_lock))
    last, proving = lambda: entry.reasons[-1], partial(why_not, match, entry, state)
    for kernel, following in state.choices.in_turn(match, last, proving):
        entry.kernel, entry.why = kernel.kernel_id, following.why
        if not is_loaded(match, kernel, entry, state):
            if state.options.strict:
                raise RewriteFailedError(str(entry.reasons[-1]))
            continue
        if kernel.call is None:
            entry.kernel = _left(match)
            entry.reasons += _why_left(entry)
            return
        if kernel.kernel_id == match.found.source_kernel:
            entry.reasons.append(Reason("ALREADY_THIS_KERNEL", f"the source calls {match.found.source_kernel} itself"))
            return
        if _settles(match, kernel, entry, state):
            return
    entry.kernel = _left(match)


def _why_left(entry: MatchReport) -> list[Reason]:
    """Why a match stays what it is, where nothing said so yet."""
    if entry.kernel != INDUCTOR:
        text = f"the call stays as it is, and selects {entry.kernel} when it is traced"
        return [Reason("SELECTS_ITSELF", text)]
    is_told = not all(reason.code in _BESIDE for reason in entry.reasons)
    return [] if is_told else [Reason("LEFT_TO_INDUCTOR", entry.why)]


def fold(state: State) -> None:
    """Compute layers that differ in nothing but their tensors by one region."""
    if state.options.layers == "keep":
        return
    found = fold_layers(state.module, state.options.layers, configured.why_no_regions())
    state.report.layers += [LayersReport.of(each, state.path) for each in found]
    state.is_changed |= any(each.kept is None for each in found)


def _settles(match: Match, kernel: KernelSpec, entry: MatchReport, state: State) -> bool:
    """As :func:`_replaced`; a kernel that cannot be proven, or put here, makes way for the next one.

    Raises:
        RewriteFailedError: it cannot, and ``options.strict`` is set.
    """
    try:
        return _replaced(match, kernel, entry, state)
    except Exception as error:  # noqa: BLE001 a fault of ours must not break a model; it is an event
        state.fail("REWRITE_FAILED", f"{kernel.kernel_id} for {match.op} at {match.site.where} is no candidate", error)
        entry.validation, text = None, f"{kernel.kernel_id}: {type(error).__name__}: {error}"
        entry.reasons.append(Reason("REWRITE_FAILED", text))
        return False


def _replaced(match: Match, kernel: KernelSpec, entry: MatchReport, state: State) -> bool:
    """Whether a kernel is the last one to try: it was put in, or nothing may be; one that proves wrong is quarantined."""
    subject = state.choices.subject(match, kernel)
    if not proven(match, kernel, entry, state):
        return False
    if not _holds(match):
        entry.kernel, entry.validation = INDUCTOR, None
        entry.reasons.append(Reason("VALUE_NOT_GUARDED", "its mask is a buffer, and nothing would notice a change"))
        return True
    with timed(state.report, "rewrite"):
        made, results = _splice(subject, kernel, state)
    state.spliced.append((match, entry, results))
    entry.rewritten = True
    entry.after = made if match.prototype is None else []
    if isinstance(subject.found.emitter, FusedEmitter):
        entry.reasons.append(Reason("FUSED", f"{kernel.kernel_id} computes {subject.found.emitter} along"))
    return True


def _splice(subject: Match, kernel: KernelSpec, state: State) -> tuple[list[str], tuple[fx.Node, ...]]:
    """Put a proven kernel in the place of a match: the calls that are there now."""
    assert kernel.call is not None, "what has no call is never proven"
    graph, call, choices = state.module.graph, kernel.call, state.choices

    def spliced() -> tuple[fx.Node, ...]:
        results = splice(graph, subject, call, choices.recipes, copied=choices.copied)
        if isinstance(subject.found.emitter, FusedEmitter):
            erase_unread(graph, subject.read)
        return results

    what = f"{kernel.kernel_id} for {subject.op} at {subject.site.where}"
    shown = "the kernel was proven against the match"
    results = apply(state.module, Rewrite(what, spliced, shown=shown, undoes_itself=True))
    made = needed(results, (), lambda node: (each for each in node.all_input_nodes if EMITTED in each.meta))
    return statements(made), results


def keep_weights(state: State) -> None:
    """Make what kernels get of a module's tensors once for all calls, where that is another form than they have."""
    for match, entry, results in state.spliced:
        is_kept = isinstance(match.found.emitter, LinearEmitter) and match.found.emitter.weight.is_kept
        found = keep(state.module.graph, results, state.effects) if is_kept and state.effects is not None else None
        if found is not None:
            change, kept_bytes, stored_bytes = found
            made = statements([apply(state.module, change)])
            entry.after = made if entry.after else []  # told of the first of equal matches
            text = f"{kept_bytes:,} bytes, made once for all calls, are kept beside {stored_bytes:,} that are stored"
            entry.reasons.append(Reason("WEIGHT_KEPT", text))
    state.spliced = []


def _holds(match: Match) -> bool:
    """Whether what was read off buffers stays true as long as the compiled code runs: guards see to that."""
    return not match.found.buffers or frames.guard_values(match.found.buffers)


def _is_written(match: Match, effects: Effects, node: fx.Node) -> bool:
    """Whether a result must be a copy, for it is written to later, and its kernel's backward may need it or gives a view.

    PyTorch refuses to write with gradients to a view that was made without them.
    """
    if not grad_enabled(match.site.ambient):
        return any(grad_enabled(effects.ambient(writer)) for writer, _ in effects.writes_to(node))
    return bool(_overwritten(match, effects, [node]))


def _returned_again(matches: Iterable[Match], effects: Effects) -> Iterator[fx.Node]:
    """What is returned of matches that may compute what an earlier one does, or twice, where there are gradients.

    The partitioner of AOTAutograd (2.13) merges equal calls of operators that have several results, and returns one tensor
    for both, so that whoever writes to one of them writes to the other. And of a tensor that is returned with a view of it
    (be it detached), it makes both from what a kernel's result may be a view of, and fails where that is larger.
    """
    *_, output = effects.position
    results = output.all_input_nodes
    if not any(tensor.requires_grad for tensor in map(tensor_of, results) if tensor is not None):
        return
    returned, seen = Counter(map(effects.owner, results)), set[object]()
    for match in matches:
        places = [place for place, node in enumerate(match.outputs) if effects.owner(node) in returned]
        if places:
            given = [node for node in needed(match.inputs, ()) if node.op in ("placeholder", "get_attr")]
            key = match.op, repr(match.found.attributes), frozenset(str(node.target) for node in given)
            outputs = [match.outputs[place] for place in places]
            yield from (node for node in outputs if key in seen or returned[effects.owner(node)] > 1)
            seen.add(key)


def _overwritten(match: Match, effects: Effects, nodes: Iterable[fx.Node]) -> str:
    """What of some nodes is overwritten later, where gradients are recorded; empty if nothing is."""
    nodes = (*nodes,)
    tensors = map(tensor_of, (*nodes, *match.inputs))
    if not grad_enabled(match.site.ambient) or not any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    ):
        return ""
    return effects.why_not_kept(nodes, max(match.outputs, key=effects.position.__getitem__))


def _assuming_finite(matches: list[Match]) -> list[Match]:
    """The matches for inputs without NaN and infinities; twins stay twins."""
    promised = {id(match): match.assuming_finite() for match in matches}
    return [
        found if match.prototype is None else replace(found, prototype=promised[id(match.prototype)])
        for match, found in ((match, promised[id(match)]) for match in matches)
    ]
