"""What compiling repeated layers once saves.

A model of 24 layers compiles in less than half of Inductor's time with repeated layers as one region, computes the same
bits, and runs no slower, is the claim. Every compile runs in a process of its own with empty caches. Inductor, Inductor with
Dynamo's own switch for it (``use_graph_deduplication``, an experiment), layerzero without regions, and layerzero as it is by
default take turns; Dynamo's tracing alone is what none can do without. Seconds are of the processor, its children included,
from the first call to its result; in training the backward pass is part of it. Latency is timed afterwards, with regions and
without in turns in one process.

    python -m benchmarks.layers [--models llama bert gpt2 vit] [--layers 24 32] [--training] [--repeats 1] [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import lz_compile
from benchmarks.apart import fresh_caches, measure_models, processor_s, run_child
from benchmarks.arguments import parse_models
from benchmarks.harness import INDUCTOR, LAYERZERO, Quartiles, tensors
from benchmarks.publish import rounded, table_of
from benchmarks.shapes import Size, build
from lz_compile.runtime.measure.timing import measure

TRACING, DEDUPLICATED, KEPT = "dynamo", "inductor, deduplicated", "layerzero, keep"
FORMS: Mapping[str, Mapping[str, Any]] = {
    TRACING: {"backend": "eager"},
    INDUCTOR: {"backend": "inductor"},
    DEDUPLICATED: {"backend": "inductor"},
    KEPT: {"backend": "layerzero", "options": {"layerzero.layers": "keep", "layerzero.tune": "off"}},
    LAYERZERO: {"backend": "layerzero", "options": {"layerzero.tune": "off"}},
}

Measured = dict[str, Any]


def compile_once(form: str, name: str, size: Mapping[str, int], training: bool) -> Measured:
    """Compile in this process, run, and time: seconds, and how it runs beside the same without regions."""
    model, inputs = build(name, Size.of(size))
    prepared = partial(_call, model, inputs, training)
    with torch._dynamo.config.patch(use_graph_deduplication=form == DEDUPLICATED):
        call = prepared(form)
        begin, start = processor_s(), time.perf_counter()
        results = call()
        cpu_s, wall_s = processor_s() - begin, time.perf_counter() - start
    layers = lz_compile.Report(lz_compile.reports()).layers
    of_kept = _of_kept(call, prepared(KEPT), results) if form == LAYERZERO else {}
    return {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        **of_kept,
        "folded": sum(each.count for each in layers if each.folded),
    }


def _call(
    model: torch.nn.Module, inputs: Mapping[str, Any], training: bool, form: str
) -> Callable[[], Sequence[Tensor | None]]:
    """A call of a model, compiled when it is first made: its results, or what they are and the gradients of their sum."""
    compiled = torch.compile(model, dynamic=False, **FORMS[form])
    parameters = [each for each in model.parameters() if each.requires_grad]

    def call() -> Sequence[Tensor | None]:
        with torch.set_grad_enabled(training):
            results = tensors(compiled(**inputs))
            if not training:
                return results
            total = torch.stack([each.sum() for each in results if each.requires_grad]).sum()
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
            return [*(each.detach() for each in results), *gradients]

    return call


def _of_kept(ours: Callable[[], Any], kept: Callable[[], Any], results: Sequence[Tensor | None]) -> Measured:
    """The latency with regions over that without, the median of rounds; and how far results and gradients are apart.

    Kernels may be chosen otherwise by another process, which measures the machine anew: both run in this one.
    """
    off = max(map(_off, results, kept()))
    found = measure({LAYERZERO: ours, KEPT: kept}, torch.device("cpu"), rounds=25)
    pairs = zip(found[LAYERZERO].rounds_us, found[KEPT].rounds_us, strict=True)
    latency = Quartiles.of([ours_us / theirs_us for ours_us, theirs_us in pairs]).median
    return {"latency_of_kept": latency, "off": off}


def _off(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference, of the largest value; 0 where every bit is equal."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return 0.0 if torch.equal(one, other) else float((one - other).abs().max() / other.abs().max())


def run_case(name: str, size: Mapping[str, int], repeats: int, *, training: bool) -> Iterator[dict[str, Any]]:
    """Measure a model in all forms in turns."""
    runs: dict[str, list[Measured]] = {form: [] for form in FORMS}
    for _ in range(repeats):
        for form, found in runs.items():
            with fresh_caches() as caches:
                found.append(run_child("layers", caches, form=form, name=name, size=size, training=training))
    row = {
        "case": {"model": name, **size},
        "folded": runs[LAYERZERO][0]["folded"],
        "off": max(run["off"] for run in runs[LAYERZERO]),
        **{f"of_{key}": _ratios(runs, form) for key, form in OTHERS.items()},
        "latency_of_kept": rounded(Quartiles.of([run["latency_of_kept"] for run in runs[LAYERZERO]])),
        "runs": runs,
    }
    compiling, running = row["of_inductor"]["cpu_s"]["median"], row["latency_of_kept"]["median"]
    text = f"{compiling:.2f} of Inductor's compile, {running:.2f} of the latency without"
    print(name, size["layers"], text, sep=" | ", flush=True)
    yield row


OTHERS = {"inductor": INDUCTOR, "deduplicated": DEDUPLICATED, "kept": KEPT}


def _ratios(runs: Mapping[str, Sequence[Measured]], other: str) -> dict[str, dict[str, float]]:
    """What layerzero takes of another form's time."""
    pairs = list(zip(runs[LAYERZERO], runs[other], strict=True))
    return {
        key: rounded(Quartiles.of([ours[key] / theirs[key] for ours, theirs in pairs])) for key in ("cpu_s", "wall_s")
    }


def layers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per model and depth: medians in seconds, and ratios with their spread."""
    columns = ["model", "layers", "folded", *FORMS, "of inductor", "spread", "latency of keep", "spread", "off"]
    table = table_of("compiling, in s of the processor (medians), and ratios", columns, left=("model",))
    for row in rows:
        seconds = [Quartiles.of([run["cpu_s"] for run in row["runs"][form]]).median for form in FORMS]
        ratios = (row["of_inductor"]["cpu_s"], row["latency_of_kept"])
        told = [text for each in ratios for text in (f"{each['median']:.2f}", f"{each['low']:.2f}-{each['high']:.2f}")]
        cells = [row["case"]["model"], str(row["case"]["layers"]), str(row["folded"])]
        table.add_row(*cells, *(f"{each:.1f}" for each in seconds), *told, f"{row['off']:.1g}")
    return table


def main() -> None:
    """Measure every model, or, as a child, compile once and print what was measured."""
    settings = parse_models(__doc__, ["llama", "bert", "gpt2", "vit"], layers=[24, 32], quick_layers=6, trains=True)
    measure_models("layers", settings, compile_once, run_case, layers_table, training=settings.training)


if __name__ == "__main__":
    main()
