"""Graft a seed onto a small network that reads handwritten digits, through every stage of its life.

The digits are scikit-learn's (1,797 images of 8 x 8 pixels, from the UCI repository). The host is trained first, alone. Then
the seed learns beside it, is blended in, shadows it, is on probation, and takes its place; a seed that is worse than its host
after shadowing is sent back. Plot and figures go to ``--output``.

    python -m examples.grafting [--host-batches 400] [--batch 64] [--backend layerzero] [--output examples/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor

import lz_compile
from models.grafting import Grafting, GraftingConfig, Host, Stage, loss

mpl.use("Agg")
from matplotlib import pyplot as plt

#: Every so many batches, the accuracy on images that are not trained on.
_EVERY = 10
#: Batches that are looked at once the seed is part of the model, without training it.
_AFTER = 50


@dataclass(frozen=True)
class Task:
    """What is trained on, and how."""

    host_batches: int = 400
    batch: int = 64
    learning_rate: float = 3e-3
    held_out: int = 397
    seed: int = 0


@dataclass
class History:
    """By batch: the stage, alpha, the means of gate and weight; and now and then the accuracy of model, seed and host."""

    stage: list[str] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)
    gate: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    measured_at: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seed_accuracy: list[float] = field(default_factory=list)
    host_accuracy: float = 0.0
    rejections: int = 0


@dataclass(frozen=True)
class Digits:
    """Images ``[N, 1, 8, 8]`` and labels ``[N]``, to train on and held out."""

    images: Tensor
    labels: Tensor
    held_images: Tensor
    held_labels: Tensor

    @classmethod
    def load(cls, task: Task) -> Digits:
        """In a random order, pixels from 0 to 1."""
        bunch = load_digits()
        images = torch.from_numpy(bunch.images).float()[:, None] / 16.0
        labels = torch.from_numpy(bunch.target).long()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(task.seed))
        held, rest = order[: task.held_out], order[task.held_out :]
        return cls(images[rest], labels[rest], images[held], labels[held])

    def batches(self, task: Task) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end, at random."""
        generator = torch.Generator().manual_seed(task.seed + 1)
        while True:
            chosen = torch.randint(len(self.labels), (task.batch,), generator=generator)
            yield self.images[chosen], self.labels[chosen]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """The share of rows whose largest logit is the label's."""
    return float((logits.argmax(-1) == labels).float().mean())


def train_host(host: Host, digits: Digits, task: Task) -> float:
    """Train the host alone; its accuracy on what was held out."""
    optimizer = torch.optim.AdamW(host.parameters(), lr=task.learning_rate)
    for _, (images, labels) in zip(range(task.host_batches), digits.batches(task), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(host(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        return accuracy(host(digits.held_images), digits.held_labels)


def graft(model: Grafting, digits: Digits, task: Task, run: Callable[[Tensor], Any], history: History) -> None:
    """Train the seed until it is part of the model, or was rejected twice."""
    optimizer = torch.optim.AdamW(model.seed.parameters(), lr=task.learning_rate)
    for step, (images, labels) in enumerate(digits.batches(task)):
        found = run(images)
        if model.stage is not Stage.FOSSILIZED:
            optimizer.zero_grad()
            loss(found, labels, model.stage).backward()
            optimizer.step()
        history.stage.append(model.stage.value)
        history.alpha.append(float(model.alpha))
        history.gate.append(float(found.gate_B.mean()))
        history.weight.append(float(found.weight_B.mean()))
        before = model.stage
        if step % _EVERY == 0:
            measure(model, digits, history, step)
        stage = model.advance()
        if before is Stage.SHADOWING and stage is not before and history.seed_accuracy[-1] < history.host_accuracy:
            model.reject()
            history.rejections += 1
        if history.rejections > 1 or (stage is Stage.FOSSILIZED and model.batch > _AFTER):
            return


@torch.no_grad()
def measure(model: Grafting, digits: Digits, history: History, step: int) -> None:
    """Add the accuracy of model and seed on what was held out; the gate's memory is left as it was."""
    memory = model.is_confident.clone()
    found = model(digits.held_images)
    model.is_confident.copy_(memory)
    history.measured_at.append(step)
    history.accuracy.append(accuracy(found.logits_BK, digits.held_labels))
    history.seed_accuracy.append(accuracy(found.seed_logits_BK, digits.held_labels))


def summary(history: History) -> Table:
    """The accuracy at the end of each stage."""
    table = Table(title="grafting onto digits")
    for column in ("stage", "batches", "model", "seed alone", "host alone"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in dict.fromkeys(history.stage):
        count = history.stage.count(stage)
        last = max(index for index, each in enumerate(history.stage) if each == stage)
        place = max(index for index, step in enumerate(history.measured_at) if step <= last)
        shares = (history.accuracy[place], history.seed_accuracy[place], history.host_accuracy)
        table.add_row(stage, str(count), *(f"{share:.3f}" for share in shares))
    return table


def plot(history: History, path: Path) -> None:
    """Alpha, what the gate makes of it, and accuracy, with the stages behind."""
    figure, axes = plt.subplots(figsize=(8, 4))
    shades = dict(zip(dict.fromkeys(history.stage), ("0.97", "0.90", "0.97", "0.90", "0.97"), strict=False))
    start = 0
    for step in range(1, len(history.stage) + 1):
        if step == len(history.stage) or history.stage[step] != history.stage[start]:
            axes.axvspan(start, step, color=shades[history.stage[start]], zorder=0)
            axes.text((start + step) / 2, 1.03, history.stage[start], ha="center", fontsize=8)
            start = step
    axes.plot(history.alpha, "--", color="tab:gray", label="alpha")
    axes.plot(history.gate, color="tab:green", lw=0.6, label="gate (mean)")
    axes.plot(history.weight, color="tab:blue", lw=0.8, label="weight of the seed (mean)")
    axes.plot(history.measured_at, history.accuracy, color="tab:red", label="accuracy")
    axes.plot(history.measured_at, history.seed_accuracy, ":", color="tab:orange", label="accuracy of the seed alone")
    axes.axhline(history.host_accuracy, color="black", lw=0.6, label="accuracy of the host alone")
    axes.set(xlabel="batch", ylim=(0, 1.1), xlim=(0, len(history.stage)))
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    """Train, graft, plot."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--host-batches", type=int, default=Task.host_batches)
    options.add_argument("--batch", type=int, default=Task.batch)
    options.add_argument("--backend", default="", help="of torch.compile, as layerzero; eager without")
    options.add_argument("--output", type=Path, default=Path("examples/results"))
    settings = options.parse_args()
    task = Task(host_batches=settings.host_batches, batch=settings.batch)
    torch.manual_seed(task.seed)
    digits, config, history = Digits.load(task), GraftingConfig(), History()
    host = Host(config)
    history.host_accuracy = train_host(host, digits, task)
    model = Grafting(host, config)
    run = torch.compile(model, backend=settings.backend, dynamic=False) if settings.backend else model
    graft(model, digits, task, run, history)
    console = Console()
    if settings.backend == "layerzero":
        console.print(lz_compile.Report(lz_compile.reports()))
    console.print(summary(history))
    settings.output.mkdir(parents=True, exist_ok=True)
    plot(history, settings.output / "grafting.png")
    (settings.output / "grafting.json").write_text(
        json.dumps({"task": asdict(task), "history": asdict(history)}) + "\n"
    )


if __name__ == "__main__":
    main()
