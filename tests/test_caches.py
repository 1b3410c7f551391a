"""Inductor's caches: a second process hits them, and neither our source nor our decisions can meet a stale result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import USUAL_MACHINE, known_instruction_sets
from torch import fx
from torch._inductor import cpu_vec_isa
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from lz_compile.compile.compiler import _cache_key
from lz_compile.ground import fingerprint
from lz_compile.ground.files import cache_directory
from lz_compile.ground.store import Store
from lz_compile.lowering import configured, cpp_builds
from lz_compile.lowering.inductor import _Fingerprint
from lz_compile.report.report import GraphReport, MatchReport

ROOT = Path(__file__).resolve().parent.parent

CHILD = """
import itertools, json, os, sys, torch, lz_compile
from torch._dynamo.utils import counters
import lz_compile.compile.compiler, lz_compile.ground.store
from lz_compile.ground import fingerprint
from lz_compile.backend import layerzero

def another_source():
    for module in (fingerprint, lz_compile.compile.compiler, lz_compile.ground.store):
        module.source_hash = lambda: "changed"

def attention(query, key, value):
    return (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value

def run(requires_grad, backend, options):
    torch.manual_seed(0)
    args = [torch.randn(2, 3, length, 16, requires_grad=requires_grad) for length in (7, 17, 17)]
    out = torch.compile(attention, backend=backend, options=options)(*args)
    torch.testing.assert_close(out, attention(*args))
    if requires_grad:
        expected = torch.autograd.grad(attention(*args).sum(), args)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), args), expected)

found = {}
for case, (name, requires_grad) in itertools.product(sys.argv[1:], (("inference", False), ("training", True))):
    lock, *changes = case.split(" of ")
    if changes:
        another_source()
    torch._dynamo.reset()
    counters.clear()
    run(requires_grad, layerzero, {"layerzero.lock": {"attention": lock}})
    found.setdefault(case, {})[name] = {
        "fx_hit": counters["inductor"]["fxgraph_cache_hit"],
        "fx_miss": counters["inductor"]["fxgraph_cache_miss"],
        "fx_bypass": counters["inductor"]["fxgraph_cache_bypass"],
        "aot_hit": counters["aot_autograd"]["autograd_cache_hit"],
        "aot_miss": counters["aot_autograd"]["autograd_cache_miss"],
        "aot_bypass": counters["aot_autograd"]["autograd_cache_bypass"],
        "origins": [m.validation and m.validation["origin"] for r in lz_compile.reports() for m in r.matches],
        "kernels": [m.kernel for r in lz_compile.reports() for m in r.matches],
    }
    lz_compile.clear_reports()
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Process:
    """A process with cache directories of its own, which later ones share."""

    directory: Path

    def run(self, *cases: str) -> list[dict[str, dict]]:
        """What is found with one kernel after another, of another source where that is said."""
        given = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor"),
            **known_instruction_sets(),
            "LAYERZERO_CACHE_DIR": str(self.directory / "layerzero"),
        }
        done = subprocess.run(
            [sys.executable, "-c", USUAL_MACHINE + CHILD, *cases],
            env=given,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout.splitlines()[-1]).values())


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What the tests below ask about: two processes, one after the other, which share their caches."""
    process = Process(tmp_path_factory.mktemp("caches"))
    first = process.run("torch.sdpa", "lz.blocked", "inductor", "torch.sdpa of another source")
    second = process.run("torch.sdpa", "torch.sdpa of another source")
    names = "first", "other_lock", "untouched", "other_source", "second", "other_source_again"
    return dict(zip(names, [*first, *second], strict=True))


MODES = ["inference", "training"]


def _was_compiled(found: dict) -> bool:
    return (found["aot_hit"], found["fx_hit"]) == (0, 0) and found["aot_miss"] == 1 and found["fx_miss"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_first_process_compiles_and_proves(processes, mode):
    found = processes["first"][mode]
    assert _was_compiled(found)
    assert (found["origins"], found["kernels"]) == (["run"], ["torch.sdpa"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_second_process_hits_every_cache(processes, mode):
    found = processes["second"][mode]
    assert (found["aot_hit"], found["aot_miss"]) == (1, 0)
    assert found["fx_hit"] == processes["first"][mode]["fx_miss"]
    assert found["fx_miss"] == 0
    assert (found["origins"], found["kernels"]) == (["disk"], ["torch.sdpa"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("process", ["first", "second", "other_lock", "untouched", "other_source"])
def test_no_cache_is_passed_by(processes, process, mode):
    found = processes[process][mode]
    assert (found["aot_bypass"], found["fx_bypass"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("process", ["other_lock", "untouched"])
def test_another_decision_misses(processes, process, mode):
    found = processes[process][mode]
    assert _was_compiled(found)
    assert found["kernels"] == [{"other_lock": "lz.blocked", "untouched": "inductor"}[process]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_change_of_our_source_misses_everywhere(processes, mode):
    found = processes["other_source"][mode]
    assert _was_compiled(found)
    assert found["origins"] == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_changed_source_hits_its_own_entries(processes, mode):
    found = processes["other_source_again"][mode]
    assert (found["aot_hit"], found["aot_miss"], found["fx_miss"]) == (1, 0, 0)
    assert found["origins"] == ["disk"]


# ---- keys ----------------------------------------------------------------------------------------------------------


def _report(**changes: object) -> GraphReport:
    match = MatchReport("attention", "file:1", "", {"scale": 0.25}, kernel="torch.sdpa", rewritten=True)
    for name, value in changes.items():
        setattr(match, name, value)
    return GraphReport(0, [match])


def test_the_key_changes_with_every_decision_and_with_nothing_else(monkeypatch):
    same = [_report(), _report(where="file:2"), _report(validation={"origin": "disk"}), _report(why="locked")]
    assert len({_cache_key(report) for report in same}) == 1
    different = [
        _report(),
        GraphReport(0),
        _report(kernel="lz.blocked"),
        _report(rewritten=False),
        _report(attributes={"scale": 0.5}),
    ]
    assert len({_cache_key(report) for report in different}) == len(different)
    before = _cache_key(_report())
    monkeypatch.setattr("lz_compile.compile.compiler.source_hash", lambda: "changed")
    assert _cache_key(_report()) != before


def test_the_source_hash_covers_every_python_and_json_file(tmp_path, monkeypatch):
    package = tmp_path / "lz_compile"
    for name in ("a.py", "ground/fingerprint.py", "lowering/kernels/k.json", "notes.txt"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("1")
    monkeypatch.setattr(fingerprint, "__file__", str(package / "runtime" / "fingerprint.py"))
    seen = []
    for name in (None, "a.py", "lowering/kernels/k.json", "notes.txt"):
        if name:
            (package / name).write_text("2")
        seen.append(fingerprint.source_hash.__wrapped__())
    (package / "a.py").rename(package / "b.py")
    seen.append(fingerprint.source_hash.__wrapped__())
    assert seen[2] == seen[3]
    assert len(set(seen)) == 4


class _Users(CustomGraphPass):
    def __init__(self, uuid: object) -> None:
        self._uuid = uuid

    def __call__(self, graph: fx.Graph) -> None:
        raise AssertionError("not called here")

    def uuid(self) -> object:
        return self._uuid


def test_a_pass_of_the_user_keeps_its_part_in_the_key():
    assert _Fingerprint("ours", None).uuid() == ("ours",)
    assert _Fingerprint("ours", _Users("theirs")).uuid() == ("ours", "theirs")
    assert _Fingerprint("ours", _Users(None)).uuid() is None
    assert _Fingerprint("ours", lambda graph: None).uuid() is None


# ---- our own store -------------------------------------------------------------------------------------------------


def test_the_store_gives_back_what_it_was_given(tmp_path):
    store = Store("kind", tmp_path)
    assert store.load("key", dict) is None
    store.save("key", {"a": [1, None, "ü"]})
    store.save("key", {"a": 2})
    assert store.load("key", dict) == {"a": 2}
    assert Store("kind", tmp_path).load("key", dict) == {"a": 2}
    assert Store("another_kind", tmp_path).load("key", dict) is None


def test_the_store_is_kept_apart_by_versions_of_torch_and_of_our_source(tmp_path, monkeypatch):
    Store("kind", tmp_path).save("key", {"a": 1})
    monkeypatch.setattr("lz_compile.ground.store.source_hash", lambda: "changed")
    assert Store("kind", tmp_path).load("key", dict) is None
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert Store("kind", tmp_path).load("key", dict) is None


def test_the_directory_comes_from_the_environment_or_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("LAYERZERO_CACHE_DIR")
    assert cache_directory().name == "layerzero"


# ---- instruction sets ----------------------------------------------------------------------------------------------


@pytest.fixture
def tried(monkeypatch, tmp_path) -> Iterator[list[str]]:
    """What PyTorch builds and loads to try an instruction set, for a processor with two; none is really built."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_builds, "x86_isa_checker", lambda: ["avx2", "avx512"])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    found: list[str] = []
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, _: found.append(f"PyTorch: {isa}") or True)
    built = cpp_builds.CppPythonBindingsCodeCache
    monkeypatch.setattr(built, "load_pybinding", lambda *_: found.append(str(cpu_vec_isa.pick_vec_isa())))
    _forget_instructions()
    yield found
    monkeypatch.undo()
    _forget_instructions()


def _forget_instructions() -> None:
    """As another process would."""
    cpp_builds._ask_for_the_widest_instructions.cache_clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for kept in (cpu_vec_isa.VecISA._VecISA__bool__impl, cpu_vec_isa.VecAVX512.__bool__):
        kept.cache_clear()
    for each in cpu_vec_isa.supported_vec_isa_list:
        vars(each).pop("check_build", None)


def test_the_widest_instructions_are_tried_once_for_all_processes(tried):
    cpp_builds._ask_for_the_widest_instructions()
    assert tried == ["avx512"]
    assert list(map(str, cpu_vec_isa.valid_vec_isa_list())) == ["avx512", "avx2"]
    _forget_instructions()
    cpp_builds._ask_for_the_widest_instructions()
    assert str(cpu_vec_isa.pick_vec_isa()) == "avx512"
    assert bool(cpu_vec_isa.pick_vec_isa())  # as code generation asks
    assert tried == ["avx512"]
    for _ in range(2):
        assert cpu_vec_isa.pick_vec_isa().check_build("another program")
        assert tried == ["avx512", "PyTorch: avx512"]
        _forget_instructions()
        cpp_builds._ask_for_the_widest_instructions()


def test_a_trial_of_instructions_that_fails_is_made_again(tried, monkeypatch):
    cpp_builds._ask_for_the_widest_instructions()
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda *_: tried.append("PyTorch") or False)
    _forget_instructions()
    cpp_builds._ask_for_the_widest_instructions()
    assert [cpu_vec_isa.pick_vec_isa().check_build("another program") for _ in range(2)] == [False, False]
    assert tried == ["avx512", "PyTorch", "PyTorch"]


@pytest.mark.parametrize("error", [CppCompileError(["c++"], "no such instructions"), ImportError("no such symbol")])
def test_where_the_widest_instructions_fail_pytorch_tries_the_others(tried, monkeypatch, error: Exception):
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, _: tried.append(str(isa)) or str(isa) == "avx2")
    monkeypatch.setattr(cpp_builds.CppPythonBindingsCodeCache, "load_pybinding", raising(error))
    for _ in range(2):
        _forget_instructions()
        cpp_builds._ask_for_the_widest_instructions()
        assert list(map(str, cpu_vec_isa.valid_vec_isa_list())) == ["avx2"]
    assert tried == ["avx512", "avx2"] * 2


def raising(error: Exception) -> Callable[..., Any]:
    def fails(*_: object) -> Any:
        raise error

    return fails


def test_the_widest_instructions_are_tried_whatever_the_user_picks(tried, monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    cpp_builds._ask_for_the_widest_instructions()
    assert tried == ["avx512"]
    assert str(cpu_vec_isa.pick_vec_isa()) == "avx2"


def test_what_pytorch_tries_instructions_by_is_really_built_and_loaded(monkeypatch):
    widest = cpu_vec_isa.valid_vec_isa_list()[0]
    assert cpp_builds._loads(widest)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "_avx_code", "#error no such instructions")
    assert not cpp_builds._loads(widest)


def test_what_the_user_says_of_instructions_holds(tried, tmp_path):
    told = {"cpp.vec_isa_ok": False}
    with configured.compiling_with(told):
        cpp_builds._ask_for_the_widest_instructions()
        assert not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
    _forget_instructions()
    with torch._inductor.config.patch(told):
        cpp_builds._ask_for_the_widest_instructions()
        assert cpu_vec_isa.valid_vec_isa_list() == []
    assert tried == []
    assert not list(tmp_path.rglob("*.json")), "what he says is no record of what works"


def test_without_a_compiler_what_needs_none_compiles(tried, monkeypatch):
    failing = raising(InvalidCxxCompiler())
    monkeypatch.setattr(cpp_builds.CppPythonBindingsCodeCache, "load_pybinding", failing)
    cpp_builds._ask_for_the_widest_instructions()
    assert not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize


def test_settings_have_a_hash_whatever_passes_the_user_has():
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, graph: fx.Graph) -> None: ...

    with configured.compiling_with({"post_grad_custom_post_pass": Locked()}):
        one = configured.settings_digest()
    assert one == configured.settings_digest()
    with configured.compiling_with({"pattern_matcher": False}):
        assert configured.settings_digest() != one
