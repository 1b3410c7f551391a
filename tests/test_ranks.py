"""Ranks of one job decide alike, whatever each has measured, lacks or loses, and nobody waits for longer than it says."""

from __future__ import annotations

import contextvars
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lz_compile as lz
from benchmarks import random_jobs
from lz_compile.compile.options import split
from lz_compile.errors import ArgumentError, OptionError, RanksDifferError
from lz_compile.ground import events
from lz_compile.ground.records import Reason
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.policy import policy
from lz_compile.runtime.policy.rules import Lock
from lz_compile.runtime.policy.settings import Layer, RanksSettings
from lz_compile.runtime.problem.context import SymbolicDim
from lz_compile.runtime.ranks import agree, cards, job
from lz_compile.runtime.ranks.job import Job, Question
from lz_compile.runtime.ranks.problem_key import key_of
from lz_compile.runtime.ranks.store import JobStore, Lease, StoreGoneError
from lz_compile.tools.installation import plain_problem

ROOT = Path(__file__).parent.parent
TILED, BLOCKED, SDPA, INDUCTOR = "lz.tiled", "lz.blocked", "torch.sdpa", "inductor"
QUICK = RanksSettings(timeout_s=0.3, lease_s=0.3)


def problem(**dims) -> Problem:
    context = plain_problem("attention", torch.device("cpu"))
    return Problem(replace(context, dims={**context.dims, **dims}))


@pytest.fixture
def joined(tmp_path, monkeypatch):
    """A rank of a job in a file, which by itself would choose the kernel that is named."""

    def join(rank, size=2, kernel=INDUCTOR, settings=QUICK):
        found = Job(dist.FileStore(str(tmp_path / "store"), size), rank, size, settings)
        said = Layer(locks=() if kernel is None else (Lock("attention", kernel, "this rank"),))

        def chosen(problem, policy, *args, **named):
            return select(problem, policy if named.get("agreed") else policy.overlaid(said), *args, **named)

        decide = found.decide

        def deciding(*args, **named):
            with monkeypatch.context() as patch:
                patch.setattr(job, "select", chosen)
                return decide(*args, **named)

        found.decide = deciding
        return found

    return join


def decided(rank: Job, subject: Problem | None = None) -> str:
    return rank.decide(Question(subject or problem(), policy.current())).kernel.kernel_id


# ---- the same decision -----------------------------------------------------------------------------------------------


def test_the_first_rank_decides_and_the_others_follow(joined):
    first, second, third = joined(0, 3, TILED), joined(1, 3, BLOCKED), joined(2, 3, SDPA)
    assert [decided(rank) for rank in (second, third, first)] == [BLOCKED] * 3
    decision = first.decide(Question(problem(), policy.current()))
    assert decision.why.endswith("(agreed with 2 ranks, decided by rank 1)")
    assert decision.agreement.to_dict() == {"key": decision.agreement.key, "others": 2, "rank": 1, "passed_over": {}}


def test_ranks_with_uneven_lengths_agree_and_other_problems_are_other_decisions():
    keys = {key_of(problem(seq_len_q=length), policy.current()).key for length in (600, 777, 1024)}
    assert len(keys) == 1
    others = [problem(seq_len_q=1025), problem(head_dim=80), Problem(problem().context, is_eager=True)]
    training = Problem(replace(problem().context, is_training=True))
    assert len({key_of(each, policy.current()).key for each in (*others, training)} | keys) == 5
    with lz.prefer(TILED):
        assert key_of(problem(seq_len_q=600), policy.current()).key not in keys


def test_symbols_count_by_their_place_not_by_their_name():
    def symbolic(name):
        return problem(seq_len_q=SymbolicDim(64, 2, None, name), seq_len_k=SymbolicDim(64, 2, None, f"{name} + 1"))

    one, other = (key_of(symbolic(name), policy.current()) for name in ("s77", "s3"))
    assert one.key == other.key
    assert (one.names, other.names) == ({"s77": "n0"}, {"s3": "n0"})


def test_what_nobody_decided_is_not_decided_by_asking(joined):
    first, second = joined(0, kernel=TILED), joined(1, kernel=BLOCKED)
    assert first.decide(Question(problem(), policy.current()), writes=False).kernel.kernel_id == TILED
    assert decided(second) == BLOCKED
    assert first.decide(Question(problem(), policy.current()), writes=False).kernel.kernel_id == BLOCKED


def test_a_kernel_that_a_rank_lacks_is_chosen_by_none(joined, monkeypatch):
    table = cards.own_table()
    without = {**table, "attention": {name: each for name, each in table["attention"].items() if name != TILED}}
    with monkeypatch.context() as patch:
        patch.setattr(cards, "own_table", lambda: without)
        joined(1)
    first = joined(0, kernel=TILED)
    decision = first.decide(Question(problem(), policy.current()))
    assert decision.kernel.kernel_id != TILED
    against = next(each.against for each in decision.candidates if each.kernel.kernel_id == TILED)
    assert [str(each) for each in against] == ["[NOT_ON_ALL_RANKS] rank 1 does not have lz.tiled, or cannot load it"]


def test_a_rank_that_cannot_follow_moves_the_job_on_and_the_others_hear_of_it(joined):
    first, second, third = joined(0, 3, TILED), joined(1, 3), joined(2, 3)
    decided(first), decided(second)
    moved = second.move_on(
        {TILED: Reason("VALIDATION_FAILED", "it is wrong here")}, Question(problem(), policy.current())
    )
    assert moved.kernel.kernel_id != TILED
    assert "decided by rank 1; rank 1 cannot run lz.tiled (it is wrong here)" in moved.why
    assert decided(third) == moved.kernel.kernel_id
    with events.collect() as happened:
        first.refresh()
    assert [event.code for event in happened] == ["RANKS_MOVED_ON"]
    assert "rank 1 cannot run lz.tiled, which this rank has compiled by now" in happened[0].message
    assert decided(first) == moved.kernel.kernel_id


def test_a_rank_that_decides_a_problem_again_hears_that_the_job_moved_on(joined):
    first, second = joined(0, kernel=TILED), joined(1)
    first.take(first.decide(Question(problem(), policy.current())))
    decided(second)
    moved = second.move_on(
        {TILED: Reason("VALIDATION_FAILED", "it is wrong here")}, Question(problem(), policy.current())
    )
    with events.collect() as happened:
        assert decided(first) == moved.kernel.kernel_id
    assert [event.code for event in happened] == ["RANKS_MOVED_ON"]


def test_what_was_settled_stays_where_the_store_forgets_it_and_an_event_says_so(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    lz.join_ranks(store, 0, 1)
    try:
        before = agree.decide(problem(), policy.current())
        store.delete_key(f"layerzero/1/decision/{before.agreement.key}")
        with events.collect() as happened:
            assert agree.decide(problem(), policy.current()).kernel.kernel_id == before.kernel.kernel_id
        assert [event.code for event in happened] == ["STORE_LOST"]
    finally:
        lz.leave_ranks()


def test_what_proves_wrong_on_the_deciding_rank_is_never_the_jobs(joined):
    first, second = joined(0, kernel=TILED), joined(1, kernel=TILED)
    proven = []

    def why_not(kernel):
        assert second.store.get(f"decision/{key_of(problem(), policy.current()).key}") is None
        proven.append(kernel.kernel_id)
        return Reason("VALIDATION_FAILED", "it is wrong here") if kernel.kernel_id == TILED else None

    decision = first.decide(Question(problem(), policy.current(), why_not=why_not))
    assert proven == [TILED, decision.kernel.kernel_id]
    assert decision.agreement.passed_over == {TILED: "rank 0 cannot run lz.tiled (it is wrong here)"}
    with events.collect() as happened:
        assert decided(second) == decision.kernel.kernel_id
    assert [event.code for event in happened if event.code.startswith("RANKS")] == []


def test_that_a_kernel_is_taken_for_want_of_another_is_told(joined):
    with events.collect() as happened:
        decision = joined(0).decide(
            Question(
                problem(), policy.current(), why_not=lambda kernel: Reason("VALIDATION_FAILED", "it is wrong here")
            )
        )
    (told,) = [event for event in happened if event.code == "RANKS_LAST_RESORT"]
    assert f"{decision.kernel.kernel_id} is the last one that may run, although it is wrong here" in told.message


def test_who_is_done_with_the_proof_first_decides(joined):
    first, second = joined(0, kernel=TILED), joined(1, kernel=BLOCKED)

    def while_it_proves(kernel):
        assert decided(second) == BLOCKED

    assert first.decide(Question(problem(), policy.current(), why_not=while_it_proves)).kernel.kernel_id == BLOCKED


def test_several_ranks_move_on_until_all_can_follow(joined):
    first, second = joined(0, kernel=TILED), joined(1)
    decided(first)
    moved = second.move_on({TILED: Reason("X", "wrong here")}, Question(problem(), policy.current()))
    again = first.move_on({moved.kernel.kernel_id: Reason("X", "wrong there")}, Question(problem(), policy.current()))
    final = second.move_on({TILED: Reason("X", "wrong here")}, Question(problem(), policy.current()))
    assert final.kernel.kernel_id == again.kernel.kernel_id


def test_the_kernels_to_try_are_those_that_the_job_moves_on_to(joined, monkeypatch):
    first, second = joined(0, kernel=TILED), joined(1)
    decided(first)
    monkeypatch.setattr(agree, "_joined", lambda policy: second)
    subject, present = problem(), policy.current()
    tried = []
    for kernel, _ in agree.in_turn(agree.decide(subject, present), lambda: Reason("X", "wrong here"), subject, present):
        tried.append(kernel.kernel_id)
        if kernel.kernel_id == INDUCTOR:
            break
    assert tried[0] == TILED
    assert len(set(tried)) == len(tried)
    assert decided(first) == INDUCTOR


def test_a_lock_that_ranks_share_is_followed_by_all(joined):
    with lz.lock("attention", SDPA):
        assert [decided(rank) for rank in (joined(0, kernel=None), joined(1, kernel=BLOCKED))] == [SDPA, SDPA]


# ---- versions --------------------------------------------------------------------------------------------------------


def older(monkeypatch, joined, rank, settings=QUICK):
    """A rank with another version, in which one kernel is another one."""
    table = cards.own_table()
    other = {**table, "attention": {**table["attention"], TILED: "another"}}
    with monkeypatch.context() as patch:
        patch.setattr(cards, "__version__", "0.0.9")
        patch.setattr(cards, "own_table", lambda: other)
        return joined(rank, settings=settings)


def test_ranks_of_other_versions_are_told_who_differs(joined, monkeypatch):
    older(monkeypatch, joined, 1)
    first = joined(0, kernel=TILED)
    with events.collect() as happened:
        assert decided(first) == TILED
        decided(first, problem(head_dim=32))
    (event,) = [event for event in happened if event.code == "RANKS_DIFFER"]
    assert event.message == f"lz_compile: {lz.__version__} on rank 0, 0.0.9 on rank 1; they agree all the same"


def test_readiness_says_who_differs_and_who_said_nothing(joined, monkeypatch):
    def found():
        (check,) = [check for check in lz.readiness_check().checks if check.name == "ranks"]
        return check.status, check.text, check.advice

    monkeypatch.setattr(agree, "_joined", lambda _: rank)
    rank = joined(0)
    status, text, advice = found()
    assert (status, advice) == ("warn", "Call lz.join_ranks() on all of them.")
    assert "rank 1 said nothing by now" in text
    older(monkeypatch, joined, 1)
    status, text, advice = found()
    assert (status, advice) == ("warn", "Install the same versions and policy on all of them.")
    assert f"lz_compile: {lz.__version__} on rank 0, 0.0.9 on rank 1" in text


def test_with_lowest_kernels_that_differ_are_not_used(joined, monkeypatch):
    lowest = replace(QUICK, versions="lowest")
    older(monkeypatch, joined, 1)
    decision = joined(0, kernel=TILED, settings=lowest).decide(Question(problem(), policy.current()))
    assert decision.kernel.kernel_id != TILED
    against = {each.kernel.kernel_id: each.against for each in decision.candidates}
    assert against[TILED][-1].message == "rank 1 has another lz.tiled than this one"
    assert against[SDPA] == ()


def test_with_refuse_nothing_is_decided(joined, monkeypatch):
    older(monkeypatch, joined, 1)
    first = joined(0, settings=replace(QUICK, versions="refuse"))
    for _ in range(2):
        with pytest.raises(
            RanksDifferError, match=r"expected the same versions on all, received lz_compile: .* 0\.0\.9 on rank 1"
        ):
            decided(first)


# ---- a store that is slow, or gone -----------------------------------------------------------------------------------


class Stuck:
    """A store that answers nobody."""

    def set_timeout(self, timeout):
        time.sleep(30)


def test_a_store_that_hangs_is_waited_for_once():
    store = JobStore(Stuck(), 0.2)
    start = time.monotonic()
    for _ in range(5):
        with pytest.raises(StoreGoneError, match=r"did not answer within 0\.2 s"):
            store.get("key")
    assert time.monotonic() - start < 5


def test_without_the_store_what_needs_no_measurement_decides_and_an_event_says_so(tmp_path):
    path = tmp_path / "store"
    lz.configure(ranks={"timeout_s": 0.3})
    with events.collect() as happened:
        lz.join_ranks(dist.FileStore(str(path), 2), 0, 2)
        assert agree.decide(problem(), policy.current()).agreement is not None
        path.unlink()
        for size in (32, 48):
            decision = agree.decide(problem(head_dim=size), policy.current())
            assert "(this rank alone, without measurements: the job's store is lost: " in decision.why
        assert agree.decide(problem(), policy.current()).agreement is not None  # that is settled
    assert [event.code for event in happened if event.code != "MACHINE_BUSY"] == ["RANKS_NOT_HEARD", "STORE_LOST"]
    assert lz.ranks()["store_lost"] in decision.why


def test_a_server_that_dies_costs_nobody_more_than_the_limit():
    server = subprocess.Popen(
        [sys.executable, "-c", "import torch.distributed as d, time; s = d.TCPStore('127.0.0.1', 0, 1, is_master=True, wait_for_workers=False); print(s.port, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        port = int(server.stdout.readline())
        rank = Job(dist.TCPStore("127.0.0.1", port, 1, False, wait_for_workers=False), 0, 1, QUICK)
        assert rank.decide(Question(problem(), policy.current())).agreement is not None
    finally:
        server.kill()
        server.wait()
    start = time.monotonic()
    with pytest.raises(StoreGoneError):
        rank.decide(Question(problem(head_dim=32), policy.current()))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("becomes", ["missing", "another", "shorter"])
def test_a_file_that_others_no_longer_read_is_a_store_that_is_lost(becomes, tmp_path, joined):
    first, path = joined(0, 1), tmp_path / "store"
    assert first.decide(Question(problem(), policy.current())).agreement is not None
    written = path.read_bytes()
    if becomes == "missing":
        path.unlink()
    elif becomes == "shorter":
        path.write_bytes(written[:100])
    else:
        (tmp_path / "other").write_bytes(written * 2)
        (tmp_path / "other").replace(path)
    with pytest.raises(StoreGoneError, match=r"written anew|did not answer"):
        first.decide(Question(problem(head_dim=32), policy.current()))


def test_ranks_that_say_nothing_are_waited_for_once(joined):
    first = joined(0, 4, TILED)
    with events.collect() as happened:
        start = time.monotonic()
        assert decided(first) == TILED
        waited = time.monotonic() - start
        assert decided(first, problem(head_dim=32)) == TILED
    assert waited >= QUICK.timeout_s
    (event,) = [event for event in happened if event.code == "RANKS_NOT_HEARD"]
    assert event.message.startswith("ranks 1, 2, 3 said nothing within 0.3 s")


# ---- turns to measure ------------------------------------------------------------------------------------------------


def test_one_rank_measures_and_the_others_take_what_it_decides(joined):
    first, second = joined(0, kernel=TILED), joined(1, kernel=BLOCKED)
    key = key_of(problem(), policy.current()).key
    seen = []

    def wait():
        with Lease(second.store, key, 1, 5.0).turn(20.0) as whose:
            seen.append((whose, decided(second)))

    with Lease(first.store, key, 0, 5.0).turn(1.0) as whose:
        assert whose == "mine"
        waiting = threading.Thread(target=contextvars.copy_context().run, args=(wait,))  # under the same policy
        waiting.start()
        time.sleep(0.2)
        assert seen == []
        decided(first)
    waiting.join(20)
    assert seen == [("decided", TILED)]


def test_who_waits_for_longer_than_the_budget_takes_the_estimate(joined):
    first, second = joined(0), joined(1)
    with Lease(first.store, "key", 0, 0.3).turn(1.0), Lease(second.store, "key", 1, 0.3).turn(0.8) as whose:
        assert whose == "theirs"  # the first one gives signs of life


def test_a_rank_that_dies_loses_its_turn(joined):
    first, second = joined(0), joined(1)
    assert first.store.exchange("lease/key", b"", b'{"rank": 0, "beat": 1}')
    with events.collect() as happened, Lease(second.store, "key", 1, 0.3).turn(10.0) as whose:
        assert whose == "mine"
    assert [str(event.message) for event in happened] == [
        "rank 0 said nothing for 0.3 s while it measured: rank 1 does"
    ]


def test_a_turn_that_came_to_nothing_is_nobodys(joined):
    first, second = joined(0), joined(1)
    with pytest.raises(ZeroDivisionError), Lease(first.store, "key", 0, 5.0).turn(1.0):
        raise ZeroDivisionError
    with Lease(second.store, "key", 1, 5.0).turn(1.0) as whose:
        assert whose == "theirs"


# ---- where it is asked for -------------------------------------------------------------------------------------------


def test_a_process_alone_asks_no_store(monkeypatch):
    monkeypatch.setattr(agree, "Job", lambda *args: pytest.fail("there is nobody to agree with"))
    assert agree.decide(problem(), policy.current()) == select(problem(), policy.current())
    assert lz.ranks() == {}


def test_alone_is_alone(tmp_path):
    lz.join_ranks(dist.FileStore(str(tmp_path / "store"), 1), 0, 1)
    assert agree.decide(problem(), policy.current()).agreement is not None
    lz.configure(ranks={"selection": "alone"})
    assert agree.decide(problem(), policy.current()).agreement is None
    lz.configure(ranks={"selection": "agree"})
    assert lz.ranks()["heard"] == [0]
    lz.leave_ranks()
    assert agree.decide(problem(), policy.current()).agreement is None


def test_names_of_others_for_it_are_known():
    lz.configure(distributed_selection="independent")
    assert policy.current().settings.ranks.selection == "alone"
    lz.configure(distributed_selection="rank0_broadcast")
    assert policy.current().settings.ranks.selection == "agree"


def test_what_cannot_be_joined_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="expected a store, or an initialized process group to agree through"):
        lz.join_ranks()
    with pytest.raises(ArgumentError, match="received rank 2 of 2"):
        lz.join_ranks(dist.FileStore(str(tmp_path / "store"), 2), 2, 2)
    with pytest.raises(OptionError, match=r"'layerzero\.ranks' cannot be 'together'; valid are agree, alone"):
        split({"layerzero.ranks": "together"})


@pytest.fixture(autouse=True)
def leaving():
    yield
    lz.leave_ranks()


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_random_jobs_agree_or_say_why_not():
    """Of two of two ranks each, five faults and both stores; ``python -m benchmarks.random_jobs`` runs a hundred."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.random_jobs", "--quick", "--jobs", "2", "--seed", "49"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_random_jobs_would_see_ranks_that_differ_without_a_word_of_that_problem():
    def failures(first, second, told=()):
        outcome = random_jobs.Outcome(
            random_jobs.Job.drawn(0, 0), [{0: first, 1: second}], {0: [], 1: [*told]}, [], ["x is wrong"], [1], 1.0
        )
        return [*outcome.failures()]

    silent = ["rank 1 did not finish in 60 s", "x is wrong"]
    apart = [*silent, "problem 0: lz.tiled on rank 0, torch.sdpa on rank 1, and neither says why"]
    tiled, sdpa = random_jobs.Taken(TILED, "key"), random_jobs.Taken(SDPA, "key")
    assert failures(tiled, sdpa) == apart
    assert failures(tiled, sdpa, [("RANKS_MOVED_ON", f"{SDPA}: why (problem other)"), ("STORE_LOST", "")]) == apart
    assert failures(tiled, sdpa, [("RANKS_MOVED_ON", f"{SDPA}: why (problem key)")]) == silent
    assert failures(tiled, replace(sdpa, passed_over=(BLOCKED,))) == apart
    assert failures(tiled, replace(sdpa, passed_over=(TILED,))) == silent
    assert failures(tiled, replace(sdpa, is_apart=True)) == silent


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "names"), [(2, ("pipeline", "ddp", "fsdp", "tensor_parallel")), (4, ("pipeline", "ddp"))], ids=str
)
def test_models_of_several_processes_run_the_same_kernels_and_compute_the_same(size, names, tmp_path):
    variables = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": "INFO",  # of DETAIL, DDP of PyTorch 2.13 over gloo dies by itself
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "tests/rank_models.py", str(tmp_path), *names],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    for name in names:
        taking_part = found[:2] if name == "pipeline" else found
        kernels = {tuple(each[name]["kernels"]) for each in taking_part}
        assert len(kernels) == 1
        assert kernels.pop() != ()
        assert max(each[name]["error"] for each in taking_part) < 1e-5
        others = f"{size - 1} ranks" if size > 2 else "1 rank"
        assert all(
            f"agreed with {others}, decided by rank " in why for each in taking_part for why in each[name]["why"]
        )
    assert all(each["ranks"]["heard"] == list(range(size)) for each in found)
