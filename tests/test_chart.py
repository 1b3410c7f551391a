"""The README's chart is drawn from the result files, from all of them, and is redrawn when they change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import chart

ROOT = Path(__file__).resolve().parent.parent


def result(folder: Path, name: str, ratios: list[float], **machine: str) -> None:
    rows = [
        {"case": {"length": number}, "variants": {"layerzero": {"of_inductor": {"median": ratio}}}}
        for number, ratio in enumerate(ratios)
    ]
    machine = {"cpu": "Some CPU", "cpu_capability": "AVX2", **machine}
    (folder / f"{name}-some-cpu.json").write_text(json.dumps({"name": name, "machine": machine, "rows": rows}))


def test_the_chart_has_every_ratio_to_inductor_of_every_result_file():
    found = chart.points()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        record = json.loads(path.read_text())
        entries = [row.get("variants", {}).get("layerzero", row.get("tuned", {})) for row in record["rows"]]
        told = [each["of_inductor"]["median"] for each in entries if "of_inductor" in each]
        told += [
            row["of_inductor"][row["chosen"]]["median"]
            for row in record["rows"]
            if row.get("chosen") in row.get("of_inductor", {})
        ]
        drawn = [point.ratio for point in found if point.name == chart.name_of(record)]
        assert set(told) <= set(drawn), path.name
    assert {each.name for each in found} == set(chart.TITLES)


def test_the_committed_chart_was_drawn_from_the_committed_results():
    drawn = re.search(r"drawn from results (\w+)", chart.CHART.read_text())
    assert drawn is not None
    assert drawn[1] == chart.digest(chart.points()), "the results have changed: run `make chart`"


def test_a_case_compared_the_other_way_round_is_the_same_ratio(tmp_path):
    rows = [{"case": {"rows": 1}, "variants": {"inductor": {"of_layerzero": {"median": 4.0}}, "layerzero": {}}}]
    record = {"name": "sampling", "machine": {"cpu": "Some CPU", "cpu_capability": "AVX2"}, "rows": rows}
    (tmp_path / "sampling-some-cpu.json").write_text(json.dumps(record))
    assert [each.ratio for each in chart.points(tmp_path)] == [0.25]


def test_another_result_is_another_drawing(tmp_path):
    result(tmp_path, "attention", [0.5, 2.0])
    result(tmp_path, "something_new", [0.25])
    before = chart.points(tmp_path)
    chart.draw(before, tmp_path / "before.svg", has_gpu=False)
    text = (tmp_path / "before.svg").read_text()
    for each in (
        "attention, forward",
        "something_new",
        "Some CPU, AVX2",
        "mean 1.00, worst 2.00, 2 cases",
        "not timed on",
    ):
        assert each in text
    result(tmp_path, "attention", [0.5, 0.5, 0.5])
    after = chart.points(tmp_path)
    chart.draw(after, tmp_path / "after.svg", has_gpu=True)
    text = (tmp_path / "after.svg").read_text()
    assert "mean 0.50, worst 0.50, 3 cases" in text
    assert "CPU and GPU" in text
    assert chart.digest(before) != chart.digest(after)


def test_no_results_are_told_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match="run `make bench` first"):
        chart.draw([], tmp_path / "none.svg", has_gpu=False)
