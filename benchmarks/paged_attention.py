"""Decoding over a cache in blocks: ``lz.paged_attention`` over gathering the keys and PyTorch's attention of them.

Reading blocks in place takes at most a third of gathering and SDPA, is the claim, eager or compiled by Inductor, and so does
that source compiled by us ("rewritten", over Inductor's). Requests are of one length, their blocks lie anywhere.

Beside it stand bytes per second, over those of two loops that only add up: one reads the same blocks in the same order, which
is what there is to gain, and PyTorch's sum reads as much memory from its beginning to its end. Blocks that lie anywhere are
read at half to a third of that rate, whoever reads them, since processors fetch memory ahead within a page.

    python -m benchmarks.paged_attention [--rounds 15] [--quick]
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

import lz_compile as lz
from benchmarks.harness import LAYERZERO, Quartiles
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.lowering.cpp import calls
from lz_compile.runtime.measure.timing import measure
from lz_compile.runtime.problem.context import name_of

OURS, GATHERED, COMPILED, SUM = "paged_attention", "gather and SDPA", "the same by Inductor", "sum"
REWRITTEN, READ = "the same by layerzero", "read in this order"

#: Adds up blocks of two caches in the order of a table, eight registers at a time, two blocks ahead.
READING = """
#include <cstdint>
#include <cstring>
typedef float Floats __attribute__((vector_size(64)));
extern "C" void read(const char* const* caches, const int32_t* table, int64_t places, int64_t bytes, float* out,
                     int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t first = 0; first < places; first += 32) {
    Floats sum[8] = {};
    for (int64_t at = first; at < places && at < first + 32; ++at) {
      const int64_t next = at + 2 < places ? at + 2 : at;
      for (int which = 0; which < 2; ++which) {
        const char *block = caches[which] + table[at] * bytes, *ahead = caches[which] + table[next] * bytes;
        for (int64_t j = 0; j + 512 <= bytes; j += 512) {
          for (int k = 0; k < 8; ++k) {
            Floats x;
            __builtin_prefetch(ahead + j + 64 * k);
            std::memcpy(&x, block + j + 64 * k, 64);
            sum[k] += x;
          }
        }
      }
    }
    for (int k = 1; k < 8; ++k) sum[0] += sum[k];
    std::memcpy(out + first / 32 * 16, &sum[0], 64);
  }
}
"""


@dataclass(frozen=True)
class Case:
    """Requests of so many keys each, in blocks of so many slots."""

    requests: int
    keys: int
    heads: int
    kv_heads: int
    dims: int = 64
    slots: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def read_bytes(self) -> int:
        """Keys and values, once."""
        return 2 * self.requests * self.keys * self.kv_heads * self.dims * self.dtype.itemsize

    def operands(self) -> tuple[torch.Tensor, ...]:
        """Query, caches, table, lengths."""
        columns = -(-self.keys // self.slots)
        blocks = self.requests * columns
        caches = torch.randn(2, blocks, self.slots, self.kv_heads, self.dims).to(self.dtype).unbind()
        table = torch.randperm(blocks).reshape(self.requests, columns).to(torch.int32)
        lengths = torch.full((self.requests,), self.keys, dtype=torch.int32)
        return torch.randn(self.requests, self.heads, self.dims).to(self.dtype), *caches, table, lengths


CASES = (
    Case(32, 2048, 8, 2),
    Case(32, 2048, 8, 2, dtype=torch.bfloat16),
    Case(32, 2048, 8, 8, dims=32),
    Case(32, 2048, 8, 2, slots=1),
    Case(8, 4096, 32, 8, dims=128),
    Case(8, 4096, 32, 8, dims=128, dtype=torch.bfloat16),
    Case(1, 8192, 8, 2),
    Case(4, 256, 8, 2),
)


def gathered(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """What is written where there is no kernel for blocks."""
    key, value = (each[table].flatten(1, 2).transpose(1, 2) for each in (key_cache, value_cache))
    mask = torch.arange(key.shape[2], device=lengths.device) < lengths[:, None]
    found = F.scaled_dot_product_attention(query[:, :, None], key, value, mask[:, None, None], enable_gqa=True)
    return found[:, :, 0]


def reading(key_cache: torch.Tensor, value_cache: torch.Tensor, table: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A call that reads the blocks of a table, and does nothing with them but add them up."""
    function, caches = calls.function("read", READING), calls.addresses((key_cache, value_cache))
    out = torch.zeros(-(-table.numel() // 32), 16)
    sizes = [ctypes.c_int64(each) for each in (table.numel(), key_cache[0].nbytes)]
    places, sums = (ctypes.c_void_p(each.data_ptr()) for each in (table, out))

    def read() -> torch.Tensor:
        function(caches, places, *sizes, sums, ctypes.c_int64(torch.get_num_threads()))
        return out

    return read


def run_case(case: Case, rounds: int) -> dict[str, Any]:
    """All in turns."""
    torch._dynamo.reset()
    operands = case.operands()
    _, key_cache, value_cache, table, _ = operands
    memory = torch.randn(case.read_bytes // 4)
    functions = {OURS: lz.paged_attention, GATHERED: gathered, COMPILED: torch.compile(gathered, dynamic=False)}
    functions[REWRITTEN] = torch.compile(gathered, dynamic=False, backend="layerzero")
    timed: dict[str, Callable[[], Any]] = {name: _bound(function, operands) for name, function in functions.items()}
    expected = timed[GATHERED]()
    apart = max(float((timed[name]() - expected).abs().max()) for name in functions)
    timed |= {SUM: memory.sum, READ: reading(key_cache, value_cache, table)}
    found = measure(timed, torch.device("cpu"), rounds=rounds)
    return {
        "case": {**vars(case), "dtype": name_of(case.dtype)},
        "kernel": lz.which("paged_attention", *operands)["kernel_id"],
        "latency_us": {name: rounded(Quartiles.of(each.rounds_us)) for name, each in found.items()},
        "of_gathered": rounded(found[OURS].relative_to(found[GATHERED])),
        "rewritten_of_compiled": rounded(found[REWRITTEN].relative_to(found[COMPILED])),
        "variants": {LAYERZERO: {"of_inductor": rounded(found[OURS].relative_to(found[COMPILED]))}},
        "gb_per_s": rounded(Quartiles.of([case.read_bytes / each / 1e3 for each in found[OURS].rounds_us])),
        "of_bandwidth": rounded(found[READ].relative_to(found[OURS])),
        "of_sum": rounded(found[SUM].relative_to(found[OURS])),
        "apart": apart,
    }


def _bound(function: Callable[..., Any], operands: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    return lambda: function(*operands)


def paged_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per case."""
    columns = ["case", "kernel", "ms", "of gathered", "of compiled", "rewritten", "GB/s", "of reading", "of a sum"]
    table = table_of("decoding over a cache in blocks (medians)", columns, left=("case", "kernel"))
    for row in rows:
        case = row["case"]
        text = "{requests} x {keys} keys, {heads}/{kv_heads} x {dims}, blocks of {slots}, {dtype}".format(**case)
        figures = [row["latency_us"][OURS]["median"] / 1e3]
        figures += [row["of_gathered"]["median"], row["variants"][LAYERZERO]["of_inductor"]["median"]]
        figures += [row[name]["median"] for name in ("rewritten_of_compiled", "gb_per_s", "of_bandwidth", "of_sum")]
        table.add_row(text, row["kernel"], *(f"{each:.2f}" for each in figures))
    return table


def main() -> None:
    """Measure, and publish."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--quick", action="store_true", help="one case, few rounds; no published result")
    settings = options.parse_args()
    rounds = 3 if settings.quick else settings.rounds
    publication = Publication("paged_attention", torch.device("cpu"), is_quick=settings.quick, rounds=rounds)
    torch.manual_seed(0)
    with torch.no_grad():
        for case in CASES[-1:] if settings.quick else CASES:
            publication.add(run_case(case, rounds))
    publication.show(paged_table(publication.rows))


if __name__ == "__main__":
    main()
