"""The routed layer by ``lz.routed_adapter``: gradients are routed in backward, so that there is no gate and nothing to filter."""

from __future__ import annotations

from torch import Tensor

import lz_compile as lz
from models.routed_adapter import Arm, Rollouts, RoutedLinear

ARMS = {Arm.NONE: "none", Arm.ACT: "act", Arm.GRAD_ROLLOUT: "grad"}


class ExactLinear(RoutedLinear):
    """The same layer, with the same parameters."""

    def forward(self, x: Tensor) -> Tensor:
        adapter = (self.vh_RI, self.u_OR, self.delta_s_R, self.a_QI, self.b_OQ)
        return lz.routed_adapter(
            x,
            *adapter,
            v=self.direction_R,
            arm=ARMS[self.arm],
            weight=self.weight_OI,
            bias=self.bias_O,
            **self._units(),
        )

    def _units(self) -> dict[str, object]:
        if self.rollouts is None:
            return {}
        if self.rollouts.ids is None:
            return {"rollouts": (self.rollouts.count, self.rollouts.length)}
        return {"rollouts": self.rollouts.ids.flatten(), "num_rollouts": self.rollouts.count}

    def open(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts

    def filter(self) -> None:
        """It was done in backward."""
