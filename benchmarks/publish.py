"""Measurements as tables for people and as JSON for comparison, with the machine and the versions beside them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.environment import environment, slug
from benchmarks.harness import EAGER, INDUCTOR, LAYERZERO, Prepared, Quartiles, Timing, Variant

ROOT = Path(__file__).parent
WIDTH = 200  # of tables that go to a file or a pipe


class Publication:
    """The results of one script; written after every case, so that a long run that is stopped keeps what it has.

    Only complete runs are kept under ``results/``; quick ones go to ``scratch/``.
    """

    def __init__(self, name: str, device: torch.device, *, is_quick: bool, **settings: Any) -> None:
        directory = ROOT / ("scratch" if is_quick else "results")
        self.path = directory / f"{name}-{slug(device)}.json"
        self.rows: list[dict[str, Any]] = []
        self.record: dict[str, Any] = {"name": name, **environment(device), "settings": settings, "rows": self.rows}
        print_environment(self.record)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, and write everything that there is."""
        self.rows.append(row)
        self.write()

    def resume(self) -> None:
        """Go on with what was written before, on this device and with this PyTorch, if any was."""
        found = json.loads(self.path.read_text()) if self.path.exists() else {}
        if found and (_device(found), found["versions"]["torch"]) == (_device(self.record), torch.__version__):
            self.rows[:] = found.pop("rows")
            self.record.update({name: value for name, value in found.items() if name not in self.record})

    def write(self) -> None:
        """Write everything that there is."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.record, indent=2).replace(f"{ROOT.parent}{os.sep}", "")  # places in it are the project's
        self.path.write_text(text + "\n")

    def add_timings(
        self, case: Mapping[str, Any], prepared: Prepared, timings: Mapping[str, Timing], **more: Any
    ) -> None:
        """Keep one case with all of its variants, and print a line about it."""
        entries = {variant.name: _entry(variant, timings) for variant in prepared.variants}
        self.add({"case": dict(case), "variants": entries, "disagreements": dict(prepared.disagreements), **more})
        ours = entries.get(LAYERZERO)
        if ours is not None:
            kernels = ours["kernels"] or "nothing recognised"
            ratios = f"{_median(ours, 'of_inductor'):.2f} of inductor, {_median(ours, 'of_eager'):.2f} of eager"
            print(_title(case), kernels, ratios, sep=" | ", flush=True)
        for text in prepared.disagreements.values():
            print(_title(case), "WRONG", text, sep=" | ", flush=True)

    def show(self, *tables: Table) -> None:
        """Print tables, what was refused, and where the JSON is.

        Raises:
            SystemExit: a variant disagreed with eager.
        """
        print_table(*tables)
        for row in self.rows:
            for name, refused in row.get("refused", {}).items():
                print(_title(row["case"]), f"{name} refused", "; ".join(refused), sep=" | ")
        print(f"written to {self.path}")
        wrong = [
            f"{_title(row['case'])}: {text}" for row in self.rows for text in row.get("disagreements", {}).values()
        ]
        if wrong:
            raise SystemExit("\n".join(["These variants are wrong and were not timed:", *wrong]))


def print_environment(record: Mapping[str, Any]) -> None:
    """One line on the machine and one on the versions."""
    machine, versions = record["machine"], record["versions"]
    abilities = ", ".join([machine["cpu_capability"], *machine["matrix_flags"]])
    processor = machine.get("gpu") or f"{machine['cpu']} ({abilities})"
    print(f"{processor}, {machine['cores']} cores, {machine['memory_gib']} GiB, {record['threads']} threads", end=", ")
    print(f"load {record['load_average'][0]}, {record['date']}")
    print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)


def print_table(*tables: Any) -> None:
    """Print what rich can draw, as wide as it needs to be where no terminal sets the width."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(*tables, sep="\n")


def table_of(title: str, columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    """An empty table of numbers; the columns in ``left`` hold text."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        is_text = column in left
        table.add_column(column, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    return table


def timing_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per case and variant: latency with its quartiles, and its ratio to eager's and to Inductor's."""
    cases = list(rows[0]["case"]) if rows else []
    columns = ["variant", "kernels", "latency ms", "quartiles", "of eager", "of inductor", "quartiles", "difference"]
    heading = f"{title}: latency, and its ratio to eager's and to Inductor's (below 1 is faster)"
    table = table_of(heading, [*cases, *columns], left=("variant", "kernels"))
    for row in rows:
        table.add_section()
        for name, entry in row["variants"].items():
            latency, inductor = entry["latency_us"], entry.get("of_inductor")
            table.add_row(
                *map(str, row["case"].values()),
                name,
                entry["kernels"],
                f"{latency['median'] / 1e3:.3f}",
                f"{latency['low'] / 1e3:.3f}-{latency['high'] / 1e3:.3f}",
                f"{_median(entry, 'of_eager'):.2f}",
                f"{_median(entry, 'of_inductor'):.2f}",
                f"{inductor['low']:.2f}-{inductor['high']:.2f}" if inductor else "",
                f"{entry['difference']:.1e}",
            )
    return table


def summary_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """By dtype: layerzero against Inductor, and its choice against the best compiled variant that was measured.

    The mean is the geometric one. A case counts as slower than Inductor where three rounds of four were.
    """
    columns = (
        "dtype",
        "cases",
        "of inductor (mean)",
        "best",
        "worst",
        "slower",
        "of the best variant (worst)",
    )
    table = table_of("layerzero over all cases", columns)
    complete = [row for row in rows if {LAYERZERO, INDUCTOR} <= set(row["variants"])]
    for dtype in dict.fromkeys(row["case"]["dtype"] for row in complete):
        group = [row for row in complete if row["case"]["dtype"] == dtype]
        medians = [_median(row["variants"][LAYERZERO], "of_inductor") for row in group]
        slower = sum(row["variants"][LAYERZERO]["of_inductor"]["low"] > 1 for row in group)
        table.add_row(
            dtype,
            str(len(group)),
            f"{statistics.geometric_mean(medians):.2f}",
            f"{min(medians):.2f}",
            f"{max(medians):.2f}",
            f"{slower} of {len(group)}",
            f"{max(median / _best(row) for median, row in zip(medians, group, strict=True)):.2f}",
        )
    return table


def _best(row: Mapping[str, Any]) -> float:
    return min(_median(entry, "of_inductor") for name, entry in row["variants"].items() if name != EAGER)


def _title(case: Mapping[str, Any]) -> str:
    return " ".join(map(str, case.values()))


def _entry(variant: Variant, timings: Mapping[str, Timing]) -> dict[str, Any]:
    timing = timings[variant.name]
    ratios = {f"of_{base}": timing.relative_to(timings[base]) for base in (EAGER, INDUCTOR) if base in timings}
    return {
        "kernels": variant.kernels,
        "latency_us": rounded(timing.latency_us),
        **{name: rounded(ratio) for name, ratio in ratios.items()},
        "rounds": len(timing.rounds_us),
        "first_call_s": round(variant.first_call_s, 3),
        "difference": variant.difference,
        "row_error": variant.row_error,
        "refusals": list(variant.refusals),
    }


def rounded(quartiles: Quartiles) -> dict[str, float]:
    """Four digits of each, as stable JSON."""
    return {name: float(f"{value:.4g}") for name, value in dataclasses.asdict(quartiles).items()}


def _device(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    return str(machine.get("gpu", machine["cpu"]))


def _median(entry: Mapping[str, Any], name: str) -> float:
    return entry[name]["median"] if name in entry else math.nan
