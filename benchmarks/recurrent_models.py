"""Recurrences of real architectures: what became of each, time to compile and to run, against eager and Inductor.

Models of ``tests/recurrent_zoo.py`` (tiny, random weights, as `transformers` spells them), forward, every compile from empty
caches. A recurrence is rewritten, rolled into a loop, or refused with a reason; the reasons are printed.

    python -m benchmarks.recurrent_models [--families mamba_loop rwkv] [--lengths 128] [--without-inductor] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

import lz_compile
from benchmarks.arguments import parse, parser
from benchmarks.harness import EAGER, INDUCTOR, LAYERZERO, compiled, measure, prepare
from benchmarks.publish import Publication, table_of, timing_table
from tests.recurrent_zoo import FAMILIES

LENGTHS = (128,)


def run_case(publication: Publication, name: str, length: int, settings: argparse.Namespace) -> None:
    """Compile, check and time one model."""
    torch._dynamo.reset()
    model, inputs = FAMILIES[name].build(length)
    functions = compiled(model)
    if settings.without_inductor:
        del functions[INDUCTOR]
    before = len(lz_compile.reports())
    with torch.no_grad():
        prepared = prepare(functions, lambda function: function(**inputs).logits, is_cold=True)
        timings = measure(prepared.variants, settings.device, rounds=settings.rounds)
    report = lz_compile.Report(lz_compile.reports()[before:])
    found = [match for match in report.matches if match.op == "scan"]
    misses = [miss for miss in report.near_misses if miss.op == "scan"]
    publication.add_timings(
        {"family": name, "form": FAMILIES[name].form, "length": length},
        prepared,
        timings,
        compile_s={each.name: each.first_call_s for each in prepared.variants if each.name != EAGER},
        recognised=len(found),
        rewritten=sum(match.rewritten for match in found),
        reasons=sorted({str(miss.reason) for miss in misses} | {str(r) for match in found for r in match.reasons}),
    )


def recurrence_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per model: what was recognised, and seconds to compile."""
    title = "recurrences: recognised and rewritten, seconds to compile"
    table = table_of(
        title, ["family", "form", "length", "recognised", "rewritten", INDUCTOR, LAYERZERO], left=("form",)
    )
    for row in rows:
        seconds = row["compile_s"]
        table.add_row(
            *map(str, row["case"].values()),
            str(row["recognised"]),
            str(row["rewritten"]),
            *(f"{seconds[name]:.1f}" if name in seconds else "" for name in (INDUCTOR, LAYERZERO)),
        )
    return table


def main() -> None:
    """Run every family."""
    options = parser(__doc__)
    options.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    options.add_argument("--without-inductor", action="store_true", help="which needs minutes for some of them")
    settings = parse(options, LENGTHS)
    publication = Publication("recurrent_models", settings.device, is_quick=settings.quick)
    for name in settings.families:
        for length in settings.lengths:
            run_case(publication, name, length, settings)
    publication.show(timing_table("recurrent models", publication.rows), recurrence_table(publication.rows))
    for row in publication.rows:
        print(row["case"]["family"], *row["reasons"], sep="\n  ")


if __name__ == "__main__":
    main()
