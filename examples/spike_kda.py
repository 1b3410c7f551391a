"""Train a small Spike-KDA language model on real text: token by token, by the parallel scan, and compiled by layerzero.

The text is Python's own language reference, as ``pydoc`` ships it, by character. All runs start from the same weights and
see the same batches, so that their losses are the same but for rounding. The plot and the figures go to ``--output``.

    python -m examples.spike_kda [--steps 300] [--length 48] [--output examples/results]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data import topics
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import lz_compile
from models.spike_kda import Mode, SpikeKDAConfig, SpikeKDALM

mpl.use("Agg")
from matplotlib import pyplot as plt


@dataclass(frozen=True)
class Task:
    """What is trained on, and how."""

    steps: int = 300
    batch: int = 8
    length: int = 48
    learning_rate: float = 3e-3
    token_drop: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """The loss of every step in nats per character, seconds per step (median) and those of the first step."""

    losses: list[float]
    step_s: float
    first_step_s: float


def corpus() -> tuple[Tensor, int]:
    """The text as numbers, and how many different characters there are."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


def batches(ids: Tensor, task: Task) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows ``[B, T + 1]`` at random places, and which of their tokens ``[B, T]`` are dropped."""
    generator = torch.Generator().manual_seed(task.seed)
    for _ in range(task.steps):
        starts = torch.randint(len(ids) - task.length - 1, (task.batch, 1), generator=generator)
        drop = torch.rand(task.batch, task.length, generator=generator) < task.token_drop
        yield ids[starts + torch.arange(task.length + 1)], drop


def train(mode: Mode, task: Task, *, is_compiled: bool = False, label: str = "") -> Run:
    """Train from fresh weights."""
    ids, vocabulary = corpus()
    torch.manual_seed(task.seed)
    model = SpikeKDALM(replace(SpikeKDAConfig(vocabulary=vocabulary), kda_mode=mode))
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    run: Callable[..., Any] = torch.compile(model, backend="layerzero") if is_compiled else model
    losses, seconds = [], []
    for windows, drop in track(batches(ids, task), total=task.steps, description=label):
        start = time.perf_counter()
        logits, _ = run(windows[:, :-1], drop)
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return Run(losses, sorted(seconds)[len(seconds) // 2], seconds[0])


def summary(runs: Mapping[str, Run]) -> Table:
    """A line per run."""
    table = Table(title="Spike-KDA on Python's language reference")
    for column in ("run", "first loss", "last 20 losses", "largest difference", "first step, s", "step, ms"):
        table.add_column(column, justify="left" if column == "run" else "right")
    base = next(iter(runs.values()))
    for name, run in runs.items():
        difference = max(abs(one - two) for one, two in zip(run.losses, base.losses, strict=True))
        last = sum(run.losses[-20:]) / len(run.losses[-20:])
        table.add_row(
            name,
            f"{run.losses[0]:.4f}",
            f"{last:.4f}",
            f"{difference:.2e}",
            f"{run.first_step_s:.1f}",
            f"{1000 * run.step_s:.1f}",
        )
    return table


def plot(runs: Mapping[str, Run], path: Path) -> None:
    """The curves, which lie on each other."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for (name, run), style in zip(runs.items(), ("-", "--", ":"), strict=False):
        axes.plot(run.losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss, nats per character", title="Spike-KDA")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    """Train three times, compare, plot."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=Task.steps)
    options.add_argument("--length", type=int, default=Task.length)
    options.add_argument("--output", type=Path, default=Path("examples/results"))
    settings = options.parse_args()
    task = Task(steps=settings.steps, length=settings.length)
    runs = {
        "sequential": train("sequential", task, label="sequential"),
        "scan": train("scan", task, label="scan"),
        "sequential, layerzero": train("sequential", task, is_compiled=True, label="layerzero"),
    }
    console = Console()
    console.print(lz_compile.Report(lz_compile.reports()))
    console.print(summary(runs))
    settings.output.mkdir(parents=True, exist_ok=True)
    plot(runs, settings.output / "spike_kda.png")
    figures = {name: vars(run) for name, run in runs.items()}
    (settings.output / "spike_kda.json").write_text(json.dumps({"task": vars(task), "runs": figures}) + "\n")


if __name__ == "__main__":
    main()
