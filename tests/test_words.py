"""What the documentation says is so."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from lz_compile.passes.proof.agreement import SLACK, TOLERANCE

ROOT = Path(__file__).resolve().parent.parent


def test_the_tolerances_of_proofs_are_those_that_are_documented():
    text = " ".join((ROOT / "ARCHITECTURE.md").read_text().split())
    told = re.search(r"by a tolerance \(absolute and relative: (.*?)\) plus four times what the source errs", text)
    assert told is not None
    pairs = [part.split(" in ") for part in told[1].split(", ")]
    assert {getattr(torch, name): float(size) for size, name in pairs} == dict(TOLERANCE)
    assert SLACK == 4


def test_every_benchmark_is_run_by_make():
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    target = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    assert {path.stem for path in scripts} == set(re.findall(r"-m benchmarks\.(\w+)", target))


def test_nothing_refers_to_documents_that_users_do_not_have():
    """Words, modules and tests alike: a file that is named is in the repository, and no other design is quoted."""
    texts = [
        path for place in ("lz_compile", "models", "benchmarks", "examples") for path in (ROOT / place).rglob("*.py")
    ]
    texts += [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for path in texts:
        text = path.read_text()
        assert not re.search(
            r"layerzero_spec|[Ss]ource: specification|\bthe spec\b|first release|shared/(seeds|design)", text
        ), path
        for name in re.findall(r"[\w./]*\w\.md\b", text):
            candidates = [path.parent / name, ROOT / name, ROOT / "docs" / name]
            assert any(each.exists() for each in candidates), f"{path} names {name}"


def test_private_names_of_dynamo_and_inductor_stand_where_contributors_are_told():
    told = (ROOT / "CONTRIBUTING.md").read_text().partition("- Private names of Dynamo and Inductor stand in")[2]
    named = {f"lowering/{each}" for each in re.findall(r"`(\w+\.py)`", told.partition("\n- ")[0])}
    package = ROOT / "lz_compile"
    uses = re.compile(
        r"^\s*(?:from|import) torch\._(?:C\._)?(?:dynamo|inductor)\b|=.*\btorch\._(?:dynamo|inductor)\.", re.M
    )
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if uses.search(path.read_text())}
    assert found == named
