"""Attention by a library that PyTorch cannot look into: what an adapter needs around the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernel_operator import Kernel, kernel_operator
from lz_compile.lowering.kernels.attention import token_major
from lz_compile.lowering.kernels.attention.token_major import Operands
from lz_compile.lowering.ops import attention as op

#: A side of a window without limit, as flash-attn writes it.
NO_LIMIT = -1


def library_attention(
    name: str, run: Callable[[Operands, AttentionAttrs], torch.Tensor], *, kernel_id: str
) -> Callable[[op.Operands, AttentionAttrs], torch.Tensor]:
    """The adapter of a library's function, over the op's operands and attributes.

    Args:
        run: calls the library with tokens before heads, without masks, sinks and dropout; its result may have any strides.
        kernel_id: under which name it is retired when it fails.
    """

    def kernel(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
        return run(x, attrs).contiguous()

    operator: Kernel = token_major.through(kernel_operator(name, token_major, kernel, kernel_id=kernel_id))

    def attention(x: op.Operands, attrs: AttentionAttrs) -> torch.Tensor:
        unsupported = (x.mask, x.bias, x.fill, x.sinks)  # a descriptor that claims one of them is our bug
        assert all(operand is None for operand in unsupported), f"{name} is given a mask, bias, fill or sinks"
        assert attrs.dropout_p == 0, f"{name} is asked for dropout"
        band = attrs.limits or Band()
        if (band.lower or 0) > 0 or (band.upper or 0) < 0:  # libraries know windows around a query's own position
            return token_major.by_pytorch(x, attrs)
        found: torch.Tensor = operator(x, attrs)
        return found

    return attention


def window(attrs: AttentionAttrs) -> tuple[int, int]:
    """How many keys before and after its own position a query sees (:data:`NO_LIMIT`: all)."""
    band = attrs.limits or Band()
    return NO_LIMIT if band.lower is None else -band.lower, NO_LIMIT if band.upper is None else band.upper


def window_at_end(x: Operands, attrs: AttentionAttrs) -> tuple[int, int]:
    """The window as most libraries take it, once it is sure that the last query meets the last key."""
    found, queries, keys = window(attrs), x.query.shape[1], x.key.shape[1]
    is_at_end = found == (NO_LIMIT, NO_LIMIT) or (attrs.limits is not None and attrs.limits.at_end)
    assert is_at_end or queries == keys, f"a window over {queries} queries and {keys} keys is aligned at the end here"
    return found


def flash_options(x: Operands, attrs: AttentionAttrs) -> dict[str, Any]:
    """What functions of FlashAttention are told beside their operands."""
    found = window_at_end(x, attrs)
    return {
        "softmax_scale": attrs.scale,
        "causal": found[1] == 0,
        "window_size": found,
        "softcap": attrs.softcap or 0.0,
    }


def unit_stride(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, copied where neighbours in the last dimension are not neighbours in memory."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
