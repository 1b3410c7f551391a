"""What layerzero adds to a compile.

Recognising and proving take under 10 % of Inductor's own time when cold and under 2 % when warm, is the claim; everything
that is ours is shown beside it.

Every compile runs in a process of its own. Cold means that the directories of Inductor's and of layerzero's caches are
empty, warm that the process before filled them. "Ours" is everything between Dynamo's call of the backend and its
return, without Inductor: recognition, selection, validation, rewriting, and what lies between those stages.

    python -m benchmarks.compile_time [--models llama bert] [--layers 12] [--repeats 3] [--quick]
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import lz_compile
from benchmarks.apart import fresh_caches, measure_models, run_child
from benchmarks.arguments import parse_models
from benchmarks.harness import INDUCTOR, LAYERZERO, Quartiles
from benchmarks.publish import rounded, table_of
from benchmarks.shapes import Size, build
from lz_compile.backend import layerzero

Measured = dict[str, Any]
_WHOLES = ("import_s", "total_s", "inductor_s", "ours_s")
LIMITS = {"cold": 0.10, "warm": 0.02}


def compile_once(backend: str, name: str, size: Mapping[str, int]) -> Measured:
    """Compile in this process, and run once: seconds by part.

    ``import_s`` is the import of layerzero's modules beyond those that Inductor needs too.
    """
    importlib.import_module("torch._inductor.compile_fx")
    start = time.perf_counter()
    importlib.import_module("lz_compile.compile.compiler")
    import_s = time.perf_counter() - start
    model, inputs = build(name, Size.of(size))
    timed, backend_s = _timed(backend)
    compiled = torch.compile(model, backend=timed, dynamic=False)
    with torch.no_grad():
        start = time.perf_counter()
        compiled(**inputs)
        first_call_s = time.perf_counter() - start
        start = time.perf_counter()
        compiled(**inputs)
        total_s = first_call_s - (time.perf_counter() - start)
    report = lz_compile.Report(lz_compile.reports())
    inductor_s = sum(backend_s) if backend == INDUCTOR else sum(graph.seconds["compile"] for graph in report.graphs)
    return {
        "import_s": import_s,
        "total_s": total_s,
        "inductor_s": inductor_s,
        "ours_s": sum(backend_s) - inductor_s,
        **{f"{stage}_s": sum(graph.seconds.get(stage, 0.0) for graph in report.graphs) for stage in _stages(report)},
        "graphs": len(backend_s),
        "matches": len(report.matches),
        "rewritten": sum(match.rewritten for match in report.matches),
    }


def _stages(report: lz_compile.Report) -> list[str]:
    stages = dict.fromkeys(stage for graph in report.graphs for stage in graph.seconds)
    return [stage for stage in stages if stage != "compile"]


def _timed(name: str) -> tuple[Callable[..., Any], list[float]]:
    """A backend, and the list to which it adds the seconds of each call."""
    backend = layerzero if name == LAYERZERO else torch._dynamo.lookup_backend(name)
    # A kernel is locked, so that proving and rewriting are paid for as well; at this length Inductor might be chosen.
    options: dict[str, Any] = {"options": {"layerzero.lock": {"attention": "lz.blocked"}}} if name == LAYERZERO else {}
    seconds: list[float] = []

    def timed(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        start = time.perf_counter()
        try:
            return backend(module, inputs, **options)
        finally:
            seconds.append(time.perf_counter() - start)

    return timed, seconds


def cold_and_warm(backend: str, name: str, size: Mapping[str, int]) -> dict[str, Measured]:
    """The same compile in two processes, the first with empty caches."""
    with fresh_caches() as caches:
        return {heat: run_child("compile_time", caches, backend=backend, name=name, size=size) for heat in LIMITS}


def run_case(name: str, size: Mapping[str, int], repeats: int) -> Iterator[dict[str, Any]]:
    """Measure a model with both backends in turns: a row for each state of the caches."""
    runs: dict[tuple[str, str], list[Measured]] = {}
    for _ in range(repeats):
        for backend in (INDUCTOR, LAYERZERO):
            for heat, measured in cold_and_warm(backend, name, size).items():
                runs.setdefault((heat, backend), []).append(measured)
    for heat in LIMITS:
        theirs, ours = runs[heat, INDUCTOR], runs[heat, LAYERZERO]
        row: dict[str, Any] = {
            "case": {"model": name, "caches": heat},
            **{f"inductor_{key}": _quartiles(theirs, key) for key in ("total_s", "inductor_s")},
            **{key: _quartiles(ours, key) for key in ours[0]},
            "stages": [key.removesuffix("_s") for key in ours[0] if key.endswith("_s") and key not in _WHOLES],
            "overhead": rounded(Quartiles.of([_claimed_s(run) / run["inductor_s"] for run in ours])),
            "whole_overhead": rounded(Quartiles.of([run["ours_s"] / run["inductor_s"] for run in ours])),
            "runs": {INDUCTOR: theirs, LAYERZERO: ours},
        }
        shares = (
            f"{row['overhead']['median']:.1%} recognising and proving, {row['whole_overhead']['median']:.1%} in all"
        )
        print(name, heat, f"{shares}, of Inductor's own time", sep=" | ", flush=True)
        yield row


def _claimed_s(run: Measured) -> float:
    """What the claim is about: reading the graph, and proving what was read."""
    return float(sum(run.get(f"{stage}_s", 0.0) for stage in ("inline", "recognise", "validate")))


def _quartiles(runs: Sequence[Measured], key: str) -> dict[str, float]:
    return rounded(Quartiles.of([run[key] for run in runs]))


def overhead_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per model and state of the caches: medians in seconds, and the overhead with its quartiles."""
    stages = list(dict.fromkeys(stage for row in rows for stage in row["stages"]))
    columns = ["model", "caches", "inductor", "within", "layerzero", "within", "ours", *stages, "import", "rewritten"]
    title = "compile time in s (medians): first call with either backend, within it Inductor's own; and what is ours"
    table = table_of(
        title, [*columns, "ours / within", "claimed / within", "quartiles", "claim"], left=("model", "caches")
    )
    keys = ["inductor_total_s", "inductor_inductor_s", "total_s", "inductor_s", "ours_s"]
    keys += [*(f"{stage}_s" for stage in stages), "import_s"]
    for row in rows:
        overhead, limit = row["overhead"], LIMITS[row["case"]["caches"]]
        table.add_row(
            *row["case"].values(),
            *(f"{row[key]['median']:.3g}" for key in keys),
            f"{row['rewritten']['median']:.0f} of {row['matches']['median']:.0f}",
            f"{row['whole_overhead']['median']:.1%}",
            f"{overhead['median']:.1%}",
            f"{overhead['low']:.1%}-{overhead['high']:.1%}",
            f"< {limit:.0%} {'holds' if overhead['median'] < limit else 'FAILS'}",
        )
    return table


def main() -> None:
    """Measure every model, or, as a child, compile once and print the seconds."""
    settings = parse_models(__doc__, ["bert", "llama"], layers=[12], quick_layers=2)
    measure_models("compile_time", settings, compile_once, run_case, overhead_table)


if __name__ == "__main__":
    main()
