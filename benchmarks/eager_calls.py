"""What a call that decoding makes at every token costs without a compiler: at most 40 us each is the claim.

The functions are called on tensors so small that the call is all that counts: a token of a vocabulary of 1,000, a step of two
heads of 16, three drafts. Beside each, what PyTorch's own operations for the same take. The least of many blocks, in turns,
of the thread's time: others on the machine are not measured.

The last row is what compiled code pays for a call of ``lz.rolled_scan``, whatever the number of its steps (some 20 us). With
``--compiling``, how long a compile by Inductor takes for each call of a graph instead (8 ms where
it was measured): loops of two lengths are
compiled, each in a process of its own, without caches. ``layerzero.loops="auto"`` weighs both (``docs/recurrences.md``).

    python -m benchmarks.eager_calls [--calls 500] [--blocks 25] [--rounds 5] [--compiling] [--quick]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

import lz_compile as lz
from benchmarks.harness import Quartiles
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.kernels.scan import rolled
from lz_compile.lowering.ops.scan import Operands, ScanAttrs

LIMIT_US = 40
#: Of what no program calls itself, and docs/recurrences.md tells.
LIMITS_US = {"lz.rolled_scan in a graph": 20}
VOCAB = 1000
#: Calls of one step of the loop that is compiled: a slice, a product, a sum, an activation.
CALLS_OF_A_STEP = 4

Call = Callable[[], Any]


def sampling() -> dict[str, tuple[Call, Call]]:
    """Ours, and PyTorch's that is next to it, of calls that draw."""
    logits, words = torch.randn(1, VOCAB), torch.full((32,), -1, dtype=torch.int32)
    allowed, seeds = torch.ones(VOCAB, dtype=torch.bool), torch.tensor([7])
    target, draft = torch.rand(1, 4, VOCAB).softmax(-1), torch.rand(1, 3, VOCAB).softmax(-1)
    drafted = torch.tensor([[1, 2, 3]])

    def accepted() -> torch.Tensor:
        p, q = (each[:, :3].gather(-1, drafted[..., None])[..., 0] for each in (target, draft))
        return torch.rand(1, 3) * q < p

    return {
        "sample": (
            lambda: lz.sample(logits, temperature=0.8, seeds=seeds),
            lambda: torch.multinomial(torch.softmax(logits / 0.8, -1), 1),
        ),
        "apply_token_bitmask": (
            lambda: lz.apply_token_bitmask(logits, words),
            lambda: logits.masked_fill(~allowed, -torch.inf),
        ),
        "speculative_verify": (lambda: lz.speculative_verify(drafted, draft, target, seeds=7), accepted),
    }


def recurrences() -> dict[str, tuple[Call, Call]]:
    """Of one step of a recurrence."""
    q, k, v, alpha = (torch.rand(1, 1, 2, 16) for _ in range(4))
    beta, state = torch.rand(1, 1, 2), torch.zeros(1, 2, 16, 16)
    decay, drive, before = torch.rand(2, 1, 8), torch.rand(2, 1, 8), torch.zeros(2, 8)

    def step() -> torch.Tensor:
        decayed = alpha[:, 0, :, :, None] * state
        key = (beta[:, 0, :, None] * k[:, 0])[..., None]
        written = v[:, 0, :, None] - k[:, 0, :, None] @ decayed
        return q[:, 0, :, None] @ (decayed + key @ written)

    return {
        "kda": (lambda: lz.kda(q, k, v, alpha, beta, initial_state=state), step),
        "linear_scan": (
            lambda: lz.linear_scan(decay, drive, initial=before),
            lambda: torch.addcmul(drive[:, 0], decay[:, 0], before),
        ),
    }


def blends() -> dict[str, tuple[Call, Call]]:
    """Of a blend, with its default telemetry."""
    host, seed, blender = torch.randn(2, 8), torch.randn(2, 8), lz.Blender(alpha=0.3)
    return {"Blender": (lambda: blender(host, seed), lambda: torch.lerp(host, seed, blender.alpha))}


def in_graphs() -> dict[str, tuple[Call, Call]]:
    """Of the operator that compiled code calls for all steps of a recurrence, and of a step by PyTorch."""
    step = torch.rand(2, 1, 1, 1, 8)
    rolled.scan(Operands(decay=step, drive=step), _ATTRS)  # it is defined
    decay, drive, before = torch.rand(2, 1, 16, 1, 8), torch.rand(2, 1, 16, 1, 8), torch.zeros(2, 1, 1, 8)
    operator, attrs = torch.ops.layerzero.rolled_scan_forward_kernel.default, encode(_ATTRS)

    def run() -> Any:
        return operator(before, decay, None, None, None, drive, None, attrs, rolled.CHUNK, False)

    return {"lz.rolled_scan in a graph": (run, lambda: torch.addcmul(drive[:, :, 0], decay[:, :, 0], before))}


_ATTRS = ScanAttrs("after", False, torch.float32, torch.float32, torch.float32)


def compile_s(steps: int) -> float:
    """How long a compile by Inductor takes of a loop of so many steps, in this process; not what it takes to begin."""

    def loop(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(h @ weight + x[:, t])
        return h

    compiled = torch.compile(loop, backend="inductor", dynamic=False)
    for length in (2, steps):
        start = time.perf_counter()
        compiled(torch.randn(2, length, 8), torch.randn(8, 8))
    return time.perf_counter() - start


def compiling(publication: Publication, lengths: tuple[int, int]) -> None:
    """Add what a call of a graph costs Inductor: the difference between loops of two lengths."""
    variables = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    found = []
    for steps in lengths:
        command = [sys.executable, "-m", "benchmarks.eager_calls", "--child", str(steps)]
        output = subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout
        found.append(float(output.splitlines()[-1]))
    cost_ms = 1e3 * (found[1] - found[0]) / (CALLS_OF_A_STEP * (lengths[1] - lengths[0]))
    publication.add({"case": {"steps": list(lengths)}, "compile_s": found, "ms_per_call": round(cost_ms, 1)})
    table = table_of("compiling a loop", ["steps", "s", "ms for a call"])
    for steps, seconds in zip(lengths, found, strict=True):
        table.add_row(str(steps), f"{seconds:.1f}", f"{cost_ms:.1f}")
    publication.show(table)


def latencies(calls: Mapping[str, tuple[Call, Call]], count: int, blocks: int) -> dict[str, tuple[float, float]]:
    """What a call of each takes, ours and PyTorch's, in us: the best of several blocks, which was disturbed the least."""
    best = dict.fromkeys(calls, (float("inf"), float("inf")))
    for _ in range(blocks):
        for name, pair in calls.items():
            found = []
            for call in pair:
                start = time.thread_time_ns()
                for _ in range(count):
                    call()
                found.append((time.thread_time_ns() - start) / count / 1e3)
            best[name] = min(best[name][0], found[0]), min(best[name][1], found[1])
    return best


def table(rows: Sequence[Mapping[str, Any]], is_quick: bool) -> Table:
    """A line for every function: medians and quartiles."""
    found = table_of(
        "one call without a compiler, us", ["function", "ours", "quartiles", "PyTorch", "claim"], left=("claim",)
    )
    for row in rows:
        ours = row["ours_us"]
        limit = LIMITS_US.get(row["case"]["function"], LIMIT_US)
        verdict = "" if is_quick else "holds" if ours["median"] <= limit else "FAILS"
        quartiles = f"{ours['low']:.1f}-{ours['high']:.1f}"
        plain = f"{row['pytorch_us']['median']:.1f}"
        found.add_row(row["case"]["function"], f"{ours['median']:.1f}", quartiles, plain, f"<= {limit} us {verdict}")
    return found


def main() -> None:
    """Measure every function."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--calls", type=int, help="of a block, 500 by default")
    options.add_argument("--blocks", type=int, help="of a round, 25 by default")
    options.add_argument("--rounds", type=int, help="5 by default")
    options.add_argument("--compiling", action="store_true", help="how long Inductor takes for a call, instead")
    options.add_argument("--quick", action="store_true", help="few calls and rounds; no published result")
    options.add_argument("--child", type=int, help=argparse.SUPPRESS)
    settings = options.parse_args()
    if settings.child is not None:
        print(compile_s(settings.child))
        return
    if settings.compiling:
        compiling(
            Publication("eager_calls_compiling", torch.device("cpu"), is_quick=settings.quick),
            (16, 48) if settings.quick else (64, 192),
        )
        return
    settings.calls = settings.calls or (50 if settings.quick else 500)
    settings.blocks = settings.blocks or (3 if settings.quick else 25)
    settings.rounds = settings.rounds or (2 if settings.quick else 5)
    shown = {name: value for name, value in vars(settings).items() if name in ("calls", "blocks", "rounds")}
    publication = Publication("eager_calls", torch.device("cpu"), is_quick=settings.quick, **shown)
    torch.manual_seed(0)
    with torch.no_grad():
        calls = {**sampling(), **recurrences(), **blends(), **in_graphs()}
        for ours, _ in calls.values():
            ours()  # code is built, decisions are made
        runs = [latencies(calls, settings.calls, settings.blocks) for _ in range(settings.rounds)]
    for name in calls:
        own, plain = (Quartiles.of([run[name][place] for run in runs]) for place in (0, 1))
        publication.add({"case": {"function": name}, "ours_us": rounded(own), "pytorch_us": rounded(plain)})
        print(name, f"{own.median:.1f} us", f"PyTorch {plain.median:.1f} us", sep=" | ", flush=True)
    publication.show(table(publication.rows, settings.quick))


if __name__ == "__main__":
    main()
