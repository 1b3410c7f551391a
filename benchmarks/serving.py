"""How long calls wait where a model meets lengths for the first time.

Calls of a served model take a few times what they take eagerly at worst, while plain ``torch.compile`` has calls of many
seconds, is the claim. Calls of 50 lengths come in random order, one behind the other with a pause between. Each form has a
process of its own with empty caches. Every call is compared with the eager time of its length, measured before in the same
process.

    python -m benchmarks.serving [--model llama] [--hidden 512] [--layers 4] [--calls 1500] [--pause-ms 20] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

import lz_compile
from benchmarks.apart import fresh_caches, run_apart
from benchmarks.arguments import parser
from benchmarks.harness import INDUCTOR, tensors
from benchmarks.publish import Publication, table_of
from benchmarks.shapes import SHAPES, Size, build

SERVED, EAGER = "layerzero, served", "eager"
FORMS = (EAGER, INDUCTOR, SERVED)
SIZES = (64, 128, 192, 256)
WARMUP, ROUNDS = 2, 5

Measured = dict[str, Any]


def replay(form: str, name: str, size: Size, calls: int, pause_s: float) -> Measured:
    """Call with random lengths until there are no more calls and nothing waits for a compiler."""
    model, _ = build(name, size)
    draws = random.Random(0)
    lengths = sorted(draws.sample(range(8, SIZES[-1] + 1), 50))
    inputs = {length: torch.randint(1, 1000, (1, length)) for length in lengths}
    with torch.no_grad():
        eager = {length: _median_s(partial(model, given)) for length, given in inputs.items()}
        expected = {length: tensors(model(given))[0] for length, given in inputs.items()}
        answer, state = _form(form, model)
        seconds: list[tuple[int, float]] = []
        worst_error = 0.0
        for _ in range(calls):
            length = draws.choice(lengths)
            start = time.perf_counter()
            result = answer(inputs[length])
            seconds.append((length, time.perf_counter() - start))
            worst_error = max(worst_error, float((tensors(result)[0] - expected[length]).abs().max()))
            time.sleep(pause_s)
    ratios = sorted(taken / eager[length] for length, taken in seconds)
    return {
        "eager_s": [min(eager.values()), max(eager.values())],
        "worst_s": max(taken for _, taken in seconds),
        "worst": ratios[-1],
        "over_3": sum(ratio > 3 for ratio in ratios),
        "p99": ratios[int(0.99 * len(ratios))],
        "median": statistics.median(ratios),
        "last_median": statistics.median(taken / eager[length] for length, taken in seconds[-len(seconds) // 4 :]),
        "worst_error": worst_error,
        "state": state(),
    }


def _median_s(call: Callable[[], Any]) -> float:
    taken = []
    for _ in range(WARMUP + ROUNDS):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[WARMUP:])


def _form(form: str, model: Any) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """What answers calls, and what became of it."""
    if form == SERVED:
        served = lz_compile.serve(model, padding=lz_compile.Padding(1, SIZES))
        return served, lambda: served.state().to_dict()
    return (model if form == EAGER else torch.compile(model)), lambda: None


def waits_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per form."""
    columns = ["form", "worst call, s", "worst of eager", "over 3", "p99", "median", "median at the end", "compiled"]
    table = table_of("calls of 50 lengths, over the eager time of their length", columns, left=("form",))
    for row in rows:
        found = row["found"]
        ratios = [f"{found[key]:.2f}" for key in ("p99", "median", "last_median")]
        state = found["state"] or {}
        ready = str(state.get("ready", "")) and f"{state['ready']} sizes, {state['waiting']} waiting"
        table.add_row(
            row["case"]["form"],
            f"{found['worst_s']:.3f}",
            f"{found['worst']:.1f}",
            str(found["over_3"]),
            *ratios,
            ready,
        )
    return table


def main() -> None:
    """Replay against every form, or, as a child, against one of them."""
    options = parser(__doc__)
    options.add_argument("--model", choices=list(SHAPES), default="llama", help="a causal one: calls are padded")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    options.add_argument("--calls", type=int)
    options.add_argument("--pause-ms", type=float, default=20.0)
    options.add_argument("--child", help=argparse.SUPPRESS)
    settings = options.parse_args()
    size = Size(length=SIZES[-1], layers=settings.layers, hidden=settings.hidden)
    calls = settings.calls or (100 if settings.quick else 1500)
    if settings.child:
        print(json.dumps(replay(settings.child, settings.model, size, calls, settings.pause_ms / 1e3)))
        return
    publication = Publication(
        "serving", torch.device("cpu"), is_quick=settings.quick, calls=calls, layers=size.layers, hidden=size.hidden
    )
    for form in FORMS:
        arguments = ["--child", form, "--model", settings.model, "--calls", str(calls)]
        arguments += [
            "--layers",
            str(settings.layers),
            "--hidden",
            str(settings.hidden),
            "--pause-ms",
            str(settings.pause_ms),
        ]
        with fresh_caches() as caches:
            found = run_apart("serving", arguments, caches)
        publication.add({"case": {"form": form, "model": settings.model}, "found": found})
        print(
            form,
            f"worst {found['worst_s']:.3f} s, {found['worst']:.1f} of eager, {found['over_3']} calls over 3",
            flush=True,
        )
    publication.show(waits_table(publication.rows))


if __name__ == "__main__":
    main()
