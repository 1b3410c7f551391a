"""The chart of the README: latency over Inductor's, one dot for each case of every result file.

Nothing is chosen by hand. Every file under ``benchmarks/results/`` that compares layerzero with Inductor is a row, and
every case of it a dot, those that are slower than Inductor included.

    python -m benchmarks.chart        (or `make chart`; writes docs/chart.svg)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import INDUCTOR, LAYERZERO
from lz_compile.report import charts

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
CHART = ROOT.parent / "docs" / "chart.svg"
#: What the scripts measure, in the order of the rows; other result files follow under their own names.
TITLES = {
    "attention": "attention, forward",
    "attention_training": "attention, training step",
    "selection": "attention, tuned choice",
    "packed": "packed documents, forward",
    "packed_training": "packed documents, training step",
    "models": "whole models",
    "third_party": "models of other projects",
    "scan": "KDA loop of 64 steps",
    "short_loops": "loops of 16 and 32 steps",
    "recurrent_models": "recurrent models of transformers",
    "decoding": "attention of a decoding step",
    "decoding_steps": "decoding steps in user code",
    "sampling": "lz.sample over torch.multinomial",
    "paged_attention": "decoding over caches in blocks",
    "quantised": "products with weights of few bits",
    "wide_products": "products of 16 bits without instructions",
    "wide_products_training": "the same, training step",
    "routing": "lz.routed_adapter, training step",
    "blend": "blends",
    "attention_gpu": "attention on a GPU, forward",
    "models_gpu": "whole models on a GPU",
    "gpu": "ops on a GPU, untuned choice",
}


@dataclass(frozen=True)
class Point:
    """One case of one result file; ``ratio`` is layerzero's latency over Inductor's."""

    name: str
    machine: str
    case: str
    ratio: float


def points(results: Path = RESULTS) -> list[Point]:
    """Every case that was compared with Inductor, in the order of the files and of their rows."""
    found = []
    for path in sorted(results.glob("*.json")):
        record = json.loads(path.read_text())
        for row in record["rows"]:
            ratio = _ratio(row)
            if ratio is not None:
                case = " ".join(map(str, row["case"].values()))
                found.append(Point(name_of(record), _machine(record), case, ratio))
    return found


def name_of(record: Mapping[str, Any]) -> str:
    """The row of a result file: those of GPUs are apart."""
    name = str(record["name"])
    return f"{name}_gpu" if "gpu" in record["machine"] and name != "gpu" else name


def _machine(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    processor = machine["cpu"].replace("(R)", "").removesuffix(" Processor")
    return machine.get("gpu") or f"{processor}, {machine['cpu_capability']}"


def _ratio(row: Mapping[str, Any]) -> float | None:
    """The median over rounds, None where the case was not compared with Inductor."""
    if "chosen" in row:
        chosen = row["of_inductor"].get(row["chosen"])
        return None if chosen is None else float(chosen["median"])
    entries = row.get("variants") or {LAYERZERO: row.get("tuned", {})}
    ours, theirs = entries.get(LAYERZERO, {}), entries.get(INDUCTOR, {})
    if "of_inductor" in ours:
        return float(ours["of_inductor"]["median"])
    if "of_layerzero" in theirs:
        return round(1 / float(theirs["of_layerzero"]["median"]), 4)
    return None


def digest(found: Sequence[Point]) -> str:
    """What the chart was drawn from; it stands in the file."""
    return hashlib.sha256(json.dumps([astuple(each) for each in found]).encode()).hexdigest()[:16]


def draw(found: Sequence[Point], path: Path, *, has_gpu: bool) -> None:
    """Write the chart as SVG, equal for equal points.

    Raises:
        SystemExit: there is nothing to draw.
    """
    if not found:
        raise SystemExit("drawing the chart: no result file compares layerzero with Inductor; run `make bench` first")
    names = [*(name for name in TITLES if any(each.name == name for each in found))]
    names += sorted({each.name for each in found} - set(names))
    described = f"drawn from results {digest(found)}"
    with charts.figure(path, "chart", described, figsize=(9, 0.36 * len(names) + 1.5)) as figure:
        axis = figure.subplots()
        _dots(axis, found, names)
        _labels(axis, found, names)
        device = "CPU and GPU" if has_gpu else "CPU; not timed on a GPU"
        figure.suptitle(f"layerzero's latency over Inductor's ({device}): left of the line is faster", fontsize=10)


def _dots(axis: Any, found: Sequence[Point], names: Sequence[str]) -> None:
    for number, machine in enumerate(sorted({each.machine for each in found})):
        here = [each for each in found if each.machine == machine]
        rows = [names.index(each.name) + 0.22 * (number - 1) for each in here]
        axis.plot([each.ratio for each in here], rows, "o", markersize=4, alpha=0.6, color=f"C{number}", label=machine)
    axis.axvline(1, color="black", linewidth=1)
    ratios = [1.0, *(each.ratio for each in found)]
    axis.set(xscale="log", xlim=(min(ratios) / 1.2, max(ratios) * 1.2), ylim=(len(names) - 0.4, -0.6))
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=3, frameon=False)


def _labels(axis: Any, found: Sequence[Point], names: Sequence[str]) -> None:
    low, high = axis.get_xlim()
    ticks = [each for each in (0.01, 0.03, 0.1, 0.3, 1, 2, 4) if low < each < high]
    axis.set_xticks(ticks, [f"{each:g}" for each in ticks])
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(names)), [TITLES.get(name, name) for name in names])
    axis.grid(axis="x", alpha=0.3)
    for row, name in enumerate(names):
        ratios = [each.ratio for each in found if each.name == name]
        text = f"mean {statistics.geometric_mean(ratios):.2f}, worst {max(ratios):.2f}, {len(ratios)} cases"
        axis.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)


def main() -> None:
    """Draw the chart from the committed results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--output", type=Path, default=CHART)
    path = options.parse_args().output
    records = [json.loads(each.read_text()) for each in RESULTS.glob("*.json")]
    draw(points(), path, has_gpu=any("gpu" in record["machine"] for record in records))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
