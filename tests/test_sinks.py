"""One more score that has no value: as a column, in the denominator, or as the share that is left beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

#: How scores are weighted, and what is divided: from scores, values and the extra score, ``[B, H, Q, 1]`` or a number.
Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]


def _total(scores: Tensor) -> Tensor:
    return scores.exp().sum(-1, keepdim=True)


def _shifted(scores: Tensor, values: Tensor, sink: Tensor, top: Tensor) -> Tensor:
    weights = (scores - top).exp()
    return weights / ((sink - top).exp() + weights.sum(-1, keepdim=True)) @ values


def _beside(scores: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)


def _summed_by_hand(scores: Tensor, values: Tensor, sink: Tensor) -> Tensor:
    return (scores.softmax(-1) @ values) * torch.sigmoid(_total(scores).log() - sink)


SPELLINGS: dict[str, Spelling] = {
    "column": lambda s, v, t: _beside(s, t).softmax(-1)[..., :-1] @ v,
    "column, cast": lambda s, v, t: _beside(s, t).double().softmax(-1)[..., :-1] @ v,
    "denominator": lambda s, v, t: s.exp() / (t.exp() + _total(s)) @ v,
    "denominator, after the values": lambda s, v, t: (s.exp() @ v) / (_total(s) + t.exp()),
    "denominator, halved": lambda s, v, t: (s.exp() @ v) / (_total(s) / 2 + t.exp() / 2),
    "denominator, shifted": lambda s, v, t: _shifted(s, v, t, s.amax(-1, True)),
    "denominator, shifted from zero": lambda s, v, t: _shifted(s, v, t, s.amax(-1, True).clamp(min=0)),
    "denominator, shifted by the largest of all": lambda s, v, t: _shifted(s, v, t, torch.maximum(s.amax(-1, True), t)),
    "denominator, shifted by the largest of all, after the values": lambda s, v, t: (
        (e := (s - (top := torch.maximum(s.amax(-1, True), t))).exp()) @ v / (e.sum(-1, True) + (t - top).exp())
    ),
    "denominator, shifted by a clamped maximum": lambda s, v, t: _shifted(s, v, t, s.amax(-1, True).clamp(min=t)),
    "denominator, shifted by a maximum of its own least": lambda s, v, t: _shifted(
        s, v, t, torch.clamp_min(s.amax(-1, True), t)
    ),
    "denominator, shifted by fmax": lambda s, v, t: _shifted(s, v, t, torch.fmax(s.amax(-1, True), t)),
    "column, shifted by the largest": lambda s, v, t: (
        ((c := _beside(s, t)) - c.amax(-1, True).detach()).softmax(-1)[..., :-1] @ v
    ),
    "denominator, shifted by the largest of a column, too": lambda s, v, t: _shifted(
        s, v, t, _beside(s, t).amax(-1, True)
    ),
    "the same, no keepdim": lambda s, v, t: _shifted(s, v, t, _beside(s, t).amax(-1)[..., None]),
    "sum of logarithms over the column, too": lambda s, v, t: (s - _beside(s, t).logsumexp(-1, True)).exp() @ v,
    "sum of shifted logarithms": lambda s, v, t: (
        ((s - (top := (c := _beside(s, t)).amax(-1, True))) - (c - top).logsumexp(-1, True)).exp() @ v
    ),
    "sum of logarithms shifted by the scores' largest": lambda s, v, t: (
        (s - (top := s.amax(-1, True)) - (_beside(s, t) - top).logsumexp(-1, True)).exp() @ v
    ),
    "the same after the values": lambda s, v, t: (s.exp() @ v) / _beside(s, t).logsumexp(-1, True).exp(),
    "share": lambda s, v, t: (s.softmax(-1) @ v) * (s.logsumexp(-1, True) - t).sigmoid(),
    "share, no keepdim": lambda s, v, t: (s.softmax(-1) @ v) * (s.logsumexp(-1) - t[..., 0]).sigmoid()[..., None],
    "share by a quotient": lambda s, v, t: (s.softmax(-1) @ v) / (1 + (t - s.logsumexp(-1, True)).exp()),
    "share by hand": _summed_by_hand,
    "share by what is left": lambda s, v, t: (s.softmax(-1) @ v) * (1 - (t - s.logsumexp(-1, True)).sigmoid()),
    "share by its logarithm": lambda s, v, t: (s.softmax(-1) @ v) * F.logsigmoid(s.logsumexp(-1, True) - t).exp(),
    "share by a sum of logarithms": lambda s, v, t: (
        (s.softmax(-1) @ v) * ((lse := s.logsumexp(-1, True)) - torch.logaddexp(lse, t)).exp()
    ),
    "probabilities by a sum of logarithms": lambda s, v, t: (s - torch.logaddexp(s.logsumexp(-1, True), t)).exp() @ v,
    "share before the values": lambda s, v, t: (s.softmax(-1) * (s.logsumexp(-1, True) - t).sigmoid()) @ v,
    "share before the values, by hand": lambda s, v, t: s.softmax(-1) * torch.sigmoid(_total(s).log() - t) @ v,
    "share before the values, of shifted scores": lambda s, v, t: (
        (s - s.amax(-1, True)).softmax(-1) * (1 - (t - s.logsumexp(-1, True)).sigmoid()) @ v
    ),
    "share of exponentials before the values": lambda s, v, t: (
        (s - (lse := s.logsumexp(-1, True))).exp() * F.logsigmoid(lse - t).exp() @ v
    ),
    "share before the values, by a sum of exponentials": lambda s, v, t: (
        s.softmax(-1) * ((w := _total(s)) / (w + t.exp())) @ v
    ),
    "share of transposed rows": lambda s, v, t: (
        (s.softmax(-1) @ v).transpose(1, 2) * (s.logsumexp(-1, True) - t).sigmoid().transpose(1, 2)
    ).transpose(1, 2),
}
#: The extra score: of a head, of a query as well, and a number.
SINKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "head": lambda q, given: given[:, None, None].expand(*q.shape[:-1], 1),
    "query": lambda q, given: (q * given[:, None, None]).sum(-1, keepdim=True),
    "zero": lambda q, given: torch.zeros(*q.shape[:-1], 1, dtype=q.dtype),
}
#: What becomes of scores before: nothing, a mask, a cap, a number.
BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda s: s * 0.3,
    "causal": lambda s: (s * 0.3).masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(3), -torch.inf),
    "capped": lambda s: torch.tanh(s / 3) * 3,
    "added": lambda s: s * 0.3 + 0.7,
}


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6), (3,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _compared(function: Callable[..., Tensor], inputs: list[Tensor]) -> Rewriting:
    """The backend after a compile whose result, and gradients, are those of eager mode."""
    torch._dynamo.reset()
    backend, results = Rewriting(lock={"attention": "lz.blocked"}), []
    for each in (torch.compile(function, backend=backend, fullgraph=True), function):
        found = each(*inputs)
        results.append((found, *torch.autograd.grad(found.square().sum(), inputs, allow_unused=True)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    return backend


def _cases() -> list[tuple[str, str, str]]:
    """Every spelling with each sink, and with each of what may come before, once."""
    kinds, before = list(SINKS), list(BEFORE)
    return [
        (name, kinds[(i + j) % len(kinds)], before[j % len(before)])
        for i, name in enumerate(SPELLINGS)
        for j in range(len(before))
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(("spelling", "kind", "before"), _cases())
def test_an_extra_score_is_read_in_whatever_form_it_takes_part(spelling: str, kind: str, before: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        return SPELLINGS[spelling](BEFORE[before](q @ k.mT), v, SINKS[kind](q, given))

    backend = _compared(attention, _inputs())
    (match,) = [each for each in backend.report.matches if each.op == "attention"]
    assert match.rewritten, backend.why_not()
    assert match.attributes["has_sinks"]
    products = [node for graph in backend.graphs for node in graph.graph.nodes if node.target is torch.matmul]
    assert not products, "scores are computed beside the kernel"


@pytest.mark.parametrize("spelling", [name for name in SPELLINGS if name.startswith("share")])
def test_a_mask_that_is_added_is_understood_beside_a_share(spelling: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        keep = torch.arange(7) <= torch.arange(5)[:, None] + 2
        scores = q @ k.mT * 0.3 + torch.where(keep, 0.0, -1e30)
        return SPELLINGS[spelling](scores, v, SINKS["head"](q, given))

    backend = _compared(attention, _inputs())
    (match,) = [each for each in backend.report.matches if each.op == "attention"]
    assert match.rewritten, backend.why_not()
    assert match.attributes["has_sinks"]
    assert not match.attributes.get("has_bias"), match.attributes


@pytest.mark.parametrize("spelling", ["denominator", "denominator, after the values"])
def test_a_mask_that_is_added_is_read_beside_a_sink_in_the_denominator(spelling: str) -> None:
    keep = torch.ones(5, 7, dtype=torch.bool).tril(3)

    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3 + torch.where(keep, 0.0, -torch.inf)
        return SPELLINGS[spelling](scores, v, SINKS["head"](q, given))

    backend = _compared(attention, _inputs())
    found = [
        (match.rewritten, match.attributes["has_sinks"]) for match in backend.report.matches if match.op == "attention"
    ]
    assert found == [(True, True)], backend.why_not()


LOOKALIKES: dict[str, tuple[Spelling, str]] = {
    "sum of other scores": (
        lambda s, v, t: (s - _beside(s * 0.9, t).logsumexp(-1, True)).exp() @ v,
        "DENOMINATOR_OF_ANOTHER_SUM",
    ),
    "sum of logarithms shifted otherwise": (
        lambda s, v, t: (s - (_beside(s, t) - s.amax(-1, True)).logsumexp(-1, True)).exp() @ v,
        "DENOMINATOR_OF_ANOTHER_SUM",
    ),
    "sum of logarithms shifted twice as far": (
        lambda s, v, t: (
            (s - (m := s.amax(-1, True)) - torch.sub(_beside(s, t), m, alpha=2).logsumexp(-1, True)).exp() @ v
        ),
        "DENOMINATOR_OF_ANOTHER_SUM",
    ),
    "a score of each feature": (
        lambda s, v, t: (s.exp() @ v) / (s.exp().sum(-1, True) + (v[..., :1, :] + t).exp()),
        "NOT_NORMALISED",
    ),
    "a share of each feature": (
        lambda s, v, t: (s.softmax(-1) @ v) * (s.logsumexp(-1, True) - v[..., :1, :] - t).sigmoid(),
        "INTERIOR_USED",
    ),
    "two columns": (
        lambda s, v, t: (s - torch.cat([s, t, t + 1], -1).logsumexp(-1, True)).exp() @ v,
        "SINK_NOT_UNDERSTOOD",
    ),
    "column, shifted by the largest of other rows": (
        lambda s, v, t: ((c := _beside(s, t)) - c.amax(-2, True)).softmax(-1)[..., :-1] @ v,
        "SCORES_NOT_READ",
    ),
    "shifted by a larger number": (
        lambda s, v, t: _shifted(s, v, t, torch.max(s.amax(-1, True), torch.full((), 200.0, dtype=s.dtype))),
        "INTERIOR_USED",
    ),
    "shifted by a number": (
        lambda s, v, t: _shifted(s, v, t, torch.maximum(s.amax(-1, True), torch.full((), 200.0, dtype=s.dtype))),
        "INTERIOR_USED",
    ),
    "shifted by a maximum that is held below another score": (
        lambda s, v, t: _shifted(s, v, t, s.amax(-1, True).clamp(min=t, max=t + 1)),
        "INTERIOR_USED",
    ),
    "shifted by the smaller of both": (
        lambda s, v, t: _shifted(s, v, t, torch.fmin(s.amax(-1, True), t)),
        "INTERIOR_USED",
    ),
    "shifted by another score": (
        lambda s, v, t: _shifted(s, v, t, torch.maximum(s.amax(-1, True), t.exp())),
        "INTERIOR_USED",
    ),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_is_beside_other_scores_is_no_sink(name: str) -> None:
    spelling, code = LOOKALIKES[name]

    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        return spelling(q @ k.mT * 0.3, v, SINKS["head"](q, given))

    backend = _compared(attention, _inputs())
    assert not backend.report.matches
    assert [miss.reason.code for miss in backend.report.near_misses] == [code], backend.why_not()


NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one": lambda s, v: s.exp() / (1 + _total(s)) @ v,
    "little": lambda s, v: (s.exp() @ v) / (_total(s) + 1e-6),
    "one, shifted": lambda s, v: _shifted(s, v, torch.zeros((), dtype=s.dtype), s.amax(-1, True)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_positive_number_beside_the_sum_is_a_sink(name: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        return NUMBERS[name](q @ k.mT * 0.3, v)

    backend = _compared(attention, _inputs())
    assert [match.rewritten for match in backend.report.matches if match.op == "attention"] == [True], backend.why_not()


OTHERS: dict[str, tuple[Spelling, str]] = {
    # the maximum was subtracted from scores, and from what is added it was not
    "number beside shifted ones": (
        lambda s, v, t: (x := (s - s.amax(-1, True)).exp()) / (x.sum(-1, keepdim=True) + 1e-2) @ v,
        "EPSILON_IN_DENOMINATOR",
    ),
    "column beside shifted ones": (
        lambda s, v, t: SPELLINGS["column"](s - s.amax(-1, True), v, t),
        "EPSILON_IN_DENOMINATOR",
    ),
    "less than the sum": (lambda s, v, t: (s.exp() @ v) / (_total(s) - 0.1), "EPSILON_IN_DENOMINATOR"),
    "of any sign": (lambda s, v, t: (s.exp() @ v) / (_total(s) + t), "EPSILON_IN_DENOMINATOR"),
    "square of the share": (
        lambda s, v, t: (s.softmax(-1) @ v) * (s.logsumexp(-1, True) - t).sigmoid() ** 2,
        "INTERIOR_USED",
    ),
    "twice the logarithm": (
        lambda s, v, t: (s.softmax(-1) @ v) * (2 * s.logsumexp(-1, True) - t).sigmoid(),
        "INTERIOR_USED",
    ),
    "logarithm of other scores, before the values": (
        lambda s, v, t: (s.softmax(-1) * ((s * 2).logsumexp(-1, True) - t).sigmoid()) @ v,
        "INTERIOR_USED",
    ),
    "square of the share, before the values": (
        lambda s, v, t: (s.softmax(-1) * (s.logsumexp(-1, True) - t).sigmoid() ** 2) @ v,
        "INTERIOR_USED",
    ),
    "logarithm of other scores": (
        lambda s, v, t: (s.softmax(-1) @ v) * ((s * 2).logsumexp(-1, True) - t).sigmoid(),
        "INTERIOR_USED",
    ),
    "share and logarithm": (
        lambda s, v, t: (s.softmax(-1) @ v) * ((x := s.logsumexp(-1, True)) - t).sigmoid() + x,
        "INTERIOR_USED",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_a_sink_is_none(name: str) -> None:
    spelled, code = OTHERS[name]

    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        return spelled(q @ k.mT * 0.3, v, SINKS["head"](q, given))

    backend = _compared(attention, _inputs())
    assert not [match for match in backend.report.matches if match.op == "attention"]
    assert {miss.reason.code for miss in backend.report.near_misses if miss.op == "attention"} == {code}


#: Rows without a key are NaN in these where fills are infinite, and zero in the others: no kernel replaces them.
NAN_WITHOUT_A_KEY = ("share", "sum of logarithms shifted by the scores' largest")


@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("spelling", [*NAN_WITHOUT_A_KEY, "column", "denominator", "the same after the values"])
def test_rows_without_a_key_are_as_in_eager_code(spelling: str, fill: float) -> None:
    keep = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(5)) < 0.6
    keep[0, :, 2] = False

    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.3).masked_fill(~keep, fill)
        return SPELLINGS[spelling](scores, v, SINKS["head"](q, given))

    inputs = [each.detach() for each in _inputs()]
    backend = Rewriting(lock={"attention": "lz.blocked"})
    got = torch.compile(attention, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, attention(*inputs), equal_nan=True)
    is_read = [match.rewritten for match in backend.report.matches if match.op == "attention"]
    assert is_read == [spelling not in NAN_WITHOUT_A_KEY or fill != -torch.inf], backend.why_not()


def test_a_maximum_is_subtracted_that_is_zero_at_least() -> None:
    """What holds the zero is of no other use."""

    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3
        top = torch.maximum(scores.amax(-1, True), torch.zeros_like(SINKS["head"](q, given)))
        weights = (scores - top).exp()
        return weights @ v / weights.sum(-1, keepdim=True)

    backend = _compared(attention, _inputs())
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
