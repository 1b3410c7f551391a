"""Sums in which a number scales a product give what eager PyTorch gives; Inductor (2.13) alone forgets the number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from lz_compile.lowering.spelled_for_inductor import spell_out_factors


def running(mean: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A running mean, as of a codebook."""
    mean.mul_(0.9).add_(a @ b, alpha=0.1)
    return mean * 2


def behind_views(mean: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What Inductor takes away stands between product and sum."""
    product = torch.bmm(a[None], b[None])[0].clone().view(mean.shape)
    return torch.add(product.contiguous(), mean, alpha=2) + torch.add(mean, product, alpha=-3)


def two_products(mean: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A factor that is an argument, and of two products."""
    return torch.add(a @ b, mean @ mean, alpha=0.5)


def a_number(mean: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The factor is of a number; what it is added to is the product."""
    return torch.add(a @ b, 2.0, alpha=0.5) + mean


def narrow(mean: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A product that float16 holds, times a factor that it does not."""
    return torch.add(mean, a.half() @ b.half(), alpha=1e6)


@pytest.mark.parametrize(
    "function", [running, behind_views, two_products, a_number, narrow], ids=lambda function: function.__name__
)
def test_a_factor_is_kept(function: Callable[..., Tensor]) -> None:
    def run(called: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        given = [torch.randn(8, 8), torch.randn(8, 4), torch.randn(4, 8)]
        return [called(*given), *given]

    with torch._inductor.config.patch(force_disable_caches=True, emulate_precision_casts=True):
        found = run(torch.compile(function, backend="layerzero"))
    torch.testing.assert_close(found, run(function))


def test_sums_of_anything_else_stay_as_they_are() -> None:
    graph = fx.Graph()
    x, y = (graph.placeholder(name) for name in "xy")
    made = graph.call_function(torch.ops.aten.mm.default, (x, y))
    product = graph.call_function(torch.ops.aten.view.default, (made, [2, 2]))
    scaled = graph.call_function(torch.ops.aten.add.Tensor, (x, product), {"alpha": 2})
    graph.call_function(torch.ops.aten.add.Tensor, (x, y), {"alpha": 2})
    plain = graph.call_function(torch.ops.aten.add.Tensor, (x, product))
    graph.output((scaled, plain))
    for node in graph.nodes:
        node.meta["val"] = torch.ones(2, 2)
    spell_out_factors(graph)
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == [
        "aten.mm.default", "aten.view.default", "aten.mul.Tensor", "aten.add.Tensor", "aten.add.Tensor", "aten.add.Tensor",
    ]  # fmt: skip
    assert [node.kwargs.get("alpha") for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)] == [
        None, 2, None,
    ]  # fmt: skip
