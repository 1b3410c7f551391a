"""Random jobs of several ranks that agree on kernels: what they took, what was told, and how long they took for it.

A job has two to four ranks, each a process with a database of measurements of its own, that decide random problems in random
order through a store (TCP or a file). Some have faults: a rank that is killed while it has the turn to measure, a store that
goes away, a rank without one kernel, a kernel that fails on one rank alone, another version of the kernel table, a rank that
comes late. Claims: no job takes a minute; all ranks run the same kernel for the same problem or an event says why not;
every kernel computes what it should; agreeing takes 5 ms a decision at most (median of a job) on one host.

    python -m benchmarks.random_jobs [--jobs 100] [--seed 0] [--quick]
"""

from __future__ import annotations

import argparse
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
from lz_compile.ground.reasons import Reason
from lz_compile.lowering import ops
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.timing import Timing
from lz_compile.runtime.policy import policy
from lz_compile.runtime.ranks import agree, cards
from lz_compile.tools.installation import plain_problem

#: As torch exports them, without saying so.
_dist: Any = torch.distributed
FAULTS = ("killed", "store", "kernel", "proof", "versions", "late")
#: Seconds that no job may take, the store's limit, and the lease of a turn.
LIMIT_S, TIMEOUT_S, LEASE_S = 60.0, 1.0, 0.4
#: What agreeing may take.
CLAIM_MS = 5.0
#: Events that say why ranks differ.
TOLD = {"STORE_LOST", "RANKS_MOVED_ON", "RANKS_APART"}
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

    @classmethod
    def drawn(cls, number: int, seed: int) -> Job:
        """The job of a number."""
        chance = random.Random(f"{seed} {number}")
        ranks = chance.randint(2, 4)
        faults = tuple(fault for fault in FAULTS if chance.random() < 0.25)
        kernel = chance.choice(("lz.tiled", "lz.blocked", "torch.sdpa"))
        return cls(number, seed, ranks, chance.choice(("tcp", "file")), faults, chance.randrange(ranks), kernel)

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


@dataclass
class Outcome:
    """What a job came to: the kernels of each problem by rank, events, and the milliseconds that agreeing took."""

    job: Job
    kernels: list[dict[int, str]]
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
        told = {code for of_rank in self.events.values() for code, _ in of_rank}
        for place, taken in enumerate(self.kernels):
            if len(set(taken.values())) > 1 and not told & TOLD:
                yield f"problem {place}: {taken}, and nothing says why"


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
        if is_victim and "kernel" in job.faults:
            health.retire(job.kernel, "not installed on this rank")
        if is_victim and "versions" in job.faults:
            vars(cards)["__version__"] = "0.0.9"
        if is_victim and "late" in job.faults:
            time.sleep(1.5 * TIMEOUT_S)
        lz.join_ranks(store, rank, job.ranks)
        found: dict[str, Any] = {"kernels": {}, "agreeing_ms": [], "wrong": []}
        order = list(range(len(problems)))
        chance.shuffle(order)
        for turn, place in enumerate(order):
            time.sleep(chance.random() * 0.05)
            is_killed = is_victim and "killed" in job.faults and turn == 2
            _decide(
                job, problems[place], place, is_killed=is_killed, fails=is_victim and "proof" in job.faults, found=found
            )
        pipe.send("done")
        pipe.recv()
        lz.ranks()
    found["events"] = [(event.code, event.message) for event in happened]
    pipe.send(found)


def _decide(job: Job, problem: Problem, place: int, *, is_killed: bool, fails: bool, found: dict[str, Any]) -> None:
    present = policy.current()
    if is_killed or place % 2:
        with agree.turn(problem, present, 2.0) as whose:
            if whose == "mine" and is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
            agree.decide(problem, present)
    is_decided = is_killed or place % 2
    select(problem, present)  # reads the database
    start = time.perf_counter()
    select(problem, present)
    alone = time.perf_counter()
    decision = agree.decide(problem, present)
    if not is_decided:
        found["agreeing_ms"].append(1e3 * (time.perf_counter() - alone - (alone - start)))
    why = Reason("VALIDATION_FAILED", f"{job.kernel} is wrong on this rank")
    for kernel, _ in agree.in_turn(decision, lambda: why, problem, present):
        if fails and kernel.kernel_id == job.kernel:
            continue
        found["kernels"][place] = kernel.kernel_id
        found["wrong"] += _wrong(kernel, problem.context.op)
        break


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
        if "store" in job.faults:
            time.sleep(random.Random(f"{job.seed} {job.number} store").random() * 0.3)
            if server is None:
                Path(directory, "store").unlink(missing_ok=True)
            else:
                server.kill()
        found, hung, faults = _results(job, pipes, start)
        for process in processes:
            process.kill()
            process.join()
    taken = [
        {rank: each["kernels"][place] for rank, each in found.items() if place in each["kernels"]}
        for place in range(len(job.problems(0)))
    ]
    spent = [ms for each in found.values() for ms in each["agreeing_ms"]]
    wrong = [text for each in found.values() for text in each["wrong"]]
    told = {rank: each["events"] for rank, each in found.items()}
    return Outcome(job, taken, told, spent, wrong, hung, time.perf_counter() - start, faults)


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
