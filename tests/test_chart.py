"""The README's chart is drawn from the result files, from all of them, and is redrawn when they change."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import lz_compile
from benchmarks import chart
from lz_compile import ArgumentError
from lz_compile.report import charts
from lz_compile.tools.command_line import main

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


# ---- what tune and solve draw --------------------------------------------------------------------------------------


def samples() -> list[charts.Sample]:
    problem = ("attention.causal", "float32", "a causal mask")
    return [
        charts.Sample(
            problem,
            {"seq_len_q": length, "seq_len_k": length, "num_heads": heads},
            {"inductor": float(length), "torch.sdpa": 64.0 + length / 2},
            "inductor" if length < 128 else "torch.sdpa",
        )
        for heads in (4, 8)
        for length in (512, 64, 256)
    ]


def test_latencies_are_a_panel_for_each_problem_over_the_size_that_varies():
    one, other = charts.panels(samples())
    assert (one.axis, one.rest, other.rest) == ("seq_len_q", {"num_heads": 4}, {"num_heads": 8})
    assert [each.sizes["seq_len_q"] for each in one.samples] == [64, 256, 512]
    assert one.edges() == [128.0], "the geometric mean of the sizes between which the choice changes"


def test_a_chart_of_latencies_names_kernels_and_is_the_same_again(tmp_path):
    for name in ("one.svg", "two.svg"):
        assert charts.latencies(samples(), tmp_path / name, "tune") == 2
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    for each in ("torch.sdpa", "inductor", "seq_len_q", "num_heads=8"):
        assert each in text


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"lz\.tune: expected a chart ending in \.svg, \.png, \.pdf"):
        charts.latencies(samples(), tmp_path / "chart.txt", "tune")
    with pytest.raises(ArgumentError, match=r"received nothing\. To measure, tune takes --no-resume"):
        charts.latencies([], tmp_path / "chart.svg", "tune")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match=re.escape("pip install 'lz-compile[charts]'")):
        charts.latencies(samples(), tmp_path / "chart.svg", "tune")


@pytest.mark.usefixtures("no_code_generation")
def test_tune_and_solve_draw_what_they_measured(tmp_path, monkeypatch):
    sizes = ["--sizes", "num_rows=16,64", "--sizes", "hidden_size=32", "--samples", "1"]
    assert main(["tune", "norm.rms", *sizes, "--chart", str(tmp_path / "tuned.svg"), "--json"]) == 0
    assert "num_rows" in (tmp_path / "tuned.svg").read_text()
    source = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x
def made():
    return Model(), (torch.randn(1, 2, 16, 8),)
"""
    (tmp_path / "drawn_model.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    lz_compile.clear_reports()
    options = ["--shape-buckets", "seq_len=16", "--dims", "seq_len=2", "--tune", "on-miss"]
    assert main(["solve", "drawn_model:made", *options, "--chart", str(tmp_path / "solved.svg"), "--json"]) == 0
    assert "seq_len" in (tmp_path / "solved.svg").read_text()
