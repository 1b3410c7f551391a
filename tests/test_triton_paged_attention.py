"""Attention over blocks in Triton: that it is the definition (in the interpreter), compiles for GPUs, and can be told apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lz_compile.ground import events, health
from lz_compile.ground.hardware import Hardware
from lz_compile.lowering.kernels.paged_attention import triton_paged_attention
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import NARROW
from lz_compile.runtime.choose.problem import Problem as Choice
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.context import of_facts
from tests.test_paged_attention import Problem, assert_near, attributes, truth

NAME = "lz.triton_paged_attention"
# ---- for GPUs --------------------------------------------------------------------------------------------------------

_PLAIN = {
    "IS_RAGGED": False, "STEPS": 4, "IS_SPLIT": False, "HAS_WINDOW": False, "HAS_CAP": False, "HAS_SINKS": False,
    "HAS_KEY_SCALE": False, "HAS_VALUE_SCALE": False, "FORMAT": "", "SLOTS": 16, "ALL_HEADS": 32, "GROUP": 4, "DIM": 80,
    "VALUE_DIM": 128, "ROWS": 16, "HEADS": 4, "QUERIES": 1, "KEYS": 32, "DIMS": 128, "VALUE_DIMS": 128,
    "query_dim": 1, "key_dim": 1, "value_dim": 1,
}  # fmt: skip
_RAGGED = {**_PLAIN, "IS_RAGGED": True, "QUERIES": 4}
_FULL = {
    **_RAGGED, "HAS_WINDOW": True, "HAS_CAP": True, "HAS_SINKS": True, "HAS_KEY_SCALE": True, "HAS_VALUE_SCALE": True,
    "FORMAT": "e4m3 bits",
}  # fmt: skip
_ATTEND = "xcctttwwwxwwiiiiffi" + "i" * 12
#: Kernel: the types of its arguments (``x`` a tensor, ``c`` a cache, ``w`` a tensor of float32, ``t`` of int32, ``i`` a size,
#: ``f`` a number), and constants. The last dimension of operands has no gaps.
_COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain.attend": (_ATTEND, _PLAIN),
    "ragged.attend": (_ATTEND, _RAGGED),
    "split.attend": ("xcctttwwwwww" + _ATTEND[12:], {**_PLAIN, "IS_SPLIT": True}),
    "full.attend": (_ATTEND, _FULL),
    "join": ("wwwwxi", {"HAS_SINKS": True, "ALL_HEADS": 32, "VALUE_DIM": 80, "PARTS": 64, "VALUE_DIMS": 128}),
}


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton, which compiles for a GPU without one")
    if triton.knobs.runtime.interpret:
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.sampled
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("backend", "arch", "warp"), [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["cuda", "hip"])
@pytest.mark.parametrize("name", _COMPILED)
def test_a_kernel_compiles_for_a_gpu(name, backend, arch, warp, dtype):
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lz_compile.lowering.kernels.paged_attention import triton_kernels

    kernel = getattr(triton_kernels, name.rpartition(".")[2])
    types, constants = _COMPILED[name]
    constants = {**constants, "DTYPE": {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype]}
    constants = {each: value for each, value in constants.items() if each in kernel.arg_names}
    cache = "*u8" if constants.get("FORMAT") else f"*{dtype}"
    kinds = {"x": f"*{dtype}", "c": cache, "w": "*fp32", "t": "*i32", "i": "i32", "f": "fp32"}
    given = iter(types)
    signature = {each: "constexpr" if each in constants else kinds[next(given)] for each in kernel.arg_names}
    assert next(given, None) is None, "every type is an argument's"
    values = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    aligned = [each for each, kind in signature.items() if kind[0] == "*" or (kind == "i32" and "_" in each)]
    divisible = {(kernel.arg_names.index(each),): [["tt.divisibility", 16]] for each in aligned}
    source = ASTSource(kernel, signature, values, divisible)
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp), options={"num_stages": 2})
    assert compiled.asm["cubin" if backend == "cuda" else "hsaco"]
    assert compiled.metadata.shared <= 2**16, "more than a multiprocessor has of every GPU"
    if backend == "cuda" and name != "join":
        rows = [line for line in compiled.asm["ttgir"].splitlines() if "async_copy_global_to_local" in line]
        assert sum("contiguity = " in line for line in rows) >= 2, "keys and values come one element at a time"


# ---- what is said of it, and what happens elsewhere ------------------------------------------------------------------


H100 = Hardware("cuda", "NVIDIA H100", 90, "hopper", 4, frozenset(), 0)


@pytest.mark.usefixtures("no_preference")
@pytest.mark.parametrize(("stored", "dtype", "counts", "expected"), [
    (torch.bfloat16, torch.bfloat16, None, NAME),
    (torch.int8, torch.bfloat16, [3, 2], NAME),
    (torch.float32, torch.float32, None, NAME),
    (torch.float32, torch.float32, [3, 2], "inductor"),
])  # fmt: skip
def test_on_a_gpu_it_is_preferred_where_gathering_would_be_most_of_the_work(stored, dtype, counts, expected):
    x = Problem([40, 9], counts, stored=stored, dtype=dtype).operands()
    sizes = {}
    for name, each in x.given().items():
        sizes |= dict(zip((dim.removesuffix("|1") for dim in op.SHAPES[name].split()), each.shape, strict=True))
    attrs, facts = op.from_operands(x, {**sizes, "Hk": x.key_cache.shape[2]})
    decision = select(Choice(replace(of_facts("paged_attention", attrs, facts), hardware=H100)), policy.current())
    assert decision.kernel.kernel_id == expected, decision.why


def test_a_prior_says_where_it_was_measured():
    spec = kernels("paged_attention")[NAME]
    assert spec.platforms == {"cuda", "rocm"}
    assert spec.is_cuda_graph_safe
    assert "benchmarks/gpu.py on an H100" in spec.prior_source


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    for kernel_id in list(health.retirements()):
        health.restore(kernel_id)


@pytest.mark.usefixtures("_restored")
def test_a_kernel_that_cannot_be_launched_is_completed_by_pytorch_and_retired():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    x = Problem([40, 9], [3, 2]).operands()
    with events.collect() as happened:
        found = triton_paged_attention.paged_attention(x, attributes(x))
    assert_near(found, truth(x, attributes(x)), torch.float32)
    assert health.retired(NAME)
    assert "KERNEL_FAILED" in {event.code for event in happened}


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [None, *NARROW], ids=str)
@pytest.mark.parametrize("counts", [None, [1, 900, 0, 40]], ids=["decode", "ragged"])
def test_a_kernel_is_the_definition_on_a_gpu(counts, stored, dtype):
    problem = Problem(
        [5, 2000, 0, 170], counts, heads=8, dims=80, value_dims=64, stored=stored or dtype, dtype=dtype, has_sinks=True
    )
    x = problem.operands()
    found = triton_paged_attention.paged_attention(x.map(torch.Tensor.cuda), attributes(x, window=1500))
    assert not health.retirements()
    wide, attrs = replace(x, query=x.query.double()), attributes(x, window=1500, out_dtype=torch.float64)
    assert_near(found.cpu(), op.reference(wide, attrs), dtype)
