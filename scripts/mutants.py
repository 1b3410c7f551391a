"""Plants faults into a copy of the package, and says which ones the tests do not see (``tests/mutants/mutants.yaml``).

``python scripts/mutants.py`` tries all of them against the tests that each one names; ``--only band`` those whose name has
that word; ``--whole`` runs the whole suite for each, which takes hours. A mutant that survives is a hole in the tests.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants" / "mutants.yaml"


@dataclass(frozen=True)
class Mutant:
    """One edit: ``old`` stands once in ``file``, and becomes ``new``; one of ``tests`` fails then."""

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]

    def planted(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the place is not there, or not the only one of its kind.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: expected one place in {self.file}, found {text.count(self.old)}")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All of the list."""
    return [Mutant(**row) for row in yaml.safe_load(LIST.read_text())]


def is_killed(mutant: Mutant, copy: pathlib.Path, tests: Sequence[str]) -> bool:
    """Whether a test fails (or nothing can be imported) while a copy of the repository has the fault."""
    path = copy / mutant.file
    before = path.read_text()
    path.write_text(mutant.planted(before))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
        return done.returncode == 1
    finally:
        path.write_text(before)


def main() -> int:
    """Try and print; the exit status says whether any survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose name has this in it")
    parser.add_argument("--whole", action="store_true", help="against the whole suite")
    arguments = parser.parse_args()
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info"))
        chosen = [each for each in mutants() if arguments.only in each.name]
        for mutant in chosen:
            start = time.monotonic()
            tests = ["tests"] if arguments.whole else [f"tests/{name}" for name in mutant.tests]
            killed = is_killed(mutant, copy, tests)
            survivors += [] if killed else [mutant.name]
            seconds = time.monotonic() - start
            print(f"{'killed' if killed else 'SURVIVED'}  {mutant.name} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
