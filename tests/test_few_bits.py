"""Rounding to 8 bits in a float's clothes is part of what a graph computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Rewriting
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_preference")


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


MLP, ATTENTION = ([(8, 32), (32, 32), (32, 32)], "mlp"), ([(2, 8, 16)] * 3, "attention")
TRIED: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], str]] = {
    "gate": (lambda x, a, b: torch.nn.functional.silu(rounded(x @ a)) * (x @ b), *MLP),
    "scores": (lambda q, k, v: rounded(q @ k.mT).softmax(-1) @ v, *ATTENTION),
    "probabilities": (lambda q, k, v: rounded((q @ k.mT).softmax(-1)) @ v, *ATTENTION),
    "root": (lambda x, g: x * rounded(torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * g, [(8, 32), (32,)], ""),
}


@pytest.mark.parametrize("name", TRIED)
def test_what_is_rounded_to_8_bits_on_the_way_stays_rounded(name: str) -> None:
    """So quantisation is tried, and trained for; between 16 and 32 bits a rewrite may round less often."""
    function, shapes, op = TRIED[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    backend = Rewriting(lock={"attention": "lz.blocked", "mlp": "torch.mlp", "norm": "torch.norm"})
    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(*inputs), function(*inputs))
    assert not any(match.rewritten for match in backend.report.matches)
    assert [miss.op for miss in backend.report.near_misses] == [op][: bool(op)]


@pytest.mark.parametrize("op", ["attention", "norm", "blend"])
def test_operands_that_were_rounded_to_8_bits_are_operands(op: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ rounded(k).mT).softmax(-1) @ rounded(v)

    def norm(x: Tensor, g: Tensor, _: Tensor) -> Tensor:
        return rounded(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * g

    def blend(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        return rounded(a) * x + (1 - rounded(a)) * y.detach()

    function = {"attention": attention, "norm": norm, "blend": blend}[op]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(2, 8, 16, generator=generator) for _ in range(3)]
    backend = Rewriting(lock={"attention": "lz.blocked", "norm": "torch.norm", "blend": "torch.blend"})
    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(*inputs), function(*inputs))
    assert [(match.op, match.rewritten) for match in backend.report.matches] == [(op, True)]
