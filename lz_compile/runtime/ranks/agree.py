"""Deciding in a job of several ranks: as everywhere, but the same on all of them.

Where a process group of more than one rank exists, decisions are settled through its store; with
``ranks.selection: alone`` every rank decides by itself. Where the store is lost, what is expected without measurements
decides, for that is the same on every rank.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from lz_compile.errors import ArgumentError
from lz_compile.ground import events
from lz_compile.ground.records import Reason
from lz_compile.runtime.choose.problem import Decision, Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.measure import cost
from lz_compile.runtime.policy import policy as policies
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.ranks import cards
from lz_compile.runtime.ranks.job import Job, Question, WhyNot
from lz_compile.runtime.ranks.problem_key import key_of
from lz_compile.runtime.ranks.store import Lease, StoreGoneError, Turn
from lz_compile.runtime.tables.loaded import Loaded


class _State:
    """The job of this process; ``group`` refers to the process group that it was found by, None where it was given."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.job: Job | None = None
        self.group: weakref.ref[Any] | None = None
        self.is_told = False

    def is_of(self, group: Any) -> bool:
        """Whether the job is that of a process group."""
        return self.job is not None and self.group is not None and self.group() is group


_state = _State()


def join_ranks(store: Any = None, rank: int | None = None, world_size: int | None = None) -> None:
    """Say what this rank has to the others of its job, now rather than at the first compile.

    That is worth a line where ranks wait for each other before all have compiled, as in a pipeline. Without arguments it is
    the job of the default process group.

    Args:
        store: a ``torch.distributed`` store that all ranks have.
        rank: this one, from 0 on.
        world_size: how many there are.

    Raises:
        ArgumentError: a store without rank and size, or neither a store nor a process group.
    """
    settings, wishes = policies.current().settings.ranks, policies.current().wishes
    if store is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError("join_ranks", "a store, or an initialized process group", "to agree through", "neither")
        _joined(policies.current())
        return
    if rank is None or world_size is None or not 0 <= rank < world_size:
        received = f"rank {rank} of {world_size}"
        raise ArgumentError("join_ranks", "rank and world_size", "with a store, of which 0 <= rank", received)
    job = Job(store, rank, world_size, settings, wishes)
    with _state.lock:
        _state.job, _state.group, _state.is_told = job, None, False


def leave_ranks() -> None:
    """Decide alone from now on, until a job is joined again; that of a process group is joined at the next compile."""
    with _state.lock:
        _state.job = _state.group = None


def is_joined() -> bool:
    """Whether a job was joined by hand, or found by a compile before."""
    return _state.job is not None


def ranks() -> dict[str, Any]:
    """What this rank knows of its job, as stable JSON: who was heard, who differs, and what they agreed on.

    ``store_lost`` says why the store cannot be asked any more (None: it can). What other ranks have said since is read, so
    that kernels that they had to move on from are events. Empty without a job.
    """
    return known(policies.current())


def known(policy: Policy) -> dict[str, Any]:
    """The same, under a policy."""
    job = _joined(policy)
    if job is None:
        return {}
    try:
        job.refresh()
    except StoreGoneError as error:
        _lost(error)
    return {
        "rank": job.rank,
        "world_size": job.size,
        "heard": sorted(job.heard),
        "differences": [row.to_dict() for row in cards.differences(job.heard.values())],
        "agreed": {key: {"kernel": each.kernel, "rank": each.rank} for key, each in job.settled.items()},
        "store_lost": job.store.gone or None,
    }


def decide(
    problem: Problem,
    policy: Policy,
    tables: Sequence[Loaded] | None = None,
    *,
    writes: bool = True,
    why_not: WhyNot | None = None,
) -> Decision:
    """The kernel for a problem: as :func:`select` has it, in a job of several ranks the one that they agreed on.

    Args:
        tables: dispatch tables (None: those that this process loaded).
        writes: whether what is chosen here may become the job's decision; not where somebody only asks.
        why_not: proves a kernel on this rank before it becomes the job's decision. Without a job nobody is to be told
            anything, and whoever asked proves what is chosen.

    Raises:
        NoKernelFoundError: nothing can run an eager call.
        RanksDifferError: ranks run different versions and the policy refuses that.
    """
    job = _joined(policy)
    if job is None:
        return select(problem, policy, tables)
    try:
        found = job.decide(Question(problem, policy, tables, why_not), writes=writes)
        if job.store.gone:  # what was settled by then stays
            _lost(StoreGoneError(job.store.gone))
        return found
    except StoreGoneError as error:
        _lost(error)
        return _by_priors(problem, policy, tables, error)


def in_turn(
    decision: Decision,
    why_failed: Callable[[], Reason],
    problem: Problem,
    policy: Policy,
    tables: Sequence[Loaded] | None = None,
    *,
    why_not: WhyNot | None = None,
) -> Iterator[tuple[KernelSpec, Decision]]:
    """The kernel of a decision, and, whenever the next one is asked for because it failed, what to try instead.

    In a job of several ranks that is what all of them move on to; ``why_failed`` says then why the last one failed, and
    ``why_not`` proves what comes next before the others hear of it.
    """
    job = None if decision.agreement is None else _joined(policy)
    if job is None:
        yield from ((kernel, decision) for kernel in decision.ranking)
        return
    failed, asked = dict[str, Reason](), Question(problem, policy, tables, why_not)
    while decision.kernel.kernel_id not in failed:
        try:
            yield decision.kernel, decision
        except GeneratorExit:  # nobody asks for another one
            job.take(decision)
            raise
        failed[decision.kernel.kernel_id] = why_failed()
        try:
            decision = job.move_on(failed, asked)
        except StoreGoneError as error:
            _lost(error)
            yield from ((each, decision) for each in decision.ranking if each.kernel_id not in failed)
            return


@contextmanager
def turn(problem: Problem, policy: Policy, budget_s: float) -> Iterator[Turn]:
    """Whose turn it is to measure a problem, after waiting for ``budget_s`` at most."""
    job = _joined(policy)
    if job is None:
        yield "alone"
        return
    lease = Lease(job.store, key_of(problem, policy).key, job.rank, job.settings.lease_s)
    with ExitStack() as stack:
        try:
            whose = stack.enter_context(lease.turn(budget_s))
        except StoreGoneError as error:
            _lost(error)
            whose = "theirs"  # what is expected without measurements decides
        if whose == "theirs":
            text = "another rank measures it for longer than this one waits, or came to nothing"
            events.record("NOT_MEASURED", f"{problem.context.operation} at {problem.context.hints()}: {text}")
        yield whose


def _by_priors(problem: Problem, policy: Policy, tables: Sequence[Loaded] | None, error: StoreGoneError) -> Decision:
    unmeasured = policy.saying("perfdb.enabled", False, "ranks that lost their store")
    with cost.usual_rates():
        found = select(problem, unmeasured, tables)
    return replace(found, why=f"{found.why} (this rank alone, without measurements: the job's store is lost: {error})")


def _lost(error: StoreGoneError) -> None:
    """Say once that the store is gone."""
    with _state.lock:
        is_told, _state.is_told = _state.is_told, True
    if not is_told:
        text = "ranks cannot agree any more: each decides alone, by what is expected without measurements"
        events.record("STORE_LOST", text, error)


def _joined(policy: Policy) -> Job | None:
    """The job of this process, joined now where there is a process group of several ranks; None: alone."""
    settings = policy.settings.ranks
    if settings.selection == "alone":
        return None
    if _state.job is not None and _state.group is None:
        return _state.job
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: Any = dist.group.WORLD
    if _state.is_of(group):
        return _state.job
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":  # for the second: there are no others
        return None
    with _state.lock:
        if not _state.is_of(group):
            _state.is_told = False
            job = Job(group.get_group_store(), dist.get_rank(), dist.get_world_size(), settings, policy.wishes)
            _state.job, _state.group = job, weakref.ref(group)
        return _state.job
