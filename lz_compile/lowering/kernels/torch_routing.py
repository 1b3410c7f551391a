"""A routed adapter by PyTorch's operations, which Inductor fuses: two products instead of four in each direction.

Frozen and trainable factors are joined, so that ``x``, the result and the gradients of both are passed over once.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.ops.routing import RoutingAttrs
from lz_compile.lowering.routing_function import operator
from lz_compile.lowering.routing_steps import PYTORCH

_routing = operator("torch_routing", PYTORCH)


def routing(
    x: torch.Tensor,
    vh: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    a_q: torch.Tensor,
    b_q: torch.Tensor,
    v: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    rollout: torch.Tensor | None = None,
    num_rollouts: int | None = None,
    record: torch.Tensor | None = None,
    *,
    attrs: RoutingAttrs,
) -> torch.Tensor:
    """The adapter in the op's canonical layout (see ``lowering/ops/routing.py``)."""
    return _routing(x, vh, u, delta, a_q, b_q, v, weight, bias, base, gate, rollout, num_rollouts, record, attrs=attrs)
