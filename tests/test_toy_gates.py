"""A new family on the formula core: any spelling of a bilinear gate with its norm, and what is none."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import toy_gates
from graphs import capture, effects_of
from torch import Tensor
from torch.nn import functional as F


def by_calls(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.rms_norm(F.linear(x, w) * F.linear(x, v), (5,), eps=1e-3)


def by_hand(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    gate = (x @ w.t()) * torch.einsum("bi,oi->bo", x, v)
    return gate * torch.rsqrt(gate.pow(2).mean(-1, keepdim=True) + 1e-3)


def by_one_product(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    one, two = (x @ torch.cat([w, v]).t()).chunk(2, -1)
    gate = one * two
    return gate / (gate.square().mean(-1, keepdim=True) + 1e-3).sqrt()


def of_two_inputs(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.rms_norm(F.linear(x, w) * F.linear(x.flip(0) * 2, v), (5,), eps=1e-3)


def without_a_norm(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.linear(x, w) * F.linear(x, v) * 0.5


def found(make: Callable[..., Tensor]) -> list[toy_gates.BilinearGate]:
    module = capture(make, torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 4))
    return list(toy_gates.recognise(module.graph, effects_of(module)))


@pytest.mark.parametrize("make", [by_calls, by_hand, by_one_product])
def test_a_gate_is_found_however_it_is_spelled(make: Callable[..., Tensor]) -> None:
    (gate,) = found(make)
    assert gate.input.name == "l_x_"
    assert {each.name for each in gate.weights} == {"l_w_", "l_v_"}
    assert gate.eps == pytest.approx(1e-3)


@pytest.mark.parametrize("make", [of_two_inputs, without_a_norm])
def test_what_only_looks_like_one_is_none(make: Callable[..., Tensor]) -> None:
    assert not found(make)


def test_the_recogniser_stays_small() -> None:
    source = inspect.getsource(toy_gates)
    assert len(source[source.index("@dataclass") :].splitlines()) <= 60
