"""What telemetry costs those who do not ask for it: nothing that can be measured, in calls and in compiles, is the claim.

Three ways to live with it take turns, each in a process of its own: ``lz.instrument`` never called, called with the API of
OpenTelemetry alone (no SDK, as where an exporter is switched off), and called with the SDK, whose spans go to memory. Timed
are an eager call and a compiled call that are decided, a span around nothing, and the compile of a small model.

    python -m benchmarks.telemetry [--rounds 7] [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import nn

import lz_compile as lz
from benchmarks.apart import run_child
from benchmarks.harness import Quartiles
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.ground import telemetry

STATES = ("never", "api", "sdk")
#: More than that part is a cost; less is chance.
_CLOSE = 0.05
_BLOCKS = 25


class Layered(nn.Module):
    """Two layers with attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of ``[batch, length, 32]``, the same shape."""
        for project in self.projections:
            query, key, value = project(x).chunk(3, -1)
            x = x + (query @ key.mT).softmax(-1) @ value
        return x


def instrument(state: str) -> None:
    """Do with telemetry what is measured."""
    if state == "api":
        lz.instrument()
    if state == "sdk":
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        spans = TracerProvider()
        spans.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
        lz.instrument(spans, MeterProvider([InMemoryMetricReader()]))


def span() -> None:
    """A span around nothing."""
    with telemetry.span("measure"):
        pass


def best_ns(call: Callable[[], Any], calls: int) -> float:
    """What a call takes, the best of several blocks."""
    found = []
    for _ in range(_BLOCKS):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        found.append((time.perf_counter_ns() - start) / calls)
    return min(found)


def child(state: str, calls: int) -> dict[str, Any]:
    """Measure one way, in this process."""
    torch.manual_seed(0)
    instrument(state)
    query, x, model = torch.zeros(1, 1, 1, 8), torch.randn(1, 16, 32), Layered()
    with torch.no_grad():
        lz.attention(query, query, query)
        torch.compile(nn.Linear(4, 4), backend="layerzero")(torch.zeros(1, 4))  # what a first compile imports
        start = time.perf_counter()
        compiled = torch.compile(model, backend="layerzero")
        compiled(x)
        compile_s = time.perf_counter() - start
        return {
            "eager_ns": best_ns(lambda: lz.attention(query, query, query), calls),
            "compiled_ns": best_ns(lambda: compiled(x), calls),
            "span_ns": best_ns(span, calls),
            "compile_s": compile_s,
            "imported": sum(name.partition(".")[0] == "opentelemetry" for name in sys.modules),
        }


def table(rows: Sequence[Mapping[str, Any]], is_quick: bool) -> Table:
    """A line for each way."""
    title = "calls that are decided, a span around nothing, and a compile, with telemetry off and on"
    columns = ["lz.instrument", "eager ns", "compiled ns", "span ns", "compile s", "modules of OpenTelemetry", "claim"]
    found = table_of(title, columns, left=("lz.instrument", "claim"))
    for row in rows:
        medians = {name: row[name]["median"] for name in ("eager_ns", "compiled_ns", "span_ns", "compile_s")}
        claim = "none imported" if row["case"]["state"] == "never" else "calls cost the same"
        verdict = "" if is_quick else "holds" if _holds(row, rows[0]) else "FAILS"
        numbers = (f"{medians[name]:.0f}" for name in ("eager_ns", "compiled_ns", "span_ns"))
        told = f"{claim} {verdict}".strip()
        found.add_row(row["case"]["state"], *numbers, f"{medians['compile_s']:.2f}", str(row["imported"]), told)
    return found


def _holds(row: Mapping[str, Any], never: Mapping[str, Any]) -> bool:
    if row is never:
        return bool(row["imported"] == 0)
    ratios = [row[name]["median"] / never[name]["median"] for name in ("eager_ns", "compiled_ns")]
    return bool(max(ratios) < 1 + _CLOSE)


def main() -> None:
    """Measure all ways in turns, and publish; or, as a child, one of them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, help="7 by default")
    options.add_argument("--quick", action="store_true", help="few calls and rounds; no published result")
    options.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    settings = options.parse_args()
    if settings.child:
        print(json.dumps(child(**settings.child)))
        return
    rounds, calls = settings.rounds or (1 if settings.quick else 7), 100 if settings.quick else 2_000
    publication = Publication("telemetry", torch.device("cpu"), is_quick=settings.quick, rounds=rounds, calls=calls)
    runs: dict[str, list[dict[str, Any]]] = {state: [] for state in STATES}
    run_child("telemetry", {}, state="never", calls=1)  # fills the caches of compiled code
    for _ in range(rounds):
        for state in STATES:
            runs[state].append(run_child("telemetry", {}, state=state, calls=calls))
    for state, found in runs.items():
        names = ("eager_ns", "compiled_ns", "span_ns", "compile_s")
        timed = {name: rounded(Quartiles.of([run[name] for run in found])) for name in names}
        publication.add({"case": {"state": state}, **timed, "imported": found[0]["imported"], "runs": found})
    publication.show(table(publication.rows, settings.quick))


if __name__ == "__main__":
    main()
