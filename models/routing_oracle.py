"""Routing by a label, for comparison alone: what routing could do if every unwanted rollout were known.

It is kept apart from ``models/routed_adapter.py``, so that nothing there can read a label.

**Source** *GRPO gradient routing through a quarantine adapter*, the sweep over arms.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from models.routed_adapter import Arm, Rollouts, RoutedLinear, Routing


class LabelledLinear(RoutedLinear):
    """A routed layer whose flags are given."""

    is_unwanted_G: Tensor | None = None

    def flags(self, gradient_DR: Tensor) -> Tensor:
        """The labels that were told.

        Raises:
            ValueError: none were told.
        """
        if self.is_unwanted_G is None:
            raise ValueError("routing by labels: expected the labels of this prompt, got none; call tell() first")
        return self.is_unwanted_G


class OracleRouting(Routing):
    """Routing per rollout by labels; everything else is as in :class:`Routing`."""

    layer_type = LabelledLinear

    def __init__(self, model: nn.Module, names: Sequence[str], *, rank: int, quarantine_rank: int) -> None:
        super().__init__(model, names, rank=rank, quarantine_rank=quarantine_rank, arm=Arm.GRAD_ROLLOUT)

    def tell(self, is_unwanted_G: Tensor) -> None:
        """Which rollouts of the prompt are unwanted."""
        for layer in self.layers.values():
            assert isinstance(layer, LabelledLinear), "an oracle's layers take labels"
            layer.is_unwanted_G = is_unwanted_G

    def begin(self, rollouts: Rollouts) -> None:
        """New gates; labels of the last prompt are forgotten."""
        super().begin(rollouts)
        for layer in self.layers.values():
            assert isinstance(layer, LabelledLinear), "an oracle's layers take labels"
            layer.is_unwanted_G = None
