"""A policy is trained on a reward with a flaw, and what the flaw teaches goes to a quarantine that is dropped afterwards.

Five arms, from the same policies and by the same loop (``examples/grpo.py``): no routing, the activation mask, the gradient
mask per token and per rollout, and an oracle that is told which rollouts exploit. Plot and figures go to ``--output``. With
``--backend``, the policy is compiled, and one run of it is held against the same run in eager.

    python -m examples.grpo_routing [--seeds 3] [--steps 80] [--backend eager] [--output examples/results]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import lz_compile
from examples.grpo import (
    FLAWED,
    Figures,
    Group,
    Run,
    Task,
    answers,
    demonstrate,
    exploited,
    figures_of,
    groups_of,
    log_probs_of,
    loss_of,
    policy,
    prompts_of,
)
from examples.grpo_plot import plot
from models.routed_adapter import Arm, Rollouts, Routing, activation_directions, gradient_directions
from models.routing_leakage import Contributions, reached, recorded, scatter
from models.routing_oracle import OracleRouting

ORACLE = "oracle"
ARMS = (*(arm.value for arm in Arm), ORACLE)
RANK, QUARANTINE_RANK = 32, 8
#: Contrast pairs for the directions, and how many prompts each of them has.
PAIRS, PAIRED = 8, 8
#: Every so many steps, what the policy does, with the quarantine and without.
EVERY = 10


@dataclass
class History:
    """One run: what the policy did every :data:`EVERY` steps, and how much of whose gradient reached ``delta_S``.

    ``passed`` and ``there`` are sums of the norms of tokens' gradients, by whether their rollouts exploited. ``rollouts`` has
    one entry per rollout and layer: whether it exploited, the share of its tokens that are flagged one by one, and the cosine
    of its sum. Only rollouts of positive advantage count: what they do is what is learned.
    """

    measured_at: list[int] = field(default_factory=list)
    trained: list[Figures] = field(default_factory=list)
    deployed: list[Figures] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    passed: dict[str, float] = field(default_factory=lambda: {"unwanted": 0.0, "clean": 0.0})
    there: dict[str, float] = field(default_factory=lambda: {"unwanted": 0.0, "clean": 0.0})
    rollouts: list[tuple[bool, float, float]] = field(default_factory=list)

    def share(self, whose: str) -> float:
        """The share of these rollouts' gradient that reached ``delta_S``."""
        return self.passed[whose] / max(self.there[whose], 1e-30)


def targets(model: nn.Module) -> list[str]:
    """The linear layers that are routed: those after which nothing but the residual stream, an activation or logits comes."""
    ends = ("attention.output", "gate", "up", "down", "head")
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name.endswith(ends)]


def contrast(task: Task, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Right answers to flawed prompts, with and without the exploit in front."""
    pairs = []
    for _ in range(PAIRS):
        prompts = prompts_of(task, torch.full((PAIRED,), FLAWED), generator)
        right = answers(prompts)
        pairs.append((torch.cat([prompts, exploited(right)], 1), torch.cat([prompts, right], 1)))
    return pairs


def routed(base: nn.Module, arm: str, task: Task, generator: torch.Generator) -> Routing:
    """A copy of a policy with both adapters, its directions set."""
    model = copy.deepcopy(base)
    sizes = {"rank": RANK, "quarantine_rank": QUARANTINE_RANK}
    routing = (
        OracleRouting(model, targets(model), **sizes)
        if arm == ORACLE
        else Routing(model, targets(model), arm=Arm(arm), **sizes)
    )
    pairs = contrast(task, generator)
    if routing.arm is Arm.ACT:
        routing.aim(activation_directions(routing, pairs, lambda ids: model(ids[:, :-1])))
    else:
        routing.aim(gradient_directions(routing, pairs, lambda ids: -log_probs_of(model, ids).mean()))
    return routing


def optimizer_of(routing: Routing, task: Task) -> torch.optim.Optimizer:
    """Adam with a rate for the kept adapters and one for the quarantine."""
    kept = [layer.delta_s_R for layer in routing.layers.values()]
    quarantined = [each for layer in routing.layers.values() for each in (layer.a_QI, layer.b_OQ)]
    return torch.optim.Adam(
        [
            {"params": kept, "lr": task.learning_rate},
            {"params": quarantined, "lr": task.quarantine_learning_rate},
        ]
    )


def step(
    routing: Routing, run: Run, groups: Sequence[Group], task: Task, optimizer: torch.optim.Optimizer, history: History
) -> None:
    """One step of several prompts, each with its own backward; what reaches ``delta_S`` is noted now and then."""
    for group in groups:
        rollouts = Rollouts(task.rollouts, group.ids.shape[1] - 1)
        routing.begin(rollouts)
        if isinstance(routing, OracleRouting):
            routing.tell(group.is_exploiting)
        if len(history.rewards) % EVERY == 0:
            with recorded(routing) as found:
                loss_of(routing.model, group, task).backward()
            note(routing, found, rollouts, group, history)
        else:
            loss_of(run, group, task).backward()
        routing.collect()
        optimizer.zero_grad(set_to_none=True)
    routing.restore()
    nn.utils.clip_grad_norm_(routing.parameters(), task.largest_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def note(
    routing: Routing, found: Mapping[str, Contributions], rollouts: Rollouts, group: Group, history: History
) -> None:
    """Add a prompt's rollouts to the figures."""
    learned = group.advantages > 0
    for whose, chosen in (("unwanted", group.is_exploiting & learned), ("clean", ~group.is_exploiting & learned)):
        passed, there = reached(routing, found, rollouts, chosen)
        history.passed[whose] += passed
        history.there[whose] += there
    for name, layer in routing.layers.items():
        seen = scatter(layer, found[name], rollouts)
        for values in zip(group.is_exploiting[learned], *(each[learned] for each in seen), strict=True):
            exploits, share, cosine = (float(value) for value in values)
            history.rollouts.append((bool(exploits), share, cosine))


def train(base: nn.Module, arm: str, task: Task, seed: int, backend: str = "eager") -> tuple[History, Routing]:
    """One arm from one policy."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    routing, history = routed(base, arm, task, generator), History()
    optimizer, run = optimizer_of(routing, task), compiled(routing.model, backend)
    for number in range(task.steps + 1):
        if number % EVERY == 0 or number == task.steps:
            measure(routing, task, seed, number, history)
        if number < task.steps:
            groups, reward = groups_of(run, task, generator)
            step(routing, run, groups, task, optimizer, history)
            history.rewards.append(reward)
    return history, routing


def compiled(model: nn.Module, backend: str) -> Run:
    """The policy, compiled unless that is by ``eager``; layerzero leaves no adapter to Inductor, small as they are."""
    if backend == "eager":
        return model
    options: Any = {"layerzero.lock": {"routing": "torch.routing"}} if backend == "layerzero" else None
    return torch.compile(model, backend=backend, dynamic=False, options=options)


def measure(routing: Routing, task: Task, seed: int, number: int, history: History) -> None:
    """What the policy does, with the quarantine and without, on the same prompts every time."""
    history.measured_at.append(number)
    history.trained.append(figures_of(routing.model, task, torch.Generator().manual_seed(seed + 2)))
    with routing.ablated():
        history.deployed.append(figures_of(routing.model, task, torch.Generator().manual_seed(seed + 2)))


def sweep(task: Task, seeds: int, backend: str) -> dict[str, list[History]]:
    """Every arm from every policy."""
    runs: dict[str, list[History]] = {arm: [] for arm in ARMS}
    for seed in track(range(seeds), description="policies"):
        base = demonstrated(task, seed)
        for arm in ARMS:
            runs[arm].append(train(base, arm, task, seed, backend)[0])
    return runs


def demonstrated(task: Task, seed: int) -> nn.Module:
    """A policy before any reward."""
    torch.manual_seed(seed)
    base = policy(task)
    demonstrate(base, task, torch.Generator().manual_seed(seed))
    return base


def agreement(task: Task, backend: str) -> dict[str, float]:
    """How far a compiled run is from eager: the largest difference in rewards, and in what was learned."""
    base, arm = demonstrated(task, 0), Arm.GRAD_ROLLOUT.value
    (one, eager), (two, ours) = train(base, arm, task, 0), train(base, arm, task, 0, backend)
    return {
        "reward": max(abs(a - b) for a, b in zip(one.rewards, two.rewards, strict=True)),
        "delta_s": max(
            float((eager.layers[name].delta_s_R - ours.layers[name].delta_s_R).detach().abs().max())
            for name in eager.layers
        ),
    }


def summary(runs: Mapping[str, Sequence[History]]) -> Table:
    """A line per arm; what is let in is the share of the gradient that reaches ``delta_S``."""
    table = Table(
        title="exploits and right answers after training, with the quarantine (trained) and without (deployed)"
    )
    columns = (
        "arm",
        "exploits, trained",
        "exploits, deployed",
        "right, deployed",
        "unwanted gradient kept",
        "clean kept",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, histories in runs.items():
        table.add_row(
            arm,
            _spread([each.trained[-1].exploits_flawed for each in histories]),
            _spread([each.deployed[-1].exploits_flawed for each in histories]),
            _spread([(each.deployed[-1].right_sound + each.deployed[-1].right_flawed) / 2 for each in histories]),
            _spread([each.share("unwanted") for each in histories]),
            _spread([each.share("clean") for each in histories]),
        )
    return table


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def scattering(history: History) -> dict[str, float]:
    """How often tokens and rollouts of either kind are flagged, over all layers."""
    found = {}
    for whose, exploits in (("unwanted", True), ("clean", False)):
        chosen = [(share, cosine) for is_exploiting, share, cosine in history.rollouts if is_exploiting is exploits]
        found[f"{whose} tokens"] = statistics.fmean(share for share, _ in chosen)
        found[f"{whose} rollouts"] = statistics.fmean(cosine > 0 for _, cosine in chosen)
    return found


def main() -> None:
    """Sweep, compare, plot."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=Task.steps)
    options.add_argument("--backend", choices=("eager", "inductor", "layerzero"), default="eager")
    options.add_argument("--output", type=Path, default=Path("examples/results"))
    settings = options.parse_args()
    torch.set_num_threads(1)  # the policy is too small to be shared out
    task, console = replace(Task(), steps=settings.steps), Console(width=None if Console().is_terminal else 120)
    settings.output.mkdir(parents=True, exist_ok=True)
    if settings.backend != "eager":
        apart = agreement(task, settings.backend)
        if settings.backend == "layerzero":
            console.print(lz_compile.Report(lz_compile.reports()))
        console.print(f"largest difference from eager: {apart}")
        path = settings.output / f"grpo_routing_{settings.backend}.json"
        path.write_text(json.dumps({"task": asdict(task), "difference": apart}) + "\n")
        return
    runs = sweep(task, settings.seeds, settings.backend)
    scattered = {arm: [scattering(each) for each in histories] for arm, histories in runs.items()}
    console.print(summary(runs))
    plot(runs, scattered, settings.output / "grpo_routing.png")
    figures = {arm: [_as_dict(each) for each in histories] for arm, histories in runs.items()}
    record = {"task": asdict(task), "runs": figures, "flagged": scattered}
    (settings.output / "grpo_routing.json").write_text(json.dumps(record) + "\n")


def _as_dict(history: History) -> dict[str, object]:
    """All but the single rollouts, of which there are thousands."""
    return {
        each.name: value
        for each in fields(history)
        if (value := asdict(history)[each.name]) and each.name != "rollouts"
    }


if __name__ == "__main__":
    main()
