"""Validation: a wrong kernel never gets into a graph, whatever is wrong with it; and what was proven is remembered."""

from __future__ import annotations

import json
import math
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed

from lz_compile import clear_reports, reports
from lz_compile.backend import layerzero
from lz_compile.compile import pipeline
from lz_compile.compile.options import Options
from lz_compile.errors import RewriteFailedError
from lz_compile.ground import events, hardware, machine
from lz_compile.ground.store import Store
from lz_compile.lowering.kernels.attention import torch_sdpa
from lz_compile.lowering.ops.attention import Operands
from lz_compile.passes.proof import validate
from lz_compile.report.report import MatchReport, new_report
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.libraries import LazyFunction

pytestmark = pytest.mark.usefixtures("sdpa_first", "no_code_generation")

Kernel = Callable[..., Any]
RIGHT: Kernel = torch_sdpa.attention


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Kernels are planted here: no verdict may be left for another test, nor be found."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "layerzero"))
    validate.forget()
    yield
    monkeypatch.undo()
    validate.forget()
    registry.reload()


@pytest.fixture
def plant(monkeypatch) -> Callable[[Kernel], None]:
    """Replaces the code of the kernel `torch.sdpa`."""

    def plant(call: Kernel) -> None:
        monkeypatch.setattr(torch_sdpa, "attention", call)
        registry.reload()

    return plant


LOCK = {"layerzero.lock": {"attention": "torch.sdpa"}, "layerzero.assume_finite": True}


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.3).softmax(-1) @ value


def masked(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.3).masked_fill(~keep, -math.inf).softmax(-1) @ value


def biased(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.3 + bias).softmax(-1) @ value


def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for x in (key, value))
    return plain(query, key, value)


def operands(*, heads: int = 3, kv_heads: int = 3, requires_grad: bool = False, **_: Any) -> list[Tensor]:
    shapes = (2, heads, 7, 16), (2, kv_heads, 11, 16), (2, kv_heads, 11, 16)
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


def keep(*extents: int) -> Tensor:
    mask = torch.rand(extents) < 0.7
    mask[..., 0] = True
    return mask


def only_match() -> MatchReport:
    (report,) = reports()
    (match,) = report.matches
    return match


# ---- wrong kernels -------------------------------------------------------------------------------------------------


def with_the_default_scale(x, attrs):
    return F.scaled_dot_product_attention(x.query, x.key, x.value)


def without_the_mask(x, attrs):
    return F.scaled_dot_product_attention(x.query, x.key, x.value, scale=attrs.scale)


def with_the_mask_inverted(x, attrs):
    return RIGHT(replace(x, mask=x.mask.logical_not()), attrs)


def with_the_mask_of_the_first_batch(x, attrs):
    return RIGHT(replace(x, mask=x.mask[:1]), attrs)


def with_the_mask_transposed_where_it_is_square(x, attrs):
    return RIGHT(replace(x, mask=x.mask.mT if x.mask.shape[-1] == x.mask.shape[-2] else x.mask), attrs)


def with_the_bias_scaled(x, attrs):
    return RIGHT(replace(x, bias=x.bias * attrs.scale), attrs)


def with_the_bias_after_the_softmax(x, attrs):
    return ((x.query @ x.key.mT * attrs.scale).softmax(-1) + x.bias) @ x.value


def with_zeros_for_masked_rows(x, attrs):
    return F.scaled_dot_product_attention(x.query, x.key, x.value, attn_mask=x.mask, scale=attrs.scale)


def with_the_mean_for_masked_rows(x, attrs):
    low = torch.finfo(x.query.dtype).min
    return (x.query @ x.key.mT * attrs.scale).masked_fill(x.mask.logical_not(), low).softmax(-1) @ x.value


def with_heads_in_tiled_order(x, attrs):
    times = x.query.shape[1] // x.key.shape[1]
    return plain_with(Operands(x.query, x.key.repeat(1, times, 1, 1), x.value.repeat(1, times, 1, 1)), attrs)


def with_heads_reversed(x, attrs):
    return plain_with(x, attrs).flip(1)


def with_batches_reversed(x, attrs):
    return plain_with(x, attrs).flip(0)


def with_the_key_as_value(x, attrs):
    return plain_with(Operands(x.query, x.key, x.key), attrs)


def with_the_softmax_over_queries(x, attrs):
    return (x.query @ x.key.mT * attrs.scale).softmax(-2) @ x.value


def with_a_causal_mask(x, attrs):
    return F.scaled_dot_product_attention(x.query, x.key, x.value, is_causal=True, scale=attrs.scale)


def without_the_last_key(x, attrs):
    return plain_with(Operands(x.query, x.key[:, :, :-1], x.value[:, :, :-1]), attrs)


def with_the_value_detached(x, attrs):
    return plain_with(Operands(x.query, x.key, x.value.detach()), attrs)


def with_the_probabilities_detached(x, attrs):
    return (x.query @ x.key.mT * attrs.scale).softmax(-1).detach() @ x.value


def with_the_gradient_of_the_key_doubled(x, attrs):
    return plain_with(Operands(x.query, 2 * x.key - x.key.detach(), x.value), attrs)


def with_memory_read_as_if_it_were_contiguous(x, attrs):
    return plain_with(x.map(lambda each: each.as_strided(each.shape, torch.empty(each.shape).stride())), attrs)


def without_the_maximum_taken_off(x, attrs):
    weights = (x.query @ x.key.mT * attrs.scale).exp()
    return weights @ x.value / weights.sum(-1, keepdim=True)


def with_scores_clamped(x, attrs):
    return (x.query @ x.key.mT * attrs.scale).clamp(-30, 30).softmax(-1) @ x.value


def in_bfloat16(x, attrs):
    return plain_with(Operands(x.query.bfloat16(), x.key.bfloat16(), x.value.bfloat16()), attrs).to(x.query.dtype)


def with_noise(x, attrs):
    out = plain_with(x, attrs)
    return out + 1e-3 * torch.rand_like(out)


def with_a_constant_where_a_head_is_alone(x, attrs):
    return plain_with(x, attrs) * (0 if x.query.shape[1] == 1 or x.query.shape[0] == 1 else 1)


def with_nothing_but_nan(x, attrs):
    return plain_with(x, attrs) * math.nan


def plain_with(x: Operands, attrs: Any) -> Any:
    return (x.query @ x.key.transpose(-2, -1) * attrs.scale).softmax(-1) @ x.value


UNMASKED: Mapping[Kernel, str] = {
    with_the_default_scale: "output with plain",
    with_heads_reversed: "output with plain",
    with_batches_reversed: "output with plain",
    with_the_key_as_value: "output with plain",
    with_the_softmax_over_queries: "output with plain",
    with_a_causal_mask: "output with plain",
    without_the_last_key: "output with plain",
    with_memory_read_as_if_it_were_contiguous: "output with large",
    without_the_maximum_taken_off: "output with large",
    with_scores_clamped: "output with large",
    in_bfloat16: "output with plain",
    with_noise: "output with plain",
    with_a_constant_where_a_head_is_alone: "output with ones",
    with_nothing_but_nan: "output with plain",
}
MASKED: Mapping[Kernel, str] = {
    without_the_mask: "output with plain",
    with_the_mask_inverted: "output with plain",
    with_the_mask_of_the_first_batch: "output with plain",
    with_zeros_for_masked_rows: "output with masked rows",
    with_the_mean_for_masked_rows: "output with masked rows",
}
GRADIENTS: Mapping[Kernel, str] = {
    with_the_value_detached: "gradient of l_value_ with plain",
    with_the_probabilities_detached: "gradient of l_query_ with plain",
    with_the_gradient_of_the_key_doubled: "gradient of l_key_ with plain",
}


def is_caught(function: Callable[..., Tensor], args: list[Tensor], reason: str) -> None:
    """The planted kernel was chosen, found to be wrong, named, and left out of the graph."""
    actual = torch.compile(function, backend=layerzero, options=LOCK)(*args)
    match = only_match()
    assert not match.rewritten
    assert match.kernel == "inductor"
    assert [found.code for found in match.reasons] == ["VALIDATION_FAILED"]
    assert match.reasons[0].message.startswith(f"torch.sdpa: {reason}"), match.reasons
    assert match.validation["ok"] is False
    (event,) = reports()[0].events
    assert event.code == "VALIDATION_FAILED"
    assert event.message.startswith(f"torch.sdpa for attention at {match.where} is quarantined: {reason}")
    expected = function(*args)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    leaves = [arg for arg in args if arg.requires_grad]
    if leaves:
        gradients = torch.autograd.grad(expected.sum(), leaves)
        torch.testing.assert_close(torch.autograd.grad(actual.sum(), leaves), gradients)


def named(kernel: Kernel) -> str:
    return kernel.__name__


@pytest.mark.parametrize("kernel", UNMASKED, ids=named)
def test_a_wrong_kernel_is_caught(plant, kernel):
    plant(kernel)
    is_caught(plain, operands(), UNMASKED[kernel])


@pytest.mark.parametrize("kernel", MASKED, ids=named)
def test_a_kernel_that_treats_masks_wrongly_is_caught(plant, kernel):
    plant(kernel)
    is_caught(masked, [*operands(), keep(2, 1, 7, 11)], MASKED[kernel])


@pytest.mark.parametrize("kernel", GRADIENTS, ids=named)
def test_a_kernel_with_a_wrong_gradient_is_caught(plant, kernel):
    plant(kernel)
    is_caught(plain, operands(requires_grad=True), GRADIENTS[kernel])


@pytest.mark.parametrize("kernel", GRADIENTS, ids=named)
def test_a_wrong_gradient_does_not_matter_where_there_are_none(plant, kernel):
    plant(kernel)
    torch.compile(plain, backend=layerzero, options=LOCK)(*operands())
    assert only_match().rewritten


def test_shared_heads_in_the_wrong_order_are_caught(plant):
    plant(with_heads_in_tiled_order)
    is_caught(grouped, operands(heads=6), "output with plain")


def test_a_mask_transposed_where_it_is_square_is_caught(plant):
    plant(with_the_mask_transposed_where_it_is_square)
    args = [torch.randn(2, 3, 9, 16) for _ in range(3)]
    is_caught(masked, [*args, keep(2, 3, 9, 9)], "output with")


@pytest.mark.parametrize("kernel", [with_the_bias_scaled, with_the_bias_after_the_softmax], ids=named)
def test_a_wrong_bias_is_caught(plant, kernel):
    plant(kernel)
    is_caught(biased, [*operands(), torch.randn(3, 7, 11)], "output with plain")


def test_a_mean_is_caught_where_the_source_gives_nan_by_its_dtype_alone(plant):
    def overflowing(query, key, value, keep):
        scores = (query @ key.transpose(-2, -1) * 0.3).masked_fill(~keep, -1e9).half()
        return scores.softmax(-1) @ value.half()

    def in_float32(x, attrs):
        return with_the_mean_for_masked_rows(
            Operands(x.query.float(), x.key.float(), x.value.float(), mask=x.mask), attrs
        ).half()

    plant(in_float32)
    torch.compile(overflowing, backend=layerzero, options=LOCK)(*operands(), keep(2, 1, 7, 11))
    (reason,) = only_match().reasons
    assert reason.message.startswith("torch.sdpa: output with masked rows")


def test_a_kernel_that_passes_on_nan_from_masked_keys_is_caught(plant, monkeypatch):
    monkeypatch.setattr(validate.Match, "assuming_finite", lambda match: match)
    every = registry.kernels("attention")["lz.blocked"].supports
    plant(RIGHT)
    monkeypatch.setattr(
        "lz_compile.runtime.choose.select.kernels",
        lambda op: {name: replace(spec, supports=spec.supports | every) for name, spec in registry.kernels(op).items()},
    )
    is_caught_first(masked, [*operands(), keep(2, 1, 7, 11)], "output with large")


def test_a_kernel_that_hides_a_query_of_nan_is_caught(plant):
    plant(lambda x, attrs: plain_with(Operands(x.query.nan_to_num(), x.key, x.value), attrs))
    lock = {"layerzero.lock": {"attention": "torch.sdpa"}}
    args = [torch.randn(2, 3, length, 16) for length in (7, 23, 23)]
    torch.compile(plain, backend=layerzero, options=lock)(*args)
    assert only_match().reasons[0].message.startswith("torch.sdpa: output with large")


def is_caught_first(function: Callable[..., Tensor], args: list[Tensor], reason: str) -> None:
    """The planted kernel was found to be wrong; another one runs."""
    torch.compile(function, backend=layerzero, options=LOCK)(*args)
    assert [found.code for found in only_match().reasons] == ["VALIDATION_FAILED"]
    assert only_match().reasons[0].message.startswith(f"torch.sdpa: {reason}")


def test_a_kernel_that_gives_no_gradient_at_all_is_caught(plant):
    plant(lambda x, attrs: plain_with(x, attrs).detach())
    args = operands(requires_grad=True)
    actual = torch.compile(plain, backend=layerzero, options=LOCK)(*args)
    assert not only_match().rewritten
    assert only_match().reasons
    gradients = torch.autograd.grad(plain(*args).sum(), args)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), args), gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [with_the_default_scale, with_heads_reversed, without_the_last_key], ids=named)
def test_a_wrong_kernel_is_caught_in_every_dtype(plant, kernel, dtype):
    plant(kernel)
    args = [arg.to(dtype) for arg in operands()]
    actual = torch.compile(plain, backend=layerzero, options=LOCK)(*args)
    assert [reason.code for reason in only_match().reasons] == ["VALIDATION_FAILED"]
    tolerance = {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(actual, plain(*args), atol=tolerance, rtol=tolerance)


def test_a_right_kernel_that_sums_in_another_order_passes(plant):
    def in_pieces(x, attrs):
        scores = x.query[..., ::2] @ x.key[..., ::2].mT + x.query[..., 1::2] @ x.key[..., 1::2].mT
        weights = (scores * attrs.scale).softmax(-1)
        return weights[..., 1:] @ x.value[:, :, 1:] + weights[..., :1] @ x.value[:, :, :1]

    plant(in_pieces)
    args = operands(requires_grad=True)
    actual = torch.compile(plain, backend=layerzero, options=LOCK)(*args)
    assert only_match().rewritten
    torch.testing.assert_close(actual, plain(*args))


def test_a_kernel_that_rounds_less_than_the_source_passes(plant):
    def widened(x, attrs):
        return plain_with(Operands(x.query.float(), x.key.float(), x.value.float()), attrs).to(x.query.dtype)

    plant(widened)
    torch.compile(plain, backend=layerzero, options=LOCK)(*[arg.bfloat16() for arg in operands()])
    match = only_match()
    assert match.rewritten
    assert match.validation["error"] <= match.validation["source_error"]


def test_strict_mode_raises_for_a_wrong_kernel(plant):
    plant(with_heads_reversed)
    with pytest.raises(BackendCompilerFailed) as failure:
        torch.compile(plain, backend=layerzero, options={**LOCK, "layerzero.strict": True})(*operands())
    assert isinstance(failure.value.inner_exception, RewriteFailedError)
    assert "torch.sdpa for attention" in str(failure.value)
    assert "is quarantined: output with plain: off by" in str(failure.value)


# ---- what a verdict holds for --------------------------------------------------------------------------------------


def counting(kernel: Kernel) -> tuple[Kernel, list[Any]]:
    calls: list[Any] = []

    def counted(x: Operands, attrs: Any) -> Any:
        if not isinstance(x.query, fx.Proxy):
            calls.append(tuple(x.query.shape) + tuple(x.key.shape))
        return kernel(x, attrs)

    return counted, calls


def layers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    total = plain(query, key, value)
    for index in range(1, 5):
        total = total + plain(query + index, key, value)
    return total


def test_equal_layers_are_proven_once(plant):
    kernel, calls = counting(RIGHT)
    plant(kernel)
    torch.compile(layers, backend=layerzero, options=LOCK)(*operands())
    origins = [match.validation["origin"] for match in reports()[0].matches]
    assert sorted(origins) == ["memory", "memory", "memory", "memory", "run"]
    assert len(calls) == reports()[0].matches[0].validation["cases"]


def test_a_wrong_kernel_is_refused_from_memory_too(plant):
    plant(with_heads_reversed)
    args = operands()
    actual = torch.compile(layers, backend=layerzero, options=LOCK)(*args)
    assert [match.rewritten for match in reports()[0].matches] == [False] * 5
    assert [match.kernel for match in reports()[0].matches] == ["inductor"] * 5
    torch.testing.assert_close(actual, layers(*args))


def origin_of(function: Callable[..., Tensor], args: list[Tensor]) -> str:
    torch._dynamo.reset()
    clear_reports()
    torch.compile(function, backend=layerzero, options=LOCK)(*args)
    assert only_match().rewritten
    return only_match().validation["origin"]


def test_a_verdict_is_read_from_disk_when_memory_has_forgotten_it():
    args = operands()
    assert origin_of(plain, args) == "run"
    assert origin_of(plain, args) == "disk"


def test_a_verdict_holds_for_other_large_sizes_of_the_same_structure():
    assert origin_of(plain, [torch.randn(2, 3, length, 16) for length in (64, 96, 96)]) == "run"
    assert origin_of(plain, [torch.randn(2, 3, length, 16) for length in (80, 200, 200)]) == "disk"


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda args: [arg.double() for arg in args], id="dtype"),
        pytest.param(lambda args: [arg.requires_grad_() for arg in args], id="gradients"),
        pytest.param(lambda args: [args[0], args[1], args[2][..., :8]], id="value_dim"),
        pytest.param(lambda args: [arg[:, :1] for arg in args], id="single_head"),
    ],
)
def test_a_verdict_does_not_hold_for_another(changed):
    assert origin_of(plain, operands()) == "run"
    assert origin_of(plain, changed(operands())) == "run"


def test_a_verdict_does_not_hold_for_another_spelling_or_scale():
    args = operands()
    assert origin_of(plain, args) == "run"
    assert origin_of(lambda q, k, v: (q @ k.transpose(-2, -1) * 0.4).softmax(-1) @ v, args) == "run"
    assert origin_of(lambda q, k, v: (q * 0.3 @ k.transpose(-2, -1)).softmax(-1) @ v, args) == "run"


def test_a_verdict_does_not_hold_under_autocast():
    args = operands()
    assert origin_of(plain, args) == "run"
    with torch.autocast("cpu", torch.bfloat16):
        assert origin_of(plain, args) == "run"


CORRUPT = {
    "empty": "",
    "cut": "{",
    "list": "[]",
    "null": "null",
    "no fields": "{}",
    "missing fields": '{"ok": true}',
    "missing verdict": '{"error": 0.0}',
    "binary": "\x00\xff",
    "deep": "[" * 100_000,
    "large": " " * (2 << 20) + "{}",
}


def test_a_corrupt_record_is_computed_again(tmp_path):
    args = operands()
    assert origin_of(plain, args) == "run"
    (path,) = (tmp_path / "layerzero").rglob("*.json")
    right = path.read_text()
    for name, text in CORRUPT.items():
        path.write_text(text)
        assert origin_of(plain, args) == "run", name
        assert [event.code for event in reports()[0].events] == ["STORE_UNREADABLE"], name
        assert json.loads(path.read_text()).keys() == json.loads(right).keys(), name


WRONG_FIELDS = [
    *({"ok": value} for value in ("false", "true", 0, 1, None, [])),
    *({"error": value} for value in ("0", None, -1.0, True)),
    {"grad_error": "none"}, {"cases": 0}, {"cases": 2.5}, {"reason": None}, {"origin": "disk"}, {"unknown": 1},
]  # fmt: skip


@pytest.mark.parametrize("changed", WRONG_FIELDS, ids=map(str, WRONG_FIELDS))
def test_a_record_with_a_field_of_another_type_proves_nothing(tmp_path, changed):
    store = Store("validation", tmp_path)
    store.save("key", {**validate.Validation(ok=True, cases=3).to_dict()})
    assert validate._stored(store, "key").ok
    store.save("key", {**validate.Validation(ok=True, cases=3).to_dict(), **changed})
    with events.collect() as happened:
        assert validate._stored(store, "key") is None
    assert [event.code for event in happened] == ["STORE_UNREADABLE"]


@pytest.fixture
def another_machine(monkeypatch) -> Iterator[Callable[[str], None]]:
    """Changes one thing about this machine that decides about a kernel's results."""

    def change(what: str) -> None:
        if what == "instruction set":
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2 of another CPU")
        elif what == "compiler":
            monkeypatch.setattr(machine, "_compiler", lambda: "another")
        elif what == "precision":
            monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
        else:
            monkeypatch.setattr(hardware, "hardware", lambda device: hardware.Hardware("cuda", "NVIDIA A100", 80))

    yield change
    hardware.forget()


@pytest.mark.parametrize("what", ["instruction set", "compiler", "precision", "GPU"])
def test_a_verdict_does_not_hold_on_another_machine(another_machine, what):
    assert origin_of(plain, operands()) == "run"
    another_machine(what)
    assert origin_of(plain, operands()) == "run"
    assert origin_of(plain, operands()) == "disk"


def test_two_gpus_of_one_generation_do_not_share_a_proof(monkeypatch):
    found = []
    for name in ("NVIDIA A100", "NVIDIA A10"):
        monkeypatch.setattr(hardware, "hardware", lambda device, name=name: hardware.Hardware("cuda", name, 80))
        found.append(machine.proven_on("cuda"))
    assert found[0] != found[1]


def test_a_plugins_kernel_is_another_one_when_its_source_changes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "plugged_adapter.py"
    source.write_text("def attention(x, attrs):\n    return x.value\n")
    spec = replace(
        registry.kernels("attention")["torch.sdpa"], implementation=LazyFunction("plugged_adapter", "attention")
    )
    assert not spec.is_shipped
    assert not spec.is_reproducible, "without a version nobody knows what it is in another process"
    assert spec.load() is None
    before = spec.identity
    source.write_text("def attention(x, attrs):\n    return x.key\n")
    assert spec.identity != before


def test_a_cache_that_cannot_be_written_is_an_event_and_nothing_more(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "file"))
    args = operands()
    actual = torch.compile(plain, backend=layerzero, options=LOCK)(*args)
    assert only_match().rewritten
    assert {event.code for event in reports()[0].events} <= {"STORE_UNREADABLE", "STORE_UNWRITABLE"}
    assert "STORE_UNWRITABLE" in {event.code for event in reports()[0].events}
    torch.testing.assert_close(actual, plain(*args))


def test_no_temporary_file_is_left_beside_a_record(tmp_path):
    origin_of(plain, operands())
    assert [path.suffix for path in (tmp_path / "layerzero").rglob("*") if path.is_file()] == [".json"]


def test_a_record_that_a_full_disk_does_not_take_leaves_nothing_behind(tmp_path):
    resource = pytest.importorskip("resource", reason="file sizes are limited on POSIX alone")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (4096, before[1])
        )  # half of the record fits, as on a disk that fills up
        with events.collect() as happened:
            Store("proofs", tmp_path).save("key", {"text": "x" * 8192})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [event.code for event in happened] == ["STORE_UNWRITABLE"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# ---- what validation must not do -----------------------------------------------------------------------------------


def test_the_state_of_random_numbers_is_left_alone():
    args = [*operands(requires_grad=True), keep(2, 1, 7, 11)]
    torch.manual_seed(3)
    random.seed(3)
    before, python_before = torch.get_rng_state(), random.getstate()
    torch.compile(masked, backend=layerzero, options=LOCK)(*args)
    assert only_match().validation["origin"] == "run"
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python_before


def test_the_state_of_random_numbers_is_left_alone_when_a_kernel_fails(plant):
    def fails(*_, **__):
        torch.randn(3)
        raise ZeroDivisionError("planted")

    plant(fails)
    args = operands()
    before = torch.get_rng_state()
    torch.compile(plain, backend=layerzero, options=LOCK)(*args)
    assert [reason.code for reason in only_match().reasons] == ["REWRITE_FAILED"]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_inputs_of_the_user_are_not_touched(plant):
    def overwriting(x, attrs):
        out = plain_with(x, attrs)
        if not isinstance(x.query, fx.Proxy):
            x.query.detach().zero_()
        return out

    plant(overwriting)
    args = operands(requires_grad=True)
    again = [arg.detach().clone() for arg in args]
    torch.compile(plain, backend=layerzero, options=LOCK)(*args)
    assert [torch.equal(*pair) for pair in zip(args, again, strict=True)] == [True] * 3
    assert [arg.grad for arg in args] == [None] * 3


def test_long_sequences_are_proven_at_small_sizes(plant):
    kernel, calls = counting(RIGHT)
    plant(kernel)
    args = [torch.randn(1, 1, 4096, 8) for _ in range(3)]
    torch.compile(plain, backend=rewrite_and_run_nothing)(*args)
    assert only_match().rewritten
    assert max(extent for shape in calls for extent in shape) <= 64
    assert only_match().validation["seconds"] < 2


def rewrite_and_run_nothing(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    pipeline.rewrite(module, Options(), new_report())
    return lambda *_: (torch.empty(()),)


def test_a_batch_of_symbolic_size_is_proven_at_small_sizes(plant):
    kernel, calls = counting(RIGHT)
    plant(kernel)
    args = operands()
    torch.testing.assert_close(torch.compile(plain, backend=layerzero, dynamic=True)(*args), plain(*args))
    assert only_match().rewritten
    assert max(extent for shape in calls for extent in shape) <= 64


def test_sizes_stay_as_different_as_they_were(plant):
    kernel, calls = counting(RIGHT)
    plant(kernel)
    torch.compile(plain, backend=layerzero, options=LOCK)(*[torch.randn(9, 10, length, 11) for length in (12, 13, 13)])
    batch, heads, queries, dim, _, _, keys, _ = calls[0]
    assert len({batch, heads, queries, keys, dim}) == 5


def test_a_kernel_that_limits_head_dims_is_proven_at_the_real_one(monkeypatch):
    seen: set[int] = set()

    def picky(x, attrs):
        seen.add(x.query.shape[-1])
        return torch_sdpa.attention(x, attrs)

    limited = KernelSpec(
        "test.picky", "attention", "test", frozenset({"cpu"}), frozenset({"float32"}), frozenset({"BHSD"}),
        implementation=picky, head_dim_multiple=64, min_head_dim=64, max_head_dim=128, deterministic=True,
    )  # fmt: skip
    registry.register(limited)
    try:
        query, key, value = (torch.randn(2, 4, 40, 64) for _ in range(3))
        backend = Rewriting(lock={"attention": "test.picky"})
        torch.compile(lambda q, k, v: (q @ k.mT * 0.125).softmax(-1) @ v, backend=backend)(query, key, value)
    finally:
        registry.unregister_kernel("test.picky")
    assert [match.kernel for match in backend.report.matches] == ["test.picky"], backend.why_not()
    assert seen == {64}
