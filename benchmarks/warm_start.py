"""What a process with empty caches saves by a file of artifacts.

A process that loads what another one saved (``lz_compile.save_artifacts``) starts in a third of the time of a cold start, and
without the C++ compiler, is the claim. The peer is PyTorch's own file
(``torch.compiler.save_cache_artifacts``), for Inductor. Every start runs in a process of its own. Seconds are of the
processor, children included, from the first call to its result; loading the file counts, imports do not.

    python -m benchmarks.warm_start [--models llama bert] [--layers 12] [--hidden 256] [--repeats 3] [--quick]
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

import lz_compile
from benchmarks.apart import fresh_caches, processor_s, run_apart
from benchmarks.arguments import parse_models
from benchmarks.harness import INDUCTOR, LAYERZERO, Quartiles
from benchmarks.publish import Publication, rounded, table_of
from benchmarks.shapes import Size, build

TRACING = "dynamo"
BACKENDS = {TRACING: "eager", INDUCTOR: "inductor", LAYERZERO: "layerzero"}
COLD, WARM = "cold", "warm"

Measured = dict[str, float]


def start(form: str, heat: str, file: Path, name: str, size: Size) -> Measured:
    """Compile and run in this process: seconds of the processor and of the clock. A cold start saves its artifacts."""
    model, inputs = build(name, size)
    begin, clock = processor_s(), time.perf_counter()
    if heat == WARM:
        _load(form, file)
    with torch.no_grad():
        torch.compile(model, backend=BACKENDS[form], dynamic=False)(**inputs)
    measured = {"cpu_s": processor_s() - begin, "wall_s": time.perf_counter() - clock}
    if heat == COLD and form != TRACING:
        _save(form, file)
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


def run_case(name: str, sizes: Mapping[str, int], repeats: int, publication: Publication) -> None:
    """Measure a model in turns, and keep it."""
    runs: dict[str, dict[str, list[Measured]]] = {form: {COLD: [], WARM: []} for form in BACKENDS}
    for _ in range(repeats):
        for form in BACKENDS:
            with TemporaryDirectory(prefix="lz-warm-") as directory:
                for heat in (COLD,) if form == TRACING else (COLD, WARM):
                    child = {"form": form, "heat": heat, "file": f"{directory}/file", "name": name, "size": sizes}
                    with fresh_caches() as caches:
                        runs[form][heat].append(run_apart("warm_start", ["--child", json.dumps(child)], caches))
    row: dict[str, Any] = {
        "case": {"model": name, **sizes},
        "of_cold": {form: _ratios(runs[form][WARM], runs[form][COLD]) for form in (INDUCTOR, LAYERZERO)},
        "of_tracing": {form: _ratios(runs[form][WARM], runs[TRACING][COLD]) for form in (INDUCTOR, LAYERZERO)},
        "runs": runs,
    }
    publication.add(row)
    print(name, {form: found["median"] for form, found in row["of_tracing"].items()}, "of tracing", flush=True)


def _ratios(ones: Sequence[Measured], others: Sequence[Measured]) -> dict[str, float]:
    return rounded(Quartiles.of([one["cpu_s"] / other["cpu_s"] for one, other in zip(ones, others, strict=True)]))


def starts_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per model: medians in seconds, and ratios with their spread."""
    columns = ["model", TRACING, *(f"{form}, {heat}" for form in (INDUCTOR, LAYERZERO) for heat in (COLD, WARM))]
    columns += ["of dynamo", "spread"]
    table = table_of(
        "starts, in s of the processor (medians), and ours over Dynamo's tracing", columns, left=("model",)
    )
    for row in rows:
        runs = [row["runs"][TRACING][COLD]]
        runs += [row["runs"][form][heat] for form in (INDUCTOR, LAYERZERO) for heat in (COLD, WARM)]
        seconds = [f"{Quartiles.of([run['cpu_s'] for run in each]).median:.1f}" for each in runs]
        ratio = row["of_tracing"][LAYERZERO]
        spread = f"{ratio['low']:.2f}-{ratio['high']:.2f}"
        table.add_row(row["case"]["model"], *seconds, f"{ratio['median']:.2f}", spread)
    return table


def main() -> None:
    """Measure every model, or, as a child, start once and print what was measured."""
    settings = parse_models(__doc__, ["llama", "bert"], layers=12, quick_layers=4)
    if settings.child:
        child = settings.child
        found = start(child["form"], child["heat"], Path(child["file"]), child["name"], Size(**child["size"]))
        print(json.dumps(found))
        return
    sizes, repeats = settings.sizes, settings.repeats
    publication = Publication("warm_start", torch.device("cpu"), is_quick=settings.quick, repeats=repeats, **sizes)
    for name in settings.models:
        run_case(name, sizes, repeats, publication)
    publication.show(starts_table(publication.rows))


if __name__ == "__main__":
    main()
