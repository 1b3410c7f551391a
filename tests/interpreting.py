"""Tests of Triton's kernels on a CPU, in a process where Triton is imported with its interpreter on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parent


def interpreted(file: str, selection: str = "") -> None:
    """Run the selected tests of a file."""
    triton = pytest.importorskip("triton", reason="needs Triton, whose interpreter runs its kernels on a CPU")
    is_old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    if is_old and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip(
            "needs NumPy before 2.4: Triton's interpreter before 3.7 takes an array of one element for a number"
        )
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(TESTS / file), "-k", selection, "-W", "ignore::RuntimeWarning"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
