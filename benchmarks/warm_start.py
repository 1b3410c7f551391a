"""What a process with empty caches saves by a file of artifacts.

A process that loads what another one saved (``lz_compile.save_artifacts``) takes up its graphs as a whole, in at most 1.3
of the time that Dynamo's tracing alone takes, is the claim. The peer is PyTorch's own file
(``torch.compiler.save_cache_artifacts``), for Inductor. A hot start, of a process that finds the caches of the one before
on its disk, is the least that this PyTorch can do. Every start runs in a process of its own. Seconds are of the processor,
children included, from the first call to its result; loading the file counts, and what is imported meanwhile.

    python -m benchmarks.warm_start [--models llama bert] [--layers 12] [--hidden 256] [--repeats 3] [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

import lz_compile
from benchmarks.apart import fresh_caches, measure_models, processor_s, run_child
from benchmarks.arguments import parse_models
from benchmarks.harness import INDUCTOR, LAYERZERO, Quartiles
from benchmarks.publish import rounded, table_of
from benchmarks.shapes import Size, build

TRACING = "dynamo"
BACKENDS = {TRACING: "eager", INDUCTOR: "inductor", LAYERZERO: "layerzero"}
COLD, WARM, HOT = "cold", "warm", "hot"

Measured = dict[str, float]


def start(form: str, heat: str, file: str, name: str, size: Mapping[str, int]) -> Measured:
    """Compile and run in this process: seconds of the processor and of the clock. A cold start saves its artifacts."""
    model, inputs = build(name, Size.of(size))
    begin, clock = processor_s(), time.perf_counter()
    if heat == WARM:
        _load(form, Path(file))
    with torch.no_grad():
        torch.compile(model, backend=BACKENDS[form], dynamic=False)(**inputs)
    measured = {"cpu_s": processor_s() - begin, "wall_s": time.perf_counter() - clock}
    if form == LAYERZERO:
        assert all(graph.loaded == (heat == WARM) for graph in lz_compile.reports())
    if heat == COLD and form != TRACING:
        _save(form, Path(file))
    return measured


def _load(form: str, file: Path) -> None:
    if form == LAYERZERO:
        assert not lz_compile.load_artifacts(file).left_out
    elif form == INDUCTOR:
        assert torch.compiler.load_cache_artifacts(file.read_bytes()) is not None


def _save(form: str, file: Path) -> None:
    if form == LAYERZERO:
        lz_compile.save_artifacts(file)
    else:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        file.write_bytes(saved[0])


def run_case(name: str, size: Mapping[str, int], repeats: int) -> Iterator[dict[str, Any]]:
    """Measure a model in turns."""
    runs: dict[str, dict[str, list[Measured]]] = {form: {COLD: [], WARM: [], HOT: []} for form in BACKENDS}
    for _ in range(repeats):
        for form, found in runs.items():
            with TemporaryDirectory(prefix="lz-warm-") as directory:
                child = {"form": form, "file": f"{directory}/file", "name": name, "size": size}
                with fresh_caches() as caches:
                    for heat in (COLD,) if form == TRACING else (COLD, HOT):
                        found[heat].append(run_child("warm_start", caches, heat=heat, **child))
                if form != TRACING:
                    with fresh_caches() as caches:
                        found[WARM].append(run_child("warm_start", caches, heat=WARM, **child))
    ratios = {heat: _of_tracing(runs, heat) for heat in (WARM, HOT)}
    row = {
        "case": {"model": name, **size},
        "of_cold": {form: _ratios(runs[form][WARM], runs[form][COLD]) for form in (INDUCTOR, LAYERZERO)},
        "of_tracing": ratios[WARM],
        "hot_of_tracing": ratios[HOT],
        "runs": runs,
    }
    told = {heat: {form: found["median"] for form, found in each.items()} for heat, each in ratios.items()}
    print(name, told, "of tracing", flush=True)
    yield row


def _of_tracing(runs: Mapping[str, Mapping[str, Sequence[Measured]]], heat: str) -> dict[str, dict[str, float]]:
    return {form: _ratios(runs[form][heat], runs[TRACING][COLD]) for form in (INDUCTOR, LAYERZERO)}


def _ratios(ones: Sequence[Measured], others: Sequence[Measured]) -> dict[str, float]:
    return rounded(Quartiles.of([one["cpu_s"] / other["cpu_s"] for one, other in zip(ones, others, strict=True)]))


def starts_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per model: medians in seconds, and ratios with their spread."""
    heats = [(form, heat) for form in (INDUCTOR, LAYERZERO) for heat in (COLD, WARM, HOT)]
    columns = ["model", TRACING, *(f"{form}, {heat}" for form, heat in heats)]
    columns += ["of dynamo", "spread"]
    table = table_of(
        "starts, in s of the processor (medians), and ours over Dynamo's tracing", columns, left=("model",)
    )
    for row in rows:
        runs = [row["runs"][TRACING][COLD], *(row["runs"][form][heat] for form, heat in heats)]
        seconds = [f"{Quartiles.of([run['cpu_s'] for run in each]).median:.1f}" for each in runs]
        ratio = row["of_tracing"][LAYERZERO]
        spread = f"{ratio['low']:.2f}-{ratio['high']:.2f}"
        table.add_row(row["case"]["model"], *seconds, f"{ratio['median']:.2f}", spread)
    return table


def main() -> None:
    """Measure every model, or, as a child, start once and print what was measured."""
    settings = parse_models(__doc__, ["llama", "bert"], layers=[12], quick_layers=4)
    measure_models("warm_start", settings, start, run_case, starts_table)


if __name__ == "__main__":
    main()
