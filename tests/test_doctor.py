"""What an installation is found to be, and whether it is ready: every check is made to fail once."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from problems import from_tensors
from rich.console import Console

import lz_compile as lz
from lz_compile.ground import health
from lz_compile.ground.machine import environment
from lz_compile.lowering import ops
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.measure import perf_record
from lz_compile.runtime.measure.estimate import workload
from lz_compile.runtime.measure.perfdb import database
from lz_compile.runtime.policy import policy
from lz_compile.tools import command_operands, diagnosis, installation, readiness, tuning
from lz_compile.tools.diagnosis import DoctorReport, doctor
from lz_compile.tools.readiness import ReadinessReport, readiness_check

pytestmark = pytest.mark.usefixtures("no_preference")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache directory, no accelerator nor a build for one, and Inductor left alone unless a test asks for it."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    for module in (diagnosis, readiness):
        monkeypatch.setattr(module, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(installation, "devices", lambda: [torch.device("cpu")])
    monkeypatch.setattr(installation, "_inductor_error", lambda _device: None)
    return tmp_path / "cache"


def printed(report: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(report)
    return console.file.getvalue()


def measure_something(where: str | None = None) -> None:
    query = torch.randn(1, 2, 16, 8)
    ctx = from_tensors(query, query, query)
    record = perf_record.PerfRecord(
        kernel_id="inductor",
        operation=ctx.operation,
        device_id="test",
        dtype=ctx.dtype_name,
        environment=where or environment("cpu"),
        workload=perf_record.canonical(workload(ctx, None, ctx.hints())),
        median_us=1.0,
        p95_us=1.0,
        samples=3,
    )
    database(None).put([record])


def issues(report: DoctorReport) -> dict[str, str]:
    return {issue.code: f"{issue.message} -> {issue.advice}" for issue in report.issues}


def checks(report: ReadinessReport) -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.text) for check in report.checks}


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_a_healthy_installation_has_no_issues():
    measure_something()
    report = doctor(print_report=False)
    assert issues(report) == {}
    assert report.measurements.here == {"attention.full": 1}
    assert "No issues." in printed(report)


def test_the_report_is_json_and_fits_100_columns():
    report = doctor(print_report=False)
    record = report.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["schema_version"] == "1.0"
    assert record["software"]["torch"] == torch.__version__
    assert max(map(len, printed(report, 100).splitlines())) <= 100


def test_the_doctor_prints_only_where_it_is_asked_to(capsys):
    doctor(print_report=False)
    assert capsys.readouterr().out == ""
    lz.doctor()
    assert "Kernels" in capsys.readouterr().out


def test_every_kernel_runs_somewhere_or_has_a_reason():
    kernels = {kernel.kernel_id: kernel for kernel in doctor(print_report=False).kernels}
    assert set(kernels) == {kernel_id for op in ops.names() for kernel_id in registry.kernels(op)}
    assert kernels["torch.sdpa"].devices == ("cpu",)
    assert all(bool(kernel.devices) != bool(kernel.reasons) for kernel in kernels.values())
    assert "PLATFORM_MISMATCH" in {reason.code for reason in kernels["flash_attn.v2"].reasons}


def test_looking_creates_no_database(own_cache):
    report = doctor(print_report=False)
    readiness_check()
    assert not report.measurements.exists
    assert not own_cache.exists()


def test_an_environment_without_measurements_is_an_issue():
    assert (
        "nothing was measured in this environment -> Run 'python -m lz_compile tune'"
        in issues(doctor(False))["NOT_MEASURED"]
    )
    measure_something(where="of another machine")
    assert "the 1 measurements there are were made on other hardware" in issues(doctor(False))["NOT_MEASURED"]


def test_a_directory_that_cannot_be_written_is_an_issue(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    report = doctor(False)
    assert "NotADirectoryError" in issues(report)["CACHE_UNWRITABLE"]
    assert "set LAYERZERO_CACHE_DIR" in issues(report)["CACHE_UNWRITABLE"]


def test_files_in_the_cache_are_counted(own_cache):
    (own_cache / "validation" / "v").mkdir(parents=True)
    (own_cache / "validation" / "v" / "proof.json").write_text("{}" * 50)
    found = {cache.name: cache for cache in doctor(False).caches}
    assert (found["proofs"].files, found["proofs"].size_bytes) == (1, 100)
    assert found["cache"].files == 1


def test_a_configuration_that_cannot_be_read_is_an_issue_and_no_error(monkeypatch):
    monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION", "flash_atn.v2")
    report = doctor(False)
    assert "did you mean 'flash_attn.v2'?" in issues(report)["CONFIG_INVALID"]
    assert "flash_atn.v2" in printed(report)


def test_a_variable_that_means_nothing_is_an_issue_each_time(monkeypatch):
    monkeypatch.setenv("LAYERZERO_PREFFER", "torch.sdpa")
    for _ in range(2):
        assert "did you mean 'LAYERZERO_PREFER'?" in issues(doctor(False))["VARIABLE_UNKNOWN"]


def test_selection_that_is_switched_off_is_an_issue(monkeypatch):
    monkeypatch.setenv("LAYERZERO_DISABLED", "1")
    assert "switched off by environment LAYERZERO_DISABLED" in issues(doctor(False))["POLICY_DISABLED"]


def test_settings_are_told_with_their_origin():
    policy.configure(deterministic=True)
    report = doctor(False)
    assert report.to_dict()["policy"]["settings"]["deterministic"] == {"value": True, "origin": "lz.configure()"}
    assert "True (lz.configure())" in printed(report)


def test_a_retired_kernel_is_an_issue_with_its_failure():
    health.retire("torch.sdpa", RuntimeError("planted"))
    try:
        report = doctor(False)
        assert "torch.sdpa is retired: RuntimeError: planted" in issues(report)["KERNEL_RETIRED"]
        assert checks(readiness_check())["retired kernels"] == ("fail", "torch.sdpa is retired: RuntimeError: planted")
    finally:
        health.restore("torch.sdpa")


def test_a_broken_descriptor_is_an_issue(tmp_path, monkeypatch):
    for path in registry.descriptors():
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "xformers.json").write_text('{"schema_version": "9"}')
    monkeypatch.setattr(registry, "KERNELS", tmp_path)
    try:
        found = issues(doctor(False))["CAPABILITIES_SCHEMA_MISMATCH"]
        assert "xformers.json" in found
        status, text = checks(readiness_check())["capabilities"]
        assert status == "fail"
        assert "expected schema_version 1.0, received 9" in text
    finally:
        monkeypatch.undo()
        registry.reload()


def test_a_missing_compiler_is_an_issue(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(installation, "_inductor_error", lambda _device: "InvalidCxxCompiler: none")
    found = issues(doctor(False))
    assert "there is no C++ compiler 'no-such-compiler'" in found["COMPILER_MISSING"]
    assert "InvalidCxxCompiler: none" in found["INDUCTOR_FAILED"]


def test_inductor_is_really_asked(monkeypatch):
    monkeypatch.undo()
    assert installation.compilers(torch.device("cpu")).error is None

    def fails(*_args: object) -> object:
        raise RuntimeError("planted\nand more")

    monkeypatch.setattr(installation.inductor, "compile_apart", fails)
    assert installation.compilers(torch.device("cpu")).error == "RuntimeError: planted"


@pytest.mark.parametrize(
    "planted",
    [
        (diagnosis, "default_device"), (installation, "devices"), (installation, "read_again"),
        (installation, "configuration"), (installation, "compilers"), (installation, "caches"),
        (installation, "measurements"), (installation, "plain_problem"), (installation, "reasons_on"),
        (diagnosis, "hardware"), (diagnosis, "kernels"), (diagnosis, "environment"), (diagnosis, "_about_kernels"),
    ],
    ids=lambda planted: planted[1],
)  # fmt: skip
def test_a_check_that_raises_is_an_issue_and_stops_no_other(monkeypatch, planted):
    def fails(*_args: object) -> object:
        raise RuntimeError("planted\nand more")

    monkeypatch.setattr(*planted, fails)
    report = doctor(False)
    found = [issue.message for issue in report.issues if issue.code == "CHECK_FAILED"]
    assert found
    assert all(text.endswith(": RuntimeError: planted") for text in found)
    assert "CHECK_FAILED" in printed(report)
    assert json.loads(json.dumps(report.to_dict()))["schema_version"] == "1.0"
    assert "NOT_MEASURED" in issues(report) or planted[1] == "measurements"


def test_a_build_for_cuda_without_a_driver_runs_on_the_cpu(monkeypatch):
    """`pip install torch` gives such a build on Linux: it names an accelerator that cannot be used."""

    def named(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.undo()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", named)
    assert installation.devices() == [torch.device("cpu")]
    asked: list[torch.device] = []
    monkeypatch.setattr(tuning, "_tune", lambda _grid, where, *_: asked.append(where))
    lz.tune("attention.causal", seq_lens=[16])
    lz.warmup("attention.causal", [(1, 2, 16, 8)])
    assert asked == [torch.device("cpu")]
    assert command_operands.device_of(None) == torch.device("cpu")


# ---- readiness -------------------------------------------------------------------------------------------------------


def test_a_tuned_installation_is_ready():
    measure_something()
    report = readiness_check()
    assert report.ok
    assert {name for name, (status, _) in checks(report).items() if status != "pass"} <= {"warm-up", "choices"}
    assert "Ready." in printed(report)


def test_every_finding_says_what_to_do():
    policy.configure(fallback_enabled=False, rules=[{"match": {"operation": "attention.*"}, "forbid": ["lz", "torch"]}])
    lz.lock("norm", "liger.rms_norm")
    found = [check for check in readiness_check(artifacts="no/such/file").checks if check.status != "pass"]
    assert {"fallback", "kernels for attention", "locks", "artifacts", "measurements", "warm-up"} <= {
        each.name for each in found
    }
    assert all(each.advice for each in found)


def test_artifacts_of_this_machine_are_ready_and_others_are_not(tmp_path):
    measure_something()
    lz.save_artifacts(tmp_path / "here.lz")
    assert checks(readiness_check(artifacts=tmp_path / "here.lz"))["artifacts"][0] == "pass"
    (tmp_path / "other.lz").write_text("something else")
    report = readiness_check(artifacts=tmp_path / "other.lz")
    assert (checks(report)["artifacts"][0], report.ok) == ("fail", False)


def test_shapes_that_wait_for_the_compiler_warn_until_they_are_compiled():
    with lz.serve(torch.nn.Linear(4, 4).eval(), calls=[((torch.randn(2, 4),), {})]) as served:
        assert checks(readiness_check())["warm-up"][0] == "warn"
        served.warmup(progress=False)
        assert checks(readiness_check())["warm-up"] == ("pass", "1 shapes of 1 served models are compiled")
    del served


def test_what_this_process_knows_of_versions_is_there_to_be_compared_between_ranks():
    status, text = checks(readiness_check())["ranks"]
    assert status == "pass"
    assert f"torch {torch.__version__}" in text
    assert re.search(r"kernels [0-9a-f]{12}, policy [0-9a-f]{12}", text)


def test_a_library_that_cannot_be_imported_warns(monkeypatch):
    broken = installation.Library("some-lib", "m", "1.0", "", "2", "3", "hangs", "20 s", 20.0, ("k",))
    monkeypatch.setattr(installation, "installed_libraries", lambda **_: [broken])
    assert checks(readiness_check())["libraries"] == ("warn", "importing m with some-lib 1.0 hangs: 20 s")


def test_readiness_is_json_and_fits_100_columns():
    report = readiness_check()
    record = report.to_dict()
    assert json.loads(json.dumps(record)) == record
    assert (record["schema_version"], record["ok"]) == ("1.0", True)
    assert max(map(len, printed(report, 100).splitlines())) <= 100


def test_missing_measurements_warn_and_do_not_count():
    report = readiness_check()
    assert checks(report)["measurements"][0] == "warn"
    assert report.ok


def test_a_lock_that_is_not_possible_here_fails():
    lz.lock("attention", "flash_attn.v2")
    report = readiness_check()
    status, text = checks(report)["locks"]
    assert (status, report.ok) == ("fail", False)
    assert "attention is locked by lz.lock() to flash_attn.v2: flash_attn.v2 runs on cuda, not cpu" in text
    assert "Not ready." in printed(report)


def test_a_lock_that_is_possible_passes():
    lz.lock("attention.causal", "torch.sdpa")
    assert checks(readiness_check())["locks"] == ("pass", "1 locks, all possible here")


def test_an_op_that_only_inductor_runs_fails():
    policy.configure(rules=[{"match": {"operation": "attention.*"}, "forbid": ["lz", "torch"]}])
    status, text = checks(readiness_check())["kernels for attention"]
    assert status == "fail"
    assert "nothing but Inductor runs attention on cpu" in text


def test_configuration_and_directories_that_do_not_work_fail(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("LAYERZERO_CONFIG", str(tmp_path / "nowhere.yaml"))
    found = checks(readiness_check())
    assert found["policy"][0] == "fail"
    assert "nowhere.yaml" in found["policy"][1]
    assert found["cache: cache"][0] == "fail"


def test_a_database_that_is_corrupt_fails(own_cache):
    own_cache.mkdir()
    (own_cache / "perfdb.sqlite").write_bytes(b"no database at all" * 1000)
    status, text = checks(readiness_check())["measurements"]
    assert status == "fail"
    assert "perfdb.sqlite" in text


def test_fallback_that_is_switched_off_warns():
    policy.configure(fallback_enabled=False)
    report = readiness_check()
    assert checks(report)["fallback"][0] == "warn"
    assert report.ok


def test_a_dispatch_table_that_cannot_be_followed_fails(tmp_path):
    (tmp_path / "table.json").write_text('{"schema_version": "0.1"}')
    status, text = checks(readiness_check(tmp_path / "table.json"))["dispatch table"]
    assert status == "fail"
    assert "expected schema_version '1.0', received '0.1'" in text
    assert checks(readiness_check())["dispatch table"][0] == "pass"
