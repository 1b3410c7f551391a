"""An attention over blocks by the kernel that is chosen for it: a call, or the operator that graphs hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lz_compile.api import eager
from lz_compile.api.arguments import is_plain
from lz_compile.lowering.kernel_operator import call_operator
from lz_compile.lowering.kernels.paged_attention import torch_paged_attention
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs

#: Which dimensions differ from step to step of a server: a kernel is chosen for all up to a power of two.
_IS_LENGTH = {name: [dim in "TNRMQ" for dim in dims.split()] for name, dims in op.SHAPES.items()}


def run(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    """The attention over the op's canonical operands."""
    if not torch.compiler.is_compiling():
        return _selected(x, attrs)
    found: torch.Tensor = _traced(x, attrs.scale, attrs.softcap, attrs.window, attrs.out_dtype)
    return found


def _selected(x: Operands, attrs: PagedAttentionAttrs) -> torch.Tensor:
    if not is_plain(*x.flat()):
        return _bind(x, attrs, is_traced=True)(x)
    names = (attrs, torch.is_grad_enabled(), *[_layout(name, each) for name, each in x.given().items()])
    return eager.bound("paged_attention", names, partial(_bind, x, attrs))(x)


def _layout(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    sizes = [size.bit_length() if wide else size for size, wide in zip(tensor.shape, _IS_LENGTH[name], strict=True)]
    return (name, *sizes, tensor.dtype, tensor.device, tensor.requires_grad)


def _bind(x: Operands, attrs: PagedAttentionAttrs, is_traced: bool = False) -> Callable[[Operands], torch.Tensor]:
    """The attention of operands like these, by the kernel that is chosen for them."""
    told = {"scale": float, "softcap": float, "window": int}  # a kernel is chosen for numbers, which guards fix
    known = {name: kind(getattr(attrs, name)) for name, kind in told.items() if getattr(attrs, name) is not None}
    attrs, facts = eager.problem_of(x, **known, out_dtype=attrs.out_dtype)
    own = partial(_own, attrs)
    if not facts.num_queries or not facts.num_requests:
        return own
    return eager.through_kernel(x, attrs, facts, own, is_traced=is_traced)


def _own(attrs: PagedAttentionAttrs, x: Operands) -> torch.Tensor:
    if x.query.device.type == "cpu" and is_plain(*x.flat()):
        op.check_places(x, attrs)
    if 0 in (x.query.shape[0], x.lengths.shape[0]):
        return torch.zeros_like(op.fake(x, attrs))
    return torch_paged_attention.paged_attention(x, attrs)


def _called(
    x: Operands, scale: float | None, softcap: float | None, window: int | None, out_dtype: torch.dtype
) -> torch.Tensor:
    return _selected(x, PagedAttentionAttrs(scale=scale, softcap=softcap, window=window, out_dtype=out_dtype))


_traced = call_operator(
    "paged_attention", op, _called, scale=float | None, softcap=float | None, window=int | None, out_dtype=torch.dtype
)
