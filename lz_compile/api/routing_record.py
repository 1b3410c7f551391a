"""What backwards through a routed adapter did: cosines, flags and how much reached the kept adapter, rollout by rollout."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lz_compile.api.arguments import Arguments
from lz_compile.errors import ArgumentError
from lz_compile.lowering.ops.routing import COLUMNS


class RoutingRecord:
    """Figures of the last backward of one ``lz.routed_adapter``, on its device; nothing waits for them.

    They come as the gradient of a leaf that a call takes along, so that they come whatever runs the backward: a compiled
    graph, a checkpoint that computes again, several processes. A record holds them and the leaf, no tensor of a step and
    no graph. Every call in a step has a record of its own: two that share one are summed, which shows as NaN.

    Args:
        num_rollouts: of every call; packed rollouts may be fewer, those that have no tokens count zero.
        rank: that of ``delta_S``, for :attr:`gradients` to be kept, too.
        device: that of the calls.
    """

    def __init__(self, num_rollouts: int, rank: int | None = None, *, device: torch.device | str | None = None) -> None:
        given = Arguments("RoutingRecord")
        given.number("num_rollouts", num_rollouts, 0, whole=True)
        given.number("rank", rank, 0, whole=True, optional=True)
        self.num_rollouts, self.rank = num_rollouts, rank
        self._figures: torch.Tensor | None = None
        width = len(COLUMNS) + (rank or 0)
        self._leaf = torch.zeros(num_rollouts, width, device=device, dtype=torch.float32, requires_grad=True)
        self._leaf.register_post_accumulate_grad_hook(_Taker(self))

    def __reduce__(self) -> tuple[Callable[..., RoutingRecord], tuple[Any, ...]]:
        """A copy, as of a module that has one, is an empty record of the same sizes."""
        return partial(RoutingRecord, device=self._leaf.device), (self.num_rollouts, self.rank)

    def leaf(self, num_rollouts: int, rank: int, device: torch.device) -> torch.Tensor:
        """What a call takes along.

        Raises:
            ArgumentError: it is a call of other sizes, or on another device.
        """
        own = (self.num_rollouts, rank if self.rank is None else self.rank)
        if own != (num_rollouts, rank) or self._leaf.device != device:
            raise ArgumentError(
                "routed_adapter",
                "record",
                f"of {num_rollouts} rollouts and rank {rank} on {device}",
                f"one of {self.num_rollouts} and {self.rank} on {self._leaf.device}",
                f"Make lz.RoutingRecord({num_rollouts}, {rank}, device='{device}')",
            )
        return self._leaf

    @property
    def cosines(self) -> torch.Tensor:
        """``[G]``: of a rollout's gradient with the direction; with the arm ``act`` the mean of its tokens' activations'."""
        return self._column("cosine")

    @property
    def flagged(self) -> torch.Tensor:
        """``[G]``: the share of a rollout that was left out; with the arm ``grad`` it is 0 or 1."""
        return self._column("flagged")

    @property
    def norms(self) -> torch.Tensor:
        """``[G]``: of the gradient that a rollout has for ``delta_S``."""
        return self._column("norm")

    @property
    def passed_norms(self) -> torch.Tensor:
        """``[G]``: of what of it reached ``delta_S``."""
        return self._column("passed_norm")

    @property
    def gradients(self) -> torch.Tensor:
        """``[G, R]``: what each rollout has for ``delta_S``, before anything is left out.

        Raises:
            RuntimeError: there was no backward yet, or the record was made without a rank.
        """
        if self.rank is None:
            raise RuntimeError("lz.RoutingRecord: expected a rank, received none. Make it with rank=R for gradients")
        return self._read()[:, len(COLUMNS) :]

    @property
    def is_empty(self) -> bool:
        """Whether there was no backward yet."""
        return self._figures is None

    def leakage(self, unwanted: torch.Tensor) -> torch.Tensor:
        """The share of the unwanted rollouts' gradient, by its norms, that reached ``delta_S``; NaN where there is none.

        This is for people to look at: routing itself knows of no such verdict.

        Shapes:
            unwanted ``[G]``, boolean; the result has no dimensions.
        """
        given = Arguments("RoutingRecord.leakage")
        given.tensor("unwanted", unwanted, "G", "boolean")
        given.broadcasts("unwanted", unwanted, (self.num_rollouts,))
        of_unwanted = unwanted.to(self._leaf.device)
        passed, whole = (torch.where(of_unwanted, each, 0.0).sum() for each in (self.passed_norms, self.norms))
        return passed / whole

    def clear(self) -> None:
        """Forget the last backward."""
        self._figures = None

    def _column(self, name: str) -> torch.Tensor:
        figures = self._read()
        is_one = figures[:, COLUMNS.index("calls")] == 1
        return torch.where(is_one, figures[:, COLUMNS.index(name)], torch.nan)

    def _read(self) -> torch.Tensor:
        if self._figures is None:
            raise RuntimeError(
                "lz.RoutingRecord: expected a backward through its adapter, there was none. Run one first"
            )
        return self._figures


class _Taker:
    """Moves the gradient of a record's leaf into the record, without keeping the record alive."""

    def __init__(self, record: RoutingRecord) -> None:
        self._record = weakref.ref(record)

    def __call__(self, leaf: torch.Tensor) -> None:
        record = self._record()
        if record is not None:
            record._figures = leaf.grad
        leaf.grad = None
