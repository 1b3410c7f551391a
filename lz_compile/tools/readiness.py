"""``readiness_check`` tells whether an installation may go into production."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from lz_compile import __version__
from lz_compile.errors import ArtifactError, DispatchTableError
from lz_compile.ground import health
from lz_compile.ground.files import path_given
from lz_compile.ground.hardware import default_device
from lz_compile.ground.records import Record, Shown
from lz_compile.ground.store import Store
from lz_compile.lowering import ops
from lz_compile.report.report import reports
from lz_compile.runtime.choose.problem import Decision, Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.estimate import INDUCTOR
from lz_compile.runtime.policy import names
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.policy.rules import Lock
from lz_compile.runtime.policy.settings import Layer, Value
from lz_compile.runtime.ranks import agree
from lz_compile.runtime.ranks.cards import Difference, listed
from lz_compile.runtime.tables import loaded as loaded_tables
from lz_compile.tools import diagnosis, installation
from lz_compile.tools.diagnosis import Issue
from lz_compile.tools.installation import Configuration

if TYPE_CHECKING:
    from lz_compile.tools.serving import ServedState


SCHEMA_VERSION = "1.0"
#: What can run does not depend on what was measured: the database stays closed.
_UNMEASURED = Layer(values=(Value("perfdb.enabled", False, "readiness_check"),))
#: Issues that warn; any other counts against readiness.
_WARNINGS = frozenset(
    "VARIABLE_UNKNOWN POLICY_DISABLED FALLBACK_DISABLED PERFDB_DISABLED NOT_MEASURED LIBRARY_RAISES LIBRARY_UNSAFE".split()
)


@dataclass(frozen=True)
class ReadinessReport(Record, Shown):
    """Every check, in order; those that warn do not count against readiness."""

    shown_by = "lz_compile.report.render_installation:readiness"

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "fail" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {"schema_version": SCHEMA_VERSION, "ok": self.ok, **super().to_dict()}


def readiness_check(
    dispatch_table: str | os.PathLike[str] | None = None, artifacts: str | os.PathLike[str] | None = None
) -> ReadinessReport:
    """Whether this machine, as it is installed and configured, may run in production.

    Kernel descriptors, plugins and installed libraries are looked at anew. Nothing is compiled and no kernel runs.

    Args:
        dispatch_table: a file that ``lz.solve`` wrote.
        artifacts: a file of ``lz.save_artifacts`` that processes will load.
    """
    for name, path in {"dispatch_table": dispatch_table, "artifacts": artifacts}.items():
        if path is not None:
            path_given("readiness_check", name, path)
    device = default_device()
    configuration = installation.configuration()
    return ReadinessReport(
        (
            _of(
                "capabilities",
                diagnosis.about_events(installation.read_again()),
                "every descriptor and plugin is valid",
            ),
            *_policy(configuration),
            *_kernels(configuration, device),
            *_locks(configuration, device),
            _of("retired kernels", diagnosis.about_retirements(health.retirements()), "none"),
            *_caches(configuration),
            _measurements(configuration, device),
            *_headroom(configuration, device),
            *_dispatch_table(dispatch_table),
            _libraries(),
            *_choices(configuration.policy, device),
            *_warm_up(),
            *_artifacts(artifacts),
            *_capture(configuration.policy, device),
            *_ranks(configuration.policy),
        )
    )


def _check(name: str, problems: Sequence[str], otherwise: str, advice: str, status: Status = "fail") -> Check:
    """All problems in one text and what to do, or what is told where there is none."""
    return Check(name, status, "; ".join(problems), advice) if problems else Check(name, "pass", otherwise)


def _of(name: str, issues: Iterable[Issue], otherwise: str) -> Check:
    """What ``doctor`` finds of a subject, or what is told where it finds nothing."""
    found = list(issues)
    advice = " ".join(dict.fromkeys(issue.advice for issue in found))
    counts = any(issue.code not in _WARNINGS for issue in found)
    return _check(name, [issue.message for issue in found], otherwise, advice, "fail" if counts else "warn")


def _policy(configuration: Configuration) -> Iterator[Check]:
    found = list(diagnosis.about_configuration(configuration))
    fallback = [issue for issue in found if issue.code == "FALLBACK_DISABLED"]
    others = (issue for issue in found if issue not in fallback)
    yield _of("policy", others, configuration.policy.file or "no file, valid")
    yield _of("fallback", fallback, "a kernel that fails is retired, its call completes on the reference")


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


def _caches(configuration: Configuration) -> Iterator[Check]:
    for cache in installation.caches(configuration.policy.settings.perfdb.path):
        yield _of(f"cache: {cache.name}", diagnosis.about_caches([cache]), f"{cache.path} ({cache.files} files)")


def _measurements(configuration: Configuration, device: torch.device) -> Check:
    found = installation.measurements(configuration.policy, device)
    count, mode = sum(found.here.values()), found.statistics.get("journal_mode")
    return _of("measurements", diagnosis.about_measurements(found), f"{count} of this environment ({mode} mode)")


def _headroom(configuration: Configuration, device: torch.device) -> Iterator[Check]:
    if device.type != "cpu" and configuration.policy.settings.memory_headroom_mb is None:
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


# ---- production beside the installation: warm-up, artifacts, what choices rest on, capture, ranks --------------------


Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Check(Record):
    """One condition of production; ``text`` says what was found, ``advice`` what to do where that is not enough."""

    name: str
    status: Status
    text: str
    advice: str = ""


def _warm_up() -> Iterator[Check]:
    """Whether the shapes of traffic are compiled before it comes."""
    serving = sys.modules.get("lz_compile.tools.serving")  # nobody serves who has not imported it
    states: list[ServedState] = [] if serving is None else [served.state() for served in list(serving.served)]
    advice = "Call served.warmup() before traffic, or give lz.serve(model, calls=...) the shapes that will come."
    waiting, ready = sum(state.waiting for state in states), sum(state.ready for state in states)
    failures = [f"{shape}: {why}" for state in states for shape, why in state.failures.items()]
    if failures:
        text = f"{len(failures)} shapes of served models cannot be compiled: {'; '.join(failures[:3])}"
        yield Check("warm-up", "warn", text, "Mend what the reasons name; these shapes are answered eagerly.")
    if states:
        missing = [f"{ready} shapes are compiled, {waiting} wait for the compiler"] if waiting or not ready else []
        told = f"{ready} shapes of {len(states)} served models are compiled"
    else:
        count = len(list(Store("shapes").directory.glob("*.json")))
        missing = [] if count else ["no shape is remembered: the first call of every shape compiles, for seconds"]
        told = f"the shapes of {count} served models are remembered; served.warmup() compiles them"
    yield _check("warm-up", missing, told, advice, "warn")


def _artifacts(path: str | os.PathLike[str] | None) -> Iterator[Check]:
    """Whether a file of artifacts is of use on this machine."""
    from lz_compile.tools.artifacts import inspect_artifacts

    if path is None:
        yield Check("artifacts", "pass", "none given: what is compiled, proven and measured stays on this machine")
        return
    again = "Save them again with these versions on such a machine: lz.save_artifacts(path)."
    try:
        found = inspect_artifacts(path)
    except ArtifactError as error:
        yield Check("artifacts", "fail", str(error), again)
        return
    count = sum(part.count for part in found.parts)
    reasons = dict.fromkeys(reason for part in found.parts for reason in part.left_out)
    text = f"{found.path}: {count - found.left_out} of {count} parts are of use here"
    if not count or found.left_out == count:
        yield Check("artifacts", "fail", f"{text}{': ' if reasons else ''}{'; '.join(reasons)}", again)
    elif found.left_out:
        yield Check("artifacts", "warn", f"{text}; others: {'; '.join(reasons)}", again)
    else:
        yield Check("artifacts", "pass", text)


def _libraries() -> Check:
    """Whether what is installed can be imported, as processes of its own have shown."""
    found = installation.installed_libraries()
    there = ", ".join(dict.fromkeys(f"{each.package} {each.version}" for each in found))
    return _of("libraries", diagnosis.about_libraries(found), there or "no optional library is installed")


def _choices(policy: Policy, device: torch.device) -> Iterator[Check]:
    """What the choice of a kernel rests on, for a plain problem of each op."""
    decided = {op: select(Problem(installation.plain_problem(op, device)), policy) for op in ops.names()}
    by_prior = [
        f"{op} by {decision.kernel.kernel_id}"
        for op, decision in decided.items()
        if decision.kernel.kernel_id != INDUCTOR and _origin(decision) == "prior"
    ]
    problems = [f"priors of other machines decide: {', '.join(by_prior)}"] if by_prior else []
    commands = [f"python -m lz_compile tune {each.partition(' ')[0]}" for each in by_prior]
    origins = ", ".join(f"{op} {_origin(decision)}" for op, decision in decided.items())
    yield _check("choices", problems, origins, f"Measure here: {'; '.join(commands)}.", "warn")


def _origin(decision: Decision) -> str:
    chosen = decision.kernel.kernel_id
    return next(each.estimate.origin for each in decision.candidates if each.kernel.kernel_id == chosen)


def _capture(policy: Policy, device: torch.device) -> Iterator[Check]:
    """Whether kernels may be captured into CUDA graphs, and whether models were captured whole."""
    breaks = [miss for graph in reports() for miss in graph.near_misses if miss.reason.code == "GRAPH_BREAK"]
    if breaks:
        text = f"graph breaks tear {len(breaks)} operations apart, the first at {breaks[0].where}"
        yield Check("capture", "warn", text, breaks[0].edit)
    if device.type != "cuda":
        yield Check("capture", "pass", f"there are no CUDA graphs on {device.type}")
        return
    chosen = {op: select(Problem(installation.plain_problem(op, device)), policy).kernel for op in ops.names()}
    unsafe = [
        f"{kernel.kernel_id} for {op} is not safe in CUDA graphs"
        for op, kernel in chosen.items()
        if kernel.kernel_id != INDUCTOR and not kernel.is_cuda_graph_safe
    ]
    advice = "mode='reduce-overhead' takes other kernels there; run the warm-up before a capture of your own."
    yield _check("capture", unsafe, "every kernel that is chosen is safe in CUDA graphs", advice, "warn")


def _ranks(policy: Policy) -> Iterator[Check]:
    """What has to be the same on every rank, as it is in this process; who compares ranks adds what differs here."""
    parts = {
        "lz_compile": __version__,
        "torch": str(torch.__version__),
        "kernels": registry.digest()[:12],
        "policy": policy.digest[:12],
    }
    known = ", ".join(f"{name} {value}" for name, value in parts.items())
    job = agree.known(policy)
    if not job:
        is_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        count = torch.distributed.get_world_size() if is_group else 1
        alone = f"{count} ranks, each of which decides alone" if count > 1 else "one process"
        advice = "Compare this line on every rank, or set ranks.selection to agree." if count > 1 else ""
        yield Check("ranks", "warn" if count > 1 else "pass", f"{alone}: {known}", advice)
        return
    differ = "; ".join(str(Difference(**row)) for row in job["differences"])
    silent = sorted({*range(job["world_size"])} - {*job["heard"], job["rank"]})
    text = f"{job['world_size']} ranks, of which {len(job['heard'])} were heard; this one has {known}"
    if job["store_lost"]:
        yield Check("ranks", "warn", f"their store is lost: {job['store_lost']}", "Look at the host that keeps it.")
    elif differ or silent:
        missing = f"{listed(silent)} said nothing by now" if silent else ""
        advice = (
            "Install the same versions and policy on all of them." if differ else "Call lz.join_ranks() on all of them."
        )
        yield Check("ranks", "warn", f"{text}; {'; '.join(filter(None, (differ, missing)))}", advice)
    else:
        yield Check("ranks", "pass", f"{text}, as all have")
