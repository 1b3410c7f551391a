"""Requests of mixed lengths, served by continuous batching of ``transformers``: tokens per second by implementation.

A Llama shape with random weights, MiniLM's tokenizer. ``"layerzero"`` reads the cache's pages where they lie; its second run
is compiled by ``backend="layerzero"`` as well. All make the same tokens. At last the table of what was chosen.

    python -m examples.serve [--requests 32] [--tokens 32] [--longest 1024]
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import lz_compile as lz
import lz_compile.integrations.transformers as integration
from benchmarks.batching import SHAPE, generated, model_with
from examples.constrained_decoder import tokenizer
from lz_compile.report.report import Report

WORDS = "the cache of a server holds keys and values of many requests in blocks that lie anywhere in its memory".split()
VOCABULARY = 30522
COMPILED = "layerzero, compiled"


def prompts(count: int, longest: int) -> list[list[int]]:
    """Texts of mixed lengths as tokens."""
    words, encode = itertools.cycle(WORDS), tokenizer()
    lengths = [max(8, longest * (7 * number % count + 1) // count) for number in range(count)]
    return [encode(" ".join(itertools.islice(words, length)))["input_ids"][:length] for length in lengths]


def choices(report: Report, attention: Mapping[str, Any]) -> Table:
    """By which kernels runs what was recognised in compiled graphs, and the attention between them."""
    table = Table("op", "kernel", "matches", "why", title="what was chosen")
    table.add_row(attention["operation"], attention["kernel_id"], "every call", attention["why"])
    rows: dict[tuple[str, str, str], int] = {}
    for match in report.matches:
        key = (match.op, match.kernel, match.reasons[0].code if match.reasons else "")
        rows[key] = rows.get(key, 0) + 1
    for (op, kernel, why), count in sorted(rows.items()):
        table.add_row(op, kernel, str(count), why)
    return table


def main() -> None:
    """Serve, and tell."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=32)
    options.add_argument("--tokens", type=int, default=32)
    options.add_argument("--longest", type=int, default=1024)
    settings = options.parse_args()
    logging.disable(logging.WARNING)  # of transformers, about memory that it does not know
    requests = prompts(settings.requests, settings.longest)
    table = Table("implementation", "tokens/s", "same tokens", title="continuous batching")
    first: list[list[int]] | None = None
    for name in ("eager", "sdpa", integration.NAME, COMPILED):
        lz.clear_reports()
        model = model_with(integration.NAME if name == COMPILED else name, VOCABULARY)
        compiling = transformers.CompileConfig(backend="layerzero", fullgraph=False, mode=None, dynamic=True)
        further = {"varlen_compile_config": compiling} if name == COMPILED else {}
        for given in (requests[:2], requests):  # the first ones compile
            tokens, seconds = generated(model, given, settings.tokens, **further)
        first = tokens if first is None else first
        same = sum(one == other for one, other in zip(tokens, first, strict=True))
        table.add_row(name, f"{sum(map(len, tokens)) / seconds:.1f}", f"{same} of {len(first)} requests")
    console = Console()
    console.print(table)
    chosen = lz.which("paged_attention", *_step(settings.requests, settings.longest))
    console.print(choices(Report(list(lz.reports())), chosen))


def _step(requests: int, keys: int) -> tuple[torch.Tensor, ...]:
    """A step of decoding as the model has it."""
    blocks, kv_heads, heads = -(-keys // 256), int(SHAPE["num_key_value_heads"]), int(SHAPE["num_attention_heads"])
    cache = torch.zeros(requests * blocks, 256, kv_heads, 64)
    table = torch.arange(requests * blocks, dtype=torch.int32).reshape(requests, blocks)
    lengths = torch.full((requests,), keys, dtype=torch.int32)
    return torch.zeros(requests, heads, 64), cache, cache, table, lengths


if __name__ == "__main__":
    main()
