"""Peak memory of a training step of a routed adapter: ``lz.routed_adapter`` against the gate form (``benchmarks.routing``).

The claim: the op takes less than the gate form compiled by Inductor, in every case. Every point is a process of its own, and
its peak is counted from what the process holds before the step, as in ``benchmarks/attention_memory.py``.

    python -m benchmarks.routing_memory [--ranks 16 256] [--rollouts 16] [--lengths 128 512 2048] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks.apart import run_apart
from benchmarks.arguments import parser
from benchmarks.attention_memory import ALLOCATOR, peak_bytes
from benchmarks.harness import INDUCTOR, LAYERZERO
from benchmarks.publish import Publication, print_table, table_of
from benchmarks.routing import LENGTHS, STEPS, Case, cases, sizes


def measure_here(variant: str, case: Mapping[str, Any], settings: argparse.Namespace) -> int:
    """One point, in this process: the median of some steps after those that compile."""
    operands = Case(**{**case, "dtype": getattr(torch, case["dtype"])}).build(settings)
    step = STEPS[variant](operands)
    step()
    step()
    return int(statistics.median(peak_bytes(step, settings.device) for _ in range(settings.rounds)))


def measure_apart(variant: str, case: Mapping[str, Any], settings: argparse.Namespace) -> int:
    """One point, in a process of its own."""
    point = json.dumps({"variant": variant, "case": dict(case)})
    arguments = ["--point", point, "--rounds", str(settings.rounds), "--device", str(settings.device)]
    arguments += ["--width", str(settings.width)]
    if settings.quarantine_rank:
        arguments += ["--quarantine-rank", str(settings.quarantine_rank)]
    return int(run_apart("routing_memory", arguments, ALLOCATOR))


def memory_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per case: MiB by variant, and whether the op takes less than the gate form by Inductor."""
    columns = list(rows[0]["case"]) if rows else []
    table = table_of("peak memory of a training step in MiB", [*columns, *STEPS, "op of inductor", "verdict"])
    for row in rows:
        peaks = row["peak_bytes"]
        ratio = peaks[LAYERZERO] / max(peaks[INDUCTOR], 1)
        cells = (f"{peaks[name] / 2**20:.1f}" for name in STEPS)
        table.add_row(*map(str, row["case"].values()), *cells, f"{ratio:.2f}", "lower" if ratio < 1 else "NOT LOWER")
    return table


def main() -> None:
    """Measure every point."""
    options = parser(__doc__)
    sizes(options)
    options.add_argument("--point", help=argparse.SUPPRESS)
    options.set_defaults(rounds=3)
    settings = options.parse_args()
    if settings.point is not None:
        print(measure_here(**json.loads(settings.point), settings=settings))
        return
    settings.lengths = settings.lengths or (LENGTHS[:2] if settings.quick else LENGTHS)
    published = {"width": settings.width, "quarantine_rank": settings.quarantine_rank}
    publication = Publication("routing_memory", settings.device, is_quick=settings.quick, **published)
    for each in cases(settings):
        case = each.to_dict()
        peaks = {variant: measure_apart(variant, case, settings) for variant in STEPS}
        publication.add({"case": case, "peak_bytes": peaks})
        print(
            *case.values(), *(f"{name} {peak / 2**20:.1f} MiB" for name, peak in peaks.items()), sep=" | ", flush=True
        )
    print_table(memory_table(publication.rows))
    print(f"written to {publication.path}")


if __name__ == "__main__":
    main()
