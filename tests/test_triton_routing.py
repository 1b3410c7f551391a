"""The routed adapter in Triton: that it is the reference (in the interpreter), compiles for GPUs, and can be told apart."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lz_compile.ground import events, health
from lz_compile.lowering.kernels.routing import triton_routing
from lz_compile.lowering.ops.routing import Operands
from lz_compile.runtime.kernels.registry import kernels
from tests.routing_problems import Problem, expected, misses, with_gradients

NAME = "lz.triton_routing"


# ---- for GPUs --------------------------------------------------------------------------------------------------------

_TILE = {"TOKENS": 64, "COLUMNS": 128, "DEPTH": 32, "PRECISION": "tf32", "IS_WIDENED": False}
#: Kernel: the types of its arguments (``x`` a tensor, ``w`` one of float32, ``p`` of int64, ``b`` of booleans, ``i`` a size,
#: ``f`` a number), and constants.
_COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "_project": ("xxxx" + "i" * 8, _TILE),
    "_expand": ("xwpbxxxx" + "i" * 9, {**_TILE, "HAS_PLACE": True, "HAS_KEEP": True, "HAS_START": True}),
    "_sums": ("xxpbw" + "i" * 6, {"HAS_PLACE": True, "HAS_KEEP": True, "TOKENS": 64, "COLUMNS": 128}),
    "_decide": ("wwwwiiff", {"COLUMNS": 256}),
    "_cosines": ("xwwiiif", {"TOKENS": 64, "COLUMNS": 128}),
}


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton, which compiles for a GPU without one")
    if triton.knobs.runtime.interpret:
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.sampled
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("dtype", "is_plain"), [("bf16", False), pytest.param("fp32", True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("backend", "arch", "warp"), [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["cuda", "hip"])
@pytest.mark.parametrize("name", _COMPILED)
def test_a_kernel_compiles_for_a_gpu(name, backend, arch, warp, dtype, is_plain):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants = _COMPILED[name]
    if is_plain:
        constants = {each: value and not each.startswith("HAS") for each, value in constants.items()}
        constants |= {each: _COMPILED[name][1][each] for each in constants if not each.startswith("HAS")}
    kernel = getattr(importlib.import_module("lz_compile.lowering.kernels.routing.triton_source"), name)
    kinds = {"x": f"*{dtype}", "w": "*fp32", "p": "*i64", "b": "*i1", "i": "i32", "f": "fp32"}
    if backend == "hip" and "PRECISION" in constants:
        constants = {**constants, "PRECISION": "ieee"}
    given = iter(types)
    signature = {each: "constexpr" if each in constants else kinds[next(given)] for each in kernel.arg_names}
    assert next(given, None) is None, "every type is an argument's"
    values = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget(backend, arch, warp))
    assert compiled.asm["cubin" if backend == "cuda" else "hsaco"]


# ---- what is said of it, and what happens elsewhere ------------------------------------------------------------------


def test_a_prior_that_decides_says_where_it_was_measured():
    spec = kernels("routing")["lz.triton_routing"]
    assert spec.platforms == {"cuda", "rocm"}
    assert "benchmarks/gpu.py on an H100" in spec.prior_source
    deciding = [row for row in spec.prior if row.relative_latency <= 0.9]  # priors have a noise of a tenth
    assert all(row.features == {"training"} and row.limits for row in deciding)
    assert "token_gate" not in spec.supports


def test_a_gate_for_each_token_is_not_for_this_kernel():
    problem = Problem("none", "token")
    with pytest.raises(AssertionError, match=r"lz.triton_routing is given a gate for each token"):
        triton_routing.routing(Operands(**problem.operands(torch.float32)), problem.attrs(torch.float32))


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    for kernel_id in list(health.retirements()):
        health.restore(kernel_id)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("arm", ["none", "grad", "act"])
def test_a_kernel_that_cannot_be_launched_is_completed_by_pytorch_and_retired(arm, is_packed):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    problem = Problem(arm, "rollout", is_packed)
    operands, attrs = problem.operands(torch.float32), problem.attrs(torch.float32)
    with events.collect() as happened:
        found = with_gradients(triton_routing.routing, operands, attrs)
    assert not list(misses(found, expected(operands, attrs), torch.float32))
    assert health.retired(NAME)
    assert "KERNEL_FAILED" in {event.code for event in happened}


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("arm", ["none", "grad", "act"])
def test_an_adapter_and_its_gradients_are_the_references_on_a_gpu(arm, is_packed, dtype):
    problem = Problem(arm, "rollout", is_packed, True, 5, 200, 300, 260, 40, 16)
    operands = {
        name: each.detach().cuda().requires_grad_(each.requires_grad) if isinstance(each, torch.Tensor) else each
        for name, each in problem.operands(dtype).items()
    }
    attrs = problem.attrs(dtype)
    found = with_gradients(triton_routing.routing, operands, attrs)
    assert not health.retirements()
    assert not list(misses(found, expected(operands, attrs), dtype))
