"""What kernels whose rows have bits of their own cost: over our plain kernel of the same op, and over PyTorch's linear.

The policy `deterministic: "batch_invariant"` chooses them, whatever they cost. Compared with: `lz.tiled` for attention, what
Inductor makes of `torch.norm` and `torch.mlp`, and `F.linear`.

    python -m benchmarks.row_bits [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.publish import Publication, table_of
from lz_compile.lowering import ops, rows
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.timing import measure

Runs = dict[str, Callable[[], Any]]


def problems(is_quick: bool) -> Iterator[tuple[str, str, str, Runs]]:
    """Op, sizes, dtype, and what is timed: the kernel of rows and the plain one."""
    for dtype in (torch.float32, torch.bfloat16):
        for lengths in ((64, 64),) if is_quick else ((512, 512), (2048, 2048), (1, 2048)):
            sizes = dict(zip(("seq_len_q", "seq_len_k"), lengths, strict=True))
            heads = {"batch_size": 1, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "value_dim": 64}
            yield _of("attention", heads | sizes, dtype, "lz.row_attention", "lz.tiled", compiled=False)
        for count in (4,) if is_quick else (1, 512):
            norm, mlp = {"num_rows": count, "hidden_size": 2048}, {"num_rows": count, "intermediate_size": 2816}
            yield _of("norm", norm, dtype, "lz.row_norm", "torch.norm", compiled=True)
            yield _of("mlp", mlp, dtype, "lz.row_mlp", "torch.mlp", compiled=True)
            x, weight = torch.randn(count, 1024).to(dtype), torch.randn(4096, 1024).to(dtype)
            runs: Runs = {"rows": partial(rows.linear, x, weight, None), "plain": partial(F.linear, x, weight)}
            yield "linear", f"{count} x 1024 x 4096", str(dtype), runs


def _of(
    op: str, sizes: dict[str, int], dtype: torch.dtype, own: str, plain: str, *, compiled: bool
) -> tuple[str, str, str, Runs]:
    sample = ops.module(op).sample(sizes, dtype, torch.device("cpu"))
    one, other = (sample.with_kernel(kernels(op)[name].call) for name in (own, plain))
    other = torch.compile(other) if compiled else other
    runs: Runs = {"rows": partial(one, *sample.inputs), "plain": partial(other, *sample.inputs)}
    return op, " ".join(f"{name} {size}" for name, size in sizes.items()), str(dtype), runs


def main() -> None:
    """Measure, and publish."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="tiny sizes; no published result")
    settings = options.parse_args()
    publication = Publication("row_bits", torch.device("cpu"), is_quick=settings.quick)
    table = table_of("Rows", ("op", "sizes", "dtype", "rows, us", "plain, us", "ratio"), ("op", "sizes", "dtype"))
    with torch.no_grad():
        for op, sizes, dtype, runs in problems(settings.quick):
            found = measure(runs, torch.device("cpu"), rounds=5 if settings.quick else 15)
            own, plain = (round(found[name].latency_us.median, 1) for name in ("rows", "plain"))
            publication.add({"op": op, "sizes": sizes, "dtype": dtype, "rows_us": own, "plain_us": plain})
            table.add_row(op, sizes, dtype, f"{own:.0f}", f"{plain:.0f}", f"{own / plain:.2f}")
    publication.show(table)


if __name__ == "__main__":
    main()
