"""What is stored by a mask after another store in place is what eager PyTorch gives; Inductor (2.13) alone loses the first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from lz_compile.lowering.spelled_for_inductor import choose_by_masks


def negated_rows(x: Tensor, places: Tensor) -> Tensor:
    """A store by places between a piece in place and a mask."""
    found = x * 2
    found[-1:].neg_()
    found.index_add_(-1, places, x[..., :2])
    found[found < -1] = 0.5
    return found


def twice(x: Tensor, places: Tensor) -> Tensor:
    """Two masks, one of whole rows, and a number that stands in a tensor."""
    found = x * 2
    found.index_add_(-1, places, x[..., :2])
    found[found < -1] = x.sum()
    found.index_add_(-1, places, x[..., :2])
    found[found.sum(-1) > 0] = torch.tensor([3.0])
    return found


def added(x: Tensor, places: Tensor) -> Tensor:
    """A number is added where the mask holds."""
    found = x * 2
    found[-1:].neg_()
    found.index_add_(-1, places, x[..., :2])
    return found.index_put_((found < -1,), torch.tensor(0.5), accumulate=True)


def of_an_input(x: Tensor, places: Tensor) -> Tensor:
    """What is overwritten is the caller's."""
    x.index_add_(-1, places, x[..., :2].sin())
    x[x < -1] = 0.5
    return x + 1


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [negated_rows, twice, added, of_an_input], ids=lambda function: function.__name__)
def test_both_stores_are_kept(function: Callable[..., Tensor], dynamic: bool) -> None:
    torch.manual_seed(0)
    x, places = torch.randn(2, 4, 6), torch.tensor([2, 0])
    given, kept = x.clone(), x.clone()
    with torch._inductor.config.patch(force_disable_caches=True):
        found = torch.compile(function, backend="layerzero", dynamic=dynamic)(given, places)
    torch.testing.assert_close((found, given), (function(kept, places), kept))


def test_a_mask_of_rows_covers_them_and_other_stores_stay() -> None:
    graph = fx.Graph()
    values = {"x": torch.ones(2, 3), "rows": torch.ones(2, dtype=torch.bool), "places": torch.ones(2).long()}
    values |= {"number": torch.ones(()), "numbers": torch.ones(3)}
    x, rows, places, number, numbers = (graph.placeholder(name) for name in values)
    stores = [([rows], number), ([rows], numbers), ([places], number), ([None, rows], number), ([rows], number, True)]
    graph.output(tuple(graph.call_function(torch.ops.aten.index_put.default, (x, *each)) for each in stores))
    for node in graph.nodes:
        node.meta["val"] = values.get(node.name, values["x"])
    choose_by_masks(graph)
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == [
        "aten.unsqueeze.default", "aten.where.self", *["aten.index_put.default"] * 3,
        "aten.unsqueeze.default", "aten.add.Tensor", "aten.where.self",
    ]  # fmt: skip
    assert next(iter(graph.find_nodes(op="call_function", target=torch.ops.aten.unsqueeze.default))).meta[
        "val"
    ].shape == (2, 1)
