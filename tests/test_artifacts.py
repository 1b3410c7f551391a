"""A warm start in one file: whole or not at all, used where it fits, left out with its reason where it does not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from backends import USUAL_MACHINE, known_instruction_sets
from rich.console import Console

import lz_compile
from lz_compile import ArtifactError
from lz_compile.ground import events, store
from lz_compile.ground.files import cache_directory
from lz_compile.lowering import dynamo
from lz_compile.runtime.measure import perfdb
from lz_compile.runtime.measure.perf_record import PerfRecord
from lz_compile.tools import artifacts
from lz_compile.tools.command_line import main

HERE = Path(__file__).parents[1]
LIBRARY = "ab/cabcdef.main.so"


@pytest.fixture(autouse=True)
def _own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(store, "used", set())


def written(path: Path, members: dict[str, bytes], origin: artifacts.Origin | None = None) -> Path:
    """A file with members of one origin, by default this process."""
    made = origin or artifacts._here()
    artifacts._write(path, {made.name: made}, {f"{made.name}/{name}": data for name, data in members.items()})
    return path


def changed(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A file with other members, and the manifest as it was."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def left_out(path: Path) -> dict[str, int]:
    """Why what is left out of a file is, when it is loaded."""
    with events.collect() as happened:
        found = lz_compile.load_artifacts(path)
    reasons = {reason: count for part in found.parts for reason, count in part.left_out.items()}
    assert len([event for event in happened if event.code == "ARTIFACT_LEFT_OUT"]) == len(reasons)
    assert found.left_out == sum(reasons.values())
    return reasons


def measurement(environment: str, latency: float = 3.0) -> PerfRecord:
    """One of a kernel that there is not."""
    return PerfRecord("k", "norm.rms", "cpu", "float32", environment, '{"rows":1}', latency, latency, 9)


_PROGRAM = """
import sys, torch, lz_compile
from pathlib import Path
from torch import nn
from torch._dynamo.utils import counters
path, how = sys.argv[1:]
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 32))
    def forward(self, x):
        q, k, v = ((w * x).unflatten(-1, (2, 16)).transpose(1, 2) for w in self.w)
        return ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2) + x
torch.manual_seed(0)
model, x = Block(), torch.randn(2, 24, 32)
if how == "load":
    assert not lz_compile.load_artifacts(path).left_out
libraries = set(Path(torch._inductor.runtime.cache_dir_utils.cache_dir()).glob("*/*.so"))
with lz_compile.prefer("lz.tiled", "torch.sdpa"):
    result = torch.compile(model, backend="layerzero", dynamic=False)(x)
    result.sum().backward()
torch.testing.assert_close(result, model(x))
(match,) = [match for graph in lz_compile.reports() for match in graph.matches]
assert match.rewritten, match
built = set(Path(torch._inductor.runtime.cache_dir_utils.cache_dir()).glob("*/*.so")) - libraries
if how == "save":
    print(lz_compile.save_artifacts(path).to_dict())
print(match.kernel, len(built), counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_hit"])
"""


def _run(tmp_path: Path, how: str) -> list[str]:
    caches = {name: str(tmp_path / f"{how}-{name}") for name in ("LAYERZERO_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", USUAL_MACHINE + _PROGRAM, str(tmp_path / "warm.zip"), how],
        env={**os.environ, **caches, **known_instruction_sets()},
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1].rsplit(maxsplit=3)


def test_a_process_with_empty_caches_builds_nothing_that_another_one_has_built(tmp_path: Path):
    told, built, misses, _ = _run(tmp_path, "save")
    assert int(built) > 0
    assert int(misses) > 0
    warm = _run(tmp_path, "load")
    assert warm[1:] == ["0", "0", "1"], "libraries built, graphs compiled, AOTAutograd found"
    assert warm[0].split()[0] == told.split()[0]
    records = [each.name for each in (tmp_path / "load-LAYERZERO_CACHE_DIR").rglob("*.json")]
    assert {each.name for each in (tmp_path / "save-LAYERZERO_CACHE_DIR").rglob("*.json")} <= set(records)


def test_records_libraries_and_measurements_go_where_they_are_looked_for(tmp_path: Path):
    here = next(iter(artifacts._environments()))
    members = {
        "records/edits/abc.json": b"{}",
        f"libraries/{LIBRARY}": b"elf",
        "measurements/all.json": msgspec.json.encode([measurement(here)]),
    }
    assert left_out(written(tmp_path / "a.zip", members)) == {}
    assert (cache_directory() / "edits" / store.version() / "abc.json").read_bytes() == b"{}"
    library = dynamo.cache_root() / LIBRARY
    assert library.read_bytes() == b"elf"
    assert os.access(library, os.X_OK)
    assert [each.median_us for each in artifacts._database().of([here])] == [3.0]


def test_what_is_there_already_stays(tmp_path: Path):
    library = dynamo.cache_root() / LIBRARY
    library.parent.mkdir(parents=True)
    library.write_bytes(b"own")
    assert left_out(written(tmp_path / "a.zip", {f"libraries/{LIBRARY}": b"elf"})) == {}
    assert library.read_bytes() == b"own"


@pytest.mark.parametrize(
    ("field", "kinds", "reason"),
    [
        ("torch", {"torch", "libraries", "finished"}, "made with another torch: 1.0, here it is"),
        ("python", {"torch", "libraries", "finished"}, "made with another python: 1.0, here it is"),
        ("machine", {"libraries", "finished"}, "built for another processor or by another compiler"),
        ("records", {"records", "finished"}, "made by another version of lz_compile or torch"),
    ],
)
def test_what_was_made_elsewhere_is_left_out(tmp_path: Path, field: str, kinds: set[str], reason: str):
    origin = replace(artifacts._here(), **{field: "1.0"})
    members = {
        "torch/ab.bin": b"no",
        f"libraries/{LIBRARY}": b"elf",
        "records/edits/abc.json": b"{}",
        f"finished/{'0' * 64}": b"",
    }
    path = written(tmp_path / "a.zip", members, origin)
    found = lz_compile.inspect_artifacts(path)
    assert {part.kind for part in found.parts if part.left_out} == kinds
    assert all(text.startswith(reason) for part in found.parts for text in part.left_out)
    assert not (dynamo.cache_root() / LIBRARY).exists(), "inspecting loads nothing"


def test_measurements_of_other_environments_are_left_out(tmp_path: Path):
    here = next(iter(artifacts._environments()))
    records = [measurement(here), measurement("elsewhere"), measurement("nowhere")]
    path = written(tmp_path / "a.zip", {"measurements/all.json": msgspec.json.encode(records)})
    assert left_out(path) == {"measured in another environment": 2}
    assert len(artifacts._database().of([here, "elsewhere", "nowhere"])) == 1


def test_a_damaged_member_is_left_out_and_the_others_are_not(tmp_path: Path):
    path = written(
        tmp_path / "a.zip", {"records/edits/a.json": b"1", "records/edits/b.json": b"2", "torch/a.bin": b"x"}
    )

    def damage(members: dict[str, bytes]) -> None:
        for name in list(members):
            if name.endswith("a.json"):
                members[name] = b"3"
            if name.endswith(".bin"):
                del members[name]

    reasons = left_out(changed(path, damage))
    assert reasons == {"damaged: another content than was written": 1, "damaged: KeyError": 1}
    assert [each.name for each in cache_directory().rglob("*.json")] == ["b.json"]


@pytest.mark.parametrize("step", [7, 11])
def test_a_flipped_byte_anywhere_is_damage_or_no_file_of_ours(tmp_path: Path, step: int):
    members = {f"records/edits/a{number}.json": bytes(range(256)) * 8 for number in range(3)}
    whole = written(tmp_path / "a.zip", members).read_bytes()
    for place in range(0, len(whole), step):
        path = tmp_path / "b.zip"
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with contextlib.suppress(ArtifactError):
            lz_compile.inspect_artifacts(path)


@pytest.mark.parametrize(
    "name",
    [
        "libraries/../../evil.so",
        "libraries/a/../evil.so",
        "records/../x.json",
        "records/a/b.py",
        "torch/a.pkl",
        "x/y",
        "z",
    ],
)
def test_no_member_leaves_its_place(tmp_path: Path, name: str):
    assert left_out(written(tmp_path / "a.zip", {name: b"0"})) == {"no member that this version writes": 1}
    assert not [each for each in tmp_path.rglob("*") if each.name in ("evil.so", "x.json")]


def test_bytes_that_pytorch_cannot_read_are_left_out(tmp_path: Path):
    assert left_out(written(tmp_path / "a.zip", {"torch/ab.bin": b"no"})) == {"PyTorch cannot read it": 1}


def test_a_file_that_is_none_says_so(tmp_path: Path):
    path = tmp_path / "a.zip"
    with pytest.raises(
        ArtifactError, match=r"reading artifacts of .*a\.zip: expected a file that save_artifacts wrote"
    ):
        lz_compile.load_artifacts(path)
    path.write_bytes(b"no")
    with pytest.raises(ArtifactError, match="not a zip file"):
        lz_compile.load_artifacts(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("manifest.json", "[]")
    with pytest.raises(ArtifactError, match="Expected `object`"):
        lz_compile.inspect_artifacts(path)

    def newer(members: dict[str, bytes]) -> None:
        members["manifest.json"] = members["manifest.json"].replace(b'"format":1', b'"format":2')

    with pytest.raises(ArtifactError, match="expected format 1, as this version reads, received format 2"):
        lz_compile.load_artifacts(changed(written(path, {}), newer))


def test_files_of_two_machines_are_merged(tmp_path: Path):
    here = artifacts._here()
    other = replace(here, machine="another")
    environment = next(iter(artifacts._environments()))
    older, newer = measurement(environment, 3.0), measurement(environment, 4.0)
    one = written(
        tmp_path / "one.zip", {f"libraries/{LIBRARY}": b"one", "measurements/all.json": msgspec.json.encode([older])}
    )
    two = written(tmp_path / "two.zip", {f"libraries/{LIBRARY}": b"two"}, other)
    three = written(tmp_path / "three.zip", {"measurements/all.json": msgspec.json.encode([newer])})
    found = lz_compile.merge_artifacts(tmp_path / "all.zip", [one, two, three])
    assert sorted((part.kind, part.count) for part in found.parts) == [
        ("libraries", 1),
        ("libraries", 1),
        ("measurements", 2),
    ]
    assert left_out(tmp_path / "all.zip") == {"built for another processor or by another compiler": 1}
    assert (dynamo.cache_root() / LIBRARY).read_bytes() == b"one"
    assert [each.median_us for each in artifacts._database().of([environment])] == [4.0]

    with pytest.raises(ArtifactError, match=r"merging .*one\.zip: expected .* whole, received damaged: KeyError"):
        lz_compile.merge_artifacts(
            tmp_path / "x.zip", [changed(one, lambda members: members.pop(next(reversed(members))))]
        )
    assert not (tmp_path / "x.zip").exists()


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path: Path):
    path = written(tmp_path / "a.zip", {"records/edits/a.json": b"1"})
    before = path.read_bytes()
    program = (
        "import os, pathlib, sys, lz_compile\n"
        "pathlib.Path.replace = lambda self, target: os.kill(os.getpid(), 9)\n"
        "lz_compile.save_artifacts(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=HERE, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert lz_compile.inspect_artifacts(path).parts


def test_the_command_line_tells_and_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(tmp_path / "a.zip", {"records/edits/a.json": b"1"})
    assert main(["artifacts", "inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"][0]["kind"] == "records"
    assert main(["artifacts", "merge", str(tmp_path / "b.zip"), str(path)]) == 0
    assert lz_compile.inspect_artifacts(tmp_path / "b.zip").parts[0].count == 1
    assert main(["artifacts", "inspect", str(path), str(path)]) == 2
    assert "expected one FILE" in capsys.readouterr().err
    assert main(["artifacts", "merge", str(path)]) == 2


def test_the_table_says_what_is_left_out(tmp_path: Path):
    console = Console(file=io.StringIO(), width=120)
    console.print(
        lz_compile.inspect_artifacts(written(tmp_path / "a.zip", {"x/y": b"0", "records/edits/a.json": b"1"}))
    )
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1: no member that this version writes" in text
    assert "records" in text


def test_there_is_nothing_to_measure_where_no_database_is(tmp_path: Path):
    assert perfdb.PerfDB(tmp_path / "none.sqlite").of(["x"]) == []
    assert not (tmp_path / "none.sqlite").exists()
