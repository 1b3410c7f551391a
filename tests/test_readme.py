"""README and the pages that show output: what they run prints what they say, and what they claim is in the result files."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import statistics
import sys
import types
from pathlib import Path

import pytest
import rich
import torch

import lz_compile as lz
from benchmarks import chart
from lz_compile.passes.formula import pointwise
from lz_compile.passes.graph import view
from lz_compile.runtime.kernels import capabilities, registry

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXTENDING = (ROOT / "docs" / "extending.md").read_text()
OPS = {path.stem for path in (ROOT / "lz_compile" / "lowering" / "ops").glob("*.py")} - {"__init__"}
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch, no_preference):
    """No measurement steers what is chosen, and no kernel stays registered."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(rich, "_console", None)  # the one that rich.print uses reads it once
    yield
    for each in lz.list_kernels():
        if each.kernel_id.startswith("mine."):
            lz.unregister_kernel(each.kernel_id)


def shown(text: str) -> str:
    """Output without what differs from run to run: times, folders and where lines break."""
    text = re.sub(r"^\$ python .*\n", "", text)
    text = re.sub(r"Time: [^)]*\)", "Time", text)
    return " ".join(re.sub(r"\S*?(\w+\.py:\d+)", r"\1", text).split())


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/extending.md"])
def test_what_a_page_runs_prints_what_it_shows(page, tmp_path, capsys, monkeypatch):
    """Blocks of Python are one program; a block of output right behind one is what it prints."""
    blocks = BLOCK.findall((ROOT / page).read_text())
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # Dynamo looks names up there
    program = tmp_path / ("ten_lines.py" if page == "README.md" else f"{Path(page).stem}.py")
    lines, compared = 0, 0
    for (language, code), (follows, output) in itertools.zip_longest(blocks, blocks[1:], fillvalue=("", "")):
        if language != "python":
            continue
        exec(compile("\n" * lines + code, str(program), "exec"), vars(module))
        lines += code.count("\n")
        printed = capsys.readouterr().out
        if follows == "text" or output.startswith(f"$ python {program.name}\n"):
            assert shown(printed) == shown(output)
            compared += 1
    assert compared > 0


def test_the_first_example_has_ten_lines():
    (code,) = [code for language, code in BLOCK.findall(README) if language == "python"]
    statements = [line for line in code.splitlines() if line and not line.startswith("import")]
    assert len(statements) <= 10
    assert len(README.splitlines()) <= 120


def test_the_commands_of_the_readme_are_there():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = set(re.findall(r"(?:`|\$ )make ([a-z]+)", README))
    assert {"demo", "test"} <= commands <= set(targets)


def test_what_the_readme_says_was_measured_is_in_the_result_files():
    found = chart.points()
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$", README, re.MULTILINE)
    assert len(rows) >= 8
    for title, mean, worst, cases in rows:
        ratios = [each.ratio for each in found if chart.TITLES[each.name] == title]
        assert (f"{statistics.geometric_mean(ratios):.2f}", f"{max(ratios):.2f}", str(len(ratios))) == (
            mean, worst, cases,
        ), title  # fmt: skip


def test_every_op_has_a_row_in_the_readme():
    table = README.partition("## What is recognised")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) - {"op"} == OPS


def test_the_operands_of_every_op_are_those_that_are_documented():
    table = EXTENDING.partition("| op | operands")[2].partition("\n\n")[0]
    told = {op: (needed, optional) for op, needed, optional in re.findall(r"\| `(\w+)` \| ([^|[]*)(\[[^|]*)?\|", table)}
    assert set(told) == OPS
    for op, (needed, optional) in told.items():
        kind = getattr(importlib.import_module(f"lz_compile.lowering.ops.{op}"), "Operands", None)
        if hasattr(kind, "names"):
            assert set(re.findall(r"\w+", needed)) == set(kind.names) - kind.optional, op
            assert set(re.findall(r"\w+", optional)) == kind.optional, op


def test_the_lines_that_add_a_function_do_so(monkeypatch):
    line, names = re.search(r'`("xlogy": .*?)`\..*?`"(.*?)"` in `_PARAMETERS`', EXTENDING, re.DOTALL).groups()
    q, k, v = torch.randn(3, 1, 8, 16, 64)

    def shifted(q, k, v):
        return torch.xlogy(q @ k.mT, torch.tensor(1.5)).softmax(-1) @ v

    assert not lz.explain(shifted, q, k, v, print_report=False).matches
    assert names in view._PARAMETERS
    monkeypatch.setitem(view._SIGNATURES, "xlogy", tuple(names.split()))
    monkeypatch.setitem(pointwise.POINTWISE, "xlogy", eval(f"{{{line}}}", vars(pointwise))["xlogy"])
    assert [match.op for match in lz.explain(shifted, q, k, v, print_report=False).matches] == ["attention"]


def test_the_description_of_a_kernel_is_one():
    (text,) = (code for language, code in BLOCK.findall(EXTENDING) if language == "json")
    (spec,) = registry.specs_of(capabilities.parse(text.encode(), "mine.json"), "mine").values()
    assert (spec.kernel_id, spec.supports) == ("mine.alibi", {"alibi"})
    assert spec.prior[0].relative_latency == 0.7


def test_every_benchmark_and_every_result_file_is_explained():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    results = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert results == set(re.findall(r"[\w-]+\.json", text))
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert scripts == set(re.findall(r"-m benchmarks\.(\w+)", text))


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere_and_snippets_are_python(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}"
    for language, code in BLOCK.findall(text):
        if language == "python":
            ast.parse(code)


def test_every_page_can_be_reached_from_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} <= set(re.findall(r"\w+\.md", index))


def test_tests_that_pages_name_are_there():
    defined = {
        name for path in (ROOT / "tests").glob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        text = page.read_text()
        assert set(re.findall(r"`(test_\w+)`", text)) <= defined, page.name
        for path in re.findall(r"`(tests/\w+\.py)`", text):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def files() -> list[str]:
    """Every file and folder of the checkout that a text may name, below the root and with its folders before it."""
    rooms = ("lz_compile", "tests", "docs", "benchmarks", "scripts", "examples", "models")
    found = [path for room in rooms for path in (ROOT / room, *(ROOT / room).rglob("*"))]
    return ["/" + path.relative_to(ROOT).as_posix() for path in (*found, *ROOT.glob("*.*")) if path.exists()]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda path: path.name)
def test_files_and_folders_that_a_page_names_are_there(page):
    """`roll/search.py` stands for one below any folder."""
    there = files()
    for name in re.findall(r"`([\w./-]+(?:\.(?:py|json|md|sh|txt)|/))`", page.read_text()):
        assert any(f"{each}/".endswith(f"/{name.strip('/')}/") for each in there), f"{page.name} names {name}"


def test_modules_that_docstrings_name_are_there():
    """:mod:`algebra` stands for the module of that name in any room."""
    there = [each.removesuffix(".py").removesuffix("/__init__") for each in files()]
    for path in (ROOT / "lz_compile").rglob("*.py"):
        for name in re.findall(r":mod:`~?\.?([\w.]+)`", path.read_text()):
            wanted = "/" + name.replace(".", "/")
            assert any(each.endswith(wanted) for each in there), f"{path.relative_to(ROOT)} names {name}"


def test_every_table_that_is_read_at_run_time_is_part_of_the_package():
    """A file that is missing from a wheel is missed by its users alone."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {
        path
        for package, patterns in settings.items()
        for pattern in patterns
        for path in ROOT.glob(
            f"lz_compile/**/{pattern}" if package == "*" else f"{package.replace('.', '/')}/{pattern}"
        )
    }
    assert set(ROOT.glob("lz_compile/**/*.json")) <= packed
