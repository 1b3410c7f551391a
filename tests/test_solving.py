"""Deciding ahead of time: what is solved for which sizes, and lock files that make two environments choose alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import USUAL_MACHINE, Rewriting, known_instruction_sets
from problems import from_tensors
from torch import Tensor, nn

import lz_compile as lz
from lz_compile.compile.compiler import _cache_key
from lz_compile.errors import DispatchTableError, OptionError, SolveError
from lz_compile.ground import events, machine
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.measure import perfdb
from lz_compile.runtime.measure.estimate import workload
from lz_compile.runtime.measure.perf_record import PerfRecord, canonical
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.decision_tree import choose, from_dict
from lz_compile.runtime.tables import loaded as loaded_tables
from lz_compile.runtime.tables.dispatch_table import DispatchTable
from lz_compile.tools import decisions, solving
from lz_compile.tools.decisions import Decided

ROOT = Path(__file__).resolve().parent.parent
BLOCKED, SDPA, INDUCTOR = "lz.blocked", "torch.sdpa", "inductor"


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    policy.reset()
    yield
    loaded_tables.unload_dispatch_table()
    policy.reset()


class Layers(nn.Module):
    """Two layers of self-attention over ``[B, T, 32]``, in one loop."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x_BTC: Tensor, bias: Tensor | None = None) -> Tensor:
        for _ in range(2):
            batch, length, _ = x_BTC.shape
            query, key, value = self.project(x_BTC).view(batch, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
            scores = query @ key.transpose(-2, -1) * 0.25
            scores = scores if bias is None else scores + bias
            x_BTC = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, 32)
        return x_BTC


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value


def operands(length: int, batch: int = 1) -> list[Tensor]:
    return [torch.randn(batch, 2, length, 16) for _ in range(3)]


def measured(path: Path, latency_us: Mapping[int, Mapping[str, float]]) -> Path:
    """A database in which an attention of ``operands(length)`` took so long, by length and kernel."""
    with perfdb.PerfDB(path) as database:
        for length, by_kernel in latency_us.items():
            context = from_tensors(*operands(length))
            database.put(
                PerfRecord(
                    kernel_id=kernel_id,
                    operation=context.operation,
                    device_id=context.hardware.device_name,
                    dtype=context.dtype_name,
                    environment=machine.environment("cpu"),
                    workload=canonical(workload(context, None, context.hints())),
                    median_us=us,
                    p95_us=us,
                    samples=20,
                )
                for kernel_id, us in by_kernel.items()
            )
    return path


def kernels(*lengths: int, **options: Any) -> list[str]:
    """What an attention is rewritten to at these lengths."""
    torch._dynamo.reset()
    backend = Rewriting(**options)
    run = torch.compile(attention, backend=backend, dynamic=False)
    for length in lengths:
        run(*operands(length))
    return [match.kernel for match in backend.report.matches]


# ---- solving ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sdpa_first")
def test_every_combination_of_buckets_is_solved_with_equal_places_as_one_op():
    buckets = {"seq_len": [32, 16, 16], "batch": [1, 3]}
    table = lz.solve(Layers(), torch.randn(2, 8, 32), shape_buckets=buckets, tune="off", model_id="two layers")
    assert table.shape_buckets == {"seq_len": (16, 32), "batch": (1, 3)}
    assert [plan.bucket for plan in table.plans] == [
        {"seq_len": length, "batch": batch} for length in (16, 32) for batch in (1, 3)
    ]
    for plan in table.plans:
        (op,) = plan.ops
        assert (op.op, op.kernel_id, op.features, op.symbolic) == ("attention.full", SDPA, ("training",), ())
        assert (op.dims["seq_len_q"], op.dims["seq_len_k"]) == (plan.bucket["seq_len"],) * 2
        assert op.dims["batch_size"] == plan.bucket["batch"]
        assert [Path(where.rpartition(":")[0]).name for where in op.where] == ["test_solving.py"]
    assert (table.model_id, table.kind, table.fallback.mode) == ("two layers", "dispatch_table", "runtime_select")
    assert table.capabilities_hash == registry.digest()
    assert table.environment["torch"] == table.torch_version == str(torch.__version__)


@pytest.mark.usefixtures("sdpa_first")
def test_a_tree_covers_the_solved_sizes_and_nothing_beyond():
    buckets = {"seq_len": [16, 32], "batch": [1, 3]}
    (tree,) = lz.solve(Layers(), torch.randn(2, 8, 32), shape_buckets=buckets, tune="off").trees
    assert tree.dims == {"head_dim": 16, "num_heads": 2, "num_kv_heads": 2, "value_dim": 16}
    node = from_dict(tree.tree)
    for length, batch, kernel in [(16, 1, SDPA), (32, 3, SDPA), (9, 2, SDPA), (33, 1, None), (16, 4, None)]:
        assert choose(node, {"seq_len_q": length, "seq_len_k": length, "batch_size": batch}).kernel == kernel
    assert choose(node, {"seq_len_q": 16, "seq_len_k": 32, "batch_size": 1}).kernel is None


def test_a_table_decides_like_the_selection_that_it_was_solved_by(tmp_path):
    fast = {64: {INDUCTOR: 100.0, SDPA: 200.0, BLOCKED: 50.0}, 256: {INDUCTOR: 100.0, SDPA: 50.0, BLOCKED: 200.0}}
    lz.configure(perfdb={"path": str(measured(tmp_path / "a.sqlite", fast))})
    table = lz.solve(attention, *operands(8), shape_buckets={"length": [64, 256]}, dims={"length": 2}, tune="off")
    assert [plan.ops[0].kernel_id for plan in table.plans] == [BLOCKED, SDPA]
    table.save(tmp_path / "table.json")
    lz.configure(perfdb={"path": str(tmp_path / "empty.sqlite")})
    assert kernels(20, 64, 65, 256, dispatch_table=tmp_path / "table.json") == [BLOCKED, BLOCKED, SDPA, SDPA]


def test_a_loaded_table_has_no_part_in_solving(tmp_path):
    lz.configure(perfdb={"path": str(measured(tmp_path / "a.sqlite", {64: {INDUCTOR: 100.0, BLOCKED: 50.0}}))})
    given = {"shape_buckets": {"length": [64]}, "dims": {"length": 2}, "tune": "off"}
    lz.solve(attention, *operands(8), **given).save(tmp_path / "table.json")
    lz.configure(perfdb={"path": str(measured(tmp_path / "b.sqlite", {64: {INDUCTOR: 50.0, BLOCKED: 100.0}}))})
    lz.load_dispatch_table(tmp_path / "table.json")
    assert kernels(64) == [BLOCKED]
    (plan,) = lz.solve(attention, *operands(8), **given).plans
    assert plan.ops[0].kernel_id != BLOCKED


def test_what_was_never_measured_is_measured_within_the_budget(tmp_path, monkeypatch):
    seen: list[tuple[int, float]] = []

    def tune_match(_match: Any, _effects: Any, problem: Any, _policy: Any, deadline: float, *_: Any) -> Any:
        seen.append((problem.context.dims["seq_len_q"], deadline - solving.time.perf_counter()))
        return problem

    monkeypatch.setattr("lz_compile.compile.match_tuning.tune_match", tune_match)
    given = {"shape_buckets": {"length": [16, 32]}, "dims": {"length": 2}}
    lz.solve(attention, *operands(8), **given, budget_s=1000)
    assert [length for length, _ in seen] == [16, 32]
    assert 500 < seen[1][1] < seen[0][1] <= 1000
    seen.clear()
    lz.solve(attention, *operands(8), **given, budget_s=0)
    assert all(left <= 0 for _, left in seen)
    assert len(seen) == 2
    seen.clear()
    lz.solve(attention, *operands(8), **given, tune="off")
    assert seen == []


def test_inputs_of_ones_own_are_asked_for_each_bucket():
    asked: list[dict[str, int]] = []

    def inputs(bucket: dict[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        asked.append(bucket)
        length = bucket["seq_len"]
        return (torch.randn(1, length, 32),), {"bias": torch.randn(1, 1, length, length)}

    table = lz.solve(Layers().eval(), shape_buckets={"seq_len": [8, 16]}, inputs=inputs, tune="off")
    assert asked == [{"seq_len": 8}, {"seq_len": 16}]
    assert [plan.ops[0].features for plan in table.plans] == [table.plans[0].ops[0].features] * 2
    assert {"float_mask", "training"} <= set(table.plans[0].ops[0].features)


def test_examples_are_resized_where_they_have_the_size_of_the_first_and_keep_the_rest():
    seen: list[Any] = []

    def model(tokens: Tensor, mask: Tensor, table: Tensor, scale: float, *, more: list[Tensor]) -> Tensor:
        seen.append((tokens.tolist(), tuple(mask.shape), tuple(table.shape), scale, more[0].requires_grad))
        return more[0] * scale

    tokens = torch.tensor([[5, 6, 7]])
    more = [torch.ones(2, 3, requires_grad=True)]
    lz.solve(
        torch._dynamo.disable(model),
        tokens,
        torch.ones(1, 3, dtype=torch.bool),
        torch.ones(9, 4),
        0.5,
        shape_buckets={"seq_len": [2, 4]},
        tune="off",
        more=more,
    )
    assert seen == [
        ([[5, 6]], (1, 2), (9, 4), 0.5, True),
        ([[5, 6, 7, 5]], (1, 4), (9, 4), 0.5, True),
    ]
    assert more[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"shape_buckets": {}}, "expected at least one bucket, received none"),
        ({"shape_buckets": {"seq_len": []}}, r"expected sizes of 1 or more for 'seq_len', received \[\]"),
        ({"shape_buckets": {"seq_len": [0]}}, r"received \[0\]"),
        ({"shape_buckets": {"seq_len": [True]}}, r"received \[True\]"),
        ({"shape_buckets": {"seqlen": [8]}}, r"position of 'seqlen', received those of batch, seq_len \(did you mean 'seq_len'"),
        ({"shape_buckets": {"seq_len": [8]}, "dims": {"seq_len": 7}}, r"with a dimension 7 for 'seq_len', received \(1, 2, 8, 16\)"),
        ({"shape_buckets": {"seq_len": [8]}, "inputs": lambda _: ((), {})}, r"expected examples or inputs=, received both"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_runs(given, text):
    def model(*_: Tensor) -> Tensor:
        raise AssertionError("nothing was to run")

    with pytest.raises(SolveError, match=text):
        lz.solve(model, *operands(8), **given)


def test_a_size_at_which_the_model_does_not_run_is_named():
    def model(x: Tensor) -> Tensor:
        return x.view(-1, 4) + 1

    with pytest.raises(
        SolveError, match=r"expected it to run at seq_len 5, received \w+: .*\. Leave the size out"
    ) as failure:
        lz.solve(model, torch.ones(1, 4), shape_buckets={"seq_len": [4, 5]}, tune="off")
    assert failure.value.__cause__ is not None


def test_a_wrong_tune_is_refused():
    with pytest.raises(OptionError, match="cannot be 'always'"):
        lz.solve(attention, *operands(8), shape_buckets={"seq_len": [8]}, tune="always")


@pytest.mark.usefixtures("sdpa_first")
def test_compiling_warms_the_caches_with_what_production_asks_for(monkeypatch):
    from torch._dynamo.utils import counters

    from lz_compile.backend import layerzero

    model = Layers()
    table = lz.solve(model, torch.randn(2, 8, 32), shape_buckets={"seq_len": [24]}, tune="off", compile_jit=True)
    kinds = {artifact.partition("/")[0] for artifact in table.plans[0].jit_artifacts}
    assert {"inductor", "aot_autograd"} <= kinds
    torch._dynamo.reset()
    counters.clear()
    output = torch.compile(model, backend=layerzero, dynamic=False)(torch.randn(2, 24, 32))
    output.sum().backward()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["aot_autograd"]["autograd_cache_miss"] == 0


@pytest.mark.usefixtures("sdpa_first")
def test_without_compiling_there_are_no_artifacts_and_no_gradients():
    model = Layers()
    table = lz.solve(model, torch.randn(2, 8, 32), shape_buckets={"seq_len": [24]}, tune="off")
    assert table.plans[0].jit_artifacts == ()
    assert model.project.weight.grad is None


@pytest.mark.usefixtures("sdpa_first")
def test_many_buckets_do_not_use_up_the_recompiles_of_the_model():
    model = Layers().eval()
    lz.solve(model, torch.randn(1, 8, 32), shape_buckets={"seq_len": [8 * n for n in range(1, 11)]}, tune="off")
    backend = Rewriting()
    torch.compile(model, backend=backend, dynamic=False)(torch.randn(1, 12, 32))
    assert len(backend.graphs) == 1


@pytest.mark.usefixtures("sdpa_first")
def test_of_different_decisions_for_one_problem_the_most_frequent_counts(tmp_path):
    lz.explain(attention, *operands(8), print_report=False)
    (match,) = [match for graph in lz.reports() for match in graph.matches]
    found = []
    for kernel_id in (SDPA, BLOCKED, BLOCKED):
        match.kernel = kernel_id
        decided = Decided.of(match)
        assert decided is not None
        found.append(decided.op)
    with events.collect() as happened:
        (tree,) = decisions.bucket_trees([({"seq_len": 8}, found)])
    assert choose(from_dict(tree.tree), found[0].dims).kernel == BLOCKED
    assert [event.code for event in happened] == ["DECISIONS_DIFFER"]
    assert "{'torch.sdpa': 1, 'lz.blocked': 2}; the most frequent one is kept" in happened[0].message


# ---- lock files --------------------------------------------------------------------------------------------------------


BLOCKED_WINS = {64: {INDUCTOR: 100.0, SDPA: 200.0, BLOCKED: 50.0}, 256: {INDUCTOR: 100.0, SDPA: 50.0, BLOCKED: 200.0}}
INDUCTOR_WINS = {length: {INDUCTOR: 10.0, SDPA: 20.0, BLOCKED: 50.0} for length in (64, 256)}


def test_two_environments_choose_alike_with_a_lock_file(tmp_path):
    lock = tmp_path / "decisions.json"
    lz.configure(perfdb={"path": str(measured(tmp_path / "a.sqlite", BLOCKED_WINS))})
    first = kernels(64, 256)
    table = lz.save_decisions(lock)
    assert (table.kind, table.hardware_signature, table.capabilities_hash) == ("lock", None, None)
    lz.configure(perfdb={"path": str(measured(tmp_path / "b.sqlite", INDUCTOR_WINS))})
    assert kernels(64, 256) == [INDUCTOR, INDUCTOR] != first == [BLOCKED, SDPA]
    lz.load_dispatch_table(lock)
    assert kernels(64, 256) == first
    assert kernels(63, 257) == [INDUCTOR, INDUCTOR]
    lz.unload_dispatch_table(lock)
    assert kernels(64, 256, dispatch_table=lock) == first


def test_what_a_lock_file_decided_has_the_same_cache_key(tmp_path):
    lz.configure(perfdb={"path": str(measured(tmp_path / "a.sqlite", BLOCKED_WINS))})
    kernels(64)
    (first,) = lz.reports()
    lz.save_decisions(tmp_path / "lock.json")
    lz.configure(perfdb={"path": str(measured(tmp_path / "b.sqlite", INDUCTOR_WINS))})
    kernels(64)
    kernels(64, dispatch_table=tmp_path / "lock.json")
    _, second, third = lz.reports()
    assert _cache_key(first) == _cache_key(third) != _cache_key(second)


def test_of_two_decisions_for_one_problem_the_later_one_is_saved(tmp_path):
    lz.lock("attention", BLOCKED)
    kernels(64)
    lz.lock("attention", INDUCTOR)
    kernels(64)
    lz.unlock("attention")
    table = lz.save_decisions(tmp_path / "lock.json")
    assert [op.kernel_id for op in table.plans[0].ops] == [INDUCTOR]
    assert kernels(64, dispatch_table=tmp_path / "lock.json") == [INDUCTOR]


@pytest.mark.usefixtures("sdpa_first")
def test_a_lock_file_of_symbolic_sizes_speaks_of_the_range_between_their_guards(tmp_path):
    def decided(*lengths: int, **options: Any) -> list[tuple[str, int]]:
        torch._dynamo.reset()
        backend = Rewriting(**options)
        run = torch.compile(lambda tensor: attention(tensor, tensor, tensor), backend=backend)
        for length in lengths:
            tensor = operands(length)[0]
            torch._dynamo.mark_dynamic(tensor, 2)
            run(tensor)
        return [(match.kernel, len(match.guards)) for match in backend.report.matches]

    measurements = lz.solve(attention, *operands(8), shape_buckets={"length": [16, 32]}, dims={"length": 2}, tune="off")
    measurements.save(tmp_path / "table.json")
    assert decided(20, dispatch_table=tmp_path / "table.json") == [(SDPA, 1)]
    table = lz.save_decisions(tmp_path / "lock.json")
    symbolic = next(tree for tree in table.trees if tree.symbolic == ("seq_len_k", "seq_len_q"))
    node = from_dict(symbolic.tree)
    found = [choose(node, {"seq_len_q": size, "seq_len_k": size}).kernel for size in (1, 2, 32, 33)]
    assert found == [None, SDPA, SDPA, None]
    lz.lock("attention", BLOCKED)
    assert decided(20) == [(BLOCKED, 0)]
    lz.unlock("attention")
    lz.load_dispatch_table(tmp_path / "lock.json")
    assert decided(20, 40) == [(SDPA, 1), (SDPA, 1)]


def test_a_decision_whose_guards_are_about_no_size_alone_is_not_saved(tmp_path):
    kernels(64)
    (match,) = [match for graph in lz.reports() for match in graph.matches]
    match.context["dims"]["seq_len_q"] = {"hint": 64, "lower": 2, "upper": None, "name": "2*s0"}
    match.guards = ["s0 < 40"]
    with events.collect() as happened:
        table = lz.save_decisions(tmp_path / "lock.json")
    assert table.plans[0].ops == ()
    assert [event.code for event in happened] == ["DECISION_NOT_SAVED"]


def test_nothing_decided_is_an_empty_lock_file_that_loads(tmp_path):
    lz.save_decisions(tmp_path / "lock.json")
    assert lz.load_dispatch_table(tmp_path / "lock.json").trees == ()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"capabilities_hash": "f" * 64}, r"\[CAPABILITIES_HASH_MISMATCH\] lz\.blocked has other capabilities"),
        ({"version": "9.9"}, r"lz\.blocked of version 9\.9 expected, none is installed"),
        ({"kernel_id": "lz.gone"}, r"\[KERNEL_MISSING\] lz\.gone is not there|expected lz\.blocked among its kernels"),
    ],
)
def test_a_lock_file_with_kernels_that_are_others_here_is_refused(tmp_path, change, text):
    path = tmp_path / "lock.json"
    lz.lock("attention", BLOCKED)
    kernels(64)
    lz.save_decisions(path)
    record = json.loads(path.read_text())
    assert [kernel["kernel_id"] for kernel in record["kernels"]] == [BLOCKED]
    record["kernels"][0] |= change
    path.write_text(json.dumps(record))
    with pytest.raises(DispatchTableError, match=text) as failure:
        lz.load_dispatch_table(path)
    assert str(failure.value).startswith(f"loading decisions {path}: ")
    assert str(failure.value).endswith("Save the decisions again (lz.save_decisions)")


def test_a_lock_file_with_a_library_that_is_not_installed_here_is_refused(tmp_path, monkeypatch):
    lz.lock("attention", BLOCKED)
    kernels(64)
    table = lz.save_decisions(tmp_path / "lock.json")
    assert DispatchTable.load(tmp_path / "lock.json") == table
    reason = registry.Reason("NOT_INSTALLED", "blocks are not installed")
    monkeypatch.setattr(registry.KernelSpec, "availability", lambda _: reason)
    with pytest.raises(DispatchTableError, match=r"received \[NOT_INSTALLED\] blocks are not installed"):
        DispatchTable.load(tmp_path / "lock.json")


def test_another_process_chooses_as_the_lock_file_says(tmp_path):
    lz.configure(perfdb={"path": str(measured(tmp_path / "a.sqlite", BLOCKED_WINS))})
    assert kernels(64, 256) == [BLOCKED, SDPA]
    lz.save_decisions(tmp_path / "lock.json")
    script = """
import sys
import torch
import lz_compile as lz
def attention(query, key, value):
    return (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value
torch.set_num_threads(2)
for options in ({}, {"layerzero.dispatch_table": sys.argv[1]}):
    for length in (64, 256):
        operands = [torch.randn(1, 2, length, 16) for _ in range(3)]
        report = lz.explain(attention, *operands, options=options, dynamic=False, print_report=False)
        print(report.matches[0].kernel)
"""
    environment = {**os.environ, **known_instruction_sets(), "PYTHONPATH": str(ROOT)}
    environment["LAYERZERO_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", USUAL_MACHINE + script, str(tmp_path / "lock.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    without, with_lock = done.stdout.split()[:2], done.stdout.split()[2:]
    assert with_lock == [BLOCKED, SDPA]
    assert without != with_lock
