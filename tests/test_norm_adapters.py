"""Adapters of other libraries' norms, run on the CPU against fakes that have the libraries' recorded signatures."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lz_compile.ground import events, health
from lz_compile.lowering.kernels.norm import torch_norm
from lz_compile.lowering.ops.norm import NormAttrs, NormFacts, Operands, features, reference
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.problem.context import of_facts
from tests.library_fakes import Library, installed
from tests.norm_library_fakes import Apex, FlashInferNorm, Liger, Quack

KERNELS = Path(torch_norm.__file__).parent
#: The adapters, as kernel id: module, function, and the library that it calls.
ADAPTERS: dict[str, tuple[str, str, Callable[[], Library]]] = {
    "liger.rms_norm": ("liger_norm", "norm", Liger),
    "liger.layer_norm": ("liger_norm", "layer_norm", Liger),
    "flashinfer.rmsnorm": ("flashinfer_norm", "norm", FlashInferNorm),
    "quack.rmsnorm": ("quack_norm", "norm", Quack),
    "apex.rms_norm": ("apex_norm", "norm", Apex),
    "apex.layer_norm": ("apex_norm", "layer_norm", Apex),
}
#: Absolute and relative error that rounding to a dtype explains, twice where a source rounds the row as well.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

for_every_adapter = pytest.mark.parametrize("kernel", ADAPTERS)
for_every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])

_CASES = {
    "rms": NormAttrs(eps=1e-6, has_weight=True),
    "rms_rounded_before_the_weight": NormAttrs(eps=1e-6, has_weight=True, rounded_to=torch.float16),
    "rms_without_weight": NormAttrs(eps=1e-6),
    "rms_plus_one": NormAttrs(eps=1e-6, has_weight=True, weight_offset=1.0),
    "rms_plus_half": NormAttrs(eps=1e-6, has_weight=True, weight_offset=0.5),
    "rms_bias": NormAttrs(eps=1e-6, has_weight=True, has_bias=True),
    "rms_bias_alone": NormAttrs(eps=1e-6, has_bias=True),
    "rms_wide": NormAttrs(eps=1e-6, has_weight=True, out_dtype=torch.float64),
    "rms_outside": NormAttrs(eps=1e-6, has_weight=True, eps_at="outside"),
    "layer": NormAttrs(True, eps=1e-5, has_weight=True, has_bias=True),
    "layer_without_bias": NormAttrs(True, eps=1e-5, has_weight=True),
    "layer_without_weights": NormAttrs(True, eps=1e-5),
    "layer_floor": NormAttrs(True, eps=1e-5, eps_at="floor", has_weight=True, has_bias=True),
}
#: What a descriptor claims (with input dtypes of its own).
_CLAIMED = {
    "liger.rms_norm": {"rms", "rms_rounded_before_the_weight", "rms_without_weight", "rms_plus_one", "rms_plus_half"},
    "liger.layer_norm": {"layer"},
    "flashinfer.rmsnorm": {"rms", "rms_rounded_before_the_weight", "rms_plus_one", "rms_plus_half"},
    "quack.rmsnorm": {
        *("rms", "rms_rounded_before_the_weight", "rms_without_weight", "rms_plus_one", "rms_plus_half"),
        *("rms_bias", "rms_wide"),
    },
    "apex.rms_norm": {"rms", "rms_rounded_before_the_weight", "rms_without_weight"},
    "apex.layer_norm": {"layer", "layer_without_weights"},
}


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    yield
    for kernel_id in list(health.retirements()):
        health.restore(kernel_id)


def adapter(kernel: str) -> Callable[..., Tensor]:
    module, function, _ = ADAPTERS[kernel]
    return getattr(importlib.import_module(f"lz_compile.lowering.kernels.norm.{module}"), function)


def library(kernel: str) -> Library:
    return ADAPTERS[kernel][2]()


def attributes(case: str, dtype: torch.dtype) -> NormAttrs:
    attrs = _CASES[case]
    return attrs if attrs.out_dtype == torch.float64 else replace(attrs, out_dtype=dtype)


def operands(attrs: NormAttrs, dtype: torch.dtype, rows: int = 5, hidden: int = 24) -> dict[str, Tensor]:
    found = {"input": torch.randn(rows, hidden).to(dtype)}
    if attrs.has_weight:
        found["weight"] = torch.randn(hidden).to(dtype)
    if attrs.has_bias:
        found["bias"] = torch.randn(hidden).to(dtype)
    return found


def reasons_against(kernel: str, attrs: NormAttrs, *, needs_grad: bool = False) -> set[str]:
    """Codes of what speaks against a kernel because of what the norm is, not of where it would run."""
    facts = NormFacts(5, 24, torch.bfloat16, "cuda", needs_grad)
    needed = {f"{feature.upper()}_UNSUPPORTED" for feature in features(attrs, facts)}
    found = kernels("norm")[kernel].check(of_facts("norm", attrs, facts))
    return {reason.code for reason in found} & {*needed, "FEATURE_MISSING", "VARIANT_UNSUPPORTED"}


def runs(kernel: str, dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in kernels("norm")[kernel].dtypes


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", _CASES)
@for_every_adapter
def test_a_descriptor_claims_what_its_adapter_computes(kernel, case):
    attrs = attributes(case, torch.bfloat16)
    assert (not reasons_against(kernel, attrs)) == (case in _CLAIMED[kernel])


@pytest.mark.sampled
@pytest.mark.parametrize("case", _CASES)
@for_every_dtype
@for_every_adapter
def test_an_adapter_gives_what_the_reference_gives(kernel, dtype, case):
    if case not in _CLAIMED[kernel] or not runs(kernel, dtype):
        return
    attrs = attributes(case, dtype)
    given = operands(attrs, dtype)
    with installed(library(kernel)):
        actual = adapter(kernel)(Operands(**given), attrs)
    assert actual.dtype == attrs.out_dtype
    assert not health.retirements()
    exact = reference(
        Operands(**{name: x.double() for name, x in given.items()}), replace(attrs, out_dtype=torch.float64)
    )
    torch.testing.assert_close(actual.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@for_every_adapter
def test_an_adapter_calls_its_library_whatever_the_memory_order(kernel):
    case = "layer" if "layer" in kernel else "rms_rounded_before_the_weight"
    dtype = torch.float32 if runs(kernel, torch.float32) else torch.float16
    attrs = attributes(case, dtype)
    given = {name: x.T.contiguous().T if x.dim() == 2 else x for name, x in operands(attrs, dtype).items()}
    with installed(library(kernel)) as used:
        actual = adapter(kernel)(Operands(**given), attrs)
    assert used.calls
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, reference(Operands(**given), attrs), atol=4e-3, rtol=4e-3)


def called(kernel: str, attrs: NormAttrs, dtype: torch.dtype, **others: Any) -> list[str]:
    """The calls of the library; the result is right in any case."""
    given = {**operands(attrs, dtype), **others}
    with installed(library(kernel)) as used:
        actual = adapter(kernel)(Operands(**given), attrs)
    assert not health.retirements()
    expected = reference(Operands(**given), attrs)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return used.calls


def test_flashinfer_has_a_function_for_weights_plus_one_and_none_for_other_offsets():
    assert called("flashinfer.rmsnorm", attributes("rms", torch.float16), torch.float16) == ["rmsnorm"]
    assert called("flashinfer.rmsnorm", attributes("rms_plus_one", torch.float16), torch.float16) == ["gemma_rmsnorm"]
    assert not called("flashinfer.rmsnorm", attributes("rms_plus_half", torch.float16), torch.float16)


@pytest.mark.parametrize("kernel", ["flashinfer.rmsnorm", "apex.rms_norm"])
def test_a_weight_that_the_library_would_round_is_left_to_pytorch(kernel):
    attrs = replace(attributes("rms", torch.bfloat16), rounded_to=torch.bfloat16)
    assert called(kernel, attrs, torch.bfloat16)
    assert not called(kernel, attrs, torch.bfloat16, weight=torch.randn(24))


@pytest.mark.parametrize("kernel", ["liger.rms_norm", "quack.rmsnorm"])
def test_a_library_that_takes_any_weight_is_given_one_of_another_dtype(kernel):
    assert called(kernel, attributes("rms", torch.bfloat16), torch.bfloat16, weight=torch.randn(24))


def test_apex_rounds_the_row_so_that_only_sources_that_do_so_use_it():
    assert not called("apex.rms_norm", attributes("rms", torch.bfloat16), torch.bfloat16)
    assert called("apex.rms_norm", attributes("rms_rounded_before_the_weight", torch.bfloat16), torch.bfloat16)
    assert called("apex.rms_norm", attributes("rms_without_weight", torch.bfloat16), torch.bfloat16)
    assert called("apex.rms_norm", attributes("rms", torch.float32), torch.float32)
    assert kernels("norm")["apex.layer_norm"].dtypes == {"float32"}


@for_every_adapter
def test_a_source_that_computes_in_float64_is_left_to_pytorch(kernel):
    case = "layer" if "layer" in kernel else "rms_rounded_before_the_weight"
    assert not called(kernel, replace(attributes(case, torch.float16), compute_dtype=torch.float64), torch.float16)


@for_every_adapter
def test_no_rows_call_no_library(kernel):
    attrs = attributes("layer" if "layer" in kernel else "rms_rounded_before_the_weight", torch.float16)
    with installed(library(kernel)) as used:
        assert adapter(kernel)(Operands(**operands(attrs, torch.float16, rows=0)), attrs).shape == (0, 24)
    assert not used.calls
    assert not health.retirements()


@pytest.mark.parametrize("kernel", ["liger.rms_norm", "liger.layer_norm"])
def test_rows_that_liger_refuses_are_not_given_to_it(kernel):
    attrs = attributes("layer" if "layer" in kernel else "rms", torch.float32)
    given = operands(attrs, torch.float32, rows=1, hidden=65537)
    with installed(library(kernel)) as used:
        actual = adapter(kernel)(Operands(**given), attrs)
    assert not used.calls
    assert not health.retirements()
    torch.testing.assert_close(actual, reference(Operands(**given), attrs))


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", _CASES)
@for_every_adapter
def test_gradients_are_those_of_the_reference(kernel, case):
    attrs = attributes(case, torch.float32)
    if case not in _CLAIMED[kernel] or "training" not in kernels("norm")[kernel].supports:
        return
    given = operands(attrs, torch.float32)
    exact_attrs = replace(attrs, out_dtype=torch.float64)
    with installed(library(kernel)):
        actual = gradients(adapter(kernel), given, attrs)
    expected = gradients(reference, {name: x.double() for name, x in given.items()}, exact_attrs)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


def gradients(function: Callable[..., Tensor], given: dict[str, Tensor], attrs: NormAttrs) -> Sequence[Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    return torch.autograd.grad(function(Operands(**leaves), attrs).cos().sum(), list(leaves.values()))


def test_flashinfer_has_no_gradients():
    attrs = attributes("rms", torch.float16)
    assert "TRAINING_UNSUPPORTED" in reasons_against("flashinfer.rmsnorm", attrs, needs_grad=True)


# ---- failures --------------------------------------------------------------------------------------------------------


@for_every_adapter
def test_a_library_that_fails_is_completed_by_pytorch_and_retired(kernel):
    dtype = torch.float32 if runs(kernel, torch.float32) else torch.float16
    attrs = attributes("layer" if "layer" in kernel else "rms_rounded_before_the_weight", dtype)
    given = operands(attrs, dtype)
    with installed(library(kernel)) as used, events.collect() as happened:
        used.fails = True
        for _ in range(2):
            actual = adapter(kernel)(Operands(**given), attrs)
            torch.testing.assert_close(actual, reference(Operands(**given), attrs))
    assert len(used.calls) == 1, "what is retired is not tried again"
    assert "no kernel image is available" in str(health.retired(kernel))
    assert "KERNEL_FAILED" in {event.code for event in happened}


# ---- what is said of them --------------------------------------------------------------------------------------------


@for_every_adapter
def test_a_kernel_that_no_cuda_graph_may_capture_tells_inductor_so(kernel):
    spec = kernels("norm")[kernel]
    assert spec.is_opaque
    assert not spec.is_cuda_graph_safe
    name = kernel.replace(".", "_")
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.layerzero, f"{name}_kernel").default.tags


@for_every_adapter
def test_an_operator_is_what_pytorch_asks_of_one(kernel):
    from lz_compile.lowering.attributes import encode

    attrs = attributes("layer" if "layer" in kernel else "rms_rounded_before_the_weight", torch.float16)
    given = operands(attrs, torch.float16)
    tensors = (given["input"], given["weight"], given.get("bias"))
    with installed(library(kernel)):
        adapter(kernel)(Operands(**given), attrs)  # the operator is there from the first call on
        operator = getattr(torch.ops.layerzero, kernel.replace(".", "_")).default
        results = torch.library.opcheck(operator, (*tensors, encode(attrs)))
    assert set(results.values()) == {"SUCCESS"}, results


@for_every_adapter
def test_a_descriptor_names_the_function_and_the_source_of_its_limits(kernel):
    module, function, _ = ADAPTERS[kernel]
    found = json.loads((KERNELS / f"{module}.json").read_text())
    (entry,) = (each for entries in found["ops"].values() for each in entries if each["kernel_id"] == kernel)
    assert entry.get("function", "norm") == function
    assert found["package"] in found["source"]
    assert entry["platforms"] == ["cuda"]
    assert entry["prior"] == []
