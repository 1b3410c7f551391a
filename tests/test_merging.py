"""What several machines measured or decided, in one file that holds on each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from backends import USUAL_MACHINE, known_instruction_sets

import lz_compile as lz
from lz_compile.errors import CommandError, DispatchTableError
from lz_compile.runtime.measure.perf_record import PerfRecord, canonical
from lz_compile.runtime.measure.perfdb import PerfDB
from lz_compile.runtime.tables.dispatch_table import read
from lz_compile.tools.command_line import main
from lz_compile.tools.merging import merge_decisions, merge_measurements

ROOT = Path(__file__).parent.parent


def record(environment="a", kernel="torch.sdpa", us=1.0, at="2026-01-01T00:00:00.000000+00:00"):
    workload = canonical({"dims": {"head_dim": 64}})
    return PerfRecord(
        kernel_id=kernel, operation="attention", device_id="cpu", dtype="float32", environment=environment,
        workload=workload, median_us=us, p95_us=us, samples=3, measured_at=at,
    )  # fmt: skip


def database(path: Path, *records: PerfRecord) -> Path:
    with PerfDB(path) as found:
        found.put(records)
    return path


def test_measurements_of_unlike_machines_stand_beside_each_other_and_of_one_the_newer_stays(tmp_path):
    first = database(
        tmp_path / "1.sqlite",
        record(us=1.0),
        record("b"),
        record(kernel="lz.tiled", at="2026-01-03T00:00:00.000000+00:00"),
    )
    second = database(
        tmp_path / "2.sqlite", record(us=2.0, at="2026-01-02T00:00:00.000000+00:00"), record(kernel="lz.tiled", us=9.0)
    )
    before = first.read_bytes()
    found = merge_measurements(tmp_path / "all.sqlite", [first, second])
    assert found.to_dict() == {
        "path": str(tmp_path / "all.sqlite"),
        "read": {str(first): 3, str(second): 2},
        "holds": 3,
    }
    with PerfDB(tmp_path / "all.sqlite") as merged:
        held = {(each.environment, each.kernel_id): each.median_us for each in merged.everything()}
    assert held == {("a", "torch.sdpa"): 2.0, ("b", "torch.sdpa"): 1.0, ("a", "lz.tiled"): 1.0}
    assert first.read_bytes() == before


def test_what_is_no_database_is_refused_and_nothing_is_written(tmp_path):
    text = tmp_path / "text.sqlite"
    text.write_text("not a database, but long enough to be looked at as one" * 100)
    for file in (text, tmp_path / "missing.sqlite"):
        with pytest.raises(CommandError, match="merging measurements: expected a database"):
            merge_measurements(tmp_path / "all.sqlite", [file])
    assert text.exists()
    assert not (tmp_path / "all.sqlite").exists()


def test_the_command_merges(tmp_path, capsys):
    first = database(tmp_path / "1.sqlite", record())
    assert main(["perfdb", "merge", str(tmp_path / "all.sqlite"), str(first)]) == 0
    assert f"all.sqlite holds 1 measurements; read 1 of {first}" in capsys.readouterr().out.replace("\n", "")


# ---- lock files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lock_file(tmp_path):
    """A lock file that says what it does of one problem, as if it were of another kind of device."""

    def save(name, kernel, kind="cpu here", able=("inductor", "lz.tiled", "torch.sdpa"), **changes):
        torch._dynamo.reset()
        lz.clear_reports()
        with lz.lock("attention", kernel):
            given = torch.randn(3, 1, 2, 16, 8).unbind(0)
            attend = torch.nn.functional.scaled_dot_product_attention
            lz.explain(attend, *given, dynamic=False, print_report=False)
        table = lz.save_decisions(tmp_path / name)
        (plan,) = table.plans
        ops = [msgspec.structs.replace(op, hardware=(kind,), able=able, **changes) for op in plan.ops]
        table = msgspec.structs.replace(table, plans=(msgspec.structs.replace(plan, ops=tuple(ops)),))
        table.save(tmp_path / name)
        return tmp_path / name

    return save


def kernels_of(table):
    return [(op.kernel_id, op.hardware) for _, op in table.ops()]


def test_a_lock_file_says_where_it_was_made_and_what_else_could_run(lock_file, tmp_path):
    lock_file("one.json", "lz.tiled")
    lz.save_decisions(tmp_path / "saved.json")
    (op,) = (op for _, op in read(tmp_path / "saved.json").ops())
    assert op.hardware[0].startswith("cpu")
    assert {"inductor", "lz.tiled", "torch.sdpa"} <= {*op.able}


def test_two_machines_take_the_kernel_of_the_first_that_both_can_run(lock_file, tmp_path):
    one, other = lock_file("1.json", "lz.tiled", "cpu a"), lock_file("2.json", "torch.sdpa", "cpu b")
    merged = merge_decisions(tmp_path / "all.json", [one, other])
    assert kernels_of(merged) == [("lz.tiled", ("cpu a", "cpu b"))]
    assert kernels_of(merge_decisions(tmp_path / "all.json", [other, one])) == [("torch.sdpa", ("cpu a", "cpu b"))]
    lz.load_dispatch_table(tmp_path / "all.json")


def test_where_the_first_cannot_be_run_everywhere_the_next_is_taken(lock_file, tmp_path):
    one = lock_file("1.json", "lz.tiled", "cpu a")
    other = lock_file("2.json", "torch.sdpa", "cpu b", able=("inductor", "torch.sdpa"))
    assert kernels_of(merge_decisions(tmp_path / "all.json", [one, other])) == [("torch.sdpa", ("cpu a", "cpu b"))]


def test_where_nothing_runs_on_both_each_keeps_its_own(lock_file, tmp_path):
    one = lock_file("1.json", "lz.tiled", "cpu a", able=("lz.tiled",))
    other = lock_file("2.json", "torch.sdpa", "cpu b", able=("torch.sdpa",))
    merged = merge_decisions(tmp_path / "all.json", [one, other])
    assert sorted(kernels_of(merged)) == [("lz.tiled", ("cpu a",)), ("torch.sdpa", ("cpu b",))]
    assert (
        sorted((tree.hardware, tree.tree["kernel"]) for tree in merged.trees if "kernel" in tree.tree) or merged.trees
    )
    lz.load_dispatch_table(tmp_path / "all.json")  # it speaks of no device that is here
    found = msgspec.structs.replace(merged, trees=())
    found.save(tmp_path / "none.json")
    with pytest.raises(DispatchTableError, match="in the tree of its kind, received no kernel"):
        lz.load_dispatch_table(tmp_path / "none.json")


def test_what_is_no_lock_file_is_not_merged(lock_file, tmp_path):
    path = lock_file("1.json", "lz.tiled")
    record = json.loads(path.read_text())
    del record["plans"][0]["ops"][0]["hardware"]
    (tmp_path / "old.json").write_text(json.dumps(record))
    with pytest.raises(DispatchTableError, match="expected decisions that say on which kind of device they were made"):
        merge_decisions(tmp_path / "all.json", [path, tmp_path / "old.json"])


#: Of each machine: what it decides by itself, and then by what all have decided.
PROGRAM = """
import torch, lz_compile as lz

def decided():
    torch._dynamo.reset(); lz.clear_reports()
    for size in (16, 24):
        attend = torch.nn.functional.scaled_dot_product_attention
        lz.explain(attend, *torch.randn(3, 1, 2, size, 8).unbind(0), dynamic=False, print_report=False)
    return [match.kernel for graph in lz.reports() for match in graph.matches]

def decide(kernel, path):
    with lz.lock("attention", kernel):
        decided()
    lz.save_decisions(path)

def follow(path):
    lz.load_dispatch_table(path)
    return [torch.backends.cpu.get_cpu_capability(), *decided()]
"""
CHILD = f"""{USUAL_MACHINE}{PROGRAM}
import sys, time
from pathlib import Path
own, merged = sys.argv[1:]
decide("lz.tiled", own + ".part")
Path(own + ".part").rename(own)
while not Path(merged).exists():
    time.sleep(0.05)
print(*follow(merged))
"""


@pytest.mark.usefixtures("no_preference")
def test_a_merged_lock_file_decides_the_same_with_two_instruction_sets(tmp_path):
    own, theirs, merged = (tmp_path / f"{name}.json" for name in ("own", "theirs", "merged"))
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(theirs), str(merged)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        env={**os.environ, **known_instruction_sets(), "PYTHONPATH": str(ROOT), "ATEN_CPU_CAPABILITY": "default"},
    )  # fmt: skip
    try:
        here = {}
        exec(PROGRAM, here)
        here["decide"]("torch.sdpa", own)
        for _ in range(1100):
            if theirs.exists() or process.poll() is not None:
                break
            time.sleep(0.05)
        merge_decisions(tmp_path / "merged.part", [theirs, own])
        (tmp_path / "merged.part").rename(merged)
        told = [process.communicate(timeout=60)[0].split(), here["follow"](merged)]
    finally:
        process.kill()
        lz.unload_dispatch_table()
    assert told[0][1:] == told[1][1:] == ["lz.tiled", "lz.tiled"]
    assert told[0][0] != told[1][0]
