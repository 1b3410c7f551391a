"""Measuring in a process of its own: what it has cached, allocated or imported is no other's."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.publish import Publication


def run_apart(script: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Any:
    """What ``python -m benchmarks.<script>`` prints last, as JSON.

    Raises:
        SystemExit: it fails; with all that it wrote.
    """
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments]
    root = Path(__file__).parent.parent
    # An installed package is compiled to byte code, whatever this environment says.
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=root, env={**usual, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measuring {script} {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run_child(script: str, variables: Mapping[str, str], **told: Any) -> Any:
    """What the child of a script that :func:`measure_models` runs measured, told by keywords what to do."""
    return run_apart(script, ["--child", json.dumps(told)], variables)


def measure_models(
    script: str,
    settings: argparse.Namespace,
    child: Callable[..., Any],
    run_case: Callable[..., Iterable[dict[str, Any]]],
    table: Callable[[Sequence[Mapping[str, Any]]], Table],
    **told: Any,
) -> None:
    """The rows of ``run_case`` for every model and depth; or, as a child, print what ``child`` measured."""
    if settings.child:
        print(json.dumps(child(**settings.child)))
        return
    depths = [size["layers"] for size in settings.sizes]
    stated = {**settings.sizes[0], "layers": depths, "repeats": settings.repeats, **told}
    name = script + ("_training" if told.get("training") else "")
    publication = Publication(name, torch.device("cpu"), is_quick=settings.quick, **stated)
    if settings.resume:
        publication.resume()
    for model in settings.models:
        for size in settings.sizes:
            for row in run_case(model, size, settings.repeats, **told):
                publication.add(row)
    publication.show(table(publication.rows))


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
