"""The stages between a Dynamo graph and Inductor, for one graph and every graph nested in it."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from lz_compile.errors import LayerZeroError, RewriteFailedError
from lz_compile.options import Options
from lz_compile.passes.effects import Effects
from lz_compile.passes.inline import Inlined, inline
from lz_compile.passes.match import Match, NearMiss
from lz_compile.passes.patterns import recognisers
from lz_compile.passes.rewrite import splice
from lz_compile.passes.validate import validate
from lz_compile.reasons import Reason
from lz_compile.runtime import events
from lz_compile.runtime.report import GraphReport, MatchReport, MissReport
from lz_compile.runtime.select import INDUCTOR, select
from lz_compile.runtime.store import Store


def rewrite(module: fx.GraphModule, options: Options, report: GraphReport) -> None:
    """Inline, recognise, choose, prove and splice in place, in ``module`` and in the bodies of its higher-order operators.

    Whatever fails leaves the subgraph that it concerns untouched and is an event in ``report``.

    Raises:
        RewriteFailedError: something failed and ``options.strict`` is set.
    """
    for path, graph_module in _graphs(module):
        before = len(report.matches)
        is_inlined = _inline(graph_module.graph, options, report)
        _rewrite_graph(graph_module.graph, path, options, report)
        if is_inlined or any(match.rewritten for match in report.matches[before:]):
            graph_module.graph.lint()
            graph_module.recompile()


def _graphs(module: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """The module and the graph modules that its higher-order operators call, at any depth."""
    for path, child in module.named_modules():
        if isinstance(child, fx.GraphModule):
            yield path, child


def _rewrite_graph(graph: fx.Graph, path: str, options: Options, report: GraphReport) -> None:
    matches = _recognise(graph, options, report)
    if options.assume_finite:
        matches = [match.assuming_finite() for match in matches]
    entries = [MatchReport(op=m.op, where=m.where, graph=path, attributes=m.attributes.to_dict()) for m in matches]
    report.matches.extend(entries)
    # Last to first: a match may read what an earlier one computes, and names the node that is still there.
    for match, entry in reversed(list(zip(matches, entries, strict=True))):
        try:
            _apply(graph, match, entry, options, report)
        except Exception as error:  # noqa: BLE001 a fault of ours must not break a model; it is an event
            _fail("REWRITE_FAILED", f"{match.op} at {match.where} is left to Inductor", error, options)
            entry.kernel, entry.rewritten = INDUCTOR, False
            entry.reasons.append(Reason("REWRITE_FAILED", f"{type(error).__name__}: {error}"))


def _inline(graph: fx.Graph, options: Options, report: GraphReport) -> bool:
    """Spell out calls that hide an attention; whether there was one."""
    with _timed(report, "inline"):
        found = inline(graph, strict=options.strict)
    report.near_misses.extend(MissReport.of(miss) for miss in found if isinstance(miss, NearMiss))
    return any(isinstance(each, Inlined) for each in found)


def _recognise(graph: fx.Graph, options: Options, report: GraphReport) -> list[Match]:
    matches: list[Match] = []
    with _timed(report, "recognise"):
        for op, recognise in recognisers().items():
            try:
                for found in recognise(graph, Effects(graph)):
                    if isinstance(found, NearMiss):
                        report.near_misses.append(MissReport.of(found))
                    else:
                        matches.append(found)
            except Exception as error:  # noqa: BLE001 as above
                _fail("RECOGNISER_FAILED", f"recognising {op}", error, options)
    return matches


def _apply(graph: fx.Graph, match: Match, entry: MatchReport, options: Options, report: GraphReport) -> None:
    """Rewrite with the best kernel that proves to be right; each that does not is quarantined."""
    with _timed(report, "select"):
        decision = select(match, options.lock)
    entry.decide(decision)
    if decision.refused_lock is not None:
        events.record(decision.refused_lock.code, f"{match.op} at {match.where}: {decision.refused_lock.message}")
        entry.reasons.append(decision.refused_lock)
        if options.strict:
            raise RewriteFailedError(str(decision.refused_lock))
    for kernel in decision.ranking:
        entry.kernel = kernel.kernel_id
        if kernel.call is None:
            if all(reason.code == "LOCK_NOT_POSSIBLE" for reason in entry.reasons):
                text = "Inductor's own code is expected to be the fastest"
                entry.reasons.append(Reason("LEFT_TO_INDUCTOR", text))
            return
        if kernel.kernel_id == match.source_kernel:
            entry.reasons.append(Reason("ALREADY_THIS_KERNEL", f"the source calls {match.source_kernel} itself"))
            return
        with _timed(report, "validate"):
            proven = functools.partial(kernel.call, **kernel.validation_arguments)
            verdict = validate(match, kernel.kernel_id, proven, Store("validation"))
        entry.validation = verdict.to_dict()
        if verdict.ok:
            with _timed(report, "rewrite"):
                splice(graph, match, kernel.call)
            entry.rewritten = True
            return
        text = f"{kernel.kernel_id} for {match.op} at {match.where} is quarantined: {verdict.reason}"
        events.record("VALIDATION_FAILED", text)
        entry.reasons.append(Reason("VALIDATION_FAILED", f"{kernel.kernel_id}: {verdict.reason}"))
        if options.strict:
            raise RewriteFailedError(text)


def _fail(code: str, text: str, error: Exception, options: Options) -> None:
    if isinstance(error, LayerZeroError):
        raise error
    events.record(code, text, error)
    if options.strict:
        raise RewriteFailedError(f"{text}: {type(error).__name__}: {error}") from error


@contextmanager
def _timed(report: GraphReport, stage: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[stage] = report.seconds.get(stage, 0.0) + time.perf_counter() - start
