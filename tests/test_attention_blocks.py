"""Attention that is computed by blocks, by hand, is told as one near miss, whatever puts the blocks together."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

SIZE = 8


def blocks(key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(key.split(SIZE, -2), value.split(SIZE, -2), strict=True))


def running_maximum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    largest = query.new_full((*query.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(largest), torch.zeros_like(query)
    for some_keys, some_values in blocks(key, value):
        scores = query @ some_keys.mT * 0.3
        grown = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, kept = torch.exp(scores - grown), torch.exp(largest - grown)
        total, out = total * kept + weights.sum(-1, keepdim=True), out * kept + weights @ some_values
        largest = grown
    return out / total


def blocks_of_queries(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([running_maximum(part, key, value) for part in query.split(SIZE, -2)], -2)


def without_a_maximum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = [(query @ some_keys.mT * 0.3).exp() for some_keys, _ in blocks(key, value)]
    out = sum(each @ values for each, (_, values) in zip(weights, blocks(key, value), strict=True))
    return torch.as_tensor(out / sum(each.sum(-1, keepdim=True) for each in weights))


def weighed_by_logarithms(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = [query @ some_keys.mT * 0.3 for some_keys, _ in blocks(key, value)]
    parts = [each.softmax(-1) @ values for each, (_, values) in zip(scores, blocks(key, value), strict=True)]
    sums = torch.stack([each.logsumexp(-1, keepdim=True) for each in scores])
    return (torch.stack(parts) * sums.softmax(0)).sum(0)


def ring(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = logarithm = None
    for some_keys, some_values in blocks(key, value):
        scores = query @ some_keys.mT * 0.3
        here = scores.logsumexp(-1, keepdim=True)
        part = torch.exp(scores - here) @ some_values
        if out is None or logarithm is None:
            out, logarithm = part, here
        else:
            out = out - torch.sigmoid(here - logarithm) * (out - part)
            logarithm = logarithm - F.logsigmoid(logarithm - here)
    assert out is not None
    return out


BY_BLOCKS = [running_maximum, blocks_of_queries, without_a_maximum, weighed_by_logarithms, ring]


def check(function: Callable[..., Tensor], keys: int, loops: str = "keep") -> Rewriting:
    inputs = [torch.randn(2, 3, length, SIZE) for length in (16, keys, keys)]
    backend = Rewriting(strict=True, loops=loops)
    got = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, function(*inputs))
    assert [str(miss.reason.code) for miss in backend.report.near_misses] == ["ATTENTION_BY_BLOCKS"], backend.why_not()
    return backend


@pytest.mark.parametrize("function", BY_BLOCKS)
def test_blocks_of_one_attention_are_one_near_miss(function: Callable[..., Tensor]) -> None:
    (miss,) = check(function, 3 * SIZE).report.near_misses
    assert "blocks" in str(miss.reason)
    assert miss.edit.startswith("write plain attention")


def test_a_rolled_loop_over_blocks_is_one_near_miss_too() -> None:
    (miss,) = check(running_maximum, 10 * SIZE, "roll").report.near_misses
    assert "a loop over blocks" in str(miss.reason)


def test_layers_by_blocks_are_told_apart() -> None:
    weight = torch.randn(SIZE, SIZE)

    def layers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        hidden = query + running_maximum(query, key, value) @ weight
        return hidden + running_maximum(hidden @ weight, key, value)

    backend, inputs = Rewriting(), [torch.randn(2, 3, length, SIZE) for length in (16, 24, 24)]
    torch.compile(layers, backend=backend, fullgraph=True)(*inputs)
    assert [miss.reason.code for miss in backend.report.near_misses] == ["ATTENTION_BY_BLOCKS"] * 2


def test_exponentials_that_nobody_divides_are_told_as_such() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT * 0.3).exp() @ value

    backend, inputs = Rewriting(), [torch.randn(2, 3, length, SIZE) for length in (16, 24, 24)]
    torch.compile(attention, backend=backend, fullgraph=True)(*inputs)
    (miss,) = backend.report.near_misses
    assert str(miss.reason) == "[NOT_NORMALISED] nothing that could be read divides the exponentials by their own sum"
