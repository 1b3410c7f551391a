"""What became of a graph, told to operators: its span, counts and the log."""

from __future__ import annotations

import logging

from lz_compile.ground import events, telemetry
from lz_compile.lowering import dynamo
from lz_compile.report.report import GraphReport
from lz_compile.runtime.policy import policy


def tell(span: telemetry.Span, report: GraphReport) -> None:
    """What became of a graph, for operators."""
    rewritten = sum(match.rewritten for match in report.matches)
    span.set(matches=len(report.matches), rewritten=rewritten, near_misses=len(report.near_misses))
    for match in report.matches:
        codes = [reason.code for reason in match.reasons]
        facts = {"operation": match.op, "kernel": match.kernel, "is_rewritten": match.rewritten, "reasons": codes}
        span.note("match", **facts, why=match.why, where=match.where, module=match.module)
    for miss in report.near_misses:
        span.note("near miss", operation=miss.op, reason=miss.reason.code, where=miss.where, module=miss.module)


def count(report: GraphReport) -> None:
    """Count and log what a graph's report says."""
    telemetry.count("graphs", kind="recompile" if dynamo.is_recompile() else "compile")
    level = logging.WARNING if policy.current().settings.log_selections else logging.INFO
    for match in report.matches:
        state = "rewritten" if match.rewritten else "left as it is"
        facts = {"operation": match.op, "kernel": match.kernel, "is_rewritten": match.rewritten, "why": match.why}
        facts |= {"where": match.where, "module": match.module, "graph_id": report.graph_id}
        fields = {"lz_compile": {**facts, "reasons": [reason.code for reason in match.reasons]}}
        text = "%s at %s: %s, %s (%s)"
        events.logger.log(level, text, match.op, match.where, match.kernel, state, match.why, extra=fields)
        telemetry.count("matches", operation=match.op)
        dynamo.count(match.op)
        if match.rewritten:
            dynamo.count(f"{match.op}.rewritten")
            telemetry.count("rewrites", operation=match.op, kernel=match.kernel)
    for miss in report.near_misses:
        fields = {"lz_compile": {**miss.to_dict(), "graph_id": report.graph_id}}
        events.logger.info("%s at %s: near miss, %s; %s", miss.op, miss.where, miss.reason, miss.edit, extra=fields)
        telemetry.count("near misses", operation=miss.op, reason=miss.reason.code)
        dynamo.count(f"{miss.op}.near_miss")
