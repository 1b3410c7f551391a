"""All states of an affine recurrence ``S' = A S + B`` in logarithmic depth, for any kind of ``A``.

Going up, neighbours are combined into one map, ``(A1 A0, A1 B0 + B1)``. Going down, the state before a pair gives the one
between its two. So only half of the maps are ever combined, and no prefix of maps is kept, only states.

**Source**: Blelloch, Prefix sums and their applications (1990).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from lz_compile.lowering.ops.scan import DROPPED
from lz_compile.lowering.scan_products import product

#: How maps are combined, and how they are applied: by elements for diagonal ones, by products for matrices.
Times = tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]


def _of_two(second: Any, first: Any) -> Any:
    return torch.where((second == DROPPED) | (first == DROPPED), DROPPED, second * first)


def _to_kept(factor: Any, state: Any) -> Any:
    return factor * torch.where(factor == DROPPED, 0.0, state)


diagonal: Times = (operator.mul, operator.mul)
#: Diagonal ones that may drop the state.
dropping: Times = (_of_two, _to_kept)
matrices: Times = (product, product)


def states_before(
    factors: torch.Tensor, summands: torch.Tensor, state: torch.Tensor, by: Times
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before each of ``N`` maps, and the one after the last.

    Shapes:
        factors ``[., ., N, ., .]`` and summands ``[., ., N, K, V]``, which may broadcast over the state ``[B, H, K, V]``; the
        states ``[B, H, N, K, V]`` and ``[B, H, K, V]``.
    """
    combined, times = by
    count = summands.shape[2]
    if count == 1:
        return state.unsqueeze(2), times(factors[:, :, 0], state) + summands[:, :, 0]
    even = count - count % 2
    first, second = (slice(start, even, 2) for start in (0, 1))
    later = factors[:, :, second]
    pairs = combined(later, factors[:, :, first])
    ends = times(later, summands[:, :, first]) + summands[:, :, second]
    before, state = states_before(pairs, ends, state, by)
    between = times(factors[:, :, first], before) + summands[:, :, first]
    states = torch.stack((before, between), 3).flatten(2, 3)
    if even < count:
        states = torch.cat((states, state.unsqueeze(2)), 2)
        state = times(factors[:, :, -1], state) + summands[:, :, -1]
    return states, state
