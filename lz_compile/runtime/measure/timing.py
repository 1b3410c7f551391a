"""Time callables honestly: in turns, after a warm-up, with medians and spread.

A slow spell of the machine then hits every one alike, and ratios are taken within a round, where they are paired.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Quartiles:
    """Median and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """The quartiles of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __truediv__(self, unit: float) -> Quartiles:
        return Quartiles(self.low / unit, self.median / unit, self.high / unit)


@dataclass(frozen=True)
class Timing:
    """Time per call in every round; ``warmup_s`` is what the calls before the first round took."""

    rounds_us: tuple[float, ...]
    warmup_s: float = 0.0

    @property
    def latency_us(self) -> Quartiles:
        """Its quartiles over the rounds."""
        return Quartiles.of(self.rounds_us)

    @property
    def p95_us(self) -> float:
        """The 95th percentile over the rounds."""
        ordered = sorted(self.rounds_us)
        return ordered[(95 * len(ordered) + 99) // 100 - 1]

    @property
    def variance_us(self) -> float:
        """The variance over the rounds, in µs²."""
        return statistics.pvariance(self.rounds_us)

    def relative_to(self, base: Timing) -> Quartiles:
        """This latency over the other's, paired by round: below 1 is faster."""
        return Quartiles.of([own / other for own, other in zip(self.rounds_us, base.rounds_us, strict=True)])


def measure(
    calls: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    rounds: int = 15,
    block_ms: float = 20.0,
    budget_s: float | None = None,
) -> dict[str, Timing]:
    """Time callables in turns.

    A round gives every callable one block of calls, long enough for the clock; the order rotates from round to round.

    Args:
        device: is waited for around every block.
        block_ms: how long a block should take.
        budget_s: stop before a round that would exceed it, after three rounds at the earliest.
    """
    begin = time.perf_counter()
    counts, warmup = {}, {}
    for name, call in calls.items():
        start = time.perf_counter()
        counts[name] = _calls_per_block(call, device, block_ms)
        warmup[name] = time.perf_counter() - start
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            start = time.perf_counter()
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                times[name].append(_block_s(calls[name], counts[name], device) / counts[name] * 1e6)
            now = time.perf_counter()
            if budget_s is not None and number >= 2 and now - begin + (now - start) > budget_s:
                break
    finally:
        if collects:
            gc.enable()
    return {name: Timing(tuple(values), warmup[name]) for name, values in times.items()}


def _calls_per_block(call: Callable[[], Any], device: torch.device, block_ms: float) -> int:
    """Also the warm-up: four calls, or one that takes longer than ten blocks."""
    if _block_s(call, 1, device) > 10 * block_ms / 1e3:
        return 1
    _block_s(call, 1, device)
    return max(1, min(1000, round(block_ms / 1e3 / max(_block_s(call, 2, device), 1e-9) * 2)))


def _block_s(call: Callable[[], Any], count: int, device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait until ``device`` has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
