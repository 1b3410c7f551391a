"""C++ kernels of a graph in one library: the same bits as one by one, and one by one where they cannot be together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.utils import fresh_cache

from lz_compile.ground import events
from lz_compile.lowering import cpp_builds, dynamo, joined_kernels
from lz_compile.lowering.joined_kernels import joined, may_be_joined, shared_out

PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


def separate(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Three kernels, between which are products: a sum, integers, and operands of two dtypes."""
    one = torch.softmax(x, -1) @ other
    places = torch.arange(x.shape[-1]) * 3 // 2
    two = torch.sin(one) @ (other * places).exp().reciprocal()
    return two.tanh().double() + x.double(), places.cumsum(0), one


def around_a_product(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Two kernels."""
    return (x.sin() @ other).cos()


@pytest.fixture
def built(monkeypatch) -> Iterator[list[str]]:
    """The C++ that is built, in empty caches, by two threads; headers apart."""
    found: list[str] = []
    build = CppBuilder.build
    cpp_builds.vector_bits()  # what instructions are tried by is built once for a process

    def noting(builder: CppBuilder) -> None:
        found.extend(path for path in [builder.get_target_file_path()] if path.endswith(".main.so"))
        build(builder)

    monkeypatch.setattr(CppBuilder, "build", noting)
    with fresh_cache(), config.patch(compile_threads=2):
        yield found
    torch._dynamo.reset()


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((5, 6), (6, 6))]


def _compiled(backend: str, function: Callable[..., Any] = separate) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend)(*_inputs())


def _assert_same_bits(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_kernels_of_a_graph_are_one_library_with_the_same_bits(built):
    expected = _compiled("inductor")
    assert len(built) > 2
    built.clear()
    _assert_same_bits(_compiled("layerzero"), expected)
    assert len(built) == 1
    _assert_same_bits(_compiled("layerzero"), expected)  # from Inductor's cache
    assert len(built) == 1
    assert Path(built[0]) in dynamo.built_libraries()
    torch.compiler.reset()
    with fresh_cache():
        _compiled("inductor", around_a_product)
    assert len(built) == 1 + 2, "what is ours holds while we compile only"


def test_kernels_of_a_backward_pass_are_together_too(built):
    weights, found = [each.requires_grad_() for each in _inputs()], {}

    def loss(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return around_a_product(x, other).sum()

    for backend in ("inductor", "layerzero"):
        torch._dynamo.reset()
        built.clear()
        found[backend] = torch.autograd.grad(torch.compile(loss, backend=backend)(*weights), weights)
        found[f"{backend} built"] = len(built)
    _assert_same_bits(found["layerzero"], found["inductor"])
    assert found["layerzero built"] == 2 < found["inductor built"]


def test_what_cannot_be_built_together_is_built_one_by_one(built, monkeypatch):
    expected = _compiled("inductor", around_a_product)
    monkeypatch.setattr(cpp_builds, "joined", lambda *_: f"{PREFIX}#error not together\n")
    with events.collect() as happened:
        _assert_same_bits(_compiled("layerzero", around_a_product), expected)
    assert {each.code for each in happened} >= {"KERNELS_NOT_JOINED"}


def test_where_one_thread_compiles_every_kernel_is_built_at_once(built):
    with config.patch(compile_threads=1):
        _compiled("layerzero", around_a_product)
    assert len(built) == 2


@pytest.mark.parametrize(
    ("line", "is_joined"),
    [
        ("#pragma omp parallel num_threads(2)", True),
        ("  #pragma GCC ivdep", True),
        ("#include <ATen/record_function.h>", False),
        ("#define kernel other", False),
        (PREFIX.strip(), False),
    ],
)
def test_only_what_asks_nothing_else_of_the_preprocessor_is_joined(line: str, is_joined: bool):
    assert may_be_joined(f'{PREFIX}extern "C" void kernel()\n{{\n{line}\n}}') is is_joined


def test_a_source_without_inductors_header_is_not_joined():
    assert not may_be_joined('extern "C" void kernel() {}')


@given(st.lists(st.integers(1, 3 * joined_kernels._MOST), min_size=1, max_size=12))
def test_every_kernel_is_in_one_library_and_none_is_too_large_for_want_of_another(sizes: list[int]):
    parts = list(shared_out(["x" * size for size in sizes]))
    assert [place for part in parts for place in part] == list(range(len(sizes)))
    for part in parts:
        assert len(part) == 1 or sum(sizes[place] for place in part) <= joined_kernels._MOST


def test_the_first_kernel_keeps_its_name_and_includes_come_once():
    text = joined([f"{PREFIX}#include <Python.h>\nvoid kernel();"] * 2, "kernel")
    assert text.count("#include <Python.h>") == text.count(PREFIX) == 1
    assert text.count("#define kernel ") == text.count("#undef kernel") == 1
