"""Attention of a step of decoding: few queries over a cache, as models of transformers spell it, without tuning.

Whole steps are of a Llama of four layers (as in ``benchmarks.batching``) over a static cache with 300 tokens in it.

Claim: where heads share keys, or a static cache is mostly empty, a step takes at most half the time of Inductor's code and of
PyTorch's SDPA, and never more than Inductor's. What is read of keys and values over the time is told as GB/s.

    python -m benchmarks.decoding [--lengths 128 4096] [--dtypes bfloat16] [--locks torch.sdpa] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from benchmarks.arguments import parse, parser
from benchmarks.batching import model_with
from benchmarks.harness import Function, compiled, measure, prepare
from benchmarks.publish import Publication, timing_table
from lz_compile.runtime.problem.context import name_of

#: Tokens in the cache of a model's step, if it is twice as long.
FILLED = 300
LENGTHS = (128, 1024, 4096)


@dataclass(frozen=True)
class Case:
    """A step: heads and those that keys have, features, queries, and how much of the cache is filled (None: no mask)."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    queries: int = 1
    filled: float | None = None


CASES = (
    Case(1, 32, 8, 128),
    Case(1, 32, 8, 128, filled=0.125),
    Case(1, 32, 8, 128, queries=4),
    Case(8, 32, 8, 128),
    Case(1, 12, 12, 64),
)


def step(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Keys for each group, two products, a mask of numbers, a softmax in float32."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for each in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).flatten(2)


def operands(case: Case, length: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Of :func:`step`; the cache holds heads before tokens, as transformers' does."""
    for heads, size in ((case.heads, case.queries), (case.kv_heads, length), (case.kv_heads, length)):
        yield torch.randn(case.batch, heads, size, case.dim, dtype=dtype)
    if case.filled is not None:
        hidden = torch.arange(length) >= length * case.filled
        yield torch.zeros(1, 1, 1, length, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def run_case(
    publication: Publication, case: Case, length: int, dtype: torch.dtype, settings: argparse.Namespace
) -> None:
    """Compile, check and time one step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        with settings.device:
            inputs = list(operands(case, length, dtype))
        prepared = prepare(compiled(step, settings.locks), lambda function: function(*inputs))
        timings = measure(prepared.variants, settings.device, rounds=settings.rounds)
    shape = f"{case.batch} x {case.queries}, {case.heads} over {case.kv_heads} x {case.dim}"
    filled = length if case.filled is None else int(length * case.filled)
    about = {"step": shape, "keys": length, "filled": filled, "dtype": name_of(dtype)}
    read = 2 * case.batch * case.kv_heads * filled * case.dim * dtype.itemsize
    publication.add_timings(about, prepared, timings, read_bytes=read)
    print(*about.values(), sep=" | ", flush=True)


def run_model(
    publication: Publication, attention: str, length: int, dtype: torch.dtype, settings: argparse.Namespace
) -> None:
    """Compile, check and time a model's step over a static cache; ``attention`` is how transformers computes it."""
    torch._dynamo.reset()
    model = model_with(attention).to(settings.device, dtype)
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    filled = min(FILLED, length // 2)
    tokens = torch.arange(filled, device=settings.device)[None] % 900

    def run(function: Function) -> Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(filled)
        logits: Tensor = function(tokens[:, :1], past_key_values=cache, use_cache=True).logits
        return logits

    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True)
        prepared = prepare(compiled(model, settings.locks), run)
        timings = measure(prepared.variants, settings.device, rounds=settings.rounds)
    about = {"step": f"Llama, {attention}", "keys": length, "filled": filled, "dtype": name_of(dtype)}
    publication.add_timings(about, prepared, timings)
    print(*about.values(), sep=" | ", flush=True)


def main() -> None:
    """Run every case."""
    options = parser(__doc__)
    options.add_argument("--locks", nargs="+", default=["torch.sdpa"], help="kernels beside the chosen one")
    settings = parse(options, LENGTHS)
    publication = Publication("decoding", settings.device, is_quick=settings.quick)
    for dtype, case, length in itertools.product(settings.dtypes, CASES, settings.lengths):
        run_case(publication, case, length, dtype, settings)
    for dtype, attention, length in itertools.product(settings.dtypes, ("sdpa", "eager"), (settings.lengths[-1],)):
        run_model(publication, attention, length, dtype, settings)
    publication.show(timing_table("attention of a step of decoding", publication.rows))


if __name__ == "__main__":
    main()
