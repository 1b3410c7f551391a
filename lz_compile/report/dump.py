"""Graphs before and after and the report, as files and in torch's structured trace."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import fx

from lz_compile.ground import events
from lz_compile.lowering import inductor
from lz_compile.report.report import GraphReport


def readable(module: fx.GraphModule) -> str:
    """The graph as Python with shapes and source lines."""
    text: str = module.print_readable(print_output=False)
    return text


class Dump:
    """Writes ``graph<id>.before.py``, ``graph<id>.after.py`` and ``graph<id>.report.json`` into a directory, if there is one.

    Several processes may share a directory: the process id is part of the names.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, graph_id: int) -> None:
        self._directory = None if directory is None else Path(directory)
        self._stem = f"{os.getpid()}.graph{graph_id}"

    def graph(self, stage: str, module: fx.GraphModule) -> None:
        """Write a graph; ``stage`` is ``before`` or ``after``."""
        inductor.trace_artifact(f"layerzero_{stage}", lambda: readable(module))
        if self._directory is not None:
            self._write(f"{stage}.py", readable(module))

    def report(self, report: GraphReport) -> None:
        """Write a report as JSON."""
        inductor.trace_artifact("layerzero_report", lambda: json.dumps(report.to_dict()), encoding="json")
        if self._directory is not None:
            self._write("report.json", json.dumps(report.to_dict(), indent=2))

    def _write(self, suffix: str, text: str) -> None:
        assert self._directory is not None, "asked for only where there is a directory"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / f"{self._stem}.{suffix}").write_text(text)
        except OSError as error:
            events.record("DUMP_UNWRITABLE", f"writing {suffix} to {self._directory}", error)
