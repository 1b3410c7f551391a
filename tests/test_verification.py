"""``layerzero.verify``: what a wrong kernel computes reaches nobody, and a right one is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from backends import Rewriting
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lz_compile import register_kernel, reports, unregister_kernel
from lz_compile.compile import choices
from lz_compile.compile.options import split
from lz_compile.compile.verification import Original
from lz_compile.errors import OptionError, RewriteFailedError
from lz_compile.lowering.ops.attention import Operands, reference
from lz_compile.passes.proof.validate import Validation, forget
from lz_compile.report.report import GraphReport

ID = "test.unproven"


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.3).softmax(-1) @ value


def operands(*, grad: bool = False) -> list[Tensor]:
    return [torch.randn(1, 2, size, 16, requires_grad=grad) for size in (7, 11, 11)]


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """A kernel that is off by a factor, and a proof that does not notice."""
    forget()
    monkeypatch.setattr(choices, "validate", lambda *_: Validation(ok=True, cases=1))

    def register(factor: float = 1.5) -> None:
        def kernel(x: Operands, attrs: Any) -> Tensor:
            return reference(x, attrs) * factor

        register_kernel(
            operation="attention",
            kernel_id=ID,
            platform="cpu",
            supported_dtypes=["float32"],
            supports=["training", "nan_rows"],
            is_traceable=True,
        )(kernel)

    register()
    yield register
    unregister_kernel(ID)


def verifying(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Rewriting]:
    backend = Rewriting(lock={"attention": ID}, assume_finite=True, **{"verify": "first-call", **options})
    return torch.compile(function, backend=backend, fullgraph=True), backend


def codes(backend: Rewriting) -> list[str]:
    return [event.code for event in backend.report.events]


def test_without_it_a_wrong_kernel_is_wrong(wrong: Any) -> None:
    run, backend = verifying(attention, verify="off")
    inputs = operands()
    torch.testing.assert_close(run(*inputs), attention(*inputs) * 1.5)
    assert (codes(backend), backend.report.matches[0].kernel) == ([], ID)


@pytest.mark.parametrize("verify", ["first-call", "always"])
def test_the_result_of_the_graph_as_it_was_counts_and_it_runs_from_then_on(wrong: Any, verify: str) -> None:
    run, backend = verifying(attention, verify=verify)
    for _ in range(3):
        inputs = operands()
        torch.testing.assert_close(run(*inputs), attention(*inputs))
    assert codes(backend) == ["VERIFY_FAILED"]
    assert "output 0 is off by" in backend.report.events[0].message
    (match,) = backend.report.matches
    assert (match.kernel, match.rewritten, match.reasons[-1].code) == ("inductor", False, "VERIFY_FAILED")


def test_gradients_are_those_of_the_graph_as_it_was(wrong: Any) -> None:
    run, _ = verifying(attention)
    for _ in range(2):
        inputs = operands(grad=True)
        found = torch.autograd.grad(run(*inputs).square().sum(), inputs)
        torch.testing.assert_close(found, torch.autograd.grad(attention(*inputs).square().sum(), inputs))


def with_backward(spoilt: Callable[[Tensor], Tensor]) -> None:
    def kernel(x: Operands, attrs: Any) -> Tensor:
        return reference(Operands(x.query, x.key, spoilt(x.value)), attrs)

    register_kernel(
        operation="attention",
        kernel_id=ID,
        platform="cpu",
        supported_dtypes=["float32"],
        supports=["training", "nan_rows"],
        is_traceable=True,
    )(kernel)


@pytest.mark.parametrize(
    "spoilt",
    [lambda value: value * 2 - value.detach(), lambda value: value.detach()],
    ids=["doubled", "lost"],
)
def test_a_kernel_of_which_only_the_backward_is_wrong_is_found(wrong: Any, spoilt: Any) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query.sin(), key, value).cos()

    with_backward(spoilt)
    run, backend = verifying(function)
    for _ in range(2):
        inputs = operands(grad=True)
        found = torch.autograd.grad(run(*inputs).square().sum(), inputs)
        torch.testing.assert_close(found, torch.autograd.grad(function(*inputs).square().sum(), inputs))
    assert codes(backend) == ["VERIFY_FAILED"]
    assert "the gradient of input 2 is off by" in backend.report.events[0].message
    assert "output" not in backend.report.events[0].message


def verdict_of(function: Callable[..., Any], faulty: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The events of one call of what is said to be a function's compiled graph."""
    torch._dynamo.reset()
    found: list[str] = []

    def backend(module: torch.fx.GraphModule, given: Any) -> Callable[..., Any]:
        report = GraphReport(0)
        run = Original(module).verifying(faulty, report, split({"layerzero.verify": "first-call"})[0])

        def call(*operands: Tensor) -> Any:
            try:
                return run(*operands)
            finally:
                found.extend(f"{event.code} {event.message}" for event in report.events)

        return call

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found


def frozen(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        target = x * 2
    return target, x + 1


def test_a_result_that_gained_a_gradient_is_a_difference() -> None:
    x = torch.randn(3, requires_grad=True)
    (event,) = verdict_of(frozen, lambda x: (x * 2, x + 1), x)
    assert "result 0 has a gradient, and had none" in event
    assert not verdict_of(frozen, lambda x: ((x * 2).detach(), x + 1), x)


def test_an_input_that_only_the_compiled_graph_writes_to_is_a_difference() -> None:
    (event,) = verdict_of(lambda x: x * 2, lambda x: (x.mul_(2).clone(),), torch.randn(3))
    assert "input 0 is written to" in event


def test_in_inference_mode_what_is_overwritten_is_compared_too() -> None:
    def function(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    with torch.inference_mode():
        assert not verdict_of(function, lambda x: (x.add_(1) * 2,), torch.randn(3))
        (event,) = verdict_of(function, lambda x: (x.add_(2) * 2 - 2,), torch.randn(3))
    assert "input 0 afterwards is off by" in event


def test_a_right_backward_is_no_difference_and_none_of_the_users(wrong: Any) -> None:
    with_backward(lambda value: value)

    def function(query: Tensor, key: Tensor, value: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
        counter.add_(1)
        query.mul_(2)
        return attention(query, key, value), value.sum(0)

    run, backend = verifying(function)
    leaves, seen = operands(grad=True), []
    leaves[1].register_hook(lambda _: seen.append(1))
    given = [leaves[0].clone(), leaves[1], leaves[2].detach(), torch.zeros(())]
    result, _ = run(*given)
    assert (codes(backend), backend.report.matches[0].rewritten, seen) == ([], True, [])
    assert [each.grad for each in leaves] == [None] * 3
    found = torch.autograd.grad(result.square().sum(), leaves[:2])
    expected = torch.autograd.grad(attention(leaves[0] * 2, *leaves[1:]).square().sum(), leaves[:2])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("verify", "expected"), [("off", 0), ("first-call", 1), ("always", 3)])
def test_a_right_kernel_stays_and_the_graph_runs_beside_it_as_often_as_asked(
    wrong: Any, monkeypatch: pytest.MonkeyPatch, verify: str, expected: int
) -> None:
    wrong(1.0)
    calls: list[int] = []
    reference_of = Original._reference
    monkeypatch.setattr(Original, "_reference", lambda self, inputs: calls.append(1) or reference_of(self, inputs))
    run, backend = verifying(attention, verify=verify)
    for _ in range(3):
        inputs = operands()
        torch.testing.assert_close(run(*inputs), attention(*inputs))
    assert (len(calls), codes(backend), backend.report.matches[0].kernel) == (expected, [], ID)


def test_always_finds_what_only_a_later_call_shows(wrong: Any) -> None:
    factor = [1.0]

    def kernel(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return attention(query, key, value) * factor[0]

    register_kernel(
        operation="attention", kernel_id=ID, platform="cpu", supported_dtypes=["float32"], supports=["nan_rows"]
    )(kernel)
    run, backend = verifying(attention, verify="always")
    inputs = operands()
    torch.testing.assert_close(run(*inputs), attention(*inputs))
    assert codes(backend) == []
    factor[0] = 2.0
    torch.testing.assert_close(run(*inputs), attention(*inputs))
    assert codes(backend) == ["VERIFY_FAILED"]


def test_an_input_that_is_overwritten_is_overwritten_once(wrong: Any) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query.mul_(2)
        return attention(query, key, value)

    run, backend = verifying(function)
    for _ in range(2):
        inputs = operands()
        copies = [each.clone() for each in inputs]
        torch.testing.assert_close(run(*inputs), function(*copies))
        torch.testing.assert_close(inputs, copies)
    assert codes(backend) == ["VERIFY_FAILED"]


def test_inputs_that_share_memory_share_it_beside_the_graph_too(wrong: Any) -> None:
    def function(whole: Tensor, row: Tensor, key: Tensor, value: Tensor) -> Tensor:
        row.mul_(2)
        return attention(whole, key, value)

    def given() -> list[Tensor]:
        query, key, value = operands()
        return [query, query[:, :, 2], key, value]

    wrong(1.0)
    run, backend = verifying(function)
    torch.manual_seed(1)
    result = run(*given())
    torch.manual_seed(1)
    torch.testing.assert_close(result, function(*given()))
    assert codes(backend) == []


def test_a_graph_that_draws_random_numbers_is_not_compared_and_draws_the_same(wrong: Any) -> None:
    wrong(1.0)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value) * torch.rand(()).mul(2)

    inputs = operands()
    torch.manual_seed(3)
    expected, after = function(*inputs), torch.rand(3)
    run, backend = verifying(function)
    torch.manual_seed(3)
    torch.testing.assert_close(run(*inputs), expected)
    assert torch.equal(torch.rand(3), after)
    assert codes(backend) == ["NOT_VERIFIED"]
    assert "draws random numbers" in backend.report.events[0].message


def test_a_graph_inside_of_the_graph_is_kept_as_it_was_too(wrong: Any) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return checkpoint(attention, query, key, value, use_reentrant=False)

    run, backend = verifying(function)
    inputs = operands(grad=True)
    torch.testing.assert_close(run(*inputs), attention(*inputs))
    assert codes(backend) == ["VERIFY_FAILED"]


def test_hooks_of_the_user_do_not_see_the_second_run(wrong: Any) -> None:
    wrong(1.0)
    run, backend = verifying(attention)
    inputs, seen = operands(grad=True), [0]

    def pack(tensor: Tensor) -> Tensor:
        seen[-1] += 1
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(*inputs)
        seen.append(0)
        run(*inputs)
    assert seen[0] == seen[1] != 0
    assert codes(backend) == []


def test_what_does_not_run_as_it_was_is_an_event(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(1.0)
    run, backend = verifying(attention)
    monkeypatch.setattr("lz_compile.compile.verification.Original._copies", lambda *_: 1 / 0)
    inputs = operands()
    torch.testing.assert_close(run(*inputs), attention(*inputs))
    assert codes(backend) == ["NOT_VERIFIED"]


def test_what_cannot_be_kept_as_it_was_is_an_event(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(1.0)
    monkeypatch.setattr("lz_compile.compile.verification._apart", lambda module: 1 / 0)
    run, backend = verifying(attention)
    inputs = operands()
    torch.testing.assert_close(run(*inputs), attention(*inputs))
    assert codes(backend) == ["NOT_VERIFIED"]


def test_in_strict_mode_a_difference_is_an_error(wrong: Any) -> None:
    run, _ = verifying(attention, strict=True)
    with pytest.raises(RewriteFailedError, match="output 0 is off by"):
        run(*operands())


def test_only_known_values_are_taken() -> None:
    with pytest.raises(OptionError, match=r"cannot be 'frist-call'.*did you mean 'first-call'"):
        split({"layerzero.verify": "frist-call"})


@pytest.mark.slow
def test_rounding_of_compiled_code_is_no_difference() -> None:
    def layers(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + torch.nn.functional.layer_norm(attention(x, x, x).exp().log1p(), (16,))
        return x * 30

    options = {"layerzero.verify": "first-call", "layerzero.lock": {"attention": "lz.blocked"}}
    x = torch.randn(1, 2, 24, 16, dtype=torch.bfloat16)
    torch.compile(layers, backend="layerzero", options=options)(x)
    assert any(match.rewritten for match in reports()[-1].matches)
    assert [event.code for event in reports()[-1].events] == []
