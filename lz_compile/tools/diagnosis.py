"""``doctor``: what is installed, what works, what is remembered, and what to do about what is not as it should be.

It must work where little else does: every look at the installation stands on its own, and one that raises is an issue.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import rich
import torch

from lz_compile import __version__
from lz_compile.ground import health
from lz_compile.ground.events import Event
from lz_compile.ground.hardware import Hardware, default_device, hardware
from lz_compile.ground.records import Reason, Record, Shown, first_line
from lz_compile.lowering import ops
from lz_compile.report.files import environment
from lz_compile.report.report import reports
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.problem.context import SelectionContext
from lz_compile.tools import installation
from lz_compile.tools.installation import CacheState, Compilers, Configuration, Library, Measurements

SCHEMA_VERSION = "1.0"
#: Installs into the Python that runs this.
_PIP = f"{shlex.quote(sys.executable or 'python')} -m pip install"
Found = TypeVar("Found")
Other = TypeVar("Other")


@dataclass(frozen=True)
class Issue(Record):
    """Something that is not as it should be: ``code`` for machines, ``message`` says what is found, ``advice`` what to do.

    ``fix`` is a command line that mends it, where one does.
    """

    code: str
    message: str
    advice: str
    fix: str = ""


@dataclass(frozen=True)
class KernelState(Record):
    """A kernel on this machine: the devices that it can run on, or why there is none."""

    operation: str
    kernel_id: str
    source: str
    package: str | None
    version: str | None
    devices: tuple[str, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class DoctorReport(Record, Shown):
    """The state of this installation; ``issues`` is empty where nothing is wrong.

    What could not be looked at is None or empty, and an issue ``CHECK_FAILED`` says why.
    """

    shown_by = "lz_compile.report.render_installation:diagnosis"

    issues: tuple[Issue, ...]
    software: Mapping[str, str]
    hardware: tuple[tuple[str, Hardware], ...]
    compilers: Compilers | None
    kernels: tuple[KernelState, ...]
    caches: tuple[CacheState, ...]
    measurements: Measurements | None
    configuration: Configuration
    libraries: tuple[Library, ...]
    retired: Mapping[str, Reason]
    failures: tuple[health.KernelFailures, ...]
    events: tuple[Event, ...]

    @property
    def fixes(self) -> list[str]:
        """Command lines that mend what can be mended so, in order."""
        return list(dict.fromkeys(issue.fix for issue in self.issues if issue.fix))

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        told = super().to_dict()
        told["hardware"] = [{"device": device, **each.to_dict()} for device, each in self.hardware]
        return {"schema_version": SCHEMA_VERSION, **told, "policy": told.pop("configuration")}


def doctor(print_report: bool = True, *, retry: bool = False) -> DoctorReport:
    """What is installed and works on this machine, and what to do about what does not.

    Kernel descriptors, plugins and installed libraries are looked at anew, and a small function is compiled with Inductor,
    which takes some seconds. Installed libraries are imported in processes of their own, unless that was tried before. No
    kernel runs.

    Args:
        print_report: print it as tables.
        retry: try again how libraries import.
    """
    cpu = torch.device("cpu")
    look = _Looks()
    device = look("the default device", default_device, cpu)
    places = look("the devices", installation.devices, [cpu])
    happened = look("kernel descriptors, plugins and libraries", installation.read_again, [])
    configuration = look("the configuration", installation.configuration, Configuration(Policy(), None, ()))
    perfdb_path = configuration.policy.settings.perfdb.path
    found = DoctorReport(
        issues=(),
        software=look("versions", environment, {"lz_compile": __version__, "torch": str(torch.__version__)}),
        hardware=tuple(_hardware(look, places)),
        compilers=look("compilers", lambda: installation.compilers(device), None),
        kernels=tuple(_kernels(look, places)),
        caches=tuple(look("caches", lambda: installation.caches(perfdb_path), [])),
        measurements=look("measurements", lambda: installation.measurements(configuration.policy, device), None),
        configuration=configuration,
        libraries=tuple(look("libraries", partial(installation.installed_libraries, again=retry), [])),
        retired=health.retirements(),
        failures=tuple(health.failures()),
        events=(*happened, *(event for report in reports() for event in report.events)),
    )
    subjects: tuple[Callable[[], Iterable[Issue]], ...] = (
        partial(about_configuration, configuration),
        partial(_about_compilers, found.compilers, device),
        partial(about_events, happened),
        partial(_about_kernels, found.kernels),
        partial(about_libraries, found.libraries),
        partial(about_caches, found.caches),
        partial(about_measurements, found.measurements),
        partial(about_retirements, found.retired),
    )
    for subject in subjects:
        look.issues += look("what is found", partial(_listed, subject), [])
    report = replace(found, issues=tuple(look.issues))
    if print_report:
        rich.print(report)
    return report


def _listed(about: Callable[[], Iterable[Issue]]) -> list[Issue]:
    return list(about())


class _Looks:
    """Looks at one thing after the other. Of one that raises an issue is kept, and what stands for it is given."""

    def __init__(self) -> None:
        self.issues: list[Issue] = []

    def __call__(self, what: str, look: Callable[[], Found], otherwise: Other) -> Found | Other:
        try:
            return look()
        except Exception as error:  # noqa: BLE001 what is broken is what is asked for
            text = f"looking at {what}: {type(error).__name__}: {first_line(error)}"
            advice = "Mend what the message names; the rest of this report holds without it."
            self.issues.append(Issue("CHECK_FAILED", text, advice))
            return otherwise


def _hardware(look: _Looks, places: Iterable[torch.device]) -> Iterator[tuple[str, Hardware]]:
    for place in places:
        yield str(place), look(f"the device {place}", partial(hardware, place), Hardware(place.type, "unknown"))


def _kernels(look: _Looks, places: Sequence[torch.device]) -> Iterator[KernelState]:
    for op in look("operations", ops.names, []):
        plain = partial(installation.plain_problem, op)
        asked = {str(place): look(f"{op} on {place}", partial(plain, place), None) for place in places}
        problems = {place: problem for place, problem in asked.items() if problem is not None}
        for spec in look(f"the kernels of {op}", partial(kernels, op), {}).values():
            broken = KernelState(spec.operation, spec.kernel_id, spec.source, spec.package, None, (), ())
            yield look(f"the kernel {spec.kernel_id}", partial(_kernel, spec, problems), broken)


def _kernel(spec: KernelSpec, problems: Mapping[str, SelectionContext]) -> KernelState:
    against = {place: installation.reasons_on(spec, problem) for place, problem in problems.items()}
    usable = tuple(place for place, reasons in against.items() if not reasons)
    reasons = () if usable else tuple(dict.fromkeys(reason for each in against.values() for reason in each))
    return KernelState(spec.operation, spec.kernel_id, spec.source, spec.package, spec.version, usable, reasons)


# ---- issues ----------------------------------------------------------------------------------------------------------


#: What to do about an event of reading descriptors and plugins.
_ADVICE: Mapping[str, str] = {
    "CAPABILITIES_SCHEMA_MISMATCH": "Correct the descriptor or update the plugin; its kernels are disabled until then.",
    "BACKEND_IMPORT_FAILED": "Reinstall the library in a version that fits this PyTorch; its kernels are disabled.",
}


def about_events(happened: Iterable[Event]) -> Iterator[Issue]:
    """What went wrong while descriptors and plugins were read."""
    yield from (Issue(event.code, event.message, _ADVICE.get(event.code, "See the message.")) for event in happened)


def about_configuration(configuration: Configuration) -> Iterator[Issue]:
    """What is wrong with the policy, or switched off by it."""
    if configuration.error is not None:
        advice = "Correct it: until then every compile raises this error."
        yield Issue("CONFIG_INVALID", configuration.error, advice)
    for event in configuration.unknown_variables:
        yield Issue("VARIABLE_UNKNOWN", event.message, "Correct its name, or unset it: it has no effect.")
    settings = configuration.policy.settings
    if not settings.enabled:
        value = configuration.policy.values["enabled"]
        text = f"selection is switched off by {value.origin}"
        yield Issue("POLICY_DISABLED", text, "Take that back to have kernels chosen: everything is left to Inductor.")
    if not settings.fallback_enabled:
        text = f"fallback_enabled is switched off by {configuration.policy.values['fallback_enabled'].origin}"
        yield Issue("FALLBACK_DISABLED", text, "Switch it on unless a failing kernel is to stop the program.")


def _about_compilers(found: Compilers | None, device: torch.device) -> Iterator[Issue]:
    if found is not None:
        yield from _about_found_compilers(found, device)
    built_for = torch.version.cuda or torch.version.hip
    if built_for and not torch.cuda.is_available():
        advice = "Check the driver (nvidia-smi, rocminfo) and CUDA_VISIBLE_DEVICES; everything runs on the CPU."
        yield Issue("GPU_NOT_USABLE", f"this PyTorch is built for CUDA or ROCm {built_for} and finds no device", advice)


def _about_found_compilers(found: Compilers, device: torch.device) -> Iterator[Issue]:
    if device.type == "cpu" and found.cxx_version is None:
        advice = "Install a C++ compiler (g++ 11 or newer), or name one in CXX: Inductor compiles for the CPU with it."
        yield Issue("COMPILER_MISSING", f"there is no C++ compiler '{found.cxx}'", advice)
    if device.type in ("cuda", "xpu") and found.triton is None:
        text = f"Triton is not installed, and Inductor compiles for {device.type} with it"
        yield Issue("TRITON_MISSING", text, "Install the triton that this PyTorch was built with.", _triton())
    if found.error is not None:
        advice = "torch.compile itself does not work here; run it with TORCH_LOGS=+inductor to see why."
        yield Issue("INDUCTOR_FAILED", f"compiling a small function with Inductor for {device}: {found.error}", advice)


def _about_kernels(states: Iterable[KernelState]) -> Iterator[Issue]:
    for kernel in states:
        for reason in kernel.reasons:
            if reason.code == "BACKEND_VERSION_UNSUPPORTED":
                advice = f"Install a version of {kernel.package} in that range to use {kernel.kernel_id}."
                versions = kernels(kernel.operation)[kernel.kernel_id].backend_version or ""
                fix = f"{_PIP} '{kernel.package}{versions}'"
                yield Issue(reason.code, f"{kernel.kernel_id}: {reason.message}", advice, fix)


def about_libraries(found: Iterable[Library]) -> Iterator[Issue]:
    """Libraries that are installed and cannot be imported."""
    for library in found:
        if library.outcome == "imports":
            continue
        code = "LIBRARY_RAISES" if library.outcome == "raises" else "LIBRARY_UNSAFE"
        text = f"importing {library.module} with {library.package} {library.version} {library.outcome}: {library.text}"
        advice = (
            f"Reinstall {library.package}, built for torch {library.torch}; {', '.join(library.kernels)} cannot run."
        )
        yield Issue(code, text, advice, _reinstalled(library))


def _reinstalled(library: Library) -> str:
    """How to get what an import lacks, by the library's own requirements, or it built again for the PyTorch that is here."""
    if "No module named" in library.text:  # whose distribution may have another name
        return f"{_PIP} '{library.package}{library.versions}'"
    built = f"--force-reinstall --no-deps --no-cache-dir --no-build-isolation --no-binary {library.package}"
    return f"{_PIP} {built} '{library.package}{library.versions}'"


def _triton() -> str:
    """The version of Triton that PyTorch asks for."""
    wanted = [each for each in metadata.requires("torch") or () if re.match(r"triton\b", each)]
    return f"{_PIP} '{wanted[0].partition(';')[0].strip()}'" if wanted else f"{_PIP} triton"


def about_caches(states: Iterable[CacheState]) -> Iterator[Issue]:
    """Directories that cannot be written to."""
    for cache in states:
        if cache.problem is not None:
            advice = "Make it writable, or set LAYERZERO_CACHE_DIR to a directory that is: nothing is remembered now."
            text = f"nothing can be written to {cache.path} ({cache.name}): {cache.problem}"
            yield Issue("CACHE_UNWRITABLE", text, advice)


def about_retirements(retired: Mapping[str, Reason]) -> Iterator[Issue]:
    """Kernels that failed in this process."""
    for name, reason in retired.items():
        advice = "Report the failure to the kernel's authors; it is tried again in a new process."
        yield Issue(reason.code, f"{name} is retired: {reason.message}", advice)


def about_measurements(found: Measurements | None) -> Iterator[Issue]:
    """What measurements lack."""
    if found is None:
        return
    for event in found.events:
        yield Issue(event.code, event.message, "Tune again, in a cache directory that can be written.")
    if not found.enabled:
        text = "the database of measurements is switched off (perfdb.enabled)"
        yield Issue("PERFDB_DISABLED", text, "Switch it on: estimates and priors decide now.")
    elif not found.here:
        rows = int(found.statistics.get("rows", 0))
        text = "nothing was measured in this environment"
        if rows:
            text += f"; the {rows} measurements there are were made on other hardware or software, or other threads"
        advice = "Run 'python -m lz_compile tune' on the sizes of your models: until then estimates and priors decide."
        yield Issue("NOT_MEASURED", text, advice)
