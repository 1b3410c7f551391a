"""A report on one screen: a line for each kind of match, near misses by cause, what happened, how long it took."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rich.text import Text

from lz_compile.report.layout import OneLine, amount, counted, places, short

if TYPE_CHECKING:
    from lz_compile.report.findings import LayersReport, LoopReport, MissReport
    from lz_compile.report.report import MatchReport, Report

#: Kinds of matches, and of everything else, that a screen has room for.
MOST_MATCHES, MOST = 16, 5
#: Letters of an event's message that are shown.
LONGEST = 300
_NUMBER = re.compile(r"_?\d+")

T = TypeVar("T")


def summary(report: Report, *, is_cut: bool = True) -> Iterator[Any]:
    """What is worth a look first: matches by kind, near misses by cause, loops, events, time.

    Args:
        is_cut: leave out what a screen has no room for, and say so.
    """
    if not report.matches and not report.near_misses and not report.loops:
        yield f"Nothing recognised in {amount(len(report.graphs), 'graph')}."
    if report.matches:
        yield from _matches(report, MOST_MATCHES if is_cut else None)
    if report.near_misses:
        yield from _near_misses(report.near_misses, MOST if is_cut else None)
    if is_cut:
        yield from _loops(report)
        yield from _layers(report)
        yield from _events(report)
        yield _time(report)
        if report.matches:
            yield Text("Details: verbose=True, --verbose, or rich.print(report.in_full()).", style="dim")


def grouped(found: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """What is alike side by side, in the order of the first of each."""
    groups: dict[Hashable, list[T]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return list(groups.values())


def without_numbers(text: str) -> str:
    """What is the same of texts that name other nodes or sizes."""
    return _NUMBER.sub("", text)


def _matches(report: Report, most: int | None) -> Iterator[Any]:
    count = sum(match.rewritten for match in report.matches)
    where = amount(len(report.graphs), "graph")
    yield Text(f"Matches: {len(report.matches)} in {where}, {count} rewritten", style="bold")
    kinds = grouped(report.matches, _line)
    kinds.sort(key=lambda kind: not kind[0].rewritten)
    lines = [(f"{len(kind)} x", *_line(kind[0])) for kind in kinds]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line, kind in list(zip(lines, kinds, strict=True))[:most]:
        counted, *others = line
        told = [counted.rjust(widths[0]), *(cell.ljust(width) for cell, width in zip(others, widths[1:], strict=True))]
        yield OneLine(f"  {' '.join(told[:2])}  {'  '.join(told[2:])}  ", _where(kind))
    yield from _rest(kinds, most, "kinds of matches")


def _line(match: MatchReport) -> tuple[str, str, str]:
    """What is computed, by which kernel, and whether that is in place; equal for matches of one kind."""
    operation = match.op if match.context is None else match.context["operation"]
    means = f" ({match.mask})" if match.mask and match.mask != operation.partition(".")[2] else ""
    codes = ", ".join(dict.fromkeys(reason.code for reason in match.reasons))
    return f"{operation}{means}", match.kernel, "rewritten" if match.rewritten else codes or "not rewritten"


def _where(kind: Sequence[MatchReport]) -> str:
    found = list(dict.fromkeys(short(match.where) for match in kind))
    return found[0] if len(found) == 1 else f"{found[0]} and {amount(len(found) - 1, 'other place')}"


def _near_misses(misses: Sequence[MissReport], most: int | None) -> Iterator[Any]:
    groups = grouped(misses, lambda miss: (miss.op, miss.reason.code, without_numbers(miss.reason.message), miss.edit))
    yield Text(f"Near misses: {len(misses)}, by cause", style="bold")
    told = []
    for group in groups[:most]:
        first, where = group[0], [miss.where for miss in group]
        reason = short(str(first.reason)) if most is None else _first(str(first.reason))
        at = places(where, None if most is None else MOST)
        told.append((len(group), (f"{first.op}: {reason}", f"at {at}", f"-> {first.edit}")))
    yield counted(told)
    yield from _rest(groups, most, "causes")


def _loops(report: Report) -> Iterator[Any]:
    def tell(loop: LoopReport) -> str:
        return f"{loop.steps} steps at {short(loop.where)}, {'rolled' if loop.rolled else f'kept: {loop.reason}'}"

    groups = grouped(report.loops, lambda loop: (loop.rolled, loop.steps, loop.where))
    yield from _section(f"Loops: {len(report.loops)}", groups, tell, "loops")


def _layers(report: Report) -> Iterator[Any]:
    def tell(layers: LayersReport) -> str:
        return f"{layers.count} of {layers.calls} calls at {short(layers.where)}, {state_of(layers)}"

    groups = grouped(report.layers, lambda layers: (layers.count, layers.calls, layers.where, layers.folded))
    yield from _section(f"Layers: {sum(layers.count for layers in report.layers)}", groups, tell, "groups of layers")


def state_of(layers: LayersReport) -> str:
    """What became of repeated layers."""
    return "one region" if layers.folded else f"kept: {layers.reason}"


def _events(report: Report) -> Iterator[Any]:
    groups = grouped(report.events, lambda event: (event.code, without_numbers(event.message)))
    title = f"Events: {len(report.events)}"
    yield from _section(title, groups, lambda event: f"[{event.code}] {_first(event.message)}", "kinds of events")


def _section(title: str, groups: Sequence[Sequence[T]], tell: Callable[[T], str], what: str) -> Iterator[Any]:
    """How often there is what, of as much as a screen has room for; nothing of what there is not."""
    if groups:
        yield Text(title, style="bold")
        yield counted([(len(group), (tell(group[0]),)) for group in groups[:MOST]])
        yield from _rest(groups, MOST, what)


def _first(message: str) -> str:
    """The beginning of what may be long."""
    text = short(" ".join(message.split()))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _rest(groups: Sequence[object], most: int | None, what: str) -> Iterator[Any]:
    if most is not None and len(groups) > most:
        yield Text(f"  and {len(groups) - most} more {what}", style="dim")


def _time(report: Report) -> Text:
    stages = report.seconds
    told = ", ".join(f"{stage} {seconds * 1e3:.0f} ms" for stage, seconds in stages.items() if seconds >= 5e-4)
    loaded = sum(graph.loaded for graph in report.graphs)
    source = f", {loaded} of {len(report.graphs)} graphs from a file of artifacts" if loaded else ""
    return Text(f"Time: {sum(stages.values()):.2f} s{f' ({told})' if told else ''}{source}")
