"""One graph from Dynamo to Inductor: the stages, their failure and what is told of them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from lz_compile.api import eager as _eager  # noqa: F401 it answers what kernels ask of higher rooms (ground/hooks.py)
from lz_compile.compile import pipeline, row_bits, telling
from lz_compile.compile.options import Options, split
from lz_compile.compile.verification import keep
from lz_compile.errors import USER_ERRORS, RewriteFailedError
from lz_compile.ground import events, telemetry
from lz_compile.ground.fingerprint import source_hash
from lz_compile.ground.isolation import isolated
from lz_compile.lowering import configured, dynamo, frames, inductor
from lz_compile.lowering import (
    step_loop as _step_loop,  # noqa: F401 it looks through what Inductor compiles, and defines its operator
)
from lz_compile.passes.graph.gradients import note_as_handed_in
from lz_compile.passes.graph.places import read_by_place
from lz_compile.passes.graph.snapshot import Snapshot
from lz_compile.passes.graph.view import known_tensor
from lz_compile.report.dump import Dump
from lz_compile.report.report import GraphReport, new_report
from lz_compile.runtime.policy import policy

Runner = Callable[[fx.GraphModule, Sequence[Any], GraphReport], Callable[..., Any]]
Keep = Callable[[Callable[..., Any], GraphReport], None]


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    keep: Keep | None = None,
) -> Callable[..., Any]:
    """Rewrite ``module`` in place and compile it; on failure of the rewritten graph, compile the original one.

    ``keep`` is handed what was compiled, and its report.
    """
    ours, rest = split(options, mode)
    dynamo.drop_fixed_guards()
    with configured.compiling_with(configured.config_of(mode, rest)):
        return process(module, inputs, ours, inductor_runner(mode, rest), keep)


def inductor_runner(mode: str | None, options: dict[str, Any]) -> Runner:
    """Compiles a rewritten graph with Inductor, under its mode and options; the decisions are part of its cache keys."""
    config = configured.config_of(mode, options)
    alike = row_bits.is_wanted(policy.current())
    hastens = policy.current().settings.enabled and not alike  # rows of a product in float32 have other bits together

    def run(graph: fx.GraphModule, inputs: Sequence[Any], report: GraphReport) -> Callable[..., Any]:
        begins = [str(known_tensor(node).storage_offset()) for node in read_by_place(graph.graph)]
        key = _cache_key(report, begins)
        return inductor.compile_graph(graph, inputs, config, key, rounds_alike=alike, hastens=hastens)

    return run


def process(
    module: fx.GraphModule, inputs: Sequence[Any], options: Options, run: Runner, keep: Keep | None = None
) -> Callable[..., Any]:
    """Rewrite ``module`` and pass it to ``run``; report, dump and count what happened."""
    report = new_report()
    with telemetry.span("compile", graph_id=report.graph_id, is_recompile=dynamo.is_recompile()) as span:
        compiled = _process(module, inputs, options, run, report)
        telling.tell(span, report)
        if keep is not None:
            keep(compiled, report)
        return compiled


def _process(
    module: fx.GraphModule, inputs: Sequence[Any], options: Options, run: Runner, report: GraphReport
) -> Callable[..., Any]:
    dump = Dump(options.dump, report.graph_id)
    with events.collect() as happened:
        try:
            note_as_handed_in(module.graph, inputs)
            frames.guard_offsets(read_by_place(module.graph))
            snapshot = Snapshot(module)
            original = None if options.verify == "off" else keep(module)
            unfolded = _rewrite(module, options, report, dump, snapshot)
            row_bits.tell_last_compile(policy.current())
            start = time.perf_counter()
            earlier = [
                _Earlier("the graph with regions", "the one without them", unfolded, _unmark_layers),
                _Earlier("the rewritten graph", "the original one", snapshot, _as_it_was),
            ]
            try:
                changed = [each for each in earlier if each.snapshot.differs()]
                compiled = _run(run, module, inputs, report, options, changed)
                if original is None or not (snapshot.differs() or any(match.rewritten for match in report.matches)):
                    return compiled
                return original.verifying(compiled, report, options)
            finally:
                report.seconds["compile"] = time.perf_counter() - start
        finally:
            report.events.extend(happened)
            dump.report(report)
            telling.count(report)


@dataclass(frozen=True)
class _Earlier:
    """A graph as it was, compiled where what became of it does not compile."""

    failed: str
    compiled: str
    snapshot: Snapshot
    unmark: Callable[[GraphReport], None]


def _run(
    run: Runner,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    report: GraphReport,
    options: Options,
    earlier: Sequence[_Earlier],
) -> Callable[..., Any]:
    """Compile a graph, or the latest of those before it that does compile."""
    try:
        return run(module, inputs, report)
    except frames.RESTARTS:
        raise
    except Exception as error:
        if not earlier:
            raise
        last, text = earlier[0], f"compiling {earlier[0].failed}"
        if options.strict:
            raise RewriteFailedError(f"{text}: {type(error).__name__}: {error}") from error
        events.record("COMPILE_FAILED", f"{text}; {last.compiled} is tried", error)
        last.snapshot.restore()
        last.unmark(report)
    return _run(run, module, inputs, report, options, earlier[1:])


def _rewrite(module: fx.GraphModule, options: Options, report: GraphReport, dump: Dump, snapshot: Snapshot) -> Snapshot:
    """Rewrite in place; whatever fails here leaves the graph as it was. The graph as it is without regions."""
    unfolded = snapshot
    try:
        dump.graph("before", module)
        with isolated() as outside, outside.entered():  # example values are computed, which hooks and modes would see
            pipeline.rewrite(module, options, report)
            unfolded = Snapshot(module)
            pipeline.fold(module, options, report)
        dump.graph("after", module)
    except USER_ERRORS:
        raise
    except Exception as error:
        text = "rewriting the graph"
        if options.strict:
            raise RewriteFailedError(f"{text}: {type(error).__name__}: {error}") from error
        events.record("REWRITE_FAILED", f"{text}; the original one is compiled", error)
        snapshot.restore()
        _as_it_was(report)
    return unfolded


def _as_it_was(report: GraphReport) -> None:
    row_bits.tell_original(policy.current())
    for match in report.matches:
        match.rewritten, match.kernel = False, "inductor"
    for loop in report.loops:
        loop.rolled = False
    _unmark_layers(report)


def _unmark_layers(report: GraphReport) -> None:
    for layers in report.layers:
        layers.folded = False


def _cache_key(report: GraphReport, begins: Sequence[str] = ()) -> str:
    """Our source, our decisions, and where inputs begin that are read by place: what Inductor's caches must not confuse."""
    decisions = [(match.op, match.kernel, match.rewritten, match.attributes) for match in report.matches]
    told = json.dumps([decisions, *begins], sort_keys=True, default=str)
    return hashlib.sha256((source_hash() + told).encode()).hexdigest()
