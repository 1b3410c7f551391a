"""Recurrences written as loops: time to compile, and time to run forward and forward with backward, as sequences get longer.

Claims: the KDA loop (B=2, H=4, K=V=64) compiles in what Dynamo needs to trace it plus 5 s at 256 and 512 steps, and at
least 15 times faster than by Inductor at 64; at 1,024 steps it runs at least 8 times faster than the eager loop forward,
and 15 times forward and backward; at 64 it is never slower than Inductor's unrolled code.

Inductor is measured up to ``--inductor-up-to`` steps (it needs minutes beyond), eager's backward up to 1,024. Every
compile starts from empty caches.

    python -m benchmarks.scan [--models kda ema] [--lengths 64 256] [--inductor-up-to 64] [--kernels lz.rolled_scan] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import lz_compile
from benchmarks.arguments import parse, parser
from benchmarks.harness import EAGER, INDUCTOR, LAYERZERO, Function, Timing, compiled, measure, prepare, start_inductor
from benchmarks.publish import Publication, table_of, timing_table
from lz_compile.backend import layerzero
from models.ema import EMA
from models.gated_delta import GatedDelta
from models.spike_kda import sequential
from models.tanh_rnn import TanhRNN

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
#: Beyond it, one backward pass of an eager loop takes seconds.
LONGEST_EAGER_BACKWARD = 1024
#: What each claim says of the KDA loop: length, direction, and how many times faster than eager.
SPEEDUPS = {(1024, "forward"): 8.0, (1024, "forward+backward"): 15.0}
COMPILE_BEYOND_TRACING_S = 5.0

Case = tuple[Function, tuple[Tensor, ...]]


def kda(length: int, dtype: torch.dtype) -> Case:
    """Kimi Delta Attention with a tenth of the tokens dropped: ``[2, T, 4, 64]``."""
    batch, heads, width = 2, 4, 64
    q, k, v, a = torch.randn(4, batch, length, heads, width)
    q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
    decay, gain = torch.sigmoid(a + 2), torch.rand(batch, length, heads)
    drop = torch.rand(batch, length) < 0.1
    weights, output = torch.zeros(batch, heads, width, width), torch.zeros(batch, heads, width)
    given = [each.to(dtype) for each in (q, k, v, decay, gain)]
    return sequential, (*given, drop, weights.to(dtype), output.to(dtype))


def _module(build: Callable[[], nn.Module]) -> Callable[[int, torch.dtype], Case]:
    def case(length: int, dtype: torch.dtype) -> Case:
        return build().to(dtype), (torch.randn(2, length, 256).to(dtype),)

    return case


MODELS: Mapping[str, Callable[[int, torch.dtype], Case]] = {
    "kda": kda,
    "gated_delta": _module(lambda: GatedDelta(256, heads=4, key_dim=64, value_dim=64)),
    "ema": _module(lambda: EMA(256)),
    "tanh_rnn": _module(lambda: TanhRNN(256, 256)),
}


def _run(inputs: Sequence[Tensor], *, is_training: bool) -> Callable[[Function], Any]:
    def run(function: Function) -> Any:
        if not is_training:
            with torch.no_grad():
                return function(*inputs)
        given = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = torch.stack([output.float().square().sum() for output in outputs]).sum()
        leaves = [each for each in given if each.requires_grad]
        return [*outputs, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]

    return run


def compile_stages(model: Function, run: Callable[[Function], Any]) -> dict[str, float]:
    """Seconds of one compile from empty caches: Dynamo's tracing, every stage of ours, Inductor's part, and all of it."""
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    spent: list[float] = []

    def timed(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        start = time.perf_counter()
        try:
            return layerzero(module, inputs)
        finally:
            spent.append(time.perf_counter() - start)

    before = len(lz_compile.reports())
    with fresh_cache():
        function = torch.compile(model, backend=timed, dynamic=False)
        start = time.perf_counter()
        run(function)
        first_s = time.perf_counter() - start
        start = time.perf_counter()
        run(function)
        total_s = first_s - (time.perf_counter() - start)
    graphs = lz_compile.Report(lz_compile.reports()[before:]).graphs
    stages = {name: sum(graph.seconds.get(name, 0.0) for graph in graphs) for graph in graphs for name in graph.seconds}
    # What the first call does lazily (the backward graph) belongs to the compile, but to neither of the two.
    return {"total": total_s, "trace": first_s - sum(spent) if len(spent) == 1 else float("nan"), **stages}


def run_case(
    publication: Publication, name: str, length: int, dtype: torch.dtype, settings: argparse.Namespace
) -> None:
    """Compile, check and time one model at one length, in both directions."""
    for is_training in (False, True):
        if is_training and length > LONGEST_EAGER_BACKWARD:
            continue
        torch.manual_seed(0)
        with settings.device:
            model, inputs = MODELS[name](length, dtype)
        run = _run(inputs, is_training=is_training)
        stages = compile_stages(model, run)
        torch._dynamo.reset()
        functions = compiled(model, locks=settings.kernels, op="scan")
        if length > settings.inductor_up_to:
            del functions[INDUCTOR]
        prepared = prepare(functions, run, is_cold=True)
        timings = measure(prepared.variants, settings.device, rounds=settings.rounds)
        case = {
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "length": length,
            "direction": "forward+backward" if is_training else "forward",
        }
        compile_s = {variant.name: variant.first_call_s for variant in prepared.variants if variant.name != EAGER}
        publication.add_timings(case, prepared, timings, stages_s=stages, compile_s=compile_s)
        _tell(case, compile_s, timings, stages)


def _tell(
    case: Mapping[str, Any], compile_s: Mapping[str, float], timings: Mapping[str, Timing], stages: Mapping[str, float]
) -> None:
    """A line as soon as a case is done."""
    texts = [f"{name} compiled in {seconds:.1f} s" for name, seconds in compile_s.items()]
    texts += [f"{name} {1e-3 * timing.latency_us.median:.2f} ms" for name, timing in timings.items()]
    print(*case.values(), *texts, f"tracing {stages['trace']:.1f} s", sep=" | ", flush=True)


def compile_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per case: the seconds of every stage, and of Inductor without us."""
    stages = list(dict.fromkeys(name for row in rows for name in row["stages_s"]))
    cases = list(rows[0]["case"]) if rows else []
    table = table_of("seconds to compile", [*cases, *stages, "beyond tracing", INDUCTOR], left=("model", "direction"))
    for row in rows:
        seconds, theirs = row["stages_s"], row["compile_s"].get(INDUCTOR)
        table.add_row(
            *map(str, row["case"].values()),
            *(f"{seconds.get(name, 0.0):.2f}" for name in stages),
            f"{seconds['total'] - seconds['trace']:.2f}",
            "" if theirs is None else f"{theirs:.1f}",
        )
    return table


def claims(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What holds of the claims, of those cases that were run."""
    found = []
    for row in rows:
        case, variants, seconds = row["case"], row["variants"], row["stages_s"]
        if case["model"] != "kda" or LAYERZERO not in variants:
            continue
        title = f"kda {case['dtype']} {case['length']} {case['direction']}"
        wanted = SPEEDUPS.get((case["length"], case["direction"]))
        ratio = 1 / variants[LAYERZERO]["of_eager"]["median"]
        if wanted is not None:
            found.append(f"{title}: {ratio:.1f}x eager, claim {wanted:g}x {_holds(ratio >= wanted)}")
        if case["length"] in (256, 512):
            beyond = seconds["total"] - seconds["trace"]
            claim = f"claim {COMPILE_BEYOND_TRACING_S:g} s {_holds(beyond <= COMPILE_BEYOND_TRACING_S)}"
            found.append(f"{title}: compiles {beyond:.1f} s beyond tracing, {claim}")
        if case["length"] == 64 and INDUCTOR in row["compile_s"]:
            faster = row["compile_s"][INDUCTOR] / row["compile_s"][LAYERZERO]
            found.append(f"{title}: compiles {faster:.0f}x faster than Inductor, claim 15x {_holds(faster >= 15)}")
            of_inductor = variants[LAYERZERO]["of_inductor"]["median"]
            found.append(f"{title}: runs in {of_inductor:.2f} of Inductor's time, claim 1 {_holds(of_inductor <= 1)}")
    return found


def _holds(claim: bool) -> str:
    return "holds" if claim else "FAILS"


def main() -> None:
    """Run every case."""
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=list(MODELS), default=["kda"])
    options.add_argument("--kernels", nargs="*", default=[], help="kernels of the op scan to lock, each a variant")
    options.add_argument("--inductor-up-to", type=int, default=64)
    settings = parse(options, LENGTHS)
    start_inductor()
    publication = Publication("scan", settings.device, is_quick=settings.quick, models=settings.models)
    for name, dtype, length in itertools.product(settings.models, settings.dtypes, settings.lengths):
        run_case(publication, name, length, dtype, settings)
    publication.show(timing_table("recurrences", publication.rows), compile_table(publication.rows))
    print(*claims(publication.rows), sep="\n")


if __name__ == "__main__":
    main()
