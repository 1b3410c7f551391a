"""Measuring in a process of its own: what it has cached, allocated or imported is no other's."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def run_apart(script: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Any:
    """What ``python -m benchmarks.<script>`` prints last, as JSON.

    Raises:
        SystemExit: it fails; with all that it wrote.
    """
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measuring {script} {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def fresh_caches() -> Iterator[dict[str, str]]:
    """Variables by which a process finds empty caches, but for Inductor's precompiled header, which a machine makes once."""
    with tempfile.TemporaryDirectory(prefix="lz-caches-") as directory:
        names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "LAYERZERO_CACHE_DIR": "layerzero"}
        for name in names.values():
            (Path(directory) / name).mkdir()
        yield {variable: f"{directory}/{name}" for variable, name in names.items()}


def processor_s() -> float:
    """Seconds of the processor that this process and its children have taken."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
