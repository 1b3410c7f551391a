"""What operators see: spans and metrics by OpenTelemetry's own in-memory exporters, and the log as JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lz_compile
from lz_compile import IntegrationError
from lz_compile.ground import events, telemetry
from lz_compile.ground.json_logs import JsonFormatter, log_as_json

metrics_sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="needs opentelemetry-sdk")
export = pytest.importorskip("opentelemetry.sdk.metrics.export")
trace_sdk = pytest.importorskip("opentelemetry.sdk.trace")
trace_export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

pytestmark = pytest.mark.usefixtures("sdpa_first", "no_code_generation")
ROOT = Path(__file__).resolve().parent.parent


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


def returning_weights(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (query @ key.mT).softmax(-1)
    return weights @ value, weights


def operands(length: int = 17) -> list[Tensor]:
    return [torch.randn(2, 3, length, 16) for _ in range(3)]


@pytest.fixture
def spans():
    """Ends with no tracer; gives what was exported."""
    exporter = memory.InMemorySpanExporter()
    provider = trace_sdk.TracerProvider()
    provider.add_span_processor(trace_export.SimpleSpanProcessor(exporter))
    lz_compile.instrument(provider, metrics_sdk.MeterProvider())
    yield exporter
    telemetry.trace_with(None, lambda error: None)


def collected(reader: Any) -> dict[str, dict[tuple[str, ...], float]]:
    """The metrics by name and the values of their labels."""
    data = reader.get_metrics_data()
    return {
        metric.name: {tuple(point.attributes.values()): point.value for point in metric.data.data_points}
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_a_compile_is_a_span_with_what_was_recognised_proven_and_why(spans):
    torch.compile(attention, backend="layerzero")(*operands())
    found = {span.name: span for span in spans.get_finished_spans()}
    assert {"lz_compile.compile", "lz_compile.recognise", "lz_compile.prove"} <= set(found)
    whole, proof = found["lz_compile.compile"], found["lz_compile.prove"]
    assert whole.attributes["lz_compile.graph_id"] == lz_compile.reports()[-1].graph_id
    assert whole.attributes["lz_compile.rewritten"] == 1
    assert proof.parent.span_id == whole.context.span_id
    assert dict(proof.attributes)["lz_compile.kernel"] == "torch.sdpa"
    assert proof.attributes["lz_compile.is_proven"] is True
    (match,) = whole.events
    assert (match.name, match.attributes["lz_compile.operation"]) == ("match", "attention")
    assert match.attributes["lz_compile.is_rewritten"] is True


def test_measuring_is_a_span_with_the_kernels(spans):
    lz_compile.tune("norm.rms", sizes={"num_rows": 8, "hidden_size": 16}, samples=1, resume=False)
    (span,) = [each for each in spans.get_finished_spans() if each.name == "lz_compile.measure"]
    assert span.attributes["lz_compile.operation"] == "norm.rms"
    assert "inductor" in span.attributes["lz_compile.kernels"]


def test_metrics_count_matches_near_misses_recompiles_events_and_failures():
    reader = export.InMemoryMetricReader()
    provider = metrics_sdk.MeterProvider([reader])
    lz_compile.instrument(trace_sdk.TracerProvider(), provider)
    lz_compile.instrument(trace_sdk.TracerProvider(), provider)  # the same instruments once
    try:
        before = collected(reader) if reader.get_metrics_data() else {}
        compiled = torch.compile(attention, backend="layerzero", dynamic=False)
        compiled(*operands())
        compiled(*operands(19))
        torch.compile(returning_weights, backend="layerzero")(*operands())
        with events.collect():
            events.record("A_CODE_OF_A_TEST", "it happened")
        now = collected(reader)
    finally:
        telemetry.trace_with(None, lambda error: None)

    def grown(name: str, *labels: str) -> float:
        return now[f"lz_compile.{name}"][labels] - before.get(f"lz_compile.{name}", {}).get(labels, 0)

    assert grown("matches", "attention") == 2
    assert grown("rewrites", "torch.sdpa", "attention") == 2
    assert grown("near_misses", "attention", "INTERIOR_USED") == 1
    assert (grown("graphs", "compile"), grown("graphs", "recompile")) == (2, 1)
    assert grown("events", "A_CODE_OF_A_TEST") == 1


def test_metrics_tell_of_the_decision_cache_and_of_served_models():
    reader = export.InMemoryMetricReader()
    lz_compile.instrument(None, metrics_sdk.MeterProvider([reader]))
    telemetry.trace_with(None, lambda error: None)
    query = torch.randn(1, 2, 8, 16)
    for _ in range(3):
        lz_compile.attention(query, query, query)
    with lz_compile.serve(torch.nn.Linear(4, 4).eval()) as served:
        served(torch.randn(2, 4))
        found = collected(reader)
        assert sum(found["lz_compile.serve.calls"].values()) >= 1
        assert "lz_compile.serve.waiting" in found
    assert found["lz_compile.decision_cache.hits"][()] >= 2
    assert found["lz_compile.decision_cache.entries"][()] >= 1


def test_a_tracer_that_fails_stops_no_compile_and_is_an_event():
    class Broken:
        def start_as_current_span(self, *_: Any, **__: Any) -> Any:
            raise ConnectionError("no collector")

    from lz_compile.tools import telemetry as instruments

    telemetry.trace_with(Broken(), instruments._failed)
    args = operands()
    with events.collect() as happened:
        torch.testing.assert_close(torch.compile(attention, backend="layerzero")(*args), attention(*args))
    assert [event.code for event in happened if event.code == "TELEMETRY_FAILED"] == ["TELEMETRY_FAILED"]
    with telemetry.span("anything") as span:
        span.set(a=1)


def test_an_error_inside_of_a_span_is_the_same_error_and_is_recorded(spans):
    with pytest.raises(ZeroDivisionError), telemetry.span("broken"):
        1 / 0  # noqa: B018 it is to raise
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert span.events[0].attributes["exception.type"] == "ZeroDivisionError"


def test_a_process_that_asks_for_nothing_imports_no_opentelemetry_and_says_nothing_and_an_error_says_what_to_install(
    tmp_path,
):
    code = """
import sys, torch, lz_compile as lz
from lz_compile.lowering import inductor
inductor.compile_graph = lambda graph, *_, **__: graph.forward  # the subject is what is said, not Inductor's code
def attention(x):
    return (x @ x.mT).softmax(-1) @ x
def with_weights(x):
    weights = (x @ x.mT).softmax(-1)
    return weights @ x, weights
lz.prefer("torch.sdpa")
for function in (attention, with_weights):
    torch.compile(function, backend="layerzero")(torch.randn(1, 2, 8, 16))
assert [[len(report.matches), len(report.near_misses)] for report in lz.reports()] == [[1, 0], [0, 1]]
assert not [name for name in sys.modules if name.startswith("opentelemetry")], "nobody asked for it"
sys.modules["opentelemetry"] = None
try:
    lz.instrument()
except lz.IntegrationError as error:
    print(error)
"""
    given = {**os.environ, "PYTHONPATH": str(ROOT), "LAYERZERO_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]  # on a CUDA build
    assert not said, "no logs were asked for"
    assert "pip install 'lz-compile[otel]'" in done.stdout
    assert issubclass(IntegrationError, ImportError)


def test_a_decided_call_counts_nothing(monkeypatch):
    compiled = torch.compile(attention, backend="layerzero")
    args = operands()
    compiled(*args)
    lz_compile.attention(*args)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a decided call pays for no telemetry")

    for name in ("count", "span"):
        monkeypatch.setattr(telemetry, name, refuse)
    compiled(*args)
    lz_compile.attention(*args)


def test_the_log_is_lines_of_json_with_codes_and_selections():
    stream, logger = io.StringIO(), logging.getLogger("lz_compile")
    level = logger.level
    try:
        log_as_json(io.StringIO())
        log_as_json(stream)  # in the place of the other one
        torch.compile(attention, backend="layerzero")(*operands())
        events.record("A_CODE", "something\nhappened", ValueError("because"))
    finally:
        for handler in [each for each in logger.handlers if isinstance(each.formatter, JsonFormatter)]:
            logger.removeHandler(handler)
        logger.setLevel(level)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (selection,) = [line for line in lines if line.get("operation") == "attention"]
    assert (selection["kernel"], selection["is_rewritten"]) == ("torch.sdpa", True)
    (event,) = [line for line in lines if line.get("code") == "A_CODE"]
    assert (event["level"], event["error"]) == ("WARNING", "ValueError")
    assert event["message"] == "[A_CODE] something\nhappened: ValueError: because"
