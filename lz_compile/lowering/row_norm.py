"""Normalisation of rows by a kernel that PyTorch cannot look into: what an adapter needs around the call itself.

Every such kernel is a function of the same parameters (see :func:`fake`), so one fake and one fallback serve all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.ops.norm import NormAttrs, reference

Run: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str], torch.Tensor]


def norm_by(
    operator: Callable[..., torch.Tensor], takes: Callable[..., bool] | None = None
) -> Callable[..., torch.Tensor]:
    """The adapter of a kernel: the op's canonical operands through ``operator``, which takes what :func:`fake` takes.

    ``takes`` has the adapter's parameters, and says of dtypes and numbers what no descriptor can; PyTorch computes the rest.
    """

    def norm(
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        attrs: NormAttrs,
    ) -> torch.Tensor:
        """Normalisation in the op's canonical layout (see ``lowering/ops/norm.py``)."""
        if takes is not None and not takes(input, weight, bias, attrs):
            from lz_compile.lowering.kernels import torch_norm

            return torch_norm.norm(input, weight, bias, attrs=attrs)
        operands = (input.new_empty(0) if each is None else each for each in (weight, bias))
        return operator(input, *operands, encode(attrs))

    return norm


def fake(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str) -> torch.Tensor:
    """An empty result, contiguous. A weight or bias that there is not has no elements; ``attrs`` is the op's, as JSON."""
    return input.new_empty(input.shape, dtype=decoded(attrs).out_dtype)


def fallback(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str) -> torch.Tensor:
    """The same by PyTorch; parameters as in :func:`fake`."""
    form = decoded(attrs)
    return reference(input, *given(weight, bias, form), attrs=form).contiguous()


def decoded(attrs: str) -> NormAttrs:
    """The op's attributes."""
    found: NormAttrs = decode(NormAttrs, attrs)
    return found


def given(
    weight: torch.Tensor, bias: torch.Tensor, attrs: NormAttrs
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weight and bias, None for what there is not."""
    return weight if attrs.has_weight else None, bias if attrs.has_bias else None


def gradients_by(run: Run) -> Callable[..., Any]:
    """The backward of a library's function that autograd can see into: it is called once more, and asked."""

    def gradients(
        gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, attrs: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        form = decoded(attrs)
        operands = (input, weight, bias)
        exists = (True, form.has_weight, form.has_bias)
        wanted = [each.requires_grad_() for each, there_is in zip(operands, exists, strict=True) if there_is]
        found = iter(torch.autograd.grad(run(input, weight, bias, attrs), wanted, gradient))
        of_input, of_weight, of_bias = (
            next(found).contiguous() if there_is else torch.empty_like(each)
            for each, there_is in zip(operands, exists, strict=True)
        )
        return of_input, of_weight, of_bias

    return gradients
