"""The adapter of flash-linear-attention, run on the CPU against fakes that have the library's recorded signatures."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lz_compile.ground import events, health
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.kernels.scan import fla_scan
from lz_compile.lowering.ops.scan import Operands, ScanAttrs, facts_of, reference
from lz_compile.runtime.kernels.registry import KERNELS, kernels
from lz_compile.runtime.problem.context import of_facts
from tests.fla_fake import SIGNATURES, VERSION, Fla
from tests.library_fakes import installed, parameters_in
from tests.scan_kernel_problems import PROBLEMS, Problem, assert_near, exactly, measured, with_gradients


@dataclass(frozen=True)
class Source:
    """What a model has, of which a scan's operands are products."""

    leaves: dict[str, Tensor]
    erases: bool

    def operands(self, leaves: Mapping[str, Tensor]) -> Operands:
        found = {"query": leaves["query"], "right": leaves["value"]}
        found["left"] = leaves["key"] * leaves["beta"] if self.erases else leaves["key"]
        if "decay" in leaves:
            found["decay"] = leaves["decay"].unsqueeze(-1)
        if self.erases:
            key = leaves["key"]
            found["erase"] = key * leaves["decay"].unsqueeze(3) if "decay" in leaves else key
        if "state" in leaves:
            found["state"] = leaves["state"]
        return Operands(**found)


#: Kernel: the adapter, whether a step erases, and what a decay is one for.
ADAPTERS: dict[str, tuple[Callable[..., Any], bool, str | None]] = {
    "fla.chunk_simple_gla": (fla_scan.simple_gla, False, "scalar"),
    "fla.chunk_gla": (fla_scan.gla, False, "key"),
    "fla.chunk_kda": (fla_scan.kda, True, "key"),
    "fla.chunk_gated_delta_rule": (fla_scan.gated_delta_rule, True, "scalar"),
    "fla.chunk_delta_rule": (fla_scan.delta_rule, True, None),
    "fla.chunk_dplr_delta_rule": (fla_scan.dplr_delta_rule, True, "key"),
}
for_every_adapter = pytest.mark.parametrize("name", ADAPTERS)
decaying = pytest.mark.parametrize("name", [name for name, (_, _, decay) in ADAPTERS.items() if decay])
factored = pytest.mark.parametrize("name", ["fla.chunk_kda", "fla.chunk_gated_delta_rule", "fla.chunk_delta_rule"])


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    for kernel_id in list(health.retirements()):
        health.restore(kernel_id)


def source(name: str, dtype: torch.dtype = torch.float32, length: int = 9, rows: int = 4) -> Source:
    _, erases, decay = ADAPTERS[name]
    steps = (2, 3, length)
    leaves = {
        "query": torch.randn(*steps, 1, rows),
        "key": F.normalize(torch.randn(*steps, 1, rows), dim=-1),
        "value": torch.randn(*steps, 1, 5),
        "state": torch.randn(2, 3, rows, 5),
    }
    if erases:
        leaves["beta"] = torch.rand(*steps, 1, 1)
    if decay is not None:
        leaves["decay"] = torch.rand(*steps, rows if decay == "key" else 1) * 0.7 + 0.3
    return Source({each: x.to(dtype) for each, x in leaves.items()}, erases)


def dtypes(name: str) -> list[torch.dtype]:
    return [getattr(torch, each) for each in sorted(kernels("scan")[name].dtypes)]


def attributes(name: str, dtype: torch.dtype) -> ScanAttrs:
    return ScanAttrs(erases=ADAPTERS[name][1], out_dtype=dtype, state_dtype=torch.float32)


def of_leaves(scan: Callable[..., Any], given: Source, attrs: ScanAttrs) -> Callable[..., Any]:
    return lambda **leaves: scan(given.operands(leaves), attrs)


def check(name: str, given: Source, dtype: torch.dtype, *, calls: bool, tolerance: float | None = None) -> None:
    """Results and gradients of what the model has are the reference's, and the library ran or did not."""
    attrs = attributes(name, dtype)
    with installed(Fla()) as library:
        found = measured(of_leaves(ADAPTERS[name][0], given, attrs), given.leaves)
    assert not health.retirements()
    assert set(library.calls) == ({name.partition(".")[2]} if calls else set())
    exact = replace(attrs, compute_dtype=torch.float64, out_dtype=torch.float64, state_dtype=torch.float64)
    wide = {each: x.double() for each, x in given.leaves.items()}
    expected = measured(of_leaves(reference, given, exact), wide)
    assert_near(found, expected, tolerance or {4: 1e-4, 2: 6e-2}[dtype.itemsize])


@for_every_adapter
def test_the_library_computes_the_reference_with_gradients(name):
    for dtype in dtypes(name):
        check(name, source(name, dtype), dtype, calls=True)


@for_every_adapter
def test_no_state_to_start_from_is_none_for_the_library(name):
    given = source(name, torch.bfloat16)
    del given.leaves["state"]
    check(name, given, torch.bfloat16, calls=True)


def test_linear_attention_has_no_decay():
    given = source("fla.chunk_simple_gla")
    del given.leaves["decay"]
    check("fla.chunk_simple_gla", given, torch.float32, calls=True)


def test_one_decay_for_a_head_is_one_for_each_row_of_the_general_rule():
    given = source("fla.chunk_dplr_delta_rule", torch.bfloat16)
    given.leaves["decay"] = given.leaves["decay"][..., :1]
    check("fla.chunk_dplr_delta_rule", given, torch.bfloat16, calls=True)


# ---- facts of the data -----------------------------------------------------------------------------------------------


@decaying
@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, 1e-9])
def test_decays_that_have_no_good_logarithm_are_left_to_pytorch(name, value):
    given = source(name, torch.bfloat16 if torch.float32 not in dtypes(name) else torch.float32)
    given.leaves["decay"][1, 2, 3, 0] = value
    check(name, given, given.leaves["decay"].dtype, calls=False)


@factored
def test_steps_that_change_nothing_are_the_library_s(name):
    """Dropped tokens: no strength, no decay."""
    given = source(name, torch.bfloat16)
    given.leaves["beta"][:, :, 2] = 0.0
    if "decay" in given.leaves:
        given.leaves["decay"][:, :, 2] = 1.0
    check(name, given, torch.bfloat16, calls=True)


@factored
def test_gradients_of_a_key_of_zero_are_left_to_pytorch(name):
    given = source(name, torch.bfloat16)
    given.leaves["key"][:, :, 4] = 0.0
    attrs = attributes(name, torch.bfloat16)
    with installed(Fla()) as library:
        measured(of_leaves(ADAPTERS[name][0], given, attrs), given.leaves)
    assert len(library.calls) == 1, "for the result, not for the gradients"
    check(name, given, torch.bfloat16, calls=True)


@factored
def test_updates_that_write_beside_what_they_erase_are_left_to_pytorch(name):
    given = source(name, torch.bfloat16)
    operands = given.operands(given.leaves)
    operands = replace(operands, left=operands.left + 0.2 * torch.randn_like(operands.left))
    attrs = attributes(name, torch.bfloat16)
    with installed(Fla()) as library:
        found = with_gradients(ADAPTERS[name][0], operands, attrs)
    assert not library.calls
    assert_near(found, exactly(operands, attrs), 6e-2)


def test_the_general_rule_takes_updates_that_write_beside_what_they_erase():
    problem = replace(PROBLEMS["kda"], decay="key")
    operands = problem.operands(torch.bfloat16)
    decay = operands.decay.abs().clamp(0.3, 1.0)
    operands = replace(operands, decay=decay, left=torch.randn_like(operands.left))
    attrs = attributes("fla.chunk_dplr_delta_rule", torch.bfloat16)
    with installed(Fla()) as library:
        reads, last = fla_scan.dplr_delta_rule(operands, attrs)
    assert library.calls
    exact = exactly(operands, attrs)
    assert_near({"reads": reads, "last": last}, {each: exact[each] for each in ("reads", "last")}, 6e-2)


def test_more_rows_than_the_library_takes_are_left_to_pytorch():
    check("fla.chunk_gla", source("fla.chunk_gla", rows=257, length=3), torch.float32, calls=False)


def test_operands_that_broadcast_are_given_in_full():
    problem = replace(PROBLEMS["gated_linear_attention"], shares=True)
    operands = problem.operands(torch.float32)
    operands = replace(operands, decay=operands.decay.abs().clamp(0.2, 1.0)[:, :, :1])
    attrs = attributes("fla.chunk_gla", torch.float32)
    with installed(Fla()) as library:
        found = with_gradients(fla_scan.gla, operands, attrs)
    assert library.calls
    assert_near(found, exactly(operands, attrs), 1e-4)


# ---- in a graph ------------------------------------------------------------------------------------------------------


@for_every_adapter
def test_a_call_breaks_no_graph(name):
    given = source(name, torch.bfloat16)
    text = encode(attributes(name, torch.bfloat16))
    operator = getattr(torch.ops.layerzero, f"fla_{name.partition('.')[2]}")

    def run(**leaves: Tensor) -> tuple[Tensor, Tensor]:
        reads, last = operator(*given.operands(leaves).flat(), text)
        return reads, last

    torch._dynamo.reset()
    with installed(Fla()) as library:
        found = measured(torch.compile(run, backend="aot_eager", fullgraph=True), given.leaves)
        assert len(library.calls) == 2, "once for the result, once more for the gradients"
        expected = measured(run, given.leaves)
    assert_near(found, {each: x.double() for each, x in expected.items()}, 1e-2)


@for_every_adapter
def test_an_operator_is_what_pytorch_asks_of_one(name):
    given = source(name, torch.bfloat16, length=3)
    operands = given.operands(given.leaves)
    operator = getattr(torch.ops.layerzero, f"fla_{name.partition('.')[2]}").default
    with installed(Fla()):
        results = torch.library.opcheck(operator, (*operands.flat(), encode(attributes(name, torch.bfloat16))))
    assert set(results.values()) == {"SUCCESS"}, results


@for_every_adapter
def test_a_library_that_fails_is_completed_by_pytorch_and_retired(name):
    given = source(name, torch.bfloat16)
    attrs = attributes(name, torch.bfloat16)
    operands = given.operands(given.leaves)
    with installed(Fla()) as library, events.collect() as happened:
        library.fails = True
        for _ in range(2):
            reads, last = ADAPTERS[name][0](operands, attrs)
    assert len(library.calls) == 1, "what is retired is not tried again"
    assert "no kernel image is available" in str(health.retired(name))
    assert "KERNEL_FAILED" in {event.code for event in happened}
    exact = exactly(operands, attrs)
    assert_near({"reads": reads, "last": last}, {each: exact[each] for each in ("reads", "last")}, 6e-2)


# ---- what is said of them --------------------------------------------------------------------------------------------


def reasons_against(name: str, problem: Problem) -> set[str]:
    context = of_facts("scan", problem.attrs(torch.bfloat16), facts_of(problem.operands(torch.bfloat16)))
    ours = {"FEATURE_MISSING", "VARIANT_UNSUPPORTED"}
    found = {reason.code for reason in kernels("scan")[name].check(context)}
    return {code for code in found if code in ours or code.endswith("_UNSUPPORTED")} - {"BACKEND_VERSION_UNSUPPORTED"}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("fla.chunk_simple_gla", {"linear_attention", "mamba_2", "retention"}),
        ("fla.chunk_gla", {"gated_linear_attention"}),
        ("fla.chunk_kda", {"kda", "kda_shared_keys"}),
        ("fla.chunk_gated_delta_rule", {"gated_delta_rule"}),
        ("fla.chunk_delta_rule", {"delta_rule"}),
        ("fla.chunk_dplr_delta_rule", {"kda", "kda_shared_keys", "gated_delta_rule", "delta_rule"}),
    ],
)
def test_a_kernel_is_for_the_steps_that_it_computes(name, taken):
    found = {case for case, problem in PROBLEMS.items() if not reasons_against(name, problem)}
    assert found - {"one_step"} == taken


@for_every_adapter
def test_a_kernel_that_no_cuda_graph_may_capture_tells_inductor_so(name):
    spec = kernels("scan")[name]
    assert spec.platforms == {"cuda"}
    assert spec.is_opaque
    assert not spec.is_cuda_graph_safe
    operator = getattr(torch.ops.layerzero, f"fla_{name.partition('.')[2]}_kernel").default
    assert torch.Tag.cudagraph_unsafe in operator.tags


def test_a_descriptor_names_the_source_of_its_limits():
    found = json.loads((KERNELS / "scan" / "fla_scan.json").read_text())
    assert found["package"] in found["source"]
    assert VERSION in found["backend_version"]
    for _, _, file in SIGNATURES.values():
        assert file in found["source"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_recorded_signatures_are_those_of_the_installed_library(name):
    try:
        distribution = importlib.metadata.distribution("fla-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs fla-core; its signatures are recorded from version {VERSION}")
    _, parameters, file = SIGNATURES[name]
    assert parameters_in(Path(str(distribution.locate_file(file))).read_text(), name) == parameters
