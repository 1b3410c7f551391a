"""Rotary position embedding in Triton (see ``triton_source.py``), which is imported when it is called."""

from __future__ import annotations

import torch

from lz_compile.lowering.encoded_attributes import encode
from lz_compile.lowering.fused import Siblings
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import rope as op
from lz_compile.lowering.ops.rope import Operands, RopeAttrs


def _rope(x: Operands, attrs: RopeAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.rope.triton_source import turn

    result = op.fake(x, attrs)
    turn((x.input,), x.cos, x.sin, attrs, (result,))
    return result


def _gradient(gradient: torch.Tensor, x: Operands, attrs: RopeAttrs) -> dict[str, torch.Tensor | None]:
    """Of the input; the tables have none."""
    from lz_compile.lowering.kernels.rope.triton_source import turn

    result = x.input.new_empty(x.input.shape)
    turn((gradient,), x.cos, x.sin, attrs, (result,), is_back=True)
    return {"input": result}


rope = kernel_operator(
    "triton_rope", op, _rope, backward=_gradient, kernel_id="lz.triton_rope", is_cuda_graph_safe=True
)


def rope_pair(x: Siblings, attrs: RopeAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that are turned by the same tables, each in its memory order (see ``lowering/fused.py``)."""
    from lz_compile.lowering.kernels.rope.triton_source import rope_pair

    result: tuple[torch.Tensor, torch.Tensor] = rope_pair(
        x.own.input, x.other.operands.input, x.own.cos, x.own.sin, encode(attrs)
    )
    return result
