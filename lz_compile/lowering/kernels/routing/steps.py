"""The steps that a routed adapter is made of, over tokens in rows: by PyTorch here, by other kernels elsewhere.

Both low-rank products of the two adapters are one: of the projections of ``x`` and of the gradients, ``[N, R + Q]``, the
first ``R`` columns are those of the kept adapter, the other ``Q`` those of the quarantine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lz_compile.lowering.ops.routing import cosine

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class Steps:
    """What a kernel of the op brings; shapes and meaning as those of the functions of this module."""

    project: Callable[[Tensor, Tensor, Tensor], Tensor]
    expand: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None], Tensor]
    cosines: Callable[[Tensor, Tensor], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, int, int], Tensor]
    decide: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def project(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """``rows [N, K] @ [first; second]^T``, ``[N, R + Q]``: one pass over ``rows``.

    Shapes:
        first ``[R, K]``, second ``[Q, K]``, of any strides.
    """
    return rows @ joined(first, second).T


def joined(first: Tensor, second: Tensor) -> Tensor:
    """``[first; second]``, ``[R + Q, M]``, in the order in which they lie in memory: transposing costs more than copying."""
    if first.stride(0) == 1 and second.stride(0) == 1:
        return torch.cat((first.T, second.T), 1).T
    return torch.cat((first, second))


def expand(
    columns: Tensor,
    factors: Tensor,
    place: Tensor | None,
    keep: Tensor | None,
    first: Tensor,
    second: Tensor,
    start: Tensor | None,
) -> Tensor:
    """``start + (columns * factors) @ [first; second]``, ``[N, M]``: one pass over the result.

    Shapes:
        columns ``[N, R + Q]``, of which the first R are multiplied (and are zero where ``keep [N]`` is False); factors
        ``[K, R]``, the row of a token is ``place [N]``, or without it that of its K-th of all tokens; first ``[R, M]``,
        second ``[Q, M]``, start ``[N, M]``.
    """
    rank = first.shape[0]
    if place is None and keep is None and factors.shape[0] == 1:  # for all tokens: the factor is the smaller one
        both, basis = columns, joined((first * factors.T).to(columns.dtype), second)
    else:
        kept = scaled(columns[:, :rank], factors, place, keep)
        both, basis = torch.cat((kept.to(columns.dtype), columns[:, rank:]), 1), joined(first, second)
    return both @ basis if start is None else torch.addmm(start, both, basis)


def scaled(columns: Tensor, factors: Tensor, place: Tensor | None, keep: Tensor | None) -> Tensor:
    """Columns ``[N, R]`` times the factors of :func:`expand`, in their dtype."""
    if place is not None:
        found = columns * factors[place]
    else:
        count = factors.shape[0]
        found = (columns.unflatten(0, (count, -1)) * factors.unsqueeze(1)).flatten(0, 1)
    return found if keep is None else torch.where(keep.unsqueeze(1), found, 0.0)


def cosines(a: Tensor, v: Tensor) -> Tensor:
    """That of every row of ``a [N, R]`` with ``v [R]``, ``[N]`` in the dtype of ``v``."""
    return cosine(a.to(v.dtype), v)


def sums(dk: Tensor, a: Tensor, place: Tensor | None, keep: Tensor | None, count: int, length: int) -> Tensor:
    """What the tokens of every rollout send to ``delta``: sums of ``dk * a``, in float32 or wider.

    Shapes:
        dk and a ``[N, R]``; the result ``[count, R]``, where rollouts are ``length`` tokens long or ``place [N]`` says.
    """
    product = products(dk, a, keep)
    return segments(product, place, count, length)


def products(dk: Tensor, a: Tensor, keep: Tensor | None) -> Tensor:
    """``dk * a`` of tokens that are kept, in float32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    product = dk.to(wide) * a.to(wide)
    return product if keep is None else torch.where(keep.unsqueeze(1), product, 0.0)


def segments(rows: Tensor, place: Tensor | None, count: int, length: int) -> Tensor:
    """Sums ``[count, R]`` of rows ``[N, R]`` by rollout."""
    if place is None:
        return rows.view(count, length, rows.shape[1]).sum(1)
    return rows.new_zeros(count, rows.shape[1]).index_add(0, place, rows)


def decide(g: Tensor, v: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The sum ``[R]`` of the rollouts that are not flagged, NaN where a cosine is, and the cosines ``[G]`` of all.

    Shapes:
        g ``[G, R]``, v ``[R]``.
    """
    found = cosine(g, v)
    of_all = found.unsqueeze(1)
    passed = torch.where(of_all > threshold, 0.0, torch.where(of_all.isnan(), of_all, g))
    return passed.sum(0), found


PYTORCH = Steps(project, expand, cosines, sums, decide)
