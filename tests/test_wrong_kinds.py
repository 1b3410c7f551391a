"""Names and paths of another kind than text are refused by an error that says what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    with pytest.raises(lz.ArgumentError, match="expected input as a dense tensor, received a nested one"):
        lz.which("norm.rms", torch.nested.nested_tensor([torch.ones(4, 4)]), torch.ones(4))


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
