"""Dispatch tables: what a file says, what it refuses to say here, and how selection follows it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from backends import Rewriting
from hypothesis import given
from hypothesis import strategies as st
from problems import from_tensors
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import lz_compile as lz
from lz_compile.errors import DispatchTableError, OptionError
from lz_compile.ground import events, machine
from lz_compile.ground.hardware import hardware
from lz_compile.ground.records import Reason
from lz_compile.runtime.choose import select
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.context import SymbolicDim
from lz_compile.runtime.problem.decision_tree import Leaf, Split, choose, edges, leaves
from lz_compile.runtime.tables import loaded as loaded_tables
from lz_compile.runtime.tables.dispatch_table import DispatchTable, KernelIdentity, Plan, PlannedOp
from lz_compile.runtime.tables.trees import of_points, of_regions, over_symbols
from lz_compile.tools import decisions

BLOCKED, SDPA, INDUCTOR = "lz.blocked", "torch.sdpa", "inductor"
BOTH = {"seq_len": (64, 256), "batch": (1, 4)}


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    policy.reset()
    yield
    loaded_tables.unload_dispatch_table()
    policy.reset()


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value


def operands(length: int = 64, batch: int = 1) -> list[Tensor]:
    return [torch.randn(batch, 2, length, 16) for _ in range(3)]


def planned(kernel_id: str, length: int = 64, batch: int = 1, **changes: Any) -> PlannedOp:
    dims = {"batch_size": batch, "head_dim": 16, "num_heads": 2, "num_kv_heads": 2}
    made = PlannedOp(
        op="attention.full",
        kernel_id=kernel_id,
        platform="cpu",
        dtype="float32",
        features=(),
        symbolic=(),
        source_kernel=None,
        dims={**dims, "seq_len_k": length, "seq_len_q": length, "value_dim": 16},
        why="told so",
        where=("model.py:1",),
    )
    return msgspec.structs.replace(made, **changes)


def table(kernel_of: Callable[[int, int], str], buckets: Mapping[str, tuple[int, ...]] = BOTH) -> DispatchTable:
    """A table of one attention, solved for every combination of lengths and batch sizes."""
    points = [(length, batch) for length in buckets["seq_len"] for batch in buckets["batch"]]
    solved = [
        ({"seq_len": length, "batch": batch}, [planned(kernel_of(length, batch), length, batch)])
        for length, batch in points
    ]
    specs = registry.kernels("attention").values()
    return DispatchTable(
        model_id="attention",
        hardware_signature=hardware("cpu").signature(),
        capabilities_hash=registry.digest(),
        shape_buckets=dict(buckets),
        plans=tuple(Plan(bucket=bucket, ops=tuple(ops), jit_artifacts=("key",)) for bucket, ops in solved),
        trees=decisions.bucket_trees(solved),
        kernels=tuple(map(KernelIdentity.of, specs)),
        environment={name: str(value) for name, value in machine.environment_details().items()},
        layerzero_version=lz.__version__,
        torch_version=str(torch.__version__),
        created_at="2026-01-01T00:00:00+00:00",
    )


def by_length(length: int, _batch: int) -> str:
    return BLOCKED if length == 64 else SDPA


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A saved table: lz.blocked up to length 64, SDPA up to 256, batch sizes up to 4."""
    target = tmp_path / "table.json"
    table(by_length).save(target)
    return target


def chosen(length: int, batch: int = 1) -> select.Decision:
    context = from_tensors(*(torch.empty(batch, 2, length, 16) for _ in range(3)))
    return select.select(Problem(context), policy.current())


# ---- trees -----------------------------------------------------------------------------------------------------------


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(sorted)


@given(st.data())
def test_a_bucket_stands_for_all_sizes_up_to_it_and_above_the_one_before(data):
    grids = {dim: data.draw(SIZES) for dim in ("q", "k")}
    cells = [(q, k) for q in grids["q"] for k in grids["k"]]
    kept = data.draw(st.lists(st.sampled_from(cells), min_size=1, unique=True))
    kernels = {cell: data.draw(st.sampled_from("abc")) for cell in kept}
    node = of_points([({"q": q, "k": k}, kernel) for (q, k), kernel in kernels.items()], ["q", "k"])
    used = [sorted({cell[axis] for cell in kept}) for axis in (0, 1)]
    for q in range(1, 45, 3):
        for k in range(1, 45, 3):
            at = [
                next((edge for edge in edges_ if size <= edge), None) for size, edges_ in zip((q, k), used, strict=True)
            ]
            assert choose(node, {"q": q, "k": k}).kernel == kernels.get(tuple(at))


def test_equal_neighbours_are_one_leaf():
    node = of_points([({"q": 16}, "a"), ({"q": 32}, "a"), ({"q": 64}, "b")], ["q"])
    assert [leaf.kernel for leaf in leaves(node)] == ["a", "b", None]
    assert edges(node) == {"q": [33, 65]}


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.none() | st.integers(0, 20), st.integers(0, 20), st.sampled_from("abc")),
        max_size=5,
    )
)
def test_of_overlapping_regions_the_later_one_counts(rows):
    regions = [({"q": (low, high), "k": (first, None)}, kernel) for low, high, first, kernel in rows]
    node = of_regions(regions)
    for q in range(0, 24, 2):
        for k in range(0, 24, 3):
            inside = [
                kernel for low, high, first, kernel in rows if low <= q and (high is None or q <= high) and first <= k
            ]
            assert choose(node, {"q": q, "k": k}).kernel == (inside[-1] if inside else None)


@dataclass(frozen=True)
class Affine:
    """Sizes ``factor * s + offset`` over one symbol, as a match has them."""

    dims: Mapping[str, tuple[int, int]]
    lower: int = 2
    upper: int | None = None

    @property
    def symbols(self) -> dict[str, Any]:
        return {"s": self}

    hidden: Any = None
    hint = 8
    name = "s"

    def at(self, values: Mapping[str, int]) -> dict[str, int]:
        return {dim: max(factor * values["s"] + offset, 0) for dim, (factor, offset) in self.dims.items()}

    def names_in(self, dims: tuple[str, ...]) -> list[str]:
        return ["s"] if any(self.dims[dim][0] for dim in dims) else []


@given(st.integers(1, 4), st.integers(-3, 9), st.lists(st.integers(1, 200), min_size=1, max_size=4, unique=True))
def test_questions_about_sizes_become_questions_about_their_symbol(factor, offset, lengths):
    sizes = Affine({"q": (factor, offset), "k": (1, 0)})
    kernels = dict(zip(sorted(lengths), "abab", strict=False))
    node = of_points([({"q": size, "k": 300}, kernel) for size, kernel in kernels.items()], ["q", "k"])
    over = over_symbols(node, sizes)
    assert over is not None
    for value in range(2, 320, 7):
        assert choose(over, {"s": value}) == choose(node, sizes.at({"s": value}))


@pytest.mark.parametrize("factor", [-1, 0])
def test_a_size_that_does_not_grow_with_its_symbol_is_not_asked_about(factor):
    assert over_symbols(Split("q", 9, Leaf("a"), Leaf("b")), Affine({"q": (factor, 64)})) is None


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_table_is_read_as_it_was_written(path):
    assert DispatchTable.load(path) == table(by_length)


def test_the_file_is_of_the_format_of_the_specification(path):
    record = json.loads(path.read_text())
    assert record["schema_version"] == "1.0"
    assert record["hardware_signature"] == hardware("cpu").signature()
    assert record["shape_buckets"] == {"seq_len": [64, 256], "batch": [1, 4]}
    assert record["plans"][0]["bucket"] == {"seq_len": 64, "batch": 1}
    assert record["plans"][0]["ops"][0]["op"] == "attention.full"
    assert record["plans"][0]["ops"][0]["kernel_id"] == BLOCKED
    assert record["plans"][0]["jit_artifacts"] == ["key"]
    assert record["fallback"] == {"mode": "runtime_select"}


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    return path


def set_(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: Any) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_("schema_version", to="2.0"), r"expected schema_version '1\.0', received '2\.0'"),
        (lambda record: record.pop("schema_version"), r"expected schema_version '1\.0', received None"),
        (set_("surprise", to=1), r"unknown field `surprise`"),
        (lambda record: record.pop("plans"), r"missing required field `plans`"),
        (set_("shape_buckets", "seq_len", to=["long"]), r"Expected `int`, got `str`"),
        (set_("trees", 0, "tree", to={"kernel": 3}), r"expected a leaf \(kernel, why\) or a split"),
        (set_("fallback", "mode", to="guess"), r"Invalid enum value 'guess'"),
        (
            set_("hardware_signature", to="cpu_avx512_4096threads"),
            r"expected the hardware that it was solved on, cpu_avx512_4096threads, received cpu_",
        ),
        (set_("hardware_signature", to="cuda_sm90_cu128"), r"cuda_sm90_cu128, received cuda_sm"),
        (set_("hardware_signature", to=None), r"expected a hardware signature and a capabilities hash, received null"),
        (
            set_("capabilities_hash", to="0" * 64),
            r"capabilities hash 0{12}, received \w{12}: kernels came, went or changed",
        ),
        (set_("plans", 0, "ops", 0, "kernel_id", to="lz.blokked"), r"received 'lz.blokked' \(did you mean 'lz.blocked'"),
        (set_("plans", 0, "ops", 0, "op", to="atention.full"), r"received 'atention.full' \(did you mean 'attention.full'"),
        (
            set_("plans", 0, "ops", 0, "kernel_id", to=SDPA),
            r"plans\[0\]\.ops\[0\]: expected torch\.sdpa in the tree of its kind, received lz\.blocked",
        ),
        (set_("trees", 0, "dims", "depth", to=3), r"trees\[0\]: expected sizes named .*, received 'depth'"),
        (lambda record: record["plans"][0]["ops"][0]["dims"].pop("seq_len_q"), r"expected a size for seq_len_q"),
    ],
)  # fmt: skip
def test_what_does_not_hold_here_or_was_broken_by_hand_is_refused(path, change, text):
    with pytest.raises(DispatchTableError, match=text) as failure:
        DispatchTable.load(changed(path, change))
    assert str(failure.value).startswith(f"loading dispatch table {path}: ")
    assert str(failure.value).endswith("Solve again (lz.solve)")


@pytest.mark.parametrize(("content", "text"), [("{", "truncated"), ("[]", "schema_version"), ("", "truncated")])
def test_what_is_no_json_object_is_refused(path, content, text):
    path.write_text(content)
    with pytest.raises(DispatchTableError, match=text):
        DispatchTable.load(path)


def _nested(levels: int) -> str:
    leaf = '{"kernel": null, "why": ""}'
    return '{"dim": "seq_len_q", "at": 8, "above": ' * levels + leaf + f', "below": {leaf}}}' * levels


@pytest.mark.parametrize("levels", [300, 3_000, 100_000])
def test_a_tree_that_is_nested_too_deeply_is_refused(path, levels):
    record = json.loads(path.read_text())
    record["trees"][0]["tree"] = "HERE"
    path.write_text(json.dumps(record).replace('"HERE"', _nested(levels)))
    with pytest.raises(DispatchTableError, match="expected a dispatch table as JSON"):
        lz.load_dispatch_table(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(DispatchTableError, match="expected at most 64 MiB, received 300"):
        lz.load_dispatch_table(tmp_path / "large.json")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DispatchTableError, match=r"expected a file of decisions, received .*No such file"):
        lz.load_dispatch_table(tmp_path / "none.json")


def test_another_capabilities_hash_names_the_kernels_that_changed(path):
    def change(record: dict[str, Any]) -> None:
        record["capabilities_hash"] = "0" * 64
        of = {each["kernel_id"]: each for each in record["kernels"]}
        of[BLOCKED]["capabilities_hash"] = "f" * 64
        of["flash_attn.v2"]["version"] = "2.6.3"

    with pytest.raises(DispatchTableError) as failure:
        DispatchTable.load(changed(path, change))
    assert "[CAPABILITIES_HASH_MISMATCH] lz.blocked has other capabilities (ffffffffffff expected" in str(failure.value)
    assert "flash_attn.v2 of version 2.6.3 expected, none is installed" in str(failure.value)


# ---- selection -------------------------------------------------------------------------------------------------------


pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("by_priors")]


@pytest.mark.parametrize(
    ("length", "batch", "kernel_id"), [(64, 1, BLOCKED), (1, 4, BLOCKED), (65, 2, SDPA), (256, 4, SDPA)]
)
def test_a_covered_problem_takes_the_kernel_of_its_bucket(path, length, batch, kernel_id):
    lz.load_dispatch_table(path)
    decision = chosen(length, batch)
    assert (decision.kernel.kernel_id, decision.why) == (kernel_id, f"by dispatch table {path}")
    assert decision.refused_table is None


@pytest.mark.parametrize(("length", "batch"), [(257, 1), (64, 5)])
def test_sizes_beyond_the_last_bucket_are_left_to_runtime_selection(path, length, batch):
    without = chosen(length, batch)
    lz.load_dispatch_table(path)
    assert chosen(length, batch) == without


@pytest.mark.parametrize(
    "change",
    [
        {"operation": "attention.causal", "features": {"causal": "is_causal"}},
        {"features": {"gqa": "2 of 4 heads"}},
        {"dtype": torch.bfloat16},
        {"dims": {"head_dim": 32}},
        {"dims": {"num_heads": 4}},
        {"dims": {"seq_len_k": 256}},
        {"source_kernel": SDPA},
        {"threads": 4096},
    ],
)
def test_a_problem_that_differs_in_anything_else_is_not_covered(path, change):
    lz.load_dispatch_table(path)
    context = from_tensors(*(torch.empty(1, 2, 64, 16) for _ in range(3)))
    assert loaded_tables.find(context, None, loaded_tables.active())[1] == Leaf(BLOCKED)
    change = dict(change)
    source = change.pop("source_kernel", None)
    if "threads" in change:
        change = {"hardware": replace(context.hardware, threads=change["threads"])}
    if "dims" in change:
        change["dims"] = {**context.dims, **change["dims"]}
    assert loaded_tables.find(replace(context, **change), source, loaded_tables.active()) == (None, None)


def test_unloading_takes_the_decisions_back(path):
    before, version = chosen(64), loaded_tables.version()
    lz.load_dispatch_table(path)
    lz.unload_dispatch_table(path)
    assert chosen(64) == before
    assert loaded_tables.version() == version + 2
    with pytest.raises(DispatchTableError, match="is not loaded; loaded are: none"):
        lz.unload_dispatch_table(path)


def test_the_table_that_was_loaded_last_is_asked_first(path, tmp_path):
    other = tmp_path / "other.json"
    table(lambda *_: INDUCTOR, {"seq_len": (64,), "batch": (1,)}).save(other)
    lz.load_dispatch_table(path)
    lz.load_dispatch_table(other)
    assert chosen(64).kernel.kernel_id == INDUCTOR
    assert chosen(256).kernel.kernel_id == SDPA
    lz.load_dispatch_table(path)
    assert chosen(64).kernel.kernel_id == BLOCKED


def test_a_file_that_was_written_anew_is_read_anew(path):
    lz.load_dispatch_table(path)
    table(lambda *_: INDUCTOR).save(path)
    lz.load_dispatch_table(path)
    assert chosen(64).kernel.kernel_id == INDUCTOR


def test_one_bucket_stands_for_the_sizes_that_equal_it(tmp_path):
    target = tmp_path / "one.json"
    table(lambda *_: BLOCKED, {"seq_len": (64,), "batch": (1,)}).save(target)
    lz.load_dispatch_table(target)
    assert chosen(48).why == f"by dispatch table {target}"
    assert "dispatch table" not in chosen(65).why


def test_a_lock_is_stronger_and_says_so(path):
    lz.load_dispatch_table(path)
    lz.lock("attention", SDPA)
    decision = chosen(64)
    assert decision.kernel.kernel_id == SDPA
    assert decision.refused_table is not None
    assert decision.refused_table.code == "TABLE_KERNEL_NOT_POSSIBLE"
    assert decision.refused_table.message == (f"lz.blocked (dispatch table {path}): torch.sdpa is locked by lz.lock()")
    assert chosen(256).refused_table is None


def test_a_kernel_that_is_forbidden_or_retired_leaves_the_choice_to_runtime_selection(path, monkeypatch):
    lz.load_dispatch_table(path)
    lz.configure(rules=[{"match": {"operation": "attention.*"}, "forbid": "lz.blocked"}])
    decision = chosen(64)
    lz.configure(rules=[])
    assert decision.kernel.kernel_id != BLOCKED
    assert decision.refused_table is not None
    assert re.match(r"lz\.blocked \(dispatch table .*\): lz\.blocked is forbidden by", decision.refused_table.message)
    retired = Reason("KERNEL_RETIRED", "it failed")
    monkeypatch.setattr(select.health, "retired", lambda kernel_id: retired if kernel_id == BLOCKED else None)
    decision = chosen(64)
    assert decision.refused_table is not None
    assert decision.refused_table.message.endswith("it failed")


def test_switched_off_selection_follows_no_table(path):
    lz.load_dispatch_table(path)
    lz.configure(enabled=False)
    assert chosen(64).refused_table is None
    assert chosen(64).kernel.kernel_id == INDUCTOR


# ---- compiling -------------------------------------------------------------------------------------------------------


def explained(length: int, batch: int = 1, **options: Any) -> lz.GraphReport:
    ours = {f"layerzero.{name}": value for name, value in options.items()}
    (graph,) = lz.explain(attention, *operands(length, batch), options=ours, print_report=False).graphs
    return graph


@pytest.mark.usefixtures("sdpa_first")
def test_a_table_of_one_compile_holds_for_that_compile(path):
    assert explained(48, dispatch_table=path).matches[0].kernel == BLOCKED
    assert explained(48, dispatch_table=str(path)).matches[0].why == f"by dispatch table {path}"
    assert explained(48).matches[0].kernel == SDPA
    assert loaded_tables.active() == ()


@pytest.mark.usefixtures("sdpa_first")
def test_the_table_of_a_compile_is_asked_before_those_of_the_process(path, tmp_path):
    other = tmp_path / "other.json"
    table(lambda *_: INDUCTOR).save(other)
    lz.load_dispatch_table(path)
    assert explained(64, dispatch_table=other).matches[0].kernel == INDUCTOR
    assert explained(64).matches[0].kernel == BLOCKED


@pytest.mark.usefixtures("sdpa_first")
def test_a_refused_table_is_an_event_and_in_strict_mode_an_error(path):
    changed(path, set_("capabilities_hash", to="0" * 64))
    graph = explained(64, dispatch_table=path)
    assert graph.matches[0].kernel == SDPA
    assert [event.code for event in graph.events] == ["DISPATCH_TABLE_REFUSED"]
    with pytest.raises(BackendCompilerFailed, match="capabilities hash") as failure:
        explained(64, dispatch_table=path, strict=True)
    assert isinstance(failure.value.inner_exception, DispatchTableError)


@pytest.mark.usefixtures("sdpa_first")
def test_a_kernel_that_is_not_possible_is_told_in_the_report(path):
    lz.configure(rules=[{"match": {"operation": "attention.*"}, "forbid": "lz.blocked"}])
    graph = explained(64, dispatch_table=path)
    assert graph.matches[0].kernel == SDPA
    assert [reason.code for reason in graph.matches[0].reasons] == ["TABLE_KERNEL_NOT_POSSIBLE"]
    assert [event.code for event in graph.events] == ["TABLE_KERNEL_NOT_POSSIBLE"]


def test_a_path_of_another_type_is_refused():
    with pytest.raises(OptionError, match=r"'layerzero\.dispatch_table' takes str or PathLike, not int 3"):
        explained(64, dispatch_table=3)


def test_what_a_table_decides_is_not_measured(path, monkeypatch):
    measured: list[Any] = []
    monkeypatch.setattr(
        "lz_compile.compile.match_tuning.tune_match", lambda _m, _e, problem, *_: measured.append(problem) or problem
    )
    explained(64, dispatch_table=path, tune="on-miss")
    assert measured == []
    explained(257, dispatch_table=path, tune="on-miss")
    assert len(measured) == 1


def test_the_decisions_of_two_tables_are_two_cache_keys(path, tmp_path):
    from lz_compile.compile.compiler import _cache_key

    other = tmp_path / "other.json"
    table(lambda *_: INDUCTOR).save(other)
    keys = [_cache_key(explained(64, dispatch_table=each)) for each in (path, other, path)]
    assert keys[0] == keys[2] != keys[1]


# ---- symbolic sizes --------------------------------------------------------------------------------------------------


def rewritten(lengths: list[int], batch: int = 2, **declared: int) -> list[lz.GraphReport]:
    """What is done to the graphs of an attention with symbolic lengths (and batch sizes, unless these are declared)."""
    backend = Rewriting()
    run = torch.compile(lambda tensor: attention(tensor, tensor, tensor), backend=backend)
    for length in lengths:
        tensor = operands(length, batch)[0]
        torch._dynamo.mark_dynamic(tensor, 2, **declared)
        if not declared:
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.testing.assert_close(run(tensor), attention(tensor, tensor, tensor))
    return backend.report.graphs


def guards(graph: lz.GraphReport) -> list[str]:
    return sorted(re.sub(r"s\d+", "s", guard) for guard in graph.matches[0].guards)


@pytest.mark.usefixtures("sdpa_first")
def test_symbolic_sizes_are_guarded_by_the_edges_of_the_table(tmp_path):
    target = tmp_path / "table.json"
    kernels = {16: BLOCKED, 32: BLOCKED, 64: INDUCTOR}
    table(lambda length, _: kernels[length], {"seq_len": (16, 32, 64), "batch": (1, 4)}).save(target)
    lz.load_dispatch_table(target)
    graphs = rewritten([8, 20, 32, 33, 64, 65, 200])
    assert [graph.matches[0].kernel for graph in graphs] == [BLOCKED, INDUCTOR, SDPA]
    assert all("by dispatch table" in graph.matches[0].why for graph in graphs[:2])
    assert [guards(graph) for graph in graphs] == [
        ["s < 33", "s < 5"],
        ["s < 5", "s < 65", "s >= 33"],
        ["s >= 33", "s >= 65"],
    ]


@pytest.mark.usefixtures("sdpa_first")
def test_a_declared_range_takes_the_kernel_of_its_largest_size_without_a_guard(path):
    lz.load_dispatch_table(path)
    (graph,) = rewritten([32, 100, 200], min=16, max=256)
    assert (graph.matches[0].kernel, guards(graph)) == (SDPA, [])
    assert graph.matches[0].why == f"by dispatch table {path}"


@pytest.mark.usefixtures("sdpa_first")
def test_a_declared_range_that_goes_beyond_the_last_bucket_is_left_to_runtime_selection(path):
    lz.load_dispatch_table(path)
    (graph,) = rewritten([32, 100], min=16, max=257)
    assert "dispatch table" not in graph.matches[0].why
    assert guards(graph) == []


@pytest.mark.usefixtures("sdpa_first")
def test_where_no_guard_can_be_afforded_a_table_is_not_asked(path, monkeypatch):
    lz.load_dispatch_table(path)
    monkeypatch.setattr(select, "compiles_are_scarce", lambda: True)
    (graph,) = rewritten([32, 100])
    assert "dispatch table" not in graph.matches[0].why
    assert guards(graph) == []


def test_a_problem_without_symbols_to_ask_is_decided_for_the_traced_sizes(path):
    lz.load_dispatch_table(path)
    context = from_tensors(*(torch.empty(1, 2, 64, 16) for _ in range(3)))
    length = SymbolicDim(100, 2, None, "s0")
    context = replace(context, dims={**context.dims, "seq_len_q": length, "seq_len_k": length})
    assert select.select(Problem(context), policy.current()).kernel.kernel_id == SDPA


def test_a_table_of_another_version_is_followed_and_told(path):
    with events.collect() as happened:
        lz.load_dispatch_table(path)
        assert happened == []
        lz.load_dispatch_table(changed(path, set_("torch_version", to="1.13.0")))
    assert [event.code for event in happened] == ["DISPATCH_TABLE_OTHER_VERSIONS"]
    assert f"torch 1.13.0 (here {torch.__version__}); its decisions are followed" in happened[0].message
    assert chosen(64).kernel.kernel_id == BLOCKED


def test_what_a_process_loaded_is_checked_again_when_kernels_change(path):
    lz.load_dispatch_table(path)
    registry.register(replace(registry.kernels("attention")[BLOCKED], kernel_id="test.new"))
    try:
        with pytest.raises(DispatchTableError, match="kernels came, went or changed that it does not name"):
            lz.load_dispatch_table(path)
    finally:
        registry.unregister_kernel("test.new")
