"""The performance database: what was put is found, by every process, whatever happens to the file or to a writer."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lz_compile.errors import MeasurementError
from lz_compile.ground import events, sqlite_file
from lz_compile.runtime.measure import perfdb
from lz_compile.runtime.measure.perfdb import PerfDB, PerfRecord, canonical

ROOT = Path(__file__).resolve().parent.parent
ATTENTION, FLOAT32, HERE = "attention.causal", "float32", "here"


def record(kernel_id: str = "inductor", length: int = 64, **changes: Any) -> PerfRecord:
    workload = canonical({"seq_len": length, "head_dim": 64, "features": ["causal"]})
    made = PerfRecord(kernel_id, ATTENTION, "AMD EPYC", FLOAT32, HERE, workload, 100.0, 120.0, 20, head_dim=64)
    return replace(made, **changes)


def found(database: PerfDB, **given: Any) -> list[tuple[str, int, float]]:
    records = database.lookup(ATTENTION, FLOAT32, HERE, **given)
    return [(r.kernel_id, r.entries()["seq_len"], r.median_us) for r in records]


def codes(log: list[events.Event]) -> list[str]:
    return [event.code for event in log]


def check_integrity(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def corrupt_files(path: Path) -> list[Path]:
    return [p for p in path.parent.glob(f"{path.name}.corrupt-*") if not p.name.endswith(("-wal", "-shm"))]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "perfdb.sqlite"


@pytest.fixture
def database(path):
    with PerfDB(path) as opened:
        yield opened


@pytest.fixture
def closed(path):
    """A closed database that holds one measurement."""
    with PerfDB(path) as opened:
        opened.put([record()])
    return path


# ---- what is put is found ------------------------------------------------------------------------------------------


def test_a_measurement_comes_back_with_every_field(database, path):
    whole = record(
        surroundings="gelu",
        sm_version=90,
        seq_bucket=64,
        batch_bucket=1,
        variance_us=2.5,
        warmup_ms=30.0,
        kernel_version="2.8",
        capabilities_hash="cafe",
        power_state="boost",
        conditions=canonical({"gpu_temperature": "cold"}),
    )
    database.put([whole, record("torch.sdpa")])
    with PerfDB(path) as other:
        assert other.lookup(ATTENTION, FLOAT32, HERE, surroundings="gelu") == [whole]
    assert json.loads(json.dumps(whole.to_dict()))["conditions"] == '{"gpu_temperature":"cold"}'
    assert PerfRecord(**whole.to_dict()) == whole


def test_a_lookup_keeps_operations_dtypes_environments_workloads_and_surroundings_apart(database):
    wanted = record()
    others = [
        replace(wanted, operation="attention.full"),
        replace(wanted, dtype="bfloat16"),
        replace(wanted, environment="there"),
        replace(wanted, workload=record(length=128).workload),
        replace(wanted, surroundings="gelu"),
    ]
    database.put([*others, wanted])
    assert database.lookup(ATTENTION, FLOAT32, HERE, workload=wanted.workload, surroundings="") == [wanted]
    assert database.lookup(ATTENTION, FLOAT32, HERE, workload=wanted.entries(), surroundings="") == [wanted]
    assert len(database.lookup(ATTENTION, FLOAT32, HERE)) == 3


def test_measuring_again_replaces_and_an_older_measurement_does_not(database):
    before, after = "2026-01-01T00:00:00.000000+00:00", "2026-01-02T00:00:00.000000+00:00"
    database.put([record(median_us=1.0, measured_at=before)])
    database.put([record(median_us=2.0, measured_at=after)])
    database.put([record(median_us=3.0, measured_at=before)])
    assert found(database) == [("inductor", 64, 2.0)]
    database.put([record(median_us=4.0, measured_at=after)])
    assert found(database) == [("inductor", 64, 4.0)]


def test_a_measurement_from_the_future_gives_way(database):
    database.put([record(median_us=1.0, measured_at="2999-01-01T00:00:00.000000+00:00")])
    database.put([record(median_us=2.0)])
    assert found(database) == [("inductor", 64, 2.0)]


def test_a_curve_fixes_some_entries_and_leaves_the_others(database):
    database.put([record(length=length) for length in (64, 128, 640)])
    database.put([record(length=64, workload=canonical({"seq_len": 64, "head_dim": 640, "features": ["causal"]}))])
    curve = database.curve(ATTENTION, FLOAT32, HERE, {"head_dim": 64, "features": ["causal"]})
    assert sorted(r.entries()["seq_len"] for r in curve) == [64, 128, 640]
    assert database.curve(ATTENTION, FLOAT32, HERE, {"features": []}) == []
    assert database.curve(ATTENTION, FLOAT32, HERE, {"batch_size": 1}) == []
    assert len(database.curve(ATTENTION, FLOAT32, HERE, {"features": ("causal",)})) == 4


def test_a_curve_meets_nested_entries_one_by_one_and_tells_types_apart(database):
    nested = {"dims": {"seq_len": 1, "head_dim": 64}, "is_causal": True, "scale": 1.0, "note": '"head_dim":64'}
    database.put([record(workload=canonical(nested))])

    def is_met(match: dict[str, Any]) -> bool:
        return database.curve(ATTENTION, FLOAT32, HERE, match) != []

    assert is_met({"dims": {"head_dim": 64}, "is_causal": True})
    assert is_met({"dims": {}})
    assert not is_met({"head_dim": 64})
    assert not is_met({"dims": {"head_dim": 64.0}})
    assert not is_met({"dims": {"seq_len": True}})
    assert not is_met({"is_causal": 1})
    assert not is_met({"scale": 1})
    assert not is_met({"is_causal": {}})


def test_measurements_that_are_marked_as_invalid_are_not_found_until_they_are_measured_again(database, path):
    database.put([record("a"), record("b")])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE perf_records SET valid=0 WHERE kernel_id='b'")
    connection.close()
    assert found(database) == [("a", 64, 100.0)]
    assert [database.statistics()[name] for name in ("rows", "valid_rows")] == [2, 1]
    database.put([record("b", median_us=2.0)])
    assert found(database) == [("a", 64, 100.0), ("b", 64, 2.0)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"median_us": float("nan")}, "expected median_us above 0 and finite, found nan"),
        ({"p95_us": float("inf")}, "expected p95_us above 0 and finite, found inf"),
        ({"median_us": 0.0}, "expected median_us above 0 and finite, found 0.0"),
        ({"workload": '{"b": 1}'}, """expected a workload as canonical() gives it, found {"b": 1}"""),
        ({"workload": '{"b":1,"a":1}'}, "expected a workload as canonical() gives it"),
        ({"workload": "[1]"}, "expected a workload as canonical() gives it"),
        ({"workload": '{"a":NaN}'}, "expected a workload as canonical() gives it"),
        ({"workload": "64"}, "expected a workload as canonical() gives it"),
        ({"measured_at": "2026-01-01"}, "expected measured_at as now() gives it, found 2026-01-01"),
        ({"measured_at": "2026-01-01T00:00:00.000000+01:00"}, "expected measured_at as now() gives it"),
    ],
)
def test_what_could_not_be_compared_is_refused_and_nothing_of_its_batch_is_stored(database, changes, text):
    with pytest.raises(MeasurementError) as refusal:
        database.put([record("good"), record("bad", **changes)])
    assert str(refusal.value).startswith(f"storing a measurement of bad: {text}")
    assert found(database) == []


def test_a_failing_batch_is_undone(database):
    with pytest.raises(sqlite3.IntegrityError):
        database.put([record("good"), record("bad", device_id=None)])
    assert found(database) == []
    database.put([record("good")])
    assert found(database) == [("good", 64, 100.0)]


RECORDS = st.builds(
    lambda kernel_id, length, surroundings, environment, latency, day: record(
        kernel_id,
        length,
        surroundings=surroundings,
        environment=environment,
        median_us=latency,
        measured_at=f"2026-01-0{day}T00:00:00.000000+00:00",
    ),
    st.sampled_from(["a", "b"]),
    st.sampled_from([6, 64, 640]),
    st.sampled_from(["", "gelu"]),
    st.sampled_from([HERE, "there"]),
    st.floats(0.1, 1e6),
    st.integers(1, 3),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(RECORDS, max_size=6)),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=8,
)


def _key(r: PerfRecord) -> tuple[str, ...]:
    return (r.workload, r.surroundings, r.kernel_id, r.environment)


@given(STEPS)
def test_a_lookup_returns_what_a_dictionary_would(steps):
    model: dict[tuple[str, ...], PerfRecord] = {}
    with tempfile.TemporaryDirectory() as directory, PerfDB(Path(directory) / "perfdb.sqlite") as database:
        for step, argument in steps:
            if step == "put":
                database.put(argument)
                for r in argument:
                    if _key(r) not in model or r.measured_at >= model[_key(r)].measured_at:
                        model[_key(r)] = r
            else:
                database.close()
            valid = sorted((r for r in model.values() if r.environment == HERE), key=_key)
            assert database.lookup(ATTENTION, FLOAT32, HERE) == valid
            assert database.lookup(ATTENTION, FLOAT32, HERE, surroundings="gelu") == [
                r for r in valid if r.surroundings == "gelu"
            ]
            assert database.curve(ATTENTION, FLOAT32, HERE, {"seq_len": 64}) == [
                r for r in valid if r.entries()["seq_len"] == 64
            ]


# ---- one process ---------------------------------------------------------------------------------------------------


def test_a_repeated_lookup_asks_the_file_once_until_somebody_writes(database, path, monkeypatch):
    asked = []
    select = perfdb._select
    monkeypatch.setattr(perfdb, "_select", lambda *args: asked.append(args) or select(*args))
    database.put([record()])
    for _ in range(3):
        found(database).clear()
    assert len(asked) == 1
    with PerfDB(path) as other:
        other.put([record("b")])
    assert len(found(database)) == 2
    assert len(asked) == 2


def test_a_caller_may_change_the_list_that_it_was_given(database):
    database.put([record()])
    database.lookup(ATTENTION, FLOAT32, HERE).clear()
    assert len(database.lookup(ATTENTION, FLOAT32, HERE)) == 1


def test_threads_share_one_database(database):
    def work(name: str) -> None:
        for length in range(1, 21):
            database.put([record(f"{name}{k}", length) for k in range(3)])
            if len(found(database, workload=record(length=length).workload)) < 3:
                wrong.append(name)

    wrong: list[str] = []
    threads = [threading.Thread(target=work, args=(name,)) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(found(database)) == 8 * 20 * 3


def test_statistics_describe_the_file(database, path):
    database.put([record("a"), record("b"), record("b", environment="there")])
    statistics = database.statistics()
    assert statistics.pop("bytes") > 0
    assert statistics == {
        "rows": 3,
        "valid_rows": 3,
        "kernels": 2,
        "environments": 2,
        "path": str(path),
        "journal_mode": "wal",
        "schema_version": 1,
    }


def test_a_process_has_one_database_per_path(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    assert perfdb.database() is perfdb.database(tmp_path / "cache" / "perfdb.sqlite")
    assert perfdb.database() is not perfdb.database(tmp_path / "other.sqlite")
    perfdb.database().put([record()])
    assert (tmp_path / "cache" / "perfdb.sqlite").exists()
    assert len(found(PerfDB())) == 1


def test_a_closed_database_opens_again(database):
    database.put([record()])
    database.close()
    database.close()
    assert len(found(database)) == 1


# ---- many processes ------------------------------------------------------------------------------------------------

PRELUDE = """
import os, sys
from pathlib import Path
from lz_compile.ground import events, sqlite_file; from lz_compile.runtime.measure import perfdb
assert "torch" not in sys.modules, "a writer needs no torch"

def record(kernel_id, length=64):
    workload = perfdb.canonical({"seq_len": length, "head_dim": 64, "features": ["causal"]})
    return perfdb.PerfRecord(kernel_id, "attention.causal", "cpu", "float32", "here", workload, 100.0, 120.0, 20)

def say(*words):
    print(*words, flush=True)

path, name = Path(sys.argv[1]), sys.argv[2]
database = perfdb.PerfDB(path)
"""

WRITER = """
for length in range(1, int(sys.argv[3]) + 1):
    database.put([record(f"{name}{k}", length) for k in range(5)])
    say(length)
"""

WRITER_INSIDE = """
database.put([record(f"{name}{k}", 1) for k in range(5)])

def half(connection):
    from lz_compile.runtime.measure.perf_record import checked_values
    for k in range(3):
        connection.execute(perfdb._PUT, (*checked_values(record(f"{name}{k}", 2)), perfdb.now()))
    say("inside")
    sys.stdin.readline()

database._write(half, None)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()


def run(script: str, *arguments: object) -> list[str]:
    return finish(start(script, *arguments))


@pytest.mark.slow
def test_a_writer_killed_among_seven_others_leaves_whole_batches_and_a_sound_file(path):
    survivors = {name: start(WRITER, path, name, 20) for name in "abcdefg"}
    victim = start(WRITER, path, "victim", 1_000_000)
    reported = [int(victim.stdout.readline()) for _ in range(10)]
    victim.kill()
    reported += [int(line) for line in victim.communicate()[0].split("\n") if line.isdigit()]
    for process in survivors.values():
        assert len(finish(process)) == 20
    check_integrity(path)
    with PerfDB(path) as database:
        rows = found(database)
        assert codes_of_use(database) == []
    batches: dict[tuple[str, int], int] = {}
    for kernel_id, length, _ in rows:
        batch = (kernel_id[:-1], length)
        batches[batch] = batches.get(batch, 0) + 1
    assert set(batches.values()) == {5}
    assert {(name, length) for name in survivors for length in range(1, 21)} <= set(batches)
    assert {("victim", length) for length in reported[:-1]} <= set(batches)


def codes_of_use(database: PerfDB) -> list[str]:
    with events.collect() as log:
        database.put([record("after")])
        assert record("after").kernel_id in {r.kernel_id for r in database.lookup(ATTENTION, FLOAT32, HERE)}
    return codes(log)


@pytest.mark.slow
def test_a_writer_killed_inside_a_transaction_leaves_nothing_of_it_and_others_go_on(path):
    victim = start(WRITER_INSIDE, path, "victim")
    assert victim.stdout.readline() == "inside\n"
    survivor = start(WRITER, path, "survivor", 3)
    with PerfDB(path) as reader:
        assert len(found(reader)) == 5  # readers do not wait for writers
    victim.kill()
    victim.communicate()
    assert len(finish(survivor)) == 3
    check_integrity(path)
    with PerfDB(path) as database:
        assert {(k, n) for k, n, _ in found(database)} == {(f"victim{k}", 1) for k in range(5)} | {
            (f"survivor{k}", n) for k in range(5) for n in (1, 2, 3)
        }


@pytest.mark.slow
def test_what_another_process_writes_is_seen_at_once(database, path):
    database.put([record()])
    assert len(found(database)) == 1
    run(WRITER, path, "other", 2)
    assert len(found(database)) == 11


FORK = """
database.put([record("before")])
ready, proceed = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    assert database._opened is None, "the connection of the parent"
    assert len(database.lookup("attention.causal", "float32", "here")) == 1
    os.write(ready[1], b".")
    os.read(proceed[0], 1)
    database.put([record("child")])
    os._exit(0)  # as multiprocessing does: nothing is closed
os.read(ready[0], 1)
database.put([record("parent")])
database.close()
os.write(proceed[1], b".")
assert os.waitpid(child, 0)[1] == 0
say(*[r.kernel_id for r in database.lookup("attention.causal", "float32", "here")])
"""

FORK_BUSY = """
import threading
stop = threading.Event()

def work():
    while not stop.is_set():
        database.put([record("thread")])

thread = threading.Thread(target=work)
thread.start()
for n in range(20):
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(60)
        database.put([record(f"child{n}")])
        perfdb.database(path).close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
thread.join()
say(len(database.lookup("attention.causal", "float32", "here")))
"""

FORK_MEMORY = """
database.put([record("before")])
child = os.fork()
if child == 0:
    assert len(database.lookup("attention.causal", "float32", "here")) == 1
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
say(len(database.lookup("attention.causal", "float32", "here")))
"""


@pytest.mark.slow
def test_a_forked_child_writes_through_its_own_connection_even_after_its_parent_closed(path):
    assert run(FORK, path, "parent") == ["before child parent"]
    check_integrity(path)


@pytest.mark.slow
def test_a_process_forks_while_another_thread_writes(path):
    assert run(FORK_BUSY, path, "parent") == ["21"]
    check_integrity(path)


@pytest.mark.slow
def test_what_is_kept_in_memory_survives_a_fork(tmp_path):
    (tmp_path / "file").touch()
    assert run(FORK_MEMORY, tmp_path / "file" / "perfdb.sqlite", "parent") == ["1"]


# ---- a file that is not as it should be ----------------------------------------------------------------------------


def _garbage(path: Path) -> None:
    path.write_bytes(os.urandom(20_000))


def _text(path: Path) -> None:
    path.write_text("not a database")


def _truncated(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"SQLite format 2\0")


def _page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))


def _table(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE perf_records ADD COLUMN unknown_to_us")
    connection.close()


@pytest.mark.parametrize("damage", [_garbage, _text, _truncated, _header, _page, _table])
def test_a_corrupt_file_is_set_aside_and_a_new_one_begun(closed, damage):
    damage(closed)
    damaged = closed.read_bytes()
    with events.collect() as log, PerfDB(closed) as database:
        assert found(database) == []
        database.put([record("new")])
    assert codes(log) == ["PERFDB_CORRUPT"]
    (aside,) = corrupt_files(closed)
    assert aside.read_bytes() == damaged
    assert aside.name in log[0].message
    with PerfDB(closed) as database:
        assert found(database) == [("new", 64, 100.0)]


def test_an_empty_file_is_a_new_database(path):
    path.touch()
    with events.collect() as log, PerfDB(path) as database:
        database.put([record()])
        assert len(found(database)) == 1
    assert log == []


def test_corruption_found_in_use_is_set_aside_with_its_wal_and_the_write_is_done(closed):
    with PerfDB(closed) as database:
        database.put([record("in_the_wal", length=1)])
        assert closed.with_name("perfdb.sqlite-wal").stat().st_size > 0
        connection = database._opened.connection
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.put([record("in_the_wal", length=2)])
        connection.execute("PRAGMA shrink_memory")
        database.close()
        _page(closed)
        assert database.exists  # opening reads only what is sound
        with events.collect() as log:
            database.put([record("new")])
            assert found(database) == [("new", 64, 100.0)]
    assert codes(log) == ["PERFDB_CORRUPT"]
    (aside,) = corrupt_files(closed)
    check_integrity(closed)
    assert aside.with_name(f"{aside.name}-wal").exists()


CORRUPT = """
sys.stdin.readline()
database.put([record(name)])
assert name in [r.kernel_id for r in database.lookup("attention.causal", "float32", "here")]
say("done")
"""


@pytest.mark.slow
def test_processes_that_find_corruption_at_once_lose_nothing_of_the_new_file(path):
    for turn in range(3):
        _garbage(path)
        processes = [start(CORRUPT, path, f"writer{n}") for n in range(6)]
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            assert finish(process) == ["done"]
        check_integrity(path)
        with PerfDB(path) as database:
            assert [kernel_id for kernel_id, _, _ in found(database)] == [f"writer{n}" for n in range(6)]
        assert len(corrupt_files(path)) == turn + 1


def _replace(path: Path) -> PerfDB:
    sqlite_file.set_aside(path, sqlite_file.identity(path), sqlite3.DatabaseError("malformed"))
    new = PerfDB(path)
    new.put([record("new")])
    return new


def test_who_has_the_old_file_open_moves_to_the_new_one(closed):
    with PerfDB(closed) as holder:
        assert len(found(holder)) == 1
        with _replace(closed):
            assert found(holder) == [("new", 64, 100.0)]
            holder.put([record("holder")])
    check_integrity(closed)
    with PerfDB(closed) as database:
        assert [kernel_id for kernel_id, _, _ in found(database)] == ["holder", "new"]


@pytest.mark.parametrize("ending", ["closed", "collected"])
def test_whoever_lets_go_of_the_old_file_leaves_the_wal_of_the_new_one(closed, ending):
    holder = PerfDB(closed)
    assert len(found(holder)) == 1
    with _replace(closed):
        holder.close() if ending == "closed" else None
        del holder
        gc.collect()
        assert closed.with_name("perfdb.sqlite-wal").exists()  # SQLite would have removed it, by its name
        with sqlite3.connect(closed) as connection:
            assert connection.execute("SELECT kernel_id FROM perf_records").fetchall() == [("new",)]
        connection.close()


def test_nobody_renames_a_file_while_another_opens_it(closed, monkeypatch):
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.05)
    old = sqlite_file.identity(closed)
    with sqlite_file._locked(closed, exclusive=False):
        with PerfDB(closed) as database:
            assert len(found(database)) == 1
        with pytest.raises(BlockingIOError):
            sqlite_file.set_aside(closed, old, sqlite3.DatabaseError("malformed"))
    assert sqlite_file.identity(closed) == old


def test_nobody_opens_a_file_while_another_renames_it(closed, monkeypatch):
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.05)
    with sqlite_file._locked(closed, exclusive=True), events.collect() as log, PerfDB(closed) as database:
        assert database.statistics()["journal_mode"] == "memory"
    assert codes(log) == ["PERFDB_BUSY"]


def test_a_file_that_was_already_set_aside_is_not_renamed_again(closed):
    old = sqlite_file.identity(closed)
    sqlite_file.set_aside(closed, old, sqlite3.DatabaseError("malformed"))
    with PerfDB(closed) as database:
        database.put([record("new")])
        with events.collect() as log:
            sqlite_file.set_aside(closed, old, sqlite3.DatabaseError("malformed"))
        assert log == []
        assert found(database) == [("new", 64, 100.0)]
    assert len(corrupt_files(closed)) == 1


def test_a_removed_directory_is_made_again(tmp_path):
    path = tmp_path / "cache" / "perfdb.sqlite"
    with PerfDB(path) as database:
        database.put([record()])
        shutil.rmtree(path.parent)
        assert found(database) == []
        database.put([record("new")])
        assert path.exists()
    with PerfDB(path) as database:
        assert found(database) == [("new", 64, 100.0)]


# ---- other schemas -------------------------------------------------------------------------------------------------


def _make_newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE perf_records ADD COLUMN energy_joule REAL")
        connection.execute("PRAGMA user_version=7")
    connection.close()


def test_the_file_of_a_newer_version_is_left_to_it_and_one_beside_it_used(closed):
    _make_newer(closed)
    before = closed.read_bytes()
    with events.collect() as log, PerfDB(closed) as database:
        assert found(database) == []
        database.put([record("ours")])
        assert database.statistics()["path"] == str(closed.with_name("perfdb.schema1.sqlite"))
    assert codes(log) == ["PERFDB_NEWER_SCHEMA"]
    assert "schema 7, this version of the package reads 1" in log[0].message
    assert closed.read_bytes() == before
    with PerfDB(closed) as database:
        assert found(database) == [("ours", 64, 100.0)]


def test_a_file_that_a_newer_version_takes_over_is_written_no_more(closed):
    with PerfDB(closed) as database:
        assert len(found(database)) == 1
        _make_newer(closed)
        with events.collect() as log:
            database.put([record("ours")])
        assert found(database) == [("ours", 64, 100.0)]
    assert codes(log) == ["PERFDB_NEWER_SCHEMA"]
    with sqlite3.connect(closed) as connection:
        assert connection.execute("SELECT kernel_id FROM perf_records").fetchall() == [("inductor",)]
    connection.close()


def test_a_newer_version_that_takes_over_just_before_a_transaction_is_noticed_in_it(closed, monkeypatch):
    with PerfDB(closed) as database:
        assert len(found(database)) == 1
        _make_newer(closed)
        monkeypatch.setattr(database, "_notice_changes", lambda connection: None)
        with events.collect() as log:
            database.put([record("ours")])
    assert codes(log) == ["PERFDB_NEWER_SCHEMA"]


def test_a_newer_version_that_creates_the_file_at_the_same_time_is_not_set_back(path, monkeypatch):
    transaction, done = sqlite_file.transaction, []

    def late(connection: sqlite3.Connection) -> Any:
        if not done:
            done.append(connection.execute("PRAGMA user_version=7"))
        return transaction(connection)

    monkeypatch.setattr(sqlite_file, "transaction", late)
    with events.collect() as log, PerfDB(path) as database:
        database.put([record("ours")])
    assert codes(log) == ["PERFDB_NEWER_SCHEMA"]
    with sqlite3.connect(path) as connection:
        assert sqlite_file.user_version(connection) == 7
    connection.close()


def test_another_table_of_that_name_is_set_aside(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE perf_records (kernel_id TEXT, median_us REAL)")
    connection.close()
    with events.collect() as log, PerfDB(path) as database:
        database.put([record()])
        assert len(found(database)) == 1
    assert codes(log) == ["PERFDB_CORRUPT"]


def _with_migration(monkeypatch: pytest.MonkeyPatch, migrate: sqlite_file.Migration) -> None:
    columns = (*perfdb._LAYOUT.columns, "energy_joule")
    layout = sqlite_file.Layout("perf_records", columns, (*perfdb._LAYOUT.migrations, migrate))
    monkeypatch.setattr(perfdb, "_LAYOUT", layout)


def test_an_older_schema_is_migrated_with_its_rows(closed, monkeypatch):
    _with_migration(monkeypatch, lambda c: c.execute("ALTER TABLE perf_records ADD COLUMN energy_joule REAL"))
    with events.collect() as log, PerfDB(closed) as database:
        assert len(found(database)) == 1
        database.put([record("b")])
        assert database.statistics()["schema_version"] == 2
    assert log == []


def test_a_migration_that_fails_leaves_the_file_as_it_was(closed, monkeypatch):
    def migrate(connection: sqlite3.Connection) -> None:
        connection.execute("ALTER TABLE perf_records ADD COLUMN energy_joule REAL")
        raise sqlite3.OperationalError("out of space")

    with monkeypatch.context() as patch:
        _with_migration(patch, migrate)
        with events.collect() as log, pytest.raises(sqlite3.OperationalError, match="out of space"):
            found(PerfDB(closed))  # in memory it fails likewise, and that is our own bug
    assert codes(log) == ["PERFDB_UNWRITABLE", "PERFDB_UNREADABLE"]
    with PerfDB(closed) as database:
        assert len(found(database)) == 1
        assert database.statistics()["schema_version"] == 1


# ---- a file that cannot be written ---------------------------------------------------------------------------------


def test_without_a_directory_measurements_stay_in_memory(tmp_path):
    (tmp_path / "file").touch()
    with events.collect() as log, PerfDB(tmp_path / "file" / "perfdb.sqlite") as database:
        database.put([record()])
        assert len(found(database)) == 1
        assert database.statistics()["journal_mode"] == "memory"
        assert database.statistics()["bytes"] == 0
    assert codes(log) == ["PERFDB_UNWRITABLE"]


READ_ONLY = """
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    (path.parent / "probe").touch()
    say("writable")
except PermissionError:
    with events.collect() as log:
        database.put([record(name)])
        say(*[r.kernel_id for r in database.lookup("attention.causal", "float32", "here")])
    say(*[event.code for event in log])
"""


@pytest.mark.slow
def test_a_directory_that_may_only_be_read_is_read_and_then_kept_in_memory():
    with tempfile.TemporaryDirectory() as directory:  # pytest's own are closed to other users
        path = Path(directory) / "perfdb.sqlite"
        with PerfDB(path) as database:
            database.put([record("shipped")])
        before = path.read_bytes()
        path.chmod(0o444)
        Path(directory).chmod(0o555)
        try:
            assert run(READ_ONLY, path, "ours") == ["ours shipped", "PERFDB_UNWRITABLE"]
        finally:
            Path(directory).chmod(0o755)
        assert path.read_bytes() == before


def test_a_full_disk_moves_the_measurements_into_memory_and_keeps_those_there_are(closed):
    with PerfDB(closed) as database:
        assert len(found(database)) == 1
        database._opened.connection.execute("PRAGMA max_page_count=1")
        with events.collect() as log:
            database.put([record("new", length) for length in range(1, 101)])
        assert len(found(database)) == 101
    assert codes(log) == ["PERFDB_UNWRITABLE"]
    assert "full" in log[0].message
    with PerfDB(closed) as database:
        assert len(found(database)) == 1


def test_a_write_that_waits_too_long_is_given_up_with_an_event(closed, monkeypatch):
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.05)
    with PerfDB(closed) as database:
        assert len(found(database)) == 1
        holder = sqlite3.connect(closed, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with events.collect() as log:
            database.put([record("late")])
            assert len(found(database)) == 1
        holder.execute("ROLLBACK")
        holder.close()
        assert codes(log) == ["PERFDB_BUSY"]
        database.put([record("late")])
        assert len(found(database)) == 2


def test_a_file_system_without_wal_is_used_with_the_mode_that_it_has(path, monkeypatch):
    def refuse(connection: sqlite3.Connection) -> str:
        return str(connection.execute("PRAGMA journal_mode=DELETE").fetchone()[0])

    monkeypatch.setattr(sqlite_file, "_journal_mode", refuse)
    with events.collect() as log, PerfDB(path) as database, PerfDB(path) as other:
        database.put([record("a")])
        other.put([record("b")])
        assert len(found(database)) == len(found(other)) == 2
        assert database.statistics()["journal_mode"] == "delete"
    assert codes(log) == ["PERFDB_NOT_WAL"] * 2


def test_a_file_system_without_locks_is_used_with_an_event(path, monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(sqlite_file.fcntl, "flock", refuse)
    with events.collect() as log:
        with PerfDB(path) as database:
            database.put([record()])
        with PerfDB(path) as database:
            assert len(found(database)) == 1
    assert set(codes(log)) == {"PERFDB_UNLOCKED"}
