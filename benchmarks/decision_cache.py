"""What finding a decision costs: 16 threads at once, one computation per key, and no convoy at a lock, are the claims.

Every thread asks for the same keys, each in an order of its own. Cold starts with an empty cache, where computing a decision
takes a millisecond; warm finds every one. Beside it, what one lock around a dict costs. Time is that of the wall, per
selection of all threads together: with the GIL, threads that never wait for each other take as long as one thread.

    python -m benchmarks.decision_cache [--threads 16] [--selections 100000] [--keys 500] [--rounds 7] [--quick]
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks.harness import Quartiles
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.runtime.choose.decision_cache import DecisionCache

COMPUTE_S = 1e-3
HIT_LIMIT_NS = 500

Find = Callable[[Hashable, Callable[[], str]], str]


class LockedDict:
    """What the cache is compared with: every lookup under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Hashable, str] = {}

    def get_or_compute(self, key: Hashable, compute: Callable[[], str]) -> str:
        """The value, computed under the lock where there is none."""
        with self._lock:
            value = self._entries.get(key)
            if value is None:
                value = self._entries[key] = compute()
            return value


def keys(count: int) -> list[Hashable]:
    """Keys as selection makes them: everything that a decision depends on, 16 fields."""
    return [
        (
            "attention.causal",
            "cuda",
            90,
            "bfloat16",
            128,
            32,
            8,
            "BHSD",
            True,
            "none",
            True,
            False,
            "policy",
            7,
            1,
            length,
        )
        for length in range(count)
    ]


class Workload:
    """Threads that ask for every key again and again; how often each was computed."""

    def __init__(self, count: int, threads: int, selections: int) -> None:
        self.computed: Counter[Hashable] = Counter()
        self.lock = threading.Lock()
        self.keys = keys(count)
        self.threads, self.selections = threads, selections
        asks = [(key, self._compute(key)) for key in self.keys]
        self.orders = [random.Random(seed).sample(asks, len(asks)) for seed in range(threads)]

    def _compute(self, key: Hashable) -> Callable[[], str]:
        def compute() -> str:
            time.sleep(COMPUTE_S)
            with self.lock:
                self.computed[key] += 1
            return "torch.sdpa"

        return compute

    def seconds(self, find: Find) -> float:
        """From the moment when all threads are ready to when the last one is done."""
        start = threading.Barrier(self.threads + 1)
        rounds, rest = divmod(self.selections, len(self.keys))

        def work(order: Sequence[tuple[Hashable, Callable[[], str]]]) -> None:
            start.wait()
            for _ in range(rounds):
                for key, compute in order:
                    find(key, compute)
            for key, compute in order[:rest]:
                find(key, compute)

        workers = [threading.Thread(target=work, args=(order,)) for order in self.orders]
        for worker in workers:
            worker.start()
        start.wait()
        begin = time.perf_counter()
        for worker in workers:
            worker.join()
        return time.perf_counter() - begin


def measure(threads: int, settings: argparse.Namespace) -> dict[str, Any]:
    """One round: cold and warm, and the same with one lock."""
    workload = Workload(settings.keys, threads, settings.selections)
    cache: DecisionCache[str] = DecisionCache()
    cold_s = workload.seconds(cache.get_or_compute)
    warm_s = workload.seconds(cache.get_or_compute)
    get_s = workload.seconds(lambda key, _, get=cache.get: get(key))  # type: ignore[misc]
    computed = workload.computed.copy()
    locked = LockedDict()
    workload.seconds(locked.get_or_compute)
    locked_s = workload.seconds(locked.get_or_compute)
    scale = 1e9 / (threads * settings.selections)
    return {
        "cold_s": cold_s,
        "warm_s": warm_s,
        "warm_ns": warm_s * scale,
        "get_ns": get_s * scale,
        "locked_ns": locked_s * scale,
        "most_computations_of_a_key": max(computed.values()),
        **cache.statistics().to_dict(),
    }


def run_case(threads: int, settings: argparse.Namespace, publication: Publication) -> None:
    """Measure a number of threads, and keep it.

    Raises:
        SystemExit: a key was computed more than once, or evicted.
    """
    runs = [measure(threads, settings) for _ in range(settings.rounds)]
    for run in runs:
        found = (run["computations"], run["most_computations_of_a_key"], run["evictions"])
        if found != (settings.keys, 1, 0):
            raise SystemExit(
                f"{threads} threads: expected {settings.keys} computations, 1 a key, 0 evictions, got {found}"
            )
    timed = {key: rounded(Quartiles.of([run[key] for run in runs])) for key in runs[0] if key.endswith(("_s", "_ns"))}
    counted = {key: runs[-1][key] for key in ("hits", "misses", "computations", "evictions", "expirations", "entries")}
    publication.add({"case": {"threads": threads}, **timed, **counted, "runs": runs})
    print(f"{threads} threads", f"{timed['warm_ns']['median']:.0f} ns a selection", sep=" | ", flush=True)


def cost_table(rows: Sequence[Mapping[str, Any]], is_quick: bool) -> Table:
    """A line per number of threads: medians, and quartiles of what is claimed."""
    columns = (
        "threads",
        "cold s",
        "warm s",
        "ns each",
        "quartiles",
        "get ns",
        "one lock ns",
        "computations",
        "evictions",
    )
    table = table_of("a selection that is found: wall time over all selections of all threads", [*columns, "claim"])
    for row in rows:
        warm = row["warm_ns"]
        verdict = "" if is_quick else "holds" if warm["median"] < HIT_LIMIT_NS else "FAILS"
        table.add_row(
            str(row["case"]["threads"]),
            *(f"{row[key]['median']:.3f}" for key in ("cold_s", "warm_s")),
            f"{warm['median']:.0f}",
            f"{warm['low']:.0f}-{warm['high']:.0f}",
            *(f"{row[key]['median']:.0f}" for key in ("get_ns", "locked_ns")),
            *(str(row[key]) for key in ("computations", "evictions")),
            f"< {HIT_LIMIT_NS} ns {verdict}",
        )
    return table


def main() -> None:
    """Measure one thread, then many."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, default=16)
    options.add_argument("--selections", type=int, help="by each thread, 100000 by default")
    options.add_argument("--keys", type=int, default=500)
    options.add_argument("--rounds", type=int, help="7 by default")
    options.add_argument("--quick", action="store_true", help="few selections and rounds; no published result")
    settings = options.parse_args()
    settings.selections = settings.selections or (5_000 if settings.quick else 100_000)
    settings.rounds = settings.rounds or (2 if settings.quick else 7)
    shown = {name: value for name, value in vars(settings).items() if name != "quick"}
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    device = torch.device("cpu")
    publication = Publication("decision_cache", device, is_quick=settings.quick, has_gil=has_gil, **shown)
    for threads in dict.fromkeys((1, settings.threads)):
        run_case(threads, settings, publication)
    publication.show(cost_table(publication.rows, settings.quick))


if __name__ == "__main__":
    main()
