"""Products with stored weights in Triton: that they are the definition (in the interpreter), and compile for GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lz_compile.ground import events, health
from lz_compile.ground.hardware import Hardware
from lz_compile.lowering.kernels.linear import triton_linear
from lz_compile.lowering.ops import linear as op
from lz_compile.lowering.ops.linear import LinearAttrs, LinearFacts, Operands
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.context import of_facts
from tests.test_linear import FLOAT8, PACKINGS, stored_numbers

NAME = "lz.triton_linear"


def problem(
    rows: int, shape: tuple[int, int, int], stored: torch.dtype | str, dtype: torch.dtype, *names: str
) -> tuple[Operands, LinearAttrs]:
    """Operands and attributes; stored numbers are those of a name of a packing, or of a dtype."""
    columns, outs, groups = shape
    packing, kind = (stored, torch.uint8) if isinstance(stored, str) else ("none", stored)
    weight = stored_numbers(outs, columns, kind, packing)
    others = {name: torch.rand(outs, groups).to(dtype) for name in names}
    x = Operands(torch.randn(rows, columns).to(dtype), weight, bias=torch.randn(outs).to(dtype), **others)
    sizes = {"N": rows, "K": columns, "O": outs, "W": weight.shape[1], "G": op.groups_of(x)}
    return x, op.from_operands(x, sizes, packing=packing)[0]


# ---- for GPUs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton, which compiles for a GPU without one")
    if triton.knobs.runtime.interpret:
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


_COMPILED = {
    "rows": (1, (256, 64, 1), torch.int8, ("scale",)),
    "many": (512, (256, 256, 1), torch.int8, ("scale", "zero")),
    "groups": (1, (256, 64, 2), FLOAT8[0], ("scale", "zero", "offset")),
    "converted": (16, (256, 64, 1), FLOAT8[0], ("scale",)),
    "packed": (512, (256, 64, 2), "high_half", ("scale", "zero")),
    "cut": (512, (256, 64, 32), "low_first", ("scale", "zero", "offset")),
    "ones": (1, (2, 1, 1), "low_half", ("scale",)),
}


@pytest.mark.sampled
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("backend", "arch", "warp"), [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["cuda", "hip"])
@pytest.mark.parametrize("name", _COMPILED)
def test_a_kernel_compiles_for_a_gpu(name, backend, arch, warp, dtype):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lz_compile.lowering.kernels.linear.triton_source import constants_of, multiply

    rows, shape, stored, names = _COMPILED[name]
    constants = constants_of(*problem(rows, shape, stored, dtype, *names))
    if name == "converted":
        if backend != "cuda":
            pytest.skip("only NVIDIA's GPUs are asked to convert from float8")
        constants["FORMAT"] = "e4m3"
    options = {each: constants.pop(each) for each in ("num_warps", "num_stages")}
    # Triton makes a constant of every size and stride that is one.
    sizes = [each for each in multiply.arg_names if each not in constants][7:]
    ones = sizes if name == "ones" else ["given_column", "weight_column", "bias_row", "scale_group", "zero_group"]
    constants |= dict.fromkeys(ones, 1) | ({"shift": 1} if constants["STEP"] == 2 else {})
    floating = f"*{'bf16' if dtype == torch.bfloat16 else 'fp32'}"
    kinds = {**dict.fromkeys(("given", "scale", "offset", "bias", "result"), floating), "zero": "*i64"}
    kinds["weight"] = "*i8" if stored == torch.int8 else "*u8"
    signature = {each: "constexpr" if each in constants else kinds.get(each, "i32") for each in multiply.arg_names}
    values = {(multiply.arg_names.index(each),): value for each, value in constants.items()}
    aligned = [multiply.arg_names.index(each) for each, kind in signature.items() if kind not in ("constexpr", "rows")]
    source = ASTSource(multiply, signature, values, {(place,): [["tt.divisibility", 16]] for place in aligned})
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp), options=options)
    code = compiled.asm["ptx" if backend == "cuda" else "amdgcn"]
    assert compiled.metadata.shared <= 2**16, "more than a multiprocessor has of every GPU"
    assert ("e4m3x2" in code) == (name == "converted")
    assert "tf32" not in code
    assert "xf32" not in code
    assert ("mma" in code) == (dtype == torch.bfloat16 and name != "cut") or backend == "hip"


# ---- what is said of it, and what happens elsewhere ------------------------------------------------------------------


H100 = Hardware("cuda", "NVIDIA H100", 90, "hopper", 4, frozenset(), 0)


@pytest.mark.usefixtures("by_priors")
@pytest.mark.parametrize(("rows", "outs", "groups", "expected"), [
    (1, 65536, 1, NAME), (64, 32768, 32, NAME), (65, 65536, 32, "inductor"), (1, 14336, 1, "inductor"),
    (1, 65536, 1024, "inductor"),
])  # fmt: skip
def test_on_a_gpu_it_is_preferred_where_it_was_measured_to_win(rows, outs, groups, expected):
    facts = LinearFacts(rows, 4096, outs, groups, torch.bfloat16, torch.int8, "cuda")
    context = of_facts("linear", LinearAttrs(has_scale=True), facts)
    decision = select(Problem(replace(context, hardware=H100)), policy.current())
    assert decision.kernel.kernel_id == expected, decision.why


@pytest.mark.usefixtures("by_priors")
@pytest.mark.parametrize("is_captured", [False, True])
def test_in_a_cuda_graph_the_time_of_its_host_does_not_count(is_captured):
    facts = LinearFacts(1, 4096, 4096, 1, torch.bfloat16, torch.int8, "cuda")
    context = of_facts("linear", LinearAttrs(has_scale=True), facts)
    context = replace(context, hardware=H100, is_cuda_graph_capturing=is_captured)
    decision = select(Problem(context), policy.current())
    assert decision.kernel.kernel_id == (NAME if is_captured else "inductor"), decision.why


def test_a_prior_says_where_it_was_measured():
    spec = kernels("linear")[NAME]
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
    x, attrs = problem(3, (64, 5, 2), "low_first", torch.float32, "scale", "zero")
    with events.collect() as happened:
        found = triton_linear.linear(x, attrs)
    torch.testing.assert_close(found, op.reference(x, attrs))
    assert health.retired(NAME)
    assert "KERNEL_FAILED" in {event.code for event in happened}


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8, *FLOAT8, *PACKINGS], ids=str)
@pytest.mark.parametrize("shape", [(4096, 1000, 1), (4096, 1000, 32), (1000, 300, 50)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_a_product_is_the_definition_on_a_gpu(rows, shape, stored, dtype):
    with torch.device("cpu"):
        x, attrs = problem(rows, shape, stored, dtype, "scale", "zero", "offset")
    found = triton_linear.linear(x.map(torch.Tensor.cuda), attrs).cpu()
    assert not health.retirements()
    exact = op.reference(replace(x, input=x.input.double()), replace(attrs, out_dtype=torch.float64))
    size = float(exact.abs().max())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-5 * size)
