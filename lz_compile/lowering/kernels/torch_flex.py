"""FlexAttention: PyTorch's generator of fused attention kernels, called as Dynamo would record it.

Softcap, bias and mask become a function of one score, which Inductor compiles into the kernel; nothing of the size of the
scores is ever stored.

Not on CPUs: the template for them (PyTorch 2.13) fails where a mask is computed in the same graph, for it reads only what is
in memory, and where something pointwise follows, for it takes no epilogue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.nn.attention.flex_attention import BlockMask

from lz_compile.lowering.ops.attention import AttentionAttrs

#: One block that is larger than any sequence: no block is ever skipped.
_WHOLE = 1 << 30
#: A finite fill: half of float32's lowest number, for the kernel multiplies scores by log2(e).
_LOWEST = torch.finfo(torch.float32).min / 2
_INDICES = ("score", "batch", "head", "query_index", "key_index")


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
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``), without sinks and dropout.

    FlexAttention gives zero for a row that masks every key with ``-inf``; where the source gives NaN, that is restored.
    """
    assert (fill, sinks) == (None, None), "torch.flex is given fills or sinks"
    assert attrs.dropout_p == 0, "torch.flex is asked for dropout"
    buffers = {name: tensor for name, tensor in (("mask", mask), ("bias", bias)) if tensor is not None}
    score = _score(attrs, {name: tuple(tensor.shape) for name, tensor in buffers.items()})
    score = _function(query, "score_mod", score, (*_INDICES, *buffers))
    outputs = _flex(
        query,
        key,
        value,
        score,
        _whole_block(query),
        query.shape[-1] ** -0.5 if attrs.scale is None else attrs.scale,
        dict(_OPTIONS),
        tuple(buffers.values()),
        (),
    )
    return _restore(outputs[0], query, key, mask, bias, attrs)


def _flex(query: Any, *operands: Any) -> Any:
    """The higher-order operator; it takes no proxies, so its node is made here."""
    operator = torch.ops.higher_order.flex_attention
    if isinstance(query, fx.Proxy):
        return query.tracer.create_proxy("call_function", operator, (query, *operands), {})
    return operator(query, *operands)


def _score(attrs: AttentionAttrs, buffers: Mapping[str, tuple[Any, ...]]) -> Callable[..., Any]:
    """One score after softcap, bias and mask, as a function of its position; ``buffers`` are shapes by name."""

    def score(value: Any, batch: Any, head: Any, query_index: Any, key_index: Any, *tensors: Any) -> Any:
        position = (batch, head, query_index, key_index)
        at = {
            name: tensor[tuple(0 if _is_one(size) else index for size, index in zip(shape, position, strict=True))]
            for (name, shape), tensor in zip(buffers.items(), tensors, strict=True)
        }
        if attrs.softcap is not None:
            value = torch.tanh(value / attrs.softcap) * attrs.softcap
        if "bias" in at:
            value = value + at["bias"]
            if attrs.bias_is_finite:
                value = torch.clamp_min(value, _LOWEST)
        keep = query_index >= key_index if attrs.is_causal else None
        if "mask" in at:
            keep = at["mask"] if keep is None else torch.logical_and(keep, at["mask"])
        fill = _LOWEST if attrs.masked_rows == "mean" else -math.inf
        return value if keep is None else torch.where(keep, value, fill)

    return score


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _keep_all(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
    return batch.new_ones((), dtype=torch.bool)


def _function(query: Any, name: str, function: Callable[..., Any], parameters: tuple[str, ...]) -> Any:
    """A function as the higher-order operator takes it: itself, or the node of a graph where a graph is built."""
    if not isinstance(query, fx.Proxy):
        return function
    tracer: Any = query.tracer  # the builder's
    return tracer.subgraph(name, function, parameters)


@cache
def _block_mask() -> tuple[Any, ...]:
    ones, zeros = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    mask: tuple[Any, ...] = BlockMask.from_kv_blocks(ones, zeros, BLOCK_SIZE=_WHOLE, seq_lengths=(1, 1)).as_tuple()
    return mask


def _whole_block(query: Any) -> tuple[Any, ...]:
    """The block mask of one block that is computed in full, its tensors (of one element each) beside ``query``."""
    *fields, _ = _block_mask()
    made = [
        query.new_full(tuple(field.shape), int(field), dtype=torch.int32) if isinstance(field, torch.Tensor) else field
        for field in fields
    ]
    return (*made, _function(query, "mask_mod", _keep_all, _INDICES[1:]))


#: What ``flex_attention`` passes by default on CUDA.
_OPTIONS: Mapping[str, Any] = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


def _restore(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    attrs: AttentionAttrs,
) -> torch.Tensor:
    """``out`` with NaN in the rows whose every score is ``-inf``, where the source has it there."""
    is_infinite = bias is not None and not attrs.bias_is_finite
    if attrs.masked_rows == "zero" or not (is_infinite or (mask is not None and attrs.masked_rows == "nan")):
        return out
    keep = mask
    if attrs.is_causal:
        causal = query.new_ones((query.shape[2], key.shape[2]), dtype=torch.bool).tril()
        keep = causal if keep is None else torch.logical_and(keep, causal)
    finite = bias > -math.inf if bias is not None and is_infinite else None
    if finite is not None and keep is not None:  # a dropped score has a finite fill, or none
        finite = torch.logical_or(finite, torch.logical_not(keep)) if attrs.masked_rows == "mean" else finite & keep
    alive = keep if finite is None else finite
    assert alive is not None, "rows can only be lost to a mask or a bias"
    return torch.where(alive.any(-1, keepdim=True), out, math.nan)
