"""Random jobs of several ranks that agree on kernels: what they took, what was told, and how long they took for it.

A job has two to four ranks, each a process with a database of measurements of its own, that decide random problems in random
order through a store (TCP or a file). Some have faults: a rank that is killed (while it has the turn to measure, while it
proves a kernel, or right after it decided), a store that dies, freezes or holds garbage in the middle, decisions there that
another version wrote, a rank without one kernel, a kernel that fails on one rank alone, another version of the kernel table,
a rank that comes late, that is slow, or that is stopped for longer than a lease, a clock that is days off, a database that is
no database. Claims: no job takes a minute; of every two ranks that run other kernels for the very same problem, one says
why, of that problem; every kernel computes what it should; agreeing takes 5 ms a decision at most (median of a job) on one
host.

    python -m benchmarks.random_jobs [--jobs 100] [--seed 0] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import lz_compile as lz
from benchmarks.publish import Publication, table_of
from lz_compile.compile import measuring
from lz_compile.ground import events, health
from lz_compile.ground.fingerprint import source_hash
from lz_compile.ground.records import Reason
from lz_compile.lowering import ops
from lz_compile.runtime.choose.problem import Decision, Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.timing import Timing
from lz_compile.runtime.policy import policy
from lz_compile.runtime.ranks import agree, cards
from lz_compile.runtime.ranks.problem_key import key_of
from lz_compile.runtime.ranks.store import PREFIX
from lz_compile.tools.installation import plain_problem

#: As torch exports them, without saying so.
_dist: Any = torch.distributed
FAULTS = (
    *("killed", "store", "foreign", "kernel", "proof", "versions", "late"),
    *("slow", "stopped", "clock", "database"),
)
#: Where a rank may be killed.
MOMENTS = ("measuring", "proving", "decided")
#: Seconds that no job may take, the store's limit, and the lease of a turn.
LIMIT_S, TIMEOUT_S, LEASE_S = 60.0, 1.0, 0.4
#: What agreeing may take.
CLAIM_MS = 5.0
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Job:
    """One job, as it is drawn: ``victim`` is the rank that its faults concern, ``kernel`` the one that they are about."""

    number: int
    seed: int
    ranks: int
    store: str
    faults: tuple[str, ...]
    victim: int
    kernel: str
    moment: str = "measuring"

    @classmethod
    def drawn(cls, number: int, seed: int) -> Job:
        """The job of a number."""
        chance = random.Random(f"{seed} {number}")
        ranks = chance.randint(2, 4)
        faults = tuple(fault for fault in FAULTS if chance.random() < 0.15)
        kernel = chance.choice(("lz.tiled", "lz.blocked", "torch.sdpa"))
        store, moment = chance.choice(("tcp", "file")), chance.choice(MOMENTS)
        return cls(number, seed, ranks, store, faults, chance.randrange(ranks), kernel, moment)

    def problems(self, rank: int) -> list[Problem]:
        """The problems as a rank meets them: lengths differ between ranks, as those of data do, but not their bucket."""
        chance, found = random.Random(f"{self.seed} {self.number} problems"), []
        for _ in range(5):
            context = plain_problem("attention", torch.device("cpu"))
            length = chance.choice((256, 512, 1024, 2048)) - rank
            heads = chance.choice((1, 4, 8))
            sizes = {"seq_len_q": length, "seq_len_k": length, "num_heads": heads, "num_kv_heads": heads}
            found.append(Problem(replace(context, dims={**context.dims, **sizes})))
        return [*found, *(Problem(plain_problem(op, torch.device("cpu"))) for op in ("norm", "sampling"))]


@dataclass(frozen=True)
class Taken:
    """What a rank took for a problem, and what its report says of that: who it is apart from, and kernels passed over."""

    kernel: str
    key: str = ""
    is_apart: bool = False
    passed_over: tuple[str, ...] = ()

    def explains(self, other: Taken) -> bool:
        """Whether this rank says why it does not run what another one does."""
        return self.is_apart or other.kernel in self.passed_over


@dataclass
class Outcome:
    """What a job came to: the kernels of each problem by rank, events, and the milliseconds that agreeing took."""

    job: Job
    taken: list[dict[int, Taken]]
    events: dict[int, list[tuple[str, str]]]
    agreeing_ms: list[float]
    wrong: list[str]
    hung: list[int]
    seconds: float
    faults: list[str] = field(default_factory=list)

    def failures(self) -> Iterator[str]:
        """What must not be."""
        yield from (f"rank {rank} did not finish in {LIMIT_S:g} s" for rank in self.hung)
        yield from self.wrong
        yield from self.faults
        for place, taken in enumerate(self.taken):
            for (one, first), (other, second) in itertools.combinations(taken.items(), 2):
                is_told = self._moved(one, first) or self._moved(other, second)
                if first.kernel != second.kernel and not (is_told or first.explains(second) or second.explains(first)):
                    kernels = f"{first.kernel} on rank {one}, {second.kernel} on rank {other}"
                    yield f"problem {place}: {kernels}, and neither says why"

    def _moved(self, rank: int, taken: Taken) -> bool:
        """Whether a rank was told that others moved on from what it took for a problem."""
        moved = [text for code, text in self.events.get(rank, ()) if code == "RANKS_MOVED_ON"]
        return any(taken.key in text and taken.kernel in text for text in moved)

    @property
    def kernels(self) -> list[dict[int, str]]:
        """The kernels of each problem by rank."""
        return [{rank: each.kernel for rank, each in taken.items()} for taken in self.taken]


# ---- one rank --------------------------------------------------------------------------------------------------------


def _rank(job: Job, rank: int, directory: str, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    chance = random.Random(f"{job.seed} {job.number} {rank}")
    is_victim = rank == job.victim
    with events.collect() as happened:
        limits = {"timeout_s": TIMEOUT_S, "lease_s": LEASE_S}
        lz.configure(perfdb={"path": f"{directory}/{rank}.sqlite"}, ranks=limits)
        store = _store(job, directory, port)
        pipe.send("connected")
        problems = job.problems(rank)
        _measure_at_random(problems, chance)
        if is_victim:
            _suffer(job, store, directory, problems)
        lz.join_ranks(store, rank, job.ranks)
        found: dict[str, Any] = {"taken": {}, "agreeing_ms": [], "wrong": []}
        order = list(range(len(problems)))
        chance.shuffle(order)
        for turn, place in enumerate(order):
            time.sleep(chance.random() * 0.05)
            killed = job.moment if is_victim and "killed" in job.faults and turn == 2 else ""
            _decide(job, problems[place], place, killed=killed, is_victim=is_victim, found=found)
        pipe.send("done")
        pipe.recv()
        lz.ranks()
    found["events"] = [(event.code, event.message) for event in happened]
    pipe.send(found)


def _suffer(job: Job, store: Any, directory: str, problems: Sequence[Problem]) -> None:
    """What is wrong with the victim before it joins."""
    if "kernel" in job.faults:
        health.retire(job.kernel, "not installed on this rank")
    if "versions" in job.faults:
        vars(cards)["__version__"] = "0.0.9"
    if "clock" in job.faults:
        wrong = random.Random(job.number).choice((-3e5, 3e5))
        right = time.time
        time.time = lambda: right() + wrong
    if "database" in job.faults:
        for path in Path(directory).glob(f"{job.victim}.sqlite*"):
            path.write_bytes(os.urandom(4096))
    if "foreign" in job.faults:
        own = _dist.PrefixStore(PREFIX, store)
        own.set(f"decision/{key_of(problems[0], policy.current()).key}", '{"format": 2, "choice": ["x"]}')
    if "late" in job.faults:
        time.sleep(1.5 * TIMEOUT_S)


def _decide(job: Job, problem: Problem, place: int, *, killed: str, is_victim: bool, found: dict[str, Any]) -> None:
    present = policy.current()

    def why_not(kernel: KernelSpec) -> Reason | None:
        if killed == "proving":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_victim and "slow" in job.faults:
            time.sleep(0.3)
        is_wrong = is_victim and "proof" in job.faults and kernel.kernel_id == job.kernel
        return Reason("VALIDATION_FAILED", f"{job.kernel} is wrong on this rank") if is_wrong else None

    is_decided = bool(killed or place % 2)
    if is_decided:
        with agree.turn(problem, present, 2.0) as whose:
            if whose == "mine" and killed == "measuring":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
            agree.decide(problem, present, why_not=why_not)
    if killed == "decided":
        os.kill(os.getpid(), signal.SIGKILL)
    select(problem, present)  # reads the database
    start = time.perf_counter()
    select(problem, present)
    alone = time.perf_counter()
    decision = agree.decide(problem, present, why_not=why_not)
    if not is_decided and not (is_victim and "slow" in job.faults):
        found["agreeing_ms"].append(1e3 * (time.perf_counter() - alone - (alone - start)))
    failed: list[Reason] = []
    for kernel, following in agree.in_turn(decision, lambda: failed[-1], problem, present, why_not=why_not):
        why = why_not(kernel)
        if why is not None:
            failed.append(why)
            continue
        found["taken"][place] = _taken(kernel, following, key_of(problem, present).key)
        found["wrong"] += _wrong(kernel, problem.context.op)
        break


def _taken(kernel: KernelSpec, decision: Decision, key: str) -> Taken:
    """What a rank took, and what its report says of it."""
    agreement = decision.agreement
    is_apart = "this rank alone" in decision.why or "and this one runs" in decision.why
    return Taken(kernel.kernel_id, key, is_apart, () if agreement is None else tuple(agreement.passed_over))


def _wrong(kernel: KernelSpec, op: str) -> list[str]:
    """Whether a kernel computes something else than the op, in a problem of the job that is small enough to run."""
    if kernel.call is None:
        return []
    sizes: Mapping[str, Mapping[str, int]] = {
        "attention": dict.fromkeys(("batch_size", "num_heads", "num_kv_heads"), 1)
        | {"seq_len_q": 16, "seq_len_k": 16, "head_dim": 16, "value_dim": 16},
        "norm": {"num_rows": 3, "hidden_size": 32},
        "sampling": {"num_rows": 3, "vocab_size": 64},
    }
    torch.manual_seed(0)
    sample = ops.module(op).sample(sizes[op], torch.float32, torch.device("cpu"))
    found, expected = (sample.with_kernel(call)(*sample.inputs) for call in (kernel.call, ops.module(op).reference))
    return [] if torch.allclose(found, expected, atol=1e-4) else [f"{kernel.kernel_id} is wrong"]


def _measure_at_random(problems: Sequence[Problem], chance: random.Random) -> None:
    """Fill the database of a rank with latencies that nobody measured."""
    for problem in problems:
        if chance.random() < 0.7:
            specs = [
                spec
                for spec in measuring.runnable(problem.context)
                if spec.call is not None or spec.kernel_id == "inductor"
            ]
            timings = {spec.kernel_id: Timing((chance.uniform(50.0, 500.0),) * 5) for spec in specs}
            measuring.keep(problem.context, specs, timings, problem.context.hints())


def _store(job: Job, directory: str, port: int) -> Any:
    if job.store == "file":
        return _dist.FileStore(f"{directory}/store", job.ranks)
    return _dist.TCPStore("127.0.0.1", port, job.ranks, is_master=False, wait_for_workers=False)


# ---- a job -----------------------------------------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    store = _dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@contextmanager
def _server(job: Job) -> Iterator[tuple[int, Any]]:
    """The port of the store's server, and its process; none of a store in a file."""
    if job.store == "file":
        yield 0, None
        return
    here, there = _fork.Pipe()
    process = _fork.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv(), process
    finally:
        process.kill()
        process.join()


def run(job: Job) -> Outcome:
    """Run a job to its end, or kill what has not ended in time."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, _server(job) as (port, server):
        pipes, processes = [], []
        for rank in range(job.ranks):
            here, there = _fork.Pipe()
            process = _fork.Process(target=_rank, args=(job, rank, directory, port, there), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:  # nobody is there before
            pipe.recv()
        _disturb(job, directory, server, processes[job.victim])
        found, hung, faults = _results(job, pipes, start)
        for process in processes:
            process.kill()
            process.join()
    taken = [
        {rank: each["taken"][place] for rank, each in found.items() if place in each["taken"]}
        for place in range(len(job.problems(0)))
    ]
    spent = [ms for each in found.values() for ms in each["agreeing_ms"]]
    wrong = [text for each in found.values() for text in each["wrong"]]
    told = {rank: each["events"] for rank, each in found.items()}
    return Outcome(job, taken, told, spent, wrong, hung, time.perf_counter() - start, faults)


def _disturb(job: Job, directory: str, server: Any, victim: Any) -> None:
    """What happens to a store and a rank while ranks decide."""
    chance = random.Random(f"{job.seed} {job.number} store")
    if "store" in job.faults:
        time.sleep(chance.random() * 0.3)
        path, how = Path(directory, "store"), chance.random() < 0.5
        if server is not None:
            os.kill(server.pid, signal.SIGSTOP if how else signal.SIGKILL)
        elif how:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(os.urandom(2048))
    if "stopped" in job.faults:
        time.sleep(chance.random() * 0.3)
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(3 * LEASE_S)
        os.kill(victim.pid, signal.SIGCONT)


def _results(job: Job, pipes: Sequence[Connection], start: float) -> tuple[dict[int, Any], list[int], list[str]]:
    """What each rank found; who hung; who ended too early. News are read when all have decided."""
    found: dict[int, Any] = {}
    hung: list[int] = []
    faults: list[str] = []
    alive = dict(enumerate(pipes))
    for step in ("done", "told"):
        for rank, pipe in list(alive.items()):
            try:
                if not pipe.poll(max(LIMIT_S - (time.perf_counter() - start), 0.0)):
                    hung.append(rank)
                    del alive[rank]
                    continue
                found[rank] = pipe.recv()
            except (EOFError, OSError):
                del alive[rank]
                if not (rank == job.victim and "killed" in job.faults):
                    faults.append(f"rank {rank} ended before it was done ({step})")
        if step == "done":
            for pipe in alive.values():
                pipe.send("go on")
    return {rank: found[rank] for rank in alive}, hung, faults


def warm() -> None:
    """Load and measure before processes are forked what each would otherwise do again."""
    torch.set_num_threads(1)
    for problem in Job(0, 0, 2, "tcp", (), 0, "").problems(0):
        select(problem, policy.current())
        for spec in kernels(problem.context.op).values():
            spec.load()
    cards.own_table()
    source_hash()


def main() -> None:
    """Run the jobs, and say which came out wrong."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, help="100 by default")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--quick", action="store_true", help="ten jobs; no published result")
    settings = options.parse_args()
    count = settings.jobs or (10 if settings.quick else 100)
    publication = Publication(
        "random_jobs", torch.device("cpu"), is_quick=settings.quick, jobs=count, seed=settings.seed
    )
    warm()
    outcomes = []
    for number in range(count):
        outcome = run(Job.drawn(number, settings.seed))
        outcomes.append(outcome)
        publication.add(row_of(outcome))
    bad = [(each.job, failure) for each in outcomes for failure in each.failures()]
    table = table_of("Jobs", ("faults", "jobs", "differed, told", "failures", "ms a decision", "seconds"), ("faults",))
    for fault in ("none", *FAULTS):
        some = [each for each in outcomes if (fault in each.job.faults if fault != "none" else not each.job.faults)]
        if some:
            spent = statistics.median(ms for each in some for ms in each.agreeing_ms or [0.0])
            apart = sum(any(len(set(taken.values())) > 1 for taken in each.kernels) for each in some)
            failed = sum(bool([*each.failures()]) for each in some)
            slowest = max(each.seconds for each in some)
            table.add_row(fault, str(len(some)), str(apart), str(failed), f"{spent:.2f}", f"{slowest:.1f}")
    publication.show(table)
    for job, failure in bad:
        print(f"job {job.number} ({', '.join(job.faults) or 'no faults'}): {failure}")
    raise SystemExit(1 if bad else 0)


def row_of(outcome: Outcome) -> dict[str, Any]:
    """One job as a row of the results."""
    codes = sorted({code for of_rank in outcome.events.values() for code, _ in of_rank})
    return {
        "job": asdict(outcome.job),
        "kernels": outcome.kernels,
        "events": codes,
        "agreeing_ms": round(statistics.median(outcome.agreeing_ms or [0.0]), 3),
        "seconds": round(outcome.seconds, 2),
        "failures": [*outcome.failures()],
    }


if __name__ == "__main__":
    main()
