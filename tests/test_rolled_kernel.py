"""The loop in C++: every structure of a scan, forward and backward, against the op's reference in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scan_problems import KINDS, Problem, errors, problem, run
from torch._inductor.utils import run_and_get_code

from lz_compile.errors import GradientUnsupportedError
from lz_compile.ground import events, health
from lz_compile.lowering import cpp_builds
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.kernels.scan import cpp_launch as launch
from lz_compile.lowering.kernels.scan import rolled
from lz_compile.lowering.kernels.scan.cpp_program import vectors_for
from lz_compile.lowering.ops import scan as op
from lz_compile.runtime.kernels.registry import kernels

KDA = {"decay": "key", "drive": None, "rank": 1, "erases": True, "reads": 1, "at": "after", "broadcasts": False}
EMA = {"decay": "value", "drive": "full", "rank": 0, "reads": 0, "at": "after", "broadcasts": False}


def operator_arguments(given: Problem, chunk: int = 4, *, grad: bool = True) -> tuple[Any, ...]:
    tensors = given.leaves(torch.float64).flat()
    return (*(each if grad or each is None else each.detach() for each in tensors), encode(given.attrs), chunk)


def test_the_kernel_is_there_for_every_feature_and_dtype_on_a_cpu() -> None:
    spec = kernels("scan")["lz.rolled_scan"]
    assert spec.load() is None
    given = problem(3, **KDA, T=9)
    facts = op.facts_of(given.leaves(torch.float32))
    assert op.features(given.attrs, facts).keys() <= spec.supports


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(24))
def test_any_structure_gives_what_the_reference_gives(seed: int) -> None:
    given = problem(seed)
    found = errors(run(given, rolled.scan, chunk=4), run(given, op.reference))
    assert max(found.values()) < 1e-12, (found, given.attrs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("decay", "at"), [(None, "before"), ("key", "before"), *((kind, "after") for kind in KINDS)])
def test_every_decay_in_float32(decay: str | None, at: str) -> None:
    given = problem(7, **{**KDA, "decay": decay, "at": at}, B=2, H=2, T=70, K=8, V=19)
    found = errors(run(given, rolled.scan, torch.float32, chunk=16), run(given, op.reference))
    assert max(found.values()) < 2e-6, found


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 2e-2), pytest.param(torch.float16, 3e-3, marks=pytest.mark.slow)]
)
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype: torch.dtype, bound: float) -> None:
    given = problem(11, **KDA, B=2, H=1, T=33, K=8, V=19)
    leaves = given.in_dtype(dtype).leaves(dtype)
    rounded = Problem(leaves.map(lambda each: each.detach().double()), given.attrs)
    found = errors(run(rounded, rolled.scan, dtype, chunk=8), run(rounded, op.reference))
    assert max(found.values()) < bound, found
    reads, last = rolled.scan(leaves, given.in_dtype(dtype).attrs)
    assert (reads.dtype, last.dtype) == (dtype, dtype)


def test_operands_of_several_dtypes_and_a_state_in_float32() -> None:
    given = problem(5, **KDA, T=12, K=8, V=16).in_dtype(torch.bfloat16)
    leaves = {
        name: each.detach().to(torch.float32 if name in ("decay", "erase") else torch.bfloat16).requires_grad_()
        for name, each in given.leaves(torch.float32).given().items()
    }
    x = op.Operands(**leaves)
    attrs = op.ScanAttrs("after", True, torch.float32, torch.bfloat16, torch.float32)
    reads, last = rolled.scan(x, attrs)
    assert (reads.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    gradients = torch.autograd.grad((reads.float().sum(), last.sum()), list(leaves.values()))
    assert [each.dtype for each in gradients] == [each.dtype for each in leaves.values()]
    want, _ = op.reference(x, attrs)
    torch.testing.assert_close(reads, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("decay", [0.99, 0.01, 1e-9, 0.0])
def test_decays_near_one_and_down_to_zero_are_exact(decay: float) -> None:
    given = problem(2, **KDA, B=1, H=2, T=256, K=16, V=16, has_state=True)
    x = given.operands
    factor = torch.full_like(x.decay, decay) * torch.rand_like(x.decay).add_(99).div_(100)
    key = torch.nn.functional.normalize(x.left, dim=-1)
    x = replace(x, decay=factor, left=key * 0.7, erase=key * factor.transpose(3, 4))
    given = Problem(x, given.attrs)
    found = errors(run(given, rolled.scan, torch.float32), run(given, op.reference))
    assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_lengths_around_a_chunk(length: int) -> None:
    given = problem(1, **KDA, B=1, H=1, T=length, K=3, V=5)
    found = errors(run(given, rolled.scan), run(given, op.reference))
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}, {"V": 0}, {"H": 0}])
@pytest.mark.parametrize("structure", [KDA, EMA])
def test_nothing_to_do_gives_nothing(structure: dict[str, Any], sizes: dict[str, int]) -> None:
    given = problem(4, **structure, **{"B": 2, "H": 2, "T": 5, "V": 3, **sizes}, has_state=True)
    got, want = run(given, rolled.scan), run(given, op.reference)
    for name, one in got.tensors().items():
        assert torch.equal(one, want.tensors()[name]), name


@pytest.mark.parametrize("structure", [KDA, EMA])
def test_threads_and_panels_of_columns_change_nothing(structure: dict[str, Any], monkeypatch: Any) -> None:
    given = problem(9, **structure, B=1, H=1, T=21, V=150)
    want = run(given, op.reference)
    monkeypatch.setattr(launch, "PANEL_BYTES", 1 << 10)
    monkeypatch.setattr(launch, "THREAD_WORK", 16)
    before = torch.get_num_threads()
    launch.forget()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found = errors(run(given, rolled.scan, chunk=8), want)
            assert max(found.values()) < 1e-12, found
    finally:
        torch.set_num_threads(before)
        launch.forget()


def test_gradients_of_what_wants_none_are_not_computed(monkeypatch: Any) -> None:
    given = problem(6, **KDA, T=9, K=4, V=8)
    leaves = given.leaves(torch.float64).map(torch.Tensor.detach)
    leaves.right.requires_grad_()
    seen: list[frozenset[str]] = []
    exact = launch.Launch.backward

    def backward(self: Any, *args: Any) -> Any:
        seen.append(args[3])
        return exact(self, *args)

    monkeypatch.setattr(launch.Launch, "backward", backward)
    reads, last = rolled.scan(leaves, given.attrs)
    got = torch.autograd.grad(reads.sum() + last.sum(), leaves.right)
    want = op.reference(leaves, given.attrs)
    torch.testing.assert_close(got, torch.autograd.grad(want[0].sum() + want[1].sum(), leaves.right))
    assert seen == [frozenset({"right"})]


def test_memory_grows_by_a_state_for_each_chunk() -> None:
    given = problem(8, **KDA, B=1, H=2, T=130, K=4, V=8)
    arguments = operator_arguments(given, 64, grad=False)
    kept = torch.ops.layerzero.rolled_scan_forward(*arguments, True)[2]
    assert kept.shape == (1, 2, 3, 4, 8)
    assert torch.ops.layerzero.rolled_scan_forward(*arguments, False)[2].numel() == 0


def test_gradcheck() -> None:
    given = problem(12, **{**KDA, "rank": 2}, B=1, H=2, T=7, K=3, V=4, has_state=True)
    names = list(given.operands.given())

    def function(*operands: torch.Tensor) -> Any:
        return rolled.scan(op.Operands(**dict(zip(names, operands, strict=True))), given.attrs, chunk=3)

    assert torch.autograd.gradcheck(function, tuple(given.leaves(torch.float64).given().values()))


def test_the_operators_keep_their_promises() -> None:
    given = problem(13, **KDA, B=2, H=2, T=9, K=3, V=5)
    torch.library.opcheck(torch.ops.layerzero.rolled_scan.default, operator_arguments(given))
    kernel = torch.ops.layerzero.rolled_scan_forward_kernel.default
    torch.library.opcheck(kernel, (*operator_arguments(given), True))
    reads, last, kept = kernel(*operator_arguments(given, grad=False), True)
    arguments = operator_arguments(given, grad=False)
    wanted = [each is not None for each in arguments[:7]]
    back = torch.ops.layerzero.rolled_scan_backward_kernel.default
    torch.library.opcheck(back, (torch.ones_like(reads), torch.ones_like(last), kept, *arguments, wanted))


@pytest.mark.parametrize(("structure", "dynamic"), [(KDA, True), (EMA, False)])
def test_inductor_compiles_it_forward_and_backward(structure: dict[str, Any], dynamic: bool) -> None:
    given = problem(14, **structure, B=2, H=3, T=11, K=4 if structure is KDA else 1, V=8)
    names = list(given.operands.given())
    text = encode(given.attrs)

    def function(*operands: torch.Tensor) -> torch.Tensor:
        found = dict(zip(names, operands, strict=True))
        tensors = [found[name] * 1.0 if name in found else None for name in op.DIMS]
        reads, last = torch.ops.layerzero.rolled_scan(*tensors, text, 4)
        return reads.sin().sum() + (last * 2).sum()

    torch._dynamo.reset()
    leaves = list(given.leaves(torch.float64).given().values())
    got, codes = run_and_get_code(torch.compile(function, fullgraph=True, dynamic=dynamic), *leaves)
    assert "rolled_scan_forward_kernel" in "".join(codes)
    want = function(*leaves)
    torch.testing.assert_close(got, want)
    for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_nan_stays_in_its_columns_and_reaches_what_it_should() -> None:
    given = problem(15, **KDA, B=1, H=1, T=6, K=3, V=11)
    right = given.operands.right.clone()
    right[..., 2, :, 4] = torch.nan
    broken = Problem(replace(given.operands, right=right), given.attrs)
    got, want = run(broken, rolled.scan), run(broken, op.reference)
    for name, one in got.tensors().items():
        assert torch.equal(one.isnan(), want.tensors()[name].isnan()), name
    assert got.reads[..., 2:, :, 4].isnan().all()
    assert not got.reads[..., :4].isnan().any()


def test_a_second_derivative_is_refused() -> None:
    given = problem(16, **KDA, T=5, K=2, V=2)
    leaves = given.leaves(torch.float64)
    reads, _ = rolled.scan(leaves, given.attrs)
    with pytest.raises(GradientUnsupportedError):
        torch.autograd.grad(reads.square().sum(), list(leaves.given().values()), create_graph=True)


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_what_does_not_compile_is_completed_by_pytorch(fails: str, monkeypatch: Any) -> None:
    given = problem(17, **KDA, B=2, H=1, T=9, K=3, V=4, has_state=True)
    exact = cpp_builds.load_cpp

    def load(source: str, flags: Any = ()) -> Any:
        if f"scan_{fails}" in source:
            raise RuntimeError("no compiler")
        return exact(source, flags)

    monkeypatch.setattr(cpp_builds, "load_cpp", load)
    launch.forget()
    try:
        with events.collect() as happened:
            found = errors(run(given, rolled.scan, chunk=4), run(given, op.reference))
    finally:
        health.restore("lz.rolled_scan")
        launch.forget()
    assert max(found.values()) < 1e-12, found
    assert any("lz.rolled_scan" in str(event) and "no compiler" in str(event) for event in happened), happened


@pytest.mark.parametrize(("columns", "lanes", "vectors"), [(64, 8, 4), (8, 8, 1), (1, 8, 1), (40, 8, 3), (24, 8, 3)])
def test_blocks_waste_few_elements(columns: int, lanes: int, vectors: int) -> None:
    assert vectors_for(columns, lanes) == vectors
