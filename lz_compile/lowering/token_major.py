"""Attention by libraries that put tokens before heads, ``[B, S, H, D]``: into that layout, through an opaque op, and back.

Every such library is a function of the same parameters over that layout (see :func:`fake`), so one fake and one fallback
serve all of them. The result is contiguous, which is how a model that joins its heads reads it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lz_compile.lowering.ops.attention import AttentionAttrs, Band

#: A side of a window without limit, as flash-attn writes it.
NO_LIMIT = -1


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
        slopes: torch.Tensor | None = None,
        attrs: AttentionAttrs,
    ) -> torch.Tensor:
        """Attention in the op's canonical layout (see ``lowering/ops/attention.py``), without masks, sinks and dropout.

        Libraries know windows around a query's own position. PyTorch computes a band beside it.
        """
        unsupported = (mask, bias, fill, sinks)  # a descriptor that claims one of them is our bug
        assert all(operand is None for operand in unsupported), f"{operator} is given a mask, bias, fill or sinks"
        assert attrs.dropout_p == 0, f"{operator} is asked for dropout"
        band = attrs.limits or Band()
        if (band.lower or 0) > 0 or (band.upper or 0) < 0:
            return _by_pytorch(query, key, value, slopes, attrs)
        left = NO_LIMIT if band.lower is None else -band.lower
        right = NO_LIMIT if band.upper is None else band.upper
        tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return operator(*tokens, attrs.scale, attrs.softcap, left, right, band.at_end, slopes).transpose(1, 2)

    return attention


def fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    left: int,
    right: int,
    at_end: bool,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """An empty result.

    ``left`` and ``right`` are how many keys before and after its own position a query sees (:data:`NO_LIMIT`: all).
    Positions are counted from the first query and key, or with ``at_end`` from the last ones.

    Shapes:
        query ``[B, Sq, Hq, D]``, key ``[B, Sk, Hk, D]``, value ``[B, Sk, Hk, E]``, slopes broadcastable to
        ``[B, Hq, 1, 1]``; the result is ``[B, Sq, Hq, E]``.
    """
    batch, queries, heads, _ = query.shape
    return query.new_empty((batch, queries, heads, value.shape[-1]))


def fallback(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    left: int,
    right: int,
    at_end: bool,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """What every library here computes, by PyTorch; parameters and shapes as in :func:`fake`."""
    band = Band(None if left == NO_LIMIT else -left, None if right == NO_LIMIT else right, at_end)
    is_causal = band == Band(upper=0)
    attrs = AttentionAttrs(
        scale=scale,
        is_causal=is_causal,
        band=None if is_causal or band.lower is band.upper is None else band,
        softcap=softcap,
        has_slopes=slopes is not None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return _by_pytorch(query, key, value, slopes, attrs).transpose(1, 2).contiguous()


def _by_pytorch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor | None, attrs: AttentionAttrs
) -> torch.Tensor:
    """Attention in the op's canonical layout."""
    from lz_compile.lowering.kernels import blocked, torch_sdpa

    kernel = torch_sdpa if attrs.softcap is None else blocked
    result: torch.Tensor = kernel.attention(query, key, value, slopes=slopes, attrs=attrs)
    return result


def window_at_end(query: torch.Tensor, key: torch.Tensor, left: int, right: int, at_end: bool) -> tuple[int, int]:
    """The window as these libraries take it, once it is sure that the last query meets the last key."""
    is_anchored = (left, right) != (NO_LIMIT, NO_LIMIT)
    assert at_end or not is_anchored or query.shape[1] == key.shape[1], (
        f"a window over {query.shape[1]} queries and {key.shape[1]} keys is aligned at the end here"
    )
    return left, right


def unit_stride(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, copied where neighbours in the last dimension are not neighbours in memory."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
