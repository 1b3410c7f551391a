"""A step of decoding over a static cache that is not full.

With ``attn_implementation="layerzero"`` a step over a cache of 4,096 tokens of which 300 are filled takes at most 1.3 of one
over a cache of 512, is the claim: keys that nobody sees are not read. ``"sdpa"`` of transformers is the peer. All take turns
in one process.

    python -m benchmarks.static_cache [--filled 300] [--rounds 15] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from rich.table import Table

from benchmarks.batching import OURS, THEIRS, model_with
from benchmarks.harness import Quartiles
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.runtime.measure.timing import measure

SIZES = (512, 4096)


def step(implementation: str, size: int, filled: int) -> Callable[[], Any]:
    """A forward pass of one token, at the same place of the cache every time."""
    model = model_with(implementation)
    cache = transformers.StaticCache(config=model.config, max_cache_len=size)
    tokens = torch.arange(filled)[None] % 900
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True)

    def call() -> Any:
        for layer in cache.layers:
            layer.cumulative_length.fill_(filled)
        with torch.no_grad():
            return model(tokens[:, :1], past_key_values=cache, use_cache=True).logits

    return call


def main() -> None:
    """Measure, and publish."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--filled", type=int, default=300)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--quick", action="store_true", help="few rounds; no published result")
    settings = options.parse_args()
    rounds = 3 if settings.quick else settings.rounds
    publication = Publication("static_cache", torch.device("cpu"), is_quick=settings.quick, rounds=rounds)
    calls = {(name, size): step(name, size, settings.filled) for name in (THEIRS, OURS) for size in SIZES}
    results = {key: call() for key, call in calls.items()}
    apart = max(float((each - results[THEIRS, SIZES[0]]).abs().max()) for each in results.values())
    found = measure({f"{name} {size}": calls[name, size] for name, size in calls}, torch.device("cpu"), rounds=rounds)
    for name in (THEIRS, OURS):
        short, long = (found[f"{name} {size}"].rounds_us for size in SIZES)
        publication.add(
            {
                "case": {"implementation": name, "filled": settings.filled},
                "latency_us": {str(size): rounded(Quartiles.of(found[f"{name} {size}"].rounds_us)) for size in SIZES},
                "of_short": rounded(Quartiles.of([one / other for one, other in zip(long, short, strict=True)])),
                "apart": apart,
            }
        )
    publication.show(cache_table(publication.rows))


def cache_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per implementation."""
    columns = ["implementation", *(f"cache of {size}, ms" for size in SIZES), "ratio", "spread"]
    table = table_of("a step of decoding over a static cache (medians)", columns, left=("implementation",))
    for row in rows:
        times = [f"{row['latency_us'][str(size)]['median'] / 1e3:.2f}" for size in SIZES]
        ratio = row["of_short"]
        spread = f"{ratio['low']:.2f}-{ratio['high']:.2f}"
        table.add_row(row["case"]["implementation"], *times, f"{ratio['median']:.2f}", spread)
    return table


if __name__ == "__main__":
    main()
