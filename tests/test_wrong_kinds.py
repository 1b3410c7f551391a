"""Names and paths of another kind than text are refused by an error that says what was expected."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lz_compile as lz

NAMES: list[Callable[[Any], Any]] = [
    lambda name: lz.lock(name, "torch.sdpa"),
    lambda name: lz.lock("attention", name),
    lz.unlock,
    lz.prefer,
    lz.avoid,
]
PATHS: list[Callable[[Any], Any]] = [
    lz.save_artifacts,
    lz.load_artifacts,
    lz.inspect_artifacts,
    lambda path: lz.merge_artifacts("merged.zip", path),
    lambda path: lz.merge_artifacts("merged.zip", [path]),
    lambda path: lz.merge_artifacts(path, []),
    lz.load_dispatch_table,
    lz.save_decisions,
    lz.readiness_check,
    lambda path: lz.readiness_check(artifacts=path),
    lz.load_config,
]


@pytest.mark.parametrize(
    "wrong", [3, b"torch.sdpa", ["torch.sdpa"], torch.zeros(2), object()], ids=lambda each: type(each).__name__
)
@pytest.mark.parametrize("call", NAMES)
def test_a_name_is_text(call: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises(lz.ConfigError, match=r"expected .* by its name, received"):
        call(wrong)


@pytest.mark.parametrize(
    "wrong", [3, b"file", object(), "", "a\0b"], ids=["number", "bytes", "object", "empty", "zero byte"]
)
@pytest.mark.parametrize("call", PATHS)
def test_a_path_is_text(call: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises(lz.ArgumentError, match=r"expected (path|paths|output|dispatch_table|artifacts) "):
        call(wrong)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc])
def test_an_operand_is_dense(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for call in (lz.linear, lambda x, weight: lz.which("norm.rms", x, weight[0])):
        with pytest.raises(lz.ArgumentError, match="expected input as a dense tensor, received"):
            call(make(torch.ones(4, 4)), torch.ones(4, 4))


def test_an_operand_has_sizes() -> None:
    nested, scan = torch.nested.nested_tensor([torch.ones(4, 4)]), (torch.ones(1, 4, 4),) * 2
    for call in (
        lambda: lz.which("norm.rms", nested, torch.ones(4)),
        lambda: lz.rms_norm(nested, torch.ones(4)),
        lambda: lz.linear_scan(*scan[:1], nested),
        lambda: lz.sample(nested),
    ):
        with pytest.raises(
            lz.LayerZeroError, match=r"expected (input|drive|logits) as a dense tensor, received a nested"
        ):
            call()


def test_an_operand_is_dense_behind_others_that_fit() -> None:
    tensors = torch.ones(3, 1, 2, 4, 8)
    lz.attention(*tensors)
    for place, name in enumerate(("query", "key", "value")):
        given = [each.to_sparse() if index == place else each for index, each in enumerate(tensors)]
        with pytest.raises(lz.ArgumentError, match=f"expected {name} as a dense tensor, received torch.sparse_coo"):
            lz.attention(*given)


def test_one_and_zero_say_whether_attention_is_causal() -> None:
    tensors = torch.randn(3, 1, 2, 5, 8)
    for causal in (1, True, 0, False):
        want = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=bool(causal))
        torch.testing.assert_close(lz.attention(*tensors, causal=causal), want)


def test_whole_numbers_that_pytorch_does_not_compare_are_read() -> None:
    logits, probs = torch.arange(40.0).expand(3, 40), torch.full((3, 3, 8), 1 / 8)
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        top_k = torch.tensor([1, 2, 3]).to(dtype)
        assert (lz.sampling_probs(logits, top_k=top_k) > 0).sum(-1).tolist() == [1, 2, 3]
        with pytest.raises(lz.ConstraintError, match=r"draft_tokens within 0..7, received 3..9"):
            lz.speculative_verify(torch.tensor([[3, 9]] * 3).to(dtype), None, probs)


@pytest.mark.parametrize("wrong", [torch.ones(2), "x", None, 0.5], ids=str)
def test_whether_probabilities_are_looked_at_is_true_or_false(wrong: Any) -> None:
    with pytest.raises(lz.ArgumentError, match="expected check_probabilities as True or False"):
        lz.speculative_verify(torch.zeros(1, 1).long(), None, torch.ones(1, 2, 1), check_probabilities=wrong)


def test_operands_on_another_device_are_refused_behind_others_that_fit() -> None:
    query, key, value = torch.ones(3, 1, 2, 4, 8)
    lz.attention(query, key, value)
    with pytest.raises(lz.ArgumentError, match="expected key on cpu as query is, received meta"):
        lz.attention(query, key.to("meta"), value)


def test_a_choice_of_a_rotation_is_one() -> None:
    with pytest.raises(lz.ArgumentError, match="expected interleaved as True or False"):
        lz.rope(torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 8), torch.ones(2))  # type: ignore[arg-type]


def test_the_kernel_that_is_tried_is_named() -> None:
    with pytest.raises(lz.ArgumentError, match="expected kernel_id as the name of a kernel, received 3"):
        lz.validate(3, torch.ones(4, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["platform", "supported_dtypes", "supports", "requires_isa", "fuses_ops"])
@pytest.mark.parametrize("wrong", [None, 3, [None], torch.zeros(())], ids=str)
def test_what_is_registered_has_names(argument: str, wrong: Any) -> None:
    given = {"operation": "norm.rms", "kernel_id": "mine.norm", "platform": "cpu", "supported_dtypes": [torch.float32]}
    with pytest.raises(lz.RegistrationError, match=f"expected {argument} as a name or several, received"):
        lz.register_kernel(**{**given, argument: wrong})(lambda x, attrs: x.input)


def test_the_id_of_a_kernel_is_text() -> None:
    with pytest.raises(lz.RegistrationError, match="expected kernel_id as text"):
        lz.register_kernel(operation="norm.rms", kernel_id=3, platform="cpu", supported_dtypes=["float32"])  # type: ignore[arg-type]


def _solve(**given: Any) -> object:
    return lz.solve(**{"model": torch.nn.Linear(2, 2), "shape_buckets": {"batch": [2]}, "tune": "off", **given})


def _serve(**given: Any) -> None:
    lz.serve(**{"model": torch.nn.Linear(2, 2), **given}).close()


#: Calls with an argument of another kind, and the name that the error says.
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: lz.configure(prefer_sources={3}), "prefer_sources"),
    (lambda: lz.configure(rules={3}), "rules"),
    (lambda: lz.configure(locks=set()), "locks"),
    (lambda: lz.log_as_json(3), "stream"),  # type: ignore[arg-type]
    (lambda: lz.log_as_json(level="LOUD"), "level"),
    (lambda: lz.log_as_json(level=None), "level"),  # type: ignore[arg-type]
    (lambda: lz.explain(3), "model"),  # type: ignore[call-overload]
    (lambda: lz.explain(torch.sin, torch.ones(2), options=3), "options"),  # type: ignore[call-overload]
    (lambda: lz.explain(torch.sin, torch.ones(2), dynamic="yes"), "dynamic"),  # type: ignore[call-overload]
    (lambda: lz.dry_run(torch.ones(2)), "model"),  # type: ignore[arg-type]
    (lambda: lz.dry_run(torch.nn.Linear, 2, 2), "model"),
    (lambda: lz.explain(torch.sin, torch.ones(2), dynamic=1), "dynamic"),  # type: ignore[call-overload]
    (lambda: lz.warmup(np.zeros(2)), "operation"),
    (lambda: lz.list_kernels(np.zeros(2)), "operation"),
    (lambda: lz.warmup(shapes=torch.ones(2)), "shapes"),  # type: ignore[arg-type]
    (lambda: lz.warmup(device=1 << 70), "device"),  # type: ignore[arg-type]
    (lambda: lz.tune(mask=np.zeros(2)), "mask"),
    (lambda: lz.tune(dtype=torch.ones(())), "dtype"),  # type: ignore[arg-type]
    (lambda: _solve(dims={1: 2}), "dims"),
    (lambda: _solve(shape_buckets={"batch": torch.ones(2)}), "batch"),
    (lambda: lz.dry_run(torch.sin, torch.ones(2), options=["layerzero.strict"]), "options"),  # type: ignore[arg-type]
    (lambda: lz.dry_run(torch.sin, torch.ones(2), options={1: 2}), "options"),  # type: ignore[dict-item]
    (lambda: lz.warmup("norm.rms", sizes=3), "sizes"),  # type: ignore[arg-type]
    (lambda: lz.warmup("norm.rms", sizes={"num_rows": "many"}), "num_rows"),  # type: ignore[dict-item]
    (lambda: lz.warmup("norm.rms", sizes={"num_rows": ()}), "num_rows"),
    (lambda: lz.warmup("norm.rms", sizes={"num_rows": 2.5}), "num_rows"),  # type: ignore[dict-item]
    (lambda: lz.warmup(dtype="float32"), "dtype"),  # type: ignore[arg-type]
    (lambda: lz.warmup(device="nowhere"), "device"),
    (lambda: lz.warmup(device="meta"), "device"),
    (lambda: lz.warmup(shapes=(1, 2, 4, 8)), "shapes"),  # type: ignore[arg-type]
    (lambda: lz.warmup(layout="BSD"), "layout"),  # type: ignore[arg-type]
    (lambda: lz.tune("norm.rms", dtype="float32"), "dtype"),  # type: ignore[arg-type]
    (lambda: lz.tune("norm.rms", dtype=torch.int64), "dtype"),
    (lambda: lz.tune("norm.rms", sizes=[3]), "sizes"),  # type: ignore[arg-type]
    (lambda: lz.tune("norm.rms", sizes={3: 4}), "sizes"),  # type: ignore[dict-item]
    (lambda: lz.tune(head_dim="wide"), "head_dim"),  # type: ignore[arg-type]
    (lambda: lz.tune(samples=1.5), "samples"),  # type: ignore[arg-type]
    (lambda: lz.tune(budget_s="long"), "budget_s"),  # type: ignore[arg-type]
    (lambda: lz.tune(on_progress=3), "on_progress"),  # type: ignore[arg-type]
    (lambda: lz.tune(training="yes"), "training"),  # type: ignore[arg-type]
    (lambda: lz.tune(mask=3), "mask"),  # type: ignore[arg-type]
    (lambda: _solve(model=3), "model"),
    (lambda: _solve(shape_buckets=[2]), "shape_buckets"),
    (lambda: _solve(shape_buckets={"batch": 2}), "batch"),
    (lambda: _solve(dims=0), "dims"),
    (lambda: _solve(dims={"batch": "first"}), "dims"),
    (lambda: _solve(inputs=3), "inputs"),
    (lambda: _solve(inputs=lambda bucket: torch.ones(2, 2)), "inputs"),
    (lambda: _solve(options=3, inputs=lambda bucket: ([], {})), "options"),
    (lambda: _solve(budget_s="long"), "budget_s"),
    (lambda: _solve(compile_jit=torch.ones(2)), "compile_jit"),
    (lambda: _serve(model=3), "model"),
    (lambda: _serve(mode=3), "mode"),
    (lambda: _serve(options=3), "options"),
    (lambda: _serve(queued="many"), "queued"),
    (lambda: _serve(most=None), "most"),
    (lambda: _serve(calls=3), "calls"),
    (lambda: _serve(calls=[torch.ones(2)]), "calls"),
    (lambda: _serve(padding=8), "padding"),
    (lambda: _serve(padding=lz.Padding(0, 8)), "padding"),  # type: ignore[arg-type]
    (lambda: _serve(padding=lz.Padding(0, ["a"])), "padding"),  # type: ignore[list-item]
    (lambda: _serve(padding=lz.Padding(0, [8], 3)), "padding"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "name"), WRONG)
def test_an_argument_of_another_kind_is_named(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(lz.LayerZeroError, match=f"(expected|configuring|reading|warming up|listing).*{name}"):
        call()


def test_the_level_of_a_log_changes_nothing_where_it_is_wrong() -> None:
    lz.log_as_json(level="ERROR")
    before = logging.getLogger("lz_compile").handlers[:]
    try:
        with pytest.raises(lz.ArgumentError, match="expected level"):
            lz.log_as_json(level=set())  # type: ignore[arg-type]
        assert logging.getLogger("lz_compile").handlers == before
    finally:
        for each in before:
            logging.getLogger("lz_compile").removeHandler(each)


def test_what_provides_no_tracer_is_refused() -> None:
    pytest.importorskip("opentelemetry")
    for name in ("tracer_provider", "meter_provider"):
        with pytest.raises(lz.ArgumentError, match=f"expected {name} of OpenTelemetry"):
            lz.instrument(**{name: object()})


@pytest.mark.parametrize("argument", ["is_traceable", "check"])
def test_what_is_registered_is_told_by_its_kind(argument: str) -> None:
    given = {"operation": "norm.rms", "kernel_id": "mine.norm", "platform": "cpu", "supported_dtypes": ["float32"]}
    with pytest.raises(lz.RegistrationError, match=f"expected {argument} as"):
        lz.register_kernel(**{**given, argument: torch.ones(2)})
