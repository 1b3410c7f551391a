"""What dropout drops, as a function of a seed and of a weight's place: whole numbers, which compiled code mixes in vectors.

Inductor's own generator on CPUs (Philox) makes one number after the other, which takes 30 times as long as a softmax.
"""

from __future__ import annotations

from typing import Any

import torch

#: Sixteen random bits decide about a weight.
LEVELS = 2**16
_LOW = LEVELS - 1


def share(dropout_p: float) -> tuple[int, float]:
    """How many of all levels are dropped, and what the other weights are multiplied with."""
    dropped = round(dropout_p * LEVELS)
    return dropped, LEVELS / max(LEVELS - dropped, 1)


def words(like: torch.Tensor, sizes: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random words of each row ``[3, B, H, Sq, 1]`` and of each column ``[3, 1, 1, 1, Sk]`` of scores of some sizes."""
    batch, heads, rows, columns = sizes
    seed = (torch.rand_like(like.new_zeros(4, dtype=torch.float32)) * 2**24).to(torch.int64)
    of_rows = _words(like, batch * heads * rows, seed[0], seed[1]).reshape(3, batch, heads, rows, 1)
    return of_rows, _words(like, columns, seed[2], seed[3]).reshape(3, 1, 1, 1, columns)


def dropped(weights: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Weights ``[B, H, Sq, Sk]`` after dropout: zero, or larger. NaN remain.

    One word of a place is uniform by itself; the product of two others leaves no pattern in blocks of rows and columns.
    No number leaves 32 bits, so that all machines agree on it.
    """
    first, second, third = torch.bitwise_xor(of_rows, of_columns).unbind(0)
    levels, gain = share(dropout_p)
    kept = ((((first * second) >> 8) ^ third) & _LOW) >= levels
    return weights * (kept.to(weights.dtype) * gain)


def _words(like: torch.Tensor, count: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Of so many places: two of sixteen bits around one of fifteen, ``[3, count]``."""
    place = like.new_ones((count,), dtype=torch.int64).cumsum(0)
    one = _mixed(place + first)
    other = _mixed(one ^ second)
    return torch.stack((one & _LOW, one >> 16, other & _LOW)).to(torch.int32)


def _mixed(number: torch.Tensor) -> torch.Tensor:
    """A permutation of numbers of 31 bits; each product has at most 62."""
    for factor in (0x45D9F3B, 0x2C1B3C6D):
        number = ((number ^ (number >> 15)) * factor) & 0x7FFFFFFF
    return number ^ (number >> 16)
