"""Rotary position embedding in Triton (see ``lowering/triton/rope.py``), which is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.fused import SIBLING, Fused
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.rope import RopeAttrs, reference


def rope(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, attrs: RopeAttrs) -> torch.Tensor:
    """Rotary position embedding in the op's canonical layout (see ``lowering/ops/rope.py``), in the input's memory order."""
    result: torch.Tensor = _operator(input, cos, sin, encode(attrs))
    return result


def _rope(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attrs: str) -> torch.Tensor:
    from lz_compile.lowering.triton.rope import turn

    result = _fake(input, cos, sin, attrs)
    turn((input,), cos, sin, decode(RopeAttrs, attrs), (result,))
    return result


def _fake(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attrs: str) -> torch.Tensor:
    return torch.empty_like(input, dtype=decode(RopeAttrs, attrs).out_dtype)


def _fallback(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attrs: str) -> torch.Tensor:
    return _fake(input, cos, sin, attrs).copy_(reference(input, cos, sin, attrs=decode(RopeAttrs, attrs)))


def _gradient(
    gradient: torch.Tensor, input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attrs: str
) -> torch.Tensor:
    """Of the input; the tables have none."""
    from lz_compile.lowering.triton.rope import turn

    result = input.new_empty(input.shape)
    turn((gradient,), cos, sin, decode(RopeAttrs, attrs), (result,), is_back=True)
    return result


_operator = opaque(
    "triton_rope",
    _rope,
    _fake,
    fallback=_fallback,
    backward=_gradient,
    kernel_id="lz.triton_rope",
    is_cuda_graph_safe=True,
)


def rope_pair(
    input: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    fused: Mapping[str, Fused],
    attrs: RopeAttrs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that are turned by the same tables, each in its memory order (see ``lowering/fused.py``)."""
    from lz_compile.lowering.triton.rope import rope_pair

    other = fused[SIBLING].operands["input"]
    result: tuple[torch.Tensor, torch.Tensor] = rope_pair(input, other, cos, sin, encode(attrs))
    return result
