"""A residual added and the sum normalised, in one launch that gives both: ``norm(input + residual), input + residual``.

The sum is rounded to the input's dtype before it is normalised, as if it had been written and read again. It is all that a
backward needs of both.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import torch

from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.fused import Fused
from lz_compile.lowering.kernels.norm.triton_source import Norm
from lz_compile.lowering.opaque import guarded
from lz_compile.lowering.ops.norm import NormAttrs, Operands, fake, reference

KERNEL_ID = "lz.triton_residual_norm"
Weight: TypeAlias = torch.Tensor | None


def residual_norm(x: Operands, attrs: NormAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum, and the sum in the input's dtype; ``x.input`` is a residual (see ``lowering/fused.py``).

    Shapes:
        input and residual ``[N, D]``, weight and bias ``[D]``; both results ``[N, D]``, contiguous.
    """
    given = cast(Fused, x.input).operands
    result: tuple[torch.Tensor, torch.Tensor] = _operator(
        given["input"], given["residual"], x.weight, x.bias, encode(attrs)
    )
    return result


def _forward(input: torch.Tensor, residual: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weight, bias, attrs = others
    return Norm(input, weight, bias, decode(NormAttrs, attrs)).forward(residual)


def _fallback(input: torch.Tensor, residual: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weight, bias, attrs = others
    total = input + residual
    return reference(Operands(total, weight, bias), decode(NormAttrs, attrs)).contiguous(), total.contiguous()


_run = guarded(KERNEL_ID, _forward, _fallback)


@torch.library.custom_op("layerzero::triton_residual_norm", mutates_args=())
def _operator(
    input: torch.Tensor, residual: torch.Tensor, weight: Weight, bias: Weight, attrs: str
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = _run(input, residual, weight, bias, attrs)
    return result


@torch.library.custom_op("layerzero::triton_residual_norm_backward", mutates_args=())
def _backward(
    of_result: torch.Tensor, of_total: Weight, total: torch.Tensor, weight: Weight, bias: Weight, attrs: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the sum, the weight and the bias, without elements where there is none of these."""
    found, *weights = Norm(total, weight, bias, decode(NormAttrs, attrs)).backward(of_result, of_total)
    of_weight, of_bias = (total.new_empty(0) if each is None else each for each in weights)
    return found, of_weight, of_bias


@_operator.register_fake
def _(input: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return fake(Operands(input), decode(NormAttrs, others[-1])), input.new_empty(input.shape)


@_backward.register_fake
def _(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, _, total, weight, bias, _ = given
    of_weight, of_bias = (total.new_empty(0) if each is None else each.new_empty(each.shape) for each in (weight, bias))
    return total.new_empty(total.shape), of_weight, of_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, weight, bias, ctx.attrs = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight, bias)


def _gradients(ctx: Any, of_result: Weight, of_total: Weight) -> tuple[Any, ...]:
    total, weight, bias = ctx.saved_tensors
    if of_result is None:
        return of_total, of_total, None, None, None
    found, of_weight, of_bias = _backward(of_result, of_total, total, weight, bias, ctx.attrs)
    return found, found, None if weight is None else of_weight, None if bias is None else of_bias, None


_operator.register_autograd(_gradients, setup_context=_keep)
