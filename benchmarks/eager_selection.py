"""What selection adds to an eager attention: under 2 us a call, and threads that do not wait for each other, are the claims.

One thread asks for the decision of one attention again and again (key, cache and versions: everything but the call of the
kernel), and calls the attention itself, bare and through layerzero, on tensors so small that the call is all that counts.
Then many threads select for many shapes through the real path, from an empty cache on; every shape must be decided once.

    python -m benchmarks.eager_selection [--threads 16] [--selections 100000] [--shapes 500] [--rounds 7] [--quick]
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

import lz_compile as lz
from benchmarks.harness import Quartiles
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.api import eager
from lz_compile.api.attention_arguments import Call
from lz_compile.runtime.policy import policy

SELECTION_LIMIT_NS = 2_000
_CALLS = 2_000
_BLOCKS = 25  # of calls, in each round and for each variant in turns


def operands(length: int) -> torch.Tensor:
    """Query, key and value of a decoder's layer in one, as small as they can be."""
    return torch.zeros(1, 1, length, 8)


def calls(query: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The loop itself, a selection, and the attention bare and through layerzero."""
    sdpa, plan, attention = F.scaled_dot_product_attention, eager.plan, lz.attention
    return {
        "loop_ns": lambda: None,
        "selection_ns": lambda: plan(Call(query, query, query, None, True, None, 0.0, "BHSD")),
        "sdpa_ns": lambda: sdpa(query, query, query, is_causal=True),
        "attention_ns": lambda: attention(query, query, query),
    }


def latencies(query: torch.Tensor) -> dict[str, float]:
    """What a call of each takes, in ns, without the loop: the best of several blocks, which was disturbed the least."""
    variants = calls(query)
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(_BLOCKS):
        for name, call in variants.items():
            start = time.perf_counter_ns()
            for _ in range(_CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter_ns() - start) / _CALLS)
    found = {name: latency - best["loop_ns"] for name, latency in best.items()}
    return {**found, "added_ns": found["attention_ns"] - found["sdpa_ns"]}


def run_calls(settings: argparse.Namespace, publication: Publication) -> None:
    """Measure one thread that calls, and keep it."""
    query = operands(1)
    lz.attention(query, query, query)
    runs = [latencies(query) for _ in range(settings.rounds)]
    timed = {name: rounded(Quartiles.of([run[name] for run in runs])) for name in runs[0] if name != "loop_ns"}
    publication.add({"case": {"measured": "calls", "threads": 1}, **timed, "runs": runs})
    print("1 thread", f"{timed['selection_ns']['median']:.0f} ns a selection", sep=" | ", flush=True)


def seconds(tensors: Sequence[torch.Tensor], threads: int, selections: int) -> float:
    """From the moment when all threads are ready to when the last one is done; each has an order of its own."""
    start = threading.Barrier(threads + 1)
    orders = [random.Random(seed).sample(list(tensors), len(tensors)) for seed in range(threads)]
    rounds, rest = divmod(selections, len(tensors))

    def work(order: Sequence[torch.Tensor]) -> None:
        plan = eager.plan
        with torch.no_grad():
            start.wait()
            for _ in range(rounds):
                for query in order:
                    plan(Call(query, query, query, None, True, None, 0.0, "BHSD"))
            for query in order[:rest]:
                plan(Call(query, query, query, None, True, None, 0.0, "BHSD"))

    workers = [threading.Thread(target=work, args=(order,)) for order in orders]
    for worker in workers:
        worker.start()
    start.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin


def measure(threads: int, settings: argparse.Namespace) -> dict[str, Any]:
    """One round: from an empty cache, and with every decision in it."""
    tensors = [operands(length) for length in range(1, settings.shapes + 1)]
    eager.forget()
    before = eager.statistics()
    cold_s = seconds(tensors, threads, settings.selections)
    warm_s = seconds(tensors, threads, settings.selections)
    counted = {name: count - before[name] for name, count in eager.statistics().items() if name != "entries"}
    total = threads * settings.selections
    return {"cold_s": cold_s, "warm_s": warm_s, "warm_ns": warm_s / total * 1e9, **counted}


def run_threads(threads: int, settings: argparse.Namespace, publication: Publication) -> None:
    """Measure a number of threads, and keep it.

    Raises:
        SystemExit: a shape was decided more than once, or forgotten.
    """
    runs = [measure(threads, settings) for _ in range(settings.rounds)]
    for run in runs:
        found = (run["computations"], run["evictions"], run["expirations"])
        if found[:2] != (settings.shapes + found[2], 0):
            raise SystemExit(f"{threads} threads: expected {settings.shapes} computations, 0 evictions, got {found}")
    timed = {key: rounded(Quartiles.of([run[key] for run in runs])) for key in ("cold_s", "warm_s", "warm_ns")}
    counted = {key: runs[-1][key] for key in ("hits", "misses", "computations", "evictions", "expirations")}
    publication.add({"case": {"measured": "threads", "threads": threads}, **timed, **counted, "runs": runs})
    print(f"{threads} threads", f"{timed['warm_ns']['median']:.0f} ns a selection", sep=" | ", flush=True)


def call_table(row: Mapping[str, Any], is_quick: bool) -> Table:
    """A line for everything that was called: median and quartiles."""
    title = "one eager attention of one token, ns a call (added: through layerzero, less bare)"
    table = table_of(title, ["what", "median", "quartiles", "claim"], left=("what", "claim"))
    for name in ("selection_ns", "sdpa_ns", "attention_ns", "added_ns"):
        verdict = "holds" if row[name]["median"] < SELECTION_LIMIT_NS else "FAILS"
        claim = f"< {SELECTION_LIMIT_NS} ns {'' if is_quick else verdict}" if name == "selection_ns" else ""
        quartiles = f"{row[name]['low']:.0f}-{row[name]['high']:.0f}"
        table.add_row(name.removesuffix("_ns"), f"{row[name]['median']:.0f}", quartiles, claim)
    return table


def thread_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per number of threads: medians, and what was counted."""
    columns = ["threads", "cold s", "warm s", "ns each", "quartiles", "computations", "evictions"]
    table = table_of("selections by several threads: wall time over all selections of all threads", columns)
    for row in rows:
        table.add_row(
            str(row["case"]["threads"]),
            *(f"{row[key]['median']:.3f}" for key in ("cold_s", "warm_s")),
            f"{row['warm_ns']['median']:.0f}",
            f"{row['warm_ns']['low']:.0f}-{row['warm_ns']['high']:.0f}",
            *(str(row[key]) for key in ("computations", "evictions")),
        )
    return table


def main() -> None:
    """Measure calls, then one thread, then many."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, default=16)
    options.add_argument("--selections", type=int, help="by each thread, 100000 by default")
    options.add_argument("--shapes", type=int, default=500)
    options.add_argument("--rounds", type=int, help="7 by default")
    options.add_argument("--quick", action="store_true", help="few selections and rounds; no published result")
    settings = options.parse_args()
    settings.selections = settings.selections or (2_000 if settings.quick else 100_000)
    settings.rounds = settings.rounds or (2 if settings.quick else 7)
    shown = {name: value for name, value in vars(settings).items() if name != "quick"}
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    policy.configure(cache={"ttl_seconds": 3600.0})  # what is counted must not depend on how long a round takes
    publication = Publication(
        "eager_selection", torch.device("cpu"), is_quick=settings.quick, has_gil=has_gil, ttl_seconds=3600.0, **shown
    )
    with torch.no_grad():
        run_calls(settings, publication)
    for threads in dict.fromkeys((1, settings.threads)):
        run_threads(threads, settings, publication)
    publication.show(call_table(publication.rows[0], settings.quick), thread_table(publication.rows[1:]))


if __name__ == "__main__":
    main()
