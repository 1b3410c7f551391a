"""The command line: what it prints, as text and as JSON, its exit codes, and errors in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from lz_compile.runtime.policy import policy
from lz_compile.tools import command_line, tuning
from lz_compile.tools.command_line import main

pytestmark = pytest.mark.usefixtures("no_preference")

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ["--shape", "1,4,64,32", "--device", "cpu"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LAYERZERO_DEBUG", raising=False)


@pytest.fixture
def models(monkeypatch):
    """A module to name on the command line."""

    def attention(query, key, value):
        return (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value

    def fails(_query):
        raise RuntimeError("planted\nsecond line")

    module = types.ModuleType("some_models")
    module.make = lambda: (attention, [torch.randn(1, 2, 32, 16)] * 3)
    module.keywords = lambda: (attention, [torch.randn(1, 2, 32, 16)] * 2, {"value": torch.randn(1, 2, 32, 16)})
    module.fails = lambda: (fails, torch.ones(2))
    module.wrong = lambda: attention
    module.number = 3
    module.listed = lambda: (attention, [], [1])
    module.raises = lambda: 1 // 0
    monkeypatch.setitem(sys.modules, "some_models", module)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse's own errors
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys, *arguments: str) -> dict:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    record = json.loads(out)
    assert record["schema_version"] == "1.0"
    return record


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_which_tells_kernel_and_reason(capsys):
    code, out, err = run(capsys, "which", "attention.causal", *SHAPE)
    assert (code, err) == (0, "")
    record = as_json(capsys, "which", "attention.causal", *SHAPE)
    assert out == f"{record['kernel_id']}: {record['why']}\n"


def test_causal_is_part_of_the_operation_or_a_flag(capsys):
    assert as_json(capsys, "which", "--causal", *SHAPE)["operation"] == "attention.causal"
    assert as_json(capsys, "which", *SHAPE)["operation"] == "attention.full"
    code, _, err = run(capsys, "which", "attention.full", "--causal", *SHAPE)
    assert code == 2
    assert "--causal contradicts attention.full" in err


def test_tensors_are_described_in_full(capsys):
    description = (
        "--shape 2,48,8,32 --kv-shape 2,96,2,32 --layout BSHD --dtype bfloat16 --mask float --training --scale 0.3 "
        "--dropout 0.1 --device cpu"
    )
    found = as_json(capsys, "explain", "attention", *description.split())["context"]
    assert found["dims"] == {
        "batch_size": 2, "head_dim": 32, "num_heads": 8, "num_kv_heads": 2, "seq_len_k": 96, "seq_len_q": 48, "value_dim": 32,
    }  # fmt: skip
    assert found["dtype"] == "bfloat16"
    assert found["layout"] == "BSHD"
    assert {"gqa", "float_mask", "training", "dropout"} <= set(found["features"])
    assert found["has_custom_scale"]


def test_asking_takes_no_memory(capsys):
    assert as_json(capsys, "which", "--shape", "64,128,131072,128", "--mask", "bool", "--device", "cpu")["kernel_id"]


def test_models_are_explained_and_tried_dry(capsys, models):
    for command in ("explain", "dry-run"):
        for name in ("make", "keywords"):
            record = as_json(capsys, command, f"some_models:{name}")
            assert [match["op"] for match in record["graphs"][0]["matches"]] == ["attention"]
    code, out, _ = run(capsys, "dry-run", "some_models:make")
    assert code == 0
    assert "Matches: 1 in 1 graph" in out
    assert "not for cpu" not in out
    assert "not for cpu" in run(capsys, "dry-run", "some_models:make", "--verbose")[1]


def test_kernels_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    record = as_json(capsys, "list-kernels", "attention")
    assert {"inductor", "torch.sdpa", "lz.blocked"} <= {kernel["kernel_id"] for kernel in record["kernels"]}
    assert "flash-attn is not installed" in run(capsys, "list-kernels")[1]


def test_validate_answers_with_its_exit_code(capsys):
    assert run(capsys, "validate", "torch.sdpa", "--causal", "--mask", "bool", *SHAPE) == (0, "torch.sdpa: valid\n", "")
    code, out, _ = run(capsys, "validate", "flash_attn.v2", *SHAPE)
    assert code == 1
    assert "[PLATFORM_MISMATCH] flash_attn.v2 runs on cuda, not cpu" in out
    code, out, _ = run(capsys, "validate", "flash_attn.v2", *SHAPE, "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_doctor_and_readiness_check(capsys, monkeypatch):
    monkeypatch.setattr("lz_compile.tools.installation._inductor_error", lambda _device: None)
    assert as_json(capsys, "doctor")["policy"]["error"] is None
    assert as_json(capsys, "readiness-check")["ok"] is True
    policy.lock("attention", "flash_attn.v2")
    code, out, _ = run(capsys, "readiness-check")
    assert code == 1
    assert "Not ready." in out


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("which", "expected tensors: give --shape"),
        ("which --shape 1,2,x", "expected numbers above 0 with commas between them, received '1,2,x'"),
        ("which --shape 1,2,0,4", "expected numbers above 0 with commas between them"),
        ("which --shape 1,2,3 --device cpu", "expected query [B, Hq, Sq, D]"),
        ("which --shape 1,2,3 --mask bool --device cpu", "expected four dimensions"),
        ("which attention.casual --shape 1,2,64,32 --device cpu", "did you mean 'attention.causal'?"),
        ("which --shape 1,2,64,32 --device nowhere", "--device nowhere"),
        ("which --shape 1,2,64,32 --device cpu --dtype int3", "invalid choice: 'int3'"),
        ("validate torch.spda --shape 1,2,64,32 --device cpu", "did you mean 'torch.sdpa'?"),
        ("dry-run no_such_module:make", "No module named 'no_such_module'"),
        ("dry-run some_models:nothing", "has no attribute 'nothing'"),
        ("dry-run some_models:wrong", "expected it to return (model, inputs)"),
        ("list-kernels atention", "did you mean 'attention'?"),
        ("tune --dtype float31", "no dtype 'float31'"),
        ("tune --seq-lens 0", "expected numbers"),
        ("solve some_models:make --shape-buckets seq_len=1,x", "expected numbers"),
        ("solve some_models:make --shape-buckets seq_len=8 --dims seq_len", "expected a name and a position"),
        ("which norm.rms --shape input=2,4 --shape input=2,8", "expected input once"),
        ("which --shape 2,4 --shape 2,8", "expected one once"),
        ("which norm.rms --shape 2,4 --set eps=1 --set eps=2", "expected eps once"),
        ("tune norm.rms --sizes num_rows=1 --sizes num_rows=2", "expected num_rows once"),
        ("tune norm.rms --chart chart.txt", "ending in"),
        ("solve some_models:make --shape-buckets batch=1 --chart chart.txt", "ending in"),
        ("dry-run :make", "expected module:callable"),
        ("dry-run some_models:number", "expected a function that returns"),
        ("dry-run some_models:listed", "expected keyword inputs by name"),
        ("dry-run some_models:make --since before.json", "expected --html FILE"),
        ("wich", "invalid choice: 'wich'"),
        ("", "required: command"),
    ],
)
def test_a_wrong_command_is_an_error_of_usage(capsys, models, command, expected):
    code, out, err = run(capsys, *command.split())
    assert code == 2
    assert out == ""
    assert expected in err
    assert "Traceback" not in err


def test_a_model_that_fails_is_one_line(capsys, models):
    code, _, err = run(capsys, "explain", "some_models:fails")
    assert code == 1
    assert err == "lz_compile: error: running some_models:fails: RuntimeError: planted second line\n"


def test_a_factory_that_fails_is_one_line(capsys, models):
    code, _, err = run(capsys, "dry-run", "some_models:raises")
    assert code == 1
    assert err.startswith("lz_compile: error: calling some_models:raises: ZeroDivisionError")
    assert err.count("\n") == 1


def test_debugging_keeps_the_traceback(monkeypatch, models):
    monkeypatch.setenv("LAYERZERO_DEBUG", "1")
    with pytest.raises(command_line.ModelError, match="planted"):
        main(["dry-run", "some_models:fails"])


def test_events_are_told_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("LAYERZERO_PREFFER", "x")
    _, _, err = run(capsys, "which", *SHAPE)
    assert err.startswith("lz_compile: warning: [CONFIG_INVALID] no environment variable LAYERZERO_PREFFER")
    assert err.count("\n") == 1


# ---- tune and solve --------------------------------------------------------------------------------------------------


def planted_tune(seen, *, interrupt_at=None, swallow=False):
    def tune(operation, *, on_progress, **arguments):
        seen.append((operation, arguments))
        for index in range(3):
            on_progress(index, 3, f"problem {index}")
            if index == interrupt_at:
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(5)
                except KeyboardInterrupt:
                    if not swallow:
                        raise
        return tuning.TuneReport((), 3, 0, 0.5)

    return tune


def test_tune_hands_on_what_it_is_given(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(tuning, "tune", planted_tune(seen))
    command = "tune attention.causal --dtype float32,bfloat16 --seq-lens 16,32 --batch-sizes 1,2 --budget 9 --no-resume"
    code, out, err = run(capsys, *command.split(), "--device", "cpu")
    assert code == 0
    ((operation, arguments),) = seen
    assert operation == "attention.causal"
    assert arguments["dtype"] == [torch.float32, torch.bfloat16]
    assert (arguments["seq_lens"], arguments["batch_sizes"]) == ((16, 32), (1, 2))
    assert (arguments["budget_s"], arguments["resume"]) == (9.0, False)
    assert "0 measured, 3 known before, 0 remain" in out
    assert "3/3" in err


def test_a_budget_that_is_used_up_at_once_has_done_nothing_of_all(capsys):
    code, out, err = run(capsys, *"tune attention.causal --seq-lens 16 --budget 0 --device cpu".split())
    assert code == 0
    assert "0 measured, 0 known before, 1 remain" in out
    assert "0/1" in err


def test_tune_measures_and_says_what_remains(capsys):
    command = "tune attention --seq-lens 16 --num-heads 2 --head-dim 8 --samples 2 --device cpu"
    record = as_json(capsys, *command.split(), "--budget", "0")
    assert (record["remaining"], record["measured"]) == (2, [])
    code, out, _ = run(capsys, *command.split(), "--budget", "0")
    assert code == 0
    assert "the same command goes on from here" in out


@pytest.mark.usefixtures("no_code_generation")
@pytest.mark.slow
def test_what_tune_measured_is_known_the_next_time(capsys):
    command = "tune attention --seq-lens 32 --num-heads 2 --head-dim 8 --samples 2 --device cpu"
    code, out, _ = run(capsys, *command.split())
    assert code == 0
    assert "2 measured, 0 known before, 0 remain" in out
    assert as_json(capsys, *command.split())["known"] == 2


@pytest.mark.parametrize("swallow", [False, True], ids=["seen", "lost in a destructor"])
def test_an_interrupted_tune_says_how_to_go_on(capsys, monkeypatch, swallow):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(tuning, "tune", planted_tune([], interrupt_at=1, swallow=swallow))
    code, out, err = run(capsys, "tune", "--device", "cpu")
    assert (code, out) == (130, "")
    assert "interrupted: 1 of 3 problems are done and kept. The same command goes on from there." in " ".join(
        err.split()
    )
    assert signal.getsignal(signal.SIGINT) is before


def test_solve_writes_a_table(capsys, monkeypatch, tmp_path):
    module = types.ModuleType("solvable")

    def model(query):
        heads = query.unflatten(-1, (2, -1)).transpose(1, 2)
        return (heads @ heads.transpose(-2, -1) * 0.25).softmax(-1) @ heads

    module.make = lambda: (model, torch.randn(1, 32, 32))
    monkeypatch.setitem(sys.modules, "solvable", module)
    path = tmp_path / "table.json"
    buckets = ["--shape-buckets", "seq_len=16,32", "--tune", "off", "--output", str(path)]
    record = as_json(capsys, "solve", "solvable:make", *buckets)
    assert record["shape_buckets"] == {"seq_len": [16, 32]}
    assert json.loads(path.read_text()) == record
    assert run(capsys, "readiness-check", "--dispatch-table", str(path))[0] == 0


# ---- as a program ----------------------------------------------------------------------------------------------------


def test_the_module_is_a_program(tmp_path):
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lz_compile", "which", "--shape", "1,2", "--device", "cpu"]
    found = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith("lz_compile: error: ")
    assert found.stderr.count("\n") == 1


def test_help_imports_no_torch(tmp_path):
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = "import sys; from lz_compile.tools.command_arguments import parser; import lz_compile.tools.command_line; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
