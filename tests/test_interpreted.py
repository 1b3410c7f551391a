"""Triton's kernels on a CPU: what ``interpreted_*.py`` ask, in processes where Triton is imported with its interpreter on.

Importing all that they test takes as long as most of them, so that one process runs several.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parent
#: Halves of about the same time.
HALVES = {
    "norms, products, scans": ("triton", "triton_scan", "linear"),
    "the others": ("sampling", "paged_attention", "routing"),
}


def test_every_file_is_run():
    assert sorted(name for half in HALVES.values() for name in half) == sorted(
        path.stem.removeprefix("interpreted_") for path in TESTS.glob("interpreted_*.py")
    )


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_kernels_of_triton_are_the_references_in_its_interpreter(half: str) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton, whose interpreter runs its kernels on a CPU")
    is_old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    if is_old and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip(
            "needs NumPy before 2.4: Triton's interpreter before 3.7 takes an array of one element for a number"
        )
    files = [str(TESTS / f"interpreted_{name}.py") for name in HALVES[half]]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "-W", "ignore::RuntimeWarning"],
        capture_output=True, text=True, cwd=TESTS.parent, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
