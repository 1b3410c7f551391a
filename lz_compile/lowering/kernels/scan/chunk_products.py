"""What tokens of a chunk see of one another through a diagonal decay, without logarithms and without a division.

Row ``t`` sees column ``s < t`` through the product of the decays in between. A chunk is cut into halves until blocks have one
token; going back up, two neighbours are merged by one product of matrices:

    rows of the second block, times the decays from its start   @   columns of the first one, times the decays to its end

Every factor is itself a product of decays, so that decays of zero, negative ones and tiny ones are exact, and so are their
gradients. The depth is the logarithm of the chunk's length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lz_compile.lowering.kernels.scan.triangles import lower_pairs
from lz_compile.lowering.scan_products import product


@dataclass(frozen=True)
class Rows:
    """Something that reads the state before each of the ``C`` tokens of every chunk.

    Shapes:
        vectors ``[..., C, I, K]``; own ``[..., C, I, J]``, what each token sees of itself (None: nothing).
    """

    vectors: torch.Tensor
    own: torch.Tensor | None = None


@dataclass(frozen=True)
class Seen:
    """What :func:`seen` gives.

    Shapes:
        pairs: for each of the rows ``[..., C * I, C * J]``, lower triangular; rows: their vectors with the decays since the
        chunk's start ``[..., C * I, K]``; columns: those up to its end ``[..., C * J, K]``; total: the product of all of its
        decays ``[..., K | 1]``, None without any.
    """

    pairs: tuple[torch.Tensor, ...]
    rows: tuple[torch.Tensor, ...]
    columns: torch.Tensor
    total: torch.Tensor | None


def seen(decay: torch.Tensor | None, rows: tuple[Rows, ...], columns: torch.Tensor) -> Seen:
    """What rows see of columns ``[..., C, J, K]`` through decays ``[..., C, K | 1]``; ``C`` is a power of two above one.

    Sizes before the last three may broadcast, but where decays have more than one, rows and columns have too.
    """
    if decay is None:
        return _undecayed(rows, columns)
    if decay.shape[-1] != 1 or columns.shape[-1] == 1:
        return _merged(decay, rows, columns)
    one = torch.ones_like(decay).unsqueeze(-1)
    factors = _merged(decay, (Rows(one),), one)
    between = factors.pairs[0].unsqueeze(-1).unsqueeze(-3)  # [..., C, 1, C, 1]
    since_start, to_end = (each.unsqueeze(-2) for each in (factors.rows[0], factors.columns))
    pairs = tuple(_with_own(_earlier(each.vectors, columns) * between, each.own) for each in rows)
    scaled = tuple((each.vectors * since_start).flatten(-3, -2) for each in rows)
    return Seen(pairs, scaled, (columns * to_end).flatten(-3, -2), factors.total)


def _undecayed(rows: tuple[Rows, ...], columns: torch.Tensor) -> Seen:
    pairs = tuple(_with_own(_earlier(each.vectors, columns), each.own) for each in rows)
    return Seen(pairs, tuple(each.vectors.flatten(-3, -2) for each in rows), columns.flatten(-3, -2), None)


def _earlier(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """All products with earlier tokens, ``[..., C, I, C, J]``; zero with others."""
    length = columns.shape[-3]
    products = lower_pairs(rows.flatten(-3, -2), columns.flatten(-3, -2), length)
    found: torch.Tensor = products.unflatten(-1, (length, columns.shape[-2])).unflatten(-3, (length, rows.shape[-2]))
    return found


def _with_own(pairs: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
    """Pairs ``[..., C, I, C, J]`` as a matrix, with what tokens see of themselves on its diagonal."""
    if own is not None:
        same = pairs.new_ones((pairs.shape[-2],), dtype=torch.bool).diag().unsqueeze(-1).unsqueeze(1)
        pairs = torch.where(same, own.unsqueeze(-2), pairs)
    return pairs.flatten(-2, -1).flatten(-3, -2)


def _merged(decay: torch.Tensor, rows: tuple[Rows, ...], columns: torch.Tensor) -> Seen:
    """:func:`seen` by halves. Blocks are the dimension -4 of what has rows, -3 of ``total``."""
    since_start = [each.vectors.unsqueeze(-3) for each in rows]  # [..., blocks, tokens, I, K]
    to_end = columns.unsqueeze(-3)
    total = decay  # [..., blocks, K | 1]
    pairs = [each.own for each in rows]  # [..., blocks, tokens * I, tokens * J]
    while total.shape[-2] > 1:
        factor = total.unsqueeze(-2).unsqueeze(-2)
        before, after = factor[..., 0::2, :, :, :], factor[..., 1::2, :, :, :]
        first_columns, second_columns = to_end[..., 0::2, :, :, :], to_end[..., 1::2, :, :, :]
        seen_columns = first_columns.flatten(-3, -2).transpose(-1, -2)
        for index, each in enumerate(since_start):
            first, second = each[..., 0::2, :, :, :], each[..., 1::2, :, :, :]
            crossing = product(second.flatten(-3, -2), seen_columns)
            pairs[index] = _joined(pairs[index], crossing)
            since_start[index] = _beside(first, second * before)
        to_end = _beside(first_columns * after, second_columns)
        total = total[..., 0::2, :] * total[..., 1::2, :]
    whole = tuple(each.squeeze(-3) for each in pairs if each is not None)
    flat = tuple(each.squeeze(-4).flatten(-3, -2) for each in since_start)
    return Seen(whole, flat, to_end.squeeze(-4).flatten(-3, -2), total.squeeze(-2))


def _joined(own: torch.Tensor | None, crossing: torch.Tensor) -> torch.Tensor:
    """Lower triangular blocks of twice the size: what neighbours see of themselves, and the second of the first."""
    height, width = crossing.shape[-2:]
    if own is None:
        return F.pad(crossing, (0, width, height, 0))
    upper = F.pad(own[..., 0::2, :, :], (0, width))
    second = own[..., 1::2, :, :]
    return torch.cat((upper, torch.cat((crossing, second), -1)), -2)


def _beside(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Blocks of twice as many tokens."""
    return torch.cat((first, second), -3)
