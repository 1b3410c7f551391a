"""What ``readiness_check`` asks beside the installation: warm-up, artifacts, what choices rest on, capture, ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from lz_compile import __version__
from lz_compile.errors import ArtifactError
from lz_compile.ground.records import Record
from lz_compile.ground.store import Store
from lz_compile.lowering import ops
from lz_compile.report.report import reports
from lz_compile.runtime.choose.problem import Decision, Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.measure.estimate import INDUCTOR
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.ranks import agree
from lz_compile.runtime.ranks.cards import Difference, listed
from lz_compile.tools import installation

if TYPE_CHECKING:
    from lz_compile.tools.serving import ServedState

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Check(Record):
    """One condition of production; ``text`` says what was found, ``advice`` what to do where that is not enough."""

    name: str
    status: Status
    text: str
    advice: str = ""


def warm_up() -> Iterator[Check]:
    """Whether the shapes of traffic are compiled before it comes."""
    serving = sys.modules.get("lz_compile.tools.serving")  # nobody serves who has not imported it
    states: list[ServedState] = [] if serving is None else [served.state() for served in list(serving.served)]
    advice = "Call served.warmup() before traffic, or give lz.serve(model, calls=...) the shapes that will come."
    waiting, ready = sum(state.waiting for state in states), sum(state.ready for state in states)
    failures = [f"{shape}: {why}" for state in states for shape, why in state.failures.items()]
    if failures:
        text = f"{len(failures)} shapes of served models cannot be compiled: {'; '.join(failures[:3])}"
        yield Check("warm-up", "warn", text, "Mend what the reasons name; these shapes are answered eagerly.")
    if waiting or (states and not ready):
        yield Check("warm-up", "warn", f"{ready} shapes are compiled, {waiting} wait for the compiler", advice)
    elif states:
        yield Check("warm-up", "pass", f"{ready} shapes of {len(states)} served models are compiled")
    else:
        count = len(list(Store("shapes").directory.glob("*.json")))
        if count:
            text = f"the shapes of {count} served models are remembered; served.warmup() compiles them"
            yield Check("warm-up", "pass", text)
        else:
            text = "no shape is remembered: the first call of every shape compiles, for seconds"
            yield Check("warm-up", "warn", text, advice)


def artifacts(path: str | os.PathLike[str] | None) -> Iterator[Check]:
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


def libraries() -> Iterator[Check]:
    """Whether what is installed can be imported, as processes of its own have shown."""
    found = installation.installed_libraries()
    broken = [
        f"{each.package} {each.version} {each.outcome} ({each.text})" for each in found if each.outcome != "imports"
    ]
    text = "; ".join(broken) or ", ".join(dict.fromkeys(f"{each.package} {each.version}" for each in found))
    advice = "Run 'python -m lz_compile doctor --fix' for the commands that mend it." if broken else ""
    yield Check("libraries", "warn" if broken else "pass", text or "no optional library is installed", advice)


def choices(policy: Policy, device: torch.device) -> Iterator[Check]:
    """What the choice of a kernel rests on, for a plain problem of each op."""
    decided = {op: select(Problem(installation.plain_problem(op, device)), policy) for op in ops.names()}
    by_prior = [
        f"{op} by {decision.kernel.kernel_id}"
        for op, decision in decided.items()
        if decision.kernel.kernel_id != INDUCTOR and _origin(decision) == "prior"
    ]
    if by_prior:
        text = f"priors of other machines decide: {', '.join(by_prior)}"
        commands = [f"python -m lz_compile tune {each.partition(' ')[0]}" for each in by_prior]
        advice = f"Measure here: {'; '.join(commands)}."
        yield Check("choices", "warn", text, advice)
    else:
        origins = ", ".join(f"{op} {_origin(decision)}" for op, decision in decided.items())
        yield Check("choices", "pass", origins)


def _origin(decision: Decision) -> str:
    chosen = decision.kernel.kernel_id
    return next(each.estimate.origin for each in decision.candidates if each.kernel.kernel_id == chosen)


def capture(policy: Policy, device: torch.device) -> Iterator[Check]:
    """Whether kernels may be captured into CUDA graphs, and whether models were captured whole."""
    breaks = [miss for graph in reports() for miss in graph.near_misses if miss.reason.code == "GRAPH_BREAK"]
    if breaks:
        text = f"graph breaks tear {len(breaks)} operations apart, the first at {breaks[0].where}"
        yield Check("capture", "warn", text, breaks[0].edit)
    if device.type != "cuda":
        yield Check("capture", "pass", f"there are no CUDA graphs on {device.type}")
        return
    unsafe: Mapping[str, str] = {
        op: chosen.kernel_id
        for op in ops.names()
        if (chosen := select(Problem(installation.plain_problem(op, device)), policy).kernel).kernel_id != INDUCTOR
        and not chosen.is_cuda_graph_safe
    }
    if unsafe:
        text = f"not safe in CUDA graphs: {', '.join(f'{kernel} for {op}' for op, kernel in unsafe.items())}"
        advice = "mode='reduce-overhead' takes other kernels there; run the warm-up before a capture of your own."
        yield Check("capture", "warn", text, advice)
    else:
        yield Check("capture", "pass", "every kernel that is chosen is safe in CUDA graphs")


def ranks(policy: Policy) -> Iterator[Check]:
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
