"""Products along the tokens of a chunk, in which no token meets a later one: zero times the NaN of a later token is NaN.

Tokens have several rows each. What is not finite is left out of the product of whole matrices, which would multiply it by the
zeros of a triangle, and added to the tokens behind it. So NaN is where it is step by step; where infinities meet factors
that are zero or negative, their kind may differ. Gradients are computed in the same way, from the last token to the first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lz_compile.lowering.scan_products import product


def lower_product(triangle: torch.Tensor, right: torch.Tensor, tokens: int, has_own: bool) -> torch.Tensor:
    """``triangle @ right`` of a lower triangle ``[..., tokens * I, tokens * J]`` of blocks and ``[..., tokens * J, V]``.

    ``has_own``: the blocks of a token and itself are no zeros. Over proxies, it is one operator.
    """
    run: Any = _LowerProduct.apply if isinstance(triangle, torch.Tensor) else torch.ops.layerzero.lower_product.default
    found: torch.Tensor = run(triangle, right, tokens, has_own)
    return found


def lower_pairs(rows: torch.Tensor, columns: torch.Tensor, tokens: int) -> torch.Tensor:
    """``rows @ columns^T`` of ``[..., tokens * I, K]`` and ``[..., tokens * J, K]``; zero but with earlier tokens."""
    run: Any = _LowerPairs.apply if isinstance(rows, torch.Tensor) else torch.ops.layerzero.lower_pairs.default
    found: torch.Tensor = run(rows, columns, tokens)
    return found


def _passed(triangle: torch.Tensor, right: torch.Tensor, tokens: int, *, has_own: bool, back: bool) -> torch.Tensor:
    """The product, where what is not finite passes on to later tokens; ``back``: to earlier ones, of an upper triangle."""
    is_finite = right.isfinite()
    found = product(triangle, torch.where(is_finite, right, 0.0))
    wild = torch.where(is_finite, 0.0, right).unflatten(-2, (tokens, -1)).sum(-2)
    wild = (wild.flip(-2) if back else wild).cumsum(-2)
    if not has_own:
        wild = F.pad(wild, (0, 0, 1, 0))[..., :-1, :]
    wild = (wild.flip(-2) if back else wild).unsqueeze(-2)
    result: torch.Tensor = (found.unflatten(-2, (tokens, -1)) + wild).flatten(-3, -2)
    return result


def _earlier(products: torch.Tensor, tokens: int) -> torch.Tensor:
    """Products ``[..., tokens * I, tokens * J]``, zero but for those with earlier tokens."""
    height, width = products.shape[-2] // tokens, products.shape[-1] // tokens
    lower = products.new_ones((tokens, tokens), dtype=torch.bool).tril(-1)
    blocks = lower.unsqueeze(-1).unsqueeze(1).expand(tokens, height, tokens, width)
    return torch.where(blocks.reshape(tokens * height, tokens * width), products, 0.0)


class _LowerProduct(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(triangle: torch.Tensor, right: torch.Tensor, tokens: int, has_own: bool) -> torch.Tensor:
        return _passed(triangle, right, tokens, has_own=has_own, back=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del output
        triangle, right, ctx.tokens, ctx.has_own = inputs
        ctx.save_for_backward(triangle, right)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        triangle, right = ctx.saved_tensors
        of_right = _passed(triangle.mT, gradient, ctx.tokens, has_own=ctx.has_own, back=True)
        of_triangle = product(gradient, right.mT)
        return of_triangle.sum_to_size(triangle.shape), of_right.sum_to_size(right.shape), None, None


class _LowerPairs(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows: torch.Tensor, columns: torch.Tensor, tokens: int) -> torch.Tensor:
        return _earlier(product(rows, columns.mT), tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del output
        rows, columns, ctx.tokens = inputs
        ctx.save_for_backward(rows, columns)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, columns = ctx.saved_tensors
        gradient = _earlier(gradient, ctx.tokens)
        of_rows = _passed(gradient, columns, ctx.tokens, has_own=False, back=False)
        of_columns = _passed(gradient.mT, rows, ctx.tokens, has_own=False, back=True)
        return of_rows.sum_to_size(rows.shape), of_columns.sum_to_size(columns.shape), None


_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")
for _function in (lower_product, lower_pairs):
    _schema = _function.__name__ + torch.library.infer_schema(_function, mutates_args=())
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_function.__name__, _function, "CompositeImplicitAutograd")
