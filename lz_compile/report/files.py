"""Reports as files: JSON that a later report is compared with, and pages."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lz_compile import __version__
from lz_compile.errors import ArgumentError
from lz_compile.ground import machine
from lz_compile.ground.files import TooLargeError, read_bounded, write_whole
from lz_compile.report.schema import checked

#: Bytes of a report as JSON at most.
_MOST_BYTES = 256 << 20
#: For whoever may read the directory.
_MODE = 0o644


def environment() -> dict[str, str]:
    """Versions of what compiles, by name."""
    details = machine.environment_details("cpu")
    return {
        "lz_compile": __version__,
        "torch": details["torch"],
        "triton": details["triton"],
        "cuda": torch.version.cuda or "none",
        "hip": torch.version.hip or "none",
        "python": platform.python_version(),
        "system": details["system"],
    }


def save(told: Mapping[str, Any], path: Path, since: Path | None, function: str = "Report.save") -> None:
    """Write a report as what the end of its path says; see :meth:`~lz_compile.report.report.Report.save`."""
    whole = {"environment": environment(), **told}
    if path.suffix == ".json":
        write_whole(path, json.dumps(whole, indent=2) + "\n", _MODE)
    elif path.suffix in (".html", ".htm"):
        from lz_compile.report.html.page import page

        earlier = None if since is None else read(since, function)
        write_whole(path, page(whole, earlier, f"lz_compile: {path.stem}"), _MODE)
    else:
        raise ArgumentError(function, "path", "ending in .html or .json", str(path))


def read(path: Path, function: str) -> dict[str, Any]:
    """A report of JSON, of :meth:`Report.save` or of ``explain --json``; what a dump writes is one of a single graph.

    Raises:
        ArgumentError: there is no such file, or it holds something else; the text names the field that is wrong.
    """
    try:
        found = json.loads(read_bounded(path, _MOST_BYTES))
    except (OSError, TooLargeError, ValueError, RecursionError) as error:
        text = f"{path}: {type(error).__name__}: {error}"
        raise ArgumentError(function, "a report", "as JSON", text) from error
    if isinstance(found, dict) and "graph_id" in found:
        found = {"graphs": [found]}
    return dict(checked(found, function, str(path)))
