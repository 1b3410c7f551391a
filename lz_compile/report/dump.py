"""Graphs before and after and the report, as files in a directory or in one zip, and in torch's structured trace."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import fx

from lz_compile.ground import events
from lz_compile.ground.files import write_whole
from lz_compile.lowering import frames
from lz_compile.report.files import environment
from lz_compile.report.graph_text import graph_text, unified_diff
from lz_compile.report.report import GraphReport, Report

#: What both a directory's files and those in a zip may be read by.
_MODE = 0o644


class Dump:
    """Writes ``graph<id>.before.py``, ``.after.py``, ``.diff``, ``.report.json`` and ``.report.html``, if it is told where.

    Where that ends in ``.zip``, they go into one file to attach to an issue: no weights, no data, and no path of this
    machine. Several processes may write to the same place: the process id is part of the names.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, graph_id: int) -> None:
        self._place = None if directory is None else Path(directory)
        self._stem = f"{os.getpid()}.graph{graph_id}"
        self._before = ""

    def graph(self, stage: str, module: fx.GraphModule) -> None:
        """Write a graph; ``stage`` is ``before`` or ``after``."""
        frames.trace_artifact(f"layerzero_{stage}", lambda: graph_text(module))
        if self._place is None:
            return
        text = graph_text(module)
        files = {f"{stage}.py": text}
        if stage == "before":
            self._before = text
        else:
            files["diff"] = unified_diff(self._before, text, self._stem)
        self._write(files)

    def report(self, report: GraphReport) -> None:
        """Write a report as JSON and as a page."""
        frames.trace_artifact("layerzero_report", lambda: json.dumps(report.to_dict()), encoding="json")
        if self._place is not None:
            self._write({"report.json": json.dumps(report.to_dict(), indent=2), **self._page(report)})

    def _page(self, report: GraphReport) -> dict[str, str]:
        try:
            from lz_compile.report.html.page import page

            whole = {"environment": environment(), **Report([report]).to_dict()}
            return {"report.html": page(whole, title=f"graph {report.graph_id}")}
        except Exception as error:  # noqa: BLE001 a page that cannot be made costs no compile; the JSON is written
            events.record("DUMP_UNWRITABLE", "drawing the page of a report", error)
            return {}

    def _write(self, files: Mapping[str, str]) -> None:
        assert self._place is not None, "asked for only where there is a place"
        try:
            named = {f"{self._stem}.{suffix}": text for suffix, text in files.items()}
            if self._place.suffix == ".zip":
                _add(self._place, named)
                return
            self._place.mkdir(parents=True, exist_ok=True)
            for name, text in named.items():
                (self._place / name).write_text(text)
        except (OSError, zipfile.BadZipFile) as error:
            events.record("DUMP_UNWRITABLE", f"writing {', '.join(files)} to {self._place}", error)


def _add(path: Path, files: Mapping[str, str]) -> None:
    """Add files to a zip, or replace those of that name: a new one is written whole, so that what is there is never lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clean = _without_paths()
    with _alone(path.parent):
        kept = {} if path.exists() else {"environment.json": json.dumps(environment(), indent=2).encode()}
        if not kept:
            with zipfile.ZipFile(path) as found:
                kept = {name: found.read(name) for name in found.namelist()}
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as made:
            for name, data in {**kept, **{name: clean(text).encode() for name, text in files.items()}}.items():
                made.writestr(name, data)
        write_whole(path, whole.getvalue(), _MODE)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """No other process adds to a file in the directory meanwhile; elsewhere than on POSIX systems one may."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _without_paths() -> Callable[[str], str]:
    """Takes paths of this machine out of a text: of what Python imports, the working directory and the user's home."""
    roots = {os.path.abspath(each) for each in (*sys.path, os.getcwd(), sys.prefix, sys.base_prefix) if each}
    home = os.path.expanduser("~")
    ordered = sorted((root for root in roots if len(root) > 1), key=len, reverse=True)

    def clean(text: str) -> str:
        for root in ordered:
            text = text.replace(f"{root}{os.sep}", "")
        return text.replace(f"{home}{os.sep}", f"~{os.sep}") if len(home) > 1 else text

    return clean
