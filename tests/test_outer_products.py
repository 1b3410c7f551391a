"""Linear attention as a running sum of outer products is a scan of rank-one updates; what only looks like it stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

B, H, T, D, E = 2, 3, 16, 4, 6
Form = Callable[[Tensor, Tensor, Tensor], Any]


def einsum(states: Tensor, query: Tensor) -> Tensor:
    return torch.einsum("bhnd,bhnde->bhne", query, states)


def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As of Katharopoulos et al."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    states = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(2)
    return einsum(states, q) / (torch.einsum("bhnd,bhnd->bhn", q, k.cumsum(2)) + 1e-6)[..., None]


def of_three_factors(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As performers have it."""
    q, k = q.softmax(-1), k.exp()
    inverse = 1 / torch.einsum("...nd,...nd->...n", q, k.cumsum(-2))
    return torch.einsum("...nde,...nd,...n->...ne", torch.einsum("...nd,...ne->...nde", k, v).cumsum(-3), q, inverse)


def time_before_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(1, 2).contiguous() for each in (q, k, v))
    return torch.einsum("nlhd,nlhdm->nlhm", q, torch.einsum("nlhd,nlhm->nlhdm", k, v).cumsum(1))


def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    size = (*k.shape, v.shape[-1])
    products = k.unsqueeze(-1).expand(size) * v.unsqueeze(-2).expand(size)
    return einsum(torch.cumsum(products * 0.5, 2), q)


def with_the_last_state(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    states = torch.cumsum(k[..., :, None] * v[..., None, :], dim=-3)
    return einsum(states, q), states[:, :, -1]


def decays_of_logarithms(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sums = F.logsigmoid(q[..., None]).cumsum(2)
    return einsum(sums.exp() * torch.cumsum(k[..., None] * v[..., None, :] * (-sums).exp(), 2), q)


def decays_of_logarithms_with_the_last_state(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    sums = F.logsigmoid(q[..., :1, None]).cumsum(2)
    states = sums.exp() * torch.cumsum(torch.einsum("bhnd,bhne->bhnde", k, v) * (-sums).exp(), 2)
    return einsum(states, q), states[:, :, -1]


def decays_multiplied_up(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    decays = q.sigmoid()[..., None].cumprod(2)
    return einsum(decays * (k.unsqueeze(-1) * v.unsqueeze(-2) / decays).cumsum(2), q)


def decays_in_another_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Read as factors of keys and queries, which they are."""
    decays = q.sigmoid().cumprod(2)[..., None]
    return einsum(decays * (k.unsqueeze(-1) * v.unsqueeze(-2) / decays).cumsum(2), q)


LINEAR: dict[str, Form] = {
    "outer product": lambda q, k, v: einsum(torch.cumsum(k[..., :, None] * v[..., None, :], dim=-3), q),
    "matmul": lambda q, k, v: (q.unsqueeze(-2) @ (k.unsqueeze(-1) @ v.unsqueeze(-2)).cumsum(2)).squeeze(-2),
    "multiplied and summed": lambda q, k, v: (q.unsqueeze(-1) * torch.cumsum(k[..., None] * v[:, :, :, None], 2)).sum(
        -2
    ),
    "queries are keys are values": lambda q, _k, _v: einsum(torch.cumsum(q[..., None] * q[..., None, :], 2), q),
    **{f.__name__: f for f in (normalised, of_three_factors, time_before_heads, expanded, with_the_last_state)},
    "decays_in_another_shape": decays_in_another_shape,
}
DECAYED: dict[str, Form] = {
    f.__name__: f for f in (decays_of_logarithms, decays_of_logarithms_with_the_last_state, decays_multiplied_up)
}


def inputs(steps: int = T, dtype: torch.dtype = torch.float64, *, wants_grad: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, steps, size, dtype=dtype, requires_grad=wants_grad) for size in (D, D, E)]


def run(form: Form, given: list[Tensor], **options: Any) -> tuple[list[Tensor], Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting()
    return parts(torch.compile(form, backend=backend, fullgraph=True, **options)(*given)), backend


def parts(result: Any) -> list[Tensor]:
    return [*result] if isinstance(result, tuple) else [result]


def gradients(results: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    total = sum((each.sin().sum() for each in results), torch.zeros(()))
    found = torch.autograd.grad(total, given, allow_unused=True)
    return [torch.zeros(()) if each is None else each for each in found]


@pytest.mark.parametrize("name", [*LINEAR, *DECAYED])
def test_a_running_sum_of_outer_products_is_a_scan_with_its_gradients(name: str) -> None:
    form, given = (LINEAR | DECAYED)[name], inputs()
    found, backend = run(form, given)
    (match,) = [each for each in backend.report.matches if each.op == "scan"]
    assert match.rewritten, backend.why_not()
    decay = "a[t] * " if name in DECAYED else ""
    assert match.formula == f"h[t] = {decay}h[t-1] + k[t] v[t]; y[t] = sum of c[t] * h[t]"
    wanted = parts(form(*given))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients(found, given), gradients(wanted, given), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["normalised", "decays_of_logarithms_with_the_last_state"])
def test_so_is_one_in_float32_without_gradients(name: str) -> None:
    form, given = (LINEAR | DECAYED)[name], inputs(dtype=torch.float32, wants_grad=False)
    found, backend = run(form, given)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    wanted = parts(form(*(each.double() for each in given)))
    torch.testing.assert_close([each.double() for each in found], wanted, rtol=1e-4, atol=1e-4)


def test_so_is_one_of_symbolic_length() -> None:
    torch._dynamo.reset()
    backend = Rewriting()
    compiled = torch.compile(normalised, backend=backend, fullgraph=True, dynamic=True)
    for steps in (40, 3, 17):
        given = inputs(steps, wants_grad=False)
        torch.testing.assert_close(compiled(*given), normalised(*given))
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()


def summed_too(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    states = torch.cumsum(k[..., :, None] * v[..., None, :], dim=2)
    return einsum(states, q) + states.sum((3, 4)).unsqueeze(-1)


def products_used_too(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    products = k[..., :, None] * v[..., None, :]
    return einsum(products.cumsum(2), q) + products.sum((3, 4))[..., None]


def backwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return einsum(torch.cumsum((k[..., :, None] * v[..., None, :]).flip(2), 2).flip(2), q)


def written_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Memory of the caller's, by a view of it."""
    result = LINEAR["outer product"](q, k, v)
    SEEN[0].add_(1)
    return result


SEEN = torch.zeros(2, 3)
NONE: dict[str, tuple[Form, list[str]]] = {
    "over the keys": (lambda q, k, v: einsum(torch.cumsum(k[..., :, None] * v[..., None, :], 3), q), []),
    "of all steps": (lambda q, k, v: torch.einsum("bhnd,bhde->bhne", q, (k[..., None] * v[..., None, :]).sum(2)), []),
    "backwards": (backwards, ["STATES_READ_OTHERWISE"]),
    "elementwise": (lambda q, k, v: torch.einsum("bhnd,bhne->bhde", q * (q * k).cumsum(2), v), []),
    "by all queries": (
        lambda q, k, v: torch.einsum("bhmd,bhnde->bhme", q, torch.cumsum(k[..., None] * v[..., None, :], 2)),
        ["STATES_READ_OTHERWISE"],
    ),
    "the states are summed, too": (summed_too, ["STATES_READ_OTHERWISE"]),
    "the products are used, too": (products_used_too, ["INTERIOR_USED"]),
    "something is written": (written_in_place, ["OPERAND_MUTATED"]),
    "few steps": (lambda q, k, v: LINEAR["outer product"](q[:, :, :5], k[:, :, :5], v[:, :, :5]), ["SCAN_SHORT"]),
}


@pytest.mark.parametrize("name", NONE)
def test_other_running_sums_stay_and_say_why(name: str) -> None:
    form, codes = NONE[name]
    given = inputs()
    found, backend = run(form, given)
    assert not backend.report.matches
    assert [miss.reason.code for miss in backend.report.near_misses] == codes, backend.why_not()
    torch.testing.assert_close(found, parts(form(*given)))


CANCELLED: dict[str, Form] = {
    "in what is summed": lambda q, k, v: einsum(
        ((k[..., :, None] * v[..., None, :]) * k[..., None] / k[..., None]).cumsum(2), q
    ),
    "partly": lambda q, k, v: einsum(
        ((k[..., :, None] * v[..., None, :]) * q[..., None] * q[..., None] / q[..., None]).cumsum(2), q
    ),
    "in the queries": lambda q, k, v: (
        (k[..., :, None] * v[..., None, :]).cumsum(2) * k[..., None] / k[..., None] * q[..., None]
    ).sum(-2),
}


@pytest.mark.parametrize("name", CANCELLED)
def test_what_is_divided_by_as_well_stays_since_zeros_in_it_make_nan(name: str) -> None:
    given = inputs(wants_grad=False)
    for each in given[:2]:
        each[0, 1, 3, 2] = 0
    found, backend = run(CANCELLED[name], given)
    assert not backend.report.matches
    assert [miss.reason.code for miss in backend.report.near_misses] == ["CANCELS_OUT"], backend.why_not()
    torch.testing.assert_close(found, parts(CANCELLED[name](*given)), equal_nan=True)


def test_decays_of_zero_that_are_multiplied_up_are_no_number_from_there_on() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decays = q.relu()[..., None].cumprod(2)
        return einsum(decays * (k.unsqueeze(-1) * v.unsqueeze(-2) / decays).cumsum(2), q)

    given = [each.abs() + 0.5 for each in inputs(wants_grad=False)]
    given[0][0, 1, 3, 2], given[0][1, 0, 0, 1] = 0, 0
    found, backend = run(form, given)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    (wanted,) = parts(form(*given))
    assert 0 < wanted.isnan().sum() < wanted.numel()
    torch.testing.assert_close(found, [wanted], equal_nan=True)


@pytest.mark.parametrize(
    "weighed", [lambda drive: drive / 0, lambda drive: drive * math.inf, lambda drive: drive * math.nan]
)
def test_products_with_what_is_no_number_are_left_alone_without_a_trial(weighed: Callable[[Tensor], Tensor]) -> None:
    given = inputs(wants_grad=False)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return einsum(weighed(k[..., :, None] * v[..., None, :]).cumsum(2), q)

    found, backend = run(form, given)
    assert not backend.report.matches
    assert not backend.report.events
    torch.testing.assert_close(found, parts(form(*given)), equal_nan=True)
