"""The list of planted faults (`scripts/mutants.py`) fits the code: every fault can be planted, and names tests that exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

_spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
assert _spec is not None
assert _spec.loader is not None
mutants = importlib.util.module_from_spec(_spec)
sys.modules["mutants"] = mutants
_spec.loader.exec_module(mutants)


@pytest.mark.parametrize("mutant", mutants.mutants(), ids=lambda mutant: mutant.name)
def test_a_fault_of_the_list_can_be_planted(mutant):
    text = (ROOT / mutant.file).read_text()
    compile(mutant.planted(text), mutant.file, "exec")
    for name in mutant.tests:
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / "tests" / file).read_text()


def test_the_list_has_forty_faults_in_many_rooms():
    assert len(mutants.mutants()) >= 40
    assert len({str(Path(each.file).parent) for each in mutants.mutants()}) >= 12
