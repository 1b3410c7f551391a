"""What choosing a kernel is worth: how much slower the chosen one is than the best, tuned, by default and untuned.

For every problem of a grid the kernels are compiled once and timed twice, apart. The first time fills a database, from
which selection chooses; the second time says what that choice costs. The source is spelled in two ways: with PyTorch's
softmax, of which Inductor makes fused attention where its patterns know the rest, and with a softmax by hand, of which it
never does. Claims: the tuned choice loses less than 3 % in the geometric mean, the untuned one (by work and measured rates)
less than 8 %, and neither is ever more than 5 % slower than Inductor's own code. "auto" is the default: the untuned choice,
where the best two cannot be told apart and measuring them pays in a model of 24 layers, made between their timings; it
loses less than 4 %, and is never more than 3 % slower than Inductor.

    python -m benchmarks.selection [--dtypes bfloat16] [--lengths 64 1024] [--rounds 15] [--add] [--quick]

The longest of the lengths says where the grid ends.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from benchmarks.arguments import parse, parser
from benchmarks.harness import Quartiles
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.compile import match_tuning, measuring
from lz_compile.lowering import inductor
from lz_compile.lowering.ops import attention
from lz_compile.runtime.choose.problem import Decision, Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.measure.estimate import INDUCTOR
from lz_compile.runtime.measure.timing import Timing, measure
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.context import SelectionContext, of_facts

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
#: Of each way to choose: what it may lose in the mean, and be slower than Inductor at the most.
LIMITS = {"tuned": (1.03, 1.05), "auto": (1.04, 1.03), "untuned": (1.08, 1.05)}
#: Layers of the model that a choice is made for, and the most seconds for measuring, which graphs of 1,700 calls have.
LAYERS, LITTLE_S = 24, 5.0
#: How the source spells its softmax.
SPELLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "torch": partial(torch.softmax, dim=-1, dtype=torch.float32),
    "by hand": None,
}


@dataclass(frozen=True)
class Case:
    """One attention to choose a kernel for."""

    dtype: torch.dtype
    queries: int
    keys: int
    is_causal: bool = False
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    mask: Literal["none", "bool", "float"] = "none"

    def sizes(self) -> dict[str, int]:
        """By the names that descriptors use."""
        return {
            "batch_size": self.batch,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "seq_len_q": self.queries,
            "seq_len_k": self.keys,
            "head_dim": self.head_dim,
            "value_dim": self.head_dim,
        }

    def to_dict(self) -> dict[str, Any]:
        """As a row's title."""
        kind = "causal" if self.is_causal else "full"
        return {"dtype": str(self.dtype).removeprefix("torch."), "kind": kind, "mask": self.mask, **self.sizes()}


def grid(dtypes: Sequence[torch.dtype], longest: int) -> list[Case]:
    """Prefill, causal or not, with and without groups, batches and masks, wider heads, and decoding."""
    return [case for dtype in dtypes for case in _cases(dtype) if max(case.queries, case.keys) <= longest]


def _cases(dtype: torch.dtype) -> Iterator[Case]:
    for length in LENGTHS:
        for is_causal in (False, True):
            yield Case(dtype, length, length, is_causal)
    for length in (128, 512, 1024, 2048):
        yield Case(dtype, length, length, is_causal=True, kv_heads=2)
    for length in (64, 256, 1024):
        yield Case(dtype, length, length, batch=4)
    for length in (256, 1024):
        yield Case(dtype, length, length, is_causal=True, head_dim=128)
        yield Case(dtype, length, length, mask="bool")
        yield Case(dtype, length, length, mask="float")
    for keys in (128, 512, 1024, 2048, 4096):
        yield Case(dtype, 1, keys)
    for keys in (512, 2048):
        yield Case(dtype, 1, keys, batch=8)
        yield Case(dtype, 1, keys, kv_heads=2)


def run_case(case: Case, device: torch.device, rounds: int, publication: Publication) -> None:
    """Compile every kernel, and the source in its two spellings; then time, choose, and time again."""
    sample = attention.sample(
        case.sizes(), case.dtype, device, variant="causal" if case.is_causal else "full", mask=case.mask
    )
    context = of_facts("attention", sample.attrs, sample.facts, device=device)
    specs = measuring.runnable(context)
    sources = {name: sample.as_written(softmax) for name, softmax in SPELLINGS.items()}

    def form(source: Callable[..., Any] | None, call: Any) -> Any:
        return source if call is None else sample.with_kernel(call)

    with torch.no_grad():
        calls = measuring.compile_forms(context, specs[1:], partial(form, None), sample.inputs)
        for name, source in sources.items():
            calls[name] = measuring.compile_forms(context, specs[:1], partial(form, source), sample.inputs)[INDUCTOR]
        first, second = (measure(calls, device, rounds=rounds) for _ in range(2))
        problems = [_problem(context, name, source, sample.inputs) for name, source in sources.items()]
    untuned = [select(problem, policy.current()) for problem in problems]
    for problem, decision in zip(problems, untuned, strict=True):
        name = problem.surroundings
        _publish(case, problem, decision, _timings(first, name), _timings(second, name), publication)


def _problem(
    context: SelectionContext, name: str, source: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> Problem:
    is_fused = inductor.fuses_attention(source, inputs, inputs[0].device)
    return Problem(context, surroundings=name, left_as="torch.sdpa" if is_fused else None)


def _timings(timings: Mapping[str, Timing], spelling: str) -> dict[str, Timing]:
    """The timings of kernels, with one of the sources as what is left to Inductor."""
    return {INDUCTOR: timings[spelling], **{name: each for name, each in timings.items() if name not in SPELLINGS}}


def _publish(
    case: Case,
    problem: Problem,
    untuned: Decision,
    first: Mapping[str, Timing],
    second: dict[str, Timing],
    publication: Publication,
) -> None:
    specs, auto = measuring.runnable(problem.context), untuned
    asked = match_tuning.open_question(untuned, problem, LAYERS, LITTLE_S)
    if asked:
        timed = {name: first[name] for name in (INDUCTOR, *asked)}
        measuring.keep(
            problem.context, specs, timed, case.sizes(), alone=problem.alone, surroundings=problem.surroundings
        )
        auto = select(problem, policy.current())
    measuring.keep(problem.context, specs, first, case.sizes(), alone=problem.alone, surroundings=problem.surroundings)
    start = time.perf_counter()
    tuned = select(problem, policy.current())
    select_s = time.perf_counter() - start
    row: dict[str, Any] = {
        "case": {**case.to_dict(), "softmax": problem.surroundings, "fused by inductor": problem.left_as is not None},
        "latency_us": {name: rounded(timing.latency_us) for name, timing in second.items()},
        "best": min(second, key=lambda name: second[name].latency_us.median),
        "select_ms": round(select_s * 1e3, 3),
        **{name: _outcome(chosen, second) for name, chosen in zip(LIMITS, (tuned, auto, untuned), strict=True)},
        "asked": asked,
    }
    publication.add(row)
    title = " ".join(str(value) for value in row["case"].values())
    print(title, row["tuned"]["kernel"], f"{row['tuned']['regret']:.3f}", row["untuned"]["kernel"],
          f"{row['untuned']['regret']:.3f}", row["untuned"]["of_inductor"]["median"], sep=" | ", flush=True)  # fmt: skip


def _outcome(decision: Decision, timings: dict[str, Timing]) -> dict[str, Any]:
    """What a choice costs: over the best kernel's median, and over Inductor's, paired by round."""
    own = timings[decision.kernel.kernel_id]
    best = min(timing.latency_us.median for timing in timings.values())
    return {
        "kernel": decision.kernel.kernel_id,
        "why": decision.why,
        "regret": round(own.latency_us.median / best, 4),
        "of_inductor": rounded(own.relative_to(timings[INDUCTOR])),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means and worst cases."""
    found: dict[str, Any] = {"cases": len(rows)}
    for name in LIMITS:
        regrets = [row[name]["regret"] for row in rows]
        of_inductor = [row[name]["of_inductor"]["median"] for row in rows]
        found[name] = {
            "regret": round(_geometric_mean(regrets), 4),
            "worst_regret": max(regrets),
            "of_inductor": round(_geometric_mean(of_inductor), 4),
            "worst_of_inductor": max(of_inductor),
        }
    found["select_ms"] = rounded(Quartiles.of([row["select_ms"] for row in rows]))
    return found


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary_table(found: dict[str, Any]) -> Table:
    """A line for each way to choose."""
    columns = ["choice", "regret", "claim", "worst regret", "of inductor", "worst of inductor", "claim"]
    table = table_of(f"{found['cases']} problems: chosen over best, geometric means", columns, left=("choice",))
    for name, (limit, worst) in LIMITS.items():
        row = found[name]
        table.add_row(
            name,
            f"{row['regret']:.4f}",
            _claim(row["regret"], limit),
            f"{row['worst_regret']:.3f}",
            f"{row['of_inductor']:.3f}",
            f"{row['worst_of_inductor']:.3f}",
            _claim(row["worst_of_inductor"], worst),
        )
    return table


def _claim(value: float, limit: float) -> str:
    return f"< {limit:g} {'holds' if value < limit else 'FAILS'}"


def main() -> None:
    """Run the grid with an empty database of its own."""
    options = parser(__doc__)
    options.add_argument("--add", action="store_true", help="to the rows of other dtypes that are published")
    settings = parse(options, LENGTHS)
    cases = grid(settings.dtypes, max(settings.lengths))
    publication = Publication("selection", settings.device, is_quick=settings.quick, rounds=settings.rounds)
    if settings.add:
        publication.resume()
        measured = {str(dtype).removeprefix("torch.") for dtype in settings.dtypes}
        publication.rows[:] = [row for row in publication.rows if row["case"]["dtype"] not in measured]
    with tempfile.TemporaryDirectory(prefix="lz-selection-") as directory:
        policy.configure(perfdb={"path": str(Path(directory) / "perfdb.sqlite")})
        for case in cases:
            run_case(case, settings.device, settings.rounds, publication)
    found = summary(publication.rows)
    publication.record["summary"] = found
    publication.write()
    publication.show(summary_table(found))


if __name__ == "__main__":
    main()
