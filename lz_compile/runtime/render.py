"""Reports as tables, readable at 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from lz_compile.diagnosis import DoctorReport
    from lz_compile.inspection import SelectionReport
    from lz_compile.readiness import ReadinessReport
    from lz_compile.runtime.registry import KernelInfo
    from lz_compile.runtime.report import LoopReport, MatchReport, Report
    from lz_compile.tuning import TuneReport

#: Columns that are never folded.
_NAMES = ("op", "operation", "kernel", "stage", "code", "score", "device", "check", "status")
_STYLES: Mapping[str, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def tables(report: Report) -> Iterator[Any]:
    """Matches with their candidates, loops, near misses, events and time; only those with something in them."""
    if not report.matches and not report.near_misses and not report.loops:
        yield f"Nothing recognised in {len(report.graphs)} graph(s)."
    if report.matches:
        yield from _matches(report)
    if report.loops:
        yield _rows("Loops", ("where", "steps", "carried", "each step"), [_loop(loop) for loop in report.loops])
    if report.near_misses:
        yield _rows("Near misses", ("op", "where", "reason", "smallest edit that would match"), [
            (miss.op, miss.where, str(miss.reason), miss.edit) for miss in report.near_misses
        ])  # fmt: skip
    if report.events:
        yield _rows("Events", ("code", "message"), [(event.code, event.message) for event in report.events])
    yield _times(report)


def _rows(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=title or None, title_justify="left", min_width=len(title))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in _NAMES)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    return table


def _facts(facts: Mapping[str, str]) -> Padding:
    """Names beside what there is to say about them, those with nothing left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, text in facts.items():
        if text:
            grid.add_row(name, Text(text))
    return Padding(grid, (0, 0, 0, 2))


# ---- matches ---------------------------------------------------------------------------------------------------------


def _matches(report: Report) -> Iterator[Any]:
    """Every kind of match: layers that differ in nothing but their place and how they were proven stand together."""
    kinds: dict[str, list[MatchReport]] = {}
    for match in report.matches:
        told = {**match.to_dict(), "where": "", "graph": "", "validation": _proof(match)}
        kinds.setdefault(repr(told), []).append(match)
    yield Text(f"Matches ({len(report.matches)} in {len(report.graphs)} graph(s))", style="bold")
    for matches in kinds.values():
        yield ""
        yield from _kind(matches)
    yield ""


def _kind(matches: Sequence[MatchReport]) -> Iterator[Any]:
    first = matches[0]
    count = f"{len(matches)} x " if len(matches) > 1 else ""
    state = "rewritten" if first.rewritten else "not rewritten"
    yield Text(f"{count}{first.op}: {first.kernel}, {state}", style="bold")
    yield _facts(
        {
            "where": "\n".join(dict.fromkeys(match.where for match in matches)),
            "problem": "" if first.context is None else _problem(first.context),
            "attributes": _attributes(first.attributes),
            "masks": _masks(first),
            "formula": first.formula,
            "why": first.why,
            "guards": ", ".join(first.guards),
            "reasons": "\n".join(str(reason) for reason in first.all_reasons),
            "proof": _proof(first),
        }
    )
    yield from candidates(first.candidates, first.kernel, first.context)


def _loop(loop: LoopReport) -> tuple[str, ...]:
    counts = {name: loop.streams.count(name) for name in dict.fromkeys(loop.streams)}
    reads = [f"{count} {name}" for name, count in counts.items()]
    reads.append(f"{loop.around} from around" if loop.around else "")
    step = f"{loop.calls} calls; reads {', '.join(filter(None, reads)) or 'nothing else'}; gives {len(loop.outputs)}"
    state = "rolled" if loop.rolled else f"kept: {loop.reason}"
    return loop.where, str(loop.steps), "\n".join(loop.carried), f"{step}\n{state}"


def _masks(match: MatchReport) -> str:
    """What the masks mean, and why one of them is no more than a tensor."""
    return "\n".join([match.mask, *map(str, match.mask_reasons)]) if match.mask else ""


def _proof(match: MatchReport) -> str:
    found = match.validation or {}
    if not found.get("ok") or not match.rewritten:
        return ""
    return f"error {found['error']:.1e} against float64, the source's is {found['source_error']:.1e}"


def _attributes(attributes: Mapping[str, Any]) -> str:
    return ", ".join(
        name if value is True else f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in attributes.items()
    )


def _problem(context: Mapping[str, Any]) -> str:
    """Operation, dtype, sizes, features and device in one line."""
    sizes = _sizes(context["dims"])
    features = ", ".join(context["features"].values())
    device = f"{context['hardware']['device_name']} ({context['hardware']['signature']})"
    parts = (f"{context['operation']} {context['dtype']} {sizes}", features and f"with {features}", f"on {device}")
    return "\n".join(part for part in parts if part)


def _sizes(dims: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_size(size)}" for name, size in sorted(dims.items()))


def _size(size: Any) -> str:
    return f"{size['hint']}({size['name']})" if isinstance(size, dict) else str(size)


# ---- candidates ------------------------------------------------------------------------------------------------------


def candidates(found: Sequence[Mapping[str, Any]], chosen: str, context: Mapping[str, Any] | None) -> Iterator[Any]:
    """A row for each kernel that could be considered here; those of other platforms, and missing ones, in one line."""
    elsewhere, missing, rows = [], [], []
    for candidate in found:
        codes = [reason["code"] for reason in candidate["against"]]
        if "PLATFORM_MISMATCH" in codes:
            elsewhere.append(candidate["kernel"])
        elif codes == ["NOT_INSTALLED"]:
            missing.append(candidate["kernel"])
        else:
            rows.append(candidate)
    if rows:
        table = _rows("", ("kernel", "score", "latency", "against, notes"), [_candidate(row, context) for row in rows])
        for index, row in enumerate(rows):
            table.rows[index].style = "bold" if row["kernel"] == chosen else None
        yield Padding(table, (0, 0, 0, 2))
    platform = "this platform" if context is None else context["hardware"]["platform"]
    yield _facts({f"not for {platform}": ", ".join(elsewhere), "not installed": ", ".join(missing)})


def _candidate(candidate: Mapping[str, Any], context: Mapping[str, Any] | None) -> tuple[str, ...]:
    against = [reason["message"] for reason in candidate["against"]]
    notes = [reason["message"] for reason in candidate.get("notes", ())]
    score = "-" if against else f"{candidate['score']:.0f}"
    return candidate["kernel"], score, "-" if against else _latency(candidate, context), "\n".join([*against, *notes])


def _latency(candidate: Mapping[str, Any], context: Mapping[str, Any] | None) -> str:
    ratio = f"{candidate['relative_latency']:.3g} of Inductor's"
    if candidate["origin"] != "measured":
        return f"{ratio} ({candidate['origin']})"
    own = {} if context is None else context["dims"]
    there = [f"{name}={size}" for name, size in candidate["measured_at"].items() if own.get(name, size) != size]
    at = f" at {', '.join(there)}" if there else ""
    return f"{candidate['median_us']:.4g} µs, {ratio} (measured{at}, ±{candidate['noise']:.1%})"


def selection(report: SelectionReport) -> Iterator[Any]:
    """The choice for one problem: what was asked, what was chosen and why, every candidate."""
    told = report.to_dict()
    yield Text(f"{told['operation']}: {told['kernel_id']} (score {told['score']:.0f})", style="bold")
    wishes = [
        f"{verb} {entry['kernel']} ({entry['origin']})"
        for kind, verb in (("prefer", "prefers"), ("avoid", "avoids"), ("exclude", "forbids"))
        for entry in told["policy"][kind]
    ]
    lock = told["policy"]["lock"]
    if lock is not None:
        wishes.insert(0, f"locks {lock['kernel']} ({lock['origin']})")
    yield _facts(
        {
            "why": told["why"],
            "problem": _problem(told["context"]),
            "policy": "\n".join(wishes),
            "refused": "\n".join(str(reason) for reason in report.refused),
            "events": "\n".join(f"[{event['code']}] {event['message']}" for event in told["events"]),
        }
    )
    yield from candidates(told["candidates"], told["kernel_id"], told["context"])


# ---- the installation ------------------------------------------------------------------------------------------------


def diagnosis(report: DoctorReport) -> Iterator[Any]:
    """Issues first, then what there is."""
    if report.issues:
        rows = [(issue.code, f"{issue.message}\n-> {issue.advice}") for issue in report.issues]
        yield _rows(f"{len(report.issues)} issue(s)", ("code", "what is found, and what to do"), rows)
    else:
        yield Text("No issues.", style="bold green")
    found = report.compilers
    yield Text("Machine", style="bold")
    yield _facts(
        {
            "software": ", ".join(f"{name} {version}" for name, version in report.software.items()),
            **{device: f"{each.device_name} ({each.signature()})" for device, each in report.hardware},
            "C++ compiler": found.cxx_version or f"{found.cxx}: not found",
            "Inductor": found.error or f"compiles ({found.seconds:.1f} s for a small function)",
        }
    )
    yield _kernels(report)
    yield _rows("Caches", ("what", "where", "files", "size"), [
        (cache.name, cache.path, str(cache.files), cache.problem or _bytes(cache.size_bytes)) for cache in report.caches
    ])  # fmt: skip
    yield Text("Measurements", style="bold")
    yield _facts(_measurements(report))
    yield Text("Policy", style="bold")
    yield _facts(_policy(report.configuration.to_dict()))
    failures = [(each.kernel_id, str(each.count), each.last_error) for each in report.failures]
    if failures:
        yield _rows("Kernels that failed in this process", ("kernel", "times", "last error"), failures)
    if report.events:
        yield _rows("Events", ("code", "message"), [(event.code, event.message) for event in report.events])


def _kernels(report: DoctorReport) -> Table:
    rows = [
        (
            kernel.kernel_id,
            kernel.operation,
            kernel.source if kernel.version is None else f"{kernel.package} {kernel.version}",
            ", ".join(kernel.devices) or "\n".join(reason.message for reason in kernel.reasons),
        )
        for kernel in report.kernels
    ]
    return _rows("Kernels", ("kernel", "operation", "from", "runs on, or why not"), rows)


def _measurements(report: DoctorReport) -> dict[str, str]:
    found = report.measurements
    rows, size = found.statistics.get("rows", 0), _bytes(found.statistics.get("bytes", 0))
    here = ", ".join(f"{count} of {operation}" for operation, count in found.here.items())
    return {
        "database": f"{found.path} ({rows} measurements, {size})" if found.exists else f"{found.path}: none yet",
        "of this environment": here or "none",
        "environment": found.environment,
    }


def _policy(policy: Mapping[str, Any]) -> dict[str, str]:
    given = {
        name: f"{entry['value']} ({entry['origin']})"
        for name, entry in policy["settings"].items()
        if entry["origin"] != "default"
    }
    wishes = {
        kind: ", ".join(f"{entry['name']} ({entry['origin']})" for entry in policy[kind])
        for kind in ("prefer", "avoid")
    }
    locks = "\n".join(f"{lock['operation']} to {lock['kernel']} ({lock['origin']})" for lock in policy["locks"])
    file = policy["error"] or policy["file"] or "none"
    rules = str(len(policy["rules"])) if policy["rules"] else ""
    return {"file": file, **given, "locks": locks, **wishes, "rules": rules}


def tuned(report: TuneReport) -> Iterator[Any]:
    """A row for each problem that was measured, the fastest kernel first."""
    rows = [
        (each.context.operation, each.context.dtype_name, _sizes(each.context.hints()), _latencies(each.latency_us))
        for each in report.measured
    ]
    if rows:
        yield _rows("", ("operation", "dtype", "sizes", "latency in µs"), rows)
    counts = f"{len(report.measured)} measured, {report.known} known before, {report.remaining} remain"
    yield Text(f"{counts}; {report.seconds:.1f} s")
    if report.remaining:
        yield Text("The budget is used up; the same command goes on from here.")


def _latencies(latency_us: Mapping[str, float]) -> str:
    ordered = sorted(latency_us.items(), key=lambda each: each[1])
    return "\n".join(f"{kernel} {latency:,.1f}" for kernel, latency in ordered)


def kernel_list(found: Sequence[KernelInfo]) -> Table:
    """A row for each kernel, and whether it can be used here."""
    rows = [
        (
            kernel.kernel_id,
            kernel.operation,
            ", ".join(kernel.platforms),
            ", ".join(kernel.dtypes),
            ", ".join(kernel.supports),
            (kernel.version or "yes") if kernel.unavailable is None else kernel.unavailable.message,
        )
        for kernel in found
    ]
    return _rows("Kernels", ("kernel", "operation", "platforms", "dtypes", "supports", "installed"), rows)


def readiness(report: ReadinessReport) -> Iterator[Any]:
    """The verdict and a row for each check."""
    table = _rows("", ("check", "status", "found"), [(check.name, check.status, check.text) for check in report.checks])
    for index, check in enumerate(report.checks):
        table.rows[index].style = None if check.status == "pass" else _STYLES[check.status]
    yield table
    yield Text("Ready." if report.ok else "Not ready.", style=_STYLES["pass" if report.ok else "fail"])


def _bytes(count: int) -> str:
    return (
        f"{count} B"
        if count < 1024
        else f"{count / 1024:.1f} KiB"
        if count < 1 << 20
        else f"{count / (1 << 20):.1f} MiB"
    )


def _times(report: Report) -> Table:
    stages: dict[str, float] = {}
    for graph in report.graphs:
        for stage, seconds in graph.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    rows = [(stage, f"{seconds * 1e3:.1f}") for stage, seconds in stages.items()]
    return _rows(f"Time over {len(report.graphs)} graph(s)", ("stage", "ms"), rows)
