"""A softmax that is taken part by part is one of the whole: the same numbers and gradients, and one attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Rewriting
from graphs import capture
from torch import Tensor

from lz_compile.passes.inlining.softmax_of_parts import join_softmaxes

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _stored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.empty(2, 3, 6, 6, dtype=q.dtype)
    for start in range(0, 6, 2):
        weights[:, :, start : start + 2] = (q[:, :, start : start + 2] @ k.transpose(2, 3)).softmax(-1)
    return weights @ v


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    masks = torch.ones(6, 6, dtype=torch.bool).tril().split(2)
    parts = [(each @ k.mT / 2).masked_fill(~mask, -1e9) for each, mask in zip(q.split(2, 2), masks, strict=True)]
    return torch.cat([each.softmax(-1) for each in parts], 2) @ v


def _by_batch(q: Tensor, k: Tensor) -> Tensor:
    pairs = zip(q.split(2), k.split(2), strict=True)
    return torch.cat([torch.bmm(x, y.transpose(1, 2) * 0.5).softmax(-1) for x, y in pairs])


def _read_twice(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 2) + parts[0].amax()


#: Attention whose softmax is taken part by part: queries, keys and values are ``[2, 3, 6, 4]``.
PARTS: dict[str, Attention] = {
    "scores_split": lambda q, k, v: torch.cat([x.softmax(-1) for x in (q @ k.mT / 2).split(4, 2)], 2) @ v,
    "scores_cut": lambda q, k, v: (
        torch.cat([torch.softmax((q @ k.mT)[:, :, i : i + 2], -1) for i in range(0, 6, 2)], dim=-2) @ v
    ),
    "queries_cut": lambda q, k, v: torch.cat([(x @ k.mT / 2).softmax(-1) for x in q.chunk(3, 2)], 2) @ v,
    "einsum": lambda q, k, v: (
        torch.cat([torch.einsum("bhqd,bhkd->bhqk", x, k).softmax(-1) for x in q.split(3, 2)], 2) @ v
    ),
    "batch_cut": lambda q, k, v: _by_batch(q.flatten(0, 1), k.flatten(0, 1)) @ v.flatten(0, 1),
    "turned_round": lambda q, k, v: torch.cat([(k @ x.mT).mT.softmax(-1) for x in q.split(2, 2)], 2) @ v,
    "scaled_after": lambda q, k, v: torch.cat([(x @ k.mT).softmax(-1) * 2 for x in q.split(2, 2)], 2) @ v,
    "masked": _masked,
    "stored": _stored,
}
#: Parts that stay: they are not computed alike, are not all of a tensor, or the whole would be larger than what is joined.
OTHERS: dict[str, Attention] = {
    "over_what_is_cut": lambda q, k, v: torch.cat([x.softmax(-1) for x in (q @ k.mT).split(3, 3)], 3) @ v,
    "values_too": lambda q, k, v: torch.cat([(x @ k.mT).softmax(-1) @ v for x in q.split(2, 2)], 2),
    "another_order": lambda q, k, v: torch.cat([x.softmax(-1) for x in (q @ k.mT).split(3, 2)[::-1]], 2) @ v,
    "scaled_otherwise": lambda q, k, v: (
        torch.cat([(x * (2 - i)).softmax(-1) for i, x in enumerate((q @ k.mT).split(3, 2))], 2) @ v
    ),
    "a_bias_of_each_part": lambda q, k, v: (
        torch.cat(
            [(x + y).softmax(-1) for x, y in zip((q @ k.mT).split(3, 2), k[0, 0, :2, :1].split(1), strict=True)], 2
        )
        @ v
    ),
    "a_bias_of_an_empty_part": lambda q, k, v: (
        torch.cat(
            [
                (x + y).softmax(-1)
                for x, y in zip((q @ k.mT).split([6, 0], 2), v[:, :, :2, :1].split(1, 2), strict=True)
            ],
            2,
        )
        @ v
    ),
    "not_all": lambda q, k, v: torch.cat([x.softmax(-1) for x in (q @ k.mT).split(2, 2)[:2]], 2) @ v,
    "other_keys": lambda q, k, v: (
        torch.cat([(x @ y.mT).softmax(-1) for x, y in zip(q.split(3, 2), (k, v), strict=True)], 2) @ v
    ),
    "joined_along_keys": lambda q, k, v: (
        torch.cat([(x @ k.mT).softmax(-1) for x in q.split(3, 2)], 3) @ torch.cat([v, v], 2)
    ),
    "parts_read_elsewhere": lambda q, k, v: _read_twice([(x @ k.mT).softmax(-1) for x in q.split(3, 2)]) @ v,
    "dropout": lambda q, k, v: (
        torch.cat([torch.dropout((x @ k.mT).softmax(-1), 0.5, True) for x in q.split(3, 2)], 2) @ v
    ),
}


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("attention", PARTS.values(), ids=PARTS)
def test_a_softmax_of_all_parts_is_one_attention(attention: Attention) -> None:
    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": "lz.blocked"}, strict=True)
    results = []
    for function in (attention, torch.compile(attention, backend=backend, fullgraph=True)):
        given = [each.requires_grad_() for each in operands()]
        result = function(*given)
        results.append([result, *torch.autograd.grad(result.square().sum(), given)])
    assert [match.op for match in backend.report.matches] == ["attention"], backend.why_not()
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention", OTHERS.values(), ids=OTHERS)
def test_other_parts_stay(attention: Attention) -> None:
    assert join_softmaxes(capture(attention, *operands()).graph) == 0
