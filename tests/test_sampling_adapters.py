"""Adapters of other libraries' masks and limits, run on the CPU against fakes that have the libraries' recorded signatures."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lz_compile.domains.mask import pack
from lz_compile.ground import events, health
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.kernels.sampling import cpp_sampling, torch_sampling
from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs, SamplingFacts, features, reference
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.problem.context import of_facts
from tests.library_fakes import Library, installed
from tests.sampling_library_fakes import FlashInferSampling, XGrammar

KERNELS = Path(torch_sampling.__file__).parent
#: The adapters, as kernel id: module, function, result, and the library that it calls.
ADAPTERS: dict[str, tuple[str, str, str, Callable[[], Library]]] = {
    "flashinfer.top_k_scores": ("flashinfer_sampling", "top_k_scores", "scores", FlashInferSampling),
    "flashinfer.top_k_probs": ("flashinfer_sampling", "top_k_probs", "probs", FlashInferSampling),
    "flashinfer.top_p_probs": ("flashinfer_sampling", "top_p_probs", "probs", FlashInferSampling),
    "xgrammar.bitmask": ("xgrammar_bitmask", "sampling", "scores", XGrammar),
}
_TOP_K = ("top_k bitmask,top_k temperature,top_k bias,top_k bitmask,bias,temperature,top_k").split()
#: What a descriptor claims, of all combinations of operands.
CLAIMED = {
    "flashinfer.top_k_scores": _TOP_K,
    "flashinfer.top_k_probs": _TOP_K,
    "flashinfer.top_p_probs": [
        *("top_p", "bitmask,top_p", "bias,top_p", "temperature,top_p", "top_k,top_p"),
        "bitmask,bias,temperature,top_k,top_p",
    ],
    "xgrammar.bitmask": ["bitmask"],
}
REFUSED = (
    "bias temperature min_p top_k,min_p top_p,min_p bitmask,min_p bitmask,temperature bias,bitmask,temperature".split()
)
EVERYTHING = sorted({*REFUSED, *(case for cases in CLAIMED.values() for case in cases)})
#: Absolute and relative error that rounding the result explains.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

for_every_adapter = pytest.mark.parametrize("kernel", ADAPTERS)
for_every_claim = pytest.mark.parametrize(
    ("kernel", "case"), [(kernel, case) for kernel, cases in CLAIMED.items() for case in cases]
)
for_every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
for_flashinfer = pytest.mark.parametrize("kernel", [kernel for kernel in ADAPTERS if kernel.startswith("flashinfer")])
for_its_probabilities = pytest.mark.parametrize("kernel", [kernel for kernel in ADAPTERS if kernel.endswith("probs")])


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    yield
    for kernel_id in list(health.retirements()):
        health.restore(kernel_id)


def adapter(kernel: str) -> Callable[..., Tensor]:
    module, function, *_ = ADAPTERS[kernel]
    return getattr(importlib.import_module(f"lz_compile.lowering.kernels.sampling.{module}"), function)


def library(kernel: str) -> Library:
    return ADAPTERS[kernel][3]()


def attributes(kernel: str, given: dict[str, Tensor], out_dtype: torch.dtype | None = None) -> SamplingAttrs:
    return SamplingAttrs.of(given, ADAPTERS[kernel][2], out_dtype or given["logits"].dtype)


def operands(case: str, dtype: torch.dtype = torch.float32, rows: int = 7, vocab: int = 300) -> dict[str, Tensor]:
    """Operands in the op's order; limits and temperatures that are off, or the least there are, in some rows each."""
    found = {
        "logits": (torch.randn(rows, vocab) * 3).to(dtype),
        "bitmask": torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=torch.int32),
        "bias": torch.randn(1, vocab).to(dtype),
        "temperature": torch.tensor([0.7, 0.0, 1.5, 1.0, 0.3, 1.0, 2.0]).repeat(rows)[:rows],
        "top_k": torch.tensor([5, 3, 0, 1, 100_000, 20, 250], dtype=torch.int32).repeat(rows)[:rows],
        "top_p": torch.tensor([0.9, 0.5, 0.3, 1.0, 1e-9, 0.99, 0.7]).repeat(rows)[:rows],
        "min_p": torch.full((rows,), 0.1),
    }
    found["bitmask"][:, 0] |= 1
    return {name: found[name] for name in Operands.names if name in ("logits", *case.split(","))}


def exact(given: dict[str, Tensor], attrs: SamplingAttrs) -> Tensor:
    wide = {name: each.double() if each.is_floating_point() else each for name, each in given.items()}
    return reference(Operands(**wide), replace(attrs, out_dtype=torch.float64))


def assert_near(actual: Tensor, given: dict[str, Tensor], attrs: SamplingAttrs) -> None:
    """The result to rounding, and of finite rows the very same tokens."""
    expected = exact(given, attrs)
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance * 0.1, rtol=tolerance, equal_nan=True)
    nothing = -math.inf if attrs.result == "scores" else 0
    assert torch.equal(actual > nothing, expected.to(actual.dtype) > nothing)


def reasons_against(kernel: str, attrs: SamplingAttrs, *, needs_grad: bool = False) -> set[str]:
    """What speaks against a kernel because of what the sampling is, not of where it would run."""
    facts = SamplingFacts(7, 300, torch.bfloat16, "cuda", needs_grad)
    needed = {f"{feature.upper()}_UNSUPPORTED" for feature in features(attrs, facts)}
    found = kernels("sampling")[kernel].check(of_facts("sampling", attrs, facts))
    return {reason.message for reason in found if reason.code in {*needed, "FEATURE_MISSING", "VARIANT_UNSUPPORTED"}}


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERYTHING)
@for_every_adapter
def test_a_descriptor_claims_what_its_adapter_computes(kernel, case):
    attrs = attributes(kernel, operands(case))
    assert (not reasons_against(kernel, attrs)) == (case in CLAIMED[kernel])


@for_every_claim
@for_every_dtype
def test_an_adapter_gives_what_the_reference_gives(kernel, case, dtype):
    given = operands(case, dtype)
    attrs = attributes(kernel, given)
    with installed(library(kernel)) as used:
        actual = adapter(kernel)(Operands(**given), attrs)
    assert used.calls
    assert not health.retirements()
    assert actual.dtype == dtype
    assert_near(actual, given, attrs)


@pytest.mark.parametrize("vocab", [1, 31, 2100])
@for_every_claim
def test_vocabularies_may_have_any_size(kernel, case, vocab):
    given = operands(case, vocab=vocab)
    attrs = attributes(kernel, given)
    with installed(library(kernel)):
        actual = adapter(kernel)(Operands(**given), attrs)
    assert not health.retirements()
    assert_near(actual, given, attrs)


@for_every_adapter
def test_the_result_has_the_dtype_that_is_asked_for_and_operands_are_left_alone(kernel):
    given = operands(CLAIMED[kernel][0], torch.bfloat16)
    before = {name: each.clone() for name, each in given.items()}
    for dtype in (torch.float32, torch.float64, torch.float16):
        attrs = attributes(kernel, given, dtype)
        with installed(library(kernel)):
            actual = adapter(kernel)(Operands(**given), attrs)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), exact(given, attrs), atol=1e-3, rtol=1e-3)
    assert all(torch.equal(each, before[name]) for name, each in given.items())
    assert not health.retirements()


@for_every_adapter
def test_one_limit_and_one_mask_may_serve_all_rows(kernel):
    case = CLAIMED[kernel][-1]
    given = {name: each if name == "logits" else each[:1] for name, each in operands(case).items()}
    attrs = attributes(kernel, given)
    with installed(library(kernel)) as used:
        actual = adapter(kernel)(Operands(**given), attrs)
    assert used.calls
    assert not health.retirements()
    assert_near(actual, given, attrs)


@for_every_claim
def test_an_adapter_calls_its_library_whatever_the_place_in_memory(kernel, case):
    given = operands(case)
    attrs = attributes(kernel, given)
    columns = {name: each.T.contiguous().T if each.dim() == 2 else each for name, each in given.items()}
    gaps = {name: torch.stack((each, each), -1)[..., 0] for name, each in given.items()}
    wide = {name: torch.cat((each, each), -1)[:, : each.shape[1]] for name, each in given.items() if each.dim() == 2}
    beside = {name: torch.cat((each.new_zeros(1), each.flatten()))[1:].view_as(each) for name, each in given.items()}
    for moved in (columns, gaps, {**given, **wide}, beside):
        with installed(library(kernel)) as used:
            actual = adapter(kernel)(Operands(**moved), attrs)
        assert used.calls
        assert not health.retirements()
        assert actual.is_contiguous()
        assert_near(actual, given, attrs)


@for_flashinfer
def test_equally_likely_tokens_are_kept_together(kernel):
    limit = {"top_k": torch.tensor([2], dtype=torch.int32)} if "top_k" in kernel else {"top_p": torch.tensor([0.3])}
    given = {"logits": torch.tensor([[1.0, 0.0, 1.0, -0.0, 1.0, -2.0], [0.0, 0.0, -0.0, -1.0, -1.0, -1.0]]), **limit}
    attrs = attributes(kernel, given)
    with installed(library(kernel)):
        actual = adapter(kernel)(Operands(**given), attrs)
    kept = [[True, False, True, False, True, False], [True, True, True, False, False, False]]
    assert (actual > (-math.inf if attrs.result == "scores" else 0)).tolist() == kept


@for_flashinfer
def test_at_temperature_zero_the_likeliest_are_kept_whatever_the_limits(kernel):
    given = operands("temperature,top_p" if kernel.endswith("top_p_probs") else "temperature,top_k", rows=3)
    given["logits"][:, 5:8] = 50.0
    given["temperature"][:] = 0
    attrs = attributes(kernel, given)
    with installed(library(kernel)):
        actual = adapter(kernel)(Operands(**given), attrs)
    expected = torch.full((3, 300), -math.inf)
    expected[:, 5:8] = 50.0
    torch.testing.assert_close(actual, expected if attrs.result == "scores" else expected.softmax(-1))


@for_its_probabilities
def test_a_limit_that_keeps_all_changes_nothing(kernel):
    limit = {"top_k": torch.zeros(4, dtype=torch.int32)} if "top_k" in kernel else {"top_p": torch.ones(4)}
    for vocab in (300, 2100):
        given = {"logits": torch.randn(4, vocab), **limit}
        with installed(library(kernel)):
            actual = adapter(kernel)(Operands(**given), attributes(kernel, given))
        torch.testing.assert_close(actual, given["logits"].softmax(-1))
        assert (actual > 0).all()


def test_a_top_p_of_nothing_keeps_the_likeliest():
    given = {"logits": torch.randn(3, 300), "top_p": torch.tensor([0.0, -1.0, 0.5])}
    attrs = attributes("flashinfer.top_p_probs", given)
    with installed(FlashInferSampling()) as used:
        actual = adapter("flashinfer.top_p_probs")(Operands(**given), attrs)
    assert used.calls
    assert not health.retirements()
    assert_near(actual, given, attrs)
    assert (actual[:2] == 1).sum(-1).tolist() == [1, 1]


def test_top_p_is_of_what_top_k_leaves():
    given = {"logits": torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]]).log(), "top_k": torch.tensor([2], dtype=torch.int32)}
    given["logits"] = given["logits"].clamp(min=-9.0)
    given["top_p"] = torch.tensor([0.5])  # 4 of 10 are not enough, 4 of 7 are
    with installed(FlashInferSampling()):
        actual = adapter("flashinfer.top_p_probs")(Operands(**given), attributes("flashinfer.top_p_probs", given))
    assert actual.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]


# ---- rows that are no distribution -------------------------------------------------------------------------------------


@for_every_claim
def test_rows_without_a_distribution_spoil_no_others(kernel, case):
    given = operands(case, rows=5)
    given["logits"][1, 7], given["logits"][2, 0], given["logits"][3] = math.nan, math.inf, -math.inf
    if "bitmask" in given:
        given["bitmask"][:4] = -1
        given["bitmask"][4] = 0
    attrs = attributes(kernel, given)
    with installed(library(kernel)):
        actual = adapter(kernel)(Operands(**given), attrs)
    assert not health.retirements()
    torch.testing.assert_close(actual.double(), exact(given, attrs), atol=1e-6, rtol=1e-5, equal_nan=True)
    if attrs.result == "probs":
        assert actual[1:4].isnan().all()
        assert not actual[0].isnan().any()
    elif "temperature" not in given and "bias" not in given:
        assert torch.equal(actual[1:4].nan_to_num(7), given["logits"][1:4].nan_to_num(7)), "of its scores all are kept"


@for_every_adapter
def test_what_is_masked_may_be_anything(kernel):
    case = next(case for case in CLAIMED[kernel] if "bitmask" in case)
    given = operands(case, rows=3)
    given["logits"][0, 40], given["logits"][1, 41] = math.nan, math.inf
    given["bitmask"][:, 1] &= ~((1 << 8) | (1 << 9))
    attrs = attributes(kernel, given)
    with installed(library(kernel)):
        actual = adapter(kernel)(Operands(**given), attrs)
    assert not actual.isnan().any()
    assert_near(actual, given, attrs)


# ---- refusals --------------------------------------------------------------------------------------------------------


@for_every_adapter
def test_what_is_not_offered_is_told(kernel):
    given = operands(CLAIMED[kernel][0])
    attrs = attributes(kernel, given)
    (min_p,) = reasons_against(kernel, replace(attrs, has_min_p=True))
    assert min_p == f"{kernel} does not take min-p"
    (gradients,) = reasons_against(kernel, attrs, needs_grad=True)
    assert gradients == f"{kernel} does not take gradients"


@for_flashinfer
def test_flashinfer_is_not_asked_to_break_ties(kernel):
    attrs = replace(attributes(kernel, operands("top_k,top_p")), top_k_ties="first", has_top_p="top_p" in kernel)
    asked = features(attrs, SamplingFacts(7, 300, torch.float32, "cuda"))["ties"]
    assert reasons_against(kernel, attrs) == {f"{kernel} does not take {asked}"}


def test_no_library_draws_a_token():
    assert not set(ADAPTERS) & set(kernels("sampling.ids"))
    for kernel, (_, _, result, _) in ADAPTERS.items():
        ids = replace(attributes(kernel, operands(CLAIMED[kernel][0])), result="ids")
        assert reasons_against(kernel, ids) == {f"{kernel} computes sampling.{result}, not sampling.ids"}
        assert "random" not in kernels("sampling")[kernel].supports


@for_every_adapter
def test_a_library_that_is_not_installed_is_the_reason_why_its_kernel_is_not_used(kernel):
    package = json.loads((KERNELS / f"{ADAPTERS[kernel][0]}.json").read_text())["package"]
    reason = kernels("sampling")[kernel].availability()
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        assert (reason.code, reason.message) == ("NOT_INSTALLED", f"{package} is not installed")
    else:
        assert reason is None or reason.code == "BACKEND_VERSION_UNSUPPORTED"


# ---- failures and compiled code ----------------------------------------------------------------------------------------


@for_every_adapter
def test_a_library_that_fails_is_completed_by_pytorch_and_retired(kernel):
    given = operands(CLAIMED[kernel][-1])
    attrs = attributes(kernel, given)
    with installed(library(kernel)) as used, events.collect() as happened:
        used.fails = True
        for _ in range(2):
            assert_near(adapter(kernel)(Operands(**given), attrs), given, attrs)
    assert len(used.calls) == 1, "what is retired is not tried again"
    assert "no kernel image is available" in str(health.retired(kernel))
    assert "KERNEL_FAILED" in {event.code for event in happened}


@for_every_adapter
def test_no_rows_call_no_library(kernel):
    given = {name: each[:0] for name, each in operands(CLAIMED[kernel][-1]).items()}
    with installed(library(kernel)) as used:
        assert adapter(kernel)(Operands(**given), attributes(kernel, given)).shape == (0, 300)
    assert not used.calls


@for_every_adapter
def test_an_adapter_is_one_node_of_a_traced_graph(kernel):
    given = operands(CLAIMED[kernel][-1])
    attrs = attributes(kernel, given)
    call = adapter(kernel)
    with installed(library(kernel)) as used, torch.no_grad():
        traced = make_fx(lambda given: call(Operands(**given), attrs), tracing_mode="symbolic")(given)
        assert not used.calls
        (node,) = (node for node in traced.graph.nodes if node.op == "call_function")
        assert str(node.target) == f"layerzero.{_operator(kernel)}_kernel.default"
        actual = traced(given)
    assert used.calls
    assert_near(actual, given, attrs)


@for_every_adapter
def test_an_operator_is_what_pytorch_asks_of_one(kernel):
    given = operands(CLAIMED[kernel][-1])
    values: list[Any] = [given.get(name) for name in Operands.names]
    operator = getattr(torch.ops.layerzero, _operator(kernel)).default
    with installed(library(kernel)):
        results = torch.library.opcheck(operator, (*values, encode(attributes(kernel, given))))
    assert set(results.values()) == {"SUCCESS"}, results


def _operator(kernel: str) -> str:
    return kernel.replace(".", "_")


@for_every_adapter
def test_a_kernel_that_no_cuda_graph_may_capture_tells_inductor_so(kernel):
    spec = kernels("sampling")[kernel]
    assert spec.is_opaque
    assert not spec.is_cuda_graph_safe
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.layerzero, f"{_operator(kernel)}_kernel").default.tags


@for_every_adapter
def test_a_descriptor_names_the_function_and_the_source_of_its_limits(kernel):
    module, function, result, _ = ADAPTERS[kernel]
    found = json.loads((KERNELS / f"{module}.json").read_text())
    (entry,) = (each for each in found["ops"][f"sampling.{result}"] if each["kernel_id"] == kernel)
    assert entry.get("function", "sampling") == function
    assert found["source"].startswith(found["package"])
    assert entry["prior"] == []


def test_every_library_that_samples_is_tested_here():
    assert {spec.kernel_id for spec in kernels("sampling").values() if spec.package is not None} == set(ADAPTERS)


# ---- the library itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 33, 5000])
@for_every_dtype
def test_xgrammar_itself_masks_as_the_reference_and_our_own_kernel(dtype, vocab):
    pytest.importorskip("xgrammar", reason="needs xgrammar; it runs on a CPU")
    given = operands("bitmask", dtype, vocab=vocab)
    given["logits"][1, 0], given["logits"][2, 0] = math.nan, math.inf
    given["bitmask"][3], given["bitmask"][4] = 0, -1
    given["bitmask"][5] = pack(torch.ones(vocab, dtype=torch.bool))
    wide = torch.cat((given["bitmask"], given["bitmask"]), -1)[:, : given["bitmask"].shape[1]]
    for bitmask in (given["bitmask"], wide, given["bitmask"][:1], given["bitmask"][5:6], wide.T.contiguous().T):
        masked = {"logits": given["logits"], "bitmask": bitmask}
        attrs = attributes("xgrammar.bitmask", masked)
        actual = adapter("xgrammar.bitmask")(Operands(**masked), attrs)
        assert not health.retirements()
        for other in (reference, cpp_sampling.sampling):
            torch.testing.assert_close(actual, other(Operands(**masked), attrs), atol=0, rtol=0, equal_nan=True)
