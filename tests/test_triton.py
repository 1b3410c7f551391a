"""This package's Triton kernels: that they give the references' results (in the interpreter), and compile for GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lz_compile.ground import events, health
from lz_compile.lowering.fused import Fused
from lz_compile.lowering.kernels.norm import triton_norm
from lz_compile.lowering.ops import norm
from lz_compile.runtime.kernels.registry import kernels

KERNELS = ("lz.triton_norm", "lz.triton_residual_norm")
for_every_kernel = pytest.mark.parametrize("kernel", KERNELS)


# ---- for GPUs --------------------------------------------------------------------------------------------------------

_FORM = {"IS_CENTRED": True, "EPS": 1e-6, "EPS_AT": "inside", "OFFSET": 1.0, "HAS_WEIGHT": True, "HAS_BIAS": True}
_TILE = {"HAS_FEW_ROWS": False, "ROWS": 4, "BLOCK": 1024, "HAS_OTHER": True}
#: The types of its arguments (``x`` a tensor, ``i`` a size), and its constants: Triton makes one of every size that is one.
_COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "sizes": ("xxxxxxiiii", {**_FORM, **_TILE, "EPS_AT": "floor"}),
    "ones": ("xxxxxx", {**_FORM, **_TILE, "BLOCK": 1, "rows": 1, "hidden": 1, "given_stride": 1, "other_stride": 1}),
}


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton, which compiles for a GPU without one")
    if triton.knobs.runtime.interpret:
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.sampled
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
@pytest.mark.parametrize(("backend", "arch", "warp"), [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["cuda", "hip"])
@pytest.mark.parametrize("name", _COMPILED)
def test_a_kernel_compiles_for_a_gpu(name, backend, arch, warp, dtype):
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lz_compile.lowering.kernels.norm.triton_source import _forward as kernel

    types, constants = _COMPILED[name]
    constants = {**constants, "WIDE": tl.float64 if dtype == "fp64" else tl.float32}
    kinds = {"x": f"*{dtype}", "i": "i32"}
    given = iter(types)
    signature = {each: "constexpr" if each in constants else kinds[next(given)] for each in kernel.arg_names}
    assert next(given, None) is None, "every type is an argument's"
    values = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget(backend, arch, warp))
    assert compiled.asm["cubin" if backend == "cuda" else "hsaco"]


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("block", "rows"), [(64, {16, 32, 64, 128}), (4096, {1, 2}), (16384, {1})])
def test_tiles_are_timed_once_each(block, rows):
    from lz_compile.lowering.kernels.norm import triton_source as norm
    from lz_compile.lowering.triton_launch import WARPS

    tuner = norm._tiled._tuned
    found = [(each.kwargs["ROWS"], each.num_warps) for each in tuner.early_config_prune(tuner.configs, {}, BLOCK=block)]
    assert sorted(found) == sorted((each, warps) for each in rows for warps in WARPS)
    assert set(tuner.keys) == {"BLOCK", "HAS_FEW_ROWS"}


# ---- what is said of them, and what happens elsewhere ----------------------------------------------------------------


@for_every_kernel
def test_a_prior_decides_nothing_and_says_whether_it_was_measured(kernel):
    spec = kernels("norm")[kernel]
    assert spec.platforms == {"cuda", "rocm"}
    assert re.search("a guess that was never measured|benchmarks/gpu.py on an H100", spec.prior_source)
    called = [row for row in spec.prior if not row.is_captured]  # replayed in a CUDA graph, times repeat
    assert all(row.relative_latency > 0.9 for row in called), "priors have a noise of a tenth"


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    for kernel_id in list(health.retirements()):
        health.restore(kernel_id)


def _without_a_driver(kernel: str) -> tuple[Any, Any]:
    """What the kernel gives on a CPU, where it cannot be launched, and the reference."""
    attrs = norm.NormAttrs(True, 1e-5, has_weight=True, has_bias=True)
    given, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    if kernel == "lz.triton_norm":
        x = norm.Operands(given, weight, bias)
        return triton_norm.norm(x, attrs), norm.reference(x, attrs)
    residual: Any = Fused("residual", {"input": given, "residual": torch.randn(3, 8)}, None)
    total = residual.reference()
    expected = norm.reference(norm.Operands(total, weight, bias), attrs), total
    return triton_norm.residual_norm(norm.Operands(residual, weight, bias), attrs), expected


@pytest.mark.usefixtures("_restored")
@for_every_kernel
def test_a_kernel_that_cannot_be_launched_is_completed_by_pytorch_and_retired(kernel):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    with torch.device("cpu"), events.collect() as happened:
        found, expected = _without_a_driver(kernel)
    torch.testing.assert_close(found, expected)
    assert health.retired(kernel)
    assert "KERNEL_FAILED" in {event.code for event in happened}


# ---- on a GPU --------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("hidden", [1, 3, 64, 1000, 4096, 4097, 16384, 65536])
@pytest.mark.parametrize("is_centred", [False, True])
def test_a_norm_is_the_reference_on_a_gpu(is_centred, hidden):
    dtype = torch.float32 if hidden == 1 else torch.bfloat16
    attrs = norm.NormAttrs(is_centred, 1e-6, has_weight=True, out_dtype=dtype)
    exact = norm.NormAttrs(is_centred, 1e-6, has_weight=True, out_dtype=torch.float64)
    given = [torch.randn(300, hidden, device="cuda", dtype=dtype), torch.randn(hidden, device="cuda", dtype=dtype)]
    found = triton_norm.norm(norm.Operands(*given), attrs)
    assert not health.retirements()
    expected = norm.reference(norm.Operands(*(each.double() for each in given)), exact)
    torch.testing.assert_close(found.double(), expected, atol=2e-2 * max(1.0, expected.abs().max().item()), rtol=0)
