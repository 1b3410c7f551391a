"""What is installed and whether it may go into production, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from lz_compile.report.layout import Rows, amount, facts, short
from lz_compile.report.render import bytes_text

if TYPE_CHECKING:
    from lz_compile.tools.diagnosis import DoctorReport
    from lz_compile.tools.installation import Measurements
    from lz_compile.tools.readiness import ReadinessReport

_STYLES: Mapping[str, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def diagnosis(report: DoctorReport) -> Iterator[Any]:
    """Issues first, then what there is."""
    if report.issues:
        told = ((issue, f"\n   {issue.fix}" if issue.fix else "") for issue in report.issues)
        rows = [(issue.code, f"{issue.message}\n-> {issue.advice}{fix}") for issue, fix in told]
        yield Rows(amount(len(report.issues), "issue"), ("code", "what is found, and what to do"), rows)
    else:
        yield Text("No issues.", style="bold green")
    compilers = {}
    if (found := report.compilers) is not None:
        compilers["C++ compiler"] = found.cxx_version or f"{found.cxx}: not found"
        compilers["Inductor"] = found.error or f"compiles ({found.seconds:.1f} s for a small function)"
    yield Text("Machine", style="bold")
    yield facts(
        {
            "software": ", ".join(f"{name} {version}" for name, version in report.software.items()),
            **{device: f"{each.device_name} ({each.signature()})" for device, each in report.hardware},
            **compilers,
        }
    )
    yield _kernels(report)
    if report.libraries:
        tried = [
            (each.package, each.version, each.module, f"{each.outcome} {short(each.text)}".strip())
            for each in report.libraries
        ]
        yield Rows("Libraries", ("library", "version", "imported as", "tried in a process of its own"), tried)
    yield Rows("Caches", ("what", "where", "files", "size"), [
        (cache.name, cache.path, str(cache.files), cache.problem or bytes_text(cache.size_bytes)) for cache in report.caches
    ])  # fmt: skip
    if report.measurements is not None:
        yield Text("Measurements", style="bold")
        yield facts(_measurements(report.measurements))
    yield Text("Policy", style="bold")
    yield facts(_policy(report.configuration.to_dict()))
    failures = [(each.kernel_id, str(each.count), each.last_error) for each in report.failures]
    if failures:
        yield Rows("Kernels that failed in this process", ("kernel", "times", "last error"), failures)
    if report.events:
        yield Rows("Events", ("code", "message"), [(event.code, event.message) for event in report.events])


def _kernels(report: DoctorReport) -> Rows:
    rows = [
        (
            kernel.kernel_id,
            kernel.operation,
            kernel.source if kernel.version is None else f"{kernel.package} {kernel.version}",
            ", ".join(kernel.devices) or "\n".join(reason.message for reason in kernel.reasons),
        )
        for kernel in report.kernels
    ]
    return Rows("Kernels", ("kernel", "operation", "from", "runs on, or why not"), rows)


def _measurements(found: Measurements) -> dict[str, str]:
    rows, size = found.statistics.get("rows", 0), bytes_text(found.statistics.get("bytes", 0))
    here = ", ".join(f"{count} of {operation}" for operation, count in found.here.items())
    return {
        "database": f"{found.path} ({rows} measurements, {size})" if found.exists else f"{found.path}: none yet",
        "of this environment": here or "none",
        "environment": found.environment,
        **{f"rates in {dtype}": rates for dtype, rates in found.rates.items()},
        "rates": ""
        if found.rates
        else "none measured yet, by the first choice of an attention, or because the machine was too busy",
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


def readiness(report: ReadinessReport) -> Iterator[Any]:
    """The verdict and a row for each check."""
    found = [(check, f"\n-> {check.advice}" if check.advice else "") for check in report.checks]
    rows = [(check.name, check.status, f"{check.text}{advice}") for check, advice in found]
    styles = [None if check.status == "pass" else _STYLES[check.status] for check in report.checks]
    yield Rows("", ("check", "status", "found, and what to do"), rows, styles)
    yield Text("Ready." if report.ok else "Not ready.", style=_STYLES["pass" if report.ok else "fail"])
