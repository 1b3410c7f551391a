"""``as_strided`` with an offset counts from where memory begins; Dynamo does not ask where an input begins in that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Traced
from torch import Tensor


def of_an_input(x: Tensor) -> Tensor:
    return x.as_strided((2,), (1,), 3) * 2


def of_a_view(x: Tensor) -> Tensor:
    return torch.as_strided(x[1:], (2,), (1,), storage_offset=0) * 2


def from_where_it_begins(x: Tensor) -> Tensor:
    return x.as_strided((2,), (1,)) * 2


def of_a_result(x: Tensor) -> Tensor:
    return x.sin().as_strided((2,), (1,), 3) * 2


@pytest.mark.parametrize(
    ("function", "compiles"), [(of_an_input, 2), (of_a_view, 2), (from_where_it_begins, 1), (of_a_result, 1)]
)
def test_a_tensor_that_begins_elsewhere_is_compiled_for_anew(
    function: Callable[[Tensor], Tensor], compiles: int
) -> None:
    backend, memory = Traced(), torch.arange(12.0)
    fast = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    for start in (0, 2, 0, 2):
        part = memory[start : start + 6]
        torch.testing.assert_close(fast(part), function(part))
    assert len(backend.graphs) == compiles


def in_a_checkpoint(x: Tensor) -> Tensor:
    part = torch.utils.checkpoint.checkpoint(of_an_input, x, use_reentrant=False)
    assert isinstance(part, Tensor)
    return part


def as_a_copy(x: Tensor) -> Tensor:
    return torch.as_strided_copy(x, (2,), (1,), 3) * 2


@pytest.mark.parametrize("function", [of_an_input, of_a_view, in_a_checkpoint, as_a_copy])
def test_what_inductor_makes_and_keeps_reads_the_right_place(function: Callable[[Tensor], Tensor]) -> None:
    memory = torch.arange(12.0)
    for start in (0, 2, 1):  # Inductor's caches take inputs that begin elsewhere for equal ones
        torch._dynamo.reset()
        fast = torch.compile(function, backend="layerzero")
        for begin in (start, 0):
            part = memory[begin : begin + 6]
            torch.testing.assert_close(fast(part), function(part))
