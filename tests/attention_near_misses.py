"""Lookalikes of attention that compute something else, or that show an inner value, and so must be left alone.

Each stands one edit away from an attention. Query, key and value are [b, h, s, d] with 19 queries and 23 keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCALE = 8**-0.5


class Lookalike(NamedTuple):
    """A function that must not be rewritten, arguments for it, and a part of the reason that the refusal gives."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    reason: str


def near_misses() -> dict[str, Lookalike]:
    """Every lookalike by what makes it one; compiled, each must give what it gives in eager mode."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def drawn(keep: tuple[int, ...]) -> Tensor:
        """A mask that keeps at least the first key."""
        mask = torch.rand(keep, generator=generator) < 0.7
        mask[..., 0] = True
        return mask

    qkv = (normal(2, 6, 19, 8), normal(2, 6, 23, 8), normal(2, 6, 23, 10))
    queries_as_keys = (normal(2, 6, 19, 8), normal(2, 6, 23, 8), normal(2, 6, 19, 10))
    masked, other = (*qkv, drawn((2, 1, 1, 23))), drawn((2, 1, 19, 23))
    return {
        "weights_returned": Lookalike(weights_returned, qkv, "INTERIOR_USED"),
        "scores_returned": Lookalike(scores_returned, qkv, "INTERIOR_USED"),
        "weights_cast_and_used": Lookalike(weights_cast_and_used, qkv, "INTERIOR_USED"),
        "softmax_over_queries": Lookalike(softmax_over_queries, qkv, "SOFTMAX_OTHER_AXIS"),
        "softmax_over_heads": Lookalike(softmax_over_heads, qkv, "SOFTMAX_OTHER_AXIS"),
        "output_contracted_over_queries": Lookalike(output_over_queries, queries_as_keys, "SOFTMAX_OTHER_AXIS"),
        "weights_scaled_one_by_one": Lookalike(
            weights_scaled_along_keys, (*qkv, normal(19, 23)), "PROBABILITIES_CHANGED"
        ),
        "weights_masked_after_softmax": Lookalike(weights_masked_after_softmax, (*qkv, other), "PROBABILITIES_CHANGED"),
        "weights_squared": Lookalike(weights_squared, qkv, "PROBABILITIES_CHANGED"),
        "epsilon_in_denominator": Lookalike(epsilon_in_denominator, qkv, "EPSILON_IN_DENOMINATOR"),
        "fill_of_zero": Lookalike(fill_of_zero, masked, "MASK_FILL_NOT_NEGLIGIBLE"),
        "fill_of_a_tensor": Lookalike(
            fill_of_a_tensor, (*masked, torch.tensor(-1e5)), "masked scores are set to fill, which is not known to"
        ),
        "fill_of_minus_five": Lookalike(fill_of_minus_five, masked, "MASK_FILL_NOT_NEGLIGIBLE"),
        "mask_multiplies_scores": Lookalike(mask_multiplies_scores, (*qkv, other), "SCALE_BY_SCORE"),
        "denominator_of_another_mask": Lookalike(denominator_of_another_mask, (*masked, other), "DENOMINATOR"),
        "denominator_without_the_mask": Lookalike(denominator_without_the_mask, masked, "DENOMINATOR_OF_ANOTHER_SUM"),
        "difference_of_heads": Lookalike(difference_of_heads, qkv, "PROBABILITIES_COMBINED"),
        "summed_by_cumsum": Lookalike(summed_by_cumsum, qkv, "the weights hold 1/getitem"),
        "exponentials_not_divided": Lookalike(exponentials_not_divided, qkv, "NOT_NORMALISED"),
        "key_overwritten_in_between": Lookalike(key_overwritten_in_between, qkv, "OPERAND_MUTATED"),
        "scores_overwritten_through_a_view": Lookalike(scores_overwritten_through_a_view, qkv, "SCORES_NOT_READ"),
        "scores_written_in_chunks": Lookalike(scores_written_in_chunks, qkv, "the scores pass through setitem"),
        "scores_written_by_diagonals": Lookalike(
            scores_written_by_diagonals, qkv, "setitem, diagonal, which has no reading"
        ),
        "autocast_entered_in_between": Lookalike(autocast_entered_in_between, qkv, "MODE_CHANGES_INSIDE"),
        "scores_scaled_one_by_one": Lookalike(
            scores_scaled_one_by_one, (*qkv, 0.1 * normal(12, 19, 23)), "SCORES_LARGE"
        ),
        "sigmoid_of_scores": Lookalike(
            sigmoid_of_scores, qkv, "NO_SOFTMAX] the values are weighed by a function of the scores (sigmoid)"
        ),
        "angles_of_scores": Lookalike(angles_of_scores, qkv, "of the scores (tanh, acos)"),
        "softmax_that_may_pick_nothing": Lookalike(softmax_that_may_pick_nothing, qkv, "of the scores (exp, relu)"),
        "squares_of_scores": Lookalike(squares_of_scores, qkv, "of the scores (mul, div)"),
        "scores_through_relu": Lookalike(scores_through_relu, qkv, "SCORES_NOT_AFFINE"),
        "scores_through_a_sine_and_casts": Lookalike(
            scores_through_a_sine_and_casts, qkv, "SCORES_NOT_AFFINE] the scores pass through sin"
        ),
        "real_parts_of_scores": Lookalike(real_parts_of_scores, qkv, "the scores pass through real"),
        "two_softmaxes_subtracted": Lookalike(
            two_softmaxes_subtracted, (*qkv, normal(2, 6, 23, 8)), "PROBABILITIES_COMBINED"
        ),
        "chunks_subtracted": Lookalike(chunks_subtracted, qkv, "PROBABILITIES_COMBINED"),
        "two_softmaxes_multiplied": Lookalike(
            two_softmaxes_multiplied, (*qkv, normal(2, 6, 23, 8)), "PROBABILITIES_CHANGED"
        ),
        "scores_averaged": Lookalike(scores_averaged, qkv, "INTERIOR_USED"),
        "slots_filled_by_the_same_scores": Lookalike(
            slots_filled_by_the_same_scores, qkv, "is made of the scores, and is weighted by what they give"
        ),
        "all_but_the_highest_scores_masked": Lookalike(
            all_but_the_highest_scores_masked, qkv, "is made of the scores, and masks what they give"
        ),
        "entropy_of_the_weights": Lookalike(entropy_of_the_weights, qkv, "INTERIOR_USED"),
        "likeliest_key": Lookalike(likeliest_key, qkv, "PROBABILITIES_NOT_READ"),
        "scores_through_nan_to_num": Lookalike(scores_through_nan_to_num, qkv, "SCORES_NOT_AFFINE"),
    }


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1)) * SCALE


def weights_returned(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention, and its probabilities."""
    weights = _scores(query, key).softmax(-1)
    return weights @ value, weights


def scores_returned(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention, and its scores."""
    scores = _scores(query, key)
    return scores.softmax(-1) @ value, scores


def scores_averaged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The score that a query expects."""
    scores = _scores(query, key)
    return (scores.softmax(-1) * scores).sum(-1) + 0.0 * value.sum()


def slots_filled_by_the_same_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A soft mixture of experts: what the scores weigh is made of averages by the same scores, the other way round."""
    scores = _scores(query, key)
    slots = (scores.softmax(-2).transpose(-1, -2) @ query).unbind(1)
    filled = torch.stack([torch.relu(slot @ value[0, 0, :8] + value[0, 1, 0]) for slot in slots], 1)
    return scores.softmax(-1) @ filled


def weights_cast_and_used(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = _scores(query, key).softmax(-1)
    return weights @ value + weights.double().amax().to(value.dtype)


def all_but_the_highest_scores_masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = _scores(query, key)
    least = scores.topk(5).values[..., -1:]
    return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ value


def entropy_of_the_weights(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Logarithms of the probabilities, averaged."""
    scores = _scores(query, key)
    return (scores.softmax(-1) * scores.log_softmax(-1)).sum(-1) + 0.0 * value.sum()


def likeliest_key(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The value of the key that weighs most, by its weight: a call with two results lies between."""
    weight, place = _scores(query, key).softmax(-1).max(-1)
    chosen = torch.nn.functional.one_hot(place, key.shape[-2]).to(value)
    return torch.einsum("bhqk,bhke,bhq->bhqe", chosen, value, weight)


def softmax_over_queries(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Weights that sum to one over the queries of a key."""
    return _scores(query, key).softmax(-2) @ value


def softmax_over_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Weights that sum to one over the heads."""
    return _scores(query, key).softmax(1) @ value


def output_over_queries(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Weights normalised over the keys, summed with values over the queries: [b, h, k, e]."""
    return torch.einsum("bhqk,bhqe->bhke", _scores(query, key).softmax(-1), value)


def weights_scaled_along_keys(query: Tensor, key: Tensor, value: Tensor, gain: Tensor) -> Tensor:
    """Probabilities times numbers, not normalised again."""
    return (_scores(query, key).softmax(-1) * gain) @ value


def weights_masked_after_softmax(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """Probabilities set to zero at some keys, not normalised again."""
    return _scores(query, key).softmax(-1).masked_fill(~keep, 0.0) @ value


def weights_squared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Squared probabilities, not normalised again."""
    return _scores(query, key).softmax(-1).square() @ value


def epsilon_in_denominator(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Weights that sum to less than one: a constant is added to the denominator."""
    scores = _scores(query, key)
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (powers / (powers.sum(-1, keepdim=True) + 1e-2)) @ value


def fill_of_zero(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """Dropped scores become 0, which weighs as much as an average key."""
    return _scores(query, key).masked_fill(~keep, 0.0).softmax(-1) @ value


def fill_of_a_tensor(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, fill: Tensor) -> Tensor:
    return torch.where(keep, _scores(query, key), fill).softmax(-1) @ value


def fill_of_minus_five(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """Dropped scores become -5, which still has weight."""
    return torch.where(keep, _scores(query, key), -5.0).softmax(-1) @ value


def mask_multiplies_scores(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """Dropped scores become 0 through a product; per query and key, so that the mask is no scale of either."""
    return (_scores(query, key) * keep.float()).softmax(-1) @ value


def denominator_of_another_mask(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, other: Tensor) -> Tensor:
    """Exponentials under one mask, divided by the sum of those under another."""
    scores = _scores(query, key)
    scores = scores - scores.amax(-1, keepdim=True)
    above, below = scores.masked_fill(~keep, -torch.inf).exp(), scores.masked_fill(~other, -torch.inf).exp()
    return (above / below.sum(-1, keepdim=True)) @ value


def denominator_without_the_mask(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """Masked exponentials meet the values, and what divides them is the sum of all."""
    weights = _scores(query, key).exp()
    return (weights * keep) @ value / weights.sum(-1, keepdim=True)


def difference_of_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Differential attention: the factor is a difference of exponentials, which are none of scores."""
    weights = _scores(query, key).softmax(-1).unflatten(1, (3, 2))
    factor = (value[0, 0, 0] * value[0, 0, 1]).sum().exp() - (value[0, 0, 0] * value[0, 0, 2]).sum().exp()
    return (weights[:, :, 0] - factor * weights[:, :, 1]) @ value[:, :3]


def summed_by_cumsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = _scores(query, key).exp()
    return (weights / weights.cumsum(-1)[..., -1:]) @ value


def exponentials_not_divided(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Exponential weights without normalisation."""
    scores = _scores(query, key)
    return (scores - scores.amax(-1, keepdim=True)).exp() @ value


def key_overwritten_in_between(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention whose key is doubled in place after the scores were taken; a kernel at the end would see it doubled."""
    scores = _scores(query, key)
    key.mul_(2.0)
    return scores.softmax(-1) @ value


def scores_overwritten_through_a_view(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The scores of the first key are overwritten through a view before the softmax."""
    scores = _scores(query, key)
    scores[..., 0].fill_(1.0)
    return scores.softmax(-1) @ value


def scores_written_in_chunks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each chunk of three queries sees its own keys and those before; both kinds of scores are written to one memory."""
    query, key, value = (x[:, :, :18].unflatten(2, (6, 3)) for x in (query, key, value))
    scores = query.new_zeros(*query.shape[:-1], 6)
    scores[..., :3] = _scores(query, key)
    scores[:, :, 1:, :, 3:] = _scores(query[:, :, 1:], key[:, :, :-1])
    scores[:, :, 0, :, 3:] = _scores(query[:, :, 0], key[:, :, -1])
    return scores.flatten(0, 1).softmax(-1) @ torch.cat((value, value.roll(1, 2)), 3).flatten(0, 1)


def scores_written_by_diagonals(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each query sees itself and its neighbours, whose scores are diagonals of all of them, written to one memory."""
    product = _scores(query, key[:, :, :19])
    scores = product.new_zeros(*product.shape[:-1], 3)
    scores[..., 1] = product.diagonal(0, -2, -1)
    scores[..., 1:, 0] = product.diagonal(-1, -2, -1)
    scores[..., :-1, 2] = product.diagonal(1, -2, -1)
    windows = torch.nn.functional.pad(value[:, :, :19], (0, 0, 1, 1)).unfold(2, 3, 1)
    return torch.einsum("bhqw,bhqdw->bhqd", scores.softmax(-1), windows)


def autocast_entered_in_between(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scores in float32, output in bfloat16: an autocast region starts between the contractions."""
    weights = _scores(query, key).softmax(-1)
    with torch.autocast(query.device.type, torch.bfloat16):
        return weights @ value


def scores_scaled_one_by_one(q: Tensor, k: Tensor, v: Tensor, scales: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * SCALE
    for scale in scales.unbind(0):
        scores = scores + scores * scale
    return scores.softmax(-1) @ v


def angles_of_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As YOSO weighs values."""
    return (1 - torch.acos((query @ key.mT).tanh()) / torch.pi) ** 9 @ value


def sigmoid_of_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Sigmoid attention."""
    return torch.sigmoid(_scores(query, key) - 3) @ value


def softmax_that_may_pick_nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softpick."""
    scores = _scores(query, key)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp() - (-top).exp()
    return weights.relu() / (weights.abs().sum(-1, keepdim=True) + 1e-6) @ value


def squares_of_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (scores := _scores(query, key)) * scores
    return (weights / weights.sum(-1, keepdim=True)) @ value


def scores_through_a_sine_and_casts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.sin(_scores(query, key)).contiguous().float().softmax(-1) @ value


def real_parts_of_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of complex queries and keys."""
    query, key = (torch.view_as_complex(each.unflatten(-1, (-1, 2))) for each in (query, key))
    return (query @ key.mH).real.softmax(-1) @ value


def scores_through_relu(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The softmax of the positive part of the scores."""
    return torch.relu(_scores(query, key)).softmax(-1) @ value


def two_softmaxes_subtracted(query: Tensor, key: Tensor, value: Tensor, second_key: Tensor) -> Tensor:
    """A difference of two probabilities, one quarter of the second, before the values."""
    return (_scores(query, key).softmax(-1) - 0.25 * _scores(query, second_key).softmax(-1)) @ value


def chunks_subtracted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Differential attention: half of the heads are subtracted from the other half."""
    first, second = _scores(query, key).softmax(-1).chunk(2, 1)
    return (first - 0.25 * second) @ value[:, :3]


def two_softmaxes_multiplied(query: Tensor, key: Tensor, value: Tensor, second_key: Tensor) -> Tensor:
    """A product of two probabilities."""
    return (_scores(query, key).softmax(-1) * _scores(query, second_key).softmax(-1)) @ value


def scores_through_nan_to_num(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """NaN in a score is a zero, before a softmax."""
    return torch.nan_to_num(_scores(query, key)).softmax(-1) @ value
