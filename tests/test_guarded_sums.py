"""What guards a sum of exponentials that is never small is left out, bit by bit the same; what may bite stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Rewriting
from graphs import capture
from torch import Tensor

from lz_compile.passes.inlining.guarded_sums import drop_guards

Guard = Callable[[Tensor], Tensor]
GUARDS: dict[str, Guard] = {
    "added": lambda total: total + 1e-9,
    "added_first": lambda total: 1e-20 + total,
    "added_tensor": lambda total: total + torch.tensor(1e-9),
    "clamp": lambda total: total.clamp(min=1e-6),
    "clamp_min": lambda total: torch.clamp_min(total, 0.1),
    "maximum": lambda total: torch.maximum(total, torch.tensor(1e-9)),
    "where_zero": lambda total: torch.where(total == 0, 1.0, total),
    "filled_where_small": lambda total: total.masked_fill(total < 1e-6, 1.0),
}


def _below_largest(scores: Tensor) -> Tensor:
    return scores - scores.amax(-1, keepdim=True)


#: How exponentials are made of scores.
EXPONENTIALS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda s: torch.exp(s - s.amax(-1, keepdim=True)),
    "max_of_pair": lambda s: (s - s.max(-1, keepdim=True)[0]).exp(),
    "detached": lambda s: torch.exp(s - s.amax(-1, keepdim=True).detach()),
    "unsqueezed": lambda s: torch.exp(s - s.amax(-1).unsqueeze(-1)),
    "base_two": lambda s: torch.exp2((s - s.amax(-1, keepdim=True)) * 1.4426950408889634),
    "filled_in_base_two": lambda s: torch.exp2(_below_largest(s.masked_fill(s > 1, -1e30) / 3) * 1.4426950408889634),
    "filled_by_a_logarithm": lambda s: torch.exp(_below_largest(s + (s < 1).to(s.dtype).log())),
    "filled_in_float64": lambda s: torch.exp2(_below_largest(s.double().masked_fill(s > 1, -1e5)) * 1.4426950408889634),
    "scaled_after": lambda s: torch.exp(s * 3 - 3 * s.amax(-1, keepdim=True)),
    "softmax": lambda s: torch.softmax(s, -1),
}
#: What may be small, or is not known to be large.
SMALL: dict[str, Callable[[Tensor], Tensor]] = {
    "no_maximum": torch.exp,
    "another_axis": lambda s: torch.exp(s - s.amax(-2, keepdim=True)),
    "larger_than_all": lambda s: torch.exp(s - s.amax(-1, keepdim=True).relu()),
    "of_more": lambda s: torch.exp(s - (2 * s).amax(-1, keepdim=True)),
    "masked_after": lambda s: torch.exp(s - s.amax(-1, keepdim=True)) * (s > 0),
    "rounded_maximum": lambda s: torch.exp(s - s.amax(-1, keepdim=True).bfloat16()),
    "subtracted_from": lambda s: torch.exp(s.amax(-1, keepdim=True) - s) - 1,
    "masked_softmax": lambda s: torch.softmax(s, -1) * (s > 0),
    "softmax_of_another_axis": lambda s: torch.softmax(s, -2),
}


def scores() -> Tensor:
    """Scores with rows that are large, small, NaN, and without any key."""
    found = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    found[1] *= 1e4
    found[2, 1] = float("nan")
    found[3] = float("-inf")
    found[4, 2:] = float("-inf")
    found[5] = torch.finfo(torch.float32).min
    return found


def dropped(make: Callable[[Tensor], Tensor], guard: Guard, given: Tensor) -> int:
    def normalised(given: Tensor) -> Tensor:
        found = make(given)
        return found / guard(found.sum(-1, keepdim=True))

    module = capture(normalised, given)
    results = []
    for edited in (False, True):
        count = drop_guards(module.graph) if edited else 0
        module.recompile()
        own = given.clone().requires_grad_()
        (result,) = module(own)
        (gradient,) = torch.autograd.grad(result.square().sum(), own)
        results.append((result, gradient))
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    return count


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_a_guard_that_cannot_bite_goes_and_no_bit_changes(guard: Guard) -> None:
    assert dropped(EXPONENTIALS["amax"], guard, scores()) == 1


@pytest.mark.parametrize("make", EXPONENTIALS.values(), ids=EXPONENTIALS)
def test_of_every_sum_that_is_never_small_a_guard_goes(make: Callable[[Tensor], Tensor]) -> None:
    assert dropped(make, lambda total: total + 1e-20, scores()) == 1
    assert dropped(make, GUARDS["clamp"], scores()) == 1


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
def test_a_guard_of_a_sum_that_may_be_small_stays(make: Callable[[Tensor], Tensor]) -> None:
    assert dropped(make, GUARDS["added"], scores()) == 0
    assert dropped(make, GUARDS["clamp"], scores()) == 0


@pytest.mark.parametrize(
    "guard",
    [
        lambda total: total + 1e-6,
        lambda total: total.clamp(min=2.0),
        lambda total: total.clamp(min=1e-9, max=3.0),
        lambda total: torch.where(total == 1, 2.0, total),
        lambda total: torch.where(total > 0, total, 1.0),
        lambda total: torch.where(total < total.mean(), 1.0, total),
        lambda total: torch.add(total, 1e-9, alpha=1000),
    ],
)
def test_a_guard_that_bites_stays(guard: Guard) -> None:
    assert dropped(EXPONENTIALS["amax"], guard, scores()) == 0


def test_what_float64_tells_apart_stays_there_and_what_16_bits_do_not_goes() -> None:
    assert dropped(EXPONENTIALS["amax"], GUARDS["added"], scores().double()) == 0
    assert dropped(EXPONENTIALS["amax"], lambda total: total + 1e-4, scores()[:3].bfloat16()) == 1


def _without_gradients(total: Tensor) -> Tensor:
    with torch.no_grad():
        return total + 1e-9


def test_a_guard_that_cuts_gradients_off_or_is_given_out_beside_its_sum_stays() -> None:
    assert dropped(EXPONENTIALS["amax"], _without_gradients, scores().requires_grad_()) == 0

    def both(given: Tensor) -> tuple[Tensor, Tensor]:
        total = EXPONENTIALS["amax"](given).sum(-1)
        return total[None], (total + 1e-9)[None]

    assert drop_guards(capture(both, scores()).graph) == 0


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_attention_is_recognised_behind_such_guards(guard: Guard) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        found = (q @ k.mT / 2).masked_fill(mask, float("-inf"))
        weights = torch.exp(found - found.amax(-1, keepdim=True))
        return (weights / guard(weights.sum(-1, keepdim=True))) @ v

    q, k, v = torch.randn(3, 2, 3, 5, 4)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[:, 3:] = mask[2] = True
    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": "torch.sdpa"})
    result = torch.compile(attention, backend=backend, fullgraph=True)(q, k, v, mask)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(result, attention(q, k, v, mask), equal_nan=True)
