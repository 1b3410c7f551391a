"""Rows that lose every key and are set to zero by a condition, on the mask or on the scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Rewriting
from torch import Tensor

INF = float("-inf")
#: What weighs the values, of scores that are not masked yet, and of what is kept of them.
SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "any": lambda s, m: torch.where(m.any(-1, True), _masked(s, m).softmax(-1), 0.0),
    "not any": lambda s, m: _masked(s, m).softmax(-1).masked_fill(~m.any(-1, keepdim=True), 0.0),
    "all dropped": lambda s, m: torch.where((~m).all(-1, keepdim=True), 0.0, _masked(s, m).softmax(-1)),
    "counted": lambda s, m: torch.where(m.sum(-1, keepdim=True) > 0, _masked(s, m).softmax(-1), 0.0),
    "counted, one": lambda s, m: torch.where(m.sum(-1, keepdim=True) >= 1, _masked(s, m).softmax(-1), 0.0),
    "beside a finite fill": lambda s, m: torch.where(m.any(-1, True), s.masked_fill(~m, -1e9).softmax(-1), 0.0),
    "by scores": lambda s, m: _zeroed(_masked(s, m), lambda x: (x == INF).all(-1, keepdim=True)),
    "by scores, unsqueezed": lambda s, m: _zeroed(_masked(s, m), lambda x: (x == INF).all(-1)[..., None]),
    "as SDPA": lambda s, m: _zeroed(_masked(s, m), lambda x: ~(x != INF).any(-1, keepdim=True)),
    "isneginf": lambda s, m: _zeroed(_masked(s, m), lambda x: x.isneginf().all(-1, keepdim=True)),
    "maximum": lambda s, m: _zeroed(_masked(s, m), lambda x: x.amax(-1, keepdim=True) == INF),
    "maximum and place": lambda s, m: _zeroed(_masked(s, m), lambda x: x.max(-1, keepdim=True)[0].isinf()),
    "by hand": lambda s, m: torch.where(
        (t := (x := _masked(s, m)).amax(-1, True)) == INF, 0.0, (e := (x - t).exp()) / e.sum(-1, True)
    ),
}
#: Where a probability is no number, zero is taken.
SPELLINGS |= {
    name: lambda s, m, chosen=chosen: chosen(_masked(s, m).softmax(-1))
    for name, chosen in {
        "isnan": lambda p: p.masked_fill(p.isnan(), 0.0),
        "isnan, zeros": lambda p: torch.where(torch.isnan(p), torch.zeros_like(p), p),
        "unequal to itself": lambda p: torch.where(p != p, 0.0, p),  # noqa: PLR0124
        "equal to itself": lambda p: torch.where(p == p, p, 0.0),  # noqa: PLR0124
        "not isnan": lambda p: torch.where(~p.isnan(), p, 0.0),
    }.items()
}
#: Conditions that say something else: of a mask that hides less, of more keys than one, of all keys, of all but one.
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two keys": lambda s, m: torch.where(m.sum(-1, keepdim=True) > 1, _masked(s, m).softmax(-1), 0.0),
    "halves": lambda s, m: torch.where((m * 0.5).sum(-1, keepdim=True) >= 1, _masked(s, m).softmax(-1), 0.0),
    "every key": lambda s, m: torch.where(m.all(-1, keepdim=True), _masked(s, m).softmax(-1), 0.0),
    "later keys": lambda s, m: torch.where(m[..., 1:].any(-1, keepdim=True), _masked(s, m).softmax(-1), 0.0),
    "queries": lambda s, m: torch.where(m.any(-2)[..., None], _masked(s, m).softmax(-1), 0.0),
    "isnan, one": lambda s, m: (p := _masked(s, m).softmax(-1)).masked_fill(p.isnan(), 1.0),
    "isnan of scores": lambda s, m: (x := _masked(s, m)).softmax(-1).masked_fill(x.isnan(), 0.0),
    "large": lambda s, m: _zeroed(_masked(s, m), lambda x: (x < 0.5).all(-1, keepdim=True)),
}


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, INF)


def _zeroed(scores: Tensor, is_lost: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.where(is_lost(scores), 0.0, scores.softmax(-1))


def _inputs() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 6, 8, dtype=torch.double, requires_grad=True) for _ in range(3)]
    mask = torch.rand(2, 1, 6, 6) > 0.5
    mask[0, 0, 2] = False
    return inputs, mask


def _read(weigh: Callable[[Tensor, Tensor], Tensor], *, is_padding: bool = False) -> Rewriting:
    """The backend after a compile whose results, and gradients, are those of eager mode."""
    inputs, mask = _inputs()

    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        keep = given[:, 0, 3, None, None] & torch.ones(6, 6, dtype=torch.bool).tril() if is_padding else given
        return weigh(q @ k.mT * 0.3, keep) @ v

    torch._dynamo.reset()
    backend, results = Rewriting(lock={"attention": "lz.blocked"}), []
    for each in (torch.compile(attention, backend=backend, fullgraph=True), attention):
        found = each(*inputs, mask)
        results.append((found, *torch.autograd.grad(found.square().sum(), inputs)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10, equal_nan=True)
    return backend


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("is_padding", [False, True])
def test_rows_that_lost_every_key_are_zero_however_that_is_asked(spelling: str, is_padding: bool) -> None:
    backend = _read(SPELLINGS[spelling], is_padding=is_padding)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()


@pytest.mark.parametrize("spelling", OTHERS)
def test_other_conditions_on_rows_are_none_of_that(spelling: str) -> None:
    backend = _read(OTHERS[spelling])
    assert not any(match.rewritten for match in backend.report.matches)


@pytest.mark.parametrize(
    "weigh",
    [
        lambda s, m: _masked(s, m | ~m.any(-1, keepdim=True)).softmax(-1) * m.any(-1, keepdim=True),
        lambda s, m: (
            (s + torch.zeros_like(m, dtype=s.dtype).masked_fill(~m, -1e9)).softmax(-1) * m.any(-1, keepdim=True)
        ),
    ],
)
def test_a_condition_that_stays_undecided_weighs_rows_as_any_other_tensor(
    weigh: Callable[[Tensor, Tensor], Tensor],
) -> None:
    backend = _read(weigh)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()


def test_a_condition_on_the_padding_says_nothing_of_what_is_causal_as_well() -> None:
    inputs, mask = _inputs()

    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        padding = given[:, 0, 3, None, None]
        weights = _masked(q @ k.mT, padding & torch.ones(6, 6, dtype=torch.bool).tril()).softmax(-1)
        return torch.where(padding.any(-1, keepdim=True), weights, 0.0) @ v

    backend = Rewriting(lock={"attention": "lz.blocked"})
    found = torch.compile(attention, backend=backend, fullgraph=True)(*inputs, mask)
    torch.testing.assert_close(found, attention(*inputs, mask), equal_nan=True)
    assert not any(match.rewritten for match in backend.report.matches)


def test_biases_that_hide_a_whole_row_are_asked_as_masks_are() -> None:
    """The source's own gradients are NaN there."""
    inputs, mask = _inputs()

    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        bias = torch.zeros_like(given, dtype=q.dtype).masked_fill(~given, INF)
        return (q @ k.mT + bias).softmax(-1).masked_fill((bias == INF).all(-1, keepdim=True), 0.0) @ v

    backend = Rewriting(lock={"attention": "lz.blocked"})
    found = torch.compile(attention, backend=backend, fullgraph=True)(*inputs, mask)
    torch.testing.assert_close(found, attention(*inputs, mask), rtol=1e-9, atol=1e-10)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()


def test_zeros_that_are_written_to_before_they_are_chosen_are_none() -> None:
    inputs, mask = _inputs()

    def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        weights, zeros = _masked(q @ k.mT, given).softmax(-1), torch.zeros(2, 2, 6, 6, dtype=q.dtype)
        is_lost = weights.isnan()
        zeros.add_(1.0)
        return torch.where(is_lost, zeros, weights) @ v

    found = torch.compile(attention, backend=Rewriting(lock={"attention": "lz.blocked"}), fullgraph=True)(*inputs, mask)
    torch.testing.assert_close(found, attention(*inputs, mask), rtol=1e-9, atol=1e-10)
