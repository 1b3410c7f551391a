"""A scan as a plain loop: what the operator ``scan`` computes, one step after the other, with PyTorch's own gradients.

Run eagerly, the operator traces its step (and, for gradients, the step's backward) at every call, which costs seconds.
What is left to the operator in the end is run by it once, as compiled code runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop


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


def run_operator(
    step: fx.GraphModule,
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    additional_inputs: Sequence[torch.Tensor | int] = (),
) -> tuple[torch.Tensor, ...]:
    """The same by the operator, out of the graphs that AOTAutograd makes of it and of its backward."""
    operands = [*init, *xs, *additional_inputs]
    handed = [each for each in operands if isinstance(each, torch.Tensor)]

    def scan(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(tensors)
        given = [next(rest) if isinstance(each, torch.Tensor) else each for each in operands]
        end = len(init) + len(xs)
        return tuple(torch.ops.higher_order.scan(step, given[: len(init)], given[len(init) : end], tuple(given[end:])))

    return tuple(aot_function(scan, fw_compiler=nop)(*handed))
