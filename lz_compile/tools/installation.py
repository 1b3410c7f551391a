"""What there is on this machine and whether it works: kernels, compilers, caches, measurements, configuration."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lz_compile.errors import ConfigError
from lz_compile.ground import events, machine
from lz_compile.ground.events import Event
from lz_compile.ground.files import cache_directory
from lz_compile.ground.hardware import default_device
from lz_compile.ground.records import Reason, Record, first_line
from lz_compile.lowering import inductor, ops
from lz_compile.runtime.kernels import libraries, registry
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.libraries import LazyFunction
from lz_compile.runtime.measure import cost, perfdb
from lz_compile.runtime.policy import environment, policy
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.problem import context as contexts
from lz_compile.runtime.problem.context import SelectionContext

#: Reasons that hold for a kernel on a device, whatever the problem.
OF_THE_DEVICE = frozenset(
    "PLATFORM_MISMATCH SM_TOO_OLD SM_TOO_NEW GPU_GENERATION_UNSUPPORTED TENSOR_CORE_GEN_UNSUPPORTED "
    "INSTRUCTION_SET_MISMATCH ISA_UNSUPPORTED NOT_INSTALLED BACKEND_VERSION_UNSUPPORTED BACKEND_IMPORT_FAILED".split()
)
#: Sizes of a problem that every kernel of its op should run.
_PLAIN_SIZES: Mapping[str, int] = {"batch_size": 1, "num_heads": 4, "num_kv_heads": 4}
_PLAIN_SIZE = 64


def devices() -> list[torch.device]:
    """The CPU and every accelerator that can be used."""
    kind = default_device().type
    count = 0 if kind == "cpu" else torch.accelerator.device_count()
    return [torch.device("cpu"), *(torch.device(kind, index) for index in range(count))]


# ---- kernels ---------------------------------------------------------------------------------------------------------


def plain_problem(op: str, device: torch.device) -> SelectionContext:
    """A problem without special features, in the dtype that is usual on a device."""
    sizes = {name: _PLAIN_SIZES.get(name, _PLAIN_SIZE) for name in contexts.dim_names(op)}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    sample = ops.module(op).sample(sizes, dtype, device)
    return contexts.of_facts(op, sample.attrs, sample.facts, device=device)


def reasons_on(spec: KernelSpec, plain: SelectionContext) -> list[Reason]:
    """Why a kernel can run nothing on the device of a problem; none if it can run something there."""
    return [reason for reason in spec.check(plain) if reason.code in OF_THE_DEVICE]


def read_again() -> list[Event]:
    """What happens when descriptors, plugins and installed libraries are looked at anew: an event for each that is broken."""
    with events.collect() as happened:
        registry.reload()
        for op in ops.names():
            registry.kernels(op)
    return happened


@dataclass(frozen=True)
class Library(Record):
    """An installed library, and what came of its first import in a process of its own: the compatibility matrix, a row each.

    ``outcome`` is ``imports``, ``raises``, ``ends its process`` or ``hangs``; ``text`` what it raised or wrote last.
    ``torch`` and ``python`` are those that it was tried with, ``versions`` what the ``kernels`` accept of it.
    """

    package: str
    module: str
    version: str
    versions: str
    torch: str
    python: str
    outcome: str
    text: str
    seconds: float
    kernels: tuple[str, ...]


def installed_libraries(*, again: bool = False) -> list[Library]:
    """Every library of a kernel that is installed, tried now or earlier; ``again`` tries all of them now.

    What raised is tried now in any case: what it lacks may have come. Nothing is imported in this process.
    """
    found: dict[tuple[str, str], Library] = {}
    for op in ops.names():
        for spec in registry.kernels(op).values():
            code = spec.implementation
            if spec.package is None or spec.version is None or not isinstance(code, LazyFunction):
                continue
            known = found.get((spec.package, code.module)) or _library(spec, code, spec.package, again)
            found[spec.package, code.module] = replace(known, kernels=(*known.kernels, spec.kernel_id))
    return list(found.values())


def _library(spec: KernelSpec, code: LazyFunction, package: str, again: bool) -> Library:
    trial = libraries.try_first(code, package, again=again)
    if trial is not None and trial.outcome == "raises" and not again:
        trial = libraries.try_first(code, package, again=True)
    facts = (package, code.module, spec.version or "", spec.backend_version or "")
    if trial is None:
        text = "this process has imported it already"
        return Library(*facts, str(torch.__version__), platform.python_version(), "imports", text, 0.0, ())
    return Library(*facts, trial.torch, trial.python, trial.outcome, trial.text, trial.seconds, ())


# ---- compilers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compilers(Record):
    """What Inductor needs: ``cxx`` is the C++ compiler it would call, ``error`` why it could not compile (None: it did)."""

    cxx: str
    cxx_version: str | None
    triton: str | None
    error: str | None
    seconds: float


def compilers(device: torch.device) -> Compilers:
    """Look for compilers, and compile a small function with Inductor."""
    cxx = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    triton = machine.environment_details("cpu")["triton"]
    start = time.perf_counter()
    error = _inductor_error(device)
    seconds = round(time.perf_counter() - start, 3)
    return Compilers(cxx, _version(cxx), None if triton == "none" else triton, error, seconds)


def _version(command: str) -> str | None:
    found = shutil.which(command.partition(" ")[0])
    if found is None:
        return None
    try:
        told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.partition("\n")[0].strip() or found


def _inductor_error(device: torch.device) -> str | None:
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sin() * 2

    try:
        example = torch.ones(64, device=device)
        torch.testing.assert_close(inductor.compile_apart(double, [example])(example), double(example))
    except Exception as error:  # noqa: BLE001 whether that fails is what is asked
        return f"{type(error).__name__}: {first_line(error)}"
    return None


# ---- caches and measurements -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheState(Record):
    """A directory with files of this package; ``problem`` is why nothing can be written to it (None: it can)."""

    name: str
    path: str
    exists: bool
    files: int
    size_bytes: int
    problem: str | None


def caches(settings_path: str | None) -> list[CacheState]:
    """The cache directory, that of the proofs in it, and that of the measurements."""
    root = cache_directory()
    measurements = perfdb.path_of(settings_path).parent
    found = {"cache": root, "proofs": root / "validation"}
    return [_cache(*each) for each in (found if measurements == root else {**found, "perfdb": measurements}).items()]


def _cache(name: str, path: Path) -> CacheState:
    sizes = []
    for directory, _, names in os.walk(path):
        for file in names:
            try:
                sizes.append((Path(directory) / file).stat().st_size)
            except OSError:  # removed meanwhile by another process
                continue
    return CacheState(name, str(path), path.is_dir(), len(sizes), sum(sizes), _unwritable(path))


def _unwritable(path: Path) -> str | None:
    """Why no file can be written below ``path``, which need not exist yet."""
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}"


@dataclass(frozen=True)
class Measurements(Record):
    """What the database of measurements holds; ``here`` counts those that were made in this environment, by operation.

    ``rates`` are what work takes here, by dtype, where that was measured.
    """

    path: str
    exists: bool
    enabled: bool
    environment: str
    here: Mapping[str, int]
    statistics: Mapping[str, Any]
    events: tuple[Event, ...]
    rates: Mapping[str, str] = field(default_factory=dict)


def measurements(policy_: Policy, device: torch.device) -> Measurements:
    """Look into the database; one that is not there is not created."""
    settings = policy_.settings.perfdb
    path, where = perfdb.path_of(settings.path), machine.environment(device.type)
    rates = {dtype: found.told() for dtype, found in cost.kept().items()}
    if not path.exists():
        return Measurements(str(path), False, settings.enabled, where, {}, {"rows": 0}, (), rates)
    with events.collect() as happened:
        database = perfdb.database(settings.path)
        statistics = database.statistics()
        here = dict(sorted(Counter(each.operation for each in database.of([where])).items()))
    return Measurements(str(path), True, settings.enabled, where, here, statistics, tuple(happened), rates)


# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration(Record):
    """The policy that holds (defaults where it cannot be read: ``error``), and variables of ours that mean nothing."""

    policy: Policy
    error: str | None
    unknown_variables: tuple[Event, ...]

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        unknown = [event.message for event in self.unknown_variables]
        return {"error": self.error, "unknown_variables": unknown, **self.policy.to_dict()}


def configuration() -> Configuration:
    """The policy as it holds now."""
    environment.forget()
    unknown: tuple[Event, ...] = ()
    try:
        with events.collect() as happened:
            environment.read(environment.snapshot())
        unknown = tuple(event for event in happened if event.code == "CONFIG_INVALID")
        return Configuration(policy.current(), None, unknown)
    except ConfigError as error:
        return Configuration(Policy(), str(error), unknown)
