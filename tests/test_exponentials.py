"""Exponentials and logarithms of any base: a softmax, a norm's root and an activation are the same in all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from backends import Rewriting
from torch import Tensor

#: A softmax over the last dimension times values; one beside a sink; each times a base's own logarithm, if any.
Spelling = Callable[[Tensor, Tensor], Tensor]


def _quotient(weights: Tensor, values: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True) @ values


def _logs(scores: Tensor, base: float, logarithm: Callable[[Tensor], Tensor]) -> Tensor:
    return scores - logarithm(torch.pow(base, scores).sum(-1, keepdim=True))


def _in_place(scores: Tensor) -> Tensor:
    scores *= 2
    return 2.0**scores


SPELLINGS: dict[str, Spelling] = {
    "power of two": lambda s, v: _quotient(torch.pow(2.0, s), v),
    "operator, after the values": lambda s, v: ((e := 2 ** (s - s.amax(-1, True))) @ v) / e.sum(-1, True),
    "scores overwritten": lambda s, v: _quotient(_in_place(s), v),
    "power of e": lambda s, v: _quotient(math.e**s, v),
    "power of a half": lambda s, v: _quotient(0.5 ** (-s), v),
    "power of a tensor that is a number": lambda s, v: _quotient(torch.pow(torch.tensor(3.0, dtype=s.dtype), s), v),
    "logarithm to base two": lambda s, v: torch.exp2(s - s.exp2().sum(-1, keepdim=True).log2()) @ v,
    "logarithm to base ten": lambda s, v: 10 ** _logs(s, 10.0, torch.log10) @ v,
    "logarithm by its quotient": lambda s, v: 5 ** _logs(s, 5.0, lambda x: x.log() / math.log(5)) @ v,
    "sum of logarithms": lambda s, v: (s - torch.logsumexp(s * math.log(2), -1, True) / math.log(2)).exp2() @ v,
    "sink": lambda s, v: (e := s.exp2()) / (e.sum(-1, keepdim=True) + 2.0 ** s.new_full((1,), 0.5)) @ v,
    "sink of ten": lambda s, v: (e := 10**s) / (e.sum(-1, keepdim=True) + 10 ** (v[:, :, :1, :1] * 2)) @ v,
}


def _inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _compared(function: Callable[..., Tensor], inputs: list[Tensor]) -> Rewriting:
    """The backend after a compile whose result, and gradients, are those of eager mode."""
    torch._dynamo.reset()
    lock = {"attention": "lz.blocked", "norm": "torch.norm", "mlp": "torch.mlp"}
    backend, results = Rewriting(lock=lock), []
    for each in (torch.compile(function, backend=backend, fullgraph=True), function):
        found = each(*inputs)
        results.append((found, *torch.autograd.grad(found.square().sum(), inputs)))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-9)
    return backend


def _attention(spelling: Spelling, *, is_causal: bool = False) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3
        if is_causal:
            scores = scores.masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(3), -torch.inf)
        return spelling(scores, v)

    return attention


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_softmax_is_read_in_every_base(name: str) -> None:
    is_causal = name not in ("power of a half", "power of e")
    backend = _compared(
        _attention(SPELLINGS[name], is_causal=is_causal), _inputs((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6))
    )
    (match,) = backend.report.matches
    assert (match.op, match.rewritten) == ("attention", True), backend.why_not()
    assert match.attributes.get("has_sinks", False) == name.startswith("sink")


@pytest.mark.parametrize(
    "largest",
    [
        lambda scores: scores.max(-1, keepdim=True).values,
        lambda scores: scores.amax(-1, keepdim=True),
        lambda scores: -(-scores).amin(-1, keepdim=True),
    ],
    ids=["max", "amax", "amin"],
)
def test_the_smallest_number_less_the_largest_of_its_row_is_finite(largest: Callable[[Tensor], Tensor]) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = (torch.arange(7) > 3).logical_and(torch.arange(5)[:, None] > 1)
        scores = torch.where(keep, q @ k.mT, torch.finfo(q.dtype).min)
        return _quotient(torch.exp2((scores - largest(scores)) * math.log2(math.e)), v)

    backend = _compared(attention, _inputs((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)))
    (match,) = backend.report.matches
    assert match.rewritten, backend.why_not()
    assert match.attributes["masked_rows"] in ("mean", "fill")


@pytest.mark.parametrize("is_added", [False, True])
def test_the_maximum_may_be_of_scores_before_their_mask(is_added: bool) -> None:
    """Rows without a key are no exponentials that count then, and divided by nothing: that is no proof's."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep, lowest = torch.ones(5, 7, dtype=torch.bool).tril(2), torch.finfo(q.dtype).min
        scores = q @ k.mT * math.log2(math.e)
        masked = torch.zeros_like(scores).masked_fill(~keep, lowest) + scores
        masked = masked if is_added else scores.masked_fill(~keep, lowest)
        return _quotient(torch.exp2(masked - scores.amax(-1, keepdim=True)), v)

    backend = _compared(attention, _inputs((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)))
    (match,) = backend.report.matches
    assert match.rewritten, backend.why_not()


def test_the_smallest_number_is_not_finite_where_scores_are_only_divided_by_the_largest() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = (torch.arange(7) > 3).logical_and(torch.arange(5)[:, None] > 1)
        scores = q @ k.mT / (q @ k.mT).abs().amax(-1, keepdim=True)
        return (torch.where(keep, scores, torch.finfo(q.dtype).min) * 2).softmax(-1) @ v

    inputs, backend = _inputs((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)), Rewriting(lock={"attention": "lz.blocked"})
    got = torch.compile(attention, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, attention(*inputs), equal_nan=True)
    (match,) = backend.report.matches
    assert match.rewritten, backend.why_not()


def test_fills_of_float64_that_differ_are_filled_in() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(2), -torch.inf)
        scores = scores.masked_fill(torch.arange(7) < 4, torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ v

    backend = _compared(attention, _inputs((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)))
    (match,) = backend.report.matches
    assert match.rewritten, backend.why_not()


def test_a_fill_that_is_put_over_the_lowest_number_is_not_lost_beside_it() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
        return scores.masked_fill(torch.eye(7, dtype=torch.bool), -5e4).softmax(-1) @ v

    backend = _compared(attention, _inputs((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 6)))
    (match,) = backend.report.matches
    assert match.rewritten, backend.why_not()


LOOKALIKES: dict[str, Spelling] = {
    "divided by the sum in another base": lambda s, v: 2**s / (3**s).sum(-1, keepdim=True) @ v,
    "logarithm of another base": lambda s, v: 2 ** _logs(s, 2.0, torch.log) @ v,
    "one to a power": lambda s, v: _quotient(1.0**s, v),
    "power of a negative number": lambda s, v: _quotient(torch.pow(-2.0, s.round()), v),
    "power of a value": lambda s, v: _quotient(v[:, :, :1, :1].abs() ** s, v),
    "square": lambda s, v: _quotient(s**2, v),
}

#: Of those that a softmax is meant by, or that weigh values by another function of scores.
TOLD = {
    "power of a value": {"NO_SOFTMAX"},
    "square": {"NO_SOFTMAX"},
    "divided by the sum in another base": {"DENOMINATOR_OF_ANOTHER_SUM"},
    "logarithm of another base": {"EPSILON_IN_DENOMINATOR"},
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_other_powers_are_no_softmax(name: str) -> None:
    backend = Rewriting(lock={"attention": "lz.blocked"})
    inputs = [x.detach() for x in _inputs((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6))]
    function = _attention(LOOKALIKES[name])
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend=backend)(*inputs), function(*inputs), equal_nan=True)
    assert not backend.report.matches
    codes = {miss.reason.code for miss in backend.report.near_misses if miss.op == "attention"}
    assert codes == TOLD.get(name, set())


ROOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "base two": lambda x: torch.exp2(-0.5 * torch.log2(x)),
    "base ten": lambda x: 10 ** (-0.5 * torch.log10(x)),
    "logarithm by its quotient": lambda x: 1 / 7 ** (x.log() / (2 * math.log(7))),
    "exponential of another logarithm": lambda x: torch.exp(-math.log(2) / 2 * x.log2()),
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_root_by_logarithms_is_one_of_a_norm(name: str) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * ROOTS[name](x.square().mean(-1, keepdim=True) + 1e-6) * weight

    backend = _compared(norm, _inputs((6, 24), (24,)))
    (match,) = backend.report.matches
    assert (match.op, match.rewritten) == ("norm", True), backend.why_not()


@pytest.mark.parametrize(("power", "logarithm"), [(-0.51, torch.log2), (-0.5, torch.log10)])
def test_what_is_nearly_a_root_is_none(power: float, logarithm: Callable[[Tensor], Tensor]) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.exp2(power * logarithm(x.square().mean(-1, keepdim=True) + 1e-6)) * weight

    assert not _compared(norm, _inputs((6, 24), (24,))).report.matches


def test_a_gate_by_a_power_of_two_is_read() -> None:
    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gated = x @ gate
        return (gated / (1 + 2 ** (-gated / math.log(2))) * (x @ up)) @ down

    backend = _compared(mlp, _inputs((5, 8), (8, 12), (8, 12), (12, 8)))
    (match,) = backend.report.matches
    assert (match.op, match.rewritten) == ("mlp", True), backend.why_not()


def test_a_sum_in_an_exponent_divides_nothing() -> None:
    """As distances are spelled, with the squares of a row beside its products."""

    def by_distance(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.exp(query @ key.mT - query.square().sum(-1, keepdim=True) / 2)
        return (weights @ value) / weights.sum(-1, keepdim=True)

    backend = _compared(by_distance, _inputs((2, 3, 9, 4), (2, 3, 11, 4), (2, 3, 11, 5)))
    assert [match.op for match in backend.report.matches if match.rewritten] == ["attention"], backend.why_not()
