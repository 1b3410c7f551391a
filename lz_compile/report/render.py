"""Reports as tables, readable at 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from lz_compile.report.layout import Rows, amount, duration, facts, places, short
from lz_compile.report.summary import grouped, state_of, summary

if TYPE_CHECKING:
    from lz_compile.report.changes import Change
    from lz_compile.report.findings import LoopReport
    from lz_compile.report.report import MatchReport, Report
    from lz_compile.runtime.kernels.registry import KernelInfo
    from lz_compile.tools.artifacts import Artifacts
    from lz_compile.tools.inspection import SelectionReport
    from lz_compile.tools.tuning import TuneReport


def tables(report: Report) -> Iterator[Any]:
    """What a screen shows, then every kind of match with its candidates, loops, events and time."""
    yield from summary(report, is_cut=False)
    if report.matches:
        yield from _matches(report)
    if report.loops:
        yield Rows("Loops", ("where", "steps", "carried", "each step"), [_loop(loop) for loop in report.loops])
    if report.layers:
        rows = [(short(each.where), str(each.count), str(each.calls), state_of(each)) for each in report.layers]
        yield Rows("Layers", ("where", "layers", "calls of each", "compiled as"), rows)
    if report.unproven:
        reasons = [(reason.code, short(reason.message)) for reason in report.unproven]
        yield Rows("Edits that could not be run before and after", ("code", "why"), reasons)
    if report.events:
        yield Rows("Events", ("code", "message"), [(event.code, short(event.message)) for event in report.events])
    yield _times(report)


# ---- matches ---------------------------------------------------------------------------------------------------------


def _matches(report: Report) -> Iterator[Any]:
    """Every kind of match: layers that differ in nothing but their place and how they were proven stand together."""

    def kind(match: MatchReport) -> str:
        return repr({**match.to_dict(), "where": "", "graph": "", "validation": _proof(match)})

    for matches in grouped(report.matches, kind):
        yield ""
        yield from _kind(matches)
    yield ""


def _kind(matches: Sequence[MatchReport]) -> Iterator[Any]:
    first = matches[0]
    count = f"{len(matches)} x " if len(matches) > 1 else ""
    state = "rewritten" if first.rewritten else "not rewritten"
    yield Text(f"{count}{first.op}: {first.kernel}, {state}", style="bold")
    yield facts(
        {
            "where": places([match.where for match in matches]),
            "problem": "" if first.context is None else problem_text(first.context),
            "attributes": attributes_text(first.attributes),
            "masks": "\n".join(filter(None, [first.mask, *map(str, first.mask_reasons)])),
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
    return short(loop.where), str(loop.steps), "\n".join(loop.carried), f"{step}\n{state}"


def _proof(match: MatchReport) -> str:
    return proof_text(match.validation) if match.rewritten else ""


def proof_text(validation: Mapping[str, Any] | None) -> str:
    """How far a proof was from float64; nothing where it failed or there was none."""
    found = validation or {}
    if not found.get("ok"):
        return ""
    return f"error {found['error']:.1e} against float64, the source's is {found['source_error']:.1e}"


def attributes_text(attributes: Mapping[str, Any]) -> str:
    """Names and values in one line."""
    return ", ".join(
        name if value is True else f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in attributes.items()
    )


def problem_text(context: Mapping[str, Any]) -> str:
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
    """A row for each kernel that could be considered here; others, of which there is nothing to tell, in one line."""
    rows, rest = sorted_out(found, chosen, context)
    if rows:
        styles = ["bold" if row["kernel"] == chosen else None for row in rows]
        columns = ("kernel", "score", "latency", "against, notes")
        table = Rows("", columns, [_candidate(row, context) for row in rows], styles)
        yield Padding(table, (0, 0, 0, 2))
    yield facts({text: ", ".join(names) for text, names in rest.items()})


def sorted_out(
    found: Sequence[Mapping[str, Any]], chosen: str, context: Mapping[str, Any] | None
) -> tuple[list[Mapping[str, Any]], dict[str, list[str]]]:
    """The candidates of which there is something to tell, and the names of the others by what is the matter with them."""
    elsewhere, missing, equal, rows = [], [], [], []
    for candidate in found:
        codes = [reason["code"] for reason in candidate["against"]]
        if "PLATFORM_MISMATCH" in codes:
            elsewhere.append(candidate["kernel"])
        elif codes == ["NOT_INSTALLED"]:
            missing.append(candidate["kernel"])
        elif candidate["kernel"] != chosen and _is_as_fast(candidate):
            equal.append(candidate["kernel"])
        else:
            rows.append(candidate)
    platform = "this platform" if context is None else context["hardware"]["platform"]
    return rows, {
        "as fast as Inductor's own code, as far as is known": equal,
        f"not for {platform}": elsewhere,
        "not installed": missing,
    }


def _is_as_fast(candidate: Mapping[str, Any]) -> bool:
    """Whether nothing speaks for or against a kernel but that it exists."""
    is_told = bool(candidate["against"] or candidate.get("notes")) or candidate["kernel"] == "inductor"
    return not is_told and candidate["origin"] in ("assumed", "prior") and candidate["relative_latency"] == 1.0


def _candidate(candidate: Mapping[str, Any], context: Mapping[str, Any] | None) -> tuple[str, ...]:
    against = [reason["message"] for reason in candidate["against"]]
    notes = [reason["message"] for reason in candidate.get("notes", ())]
    told = ("-", "-") if against else (f"{candidate['score']:.0f}", latency_text(candidate, context))
    return candidate["kernel"], *told, "\n".join([*against, *notes])


def latency_text(candidate: Mapping[str, Any], context: Mapping[str, Any] | None) -> str:
    """What a kernel takes, and how that is known."""
    ratio = f"{candidate['relative_latency']:.3g} of Inductor's"
    if candidate["origin"] == "estimated":
        parts = [f"{duration(us)} {kind.replace('_', ' ')}" for kind, us in candidate["parts_us"].items()]
        whole = f"{duration(sum(candidate['parts_us'].values()))} = " if len(parts) > 1 else ""
        return f"{ratio} (estimated: {whole}{' + '.join(parts)})"
    if candidate["origin"] != "measured":
        return f"{ratio} ({candidate['origin']})"
    own = {} if context is None else context["dims"]
    there = [f"{name}={size}" for name, size in candidate["measured_at"].items() if own.get(name, size) != size]
    at = f" at {', '.join(there)}" if there else ""
    return f"{duration(candidate['median_us'])}, {ratio} (measured{at}, ±{candidate['noise']:.1%})"


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
    yield facts(
        {
            "why": told["why"],
            "problem": problem_text(told["context"]),
            "policy": "\n".join(wishes),
            "refused": "\n".join(str(reason) for reason in report.refused),
            "events": "\n".join(f"[{event['code']}] {event['message']}" for event in told["events"]),
        }
    )
    yield from candidates(told["candidates"], told["kernel_id"], told["context"])


def differences(found: Sequence[Change]) -> Iterator[Any]:
    """A line for each thing that changed between two reports, by what it is about."""
    if not found:
        yield Text("Nothing that the reports tell is different.")
    for kind in grouped(found, lambda change: change.kind):
        rows = [
            (
                each.subject,
                each.before or "none",
                each.after or "none",
                f"{len(each.places)} x {places(each.places, 3)}" if each.places else "",
            )
            for each in kind
        ]
        yield Rows(kind[0].kind, ("what", "before", "now", "where"), rows)


# ---- what is measured and kept ----------------------------------------------------------------------------------------


def tuned(report: TuneReport) -> Iterator[Any]:
    """A row for each problem that was measured, the fastest kernel first."""
    rows = [
        (each.context.operation, each.context.dtype_name, _sizes(each.context.hints()), _latencies(each.latency_us))
        for each in report.measured
    ]
    if rows:
        yield Rows("", ("operation", "dtype", "sizes", "latency in µs"), rows)
    counts = f"{len(report.measured)} measured, {report.known} known before, {report.remaining} remain"
    yield Text(f"{counts}; {report.seconds:.1f} s")
    if report.remaining:
        yield Text("The budget is used up; the same command goes on from here.")


def _latencies(latency_us: Mapping[str, float]) -> str:
    ordered = sorted(latency_us.items(), key=lambda each: each[1])
    return "\n".join(f"{kernel} {latency:,.1f}" for kernel, latency in ordered)


def kernel_list(found: Sequence[KernelInfo]) -> Rows:
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
    return Rows("Kernels", ("kernel", "operation", "platforms", "dtypes", "supports", "installed"), rows)


def artifacts(found: Artifacts) -> Iterator[Any]:
    """A row for each part, and what of it is of no use here."""
    rows = [
        (
            part.kind,
            part.torch,
            str(part.count),
            bytes_text(part.size_bytes),
            "; ".join(f"{count}: {reason}" for reason, count in part.left_out.items()),
        )
        for part in found.parts
    ]
    yield Rows(f"Artifacts of {found.path}", ("kind", "torch", "count", "size", "left out here"), rows)


def bytes_text(count: int) -> str:
    """A number of bytes in the unit that suits it."""
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.1f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.1f} MiB"


def _times(report: Report) -> Rows:
    rows = [(stage, f"{seconds * 1e3:.1f}") for stage, seconds in report.seconds.items()]
    return Rows(f"Time over {amount(len(report.graphs), 'graph')}", ("stage", "ms"), rows)
