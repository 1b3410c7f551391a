"""Every kernel for scans that runs here: that it is the reference, for any structure, size, dtype, decay and memory order."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from benchmarks.scan_accuracy import DECAYS, STRUCTURES, Case, errors, runs
from lz_compile.ground import health
from lz_compile.lowering.kernels.scan import associative_scan, chunk_prefixes, chunked_scan, triton_scan
from lz_compile.lowering.kernels.scan.chunk_form import chunk_form
from lz_compile.lowering.kernels.scan.chunk_operands import ChunkOperands
from lz_compile.lowering.ops.scan import Operands, ScanAttrs, facts_of, reference, sample
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.rewriting.builder import GraphBuilder
from lz_compile.runtime.kernels.registry import KERNELS, kernels
from lz_compile.runtime.problem.context import of_facts
from tests.scan_kernel_problems import PROBLEMS, Problem, assert_near, exactly, missing, with_gradients

HERE = {
    name: spec
    for name, spec in kernels("scan").items()
    if name not in ("inductor", "dispatch") and {"*", "cpu"} & spec.platforms and spec.availability() is None
}
#: Those of this package that are plain PyTorch, with arguments that cut small scans into several pieces.
OURS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "lz.chunked_scan": (chunked_scan.scan, {"chunk": 4}),
    "lz.associative_scan": (associative_scan.scan, {"shortest": 3}),
    "lz.associative_matrix_scan": (associative_scan.scan, {"shortest": 3}),
}
#: What appends nodes that no CPU can run, by the operator among them.
LAUNCHED = {
    "lz.triton_scan": torch.ops.layerzero.triton_scan.default,
}
EMITTED: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    **OURS,
    "lz.triton_scan": (triton_scan.scan, {}),
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

#: Those that call a compiler for every structure.
COMPILED = {"lz.rolled_scan"}
for_every_kernel = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in COMPILED else name for name in HERE]
)
for_every_problem = pytest.mark.parametrize("case", PROBLEMS)
drawn = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    torch.manual_seed(0)
    yield
    assert not health.retirements()


def call_of(name: str) -> Callable[..., Any]:
    spec = HERE[name]
    assert spec.call is not None
    return spec.call


def test_the_kernels_of_this_package_are_found():
    assert {*OURS} <= {*HERE}


@pytest.mark.sampled
@for_every_problem
@for_every_kernel
def test_a_kernel_is_the_reference_with_gradients(name, case):
    problem = PROBLEMS[case]
    if set(missing(HERE[name], problem)) - {"many_steps"}:
        return
    if name in COMPILED and list(PROBLEMS).index(case) % 6 and not problem.drops:  # its own tests try every structure
        return
    operands, attrs = problem.operands(), problem.attrs()
    scan, arguments = OURS.get(name, (call_of(name), {}))
    found = with_gradients(partial(scan, **arguments), operands, attrs)
    assert_near(found, exactly(operands, attrs), 1e-9)


def test_every_structure_has_a_kernel_in_this_package():
    for problem in PROBLEMS.values():
        refused = {name: missing(HERE[name], problem) for name in (*OURS, *COMPILED) if name in HERE}
        by_column = problem.erases and problem.decay in ("value", "full")
        assert by_column or [] in refused.values(), refused


@given(
    decay=st.sampled_from([None, "scalar", "key", "constant"]),
    erases=st.booleans(),
    rank=st.integers(1, 2),
    queries=st.integers(1, 2),
    reads=st.sampled_from(["after", "before"]),
    drive=st.sampled_from([None, "key", "value", "full"]),
    length=st.integers(1, 40),
    rows=st.integers(1, 5),
    columns=st.integers(1, 4),
    batch=st.integers(1, 2),
    shares=st.booleans(),
    has_state=st.booleans(),
    chunk=st.sampled_from([2, 4, 8, 64]),
)
@drawn
def test_chunks_and_pairs_are_the_reference_whatever_a_step_is(chunk, **form):
    problem = Problem(**form)
    operands, attrs = problem.operands(), problem.attrs()
    exact = exactly(operands, attrs)
    in_chunks = with_gradients(partial(chunked_scan.scan, chunk=chunk), operands, attrs)
    assert_near(in_chunks, exact, 1e-8)
    in_pairs = with_gradients(partial(associative_scan.scan, shortest=chunk), operands, attrs)
    assert_near(in_pairs, exact, 1e-8)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@for_every_kernel
def test_operands_of_every_dtype_are_computed_in_float32(name, dtype):
    problem = replace(PROBLEMS["kda" if HERE[name].operation != "scan.diagonal" else "mamba_2"], length=30)
    operands = problem.operands(dtype)
    attrs = replace(problem.attrs(dtype), state_dtype=torch.float32)
    reads, last = call_of(name)(operands, attrs)
    assert (reads.dtype, last.dtype) == (dtype, torch.float32)
    assert reads.shape == (2, 2, 30, 1, problem.columns)
    assert last.shape == (2, 2, problem.rows, problem.columns)
    exact = exactly(operands, attrs)
    assert_near({"reads": reads}, {"reads": exact["reads"]}, TOLERANCE[dtype])
    assert_near({"last": last}, {"last": exact["last"]}, 1e-5)


@for_every_kernel
def test_operands_may_have_any_strides_and_dtypes_of_their_own(name):
    problem = PROBLEMS["kda" if HERE[name].operation != "scan.diagonal" else "mamba_1"]
    operands = problem.operands(torch.float32)
    mixed = operands.map(lambda each: each.transpose(1, 2).contiguous().transpose(1, 2))
    mixed = replace(mixed, query=mixed.query.bfloat16())
    attrs = problem.attrs(torch.float32)
    exact = exactly(replace(operands, query=mixed.query), attrs)
    found = call_of(name)(mixed, attrs)
    assert_near(
        dict(zip(("reads", "last"), found, strict=True)), {each: exact[each] for each in ("reads", "last")}, 1e-5
    )


# ---- digits ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("structure", STRUCTURES)
@for_every_kernel
def test_no_decay_costs_digits(name, structure, decay):
    case = Case(structure, decay, length=150, heads=1, key_dim=8, value_dim=8)
    device = torch.device("cpu")
    if not runs(HERE[name], case, torch.float32, device):
        return
    found = errors(call_of(name), case, torch.float32, device)
    assert max(found.values()) < 5e-6, found


def test_keys_that_are_alike_cost_few_digits():
    """Powers of the triangle of a chunk would have an error of thousands."""
    key = F.normalize(torch.randn(1, 1, 1, 1, 16) + 0.05 * torch.randn(1, 1, 256, 1, 16), dim=-1)
    operands = Operands(
        decay=torch.full((1, 1, 256, 1, 1), 0.999),
        left=key * 0.9,
        right=torch.randn(1, 1, 256, 1, 16),
        erase=key * 0.999,
        query=torch.randn(1, 1, 256, 1, 16),
    )
    attrs = ScanAttrs(erases=True)
    exact = exactly(operands, attrs)
    assert_near(with_gradients(chunked_scan.scan, operands, attrs), exact, 1e-4)


def test_a_decay_of_zero_forgets_what_is_not_finite_in_nothing_but_its_own_rows():
    operands = PROBLEMS["gated_linear_attention"].operands(torch.float32)
    operands.state[:, :, 1] = torch.inf
    operands.decay[:, :, 0, 1] = 1.0
    operands.query[..., 1] = 0.5
    _, last = chunked_scan.scan(operands, PROBLEMS["gated_linear_attention"].attrs(torch.float32))
    assert last[:, :, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 13])
@pytest.mark.parametrize("is_matrix", [False, True])
def test_all_states_of_maps_are_found_pairwise(is_matrix, count):
    factors = torch.randn(2, 1, count, 3, 3 if is_matrix else 1, dtype=torch.float64)
    summands = torch.randn(1, 2, count, 3, 2, dtype=torch.float64)
    state = torch.randn(2, 2, 3, 2, dtype=torch.float64)
    by = chunk_prefixes.matrices if is_matrix else chunk_prefixes.diagonal
    found, last = chunk_prefixes.states_before(factors, summands, state, by)
    _, times = by
    for index in range(count):
        torch.testing.assert_close(found[:, :, index], state)
        state = times(factors[:, :, index], state) + summands[:, :, index]
    torch.testing.assert_close(last, state)


def test_a_chunk_reads_nothing_of_later_steps():
    problem = replace(PROBLEMS["two_erasing_updates"], length=8, rank=1)
    form = chunk_form(ChunkOperands.of(problem.operands(), problem.attrs()), "before", 8)
    assert torch.equal(form.pairs, form.pairs.tril(-1))


# ---- as nodes of a graph ---------------------------------------------------------------------------------------------


def emitted(name: str, x: Operands, attrs: ScanAttrs, *, symbolic: tuple[int, ...] = ()) -> fx.GraphModule:
    """The graph that a kernel appends, with the operands as inputs; some of their dimensions may be symbolic."""
    scan, arguments = EMITTED[name]
    module = fx.symbolic_trace(_First())
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    operands = x.given()
    nodes = {each: graph.placeholder(each) for each in operands}
    for each, node in nodes.items():
        tensor = operands[each]
        kinds = [
            DimDynamic.DYNAMIC if dim in symbolic and tensor.shape[dim] > 1 else DimDynamic.STATIC
            for dim in range(tensor.dim())
        ]
        context = StatelessSymbolicContext(dynamic_sizes=kinds)
        node.meta["example_value"] = mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(each))
    output = graph.output(tuple(nodes.values()))
    output.meta["example_value"] = next(iter(nodes.values())).meta["example_value"]
    template = next(iter(nodes.values()))
    builder = GraphBuilder(graph, template, Ambient(), {})
    with graph.inserting_before(output):
        given = Operands(**{each: builder.value(node) for each, node in nodes.items()})
        results = scan(given, attrs, **arguments)
    output.args = (tuple(each.node for each in results),)
    graph.lint()
    return fx.GraphModule(module, graph)


class _First(torch.nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given


@pytest.mark.parametrize("case", ["kda_shared_keys", "erasing_with_a_summand", "mamba_2", "average", "no_input"])
@pytest.mark.parametrize("name", OURS)
def test_a_kernel_appends_nodes_that_compute_what_it_does(name, case):
    problem = PROBLEMS[case]
    if set(missing(HERE[name], problem)) - {"many_steps"}:
        return
    if name in COMPILED and list(PROBLEMS).index(case) % 6:  # its own tests try every structure
        return
    operands, attrs = problem.operands(), problem.attrs()
    module = emitted(name, operands, attrs)
    scan, arguments = OURS[name]
    for found, expected in zip(module(*operands.tensors), scan(operands, attrs, **arguments), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous()


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("lz.chunked_scan", "erasing_with_a_row_as_summand"),
        ("lz.chunked_scan", "erasing_with_a_summand"),
        ("lz.chunked_scan", "linear_attention"),
        ("lz.associative_scan", "mamba_1"),
        ("lz.associative_matrix_scan", "kda"),
        ("lz.triton_scan", "kda"),
    ],
)
def test_batch_and_heads_may_be_symbolic(name, case):
    problem = replace(PROBLEMS[case], batch=3, heads=2, length=10)
    module = emitted(name, problem.operands(), problem.attrs(), symbolic=(0, 1))
    other = replace(problem, batch=5, heads=4)
    operands = other.operands()
    if name in LAUNCHED:
        assert any(node.target == LAUNCHED[name] for node in module.graph.nodes)
        return
    for found, expected in zip(module(*operands.tensors), reference(operands, other.attrs()), strict=True):
        torch.testing.assert_close(found, expected)


def test_every_size_may_be_symbolic_for_a_kernel_that_looks_at_sizes_when_it_runs():
    problem = replace(PROBLEMS["kda"], batch=3, heads=2, length=10, rows=7, columns=5)
    module = emitted("lz.triton_scan", problem.operands(), problem.attrs(), symbolic=(0, 1, 2, 3, 4))
    reads, last = (node.meta["example_value"].shape for node in module.graph.output_node().args[0])
    assert [str(size).isdigit() for size in reads] == [False, False, False, True, False]
    assert not any(str(size).isdigit() for size in last)
    found = {name: {each for each in spec.supports if "symbolic" in each} for name, spec in kernels("scan").items()}
    assert found["lz.triton_scan"] == found["lz.rolled_scan"] == {"symbolic_length", "symbolic_widths"}
    assert not any(found[name] for name in OURS)


def test_a_symbolic_length_is_refused():
    problem = PROBLEMS["kda"]
    with pytest.raises(ValueError, match="expected numbers as the sizes T, received symbols"):
        emitted("lz.chunked_scan", problem.operands(), problem.attrs(), symbolic=(2,))


@pytest.mark.parametrize("name", ["lz.chunked_scan", "lz.associative_scan"])
def test_a_graph_grows_with_the_logarithm_of_the_length(name):
    problem = PROBLEMS["kda" if name == "lz.chunked_scan" else "mamba_1"]
    few, many = (
        emitted(name, replace(problem, length=length).operands(torch.float32), problem.attrs(torch.float32)).graph
        for length in (256, 1024)
    )
    assert len(many.nodes) < 1.4 * len(few.nodes) < 1000


@pytest.mark.thorough
@pytest.mark.slow
def test_inductor_compiles_chunks_with_gradients():
    problem = replace(PROBLEMS["kda"], length=5)
    operands, attrs = problem.operands(torch.float32), problem.attrs(torch.float32)
    compiled = torch.compile(lambda x: chunked_scan.scan(x, attrs, chunk=2), fullgraph=True)
    found = with_gradients(lambda x, _: compiled(x), operands, attrs)
    assert_near(found, exactly(operands, attrs), 1e-5)


# ---- what is refused, and what is said -------------------------------------------------------------------------------


def test_decays_by_column_are_refused_by_their_shape():
    problem = PROBLEMS["erasing_under_column_decays"]
    for scan in (chunked_scan.scan, associative_scan.scan):
        with pytest.raises(
            ValueError, match=r"one decay for every row.*received torch.Size|received \(2, 2, 21, 1, 3\)"
        ):
            scan(problem.operands(), problem.attrs())


@pytest.mark.parametrize(
    ("name", "case", "code"),
    [
        ("lz.chunked_scan", "mamba_1", "FULL_DECAY_UNSUPPORTED"),
        ("lz.chunked_scan", "channels", "VALUE_DECAY_UNSUPPORTED"),
        ("lz.associative_scan", "kda", "VARIANT_UNSUPPORTED"),
        ("lz.associative_matrix_scan", "erasing_under_column_decays", "VALUE_DECAY_UNSUPPORTED"),
        ("lz.associative_matrix_scan", "mamba_1", "VARIANT_UNSUPPORTED"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_with_a_reason(name, case, code):
    problem = PROBLEMS[case]
    context = of_facts("scan", problem.attrs(), facts_of(problem.operands()))
    assert code in {reason.code for reason in kernels("scan")[name].check(context)}


@pytest.mark.parametrize("name", ["chunked_scan", "associative_scan", "triton_scan", "fla_scan"])
def test_a_descriptor_says_what_was_measured_on_a_gpu_and_what_never_was(name):
    described = json.loads((KERNELS / "scan" / f"{name}.json").read_text())
    for entry in (each for entries in described["ops"].values() for each in entries):
        decides = any(row["platform"] != "cpu" and row["relative_latency"] <= 0.9 for row in entry["prior"])
        measured = "on an H100" in entry["prior_source"] or "as lz.triton_scan" in entry["prior_source"]
        assert measured if decides else "never" in entry["prior_source"]


def test_the_op_s_sample_runs_on_every_kernel_that_takes_it():
    sizes = {"batch_size": 1, "num_heads": 2, "length": 9, "key_dim": 4, "value_dim": 4, "rank": 1, "reads": 1}
    for variant in ("delta", "diagonal"):
        problem = sample(sizes, torch.float64, torch.device("cpu"), variant=variant)
        expected = problem.with_kernel(reference)(*problem.inputs)
        for name, spec in HERE.items():
            if name not in COMPILED and spec.operation in ("scan", f"scan.{variant}") and spec.call is not None:
                torch.testing.assert_close(problem.with_kernel(spec.call)(*problem.inputs), expected)


# ---- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [2, 13, 20])
@pytest.mark.parametrize(
    "case", ["kda", "gated_delta_rule", "gated_linear_attention_of_the_past", "linear_attention", "mamba_2", "average"]
)
def test_chunks_have_nan_where_steps_have_it_and_gradients_too(case, place):
    problem = replace(PROBLEMS[case], length=21)
    attrs = problem.attrs()
    for name in problem.operands().given():
        operands = problem.operands()
        spoilt = getattr(operands, name)
        if spoilt.dim() == 5:
            spoilt[0, 0, place, 0, 0] = torch.nan
            found = with_gradients(partial(chunked_scan.scan, chunk=16), operands, attrs)
            assert_near(found, exactly(operands, attrs), 1e-9)
