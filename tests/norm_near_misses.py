"""Lookalikes of normalised rows that compute something else, or that show an inner value, and so must be left alone.

Each stands one edit away from a norm. `x` and `y` are [5, 24, 24]: a row and what it is compared with have equal sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-2


class Lookalike(NamedTuple):
    """A function that must not be rewritten, and a part of the reason ("" where it is no near miss, either)."""

    function: Callable[[Tensor, Tensor, Tensor], Any]
    reason: str = ""


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """`x`, `y` and a weight."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((5, 24, 24), (5, 24, 24), (24,)))  # type: ignore[return-value]


def near_misses() -> dict[str, Lookalike]:
    """Every lookalike by what makes it one; compiled, each must give what it gives in eager mode."""
    return {
        "mean_over_another_dimension": Lookalike(mean_over_another_dimension, "STATISTICS_DIFFER"),
        "mean_square_over_another_dimension": Lookalike(mean_square_over_another_dimension, "STATISTICS_DIFFER"),
        "mean_square_along_the_wrong_axis": Lookalike(mean_square_along_the_wrong_axis, "ROWS_DIFFER"),
        "mean_square_of_another_tensor": Lookalike(mean_square_of_another_tensor),
        "mean_of_another_tensor": Lookalike(mean_of_another_tensor),
        "mean_square_of_a_slice": Lookalike(mean_square_of_a_slice, "ROW_WEIGHTED"),
        "mean_square_of_the_transposed": Lookalike(mean_square_of_the_transposed, "ROWS_DIFFER"),
        "norm_of_order_one": Lookalike(norm_of_order_one, "NOT_OVER_A_ROOT"),
        "norm_of_infinite_order": Lookalike(norm_of_infinite_order, "NOT_OVER_A_ROOT"),
        "normalize_of_order_one": Lookalike(normalize_of_order_one, "NOT_OVER_A_ROOT"),
        "absolute_values_summed": Lookalike(absolute_values_summed, "NOT_OVER_A_ROOT"),
        "sinkhorn_iterations": Lookalike(sinkhorn_iterations, "NOT_OVER_A_ROOT"),
        "sinkhorn_iterations_by_sums": Lookalike(sinkhorn_iterations_by_sums),
        "sinkhorn_iterations_of_logarithms": Lookalike(sinkhorn_iterations_of_logarithms),
        "divided_by_the_largest": Lookalike(divided_by_the_largest, "NOT_OVER_A_ROOT"),
        "quantised_by_the_largest": Lookalike(quantised_by_the_largest),
        "fourth_root_by_a_logarithm": Lookalike(fourth_root_by_a_logarithm, "NOT_OVER_A_ROOT"),
        "squares_weighted": Lookalike(squares_weighted, "ROW_WEIGHTED"),
        "fourth_powers": Lookalike(fourth_powers, "NOT_A_MOMENT"),
        "no_root": Lookalike(no_root),
        "fourth_root": Lookalike(fourth_root, "NOT_OVER_A_ROOT"),
        "epsilon_subtracted": Lookalike(epsilon_subtracted, "NOT_OVER_A_ROOT"),
        "epsilon_of_each_row": Lookalike(epsilon_of_each_row),
        "epsilon_in_a_tensor": Lookalike(
            epsilon_in_a_tensor, "[EPSILON_UNKNOWN] the epsilon beside the root of a mean square comes from "
        ),
        "factor_in_a_tensor": Lookalike(factor_in_a_tensor, "NOT_OVER_A_ROOT"),
        "floor_in_a_tensor": Lookalike(floor_in_a_tensor, "EPSILON_UNKNOWN"),
        "deviation_of_a_row_that_is_not_centred": Lookalike(deviation_of_a_row_that_is_not_centred, "NOT_OVER_A_ROOT"),
        "centred_row_by_its_uncentred_root": Lookalike(centred_row_by_its_uncentred_root, "NOT_OVER_A_ROOT"),
        "mean_subtracted_twice": Lookalike(mean_subtracted_twice, "NOT_OVER_A_ROOT"),
        "clamped_from_above": Lookalike(clamped_from_above, "NOT_OVER_A_ROOT"),
        "floored_below_zero": Lookalike(floored_below_zero, "NOT_OVER_A_ROOT"),
        "softmax_by_hand": Lookalike(softmax_by_hand),
        "batch_norm": Lookalike(batch_norm),
        "group_norm": Lookalike(group_norm),
        "statistics_returned": Lookalike(statistics_returned, "INTERIOR_USED"),
        "row_overwritten_in_between": Lookalike(row_overwritten_in_between, "OPERAND_MUTATED"),
        "row_overwritten_through_a_view": Lookalike(row_overwritten_through_a_view, ""),
        "statistic_overwritten": Lookalike(statistic_overwritten),
        "autocast_entered_in_between": Lookalike(autocast_entered_in_between, "MODE_CHANGES_INSIDE"),
        "statistic_without_gradient": Lookalike(statistic_without_gradient, "MODE_CHANGES_INSIDE"),
    }


def mean_over_another_dimension(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Centred over the rows, divided by the deviation of each row."""
    return (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + EPS) * weight


def mean_square_over_another_dimension(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Two statistics, each over a dimension of its own."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x.pow(2).mean(1, keepdim=True) + EPS)


def mean_square_along_the_wrong_axis(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Without ``keepdim``, the statistic of row ``i`` meets column ``i``."""
    one = x[0]
    return one * torch.rsqrt(one.pow(2).mean(-1) + EPS)


def mean_square_of_another_tensor(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """A row divided by the length of another."""
    return x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * weight


def mean_of_another_tensor(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """A row less the mean of another."""
    return (x - y.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + EPS)


def mean_square_of_a_slice(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Partial RMSNorm: the length of the first elements stands for all."""
    return x * torch.rsqrt(x[..., :6].pow(2).mean(-1, keepdim=True) + EPS) * weight


def mean_square_of_the_transposed(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Row ``i`` divided by the length of column ``i``."""
    return x * torch.rsqrt(x.transpose(-1, -2).pow(2).mean(-1, keepdim=True) + EPS)


def norm_of_order_one(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Divided by a sum of absolute values."""
    return x / x.norm(1, dim=-1, keepdim=True) * weight


def norm_of_infinite_order(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Divided by the largest element."""
    return x / torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True) * weight


def normalize_of_order_one(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Rows that sum to one."""
    return F.normalize(x, p=1.0, dim=-1) * weight


def sinkhorn_iterations(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Rows and columns that are made to sum to one in turns."""
    found = x.exp()
    for _ in range(3):
        found = F.normalize(F.normalize(found, p=1, dim=-1), p=1, dim=-2)
    return found


def sinkhorn_iterations_by_sums(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The same by division."""
    found = x.square() + EPS
    for _ in range(3):
        found = found / found.sum(-1, keepdim=True)
        found = found / (found.sum(-2, keepdim=True) + EPS)
    return found


def sinkhorn_iterations_of_logarithms(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The same in logarithms."""
    for _ in range(3):
        x = x - x.logsumexp(-1, keepdim=True)
        x = x - x.logsumexp(-2, keepdim=True)
    return x.exp()


def divided_by_the_largest(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Divided by the largest of its absolute values."""
    return x / x.abs().amax(-1, keepdim=True) * weight


def quantised_by_the_largest(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The same, to be rounded: no lookalike."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def fourth_root_by_a_logarithm(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Half of the exponent that would make it a norm."""
    return x * torch.exp(-0.25 * torch.log(x.square().mean(-1, keepdim=True) + EPS)) * weight


def absolute_values_summed(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The same by hand."""
    return x / (x.abs().sum(-1, keepdim=True) + EPS)


def squares_weighted(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """A mean of squares that do not count alike."""
    return x * torch.rsqrt((x * x * weight.square()).mean(-1, keepdim=True) + EPS)


def fourth_powers(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Another moment."""
    return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS)


def no_root(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Divided by the mean square itself."""
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS)


def fourth_root(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Divided by the root of the root."""
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt().sqrt()


def epsilon_subtracted(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """An epsilon that makes the root smaller."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 1e-4)


def epsilon_of_each_row(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """An epsilon that is computed."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + y[..., :1].abs())


def epsilon_in_a_tensor(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """An epsilon that is given, as a buffer or a parameter is: each call may bring another one."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + weight[3].square()) * weight


def factor_in_a_tensor(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The epsilon is a number; what the mean square is multiplied by is none."""
    return x * torch.rsqrt(weight[3].square() * x.pow(2).mean(-1, keepdim=True) + 1e-5)


def floor_in_a_tensor(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The same as the least deviation that a row is divided by."""
    return (x - x.mean(-1, keepdim=True)) / torch.maximum(x.std(-1, keepdim=True), weight[3].square())


def deviation_of_a_row_that_is_not_centred(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The mean stays in the row."""
    return x * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + EPS) * weight


def centred_row_by_its_uncentred_root(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The mean stays in the squares."""
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def mean_subtracted_twice(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Twice the mean is subtracted from the row."""
    return (x - 2 * x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + EPS)


def floored_below_zero(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """What is under the root is held to a number that has none."""
    return x / x.pow(2).mean(-1, keepdim=True).clamp(min=-1.0).sqrt()


def clamped_from_above(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """A root that is cut on both sides."""
    return x / x.pow(2).mean(-1, keepdim=True).sqrt().clamp(EPS, 1.0)


def softmax_by_hand(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Exponentials divided by their sum."""
    exponentials = (x - x.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def batch_norm(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Statistics over the batch, by PyTorch."""
    return F.batch_norm(x, None, None, weight, None, training=True)


def group_norm(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Statistics over groups of channels and positions, by PyTorch."""
    return F.group_norm(x, 4, weight)


def statistics_returned(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A norm, and its inverse root."""
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x * inverse * weight, inverse


def row_overwritten_in_between(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The row is another one when it is divided."""
    row = x.clone()
    inverse = torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + EPS)
    row[..., 0] = 1.0
    return row * inverse


def row_overwritten_through_a_view(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The same through an alias."""
    row = x + 1
    part = row[:, :3]
    inverse = torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + EPS)
    part.zero_()
    return row * inverse


def statistic_overwritten(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Some rows keep their length."""
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    inverse[:, 0] = 1.0
    return x * inverse


def autocast_entered_in_between(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The statistic is of one mode, its use of another."""
    square = x.pow(2).mean(-1, keepdim=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x * torch.rsqrt(square + EPS)


def statistic_without_gradient(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The length is a constant to whoever differentiates."""
    with torch.no_grad():
        square = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(square + EPS)
