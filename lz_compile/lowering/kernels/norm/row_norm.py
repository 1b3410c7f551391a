"""Normalisation of rows by a library that PyTorch cannot look into: what an adapter needs around the call itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lz_compile.lowering.kernel_operator import Kernel, asked, definition, kernel_operator
from lz_compile.lowering.ops import norm as op
from lz_compile.lowering.ops.norm import NormAttrs, Operands


def library_norm(
    name: str,
    run: Callable[[Operands, NormAttrs], torch.Tensor],
    takes: Callable[[Operands, NormAttrs], bool],
    *,
    kernel_id: str,
    has_backward: bool = True,
) -> Kernel:
    """The adapter of a library's function, over the op's operands and attributes.

    Args:
        run: calls the library, for rows that are not empty; its result may have any dtype and strides.
        takes: says of dtypes and numbers what no descriptor can; PyTorch computes the rest.
        kernel_id: under which name it is retired when it fails.
        has_backward: whether autograd can see into the library's function.
    """

    def kernel(x: Operands, attrs: NormAttrs) -> torch.Tensor:
        if x.input.numel() == 0:
            found: torch.Tensor = definition(op)(x, attrs)
            return found
        return run(x, attrs).to(attrs.out_dtype).contiguous()

    backward = asked(op, kernel) if has_backward else None
    operator = kernel_operator(name, op, kernel, backward=backward, kernel_id=kernel_id)

    def norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
        if not takes(x, attrs):
            from lz_compile.lowering.kernels.norm import torch_norm

            return torch_norm.norm(x, attrs)
        found: torch.Tensor = operator(x, attrs)
        return found

    return norm
