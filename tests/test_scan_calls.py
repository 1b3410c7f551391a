"""Calls of ``lz.kda`` and ``lz.linear_scan`` in compiled functions: read as the op, chosen for, proven and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor, fx

import lz_compile as lz
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.scan.calls import scan_calls

B, T, H, K, V = 2, 20, 2, 4, 5


def kda(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    out, state = lz.kda(q, F.normalize(k, dim=-1), v, alpha.sigmoid(), beta.sigmoid())
    return out.tanh(), state


def kda_outputs_only(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    dropped = torch.arange(T) % 3 == 1
    return (lz.kda(q, F.normalize(k, dim=-1), v, alpha.sigmoid(), beta.sigmoid(), drop_mask=dropped.expand(B, T))[0],)


def average(q: Tensor, _k: Tensor, v: Tensor, alpha: Tensor, _beta: Tensor) -> tuple[Tensor, ...]:
    return lz.linear_scan(alpha.sigmoid(), q, initial=v[:, 0, :, :K])


CALLS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], str]] = {
    "kda": (kda, "lz.chunked_scan"),
    "kda_outputs_only": (kda_outputs_only, "lz.chunked_scan"),
    "average": (average, "lz.associative_scan"),
}


def inputs(dtype: torch.dtype = torch.float64, *, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K), (B, T, H))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [each.requires_grad_(grad) for each in found]


def compiled(function: Callable[..., Any], given: list[Tensor], **options: Any) -> tuple[Any, Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting(**options)
    return torch.compile(function, backend=backend, fullgraph=True)(*given), backend


@pytest.mark.sampled
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_runs_the_kernel_that_is_locked(name: str, grad: bool) -> None:
    function, kernel = CALLS[name]
    given = inputs(grad=grad)
    got, backend = compiled(function, given, lock={"scan": kernel})
    (match,) = (each for each in backend.report.matches if each.op == "scan")
    assert (match.op, match.kernel, match.rewritten) == ("scan", kernel, True), backend.why_not()
    want = function(*given)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if grad:
        sums = [sum(each.square().sum() for each in results) for results in (got, want)]
        gradients = [torch.autograd.grad(each, given, allow_unused=True, materialize_grads=True) for each in sums]
        torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("own", "length"), [("lz.rolled_scan", T), ("torch.scan_sequential", 3)])
def test_a_call_that_is_left_alone_is_reported_as_the_kernel_that_it_selects(own: str, length: int) -> None:
    given = [each[:, :length] for each in inputs(torch.float32)]
    with lz.lock("scan", own):
        got, backend = compiled(kda, given, lock={"scan": "inductor"})
    (match,) = (each for each in backend.report.matches if each.op == "scan")
    assert (match.kernel, match.rewritten) == (own, False)
    assert [str(reason) for reason in match.reasons] == [
        f"[SELECTS_ITSELF] the call stays as it is, and selects {own} when it is traced"
    ]
    torch.testing.assert_close(got, kda(*given), rtol=1e-4, atol=1e-5)


def test_a_call_that_runs_the_best_kernel_by_itself_is_left_and_reported() -> None:
    given = inputs(torch.float32)
    got, backend = compiled(kda, given)
    (match,) = (each for each in backend.report.matches if each.op == "scan")
    assert (match.op, match.kernel) == ("scan", "lz.rolled_scan")
    assert not match.rewritten
    assert match.formula.startswith("S[k,v] <- ")
    assert not backend.report.near_misses
    torch.testing.assert_close(got, kda(*given), rtol=1e-4, atol=1e-5)


def test_an_operand_that_is_overwritten_before_the_results_are_taken_is_refused() -> None:
    found: list[Any] = []

    def backend(module: fx.GraphModule, _inputs: object) -> Callable[..., object]:
        (call,) = (node for node in module.graph.nodes if str(node.target).startswith("layerzero.scan"))
        (writer,) = module.graph.find_nodes(op="call_method", target="mul_")
        result = next(user for user in call.users if user.args[1] == 0)
        writer.append(result)
        found.extend(scan_calls(module.graph, Effects(module.graph)))
        call.append(result)
        return module.forward

    def function(decay: Tensor, drive: Tensor) -> Tensor:
        states, _ = lz.linear_scan(decay, drive.unsqueeze(-1))
        drive.mul_(2)
        return states

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(torch.rand(1, T, 1), torch.rand(1, T))
    (miss,) = found
    assert "is overwritten by mul_ (" in miss.reason.message


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["kda", "average"])
def test_an_exported_call_is_the_op_for_all_lengths(name: str, strict: bool) -> None:
    function, given = CALLS[name][0], inputs(torch.float32)

    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
            return function(*given)

    length = torch.export.Dim("length", min=4, max=512)
    program = torch.export.export(Model(), tuple(given), dynamic_shapes=((({1: length},) * 5),), strict=strict)
    assert sum("layerzero.scan" in str(node.target) for node in program.graph.nodes) == 1
    for each in (program, program.run_decompositions()):
        for other in (given, [torch.cat([x, x.flip(1)], 1) for x in given]):
            torch.testing.assert_close(each.module()(*other), function(*other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["kda", "average"])
def test_results_lie_in_memory_alike_whatever_runs(name: str) -> None:
    function, given = CALLS[name][0], inputs(torch.float32)
    wanted = [each.stride() for each in function(*given)]
    with lz.disabled():
        assert [each.stride() for each in function(*given)] == wanted
    assert [each.stride() for each in function(*(each.to("meta") for each in given))] == wanted
    assert [each.stride()[1:] for each in torch.func.vmap(function)(*(each[None] for each in given))] == wanted


def test_the_last_state_of_no_step_is_memory_of_its_own() -> None:
    state = torch.ones(B, H, K, V)
    _, last = lz.kda(*(each[:, :0] for each in inputs(torch.float32)), initial_state=state)
    _, other = lz.linear_scan(torch.rand(B, 0, K), initial=state[:, 0, :, 0])
    last.add_(1)
    other.add_(1)
    assert state.eq(1).all()
