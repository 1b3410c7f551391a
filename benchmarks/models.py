"""Whole models, forward: eager, Inductor and layerzero, at lengths from 128 to 4,096 tokens.

The models have the shapes of well-known ones (`benchmarks/shapes.py`) and random weights; attention is spelled out
("eager" in transformers).

    python -m benchmarks.models [--models llama bert] [--lengths 512 2048] [--dtypes bfloat16] [--add] [--quick]
"""

from __future__ import annotations

import argparse
import itertools

import torch

from benchmarks.arguments import parse, parser
from benchmarks.harness import compiled, measure, prepare
from benchmarks.publish import Publication, summary_table, timing_table
from benchmarks.shapes import SHAPES, Size, build

LENGTHS = (128, 512, 2048, 4096)


def run_case(publication: Publication, name: str, size: Size, settings: argparse.Namespace) -> None:
    """Check, time and keep one case."""
    torch._dynamo.reset()
    model, inputs = build(name, size, settings.device)
    prepared = prepare(compiled(model), lambda function: function(**inputs))
    timings = measure(prepared.variants, settings.device, rounds=settings.rounds)
    case = {"model": name, "dtype": str(size.dtype).removeprefix("torch."), "length": size.length}
    publication.add_timings(case, prepared, timings, date=publication.record["date"])


def main() -> None:
    """Run every case."""
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    options.add_argument("--add", action="store_true", help="to the rows of other models that are published")
    settings = parse(options, LENGTHS)
    sizes = {"layers": settings.layers, "hidden": settings.hidden, "batch": settings.batch}
    publication = Publication("models", settings.device, is_quick=settings.quick, **sizes)
    if settings.add:
        publication.resume()
        publication.rows[:] = [row for row in publication.rows if row["case"]["model"] not in settings.models]
    for name, dtype, length in itertools.product(settings.models, settings.dtypes, settings.lengths):
        with torch.no_grad():
            run_case(publication, name, Size(length, dtype=dtype, **sizes), settings)
    publication.show(timing_table("models", publication.rows), summary_table(publication.rows))


if __name__ == "__main__":
    main()
