"""Products and convolutions of 16 bits, on a CPU that has no instructions for them: in float32, over Inductor's loops.

The claim to check: what PyTorch multiplies in plain loops takes a fraction of that in float32, pieces widened on the way, and
backward passes, whose factors lie across, a smaller one. A CPU with such instructions shows 1.0 everywhere.

    python -m benchmarks.wide_products [--forms linear] [--rows 1 128] [--dtypes float16] [--training] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import parse, parser
from benchmarks.harness import Function, compiled, prepare
from benchmarks.publish import Publication, summary_table, timing_table
from lz_compile.runtime.measure.timing import measure
from lz_compile.runtime.problem.context import name_of

#: Functions, with the shapes of what they are given for so many rows.
FORMS: Mapping[str, tuple[Function, Any]] = {
    "linear": (F.linear, lambda rows: [(rows, 1024), (4096, 1024), (4096,)]),
    "x @ w": (torch.matmul, lambda rows: [(rows, 1024), (1024, 4096)]),
    "heads": (torch.bmm, lambda rows: [(16, rows, 64), (16, 64, 256)]),
    "8 experts": (
        lambda x, w: torch._grouped_mm(x, w.mT, torch.arange(1, 9, dtype=torch.int32) * (x.shape[0] // 8)).relu(),
        lambda rows: [(rows, 1024), (8, 1024, 1024)],
    ),
    "conv2d": (F.conv2d, lambda rows: [(1, 64, rows, 32), (64, 64, 3, 3), (64,)]),
    "depthwise conv1d": (
        lambda x, w: F.conv1d(x, w, groups=x.shape[1]),
        lambda rows: [(1, 256, rows + 3), (256, 1, 4)],
    ),
}


@dataclass(frozen=True)
class Case:
    """One function of inputs with so many rows."""

    form: str
    dtype: torch.dtype
    rows: int

    def build(self, settings: argparse.Namespace) -> list[Tensor]:
        """What it is given."""
        drawn = (torch.randn(shape, device=settings.device).to(self.dtype) for shape in FORMS[self.form][1](self.rows))
        return [tensor.requires_grad_(settings.training) for tensor in drawn]

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {"form": self.form, "dtype": name_of(self.dtype), "rows": self.rows}


def run_case(case: Case, settings: argparse.Namespace, publication: Publication) -> None:
    """Check, time and keep one case."""
    torch._dynamo.reset()
    inputs = case.build(settings)

    def run(function: Function) -> Any:
        output = function(*inputs)
        return [output, *torch.autograd.grad(output.sum(), inputs)] if settings.training else output

    prepared = prepare(compiled(FORMS[case.form][0], [], "attention"), run)
    calls = {variant.name: variant.call for variant in prepared.variants}
    timings = measure(calls, settings.device, rounds=settings.rounds, block_ms=20.0)
    publication.add_timings(case.to_dict(), prepared, timings)


def cases(settings: argparse.Namespace) -> Iterator[Case]:
    """Every case; a convolution needs three rows, each expert one, and PyTorch compiles those in bfloat16 only."""
    for dtype, form, rows in itertools.product(settings.dtypes, settings.forms, settings.rows):
        least = 8 if "experts" in form else 3 if "conv" in form else 1
        if rows >= least and (dtype == torch.bfloat16 or "experts" not in form):
            yield Case(form, dtype, rows)


def main() -> None:
    """Run every case."""
    options = parser(__doc__)
    options.set_defaults(dtypes=[torch.bfloat16, torch.float16])
    options.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    options.add_argument("--rows", nargs="+", type=int, default=[1, 16, 128])
    options.add_argument("--training", action="store_true", help="time forward and backward together")
    settings = parse(options, [0])
    name = "wide_products_training" if settings.training else "wide_products"
    publication = Publication(name, settings.device, is_quick=settings.quick)
    for case in cases(settings):
        with torch.set_grad_enabled(settings.training):
            run_case(case, settings, publication)
    publication.show(timing_table(name, publication.rows), summary_table(publication.rows))


if __name__ == "__main__":
    main()
