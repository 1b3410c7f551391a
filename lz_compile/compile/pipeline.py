"""The stages between a Dynamo graph and Inductor, for one graph and every graph nested in it."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from lz_compile.compile.options import Options
from lz_compile.compile.own_calls import selects_itself, with_own_kernel
from lz_compile.compile.problems import of_match
from lz_compile.compile.reading import Reading, Scans, fail, graphs, timed
from lz_compile.compile.symbolic_sizes import symbolic_sizes
from lz_compile.errors import RewriteFailedError
from lz_compile.ground import events
from lz_compile.ground.reasons import Reason
from lz_compile.ground.store import Store
from lz_compile.lowering import inductor
from lz_compile.passes.editing.edit import all_or_nothing
from lz_compile.passes.fusion.emitter import FusedEmitter
from lz_compile.passes.fusion.fusion import Fusion, fusions
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.share import share_equal
from lz_compile.passes.graph.snapshot import Snapshot
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.loops.roll.scan import SCAN
from lz_compile.passes.loops.roll.scan_outputs import drop_steps, give_results, give_symbols, order_gradients
from lz_compile.passes.proof.validate import Validation, validate
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.rewrite import Recipes, erase_unread, splice
from lz_compile.report.report import GraphReport, MatchReport
from lz_compile.runtime.choose.problem import Decision, Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.estimate import INDUCTOR
from lz_compile.runtime.policy import policy
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.tables import loaded as loaded_tables
from lz_compile.runtime.tables.loaded import Loaded

#: Reasons that do not say why a match is left to Inductor.
_BESIDE = ("LOCK_NOT_POSSIBLE", "TABLE_KERNEL_NOT_POSSIBLE", "NOT_FUSED")


def rewrite(module: fx.GraphModule, options: Options, report: GraphReport) -> None:
    """Inline, roll loops, recognise, choose, prove and splice in place, in ``module`` and the graphs that it calls.

    Whatever fails leaves the subgraph that it concerns untouched and is an event in ``report``.

    Raises:
        RewriteFailedError: something failed and ``options.strict`` is set.
        DispatchTableError: the table of ``options`` is refused and ``options.strict`` is set.
    """
    tables = loaded_tables.of_compile(options.dispatch_table, strict=options.strict)
    for path, child, is_checkpointed in graphs(module):
        if not is_checkpointed:
            _rewrite(_read(child, path, tables, options, report, "any"), options, report)
            continue
        before, trial = Snapshot(child), GraphReport(report.graph_id)
        _rewrite(_read(child, path, tables, options, trial, "replaced"), options, trial)
        if any(loop.rolled for loop in trial.loops) and child.graph.find_nodes(op="call_function", target=SCAN):
            before.restore()  # no kernel took the place of a loop that was rolled for one
            trial = GraphReport(report.graph_id, seconds=trial.seconds)
            _rewrite(_read(child, path, tables, options, trial, "none"), options, trial)
        report.add(trial)


def _rewrite(found: _Found, options: Options, report: GraphReport) -> None:
    """Measure, choose and splice in one graph that was read."""
    if options.tunes(found.known.policy) and found.matches and found.effects is not None:
        with timed(report, "tune"):
            _tune(found.matches, found.effects, found.known, options)
    _replace(found, options, report)
    with timed(report, "rewrite"):
        has_results = _tidy(found, options)
    if found.is_changed or has_results or any(entry.rewritten for entry in found.entries):
        found.module.graph.lint()
        found.module.recompile()


def _tidy(found: _Found, options: Options) -> bool:
    """Drop what nobody reads any more, and let scans that stay compile; whether one of those was changed."""
    try:
        with all_or_nothing(found.module):  # nothing of it changes a value that anybody reads
            share_equal(found.module.graph)
            given = [each for match in found.matches for each in match.found.inputs.items()]
            erase_unread(found.module.graph, (node for node, known in given if known.implied is not None))
            has_results = give_results(found.module) + order_gradients(found.module) + give_symbols(found.module) > 0
            drop_steps(found.module)
            return has_results
    except Exception as error:  # noqa: BLE001 a fault of ours must not break a model; it is an event
        fail("REWRITE_FAILED", "tidying a rewritten graph", error, options)
        return False


def choose(module: fx.GraphModule, options: Options, report: GraphReport) -> None:
    """The same up to the choice of kernels: nothing is measured, proven or spliced in. Calls are spelled out in place.

    Raises:
        RewriteFailedError: something failed and ``options.strict`` is set.
        DispatchTableError: the table of ``options`` is refused and ``options.strict`` is set.
    """
    tables = loaded_tables.of_compile(options.dispatch_table, strict=options.strict)
    for path, child, is_checkpointed in graphs(module):
        found = _read(child, path, tables, options, report, "replaced" if is_checkpointed else "any")
        for match, entry in zip(found.matches, found.entries, strict=True):
            decision = _decide(match, entry, found.known, report)
            entry.kernel = next(kernel.kernel_id for kernel in decision.ranking if _is_loaded(kernel, entry))
            entry.kernel = _left(match) if entry.kernel == INDUCTOR else entry.kernel
            if entry.kernel not in (INDUCTOR, match.found.source_kernel):
                entry.reasons.append(Reason("NOT_PROVEN", "a dry run proves and rewrites nothing"))


@dataclass
class _Found:
    """One graph and what was recognised in it; ``effects`` is None where it could not be read."""

    module: fx.GraphModule
    is_changed: bool
    effects: Effects | None
    matches: list[Match]
    entries: list[MatchReport]
    known: _Known


def _read(
    module: fx.GraphModule, path: str, tables: Sequence[Loaded], options: Options, report: GraphReport, scans: Scans
) -> _Found:
    reading = Reading.of(module, path, options, report, scans)
    effects, matches = reading.effects, reading.matches
    if options.assume_finite:
        matches = _assuming_finite(matches)
    matches = [with_own_kernel(match) for match in matches]
    entries = [MatchReport.of(match, path) for match in matches]
    report.matches.extend(entries)
    known = _Known(policy.current().with_locks(options.lock), tables, _fusions(matches, effects, options))
    return _Found(module, reading.is_changed, effects, matches, entries, known)


def _fusions(matches: list[Match], effects: Effects | None, options: Options) -> Mapping[fx.Node, Fusion]:
    """What could be computed together, where there are kernels that do such a thing."""

    def wanted(match: Match) -> set[str]:
        platforms = {"cuda", "rocm", "*"} if match.facts.device == "cuda" else {match.facts.device, "*"}
        able = (each for each in kernels(match.op).values() if each.fuses_ops and platforms & each.platforms)
        return {name for each in able for name in each.fuses_ops}

    try:
        return fusions(matches, effects, wanted) if effects is not None and any(map(wanted, matches)) else {}
    except Exception as error:  # noqa: BLE001 a fault of ours must not break a model; it is an event
        fail("FUSION_FAILED", "looking for what could be computed together", error, options)
        return {}


def _replace(found: _Found, options: Options, report: GraphReport) -> None:
    # Last to first: a match may read what an earlier one computes, and names the node that is still there.
    for match, entry in reversed(list(zip(found.matches, found.entries, strict=True))):
        try:
            kept = _why_not_kept(match, found.effects)
            if found.effects is not None:
                effects = found.effects
                found.known.overwritten.update(node for node in match.outputs if _is_written(match, effects, node))
            if kept:
                entry.kernel = _left(match)
                entry.reasons.append(
                    Reason("OVERWRITTEN_LATER", f"a kernel's backward pass may need what changes: {kept}")
                )
                continue
            _apply(found.module.graph, match, entry, options, report, found.known)
        except Exception as error:  # noqa: BLE001 a fault of ours must not break a model; it is an event
            fail("REWRITE_FAILED", f"{match.op} at {match.where} is left to Inductor", error, options)
            entry.kernel, entry.rewritten = INDUCTOR, False
            entry.reasons.append(Reason("REWRITE_FAILED", f"{type(error).__name__}: {error}"))


def _why_not_kept(match: Match, effects: Effects | None) -> str:
    """What a match reads that is overwritten later, where gradients are recorded; empty if nothing is."""
    return "" if effects is None else _overwritten(match, effects, match.inputs)


def _is_written(match: Match, effects: Effects, node: fx.Node) -> bool:
    """Whether a result must be a copy, for it is written to later, and its kernel's backward may need it or gives a view.

    PyTorch refuses to write with gradients to a view that was made without them.
    """
    if not grad_enabled(match.ambient):
        return any(grad_enabled(effects.ambient(writer)) for writer, _ in effects.writes_to(node))
    return bool(_overwritten(match, effects, [node]))


def _overwritten(match: Match, effects: Effects, nodes: Iterable[fx.Node]) -> str:
    nodes = (*nodes,)
    tensors = map(tensor_of, (*nodes, *match.inputs))
    if not grad_enabled(match.ambient) or not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return ""
    return effects.why_not_kept(nodes, max(match.outputs, key=effects.position.__getitem__))


def _assuming_finite(matches: list[Match]) -> list[Match]:
    """The matches for inputs without NaN and infinities; twins stay twins."""
    promised = {id(match): match.assuming_finite() for match in matches}
    return [
        found if match.prototype is None else replace(found, prototype=promised[id(match.prototype)])
        for match, found in ((match, promised[id(match)]) for match in matches)
    ]


@dataclass
class _Known:
    """What was decided, proven and emitted in one graph, by the kind of match (and kernel)."""

    policy: Policy
    tables: Sequence[Loaded] = field(default_factory=loaded_tables.active)
    fusions: Mapping[fx.Node, Fusion] = field(default_factory=dict)
    fused: dict[tuple[fx.Node, str], Match] = field(default_factory=dict)
    problems: dict[tuple[int, tuple[str, ...]], Problem] = field(default_factory=dict)
    decisions: dict[tuple[int, tuple[str, ...]], Decision] = field(default_factory=dict)
    verdicts: dict[tuple[int, str], Validation] = field(default_factory=dict)
    recipes: Recipes = field(default_factory=Recipes)
    overwritten: set[fx.Node] = field(default_factory=set)

    def problem(self, match: Match) -> Problem:
        """What a kernel is to be chosen for."""
        key = self.key(match)
        if key not in self.problems:
            context = of_match(match.kind, is_cuda_graph_capturing=inductor.captures_cuda_graphs(match.facts.device))
            context = replace(context, fusable=key[1])
            self.problems[key] = Problem(context, match.found.source_kernel, symbols=symbolic_sizes(match.kind))
        return self.problems[key]

    def key(self, match: Match) -> tuple[int, tuple[str, ...]]:
        """What is the same for equal matches: their kind, and what comes directly before them."""
        fusion = self.fusions.get(match.output)
        return id(match.kind), () if fusion is None else fusion.ops

    def decide(self, match: Match) -> Decision:
        """The kernel for a match."""
        key = self.key(match)
        if key not in self.decisions:
            self.decisions[key] = select(self.problem(match), self.policy, self.tables)
        return self.decisions[key]

    def subject(self, match: Match, kernel: KernelSpec) -> Match:
        """What a kernel replaces: the match, with those before it that the kernel computes along."""
        if not kernel.fuses_ops:
            return match
        key = (match.output, kernel.kernel_id)
        if key not in self.fused:
            self.fused[key] = self.fusions[match.output].of(kernel.fuses_ops)
        return self.fused[key]

    def prove(self, match: Match, kernel: KernelSpec) -> Validation:
        """Whether a kernel may replace a match."""
        assert kernel.call is not None, "leaving a match alone needs no proof"
        key = (id(match.kind), kernel.kernel_id)
        if key in self.verdicts:
            return replace(self.verdicts[key], origin="memory", seconds=0.0)
        proven = functools.partial(kernel.call, **kernel.validation_arguments)
        subject = match.kind
        if not kernel.limits_head_dim:
            subject = replace(subject, trial=replace(subject.trial, limited=frozenset()))
        store = Store("validation") if kernel.is_reproducible else None
        self.verdicts[key] = validate(subject, kernel, proven, store)
        return self.verdicts[key]


def _tune(matches: list[Match], effects: Effects, known: _Known, options: Options) -> None:
    """Measure what is not measured yet, each kind of match with its surroundings, while the budget lasts."""
    from lz_compile.compile import match_tuning

    deadline = time.perf_counter() + options.tune_budget_s
    for match in {known.key(match): match for match in reversed(matches)}.values():
        fusion = known.fusions.get(match.output)
        fusion = fusion if fusion is not None and fusion.ops else None
        try:
            problem = known.problem(match)
            is_decided = loaded_tables.covers(problem.context, problem.source_kernel, known.tables)
            if is_decided or not match_tuning.may_differ(problem.context):
                continue
            subject = match.kind if fusion is None else match
            tuned = match_tuning.tune_match(subject, effects, problem, known.policy, deadline, fusion)
            known.problems[known.key(match)] = tuned
        except Exception as error:  # noqa: BLE001 what cannot be measured is decided without, as ever
            fail("MEASUREMENT_FAILED", f"measuring {match.op} at {match.where}", error, options)


def _decide(match: Match, entry: MatchReport, known: _Known, report: GraphReport) -> Decision:
    with timed(report, "select"):
        decision = known.decide(match)
    entry.decide(decision, known.problem(match))
    for refused in (decision.refused_lock, decision.refused_table):
        if refused is not None:
            events.record(refused.code, f"{match.op} at {match.where}: {refused.message}")
            entry.reasons.append(refused)
    return decision


def _left(match: Match) -> str:
    """What computes a match that is left alone: a call of an op of ours selects a kernel by itself."""
    return INDUCTOR if match.found.source_kernel is None or not selects_itself(match) else match.found.source_kernel


def _is_loaded(kernel: KernelSpec, entry: MatchReport) -> bool:
    """Whether a kernel's library can be imported; why not is noted."""
    missing = kernel.load()
    if missing is not None:
        entry.reasons.append(missing)
    return missing is None


def _apply(
    graph: fx.Graph, match: Match, entry: MatchReport, options: Options, report: GraphReport, known: _Known
) -> None:
    """Rewrite with the best kernel that proves to be right; each that does not is quarantined."""
    if not any(node.users for node in match.outputs):
        entry.kernel = INDUCTOR
        entry.reasons.append(Reason("PART_OF_ANOTHER", "a rewrite of what it is part of made it superfluous"))
        return
    decision = _decide(match, entry, known, report)
    if match.output in known.fusions:
        entry.reasons.extend(known.fusions[match.output].refused)
    if decision.refused_lock is not None and options.strict:
        raise RewriteFailedError(str(decision.refused_lock))
    for kernel in decision.ranking:
        entry.kernel = kernel.kernel_id
        if not _is_loaded(kernel, entry):
            if options.strict:
                raise RewriteFailedError(str(entry.reasons[-1]))
            continue
        if kernel.call is None:
            entry.kernel = _left(match)
            if entry.kernel != INDUCTOR:
                text = f"the call stays as it is, and selects {entry.kernel} when it is traced"
                entry.reasons.append(Reason("SELECTS_ITSELF", text))
            elif all(reason.code in _BESIDE for reason in entry.reasons):
                text = "Inductor's own code is expected to be the fastest"
                entry.reasons.append(Reason("LEFT_TO_INDUCTOR", text))
            return
        if kernel.kernel_id == match.found.source_kernel:
            entry.reasons.append(Reason("ALREADY_THIS_KERNEL", f"the source calls {match.found.source_kernel} itself"))
            return
        if _settles(graph, match, kernel, entry, options, report, known):
            return
    entry.kernel = _left(match)


def _settles(
    graph: fx.Graph,
    match: Match,
    kernel: KernelSpec,
    entry: MatchReport,
    options: Options,
    report: GraphReport,
    known: _Known,
) -> bool:
    """As :func:`_replaced`; a kernel that cannot be proven, or put here, makes way for the next one.

    Raises:
        RewriteFailedError: it cannot, and ``options.strict`` is set.
    """
    try:
        return _replaced(graph, match, kernel, entry, options, report, known)
    except RewriteFailedError:
        raise
    except Exception as error:  # noqa: BLE001 a fault of ours must not break a model; it is an event
        fail("REWRITE_FAILED", f"{kernel.kernel_id} for {match.op} at {match.where} is no candidate", error, options)
        entry.validation, text = None, f"{kernel.kernel_id}: {type(error).__name__}: {error}"
        entry.reasons.append(Reason("REWRITE_FAILED", text))
        return False


def _replaced(
    graph: fx.Graph,
    match: Match,
    kernel: KernelSpec,
    entry: MatchReport,
    options: Options,
    report: GraphReport,
    known: _Known,
) -> bool:
    """Whether a kernel is the last one to try: it was put in, or nothing may be; one that proves wrong is quarantined."""
    subject = known.subject(match, kernel)
    with timed(report, "validate"):
        verdict = known.prove(subject, kernel)
    entry.validation = {"kernel": kernel.kernel_id, **verdict.to_dict()}
    if verdict.ok and not _holds(match):
        entry.kernel, entry.validation = INDUCTOR, None
        entry.reasons.append(Reason("VALUE_NOT_GUARDED", "its mask is a buffer, and nothing would notice a change"))
        return True
    if verdict.ok:
        assert kernel.call is not None, "what has no call is never proven"
        with timed(report, "rewrite"):
            splice(graph, subject, kernel.call, known.recipes, overwritten=known.overwritten)
        entry.rewritten = True
        if isinstance(subject.emitter, FusedEmitter):
            erase_unread(graph, subject.read)
            entry.reasons.append(Reason("FUSED", f"{kernel.kernel_id} computes {subject.emitter} along"))
        return True
    text = f"{kernel.kernel_id} for {match.op} at {match.where} is quarantined: {verdict.reason}"
    events.record("VALIDATION_FAILED", text)
    entry.reasons.append(Reason("VALIDATION_FAILED", f"{kernel.kernel_id}: {verdict.reason}"))
    if options.strict:
        raise RewriteFailedError(text)
    return False


def _holds(match: Match) -> bool:
    """Whether what was read off buffers stays true as long as the compiled code runs: guards see to that."""
    return not match.found.buffers or inductor.guard_values(match.found.buffers)
