"""Attention over packed sequences, spelled out: causal inside documents whose ids are an input, so that only data says where.

Documents have random lengths, and every row of the batch its own. What a kernel that skips saves depends on them: with
``--documents 1`` nothing but the mask itself.

    python -m benchmarks.packed [--documents 8] [--lengths 512 2048] [--dtypes bfloat16] [--training] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import parse, parser
from benchmarks.attention import locked_elsewhere, runner
from benchmarks.harness import Function, compiled, measure, prepare
from benchmarks.publish import Publication, summary_table, timing_table

LENGTHS = (256, 512, 1024, 2048)
KERNELS = ("lz.packed", "lz.blocked", "torch.sdpa")


def attention(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
    """Causal attention inside documents, for ``[B, H, T, D]`` and ids ``[B, T]``."""
    positions = torch.arange(query.shape[2], device=query.device)
    keep = (ids[:, None, :, None] == ids[:, None, None, :]) & (positions <= positions[:, None])
    scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    weights = F.softmax(scores.masked_fill(~keep, -math.inf), dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Case:
    """Tokens of a few documents, in one dtype."""

    dtype: torch.dtype
    length: int
    documents: int

    def build(self, settings: argparse.Namespace) -> tuple[Function, list[Tensor]]:
        """The function, and its inputs."""
        generator = torch.Generator().manual_seed(0)
        shape = (settings.batch, settings.heads, self.length, settings.head_dim)
        drawn = (torch.randn(shape, generator=generator).to(settings.device, self.dtype) for _ in range(3))
        tensors = [tensor.requires_grad_(settings.training) for tensor in drawn]
        starts = torch.rand(settings.batch, self.length, generator=generator).argsort(-1) < self.documents - 1
        return attention, [*tensors, starts.cumsum(-1).to(settings.device)]

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"form": f"{self.documents} documents", "dtype": dtype, "length": self.length}


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
    options.add_argument("--documents", type=int, default=8)
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--head-dim", type=int, default=64)
    options.add_argument("--training", action="store_true", help="time forward and backward together")
    settings = parse(options, LENGTHS)
    name = "packed_training" if settings.training else "packed"
    sizes = {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim}
    publication = Publication(name, settings.device, is_quick=settings.quick, **sizes)
    for dtype, length in itertools.product(settings.dtypes, settings.lengths):
        with torch.set_grad_enabled(settings.training):
            run_case(Case(dtype, length, settings.documents), settings, publication)
    publication.show(timing_table(name, publication.rows), summary_table(publication.rows))


if __name__ == "__main__":
    main()
