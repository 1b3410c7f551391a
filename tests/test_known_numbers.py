"""A dimension that differs from call to call is an input of graphs, in each of which a guard fixes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Rewriting
from torch import Tensor

Q, K, V = torch.randn(3, 2, 4, 9, 16, generator=torch.Generator().manual_seed(0))


def attention(x: Tensor, dim: int) -> Tensor:
    return torch.softmax(x @ K.transpose(dim, -2) / 4, dim=dim) @ V


def norm(x: Tensor, dim: int) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-6) * K


def of_remainder(x: Tensor, dim: int) -> Tensor:
    return norm(x.unsqueeze(dim % 4)[0], -1)


def rope(x: Tensor, dim: int) -> Tensor:
    cos, sin = K[0].unsqueeze(dim).cos(), K[0].unsqueeze(dim).sin()
    return x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin


@pytest.mark.parametrize(
    ("function", "dims", "kernel"),
    [
        (attention, (-1, 3), {"attention": "lz.blocked"}),
        (norm, (-1, 3), {"norm": "torch.norm"}),
        (of_remainder, (4, 8), {"norm": "torch.norm"}),
        (rope, (0, -4), {"rope": "torch.rope"}),
    ],
)
def test_an_op_is_found_along_a_dimension_that_is_an_input(function: Any, dims: tuple[int, int], kernel: Any) -> None:
    backend = Rewriting(lock=kernel, strict=True)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for dim in dims:  # the second time it is another one, and with it an input
        torch.testing.assert_close(compiled(Q, dim), function(Q, dim))
    assert len(backend.report.graphs) == 2, "each has a graph of its own"
    assert [match.rewritten for match in backend.report.matches] == [True, True], backend.why_not()


def test_what_a_program_asserts_of_a_number_from_data_is_asserted_in_each_call() -> None:
    def program(x: Tensor, count: Tensor) -> Tensor:
        number = count.sum().item()
        return norm(x, -1) + torch.ones(number)[:, None]

    backend = Rewriting(lock={"norm": "torch.norm"}, strict=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(Q, torch.tensor([4, 5])), program(Q, torch.tensor([4, 5])))
        assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            compiled(Q, torch.tensor([4, 4]))
