"""Kernels that are not shipped with the package: whatever is wrong with one, the user's process, tensors and results are not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from backends import Rewriting
from torch import Tensor
from torch.utils import _pytree as pytree

import lz_compile as lz
from lz_compile import register_kernel, tune, unregister_kernel, validate
from lz_compile.api import eager
from lz_compile.ground import events, health, memory
from lz_compile.lowering import child, inductor, ops
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.ops.attention import Operands, reference
from lz_compile.passes.proof.validate import forget
from lz_compile.runtime.kernels import registry

ID = "test.foreign"


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.3).softmax(-1) @ value


def operands(length: int = 120, *, grad: bool = False) -> list[Tensor]:
    return [torch.randn(1, 2, size, 16, requires_grad=grad) for size in (length, length + 8, length + 8)]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.setattr(child, "LIMIT_S", 1.0)

    def as_kernel(function: Callable[..., Any], *, is_traceable: bool = True) -> None:
        forget()
        supports = ["training", "nan_rows"] if is_traceable else ["nan_rows"]
        register_kernel(
            operation="attention",
            kernel_id=ID,
            platform="cpu",
            supported_dtypes=["float32"],
            supports=supports,
            is_traceable=is_traceable,
        )(function)

    yield as_kernel
    unregister_kernel(ID)
    health.restore(ID)
    forget()


def compiled(inputs: list[Tensor], **options: Any) -> tuple[Tensor, Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": ID}, assume_finite=True, **options)
    return torch.compile(attention, backend=backend, fullgraph=True)(*inputs), backend


def right(x: Operands, attrs: Any) -> Tensor:
    return reference(x, attrs)


def one_call(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    assert scale == 0.3
    return attention(query, key, value)


def is_real(tensor: Tensor) -> bool:
    """Not while a graph is written, and not in the float64 of the truth."""
    return type(tensor) is Tensor


def hanging(x: Operands, attrs: Any) -> Tensor:
    while is_real(x.query):
        pass
    return right(x, attrs)


def waiting(x: Operands, attrs: Any) -> Tensor:
    if is_real(x.query):
        time.sleep(60)
    return right(x, attrs)


def exiting(x: Operands, attrs: Any) -> Tensor:
    if is_real(x.query):
        os._exit(0)
    return right(x, attrs)


def leaving(x: Operands, attrs: Any) -> Tensor:
    if is_real(x.query):
        raise SystemExit
    return right(x, attrs)


def crashing(x: Operands, attrs: Any) -> Tensor:
    if is_real(x.query):
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(x, attrs)


def raising(x: Operands, attrs: Any) -> Tensor:
    if is_real(x.query):
        raise ValueError("not for me")
    return right(x, attrs)


def zeroing_the_query(x: Operands, attrs: Any) -> Tensor:
    found = right(x, attrs)
    with torch.no_grad():
        x.query.zero_()
    return found


def scaling_the_key_for_a_while(x: Operands, attrs: Any) -> Tensor:
    with torch.no_grad():
        x.key.mul_(2)
    return right(Operands(x.query, x.key / 2, x.value), attrs)


def zeroing_long_values(x: Operands, attrs: Any) -> Tensor:
    found = right(x, attrs)
    if x.value.shape[2] > 100:
        x.value.zero_()
    return found


def wrong_for_many_keys(x: Operands, attrs: Any) -> Tensor:
    return right(Operands(x.query, x.key[:, :, :100], x.value[:, :, :100]), attrs)


def nan_for_many_queries(x: Operands, attrs: Any) -> Tensor:
    found = right(x, attrs)
    return found * float("nan") if x.query.shape[2] > 100 else found


def raising_for_many_keys(x: Operands, attrs: Any) -> Tensor:
    if x.key.shape[2] > 100 and is_real(x.key):
        raise ValueError("too many keys")
    return right(x, attrs)


class WrongGradientOfManyKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor) -> Tensor:
        return key.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 if gradient.shape[2] > 100 else gradient


def wrong_gradient_of_many_keys(x: Operands, attrs: Any) -> Tensor:
    return right(Operands(x.query, WrongGradientOfManyKeys.apply(x.key), x.value), attrs)


#: By what is wrong: the function, the code of the reason, and what it says.
WRONG: dict[str, tuple[Callable[..., Any], str, str]] = {
    "hangs": (hanging, "REWRITE_FAILED", "gave no result within 1 s"),
    "waits": (waiting, "REWRITE_FAILED", "gave no result within 1 s"),
    "exits": (exiting, "REWRITE_FAILED", "ended its process before it gave a result"),
    "raises SystemExit": (leaving, "REWRITE_FAILED", "raised SystemExit"),
    "crashes": (crashing, "REWRITE_FAILED", "ended its process by SIGSEGV"),
    "raises": (raising, "REWRITE_FAILED", "raised ValueError: not for me"),
    "writes": (zeroing_the_query, "VALIDATION_FAILED", "it writes into l_query_, with plain"),
    "writes and is right": (scaling_the_key_for_a_while, "VALIDATION_FAILED", "it writes into l_key_, with plain"),
    "writes at larger sizes": (zeroing_long_values, "VALIDATION_FAILED", "it writes into l_value_, with real sizes"),
    "is wrong at larger sizes": (wrong_for_many_keys, "VALIDATION_FAILED", "output with real sizes: off by"),
    "is NaN at larger sizes": (
        nan_for_many_queries,
        "VALIDATION_FAILED",
        "real sizes: NaN or infinite where the source is",
    ),
    "raises at larger sizes": (raising_for_many_keys, "REWRITE_FAILED", "raised ValueError: too many keys"),
}
FATAL = {"hangs", "waits", "exits", "crashes"}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_a_reason_and_the_result_is_the_sources(name: str, register: Callable[..., None]) -> None:
    function, code, text = WRONG[name]
    register(function)
    inputs = operands()
    before = [each.clone() for each in inputs]
    result, backend = compiled(inputs)
    (match,) = backend.report.matches
    (reason,) = [each for each in match.reasons if each.message.startswith(ID)]
    assert (reason.code, match.kernel == ID) == (code, False)
    assert text in reason.message
    assert not match.rewritten or match.validation["kernel"] == match.kernel
    torch.testing.assert_close(inputs, before, rtol=0, atol=0)
    torch.testing.assert_close(result, attention(*inputs))
    assert (health.retired(ID) is not None) == (name in FATAL)


def test_a_gradient_that_is_wrong_at_larger_sizes_is_found(register: Callable[..., None]) -> None:
    register(wrong_gradient_of_many_keys)
    inputs = operands(grad=True)
    result, backend = compiled(inputs)
    assert "gradient of l_key_ with real sizes: off by" in str(backend.report.matches[0].reasons)
    found = torch.autograd.grad(result.sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(attention(*inputs).sum(), inputs))


@pytest.mark.parametrize("is_traceable", [True, False])
def test_a_kernel_that_is_right_is_taken(is_traceable: bool, register: Callable[..., None]) -> None:
    register(right if is_traceable else one_call, is_traceable=is_traceable)
    _, backend = compiled(operands())
    (match,) = backend.report.matches
    assert (match.kernel, match.validation["kernel"], match.validation["ok"]) == (ID, ID, True), backend.why_not()


def test_a_kernel_of_one_call_that_raises_is_not_the_one_that_was_proven(register: Callable[..., None]) -> None:
    def broken(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        raise ValueError("not for me")

    register(broken, is_traceable=False)
    inputs = operands()
    result, backend = compiled(inputs)
    (match,) = backend.report.matches
    assert match.kernel != ID
    assert match.validation is None or match.validation["kernel"] != ID
    assert "failed, and something else gave the result" in str(match.reasons)
    assert health.retired(ID) is not None
    torch.testing.assert_close(result, attention(*inputs))


def test_a_kernel_that_fails_after_it_was_put_in_is_told_with_its_reason(register: Callable[..., None]) -> None:
    fails: list[bool] = []

    def sometimes(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        if fails:
            raise ValueError("today not")
        return attention(query, key, value)

    register(sometimes, is_traceable=False)
    backend = Rewriting(lock={"attention": ID}, assume_finite=True)
    run = torch.compile(attention, backend=backend, fullgraph=True)
    inputs = operands()
    run(*inputs)
    (match,) = backend.report.matches
    assert "KERNEL_RETIRED" not in str(match.to_dict())
    fails.append(True)
    torch.testing.assert_close(run(*inputs), attention(*inputs))
    told = match.to_dict()["reasons"][-1]
    assert told["code"] == "KERNEL_RETIRED"
    assert "today not" in told["message"]


def test_other_real_sizes_are_another_proof(register: Callable[..., None]) -> None:
    register(right)
    origins = [compiled(operands(length))[1].report.matches[0].validation["origin"] for length in (40, 120, 40)]
    assert origins == ["run", "run", "memory"]


def test_rows_are_cut_down_where_memory_is_short(
    register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def noting(x: Operands, attrs: Any) -> Tensor:
        if is_real(x.query):
            (tmp := seen).append(tuple(x.query.shape))
            assert x.query.shape[2] != 120 or x.query.shape[0] <= 2, tmp
        return right(x, attrs)

    register(noting)
    inputs = [torch.randn(64, 2, size, 16) for size in (120, 128, 128)]
    one_row = 2 * 120 * 128 * 8 * 2
    monkeypatch.setattr(memory, "free_bytes", lambda device: 4 * 40 * one_row)
    _, backend = compiled(inputs)
    assert "real sizes" not in str(backend.report.matches[0].reasons)


def test_what_fits_into_no_memory_is_not_taken(register: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    register(right)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 4096)
    _, backend = compiled(operands())
    assert "cannot be tried at its real sizes" in str(backend.report.matches[0].reasons)


@pytest.mark.parametrize("name", ["hangs", "exits", "crashes", "raises", "writes", "writes and is right"])
def test_validate_tries_apart_and_says_what_happened(name: str, register: Callable[..., None]) -> None:
    function, _, text = WRONG[name]
    register(function)
    inputs = operands(16)
    before = [each.clone() for each in inputs]
    ok, (reason,) = validate(ID, *inputs)
    assert not ok
    assert text.partition(",")[0].replace("it writes into l_", "writes into ").rstrip("_") in reason.message
    torch.testing.assert_close(inputs, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(FATAL))
def test_measuring_leaves_out_what_ends_or_holds_up_its_process(
    name: str, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(WRONG[name][0])
    monkeypatch.setattr(inductor, "compile_apart", lambda function, inputs: function)
    report = tune("attention.full", seq_lens=[8], head_dim=16, num_heads=2, device="cpu", samples=1, resume=False)
    (measured,) = report.measured
    assert ID not in measured.latency_us
    assert "inductor" in measured.latency_us
    assert health.retired(ID) is not None


# ---- calls that nobody compiles ----------------------------------------------------------------------------------------


def of_one_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as eager calls run it."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        found: Tensor = function(Operands(query, key, value), AttentionAttrs(scale=scale))
        return found

    return kernel


def called(inputs: list[Tensor], **named: Any) -> tuple[Tensor, list[events.Event]]:
    """An eager call under a lock, and what happened."""
    with lz.lock("attention", ID), events.collect() as happened:
        return lz.attention(*inputs, causal=False, scale=0.3, **named), happened


def refusals(happened: list[events.Event]) -> list[str]:
    return [each.message for each in happened if each.message.startswith(f"{ID} runs no eager attention")]


@pytest.mark.parametrize("name", WRONG)
def test_an_eager_call_is_not_given_what_is_wrong(name: str, register: Callable[..., None]) -> None:
    register(of_one_call(WRONG[name][0]), is_traceable=False)
    inputs = operands()
    before = [each.clone() for each in inputs]
    result, happened = called(inputs)
    assert len(refusals(happened)) == 1, happened
    torch.testing.assert_close(inputs, before, rtol=0, atol=0)
    torch.testing.assert_close(result, attention(*inputs))
    assert (health.retired(ID) is not None) == (name in FATAL or "raises" in name)


def test_an_eager_call_is_proven_once_up_to_the_next_power_of_two(register: Callable[..., None]) -> None:
    calls: list[int] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        calls.append(query.shape[2])
        return one_call(query, key, value, scale)

    register(kernel, is_traceable=False)
    with mock.patch.object(child, "attempt", wraps=child.attempt) as attempt:
        for length, times in ((70, 2), (70, 2), (90, 2), (200, 4)):
            inputs = operands(length)
            result, happened = called(inputs)
            assert not happened
            torch.testing.assert_close(result, attention(*inputs))
            assert attempt.call_count == times  # the call's own sizes, and the largest for which it holds
    assert calls == [70, 70, 90, 200]  # in this process


def test_a_kernel_that_is_wrong_for_longer_calls_only_is_not_taken_for_shorter_ones(
    register: Callable[..., None],
) -> None:
    register(of_one_call(wrong_for_many_keys), is_traceable=False)
    inputs = operands(80)  # 88 keys, for which it is right; the verdict would hold for 128
    result, happened = called(inputs)
    assert "lengths of 128, 128 is off by" in refusals(happened)[0]
    torch.testing.assert_close(result, attention(*inputs))


def test_a_verdict_on_an_eager_call_is_remembered(register: Callable[..., None]) -> None:
    register(of_one_call(zeroing_the_query), is_traceable=False)
    inputs = operands()
    called(inputs)
    eager.forget()
    with mock.patch.object(child, "attempt") as attempt:
        torch.testing.assert_close(called(inputs)[0], attention(*inputs))
        assert not attempt.called


def sampled(x: Tensor) -> Tensor:
    return lz.sampling_probs(x, temperature=0.7)


def scanned(x: Tensor) -> Tensor:
    return lz.linear_scan(x.sigmoid(), x)[0]


def forgetting(op: str, name: str) -> Callable[..., Any]:
    """The op's definition without one of its operands."""
    definition = ops.module(op).reference

    def call(x: Any, attrs: Any) -> Any:
        return definition(replace(x, **{name: torch.zeros_like(getattr(x, name))}), attrs)

    return call


@pytest.mark.parametrize(
    ("op", "name"), [("scan", "state"), ("scan", "drive"), ("attention", "mask"), ("sampling", "bias")]
)
def test_a_first_call_with_nothing_but_zeros_proves_nothing(op: str, name: str) -> None:
    """A warm-up: a kernel that does not look at an operand is right there."""
    own = {"scan": "lz.rolled_scan", "attention": "lz.tiled", "sampling": "torch.sampling"}[op]
    implementation = forgetting(op, name)
    registry.register(
        replace(
            registry.kernels(op)[own], kernel_id="test.other", implementation=implementation, prior=(), is_opaque=True
        )
    )
    x, zeros = torch.rand(2, 6, 5), torch.zeros(2, 6, 5)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "state": lambda given: lz.linear_scan(x, x, initial=given[:, 0])[1],
        "drive": lambda given: lz.linear_scan(x, given)[1],
        "mask": lambda given: lz.attention(x[:, None], x[:, None], x[:, None], mask=given[0, :, :1] >= 0, causal=False),
        "bias": lambda given: lz.sampling_probs(x[:, 0], bias=given[:, 0]),
    }
    try:
        with lz.lock(op, "test.other"), events.collect() as happened:
            for given in (zeros, x):
                found = calls[name](given)
                with lz.lock(op, own):
                    torch.testing.assert_close(found, calls[name](given))
        assert {event.code for event in happened} == {"VALIDATION_FAILED"}, happened
    finally:
        registry.unregister_kernel("test.other")
        health.restore("test.other")


#: Calls of one tensor ``[N, T, V]``, by op, with the op's own kernel.
EAGER: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "norm": (lz.rms_norm, "torch.norm"),
    "sampling": (sampled, "torch.sampling"),
    "scan": (scanned, "lz.rolled_scan"),
    "blend": (lambda x: lz.blend(x, x.cos(), torch.tensor(0.3)), "torch.blend"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("op", EAGER)
@pytest.mark.parametrize("fault", ["none", "wrong", "writes", "exits"])
def test_every_eager_call_proves_what_is_not_shipped(op: str, fault: str) -> None:
    function, own = EAGER[op]
    specs = registry.kernels(op)
    reference, parent = ops.module(op).reference, os.getpid()
    ran: list[bool] = []

    def call(*operands: Any, **named: Any) -> Any:
        ran.append(True)
        if fault == "exits" and os.getpid() != parent:
            os._exit(0)
        found = reference(*operands, **named)
        if fault == "writes":
            next(each for each in pytree.tree_leaves((operands, named)) if isinstance(each, Tensor)).mul_(1.5)
        first = found[0] if isinstance(found, tuple) else found
        first.mul_(1.1 if fault == "wrong" else 1)
        return found

    registry.register(replace(specs[own], kernel_id="test.other", implementation=call, prior=(), is_opaque=True))
    x = torch.randn(3, 5, 7)
    before = x.clone()
    try:
        with lz.lock(op, own):
            expected = function(x)
        with lz.lock(op, "test.other"), events.collect() as happened:
            torch.testing.assert_close(function(x), expected)
        assert bool(ran) == (fault == "none"), happened  # others ran in a process of their own
        refused = [each for each in happened if each.message.startswith(f"test.other runs no eager {op} like this")]
        assert len(refused) == (fault != "none"), happened
        assert torch.equal(x, before)
    finally:
        registry.unregister_kernel("test.other")
        health.restore("test.other")
        forget()
