"""This package's Triton kernels: that they give the references' results (in the interpreter), and compile for GPUs."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lz_compile.ground import events, health
from lz_compile.lowering.fused import Fused, Siblings
from lz_compile.lowering.kernels.blend import triton_blend
from lz_compile.lowering.kernels.mlp import triton_mlp
from lz_compile.lowering.kernels.norm import triton_norm
from lz_compile.lowering.kernels.rope import triton_rope
from lz_compile.lowering.ops import blend, mlp, norm, rope
from lz_compile.runtime.kernels.registry import kernels

#: By kernel, its op.
KERNELS = {
    "lz.triton_norm": "norm",
    "lz.triton_residual_norm": "norm",
    "lz.triton_rope": "rope",
    "lz.triton_rope_pair": "rope",
    "lz.triton_mlp": "mlp",
    "lz.triton_blend": "blend",
}
for_every_kernel = pytest.mark.parametrize("kernel", KERNELS)


# ---- for GPUs --------------------------------------------------------------------------------------------------------

_SIZES = {
    "forward": "rows hidden given_stride other_stride",
    "backward": "rows hidden gradient_stride given_stride total_stride",
    "_turn": (
        "query_rows key_rows query_heads key_heads length dim start query_b query_h query_s query_d query_result_b "
        "query_result_h query_result_s query_result_d key_b key_h key_s key_d key_result_b key_result_h key_result_s "
        "key_result_d table_b table_s table_w"
    ),
}


def _ones(kernel: str) -> dict[str, int]:
    """Every size and stride of a kernel, as one."""
    return dict.fromkeys(_SIZES[kernel].split(), 1)


_FORM = {"IS_CENTRED": True, "EPS": 1e-6, "EPS_AT": "inside", "OFFSET": 1.0}
_WEIGHTS = {"HAS_WEIGHT": True, "HAS_BIAS": True}
_TILE = {"HAS_FEW_ROWS": False, "ROWS": 4, "BLOCK": 1024}
_TURN = {"ROTARY": 64, "IS_INTERLEAVED": True, "HAS_HALF_TABLES": False, "IS_BACK": True, "IS_PARTIAL": True}
_ACTIVATION = {"ACTIVATION": "gelu_tanh", "IS_GATED": True, "BLOCK": 1024}
#: Kernel: its module, the types of its arguments (``x`` a tensor, ``w`` one of sums, ``i`` a size), and its constants.
_COMPILED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "norm.forward": ("norm.triton_kernels", "xxxxxxiiii", {**_FORM, **_WEIGHTS, **_TILE, "HAS_OTHER": True}),
    "norm.forward_long": (
        "norm.triton_kernels",
        "xxxxxxiii",
        {**_FORM, **_WEIGHTS, "EPS_AT": "floor", "HAS_OTHER": True, "BLOCK": 4096},
    ),
    "norm.backward": (
        "norm.triton_kernels",
        "xxxxxwiiiii",
        {**_FORM, **_WEIGHTS, **_TILE, "EPS_AT": "outside", "HAS_TOTAL": True},
    ),
    "norm.backward_long": (
        "norm.triton_kernels",
        "xxxxxwiiii",
        {**_FORM, "HAS_TOTAL": True, "HAS_WEIGHT": True, "BLOCK": 4096},
    ),
    "norm.weights_long": ("norm.triton_kernels", "xxwwiiii", {**_WEIGHTS, "ROWS": 16, "BLOCK": 128}),
    "norm.column_sums": ("norm.triton_kernels", "wxii", {"ROWS": 64, "BLOCK": 32}),
    "rope._turn": ("rope.triton_source", "x" * 6 + "i" * 26, {**_TURN, "ROWS": 16, "PAIRS": 32, "BLOCK": 128}),
    # Triton makes a constant of every size and stride that is one.
    "ones.forward": (
        "norm.triton_kernels",
        "xxxxxx",
        {**_FORM, **_WEIGHTS, **_TILE, "HAS_OTHER": True, "BLOCK": 1, **_ones("forward")},
    ),
    "ones.backward": (
        "norm.triton_kernels",
        "xxxxxw",
        {**_FORM, **_WEIGHTS, **_TILE, "HAS_TOTAL": True, **_ones("backward")},
    ),
    "ones._turn": ("rope.triton_source", "x" * 6, {**_TURN, "ROWS": 16, "PAIRS": 32, "BLOCK": 128, **_ones("_turn")}),
    "mlp._forward": ("mlp.triton_source", "xxxiiii", _ACTIVATION),
    "mlp._backward": ("mlp.triton_source", "xxxxxiiiii", _ACTIVATION),
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


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("block", "rows"), [(64, {16, 32, 64, 128}), (4096, {1, 2}), (16384, {1})])
def test_tiles_are_timed_once_each(block, rows):
    from lz_compile.lowering.kernels.norm import triton_source as norm
    from lz_compile.lowering.triton_launch import WARPS

    tuner = norm._forward_tiled._tuned
    found = [(each.kwargs["ROWS"], each.num_warps) for each in tuner.early_config_prune(tuner.configs, {}, BLOCK=block)]
    assert sorted(found) == sorted((each, warps) for each in rows for warps in WARPS)
    assert set(tuner.keys) == {"BLOCK", "HAS_FEW_ROWS"}


# ---- what is said of them, and what happens elsewhere ----------------------------------------------------------------


@for_every_kernel
def test_a_prior_decides_nothing_and_says_whether_it_was_measured(kernel):
    spec = kernels(KERNELS[kernel])[kernel]
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
    if KERNELS[kernel] == "norm":
        attrs = norm.NormAttrs(True, 1e-5, has_weight=True, has_bias=True)
        given, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
        if kernel == "lz.triton_norm":
            return triton_norm.norm(norm.Operands(given, weight, bias), attrs), norm.reference(
                norm.Operands(given, weight, bias), attrs
            )
        residual = Fused("residual", {"input": given, "residual": torch.randn(3, 8)}, None)
        total = residual.reference()
        expected = norm.reference(norm.Operands(total, weight, bias), attrs), total
        return triton_norm.residual_norm(norm.Operands(residual, weight, bias), attrs), expected
    if KERNELS[kernel] == "rope":
        form = rope.RopeAttrs(True, 6, 1)
        query, *tables = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.randn(1, 1, 5, 6), torch.randn(1, 1, 5, 6)
        turned = rope.reference(rope.Operands(query, *tables), form)
        if kernel == "lz.triton_rope":
            return triton_rope.rope(rope.Operands(query, *tables), form), turned
        other = Fused("rope", rope.Operands(torch.randn(2, 1, 5, 8), *tables), form)
        found = triton_rope.rope_pair(Siblings(rope.Operands(query, *tables), other), form)
        return found, (turned, other.reference())
    if KERNELS[kernel] == "blend":
        operands = {"host": torch.randn(3, 2, 5), "seed": torch.randn(3, 2, 5), "alpha": torch.rand(1, 2, 1)}
        attrs = blend.BlendAttrs()
        return triton_blend.blend(blend.Operands(**operands), attrs), blend.reference(blend.Operands(**operands), attrs)
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    return triton_mlp.mlp(mlp.Operands(gate, up), mlp.MlpAttrs()), mlp.reference(mlp.Operands(gate, up), mlp.MlpAttrs())


@pytest.mark.usefixtures("_restored")
@for_every_kernel
def test_a_kernel_that_cannot_be_launched_is_completed_by_pytorch_and_retired(kernel):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    with events.collect() as happened:
        found, expected = _without_a_driver(kernel)
    torch.testing.assert_close(found, expected)
    assert health.retired(kernel)
    assert "KERNEL_FAILED" in {event.code for event in happened}


def test_an_activation_with_a_bias_or_a_limit_is_our_own_bug():
    gate = torch.randn(3, 8)
    with pytest.raises(AssertionError, match="is given a bias"):
        triton_mlp.mlp(mlp.Operands(gate, gate, torch.randn(8)), mlp.MlpAttrs(has_gate_bias=True))
    with pytest.raises(AssertionError, match="is asked for a limit"):
        triton_mlp.mlp(mlp.Operands(gate, gate), mlp.MlpAttrs(limit=7.0))


# ---- on a GPU --------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("hidden", [1, 3, 64, 1000, 4096, 4097, 16384, 65536])
@pytest.mark.parametrize("is_centred", [False, True])
def test_a_norm_and_its_gradients_are_the_references_on_a_gpu(is_centred, hidden):
    dtype = torch.float32 if hidden == 1 else torch.bfloat16
    attrs = norm.NormAttrs(is_centred, 1e-6, has_weight=True, out_dtype=dtype)
    exact = norm.NormAttrs(is_centred, 1e-6, has_weight=True, out_dtype=torch.float64)
    given = [torch.randn(300, hidden, device="cuda", dtype=dtype), torch.randn(hidden, device="cuda", dtype=dtype)]
    gradient = torch.randn(300, hidden, device="cuda", dtype=dtype)
    leaves, wide = ([x.to(kind).requires_grad_() for x in given] for kind in (dtype, torch.float64))
    out, expected = triton_norm.norm(norm.Operands(*leaves), attrs), norm.reference(norm.Operands(*wide), exact)
    assert not health.retirements()
    found = [out, *torch.autograd.grad(out, leaves, gradient)]
    wanted = [expected, *torch.autograd.grad(expected, wide, gradient.double())]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-2 * max(1.0, other.abs().max().item()), rtol=0)
