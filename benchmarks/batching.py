"""Tokens per second of continuous batching in transformers, by implementation of attention.

``generate_batch`` with ``attn_implementation="layerzero"`` makes at least 1.3 of the tokens per second that it makes with
``"sdpa"``, and the same tokens, is the claim: requests of mixed lengths, greedy, on a paged cache. Implementations take turns
in one process; a turn is the whole of a call, prefill included.

    python -m benchmarks.batching [--requests 32] [--shortest 512] [--longest 2048] [--tokens 32] [--repeats 3] [--quick]
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from rich.table import Table

import lz_compile.integrations.transformers as integration
from benchmarks.harness import Quartiles
from benchmarks.publish import Publication, rounded, table_of

OURS, THEIRS = integration.NAME, "sdpa"
VOCABULARY = 1000
#: Llama's shape, with grouped heads.
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
}


def model_with(implementation: str, vocabulary: int = VOCABULARY) -> Any:
    """Llama with random weights, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model("llama", vocab_size=vocabulary, **SHAPE)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def generated(
    model: Any, prompts: Sequence[Sequence[int]], count: int, **options: Any
) -> tuple[list[list[int]], float]:
    """Greedy tokens of each request, and seconds; ``options`` are further ones of continuous batching."""
    config = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(max_batch_tokens=512, max_memory_percent=0.3, **options)
    start = time.perf_counter()
    found = model.generate_batch(
        list(prompts), generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    seconds = time.perf_counter() - start
    return [found[key].generated_tokens for key in sorted(found, key=lambda key: int(key.split("_")[-1]))], seconds


def run_case(settings: argparse.Namespace) -> dict[str, Any]:
    """Both in turns."""
    numbers = torch.Generator().manual_seed(0)
    lengths = torch.randint(settings.shortest, settings.longest + 1, (settings.requests,), generator=numbers).tolist()
    prompts = [torch.randint(5, VOCABULARY, (length,), generator=numbers).tolist() for length in lengths]
    models = {name: model_with(name) for name in (THEIRS, OURS)}
    runs: dict[str, list[float]] = {name: [] for name in models}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(settings.repeats):
        for name, model in models.items():
            tokens[name], seconds = generated(model, prompts, settings.tokens)
            runs[name].append(sum(map(len, tokens[name])) / seconds)
    return {
        "case": {name: getattr(settings, name) for name in ("requests", "shortest", "longest", "tokens")},
        "tokens_per_s": {name: rounded(Quartiles.of(found)) for name, found in runs.items()},
        "of_sdpa": rounded(Quartiles.of([one / other for one, other in zip(runs[OURS], runs[THEIRS], strict=True)])),
        "equal_requests": sum(one == other for one, other in zip(tokens[OURS], tokens[THEIRS], strict=True)),
    }


def batching_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per case."""
    columns = [*rows[0]["case"], THEIRS, OURS, "ratio", "spread", "equal requests"]
    table = table_of("continuous batching, tokens per second (medians)", columns)
    for row in rows:
        speeds = [f"{row['tokens_per_s'][name]['median']:.1f}" for name in (THEIRS, OURS)]
        ratio = row["of_sdpa"]
        spread = f"{ratio['low']:.2f}-{ratio['high']:.2f}"
        told = [*map(str, row["case"].values()), *speeds, f"{ratio['median']:.2f}", spread, str(row["equal_requests"])]
        table.add_row(*told)
    return table


def main() -> None:
    """Measure, and publish."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=32)
    options.add_argument("--shortest", type=int, default=512)
    options.add_argument("--longest", type=int, default=2048)
    options.add_argument("--tokens", type=int, default=32)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--quick", action="store_true", help="few short requests; no published result")
    settings = options.parse_args()
    if settings.quick:
        settings.requests, settings.shortest, settings.longest, settings.tokens, settings.repeats = 4, 16, 64, 8, 1
    logging.disable(logging.WARNING)  # of transformers, about memory that it does not know
    publication = Publication("batching", torch.device("cpu"), is_quick=settings.quick, repeats=settings.repeats)
    publication.add(run_case(settings))
    publication.show(batching_table(publication.rows))


if __name__ == "__main__":
    main()
