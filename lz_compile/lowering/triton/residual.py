"""A residual added and the sum normalised, in one launch that gives both: ``norm(input + residual), input + residual``.

The sum is rounded to the input's dtype before it is normalised, as if it had been written and read again.
"""

from __future__ import annotations

from typing import Any

import torch

from lz_compile.lowering.ops.norm import EpsAt, NormAttrs
from lz_compile.lowering.triton.norm import Norm


def _norm(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *form: Any) -> Norm:
    is_centred, eps, eps_at, weight_offset = form
    at: EpsAt = eps_at
    attrs = NormAttrs(is_centred, eps, at, weight is not None, bias is not None, weight_offset, out_dtype=input.dtype)
    return Norm(input, weight, bias, attrs)


@torch.library.custom_op("layerzero::triton_residual_norm", mutates_args=())
def residual_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_centred: bool,
    eps: float,
    eps_at: str,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum, and the sum, both in the input's dtype; the other arguments are those of the op's attributes.

    Shapes:
        input and residual ``[N, D]``, weight and bias ``[D]``; both results ``[N, D]``, contiguous.
    """
    return _norm(input, weight, bias, is_centred, eps, eps_at, weight_offset).forward(residual)


@torch.library.custom_op("layerzero::triton_residual_norm_backward", mutates_args=())
def _backward(
    of_result: torch.Tensor,
    of_total: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_centred: bool,
    eps: float,
    eps_at: str,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the sum, the weight and the bias; those that there are not have no elements."""
    norm = _norm(total, weight, bias, is_centred, eps, eps_at, weight_offset)
    found, *weights = norm.backward(of_result, of_total)
    of_weight, of_bias = (total.new_empty(0) if each is None else each for each in weights)
    return found, of_weight, of_bias


@residual_norm.register_fake
def _(input: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape), input.new_empty(input.shape)


@_backward.register_fake
def _(
    of_result: torch.Tensor,
    of_total: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_weight, of_bias = (total.new_empty(0) if each is None else each.new_empty(each.shape) for each in (weight, bias))
    return total.new_empty(total.shape), of_weight, of_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, residual, weight, bias, *ctx.form = inputs
    ctx.residual_dtype = residual.dtype
    ctx.save_for_backward(output[1], weight, bias)


def _gradients(ctx: Any, of_result: torch.Tensor, of_total: torch.Tensor) -> tuple[Any, ...]:
    total, weight, bias = ctx.saved_tensors
    found, of_weight, of_bias = _backward(of_result, of_total, total, weight, bias, *ctx.form)
    of_weights = (None if weight is None else of_weight, None if bias is None else of_bias)
    return found, found.to(ctx.residual_dtype), *of_weights, None, None, None, None


residual_norm.register_autograd(_gradients, setup_context=_keep)
