"""This package's scans in Triton: that they are the reference (in the interpreter), compile for GPUs, and can be told apart."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lz_compile.ground import events, health
from lz_compile.ground.hardware import Hardware
from lz_compile.lowering.kernels.scan import triton_scan
from lz_compile.lowering.ops import scan
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.context import of_facts
from tests.scan_kernel_problems import PROBLEMS, assert_near, exactly, missing, with_gradients

# ---- for GPUs --------------------------------------------------------------------------------------------------------

_STEP = {
    "HAS_STATE": True, "HAS_DECAY": True, "DROPS": False, "DECAY_K": True, "DECAY_V": False, "RANK": 1,
    "ERASES": True, "HAS_DRIVE": False, "DRIVE_K": False, "DRIVE_V": False, "READS": 1, "READS_BEFORE": False, "ROWS": 64, "BLOCK": 16,
}  # fmt: skip
_FULL = {
    **_STEP, "DROPS": True, "DECAY_V": True, "RANK": 2, "HAS_DRIVE": True, "DRIVE_K": True, "READS": 2, "READS_BEFORE": True,
}  # fmt: skip
_CHANNELS = {
    **_STEP, "DROPS": True, "DECAY_K": False, "RANK": 0, "HAS_DRIVE": True, "DRIVE_V": True, "ROWS": 1, "BLOCK": 128,
}  # fmt: skip
_FORWARD, _BACKWARD = ("x" * 9 + "i" * 38, "x" * 9 + "w" * 9 + "i" * 38)
#: Kernel: its module, the types of its arguments (``x`` a tensor, ``w`` one in the wide dtype, ``i`` a size), and constants.
_COMPILED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kda.forward": ("scan.triton_kernels", _FORWARD, _STEP),
    "kda.backward": ("scan.triton_kernels", _BACKWARD, {**_STEP, "SPAN": 32}),
    "everything.forward": ("scan.triton_kernels", _FORWARD, _FULL),
    "everything.backward": ("scan.triton_kernels", _BACKWARD, {**_FULL, "SPAN": 32}),
    "channels.forward": ("scan.triton_kernels", _FORWARD, _CHANNELS),
    "channels.backward": ("scan.triton_kernels", _BACKWARD, {**_CHANNELS, "SPAN": 32}),
}


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton, which compiles for a GPU without one")
    if triton.knobs.runtime.interpret:
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.sampled
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp64", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("backend", "arch", "warp"), [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["cuda", "hip"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "everything" in name else name for name in _COMPILED]
)
def test_a_kernel_compiles_for_a_gpu(name, backend, arch, warp, dtype):
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, types, constants = _COMPILED[name]
    kernel = getattr(importlib.import_module(f"lz_compile.lowering.kernels.{module}"), name.rpartition(".")[2])
    constants = {**constants, "WIDE": tl.float64 if dtype == "fp64" else tl.float32}
    kinds = {"x": f"*{dtype}", "w": "*fp64" if dtype == "fp64" else "*fp32", "i": "i32"}
    given = iter(types)
    signature = {each: "constexpr" if each in constants else kinds[next(given)] for each in kernel.arg_names}
    assert next(given, None) is None, "every type is an argument's"
    values = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget(backend, arch, warp))
    assert compiled.asm["cubin" if backend == "cuda" else "hsaco"]


# ---- what is said of them, and what happens elsewhere ----------------------------------------------------------------


H100 = Hardware("cuda", "NVIDIA H100", 90, "hopper", 4, frozenset(), 0)


@pytest.mark.usefixtures("no_preference")
@pytest.mark.parametrize(("length", "variant", "expected"), [
    (64, "delta", "lz.triton_scan"), (64, "diagonal", "lz.triton_scan"), (512, "delta", "lz.triton_scan"),
    (2048, "delta", "lz.chunked_scan"), (2048, "diagonal", "lz.chunked_scan"),
])  # fmt: skip
def test_on_a_gpu_what_was_measured_decides_and_unrolled_steps_lose(length, variant, expected):
    sizes = {"batch_size": 1, "num_heads": 2, "length": length, "key_dim": 8, "value_dim": 8, "rank": 1, "reads": 1}
    sample = scan.sample(sizes, torch.bfloat16, torch.device("cpu"), variant=variant)
    context = replace(of_facts("scan", sample.attrs, sample.facts), hardware=H100)
    decision = select(Problem(context), policy.current())
    assert decision.kernel.kernel_id == expected, decision.why
    assert "on an H100" in kernels("scan")["lz.triton_scan"].prior_source


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    for kernel_id in list(health.retirements()):
        health.restore(kernel_id)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("case", ["kda", "mamba_1"])
def test_a_kernel_that_cannot_be_launched_is_completed_by_pytorch_and_retired(case):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    problem = PROBLEMS[case]
    operands, attrs = problem.operands(), problem.attrs()
    with events.collect() as happened:
        found = triton_scan.scan(operands, attrs)
    exact = exactly(operands, attrs)
    assert_near(
        dict(zip(("reads", "last"), found, strict=True)), {each: exact[each] for each in ("reads", "last")}, 1e-9
    )
    assert health.retired("lz.triton_scan")
    assert "KERNEL_FAILED" in {event.code for event in happened}


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for")
@pytest.mark.parametrize("case", PROBLEMS)
def test_a_scan_and_its_gradients_are_the_references_on_a_gpu(case):
    problem = replace(PROBLEMS[case], length=200, rows=min(PROBLEMS[case].rows * 16, 64))
    if PROBLEMS[case].rows == 1:
        problem = replace(problem, rows=1)
    if lacks := missing(kernels("scan")["lz.triton_scan"], problem):
        pytest.skip(f"lz.triton_scan takes no {lacks}")
    operands = problem.operands(torch.float32).map(torch.Tensor.cuda)
    attrs = problem.attrs(torch.float32)
    found = with_gradients(triton_scan.scan, operands, attrs)
    assert not health.retirements()
    exact = exactly(operands, attrs)
    assert_near(found, exact, 1e-4)
