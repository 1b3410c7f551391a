"""Products of matrices in the dtype of their factors, whatever autocast says: a state is kept in float32 or wider.

Autocast is asked where a product runs or is traced, and again for its gradients: those of compiled graphs are traced under
the modes of the forward pass. On proxies a product is one operator, which is gone once the graph is traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from lz_compile.ground.isolation import is_autocast


def product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``first @ second`` over tensors of at least two dimensions, or over proxies of such."""
    return _run("scan_product", _Product, operator.matmul, first, second)


def outer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left^T @ right``, ``[B, H, K, V]``, where the ranks of either may be one and broadcast."""
    if left.shape[2] == right.shape[2]:
        return product(left.transpose(2, 3), right)
    return (left.unsqueeze(4) * right.unsqueeze(3)).sum(2)


def solved(triangle: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``(I + triangle)^-1 right``, of a strictly lower triangle ``[..., N, N]`` and ``[..., N, V]``, or over proxies."""
    return _run("scan_solved", _Solved, _solution, triangle, right)


def _run(
    name: str,
    uncast: type[torch.autograd.Function],
    plain: Callable[..., torch.Tensor],
    first: torch.Tensor,
    second: torch.Tensor,
) -> torch.Tensor:
    found: torch.Tensor
    if not isinstance(first, torch.Tensor):
        found = getattr(torch.ops.layerzero, name).default(first, second)
    elif is_autocast(first):
        found = uncast.apply(first, second)
    else:
        found = plain(first, second)
    return found


def _solution(triangle: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True)
    return found


class _Product(torch.autograd.Function):
    """A product and its gradients, without autocast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        with torch.autocast(first.device.type, enabled=False):
            return first @ second

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, second = ctx.saved_tensors
        with torch.autocast(first.device.type, enabled=False):
            return (
                (gradient @ second.mT).sum_to_size(first.shape) if ctx.needs_input_grad[0] else None,
                (first.mT @ gradient).sum_to_size(second.shape) if ctx.needs_input_grad[1] else None,
            )


class _Solved(torch.autograd.Function):
    """The solution of a unit triangular system and its gradients, without autocast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(triangle: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        with torch.autocast(right.device.type, enabled=False):
            return _solution(triangle, right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        triangle, right = inputs
        ctx.right_shape = right.shape
        ctx.save_for_backward(triangle, output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        triangle, solution = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            of_right = torch.linalg.solve_triangular(triangle.mT, gradient, upper=True, unitriangular=True)
            of_triangle = None
            if ctx.needs_input_grad[0]:
                of_triangle = -(of_right @ solution.mT).tril(-1).sum_to_size(triangle.shape)
            return of_triangle, of_right.sum_to_size(ctx.right_shape) if ctx.needs_input_grad[1] else None


_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")
for _name, _function in (("scan_product", product), ("scan_solved", solved)):
    _LIBRARY.define(_name + torch.library.infer_schema(_function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")
