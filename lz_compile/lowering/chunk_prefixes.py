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

from lz_compile.lowering.scan_products import product

#: How maps are combined and applied: by elements for diagonal ones, by products for matrices.
Times = Callable[[Any, Any], Any]
diagonal, matrices = operator.mul, product


def states_before(
    factors: torch.Tensor, summands: torch.Tensor, state: torch.Tensor, times: Times
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before each of ``N`` maps, and the one after the last.

    Shapes:
        factors ``[., ., N, ., .]`` and summands ``[., ., N, K, V]``, which may broadcast over the state ``[B, H, K, V]``; the
        states ``[B, H, N, K, V]`` and ``[B, H, K, V]``.
    """
    count = summands.shape[2]
    if count == 1:
        return state.unsqueeze(2), times(factors[:, :, 0], state) + summands[:, :, 0]
    even = count - count % 2
    first, second = (slice(start, even, 2) for start in (0, 1))
    later = factors[:, :, second]
    pairs = times(later, factors[:, :, first])
    ends = times(later, summands[:, :, first]) + summands[:, :, second]
    before, state = states_before(pairs, ends, state, times)
    between = times(factors[:, :, first], before) + summands[:, :, first]
    states = torch.stack((before, between), 3).flatten(2, 3)
    if even < count:
        states = torch.cat((states, state.unsqueeze(2)), 2)
        state = times(factors[:, :, -1], state) + summands[:, :, -1]
    return states, state
