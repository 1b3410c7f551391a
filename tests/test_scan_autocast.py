"""Scans under autocast: products of states stay in the kernel's own dtype, forward and backward, whatever the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

import lz_compile as lz
from lz_compile.ground import health
from lz_compile.lowering.kernels.scan import associative_scan, chunked_scan, torch_scan
from lz_compile.lowering.scan_products import product, solved
from tests.scan_kernel_problems import PROBLEMS, Scan, assert_near, exactly, with_gradients

autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)

KERNELS: dict[str, Scan] = {
    "lz.chunked_scan": partial(chunked_scan.scan, chunk=4),
    "lz.associative_scan": partial(associative_scan.scan, shortest=3),
    "torch.scan_sequential": torch_scan.scan,
}


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    torch.manual_seed(0)
    yield
    assert not health.retirements()


@pytest.mark.parametrize("case", ["two_erasing_updates_one_decay", "erasing_with_a_summand", "kda", "mamba_2"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_and_its_gradients_are_computed_in_float32(name: str, case: str) -> None:
    operands, attrs = PROBLEMS[case].operands(torch.float32), PROBLEMS[case].attrs(torch.float32)
    with autocast():
        found = with_gradients(KERNELS[name], operands, attrs)
    assert_near(found, exactly(operands, attrs), 1e-5)


def test_more_chunks_than_follow_one_another_are_combined_in_float32() -> None:
    problem = replace(PROBLEMS["kda"], length=48)
    operands, attrs = problem.operands(torch.float32), problem.attrs(torch.float32)
    with autocast():
        found = with_gradients(KERNELS["lz.chunked_scan"], operands, attrs)
    assert_near(found, exactly(operands, attrs), 1e-5)


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 4, 5)), ((1, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (3, 4, 1))])
def test_products_broadcast_and_have_the_gradients_of_pytorch_s(shapes: tuple[tuple[int, ...], ...]) -> None:
    first, second = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    wanted = torch.autograd.grad((first @ second).square().sum(), (first, second))
    with autocast():
        found = product(first, second)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), (first, second)), wanted)
        assert torch.autograd.gradcheck(product, (first, second))
        assert torch.autograd.gradgradcheck(product, (first, second))


def test_triangles_broadcast_and_have_the_gradients_of_pytorch_s() -> None:
    triangle = torch.randn(2, 1, 4, 4, dtype=torch.float64).tril(-1).requires_grad_()
    right = torch.randn(1, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    both = (triangle, right)
    wanted = torch.autograd.grad(solved(*both).square().sum(), both)
    torch.testing.assert_close((torch.eye(4) + triangle) @ solved(*both), right.expand(2, 3, 4, 2))
    with autocast():
        found = torch.autograd.grad(solved(*both).square().sum(), both)
        mapped = torch.func.vmap(solved)(triangle.expand(2, 3, 4, 4), right.expand(2, 3, 4, 2))
    torch.testing.assert_close(found[0].tril(-1), wanted[0].tril(-1))
    torch.testing.assert_close(found[1], wanted[1])
    torch.testing.assert_close(mapped, solved(*both))


# ---- as models are run -----------------------------------------------------------------------------------------------

B, T, H, K, V = 2, 10, 2, 8, 8


def delta_rule(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state, outputs = q.new_zeros(B, H, K, V), []
    for t in range(q.shape[1]):
        state = alpha[:, t, ..., None] * state
        change = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def gated_attention(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state, outputs = q.new_zeros(B, H, K, V), []
    for t in range(q.shape[1]):
        state = alpha[:, t, ..., None] * state + (beta[:, t, :, None] * k[:, t])[..., None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def called(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    return lz.kda(q, k, v, alpha, beta)


def problem(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K), (B, T, H))
    q, k, v, alpha, beta = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    given = (q, F.normalize(k, dim=-1), v, torch.sigmoid(alpha + 2), torch.sigmoid(beta))
    return [each.to(dtype).requires_grad_() for each in given]


def measured(function: Callable[..., tuple[Tensor, ...]], given: list[Tensor], *, is_cast: bool) -> list[Tensor]:
    """Results and gradients; the backward runs outside of autocast, as PyTorch recommends."""
    with autocast(enabled=is_cast):
        results = function(*given)
    total = sum((each.double() * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in results)
    assert isinstance(total, Tensor)
    return [*(each.detach() for each in results), *torch.autograd.grad(total, given)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((one.double() - two).abs().max()) for one, two in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    ("function", "kernel", "is_inside"),
    [
        (delta_rule, "lz.chunked_scan", False),
        (delta_rule, "lz.chunked_scan", True),
        (delta_rule, "lz.associative_matrix_scan", True),
        (gated_attention, "lz.associative_scan", False),
        (called, "lz.chunked_scan", False),
        pytest.param(delta_rule, "lz.rolled_scan", True, marks=pytest.mark.slow),  # built in C++
    ],
)
def test_a_loop_errs_no_more_than_the_source_under_autocast(
    function: Callable[..., tuple[Tensor, ...]], kernel: str, is_inside: bool
) -> None:
    def cast(*given: Tensor) -> tuple[Tensor, ...]:
        with autocast():
            return function(*given)

    written = delta_rule if function is called else function
    given = problem(torch.float32)
    exact = measured(written, problem(torch.float64), is_cast=False)
    source = measured(written, given, is_cast=True)
    torch._dynamo.reset()
    backend = Rewriting(lock={"scan": kernel})
    compiled = torch.compile(cast if is_inside else function, backend=backend, fullgraph=True)
    found = measured(compiled, given, is_cast=not is_inside)
    (match,) = (each for each in backend.report.matches if each.op == "scan")
    assert (match.kernel, match.rewritten) == (kernel, True), backend.why_not()
    for ours, theirs in zip(errors(found, exact), errors(source, exact), strict=True):
        assert ours <= 1.1 * theirs + 1e-6
    assert errors(found, exact)[1] < 1e-5, "the state is kept in float32"


@pytest.mark.slow  # compiled by Inductor, with gradients
def test_gradients_that_are_traced_under_autocast_are_in_float32() -> None:
    operands, attrs = PROBLEMS["one_step"].operands(torch.float32), PROBLEMS["one_step"].attrs(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: chunked_scan.scan(x, attrs, chunk=2), backend="aot_eager", fullgraph=True)
    with autocast():
        found = with_gradients(lambda x, _: compiled(x), operands, attrs)
    assert_near(found, exactly(operands, attrs), 1e-5)


def test_a_call_without_a_compiler_keeps_its_state_in_float32() -> None:
    few, exact = (
        [each[:, :4].detach().requires_grad_() for each in problem(kind)] for kind in (torch.float32, torch.float64)
    )
    with lz.lock("scan", "torch.scan_sequential"):
        found = measured(called, few, is_cast=True)
    assert max(errors(found, measured(delta_rule, exact, is_cast=False))) < 1e-4
