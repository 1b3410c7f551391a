"""``readiness_check`` tells whether an installation may go into production."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lz_compile.errors import DispatchTableError
from lz_compile.ground import health
from lz_compile.ground.hardware import default_device
from lz_compile.ground.records import Record
from lz_compile.lowering import ops
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.estimate import INDUCTOR
from lz_compile.runtime.policy import names
from lz_compile.runtime.policy.rules import Lock
from lz_compile.runtime.policy.settings import Layer, Value
from lz_compile.runtime.tables import loaded as loaded_tables
from lz_compile.tools import installation, production
from lz_compile.tools.installation import Configuration
from lz_compile.tools.production import Check, Status

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

SCHEMA_VERSION = "1.0"
#: What can run does not depend on what was measured: the database stays closed.
_UNMEASURED = Layer(values=(Value("perfdb.enabled", False, "readiness_check"),))


@dataclass(frozen=True)
class ReadinessReport(Record):
    """Every check, in order; those that warn do not count against readiness."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "fail" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {"schema_version": SCHEMA_VERSION, "ok": self.ok, **super().to_dict()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A row for each check."""
        from lz_compile.report.render_installation import readiness

        yield from readiness(self)


def readiness_check(
    dispatch_table: str | os.PathLike[str] | None = None, artifacts: str | os.PathLike[str] | None = None
) -> ReadinessReport:
    """Whether this machine, as it is installed and configured, may run in production.

    Kernel descriptors, plugins and installed libraries are looked at anew. Nothing is compiled and no kernel runs.

    Args:
        dispatch_table: a file that ``lz.solve`` wrote.
        artifacts: a file of ``lz.save_artifacts`` that processes will load.
    """
    device = default_device()
    configuration = installation.configuration()
    return ReadinessReport(
        (
            *_capabilities(),
            *_policy(configuration),
            *_kernels(configuration, device),
            *_locks(configuration, device),
            *_health(),
            *_caches(configuration),
            *_measurements(configuration, device),
            *_safety(configuration, device),
            *_dispatch_table(dispatch_table),
            *production.libraries(),
            *production.choices(configuration.policy, device),
            *production.warm_up(),
            *production.artifacts(artifacts),
            *production.capture(configuration.policy, device),
            *production.ranks(configuration.policy),
        )
    )


def _check(name: str, problems: Sequence[str], otherwise: str, advice: str, status: Status = "fail") -> Check:
    """All problems in one text and what to do, or what is told where there is none."""
    return Check(name, status, "; ".join(problems), advice) if problems else Check(name, "pass", otherwise)


def _capabilities() -> Iterator[Check]:
    count, errors = installation.broken_descriptors()
    told = {"CAPABILITIES_SCHEMA_MISMATCH"} if errors else set()
    happened = [event.message for event in installation.read_again() if event.code not in told]
    problems = list(dict.fromkeys([*map(str, errors), *happened]))
    advice = "Correct the descriptor, or update the plugin; its kernels are disabled until then."
    yield _check("capabilities", problems, f"{count} descriptors and every plugin are valid", advice)


def _policy(configuration: Configuration) -> Iterator[Check]:
    if configuration.error is not None:
        yield Check("policy", "fail", configuration.error, "Correct it: until then every compile raises this error.")
    elif configuration.unknown_variables:
        advice = "Correct the variable's name, or unset it: it has no effect."
        yield from (Check("policy", "warn", event.message, advice) for event in configuration.unknown_variables)
    else:
        yield Check("policy", "pass", configuration.policy.file or "no file, valid")


def _kernels(configuration: Configuration, device: torch.device) -> Iterator[Check]:
    for op in ops.names():
        decision = select(Problem(installation.plain_problem(op, device)), configuration.policy.overlaid(_UNMEASURED))
        able = sorted({each.kernel.kernel_id for each in decision.candidates if not each.against} - {INDUCTOR})
        missing = f"nothing but Inductor runs {op} on {device}"
        advice = "Install a library (python -m lz_compile list-kernels), or lift what the policy forbids."
        yield _check(f"kernels for {op}", [] if able else [missing], f"on {device}: {', '.join(able)}", advice)


def _locks(configuration: Configuration, device: torch.device) -> Iterator[Check]:
    locks = [lock for layer in configuration.policy.layers for lock in layer.locks if lock.kernel_id is not None]
    problems = [text for lock in locks for text in _lock_problems(lock, device)]
    advice = "Lock another kernel, or take the lock back where its origin says."
    yield _check("locks", problems, f"{len(locks)} locks, all possible here" if locks else "none", advice)


def _lock_problems(lock: Lock, device: torch.device) -> Iterator[str]:
    if lock.kernel_id is None or lock.kernel_id == INDUCTOR:
        return
    for op in names.ops_covered(lock.operation):
        spec = kernels(op).get(lock.kernel_id)
        problem = f"{lock.operation} is locked by {lock.origin} to {lock.kernel_id}"
        if spec is None:
            yield f"{problem}, which is no kernel of {op}"
        elif reasons := installation.reasons_on(spec, installation.plain_problem(op, device)):
            yield f"{problem}: {', '.join(reason.message for reason in reasons)}"


def _health() -> Iterator[Check]:
    problems = [f"{name}: {each.message}" for name, each in health.retirements().items()]
    advice = "Report the failure to the kernel's authors, and start a new process: it is tried again there."
    yield _check("retired kernels", problems, "none", advice)


def _caches(configuration: Configuration) -> Iterator[Check]:
    for cache in installation.caches(configuration.policy.settings.perfdb.path):
        text = f"{cache.path} cannot be written: {cache.problem}"
        advice = "Make it writable, or set LAYERZERO_CACHE_DIR to a directory that is."
        yield _check(
            f"cache: {cache.name}", [text] if cache.problem else [], f"{cache.path} ({cache.files} files)", advice
        )


def _measurements(configuration: Configuration, device: torch.device) -> Iterator[Check]:
    found = installation.measurements(configuration.policy, device)
    advice = "Run 'python -m lz_compile tune' on the sizes of your models, or load artifacts with measurements."
    if found.events:
        told = "; ".join(event.message for event in found.events)
        yield Check("measurements", "fail", told, "Tune again, in a cache directory that can be written.")
    elif not found.enabled:
        text = "switched off (perfdb.enabled): estimates and priors decide"
        yield Check("measurements", "warn", text, "Switch perfdb.enabled on.")
    elif not found.here:
        text = f"none of this environment in {found.path}: estimates and priors decide"
        yield Check("measurements", "warn", text, advice)
    else:
        count = sum(found.here.values())
        yield Check("measurements", "pass", f"{count} of this environment ({found.statistics['journal_mode']} mode)")


def _safety(configuration: Configuration, device: torch.device) -> Iterator[Check]:
    settings = configuration.policy.settings
    off = (
        [] if settings.fallback_enabled else ["switched off (fallback_enabled): a kernel that fails stops the program"]
    )
    advice = "Switch fallback_enabled on unless a failing kernel is to stop the program."
    yield _check("fallback", off, "a kernel that fails is retired, its call completes on the reference", advice, "warn")
    if device.type != "cpu" and settings.memory_headroom_mb is None:
        text = "memory_headroom_mb is not set: kernels may take what the device has free"
        yield Check("memory headroom", "warn", text, "Set memory_headroom_mb to what a kernel's workspace may take.")


def _dispatch_table(path: str | os.PathLike[str] | None) -> Iterator[Check]:
    from lz_compile.runtime.tables.dispatch_table import DispatchTable

    found = [(each.path, each.table) for each in loaded_tables.active()]
    try:
        if path is not None:
            found.append((os.fspath(path), DispatchTable.load(os.fspath(path))))
        for name, table in found:
            table.check(name)
    except DispatchTableError as error:
        advice = "Solve again with these versions on such a machine: python -m lz_compile solve ..."
        yield Check("dispatch table", "fail", str(error), advice)
    else:
        told = "; ".join(f"{name}: {len(table.plans)} plans, valid on this machine" for name, table in found)
        yield Check("dispatch table", "pass", told or "none: kernels are chosen while compiling")
