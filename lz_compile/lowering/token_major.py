"""Attention by libraries that put tokens before heads, ``[B, S, H, D]``: into that layout, through an opaque op, and back.

Every such library is a function of the same six parameters over that layout (see :func:`fake`), so one fake and one
fallback serve all of them. The result is contiguous, which is how a model that joins its heads reads it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lz_compile.lowering.ops.attention import AttentionAttrs


def attention_by(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The adapter of a library: the op's canonical operands through ``operator``, which takes what :func:`fake` takes."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        fill: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        attrs: AttentionAttrs,
    ) -> torch.Tensor:
        """Attention in the op's canonical layout (see ``lowering/ops/attention.py``), without masks, sinks and dropout."""
        unsupported = (mask, bias, fill, sinks)  # a descriptor that claims one of them is our bug
        assert all(operand is None for operand in unsupported), f"{operator} is given a mask, bias, fill or sinks"
        assert attrs.dropout_p == 0, f"{operator} is asked for dropout"
        rows, keys, values = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return operator(rows, keys, values, attrs.scale, attrs.is_causal, attrs.softcap).transpose(1, 2)

    return attention


def fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    is_causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    """An empty result.

    Shapes:
        query ``[B, Sq, Hq, D]``, key ``[B, Sk, Hk, D]``, value ``[B, Sk, Hk, E]``; the result is ``[B, Sq, Hq, E]``.
    """
    batch, queries, heads, _ = query.shape
    return query.new_empty((batch, queries, heads, value.shape[-1]))


def fallback(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    is_causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    """What every library here computes, by PyTorch; shapes as in :func:`fake`."""
    from lz_compile.lowering.kernels import blocked, torch_sdpa

    is_grouped = query.shape[2] != key.shape[2]
    attrs = AttentionAttrs(scale=scale, is_causal=is_causal, softcap=softcap, enable_gqa=is_grouped)
    operands = (tensor.transpose(1, 2) for tensor in (query, key, value))
    kernel = torch_sdpa if softcap is None else blocked
    out: torch.Tensor = kernel.attention(*operands, attrs=attrs)
    return out.transpose(1, 2).contiguous()


def square(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> bool:
    """``is_causal``, once it is sure that the last query meets the last key.

    Our causality starts at the first query and the first key, these libraries' ends at the last ones; the two are the
    same only for equal lengths.
    """
    assert not is_causal or query.shape[1] == key.shape[1], (
        f"causality over {query.shape[1]} queries and {key.shape[1]} keys is aligned at the end here"
    )
    return is_causal


def unit_stride(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, copied where neighbours in the last dimension are not neighbours in memory."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
