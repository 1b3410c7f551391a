"""Lookalikes of rotary position embedding that compute something else, or that show an inner value, and so must be left alone.

Each stands one edit away from an embedding. `x` and `y` are [3, 4, 12, 12], tokens and features of equal size; `cos` and
`sin` are [12, 12].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Lookalike(NamedTuple):
    """A function that must not be rewritten, and a part of the reason ("" where it is no near miss, either)."""

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Any]
    reason: str = ""


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`x`, `y`, `cos` and `sin`."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4, 12, 12), (3, 4, 12, 12), (12, 12), (12, 12))
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def near_misses() -> dict[str, Lookalike]:
    """Every lookalike by what makes it one; compiled, each must give what it gives in eager mode."""
    return {
        "rotation_of_another_tensor": Lookalike(rotation_of_another_tensor),
        "pairs_of_tokens": Lookalike(pairs_of_tokens),
        "rolled_by_one": Lookalike(rolled_by_one),
        "features_reversed": Lookalike(features_reversed),
        "three_parts": Lookalike(three_parts),
        "halves_of_different_layouts": Lookalike(halves_of_different_layouts),
        "only_the_rotated": Lookalike(only_the_rotated),
        "only_one_half_turned": Lookalike(only_one_half_turned),
        "a_constant_added": Lookalike(a_constant_added),
        "squared": Lookalike(squared),
        "tables_of_the_input": Lookalike(tables_of_the_input),
        "normalised_in_between": Lookalike(normalised_in_between),
        "gate_of_halves": Lookalike(gate_of_halves),
        "numbers_as_tables": Lookalike(numbers_as_tables),
        "joined_again": Lookalike(joined_again),
        "rotated_returned": Lookalike(rotated_returned, "INTERIOR_USED"),
        "product_returned": Lookalike(product_returned, "INTERIOR_USED"),
        "input_overwritten_in_between": Lookalike(input_overwritten_in_between, ""),
        "autocast_entered_in_between": Lookalike(autocast_entered_in_between, "MODE_CHANGES_INSIDE"),
        "kept_part_of_another_tensor": Lookalike(kept_part_of_another_tensor),
    }


def _half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotation_of_another_tensor(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The cosine part of one tensor, the sine part of another."""
    return x * cos + _half(y) * sin


def pairs_of_tokens(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first half of the tokens with the second."""
    first, second = x.chunk(2, -2)
    return x * cos + torch.cat((-second, first), -2) * sin


def rolled_by_one(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every feature with its neighbour: a cycle, no pairs."""
    return x * cos + torch.roll(x, 1, -1) * sin


def features_reversed(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first feature with the last."""
    return x * cos + x.flip(-1) * sin


def three_parts(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A cycle of thirds."""
    first, second, third = x.chunk(3, -1)
    return x * cos + torch.cat((-second, third, first), -1) * sin


def halves_of_different_layouts(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours are rotated, and joined as halves."""
    return x * cos + torch.cat((-x[..., 1::2], x[..., ::2]), -1) * sin


def only_the_rotated(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """No cosine."""
    return _half(x) * sin + 0.0 * y


def only_one_half_turned(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The second of a pair is only scaled."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[..., :6], sin[..., :6]
    return torch.cat((first * cos - second * sin, second * cos), -1)


def a_constant_added(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turned about another point."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[..., :6], sin[..., :6]
    return torch.cat((first * cos - second * sin + sin, second * cos + first * sin + cos), -1)


def squared(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Squares of the rotated."""
    return x * cos + _half(x) ** 2 * sin


def tables_of_the_input(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Angles that depend on what is turned."""
    return x * torch.cos(x) + _half(x) * torch.sin(x)


def normalised_in_between(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotated is normalised first."""
    return x * cos + torch.softmax(_half(x), -1) * sin


def gate_of_halves(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A gated unit."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * second, second * cos[..., :6]), -1)


def numbers_as_tables(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One angle for everything, a number."""
    return x * 0.6 + _half(x) * 0.8


def joined_again(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Taken apart and joined, and nothing else."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1) + y


def rotated_returned(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated is needed, too."""
    rotated = _half(x)
    return x * cos + rotated * sin, rotated


def product_returned(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A product is needed, too."""
    product = x * cos
    return product + _half(x) * sin, product


def input_overwritten_in_between(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotated is of what the input was before."""
    x = x + 1
    rotated = _half(x)
    x.tanh_()
    return x * cos + rotated * sin


def autocast_entered_in_between(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The sum is under another mode than the products."""
    product = x * cos
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return product + _half(x) * sin


def kept_part_of_another_tensor(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What is joined in front is a gate; what is behind is three features, too few for pairs."""
    turned = x[..., 9:]
    return torch.cat((y[..., :9], turned * cos[..., 9:] + turned.roll(1, -1) * sin[..., 9:]), -1)
