"""The figure of ``examples/grpo_routing.py``."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

if TYPE_CHECKING:
    from examples.grpo_routing import History

mpl.use("Agg")
from matplotlib import pyplot as plt

#: Rollouts in the cloud of points, of each kind.
_POINTS = 300
_COLOURS = {"unwanted": "tab:red", "clean": "tab:blue"}


def plot(
    runs: Mapping[str, Sequence[History]], scattered: Mapping[str, Sequence[Mapping[str, float]]], path: Path
) -> None:
    """What is deployed, how gradient leaks, and how flags scatter; bars and lines are means over seeds, with their range."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    _curves(axes[0, 0], runs, "exploits_flawed", "exploits on flawed prompts, deployed")
    _curves(axes[0, 1], runs, "right_flawed", "right digits on flawed prompts, deployed")
    _leakage(axes[1, 0], runs)
    _cloud(axes[1, 1], runs["grad, per rollout"], scattered["grad, per rollout"])
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _curves(axis: Any, runs: Mapping[str, Sequence[History]], name: str, title: str) -> None:
    for number, (arm, histories) in enumerate(runs.items()):
        steps = histories[0].measured_at
        values = [[getattr(each.deployed[place], name) for each in histories] for place in range(len(steps))]
        axis.plot(steps, [statistics.mean(each) for each in values], color=f"C{number}", label=arm)
        axis.fill_between(
            steps, [min(each) for each in values], [max(each) for each in values], color=f"C{number}", alpha=0.15, lw=0
        )
    trained = [
        statistics.mean(getattr(each.trained[place], name) for each in runs["none"]) for place in range(len(steps))
    ]
    axis.plot(steps, trained, ":", color="black", label="none, with the quarantine")
    axis.set(xlabel="step", title=title, ylim=(-0.02, 1.02))
    axis.legend(fontsize=8, loc="center right" if name.startswith("exploits") else "lower right")


def _leakage(axis: Any, runs: Mapping[str, Sequence[History]]) -> None:
    for offset, whose in ((-0.2, "unwanted"), (0.2, "clean")):
        shares = [[each.share(whose) for each in histories] for histories in runs.values()]
        means = [statistics.mean(each) for each in shares]
        below = [mean - min(each) for mean, each in zip(means, shares, strict=True)]
        above = [max(each) - mean for mean, each in zip(means, shares, strict=True)]
        places = [number + offset for number in range(len(runs))]
        label = f"of {whose} rollouts"
        axis.bar(places, means, 0.4, yerr=(below, above), color=_COLOURS[whose], alpha=0.7, label=label)
    axis.set_xticks(range(len(runs)), list(runs), fontsize=8)
    axis.set(title="share of the gradient that reaches the kept adapter", ylim=(0, 1.05))
    axis.legend(fontsize=8)


def _cloud(axis: Any, histories: Sequence[History], scattered: Sequence[Mapping[str, float]]) -> None:
    """One point for a rollout in one layer: the share of tokens flagged one by one, and the cosine that flags it."""
    chance = random.Random(0)
    for whose, exploits in (("unwanted", True), ("clean", False)):
        points = [
            (share, cosine) for each in histories for is_one, share, cosine in each.rollouts if is_one is exploits
        ]
        points = chance.sample(points, min(_POINTS, len(points)))
        tokens, rollouts = (
            statistics.mean(each[f"{whose} {unit}"] for each in scattered) for unit in ("tokens", "rollouts")
        )
        label = f"{whose}: {tokens:.0%} of tokens, {rollouts:.0%} of rollouts flagged"
        axis.scatter(*zip(*points, strict=True), s=8, alpha=0.5, color=_COLOURS[whose], label=label)
    axis.axhline(0.0, color="black", lw=0.8)
    axis.set(
        xlabel="share of a rollout's tokens that are flagged one by one", ylabel="cosine of the rollout with v_grad"
    )
    axis.set(title="flags per token, and per rollout (above the line)", ylim=(-1.35, 1.05))
    axis.legend(fontsize=8, loc="lower right")
