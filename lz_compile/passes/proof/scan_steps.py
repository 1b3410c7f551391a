"""A scan as a plain loop: what the operator ``scan`` computes, one step after the other, with PyTorch's own gradients.

Run eagerly, the operator traces its step (and, for gradients, the step's backward) at every call, which costs seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx


def run_steps(
    step: Callable[..., Sequence[torch.Tensor]],
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    additional_inputs: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """The last states, and what the steps give, stacked; the arguments are those of ``torch.ops.higher_order.scan``.

    Shapes:
        ``xs`` have time as their first dimension, of at least one step; the result's stacked tensors too.
    """
    if isinstance(step, fx.GraphModule):
        step = step.forward  # calling the module prints what the graph raises
    carried = tuple(init)
    given: list[tuple[torch.Tensor, ...]] = []
    for slices in zip(*(each.unbind(0) for each in xs), strict=True):
        outputs = tuple(step(*carried, *slices, *additional_inputs))
        carried = outputs[: len(carried)]
        given.append(outputs[len(carried) :])
    return (*carried, *(torch.stack(each) for each in zip(*given, strict=True)))
