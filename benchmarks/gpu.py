"""Every op's kernels on a GPU, in one call of a few minutes: what each takes, and whether a CUDA graph may capture it.

First, processes side by side compile every row, so that caches are warm, and try to capture each kernel; a captured kernel
must give on new inputs what it gives without a graph. Then one process times, in turns, what is compiled anew from those
caches, with the host's part and as replays of a CUDA graph without it: those that decide most come first, and the time ends
where ``--minutes`` says. What was written is not measured again, so that a second call goes on. ``chosen`` is what is chosen
without any measurement.

Inductor's part of a row is the op as models spell it; of recurrences longer than 64 steps it is left out, for it takes
minutes to compile, as are some kernels at large sizes (:data:`LONGEST`). Whether results are right is what
``tests/test_gpu.py`` tests.

    python -m benchmarks.gpu [--minutes 9] [--out DIR] [--only OP ...] [--dry]    ``--dry``: tiny sizes on the CPU, no result
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.environment import slug
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.api.sampled import SizedProblem, grid
from lz_compile.compile import measuring
from lz_compile.ground import events
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.measure.estimate import INDUCTOR
from lz_compile.runtime.measure.timing import measure
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.context import SelectionContext, name_of, of_facts

#: Processes that compile side by side.
WARMERS = 10
#: Beyond which of a problem's sizes a kernel is left out: it takes a minute or more to compile there.
LONGEST: Mapping[str, tuple[str, int]] = {
    INDUCTOR: ("length", 64),
    "torch.scan_sequential": ("length", 64),
    "lz.associative_matrix_scan": ("length", 512),
    "lz.blocked": ("seq_len_q", 512),
}
ROUNDS = 9
_DONE = "done.json"


@dataclass(frozen=True)
class Row:
    """One problem of an op; sizes by the names that descriptors use."""

    operation: str
    sizes: Mapping[str, int]
    dtype: torch.dtype = torch.bfloat16
    training: bool = False
    details: Mapping[str, str] = field(default_factory=dict)

    def title(self) -> dict[str, Any]:
        """As a row's case."""
        return {
            "operation": self.operation,
            "dtype": name_of(self.dtype),
            "direction": "forward+backward" if self.training else "forward",
            "sizes": " ".join(f"{name}={size}" for name, size in self.sizes.items())
            + "".join(f" {name}={value}" for name, value in self.details.items()),
        }

    def problem(self) -> SizedProblem:
        """With the op's own sample."""
        return grid("tune", self.operation, [self.dtype], self.sizes)[0]

    def small(self) -> Row:
        """The same at tiny sizes."""
        return replace(self, sizes={name: min(size, 16) for name, size in self.sizes.items()}, dtype=torch.float32)


def _attention(batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int) -> dict[str, int]:
    return {
        "batch_size": batch, "num_heads": heads, "num_kv_heads": kv_heads, "seq_len_q": queries, "seq_len_k": keys,
        "head_dim": dim, "value_dim": dim,
    }  # fmt: skip


def _paged(requests: int, queries: int) -> dict[str, int]:
    return {
        "num_requests": requests, "num_queries": requests * queries, "num_heads": 32, "num_kv_heads": 8, "seq_len_k": 4096,
        "block_size": 16, "head_dim": 128, "value_dim": 128,
    }  # fmt: skip


def _scan(length: int, *, heads: int = 16, width: int = 64, batch: int = 4) -> dict[str, int]:
    return {"batch_size": batch, "num_heads": heads, "length": length, "key_dim": width, "value_dim": width}


def _rows_of(hidden: int) -> dict[str, int]:
    return {"num_rows": (1 << 25) // hidden, "hidden_size": hidden}


def rows() -> list[Row]:
    """Those that decide most first."""
    half, single = torch.float16, torch.float32
    middle, long = _attention(4, 16, 16, 512, 512, 64), _attention(4, 16, 16, 2048, 2048, 128)
    grouped, decoding = _attention(1, 32, 8, 4096, 4096, 128), _attention(8, 32, 8, 1, 4096, 128)
    adapter = {
        "num_rollouts": 16, "rollout_length": 512, "in_features": 4096, "out_features": 4096, "rank": 64,
        "quarantine_rank": 16,
    }  # fmt: skip
    rope = {"batch_size": 4, "num_heads": 32, "seq_len_q": 2048, "head_dim": 128}
    short = _attention(4, 16, 16, 1024, 1024, 64)
    return [
        Row("attention.causal", long),
        Row("attention.causal", middle),
        Row("attention.full", long),
        Row("attention.full", middle),
        Row("attention.full", long, details={"mask": "bool"}),
        Row("attention.full", long, details={"mask": "float"}),
        Row("attention.causal", long, training=True),
        Row("attention.causal", grouped),
        Row("attention.full", decoding),
        Row("attention.causal", middle, single),
        Row("attention.full", middle, single, details={"mask": "float"}),
        Row("paged_attention.decode", _paged(64, 1)),
        Row("paged_attention.ragged", _paged(16, 16)),
        *[
            Row("linear.quantised", {"num_rows": rows, "in_features": 4096, "out_features": 14336})
            for rows in (1, 16, 64)
        ],
        Row("linear.quantised", {"num_rows": 1, "in_features": 4096, "out_features": 4096}),
        Row("linear.quantised", {"num_rows": 256, "in_features": 4096, "out_features": 4096}),
        Row("scan.delta", _scan(64)),
        Row("scan.delta", _scan(2048)),
        Row("scan.diagonal", _scan(2048)),
        Row("scan.delta", _scan(2048), training=True),
        Row("scan.diagonal", _scan(2048), training=True),
        Row("scan.delta", _scan(512), single),
        Row("scan.diagonal", _scan(64)),
        Row("norm.rms", _rows_of(4096)),
        Row("norm.rms", _rows_of(4096), training=True),
        Row("norm.layer", _rows_of(4096)),
        Row("norm.layer", _rows_of(4096), training=True),
        Row("norm.rms", _rows_of(1024)),
        Row("norm.rms", _rows_of(16384), training=True),
        Row("norm.rms", {"num_rows": 64, "hidden_size": 4096}),
        Row("rope", rope),
        Row("rope", rope, training=True),
        Row("mlp.gated", {"num_rows": 8192, "intermediate_size": 11008}),
        Row("mlp.gated", {"num_rows": 8192, "intermediate_size": 11008}, training=True),
        Row("sampling.ids", {"num_rows": 64, "vocab_size": 128000}, single),
        Row("sampling.ids", {"num_rows": 1, "vocab_size": 128000}, single),
        Row("sampling.probs", {"num_rows": 64, "vocab_size": 128000}, single),
        Row("routing.grad", adapter, training=True),
        Row("routing.none", adapter, training=True),
        Row("blend.convex", {"num_rows": 256, "num_channels": 512, "inner_size": 196}),
        Row("blend.confidence", {"num_rows": 4096, "num_channels": 1024, "inner_size": 1, "num_classes": 32000}),
        Row("blend.residual", {"num_rows": 256, "num_channels": 512, "inner_size": 196}, training=True),
        Row("attention.causal", short, half),
        Row("attention.causal", short, training=True),
        Row("attention.full", _attention(1, 32, 8, 1, 1024, 128)),
        Row("attention.full", _attention(32, 16, 16, 128, 128, 64)),
        Row("attention.causal", _attention(1, 16, 16, 8192, 8192, 128)),
        Row("routing.act", adapter, training=True),
        Row("scan.diagonal", _scan(512), single, training=True),
    ]


@dataclass(frozen=True)
class Prepared:
    """A row's inputs, the kernels that can run it, and the form of each."""

    sample: Any
    context: SelectionContext
    specs: Sequence[KernelSpec]

    @classmethod
    def of(cls, row: Row, device: torch.device) -> Prepared:
        """With random inputs."""
        torch.manual_seed(0)
        sample = row.problem().sample(device, training=row.training, **row.details)
        context = of_facts(row.problem().op, sample.attrs, sample.facts, device=device)
        able = [each for each in measuring.runnable(context) if each.load() is None]
        limits = {each.kernel_id: LONGEST.get(each.kernel_id, ("", 0)) for each in able}
        specs = [each for each in able if row.sizes.get(limits[each.kernel_id][0], 0) <= limits[each.kernel_id][1]]
        return cls(sample, context, specs)

    def form(self, call: Callable[..., Any] | None) -> Callable[..., Any]:
        """The problem by a kernel, or as it is written."""
        fused = (
            {"softmax": partial(torch.softmax, dim=-1, dtype=torch.float32)} if self.context.op == "attention" else {}
        )
        written: Callable[..., Any] = self.sample.as_written(**fused)
        return written if call is None else self.sample.with_kernel(call)

    def compiled(self) -> dict[str, Callable[[], Any]]:
        """Every form as something to time."""
        return measuring.compile_forms(self.context, self.specs, self.form, self.sample.inputs)

    def captured(self) -> Iterator[tuple[str, str]]:
        """Each kernel, and why a CUDA graph cannot capture it; empty where it can."""
        for spec in self.specs:
            if spec.call is not None:
                yield spec.kernel_id, _why_not_captured(self.form(spec.call), self.sample.inputs)


def _why_not_captured(function: Callable[..., Any], inputs: Sequence[Any]) -> str:
    """Capture a forward pass, replay it on other inputs, and compare with the function itself."""
    given = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in inputs]
    try:
        with torch.no_grad():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(2):
                    function(*given)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                outputs = function(*given)
            for each in given:
                if isinstance(each, torch.Tensor) and each.is_floating_point():
                    each.mul_(0.5)
            graph.replay()
            torch.cuda.synchronize()
            expected = function(*given)
        torch.testing.assert_close(outputs, expected, equal_nan=True, rtol=1e-3, atol=1e-3)
    except Exception as error:  # noqa: BLE001 why it cannot is the answer
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return ""


def warm(place: int, of: int, device: torch.device, directory: Path, chosen: Sequence[Row]) -> None:
    """Compile every ``of``-th row, and write what may be captured."""
    found: dict[str, dict[str, str]] = {}
    path = directory / f"captures-{place}.json"
    done = json.loads((directory / _DONE).read_text())
    for row in [each for each in chosen if each.title() not in done][place::of]:
        with torch.set_grad_enabled(row.training):
            torch._dynamo.reset()
            prepared = Prepared.of(row, device)
            prepared.compiled()
        if device.type == "cuda":
            for kernel_id, why in prepared.captured():
                found.setdefault(kernel_id, {})[" ".join(map(str, row.title().values()))] = why
            path.write_text(json.dumps(found))
        del prepared


def _warm_all(directory: Path, seconds: float, *, only: Sequence[str], is_dry: bool) -> dict[str, dict[str, str]]:
    """In processes side by side; what may be captured, and why not. One that fails is told; its rows are compiled later."""
    count = 1 if is_dry else WARMERS
    command = [sys.executable, "-m", "benchmarks.gpu", *(["--dry"] if is_dry else []), "--out", str(directory)]
    command += ["--only", *only] if only else []
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    started = []
    for place in range(count):
        with (directory / f"errors-{place}.txt").open("w") as errors:
            own = [*command, "--warm", str(place), str(count)]
            started.append(subprocess.Popen(own, env=environment, stderr=errors))
    end = time.monotonic() + seconds
    for place, process in enumerate(started):
        try:
            if process.wait(max(end - time.monotonic(), 0.0)):
                lines = (directory / f"errors-{place}.txt").read_text().strip().splitlines()
                print(f"warming up, process {place} failed: {lines[-1] if lines else process.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
    found: dict[str, dict[str, str]] = {}
    for path in sorted(directory.glob("captures-*.json")):
        for kernel_id, by_row in json.loads(path.read_text()).items():
            found.setdefault(kernel_id, {}).update(by_row)
    return found


def profile(device: torch.device, *, is_dry: bool) -> dict[str, float]:
    """What the device does at most: GB/s of a copy, TFLOP/s of a product by dtype, and microseconds of a launch."""
    width, size = (64, 1 << 12) if is_dry else (8192, 1 << 30)
    calls: dict[str, Callable[[], Any]] = {}
    given, taken = (torch.empty(size, device=device, dtype=torch.uint8) for _ in range(2))
    calls["copy"] = lambda: taken.copy_(given)
    one = torch.zeros(1, device=device)
    calls["launch"] = lambda: one.add_(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        factor = torch.randn(width, width, device=device).to(dtype)
        calls[name_of(dtype)] = partial(torch.matmul, factor, factor)
    found = {name: timing.latency_us.median for name, timing in measure(calls, device, rounds=5).items()}
    rates = {
        f"{name}_tflops": 2e-6 * width**3 / micros for name, micros in found.items() if name not in ("copy", "launch")
    }
    return {"copy_gb_per_s": 2e-3 * size / found["copy"], "launch_us": found["launch"], **rates}


def replays(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Each call that a CUDA graph can capture as the replay of one, which takes the device's time and none of the host's."""
    found: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except Exception as error:  # noqa: BLE001 ``captures`` tells of each why it cannot be
            events.record("MEASUREMENT_FAILED", f"capturing {name}", error)
        else:
            found[name] = graph.replay
    return found


def run_row(row: Row, device: torch.device, publication: Publication) -> None:
    """Compile from caches, time in turns, and keep."""
    torch._dynamo.reset()
    with torch.set_grad_enabled(row.training), events.collect() as happened:
        prepared = Prepared.of(row, device)
        calls = prepared.compiled()
        timings = measure(calls, device, rounds=ROUNDS, block_ms=10.0)
        captured = replays(calls) if device.type == "cuda" and not row.training else {}
        alone = measure(captured, device, rounds=ROUNDS, block_ms=10.0) if captured else {}
    latency = {name: rounded(timing.latency_us) for name, timing in timings.items()}
    best = min(timings, key=lambda name: timings[name].latency_us.median)
    base = timings.get(INDUCTOR)
    of_inductor = {} if base is None else {name: rounded(each.relative_to(base)) for name, each in timings.items()}
    chosen = select(Problem(prepared.context), policy.current()).kernel.kernel_id
    failed = [f"{event.code}: {event.message}"[:300] for event in happened]
    features = sorted(prepared.context.features)
    publication.add(
        {
            "case": row.title(), "features": features, "latency_us": latency, "of_inductor": of_inductor, "best": best,
            "replayed_us": {name: rounded(timing.latency_us) for name, timing in alone.items()}, "chosen": chosen,
            "events": failed,
        }
    )  # fmt: skip
    shown = ", ".join(f"{name} {each['median']:g}" for name, each in latency.items())
    print(*row.title().values(), f"chosen {chosen}", f"best {best}", shown, sep=" | ", flush=True)


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    """A line per row."""
    result = table_of(
        "microseconds", ["operation", "dtype", "direction", "sizes", "chosen", "latency"], left=("sizes", "latency")
    )
    for row in found:
        latency = ", ".join(f"{name} {each['median']:g}" for name, each in row["latency_us"].items())
        result.add_row(*map(str, row["case"].values()), row["chosen"], latency)
    return result


def _rows(only: Sequence[str], *, is_dry: bool) -> list[Row]:
    found = [row for row in rows() if not only or row.operation.partition(".")[0] in only]
    return [row.small() for row in found] if is_dry else found


def main() -> None:
    """Warm up, then time for as long as there is."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=9.0, help="for all of it")
    options.add_argument("--out", type=Path, help="where the result goes instead of benchmarks/results")
    options.add_argument("--only", nargs="+", default=[], metavar="OP", help="the rows of these ops alone")
    options.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    options.add_argument("--warm", nargs=2, type=int, help=argparse.SUPPRESS)
    settings = options.parse_args()
    end = time.monotonic() + 60 * settings.minutes
    device = torch.device("cpu" if settings.dry else "cuda")
    wanted = _rows(settings.only, is_dry=settings.dry)
    if settings.warm:
        place, of = settings.warm
        warm(place, of, device, settings.out, wanted)
        return
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here: nothing is measured (--dry tries it on the CPU)")
        return
    publication = Publication("gpu", device, is_quick=settings.dry)
    if settings.out is not None:
        settings.out.mkdir(parents=True, exist_ok=True)
        publication.path = settings.out / f"gpu-{slug(device)}.json"
    publication.resume()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / _DONE).write_text(json.dumps([row["case"] for row in publication.rows]))
        captures = _warm_all(Path(directory), (end - time.monotonic()) / 2, only=settings.only, is_dry=settings.dry)
    known = publication.record.setdefault("captures", {})
    for kernel_id, by_row in captures.items():
        known.setdefault(kernel_id, {}).update(by_row)
    publication.record["profile"] = profile(device, is_dry=settings.dry)
    publication.write()
    done = [row["case"] for row in publication.rows]
    for row in wanted:
        if row.title() not in done and time.monotonic() < end:
            run_row(row, device, publication)
    publication.show(table(publication.rows))


if __name__ == "__main__":
    main()
