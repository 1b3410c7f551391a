"""Of a product of which one part is read, the factors are cut: the same numbers and gradients, and no cut between scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Rewriting
from graphs import capture
from torch import Tensor, nn

from lz_compile.passes.inlining.parts_of_products import cut_factors

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _by_hand(scores: Tensor) -> Tensor:
    weights = scores.exp()
    return weights / weights.sum(-1, keepdim=True)


def _order() -> Tensor:
    return torch.tensor([2, 0, 5, 1, 4, 3])


def _read_twice(scores: Tensor) -> Tensor:
    return scores[:, :, -1:].softmax(-1) + scores.amax()


#: Attention over a part of scores: queries, keys and values are ``[2, 3, 6, 4]``.
PARTS: dict[str, Attention] = {
    "last_query": lambda q, k, v: (q @ k.mT)[:, :, -1:].softmax(-1) @ v,
    "last_query_dropped": lambda q, k, v: (q @ k.mT)[:, :, -1].softmax(-1)[:, :, None] @ v,
    "first_keys": lambda q, k, v: (q @ k.mT / 2)[..., :4].softmax(-1) @ v[:, :, :4],
    "every_other_key": lambda q, k, v: (q @ k.mT)[..., ::2].softmax(-1) @ v[:, :, ::2],
    "a_head": lambda q, k, v: (q @ k.mT)[:, 1].mul(0.5).softmax(-1) @ v[:, 1],
    "head_of_unbind": lambda q, k, v: (q @ k.mT).unbind(1)[-1].softmax(-1) @ v[:, -1],
    "head_of_split": lambda q, k, v: (q @ k.mT).split([1, 2], 1)[1].softmax(-1) @ v[:, 1:],
    "cut_twice": lambda q, k, v: (q @ k.mT).narrow(2, 1, 3).chunk(2, -1)[0].softmax(-1) @ v[:, :, :3],
    "block_of_one": lambda q, k, v: (
        torch.einsum("bhqd,bhkd->bhqk", *[torch.cat([q, k], 2)] * 2)[:, :, :6, 6:].softmax(-1) @ v
    ),
    "behind_a_mask": lambda q, k, v: (
        (q @ k.mT / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)[:, :, 2:].softmax(-1) @ v
    ),
    "behind_a_bias_of_keys": lambda q, k, v: (q @ k.mT + v[..., :1].mT)[:, :2].softmax(-1) @ v[:, :2],
    "behind_a_transpose": lambda q, k, v: (k @ q.mT).mT[:, :, 3:].softmax(-1) @ v,
    "behind_a_softmax": lambda q, k, v: (q @ k.mT / 2).softmax(-1)[:, :, -1:] @ v,
    "exponentials": lambda q, k, v: _by_hand((q @ k.mT)[:, :, 1:]) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhqd,bgkd->bhgqk", q, k)[:, 0, 1].softmax(-1) @ v[:, 0],
    "baddbmm": lambda q, k, v: torch.baddbmm(v[0] @ v[0].mT, q[0], k[0].mT, alpha=0.5)[:, 3:].softmax(-1) @ v[0],
    "cast": lambda q, k, v: (q @ k.mT).double()[:, :, 4:].softmax(-1) @ v.double(),
}
#: Scores in another order: of the same operands.
ORDERS: dict[str, Attention] = {
    "keys_flipped": lambda q, k, v: (q @ k.mT / 2).flip(-1).softmax(-1) @ v,
    "keys_and_queries_flipped": lambda q, k, v: (q @ k.mT).flip(-1, -2).softmax(-1) @ v,
    "keys_rolled": lambda q, k, v: (q @ k.mT).mul(0.5).roll(2, -1).softmax(-1) @ v,
    "rolled_twice": lambda q, k, v: (q @ k.mT).roll((1, -2), (-1, 1)).softmax(-1) @ v,
    "keys_by_index": lambda q, k, v: (q @ k.mT)[..., _order()].softmax(-1) @ v,
    "queries_selected": lambda q, k, v: (q @ k.mT).index_select(2, _order()).softmax(-1) @ v,
    "few_keys_twice": lambda q, k, v: (q @ k.mT).index_select(-1, _order() // 2).softmax(-1) @ v,
    "heads_by_index_behind_a_softmax": lambda q, k, v: (q @ k.mT).softmax(-1)[:, torch.tensor([2, 0])] @ v[:, :2],
    "negative_places": lambda q, k, v: (q @ k.mT)[..., _order() - 6].softmax(-1) @ v,
}
#: The product stays: others read it, or a part of what is made of it is not made of a part.
WHOLES: dict[str, Attention] = {
    "read_twice": lambda q, k, v: _read_twice(q @ k.mT) @ v,
    "two_parts": lambda q, k, v: torch.stack([each.softmax(-1) for each in (q @ k.mT).unbind(1)], 1) @ v,
    "all_of_it": lambda q, k, v: (q @ k.mT)[:, :, :6].softmax(-1) @ v,
    "softmax_over_what_is_cut": lambda q, k, v: (q @ k.mT).softmax(-1)[..., :3] @ v[:, :, :3],
    "softmax_over_what_is_flipped": lambda q, k, v: (q @ k.mT).softmax(-1).flip(-1) @ v,
    "keys_repeated": lambda q, k, v: (q @ k.mT)[..., torch.arange(12) // 2].softmax(-1) @ v.repeat_interleave(2, 2),
    "keys_by_truth_values": lambda q, k, v: (
        (q @ k.mT)[..., torch.tensor([1, 1, 0, 1, 0, 1]).bool()].softmax(-1) @ v[:, :, :4]
    ),
    "no_softmax": lambda q, k, v: (q @ k.mT)[:, :, :3] @ v,
    "dropout": lambda q, k, v: torch.dropout(q @ k.mT, 0.5, True)[:, :, :3].softmax(-1) @ v,
    "running_sums": lambda q, k, v: (q @ k.mT).cumsum(-1)[..., 1:].softmax(-1) @ v[:, :, 1:],
}


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def cut(attention: Attention) -> int:
    module = capture(attention, *operands())
    results = []
    for edited in (False, True):
        count = cut_factors(module.graph) if edited else 0
        module.graph.lint()
        module.recompile()
        given = [each.requires_grad_() for each in operands()]
        torch.manual_seed(0)
        (result,) = module(*given[: sum(node.op == "placeholder" for node in module.graph.nodes)])
        results.append([result, *torch.autograd.grad(result.square().sum(), given, allow_unused=True)])
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    return count


@pytest.mark.parametrize("attention", [*PARTS.values(), *ORDERS.values()], ids=[*PARTS, *ORDERS])
def test_a_part_of_scores_is_of_parts_of_queries_and_keys(attention: Attention) -> None:
    assert cut(attention) >= 1
    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": "lz.blocked"}, strict=True)
    given = [each.float() for each in operands()]
    result = torch.compile(attention, backend=backend, fullgraph=True)(*given)
    assert [match.op for match in backend.report.matches] == ["attention"], backend.why_not()
    torch.testing.assert_close(result, attention(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", WHOLES.values(), ids=WHOLES)
def test_other_products_stay_whole(attention: Attention) -> None:
    assert cut(attention) == 0


def test_factors_that_are_overwritten_before_the_cut_stay_whole() -> None:
    def overwritten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        q.add_(1)
        return scores[:, :, -1:].softmax(-1) @ v

    assert cut_factors(capture(overwritten, *operands()).graph) == 0


def test_a_product_with_a_weight_stays_whole() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight)[..., :3].softmax(-1)

    assert cut_factors(capture(Router(), torch.randn(2, 5, 4)).graph) == 0


def test_one_number_is_flipped_as_it_is() -> None:
    assert cut_factors(capture(lambda x: x.sum().flip(0), torch.ones(2)).graph) == 0
