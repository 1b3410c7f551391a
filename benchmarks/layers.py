"""What compiling repeated layers once saves.

A model of 24 layers compiles in two thirds of Inductor's time with repeated layers as one region, computes the same bits, and
runs no slower, is the claim. Every compile runs in a process of its own with empty caches. Inductor, layerzero without
regions, and layerzero as it is by default take turns. Seconds are of the processor, its children included, from the first
call to its result, Dynamo's tracing included. Latency is timed afterwards, with regions and without in turns in one process.

    python -m benchmarks.layers [--models llama bert gpt2 vit] [--layers 24] [--hidden 256] [--repeats 3] [--quick]
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

import lz_compile
from benchmarks.apart import fresh_caches, processor_s, run_apart
from benchmarks.arguments import parse_models
from benchmarks.harness import INDUCTOR, LAYERZERO, Quartiles, tensors
from benchmarks.publish import Publication, rounded, table_of
from benchmarks.shapes import Size, build
from lz_compile.runtime.measure.timing import measure

KEPT = "layerzero, keep"
FORMS: Mapping[str, Mapping[str, Any]] = {
    INDUCTOR: {"backend": "inductor"},
    KEPT: {"backend": "layerzero", "options": {"layerzero.layers": "keep", "layerzero.tune": "off"}},
    LAYERZERO: {"backend": "layerzero", "options": {"layerzero.tune": "off"}},
}

Measured = dict[str, Any]


def compile_once(form: str, name: str, size: Size) -> Measured:
    """Compile in this process, run, and time: seconds, µs, and a hash of the result's bits."""
    model, inputs = build(name, size)
    compiled = torch.compile(model, dynamic=False, **FORMS[form])
    with torch.no_grad():
        begin, start = processor_s(), time.perf_counter()
        outputs = tensors(compiled(**inputs))
        cpu_s, wall_s = processor_s() - begin, time.perf_counter() - start
        layers = lz_compile.Report(lz_compile.reports()).layers
        of_kept = _of_kept(model, inputs, compiled, outputs) if form == LAYERZERO else {}
    return {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        **of_kept,
        "folded": sum(each.count for each in layers if each.folded),
    }


def _of_kept(model: torch.nn.Module, inputs: Mapping[str, Any], compiled: Any, outputs: Sequence[Any]) -> Measured:
    """The latency with regions over that without, the median of rounds; and whether results are equal to the last bit.

    Kernels may be chosen otherwise by another process, which measures the machine anew: both run in this one.
    """
    kept = torch.compile(model, dynamic=False, **FORMS[KEPT])
    same_bits = all(map(torch.equal, outputs, tensors(kept(**inputs))))
    calls = {LAYERZERO: lambda: compiled(**inputs), KEPT: lambda: kept(**inputs)}
    found = measure(calls, torch.device("cpu"), rounds=25)
    pairs = zip(found[LAYERZERO].rounds_us, found[KEPT].rounds_us, strict=True)
    latency = Quartiles.of([ours / theirs for ours, theirs in pairs]).median
    return {"latency_of_kept": latency, "same_bits": same_bits}


def in_fresh_process(form: str, name: str, sizes: Mapping[str, int]) -> Measured:
    """The same with empty caches."""
    with fresh_caches() as caches:
        child = json.dumps({"form": form, "name": name, "size": sizes})
        measured: Measured = run_apart("layers", ["--child", child], caches)
    return measured


def run_case(name: str, sizes: Mapping[str, int], repeats: int, publication: Publication) -> None:
    """Measure a model in all forms in turns, and keep it."""
    runs: dict[str, list[Measured]] = {form: [] for form in FORMS}
    for _ in range(repeats):
        for form, found in runs.items():
            found.append(in_fresh_process(form, name, sizes))
    row: dict[str, Any] = {
        "case": {"model": name, **sizes},
        "folded": runs[LAYERZERO][0]["folded"],
        "same_bits": all(run["same_bits"] for run in runs[LAYERZERO]),
        "of_inductor": {key: _ratios(runs, LAYERZERO, INDUCTOR, key) for key in ("cpu_s", "wall_s")},
        "of_kept": {key: _ratios(runs, LAYERZERO, KEPT, key) for key in ("cpu_s", "wall_s")},
        "latency_of_kept": rounded(Quartiles.of([run["latency_of_kept"] for run in runs[LAYERZERO]])),
        "runs": runs,
    }
    publication.add(row)
    compiling, running = row["of_inductor"]["cpu_s"]["median"], row["latency_of_kept"]["median"]
    print(name, f"{compiling:.2f} of Inductor's compile, {running:.2f} of the latency without", sep=" | ", flush=True)


def _ratios(runs: Mapping[str, Sequence[Measured]], one: str, other: str, key: str) -> dict[str, float]:
    pairs = zip(runs[one], runs[other], strict=True)
    return rounded(Quartiles.of([ours[key] / theirs[key] for ours, theirs in pairs]))


def layers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per model: medians in seconds, and ratios with their spread."""
    columns = ["model", "folded", *FORMS, "of inductor", "spread", "latency of keep", "spread", "same bits"]
    table = table_of("compiling, in s of the processor (medians), and ratios", columns, left=("model", "same bits"))
    for row in rows:
        seconds = [Quartiles.of([run["cpu_s"] for run in row["runs"][form]]).median for form in FORMS]
        ratios = (row["of_inductor"]["cpu_s"], row["latency_of_kept"])
        told = [text for each in ratios for text in (f"{each['median']:.2f}", f"{each['low']:.2f}-{each['high']:.2f}")]
        cells = [row["case"]["model"], str(row["folded"]), *(f"{each:.1f}" for each in seconds), *told]
        table.add_row(*cells, "yes" if row["same_bits"] else "NO")
    return table


def main() -> None:
    """Measure every model, or, as a child, compile once and print what was measured."""
    settings = parse_models(__doc__, ["llama", "bert", "gpt2", "vit"], layers=24, quick_layers=6)
    if settings.child:
        print(json.dumps(compile_once(settings.child["form"], settings.child["name"], Size(**settings.child["size"]))))
        return
    sizes, repeats = settings.sizes, settings.repeats
    publication = Publication("layers", torch.device("cpu"), is_quick=settings.quick, repeats=repeats, **sizes)
    for name in settings.models:
        run_case(name, sizes, repeats, publication)
    publication.show(layers_table(publication.rows))


if __name__ == "__main__":
    main()
