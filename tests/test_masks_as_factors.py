"""Masks of zeros and ones in floating point that scores or probabilities are multiplied by, and what is normalised again."""

from __future__ import annotations

import copy

import pytest
import torch
from backends import Rewriting
from torch import Tensor, nn

LENGTH, MOST = 9, 16
USES = ("scores", "added", "exponentials", "probabilities", "powers")


def _scattered() -> Tensor:
    keep = (torch.rand(MOST, MOST, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    return keep.fill_diagonal_(1.0)


class Attention(nn.Module):
    """An attention whose mask is a buffer of floats, or is made in the graph."""

    def __init__(self, mask: str, use: str) -> None:
        super().__init__()
        self.mask, self.use = mask, use
        values = _scattered() if mask == "scattered" else torch.ones(MOST, MOST).tril()
        self.register_buffer("buffer", 1 - values if mask == "dropped" else values)

    def kept(self, scores: Tensor) -> Tensor:
        """1 where a query sees a key, 0 elsewhere."""
        if self.mask == "made":
            return torch.tril(torch.ones_like(scores))
        if self.mask == "made and changed":
            made = torch.ones(LENGTH, LENGTH).tril()
            made.detach()[3, 0] = 0.5
            return made
        if self.mask == "made by halves":
            return 1 - torch.triu(torch.ones(LENGTH, LENGTH), 1)
        part = self.buffer[:LENGTH, :LENGTH]
        return 1 - part if self.mask == "dropped" else part

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * 0.3
        kept = self.kept(scores)
        if self.use == "filled":
            return scores.masked_fill(kept == 0, -1e9).softmax(-1) @ value
        if self.use == "compared":
            return scores.masked_fill(kept < 0.95, -1e9).softmax(-1) @ value
        if self.use == "scores":
            return (scores * kept - 1e4 * (1 - kept)).softmax(-1) @ value
        if self.use == "added":
            return (scores * kept + (kept - 1) * 1e9).softmax(-1) @ value
        if self.use in ("exponentials", "exponentials after the values"):
            weights = (scores - scores.amax(-1, keepdim=True)).exp() * kept
            if self.use != "exponentials":
                return (weights @ value) / weights.sum(-1, keepdim=True)
            return weights / weights.sum(-1, keepdim=True) @ value
        weights = scores.softmax(-1) * kept
        if self.use == "powers":
            weights = weights**2
        if self.use == "epsilon":
            return weights / (weights.sum(-1, keepdim=True) + 1e-3) @ value
        return weights / weights.sum(-1, keepdim=True) @ value


def _compiled(module: nn.Module, backend: Rewriting) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(module, backend=backend, fullgraph=True)  # type: ignore[return-value]


def _inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 3, LENGTH, 8, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("use", [*USES, "exponentials after the values"])
@pytest.mark.parametrize("mask", ["buffer", "dropped", "scattered", "made", "made by halves"])
def test_a_mask_of_zeros_and_ones_is_one(mask, use):
    module, backend, inputs = Attention(mask, use), Rewriting(), _inputs()
    found = _compiled(module, backend)(*inputs)
    (match,) = backend.report.matches
    assert match.rewritten, backend.why_not()
    assert match.mask == ("mask" if mask == "scattered" else "causal")
    wide = [each.detach().double().requires_grad_() for each in inputs]
    exact = Attention(mask, use).double()(*wide)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(found)
    gradients = torch.autograd.grad(found, inputs, direction)
    expected = torch.autograd.grad(exact, wide, direction.double())
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["buffer", "scattered"])
def test_other_values_of_the_buffer_are_seen(mask):
    module, backend, inputs = Attention(mask, "scores"), Rewriting(), _inputs()
    compiled = _compiled(module, backend)
    compiled(*inputs)
    (match,) = backend.report.matches
    assert match.rewritten, backend.why_not()
    for values in (torch.ones(MOST, MOST).tril(2), torch.rand(MOST, MOST)):
        module.buffer.copy_(values)
        torch.testing.assert_close(compiled(*inputs), module(*inputs), rtol=1e-4, atol=1e-5)


class Faded(Attention):
    """A mask that is written to at every call, in a way that its version does not count, ahead of its use or after it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.mask == "ahead":
            self.buffer.data.mul_(0.9)
        result = super().forward(query, key, value)
        if self.mask == "behind":
            self.buffer.data.mul_(0.9)
        return result


@pytest.mark.parametrize("use", ["scores", "compared"])
@pytest.mark.parametrize("mask", ["ahead", "behind"])
def test_a_buffer_that_the_graph_overwrites_holds_anything(mask, use):
    module, backend, inputs = Faded(mask, use), Rewriting(), _inputs()
    alike = copy.deepcopy(module)
    compiled = _compiled(module, backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(*inputs), alike(*inputs), rtol=1e-4, atol=1e-5)
    assert [match.rewritten for match in backend.report.matches] == [True] * (use == "compared"), backend.why_not()
    assert use == "compared" or "SCALE_BY_SCORE" in backend.why_not()


@pytest.mark.parametrize("use", ["scores", "probabilities"])
def test_a_mask_that_is_overwritten_before_it_is_used_holds_anything(use):
    module, backend, inputs = Attention("made and changed", use), Rewriting(), _inputs()
    torch.testing.assert_close(_compiled(module, backend)(*inputs), module(*inputs))
    assert not backend.report.matches
    assert ("SCALE_BY_SCORE" if use == "scores" else "NOT_AN_EXPONENTIAL") in backend.why_not()


def test_a_mask_that_is_given_may_hold_anything():
    def attention(query: Tensor, key: Tensor, value: Tensor, kept: Tensor) -> Tensor:
        return (query @ key.mT * kept - 1e4 * (1 - kept)).softmax(-1) @ value

    backend = Rewriting()
    inputs = [*_inputs(), torch.rand(LENGTH, LENGTH)]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attention, backend=backend)(*inputs), attention(*inputs))
    assert "SCALE_BY_SCORE" in backend.why_not()


def test_what_is_added_to_a_sum_of_probabilities_is_no_score():
    module, backend, inputs = Attention("buffer", "epsilon"), Rewriting(), _inputs()
    torch.testing.assert_close(_compiled(module, backend)(*inputs), module(*inputs))
    assert "EPSILON_IN_DENOMINATOR] a number is added to the sum of probabilities" in backend.why_not()


class Cached(Attention):
    """The last rows of a mask, as where keys of earlier calls are kept."""

    def kept(self, scores: Tensor) -> Tensor:
        """Of symbolic sizes: that the first row is one is what a guard says."""
        queries, keys = scores.shape[-2:]
        part = self.buffer[keys - queries : keys, :keys]
        return 1 - part if self.mask == "dropped" else part


@pytest.mark.parametrize("use", [*USES, "filled"])
@pytest.mark.parametrize("mask", ["buffer", "dropped"])
def test_the_last_rows_of_a_mask_are_read_under_symbolic_sizes(mask, use):
    module, backend = Cached(mask, use), Rewriting()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for queries, keys in ((5, 9), (3, 13), (11, 11)):
        query, key, value = (torch.randn(2, 3, size, 8) for size in (queries, keys, keys))
        torch.testing.assert_close(compiled(query, key, value), module(query, key, value), rtol=1e-4, atol=1e-5)
    assert {(match.rewritten, match.mask) for match in backend.report.matches} == {(True, "causal")}, backend.why_not()
    assert len(backend.graphs) <= 2
