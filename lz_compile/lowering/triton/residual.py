"""A residual added and the sum normalised, in one launch that gives both: ``norm(input + residual), input + residual``.

The sum is rounded to the input's dtype before it is normalised, as if it had been written and read again. It is all that a
backward needs of both.
"""

from __future__ import annotations

from typing import Any

import torch

from lz_compile.lowering.opaque import guarded
from lz_compile.lowering.ops.norm import reference
from lz_compile.lowering.row_norm import decoded, given
from lz_compile.lowering.triton.norm import Norm

KERNEL_ID = "lz.triton_residual_norm"


def _forward(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str
) -> tuple[torch.Tensor, torch.Tensor]:
    form = decoded(attrs)
    return Norm(input, *given(weight, bias, form), form).forward(residual)


def _fallback(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str
) -> tuple[torch.Tensor, torch.Tensor]:
    form, total = decoded(attrs), input + residual
    return reference(total, *given(weight, bias, form), attrs=form).contiguous(), total.contiguous()


_run = guarded(KERNEL_ID, _forward, _fallback)


@torch.library.custom_op("layerzero::triton_residual_norm", mutates_args=())
def residual_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum, and the sum in the input's dtype.

    Args:
        input: rows.
        residual: what is added to them, in the same dtype.
        weight: as the op has it; without elements where there is none.
        bias: likewise.
        attrs: the op's attributes, as JSON.

    Shapes:
        input and residual ``[N, D]``, weight and bias ``[D]``; both results ``[N, D]``, contiguous.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _run(input, residual, weight, bias, attrs)
    return result


@torch.library.custom_op("layerzero::triton_residual_norm_backward", mutates_args=())
def _backward(
    of_result: torch.Tensor,
    of_total: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    attrs: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the sum, the weight and the bias; ``of_total`` has no elements where none flows through the sum."""
    form = decoded(attrs)
    norm = Norm(total, *given(weight, bias, form), form)
    found, *weights = norm.backward(of_result, of_total if of_total.numel() else None)
    of_weight, of_bias = (
        torch.empty_like(operand) if of_it is None else of_it
        for of_it, operand in zip(weights, (weight, bias), strict=True)
    )
    return found, of_weight, of_bias


@residual_norm.register_fake
def _(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape, dtype=decoded(attrs).out_dtype), input.new_empty(input.shape)


@_backward.register_fake
def _(
    of_result: torch.Tensor,
    of_total: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    attrs: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, weight, bias, ctx.attrs = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight, bias)


def _gradients(ctx: Any, of_result: torch.Tensor | None, of_total: torch.Tensor | None) -> tuple[Any, ...]:
    total, weight, bias = ctx.saved_tensors
    if of_result is None:
        return of_total, of_total, None, None, None
    flows = total.new_empty(0) if of_total is None else of_total
    found, of_weight, of_bias = _backward(of_result, flows, total, weight, bias, ctx.attrs)
    return found, found, of_weight, of_bias, None


residual_norm.register_autograd(_gradients, setup_context=_keep)
