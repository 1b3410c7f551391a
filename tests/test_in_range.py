"""Made-up values out of range raise before an accelerator, which they would abort, sees them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lz_compile.passes.proof.running import InRange

ROWS, PLACES = torch.randn(4, 3), torch.tensor([0, 3, 1])
#: What is run with places, and one that is too large, or none in particular.
CALLS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "an index": (lambda at: ROWS[at], 4),
    "an index from the end": (lambda at: ROWS[at - 4], -1),
    "an index behind a mask": (lambda at: torch.randn(2, 2, 4)[torch.tensor([[True, False], [True, True]]), at], 4),
    "an index behind a slice": (lambda at: ROWS.T[:, at], 4),
    "a write": (lambda at: torch.zeros(4).index_put_((at,), torch.ones(3)), 4),
    "a write by brackets": (lambda at: ROWS.clone().__setitem__(at, 0.0), 4),
    "gather": (lambda at: ROWS.gather(0, at[:, None]), 4),
    "scatter": (lambda at: ROWS.scatter(0, at[:, None], 1.0), 4),
    "scatter_add_": (lambda at: torch.zeros(4).scatter_add_(0, at, torch.ones(3)), 4),
    "index_select": (lambda at: ROWS.index_select(0, at), 4),
    "index_add": (lambda at: ROWS.index_add(0, at, torch.ones(3, 3)), 4),
    "embedding": (lambda at: F.embedding(at, ROWS), 4),
    "embedding_bag": (lambda at: F.embedding_bag(at[None], ROWS), 4),
    "one_hot": (lambda at: F.one_hot(at, 4), 4),
    "take": (lambda at: torch.take(ROWS, at), 12),
    "cross_entropy": (lambda at: F.cross_entropy(torch.randn(3, 4), at), 4),
    "cross_entropy of images": (lambda at: F.cross_entropy(torch.randn(1, 4, 1, 3), at[None, None]), 4),
    "multi_margin_loss": (lambda at: F.multi_margin_loss(torch.randn(3, 4), at), 4),
    "bernoulli": (lambda at: torch.bernoulli(at / 3), 4),
    "multinomial": (lambda at: torch.multinomial(at.float(), 1), -1),
    "_assert_async": (lambda at: torch._assert_async(at[0] == 0), 4),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_in_range_runs_and_the_rest_raises(name: str) -> None:
    call, outside = CALLS[name]
    with InRange():
        call(PLACES)
    text = "reads a value that is not between|out of bounds|must be smaller"  # a few raise by themselves on a CPU
    with pytest.raises((IndexError, RuntimeError), match=text), InRange():
        call(torch.tensor([outside, 3, 1]))


def test_a_class_that_is_left_out_is_none_that_is_too_large() -> None:
    with InRange():
        F.cross_entropy(torch.randn(3, 4), torch.tensor([0, -100, 3]))
        ROWS[:0][:, torch.tensor([], dtype=torch.long)]
