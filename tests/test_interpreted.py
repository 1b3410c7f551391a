"""Triton's kernels on a CPU: what ``interpreted_*.py`` ask, in a process where Triton is imported with its interpreter on.

Importing all that they test takes as long as most of them, so that one process runs all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_kernels_of_triton_are_the_references_in_its_interpreter() -> None:
    triton = pytest.importorskip("triton", reason="needs Triton, whose interpreter runs its kernels on a CPU")
    is_old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    if is_old and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip(
            "needs NumPy before 2.4: Triton's interpreter before 3.7 takes an array of one element for a number"
        )
    files = sorted(map(str, TESTS.glob("interpreted_*.py")))
    assert files
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "-W", "ignore::RuntimeWarning"],
        capture_output=True, text=True, cwd=TESTS.parent, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
