"""Reports as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from lz_compile.runtime.report import MatchReport, Report


def tables(report: Report) -> Iterator[Any]:
    """Tables of matches, near misses, events and time; only those with something in them."""
    if not report.matches and not report.near_misses:
        yield f"Nothing recognised in {len(report.graphs)} graph(s)."
    if report.matches:
        yield _matches(report)
    if report.near_misses:
        yield _rows("Near misses", ("op", "where", "reason", "smallest edit that would match"), [
            (miss.op, miss.where, str(miss.reason), miss.edit) for miss in report.near_misses
        ])  # fmt: skip
    if report.events:
        yield _rows("Events", ("code", "message"), [(event.code, event.message) for event in report.events])
    yield _times(report)


def _rows(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("op", "kernel", "stage", "code"))
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    return table


def _matches(report: Report) -> Table:
    """A row for each kind of match: layers that differ in nothing but their place share one."""
    places: dict[tuple[str, ...], list[str]] = {}
    for match in report.matches:
        validation = match.validation or {}
        proof = f"{validation['error']:.1e} (source {validation['source_error']:.1e})" if validation.get("ok") else "-"
        row = (match.op, match.kernel, "yes" if match.rewritten else "no", _text(match), _why(match), proof)
        places.setdefault(row, []).append(match.where)
    rows = [(str(len(where)), *row, "\n".join(dict.fromkeys(where))) for row, where in places.items()]
    columns = ("#", "op", "kernel", "rewritten", "attributes", "why", "error against float64", "where")
    return _rows("Matches", columns, rows)


def _text(match: MatchReport) -> str:
    return ", ".join(
        name if value is True else f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in match.attributes.items()
    )


def _why(match: MatchReport) -> str:
    lines = [match.why, *(str(reason) for reason in match.reasons)]
    for candidate in match.candidates:
        if candidate["kernel"] != match.kernel:
            against = "; ".join(reason["message"] for reason in candidate["against"])
            latency = f"{candidate['relative_latency']:.3g} {candidate['origin']}"
            lines.append(f"{candidate['kernel']}: {against or latency}")
    return "\n".join(line for line in lines if line)


def _times(report: Report) -> Table:
    stages: dict[str, float] = {}
    for graph in report.graphs:
        for stage, seconds in graph.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    rows = [(stage, f"{seconds * 1e3:.1f}") for stage, seconds in stages.items()]
    return _rows(f"Time over {len(report.graphs)} graph(s)", ("stage", "ms"), rows)
