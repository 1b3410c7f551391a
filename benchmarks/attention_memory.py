"""Peak memory of a training step of causal attention: eager, Inductor, layerzero, and layerzero with a kernel locked.

The claim: a kernel that computes a tile of scores at a time, and again in backward, needs memory that grows linearly with
the sequence, where one that stores them needs its square. ``lz.blocked`` stores none, but its blocks are as long as 16 of
them make them, and Inductor keeps several alive. The exponent between two lengths is log(memory ratio) / log(length ratio).

Every point is a process of its own. A step is forward and backward (``benchmarks/attention.py``, form ``causal``); its
peak is counted from what the process holds before it, inputs and compiled code included: resident memory on a CPU (Linux
only), what PyTorch's allocator gave out on CUDA.

    python -m benchmarks.attention_memory [--lengths 512 1024 2048 4096] [--dtypes fp32] [--locks lz.blocked] [--quick]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import lz_compile
from benchmarks.apart import run_apart
from benchmarks.arguments import parser
from benchmarks.attention import Case, runner
from benchmarks.harness import EAGER, INDUCTOR, compiled
from benchmarks.publish import Publication, print_table, table_of

LENGTHS = (512, 1024, 2048, 4096, 8192)
LOCKS = ("torch.sdpa", "lz.tiled", "lz.blocked")
#: Those that store the scores are not run beyond this length.
LONGEST_STORED = 4096
#: Large blocks are then given back to the system as soon as they are freed, and not kept for a next step.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """The most memory that ``step`` holds at a time beyond what was held before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure_here(variant: str, dtype: str, length: int, settings: argparse.Namespace) -> dict[str, Any]:
    """One point, in this process: the median of some steps after those that compile."""
    function, inputs = Case("causal", getattr(torch, dtype), length).build(settings)
    locks = [] if variant in (EAGER, INDUCTOR) else [variant]
    run, chosen = runner(inputs, is_training=True), compiled(function, locks)[variant]
    run(chosen)
    run(chosen)
    kernels = [match.kernel for graph in lz_compile.reports() for match in graph.matches]
    peaks = [peak_bytes(lambda: run(chosen), settings.device) for _ in range(settings.rounds)]
    return {"peak_bytes": int(statistics.median(peaks)), "kernels": kernels}


def measure_apart(variant: str, dtype: str, length: int, settings: argparse.Namespace) -> dict[str, Any]:
    """One point, in a process of its own."""
    point = json.dumps({"variant": variant, "dtype": dtype, "length": length})
    arguments = ["--point", point, "--rounds", str(settings.rounds), "--device", str(settings.device)]
    arguments += ["--batch", str(settings.batch), "--heads", str(settings.heads), "--head-dim", str(settings.head_dim)]
    measured: dict[str, Any] = run_apart("attention_memory", arguments, ALLOCATOR)
    return measured


def memory_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per dtype and variant: peaks in MiB by length, with the exponent since the length before."""
    lengths = sorted({row["case"]["length"] for row in rows})
    table = table_of(
        "peak memory of a training step in MiB (exponent of its growth since the length before)",
        ["dtype", "variant", *map(str, lengths)],
        left=("variant",),
    )
    for dtype, variant in dict.fromkeys((row["case"]["dtype"], row["case"]["variant"]) for row in rows):
        peaks = {
            row["case"]["length"]: row["peak_bytes"]
            for row in rows
            if (row["case"]["dtype"], row["case"]["variant"]) == (dtype, variant)
        }
        table.add_row(dtype, variant, *(_cell(peaks, length) for length in lengths))
    return table


def _cell(peaks: Mapping[int, int], length: int) -> str:
    if length not in peaks:
        return ""
    shorter = max((each for each in peaks if each < length), default=None)
    text = f"{peaks[length] / 2**20:.1f}"
    if shorter is None or min(peaks[shorter], peaks[length]) <= 0:
        return text
    return f"{text} ({math.log(peaks[length] / peaks[shorter]) / math.log(length / shorter):.2f})"


def main() -> None:
    """Measure every point."""
    options = parser(__doc__)
    options.add_argument("--locks", nargs="*", default=list(LOCKS), help="kernels to lock")
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--head-dim", type=int, default=64)
    options.add_argument("--point", help=argparse.SUPPRESS)
    options.set_defaults(rounds=3, dtypes=[torch.float32])
    settings = options.parse_args()
    settings.training = True
    if settings.point is not None:
        print(json.dumps(measure_here(**json.loads(settings.point), settings=settings)))
        return
    lengths = settings.lengths or (LENGTHS[:2] if settings.quick else LENGTHS)
    sizes = {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim}
    publication = Publication("attention_memory", settings.device, is_quick=settings.quick, **sizes)
    for dtype, variant, length in itertools.product(settings.dtypes, (EAGER, INDUCTOR, *settings.locks), lengths):
        if variant in (EAGER, INDUCTOR) and length > LONGEST_STORED:
            continue
        case = {"dtype": str(dtype).removeprefix("torch."), "variant": variant, "length": length}
        measured = measure_apart(variant, case["dtype"], length, settings)
        publication.add({"case": case, **measured})
        print(*case.values(), f"{measured['peak_bytes'] / 2**20:.1f} MiB", *measured["kernels"], sep=" | ", flush=True)
    print_table(memory_table(publication.rows))
    print(f"written to {publication.path}")


if __name__ == "__main__":
    main()
