"""Loops over time by ``lz.roll_loops``: what compiling costs at 64 and at 4,096 steps, and what a step takes then.

Claimed: compile time at 4,096 steps is at most 1.2 of that at 64, one compile serves all lengths, states that are affine run
20 times as fast as eager and others 3 times, and a training step takes less memory than eager's, less again with ``chunk``.
A call of 64 steps, compiled for that length, takes at most 1.05 of the time of the same loop without ``roll_loops``.
Every compile runs in a process of its own, with empty caches; seconds are of the processor, from the first call to its
result. Without ``roll_loops`` Dynamo traces every step: that is measured at 64 steps, once. Peaks are of a training step,
beyond what is held before it, as in ``benchmarks/attention_memory.py``, each in a process of its own.

    python -m benchmarks.rolled_loops [--repeats 3] [--rounds 7] [--quick] [--only spiking] [--device cuda]

With ``--repeats 0`` nothing is compiled in a process of its own; the first call's seconds are told in any case.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import lz_compile as lz
from benchmarks.apart import fresh_caches, processor_s, run_child
from benchmarks.attention_memory import ALLOCATOR, peak_bytes
from benchmarks.harness import EAGER, LAYERZERO, Quartiles
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.runtime.measure.timing import measure

SHORT, LONG, WIDTH, BATCH = 64, 4096, 32, 2
LENGTHS = (64, 100, 1000, 4096)
#: Of training steps whose memory is measured: sequences, steps, and what is measured of which models.
TRAINED, TRAINED_LENGTHS, CHUNK = 16, (1024, 4096), "chunks of 64"
WAYS = (EAGER, LAYERZERO, CHUNK)
WITHOUT_GRADIENTS = ("spiking",)
REMEMBERED = ("gated units", "two GRU cells", "world model")


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention, a head for each batch."""
    state, outputs = q.new_zeros(q.shape[0], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = decay[:, t, :, None] * state
        held = torch.einsum("bk,bkv->bv", k[:, t], state)
        state = state + beta[:, t, None, None] * torch.einsum("bk,bv->bkv", k[:, t], v[:, t] - held)
        outputs.append(torch.einsum("bk,bkv->bv", q[:, t], state))
    return torch.stack(outputs, 1), state


class StackedCells(nn.Module):
    """Two GRU cells over each other."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        """Step by step, layer by layer."""
        states = [x.new_zeros(x.shape[0], WIDTH) for _ in self.cells]
        found = []
        for x_t in x.unbind(1):
            y = x_t
            for i, cell in enumerate(self.cells):
                y = states[i] = cell(y, states[i])
            found.append(y)
        return torch.stack(found, 1)


class Spiking(nn.Module):
    """Leaky neurons that integrate, fire and are reset."""

    def forward(self, x: Tensor) -> Tensor:
        """Spikes of all steps."""
        potential, spikes = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for t in range(x.shape[1]):
            potential = 0.9 * potential + x[:, t]
            spike = (potential > 1.0).to(x.dtype)
            spikes[:, t] = spike
            potential = potential * (1.0 - spike)
        return spikes


class Decayed(nn.Module):
    """A state that is affine, a gate for each channel, as in minimal gated units."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The states of all steps."""
        h, found = x.new_zeros(x.shape[0], WIDTH), []
        for t in range(x.shape[1]):
            z = torch.sigmoid(self.gate(x[:, t]))
            h = z * h + (1 - z) * self.new(x[:, t])
            found.append(h)
        return torch.stack(found, 1)


def selective_scan(x: Tensor, delta: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba's slow path: a state of eight numbers for each channel."""
    a = -torch.arange(1.0, b.shape[-1] + 1, device=b.device)
    decay, fed = torch.exp(delta[..., None] * a), (delta * x)[..., None] * b[:, :, None, :]
    state, found = x.new_zeros(x.shape[0], x.shape[-1], b.shape[-1]), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + fed[:, t]
        found.append(torch.matmul(state, c[:, t, :, None])[..., 0])
    return torch.stack(found, 1)


class WorldModel(nn.Module):
    """A recurrent state-space model as PlaNet and Dreamer have it: beliefs, and states inferred from observations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.prior, self.posterior = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, actions: Tensor, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Beliefs, prior means and posterior states of all steps."""
        steps = actions.shape[1] + 1
        beliefs, states, means = [torch.empty(0)] * steps, [torch.empty(0)] * steps, []
        beliefs[0] = states[0] = actions.new_zeros(actions.shape[0], WIDTH)
        for t in range(steps - 1):
            hidden = torch.relu(self.embed(torch.cat([states[t], actions[:, t]], 1)))
            beliefs[t + 1] = self.cell(hidden, beliefs[t])
            means.append(self.prior(beliefs[t + 1]).chunk(2, dim=1)[0])
            mean, spread = torch.chunk(self.posterior(torch.cat([beliefs[t + 1], observations[:, t]], 1)), 2, dim=1)
            states[t + 1] = mean + (nn.functional.softplus(spread) + 0.1) * noise[:, t]
        return torch.stack(beliefs[1:], 1), torch.stack(means, 1), torch.stack(states[1:], 1)


def _sequence(steps: int, batch: int = BATCH) -> tuple[Tensor, ...]:
    return (torch.randn(batch, steps, WIDTH),)


def _sequences(steps: int, batch: int = BATCH) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, steps, WIDTH) for _ in range(3))


def _selective(steps: int, batch: int = BATCH) -> tuple[Tensor, ...]:
    b, c = torch.randn(2, batch, steps, 8).unbind()
    return torch.randn(batch, steps, WIDTH), torch.rand(batch, steps, WIDTH), b, c


def _heads(steps: int, batch: int = BATCH) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(3, batch, steps, WIDTH).unbind()
    gates = torch.rand(batch, steps), torch.rand(batch, steps, WIDTH)
    return q, nn.functional.normalize(k, dim=-1), v, *gates


MODELS: Mapping[str, tuple[Callable[[], Any], Callable[..., tuple[Tensor, ...]]]] = {
    "delta rule": (lambda: delta_rule, _heads),
    "selective scan": (lambda: selective_scan, _selective),
    "gated units": (Decayed, _sequence),
    "two GRU cells": (StackedCells, _sequence),
    "world model": (WorldModel, _sequences),
    "spiking": (Spiking, _sequence),
}


def prepared(name: str, device: str) -> tuple[Callable[..., Any], Callable[..., tuple[Tensor, ...]]]:
    """A model, and what makes its inputs, on a device."""
    make, inputs = MODELS[name]
    model = make()

    def moved(steps: int, batch: int = BATCH) -> tuple[Tensor, ...]:
        return tuple(each.to(device) for each in inputs(steps, batch))

    return model.to(device) if isinstance(model, nn.Module) else model, moved


def compile_once(name: str, steps: int, is_rolled: bool, device: str) -> float:
    """Seconds of the processor for a first call."""
    model, inputs = prepared(name, device)
    if is_rolled:
        model = lz.roll_loops(model, *inputs(6))
    given, begin = inputs(steps), processor_s()
    with torch.no_grad():
        run: Callable[..., Any] = torch.compile(model, backend="layerzero", dynamic=False)
        run(*given)
    return processor_s() - begin


def _train(run: Callable[..., Any], given: Sequence[Tensor]) -> None:
    found = run(*given)
    torch.cat([each.flatten() for each in ([found] if isinstance(found, Tensor) else found)]).sum().backward()


def train_once(name: str, steps: int, way: str, device: str) -> int:
    """The peak of a training step's memory in bytes, after two that compile."""
    run, inputs = prepared(name, device)
    if way != EAGER:
        run = lz.roll_loops(run, *inputs(6), chunk=64 if way == CHUNK else None)
        run = torch.compile(run, backend="layerzero", dynamic=False)
    given = [each.requires_grad_() for each in inputs(steps, TRAINED)]

    def step() -> None:
        for each in given:
            each.grad = None
        _train(run, given)

    step()
    step()
    return int(statistics.median(peak_bytes(step, torch.device(device)) for _ in range(3)))


def _compared(run: Callable[[], Any], eager: Callable[[], Any], device: str, rounds: int) -> dict[str, Any]:
    found = measure({LAYERZERO: run, EAGER: eager}, torch.device(device), rounds=rounds)
    ratio = rounded(found[LAYERZERO].relative_to(found[EAGER]))
    return {"of_eager": ratio, "us": rounded(Quartiles.of(found[LAYERZERO].rounds_us))}


def of_unrolled(name: str, steps: int, device: str, rounds: int) -> dict[str, Any]:
    """A loop over the same loop as Dynamo unrolls it, both compiled for one length by this backend, in turns."""
    model, inputs = prepared(name, device)
    given, runs = inputs(steps), {}
    kernels: dict[str, list[str]] = {}
    ways = {"unrolled": copy.deepcopy(model), "rolled": lz.roll_loops(copy.deepcopy(model), *inputs(6))}
    with torch.no_grad():
        for way, each in ways.items():
            lz.clear_reports()
            run: Callable[..., Any] = torch.compile(each, backend="layerzero", dynamic=False)
            torch.testing.assert_close(run(*given), model(*given), rtol=1e-3, atol=1e-4)
            runs[way], kernels[way] = partial(run, *given), _kernels()
        found = measure(runs, torch.device(device), rounds=4 * rounds + 1, block_ms=5.0)
    us = {way: rounded(Quartiles.of(each.rounds_us)) for way, each in found.items()}
    return {"ratio": rounded(found["rolled"].relative_to(found["unrolled"])), "us": us, "kernels": kernels}


def _kernels() -> list[str]:
    """What the last compiles chose, and how loops run that no kernel knows."""
    return sorted({match.kernel for report in lz.reports() for match in report.matches if match.rewritten})


def run_case(name: str, repeats: int, rounds: int, lengths: Sequence[int], device: str) -> dict[str, Any]:
    """Compiles in processes of their own, in turns; then calls of one compiled model, in turns with eager ones."""
    cases = {"unrolled": (lengths[0], False), "short": (lengths[0], True), "long": (lengths[-1], True)}
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for i in range(repeats):
        for case, (steps, is_rolled) in list(cases.items())[min(i, 1) :]:
            with fresh_caches() as variables:
                told = {"name": name, "steps": steps, "is_rolled": is_rolled, "device": device}
                seconds[case].append(run_child("rolled_loops", variables, **told))
    torch._dynamo.reset()
    short = of_unrolled(name, lengths[0], device, rounds)
    lz.clear_reports()
    model, inputs = prepared(name, device)
    run: Callable[..., Any] = lz.roll_loops(copy.deepcopy(model), *inputs(6))
    run = torch.compile(run, backend="layerzero", dynamic=True)
    latency, first_call_s = {}, 0.0
    with torch.no_grad():
        for steps in lengths:
            given, begin = inputs(steps), time.perf_counter()
            found = run(*given)
            first_call_s = first_call_s or time.perf_counter() - begin
            torch.testing.assert_close(found, model(*given), rtol=1e-3, atol=1e-4)
            latency[str(steps)] = _compared(partial(run, *given), partial(model, *given), device, rounds)
    given = tuple(each.requires_grad_() for each in inputs(lengths[-1]))
    training = {}
    if name not in WITHOUT_GRADIENTS:
        training = _compared(partial(_train, run, given), partial(_train, model, given), device, min(rounds, 3))
    peaks: dict[str, dict[int, int]] = {}
    for way in WAYS if name in REMEMBERED else ():
        for steps in TRAINED_LENGTHS if repeats and lengths == LENGTHS else ():
            told = {"name": name, "steps": steps, "way": way, "device": device}
            peaks.setdefault(way, {})[steps] = run_child("rolled_loops", ALLOCATOR, **told)
    pairs = zip(seconds["long"], seconds["short"], strict=True)
    return {
        "case": {"model": name, "lengths": list(lengths)},
        "compile_s": {case: rounded(Quartiles.of(each)) for case, each in seconds.items() if each},
        "long_of_short": rounded(Quartiles.of(ratios)) if (ratios := [long / short for long, short in pairs]) else {},
        "first_call_s": round(first_call_s, 2),
        "compiles": len(lz.reports()),
        "kernels": _kernels(),
        "of_unrolled": short,
        "latency": latency,
        "training": training,
        "peak_bytes": peaks,
    }


def loops_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per model."""
    columns = [
        "model",
        "kernels",
        "64, unrolled",
        "64 steps",
        "4,096",
        "long of short",
        "compiles",
        "of unrolled at 64",
        "of eager at 64",
        "at 4,096",
        "trained",
        *(f"MiB, {way}" for way in WAYS),
    ]
    table = table_of(
        "loops over time: s of the processor to compile, and time over eager's (medians)", columns, ("model", "kernels")
    )
    for row in rows:
        cases = [row["compile_s"].get(case) for case in ("unrolled", "short", "long")]
        seconds = ["" if each is None else f"{each['median']:.1f}" for each in cases]
        ends = [
            row["latency"][str(each)]["of_eager"]["median"]
            for each in (row["case"]["lengths"][0], row["case"]["lengths"][-1])
        ]
        ratio = f"{row['long_of_short']['median']:.2f}" if row["long_of_short"] else ""
        unrolled = f"{row['of_unrolled']['ratio']['median']:.2f}"
        found = [ratio, str(row["compiles"]), unrolled, *(f"{each:.4f}" for each in ends)]
        peaks = ["/".join(f"{each / 2**20:.0f}" for each in row["peak_bytes"].get(way, {}).values()) for way in WAYS]
        trained = f"{row['training']['of_eager']['median']:.4f}" if row["training"] else ""
        found += [trained, *peaks]
        table.add_row(row["case"]["model"], ", ".join(row["kernels"]), *seconds, *found)
    return table


def main() -> None:
    """Measure every model, or, as a child, compile once and print the seconds."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=3, help="processes for each compile")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--quick", action="store_true", help="one process, short loops, into scratch/")
    options.add_argument("--only", nargs="+", default=[], choices=MODELS, help="these models again")
    options.add_argument("--device", default="cpu")
    options.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    settings = options.parse_args()
    if settings.child:
        measured = train_once if "way" in settings.child else compile_once
        print(json.dumps(measured(**settings.child)))
        return
    lengths = (16, 64) if settings.quick else LENGTHS
    repeats = min(settings.repeats, 1) if settings.quick else settings.repeats
    publication = Publication("rolled_loops", torch.device(settings.device), is_quick=settings.quick, repeats=repeats)
    if settings.only:
        publication.resume()
        publication.rows[:] = [row for row in publication.rows if row["case"]["model"] not in settings.only]
    for name in settings.only or MODELS:
        publication.add(run_case(name, repeats, settings.rounds, lengths, settings.device))
    publication.show(loops_table(publication.rows))


if __name__ == "__main__":
    main()
