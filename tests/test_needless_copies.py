"""Copies of kernels' results that are left out of a graph, and those that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import lz_compile.lowering.kernels.scan.rolled
from lz_compile.lowering.needless_copies import leave_out_needless_copies
from lz_compile.lowering.ops.scan import Operands, ScanAttrs

B, T, D = 2, 5, 8
CLONE = torch.ops.aten.clone.default


def scanned(x: Tensor) -> Tensor:
    """``[B, T, D]``, batch by batch, as they lie in memory."""
    found = lz_compile.lowering.kernels.scan.rolled.scan(Operands(drive=x[:, None, :, None]), ScanAttrs())[0]
    return found.permute(0, 2, 1, 3, 4).reshape(B, T, D)


def stacked(x: Tensor) -> Tensor:
    """Steps first, and then in the order that they had."""
    return scanned(x).transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1).contiguous()


def as_it_is(x: Tensor) -> Tensor:
    return scanned(x).clone(memory_format=torch.contiguous_format)


def steps_first(x: Tensor) -> Tensor:
    return scanned(x).transpose(0, 1).contiguous()


def read_twice(x: Tensor) -> Any:
    found = scanned(x)
    return found.clone(memory_format=torch.contiguous_format), found


def of_an_input(x: Tensor) -> Tensor:
    return x.transpose(0, 1).transpose(0, 1).clone(memory_format=torch.contiguous_format)


def of_a_part(x: Tensor) -> Tensor:
    return scanned(x)[:, 1:].transpose(1, 2).transpose(1, 2).contiguous()


@pytest.mark.parametrize(
    ("model", "copies"),
    [(stacked, 0), (as_it_is, 0), (steps_first, 1), (read_twice, 1), (of_an_input, 1), (of_a_part, 1)],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_copy_that_is_the_only_reader_and_lies_alike_is_left_out(model: Callable[[Tensor], Any], copies: int) -> None:
    x = torch.randn(B, T, D)
    with torch.no_grad():
        module = make_fx(torch.func.functionalize(model), select_decomp_table(), "fake")(x)
        module.graph.eliminate_dead_code()
        expected, seen = model(x), x.clone()
        leave_out_needless_copies(module)
        found = module(seen)
    module.graph.lint()
    assert len(module.graph.find_nodes(op="call_function", target=CLONE)) == copies
    for one, other in zip(*[each if isinstance(each, tuple) else (each,) for each in (found, expected)], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.stride() == other.stride()
    if isinstance(found, tuple):
        assert found[0].data_ptr() != found[1].data_ptr()
    assert (found[0] if isinstance(found, tuple) else found).data_ptr() != seen.data_ptr()
