"""Attention in training whose rows may lose every key: PyTorch's fused backward where it is right, tiles where it is not."""

from __future__ import annotations

import math

import pytest
import torch
from backends import Rewriting, Traced
from torch import Tensor

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernels.attention import fused_training, tiled
from lz_compile.lowering.ops.attention import Operands, reference

LOCK = {"attention": "lz.fused_training"}
LENGTH = 24


def added(query: Tensor, key: Tensor, value: Tensor, kept: Tensor) -> Tensor:
    """As transformers' eager attention masks: the lowest number is added."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() & kept[:, None, None, :]
    scores = scores + torch.zeros_like(keep, dtype=scores.dtype).masked_fill(~keep, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).to(value.dtype) @ value


def filled(query: Tensor, key: Tensor, value: Tensor, kept: Tensor) -> Tensor:
    """The same by ``masked_fill``, which passes no gradient to what it fills."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    drop = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) | ~kept[:, None, None, :]
    return scores.masked_fill(drop, torch.finfo(scores.dtype).min).softmax(-1).to(value.dtype) @ value


def grouped(query: Tensor, key: Tensor, value: Tensor, kept: Tensor) -> Tensor:
    """Heads that share keys, under a fill that float32 keeps some digits of a score beside."""
    key, value = (each[:, ::2].repeat_interleave(2, 1) for each in (key, value))
    scores = query @ key.mT * -0.3
    return (scores + (~kept[:, None, None, :]).to(scores.dtype) * -1e4).softmax(-1) @ value


def beside_a_band(query: Tensor, key: Tensor, value: Tensor, kept: Tensor) -> Tensor:
    """A bias that may hide every key, and causality that is no part of it."""
    scores = query @ key.mT * query.shape[-1] ** -0.5 + (kept[:, None, None, :].to(query.dtype) - 1) * 1e4
    drop = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(drop, -math.inf).softmax(-1) @ value


def given(dtype: torch.dtype, hidden: int) -> tuple[list[Tensor], Tensor]:
    """Query, key and value that want gradients, and the keys that are kept: of one sequence not the first ``hidden``."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn((2, LENGTH, 4, 16), generator=generator).to(dtype).transpose(1, 2) for _ in range(3)]
    kept = torch.ones((2, LENGTH), dtype=torch.bool)
    kept[0, :hidden], kept[1, -5:] = False, False
    return [each.requires_grad_() for each in leaves], kept


def trained(function, leaves, kept):
    out = function(*leaves, kept)
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, weight)


@pytest.mark.filterwarnings("error")  # as of operators that return what they are given
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [0, 7, LENGTH])
@pytest.mark.parametrize("source", [added, filled, grouped, beside_a_band])
def test_a_model_trains_as_eager_whether_rows_lose_every_key_or_not(source, hidden, dtype):
    leaves, kept = given(dtype, hidden)
    backend = Traced(lock=LOCK)
    found = trained(torch.compile(source, backend=backend), leaves, kept)
    assert [match.kernel for match in backend.report.matches] == ["lz.fused_training"], backend.why_not()
    assert not backend.report.events
    exact = trained(source, [each.detach().double().requires_grad_() for each in leaves], kept)
    eager = trained(source, leaves, kept)
    for actual, true, other in zip(found, exact, eager, strict=True):
        error = (other.double() - true).abs().max().item()
        torch.testing.assert_close(actual.double(), true, atol=2 * error + 1e-6, rtol=0)


@pytest.mark.parametrize("is_empty", [False, True])
def test_only_rows_that_are_masked_are_computed_by_tiles(is_empty, monkeypatch):
    asked, gradients = [], tiled.gradients
    monkeypatch.setattr(tiled, "gradients", lambda *given: asked.append(given[1].query.shape[1]) or gradients(*given))
    (query, key, value), kept = given(torch.float32, 7 if is_empty else 0)
    mask = kept[:, None, None, :] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    attrs = AttentionAttrs(has_mask=True, masked_rows="mean")
    fused_training.attention(
        Operands(query, key, value, mask=mask), attrs
    ).sum().backward()  # a gradient without strides
    assert asked == [7] * is_empty
    leaves = [each.detach().double().requires_grad_() for each in (query, key, value)]
    reference(Operands(*leaves, mask=mask), attrs).sum().backward()
    for actual, exact in zip((query, key, value), leaves, strict=True):
        torch.testing.assert_close(actual.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("most", [0.0, 100.0, -1e3, -1e9, -math.inf, math.nan])
def test_gradients_are_right_however_far_from_zero_all_is_that_is_added(most):
    (query, key, value), _ = given(torch.float32, 0)
    bias = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)).expand(1, 1, -1, -1).clone()
    bias[..., 3, :] += most
    attrs = AttentionAttrs(has_bias=True, bias_can_mask=True, bias_is_finite=math.isfinite(most))
    weight = torch.linspace(-1, 1, value.numel()).reshape(value.shape)

    def gradients(call, dtype):
        leaves = [each.detach().to(dtype).requires_grad_() for each in (query, key, value)]
        out = call(Operands(*leaves, bias=bias.to(dtype)), attrs)
        return torch.autograd.grad(out, leaves, weight.to(dtype))

    # A float32 sum of a score and 1e9 has no digits of the score: that is what eager has, too.
    exact = gradients(reference, torch.float32 if most == -1e9 else torch.float64)
    for actual, expected in zip(gradients(fused_training.attention, torch.float32), exact, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), atol=2e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("hidden", [7, LENGTH])
def test_keys_of_nan_that_a_mask_hides_have_gradients_of_zero_as_their_values(hidden):
    """That of a query is a sum of zero times them, and NaN in the source."""
    (query, key, value), kept = given(torch.float32, hidden)
    attrs = AttentionAttrs(has_mask=True, masked_rows="mean", selects_masked=True, masks_keys=True)
    with torch.no_grad():
        key[~kept.unsqueeze(1).expand(key.shape[:3])] = math.nan

    def gradients(call, dtype):
        leaves = [each.detach().to(dtype).requires_grad_() for each in (query, key, value)]
        out = call(Operands(*leaves, mask=kept[:, None, None]), attrs)
        return torch.autograd.grad(out, leaves[1:], torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape))

    exact = gradients(reference, torch.float64)
    for actual, expected in zip(gradients(fused_training.attention, torch.float32), exact, strict=True):
        assert not expected.isnan().any()
        torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


def test_it_is_no_candidate_where_no_row_can_lose_its_keys():
    leaves, kept = given(torch.float32, 0)
    backend = Rewriting(lock=LOCK)
    torch.compile(lambda *each: added(*each, torch.ones_like(kept)), backend=backend)(*leaves)
    told = " ".join(event.message for event in backend.report.events)
    assert "lz.fused_training is for masked_row_gradient" in told
