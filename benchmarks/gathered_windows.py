"""Attention over a window around each query whose keys are gathered, and attention by squared distances.

Both hold far more numbers than their operands: a copy of the keys for each place of a window, or a difference for each query,
key and feature. What a kernel saves that takes a band of all keys, or the products in the distances, is the question.

    python -m benchmarks.gathered_windows [--windows 9 65] [--lengths 512 2048] [--dtypes float32] [--training] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import parse, parser
from benchmarks.attention import locked_elsewhere, runner
from benchmarks.harness import Function, compiled, measure, prepare
from benchmarks.publish import Publication, summary_table, timing_table

LENGTHS = (256, 512, 1024, 2048)
KERNELS = ("lz.tiled", "lz.blocked", "torch.sdpa")


def windowed(query: Tensor, key: Tensor, value: Tensor, *, window: int) -> Tensor:
    """Each query over as many keys before and behind it, ``[B, H, T, D]``."""
    side = window // 2
    keys, values = (F.pad(each, (0, 0, side, side)).unfold(2, window, 1) for each in (key, value))
    scores = torch.einsum("bhsd,bhsdw->bhsw", query, keys) * query.shape[-1] ** -0.5
    places = torch.arange(query.shape[2], device=query.device)[:, None] - side
    places = places + torch.arange(window, device=query.device)
    scores = scores.masked_fill((places < 0) | (places >= query.shape[2]), -torch.inf)
    return torch.einsum("bhsw,bhsdw->bhsd", scores.softmax(-1), values)


def by_distance(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The softmax of negative squared distances, ``[B, H, T, D]``."""
    squares: Tensor = torch.cdist(query, key).square()
    weights: Tensor = (-squares * query.shape[-1] ** -0.5).softmax(-1)
    return weights @ value


@dataclass(frozen=True)
class Case:
    """Tokens in one dtype; without a window, by distance."""

    dtype: torch.dtype
    length: int
    window: int | None

    def build(self, settings: argparse.Namespace) -> tuple[Function, list[Tensor]]:
        """The function, and its inputs."""
        generator = torch.Generator().manual_seed(0)
        shape = (settings.batch, settings.heads, self.length, settings.head_dim)
        drawn = (torch.randn(shape, generator=generator).to(settings.device, self.dtype) for _ in range(3))
        function = by_distance if self.window is None else partial(windowed, window=self.window)
        return function, [tensor.requires_grad_(settings.training) for tensor in drawn]

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        form = "distances" if self.window is None else f"window of {self.window}"
        return {"form": form, "dtype": str(self.dtype).removeprefix("torch."), "length": self.length}


def run_case(case: Case, settings: argparse.Namespace, publication: Publication) -> None:
    """Check, time and keep one case."""
    torch._dynamo.reset()
    function, inputs = case.build(settings)
    prepared = prepare(compiled(function, KERNELS), runner(inputs, is_training=settings.training))
    refused = {variant.name: variant.refusals for variant in prepared.variants if locked_elsewhere(variant)}
    prepared = prepared.without(refused)
    timings = measure(prepared.variants, settings.device, rounds=settings.rounds)
    publication.add_timings(case.to_dict(), prepared, timings, refused=refused)


def main() -> None:
    """Run every case."""
    options = parser(__doc__)
    options.add_argument("--windows", type=int, nargs="*", default=[9, 65])
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--head-dim", type=int, default=64)
    options.add_argument("--training", action="store_true", help="time forward and backward together")
    settings = parse(options, LENGTHS)
    name = "gathered_windows_training" if settings.training else "gathered_windows"
    sizes = {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim}
    publication = Publication(name, settings.device, is_quick=settings.quick, **sizes)
    cases = itertools.product(settings.dtypes, settings.lengths, [*settings.windows, None])
    for dtype, length, window in cases:
        with torch.set_grad_enabled(settings.training):
            run_case(Case(dtype, length, window), settings, publication)
    publication.show(timing_table(name, publication.rows), summary_table(publication.rows))


if __name__ == "__main__":
    main()
