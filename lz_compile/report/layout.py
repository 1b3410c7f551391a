"""How reports lie on a screen: tables that keep words whole, names beside what is said of them, places in short."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

#: Columns that are never folded.
_NAMES = ("op", "operation", "kernel", "stage", "code", "score", "device", "check", "status")
#: What stands before the part of a path that says which package a file is of.
_PACKAGES = re.compile(r"\S*[/\\](?:site|dist)-packages[/\\]")


class Rows:
    """A table. A word is broken only where the console is too narrow for the longest word of each column."""

    def __init__(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str | None] = ()
    ) -> None:
        self.title, self.columns, self.rows, self.styles = title, columns, rows, styles or [None] * len(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, as wide as it must be."""
        table = Table(title=self.title or None, title_justify="left", min_width=len(self.title))
        for column, width in zip(self.columns, self._least(options.max_width), strict=True):
            table.add_column(column, overflow="fold", no_wrap=column in _NAMES, min_width=width)
        for row, style in zip(self.rows, self.styles, strict=True):
            table.add_row(*map(Text, row), style=style)
        yield table

    def _least(self, width: int) -> list[int]:
        """The least width of each column, the widest ones cut where there is no room for all."""
        least = [
            max(
                len(part)
                for cell in cells
                for part in (cell.splitlines() if cells[0] in _NAMES else cell.split()) or [""]
            )
            for cells in zip(self.columns, *self.rows, strict=True)
        ]
        room = width - 3 * len(least) - 1
        while sum(least) > room and max(least) > 1:
            least[least.index(max(least))] -= 1
        return least


def facts(found: Mapping[str, str]) -> Padding:
    """Names beside what there is to say about them, those with nothing left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, text in found.items():
        if text:
            grid.add_row(name, Text(text))
    return Padding(grid, (0, 0, 0, 2))


def counted(found: Sequence[tuple[int, Sequence[str]]]) -> Padding:
    """How often beside what: paragraphs, of which all after the first are details."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(overflow="fold")
    for count, (first, *details) in found:
        grid.add_row(f"{count} x", Text(first))
        for text in details:
            grid.add_row("", Text(text))
    return Padding(grid, (0, 0, 0, 2))


class OneLine:
    """A text before a place, in one line: of a place that is too long, the end is shown."""

    def __init__(self, text: str, place: str) -> None:
        self.text, self.place = text, place

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The line, cut to the console."""
        room = max(options.max_width - len(self.text), 8)
        shown = self.place if len(self.place) <= room else f"…{self.place[-room + 1 :]}"
        yield Text(f"{self.text}{shown}", no_wrap=True, overflow="ellipsis")


def short(text: str) -> str:
    """A text with paths as short as they are clear: below their package, or below the working directory."""
    text = _PACKAGES.sub("", text)
    try:
        here = re.escape(f"{Path.cwd()}{os.sep}")
    except FileNotFoundError:  # the working directory was removed
        return text
    return re.sub(rf"(?<![\w./-]){here}", "", text)


def places(found: Sequence[str], most: int | None = None) -> str:
    """Several places, those that are equal once; after ``most`` the number of the others."""
    told = [f"{name} ({count} x)" if count > 1 else name for name, count in Counter(map(short, found)).items()]
    if most is not None and len(told) > most:
        told[most:] = [f"and {amount(len(told) - most, 'other place')}"]
    return ", ".join(told)


def duration(us: float) -> str:
    """A time given in µs, in the unit that makes it short: ``12.3 µs``, ``102 ms``, ``1.5 s``."""
    unit, scale = next(
        ((unit, scale) for unit, scale in (("s", 1e6), ("ms", 1e3)) if us >= 0.9995 * scale), ("µs", 1.0)
    )
    return f"{us / scale:.3g} {unit}"


def amount(count: int, what: str) -> str:
    """A number of things: ``1 graph``, ``2 graphs``, ``2 near misses``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('s') else 's'}"
